"""Measures the share of models' activations that is computed on the whole batch.

    python scripts/experiments/share_table.py
    python scripts/experiments/share_table.py --models=DNNClassifier,DeepFM

Trains each model on the same batches: whole, and in micro-batches by
`microbatch_model_fn`, with the model's own optimizer. Prints a Markdown table with a row
for each model: the share of the activations, in elements of all results that depend on a
variable, and the maximum over all variables of

    max |in micro-batches - whole| / max |whole|

Exit code 1 if a difference is above 2e-5 or a share above 5 %. A loss that compares the
examples may have any share.
"""

import argparse
import logging
import pathlib
import re
import shutil
import sys
import tempfile

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np

from estimator_accum.programs.command_line import OneSentenceParser, exit_code_of
from estimator_accum.programs.program import quiet_import

with quiet_import(sys.argv[1:]):
    import tensorflow as tf

    from bert_finetune import modeling
    from bert_finetune.bert_config import BertConfig
    from estimator_accum import microbatch_model_fn
    from estimator_accum.compat import enable_estimator
    from scripts.experiments import census

    enable_estimator()
    from estimator_accum.compat.v1 import _crf as crf  # whose base class Keras 3 lacks

v1, columns = tf.compat.v1, tf.feature_column
_UPDATES, _BATCH, _MICRO_BATCHES = 5, 32, 4
_ROWS = _UPDATES * _BATCH
_BOUND, _LARGEST_SHARE = 2e-5, 5.0
# Attention's weights do not change when all scores of a query grow by one number.
_HAS_NO_GRADIENT = re.compile("key/bias")
_JOBS, _TOWNS = list("abcdefgh"), 50
# name -> function of a number of rows, which returns (model_fn, features, labels)
MODELS = {}


def _model(name: str):
    def add(function):
        MODELS[name] = function
        return function

    return add


def people(number: int) -> tuple[dict, np.ndarray]:
    """Returns made-up rows with the kinds of columns of the census."""
    random = np.random.default_rng(0)
    features = {
        "age": random.uniform(17, 90, [number, 1]).astype(np.float32),
        "hours": random.uniform(1, 99, [number, 1]).astype(np.float32),
        "job": random.choice(_JOBS, [number, 1]),
        "town": random.choice([f"t{i}" for i in range(_TOWNS)], [number, 2]),
        "weight": random.uniform(0.1, 2, [number, 2]).astype(np.float32),
        "item": random.integers(0, 30, [number, 1]),
        "bought": random.integers(0, 30, [number, 3]),
    }
    return features, random.integers(0, 2, [number, 1])


def _wide() -> list:
    age = columns.bucketized_column(columns.numeric_column("age"), [25, 40, 60])
    job = columns.categorical_column_with_vocabulary_list("job", _JOBS)
    town = columns.categorical_column_with_hash_bucket("town", 40)
    weighted = columns.weighted_categorical_column(town, "weight")
    return [age, job, weighted, columns.crossed_column([age, "job"], 100)]


def deep_columns() -> list:
    """Returns columns of `people` for dense layers, most of them categorical."""
    _, job, weighted, crossed = _wide()
    return [
        columns.numeric_column("age", normalizer_fn=lambda x: x / 90),
        columns.numeric_column("hours", normalizer_fn=lambda x: x / 99),
        columns.indicator_column(job),
        columns.embedding_column(weighted, 8),
        columns.embedding_column(crossed, 8),
    ]


@_model("DNNClassifier")
def _dnn(number: int):
    estimator = tf.estimator.DNNClassifier([64, 64], deep_columns(), optimizer=_adam)
    return estimator.model_fn, *people(number)


@_model("LinearClassifier")
def _linear(number: int):
    estimator = tf.estimator.LinearClassifier(_wide())
    return estimator.model_fn, *people(number)


@_model("DNNLinearCombinedClassifier")
def _wide_and_deep(number: int):
    estimator = tf.estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=_wide(),
        dnn_feature_columns=deep_columns(),
        dnn_hidden_units=[64, 32],
        dnn_optimizer=_adam,
    )
    return estimator.model_fn, *people(number)


@_model("wide and deep of the census")
def _census(number: int):
    estimator = tf.estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=census.wide(),
        dnn_feature_columns=census.deep(),
        dnn_hidden_units=[1024, 512, 256],
        dnn_optimizer=_adam,
    )
    return estimator.model_fn, *census.rows(number)


def _adam():
    if hasattr(tf.keras.optimizers, "legacy"):
        return tf.keras.optimizers.legacy.Adam(0.01)
    return v1.train.AdamOptimizer(0.01)


def _minimized(loss: tf.Tensor, mode: str, rate: float = 0.01):
    train_op = v1.train.AdamOptimizer(rate).minimize(loss, v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


@_model("DeepFM")
def _deep_fm(number: int):
    """First-order terms, products of pairs of embeddings, and a network."""

    def model_fn(features, labels, mode):
        first = v1.feature_column.linear_model(features, _wide())
        fields = v1.feature_column.input_layer(features, deep_columns()[3:])
        fields = tf.reshape(fields, [-1, 2, 8])
        pairs = tf.square(tf.reduce_sum(fields, 1)) - tf.reduce_sum(fields**2, 1)
        hidden = tf.reshape(fields, [-1, 16])
        for _ in range(2):
            hidden = v1.layers.dense(hidden, 64, tf.nn.relu)
        logits = first + tf.reduce_sum(pairs, 1, keepdims=True) / 2
        logits += v1.layers.dense(hidden, 1)
        return _minimized(v1.losses.sigmoid_cross_entropy(labels, logits), mode)

    return model_fn, *people(number)


@_model("two towers")
def _two_towers(number: int):
    def model_fn(features, labels, mode):
        identity = columns.categorical_column_with_identity
        item, bought = v1.feature_column.shared_embedding_columns(
            [identity("item", 30), identity("bought", 30)], 8
        )
        towers = [
            v1.layers.dense(v1.feature_column.input_layer(features, [column]), 32)
            for column in (item, bought)
        ]
        scores = tf.reduce_sum(tf.multiply(*towers), 1, keepdims=True)
        return _minimized(v1.losses.sigmoid_cross_entropy(labels, scores), mode)

    return model_fn, *people(number)


@_model("listwise ranking")
def _ranking(number: int):
    """Scores of lists of items, by tf.nn.softmax over a list, as TF-Ranking."""
    random = np.random.default_rng(1)
    features = {"items": random.normal(size=[number, 6, 10]).astype(np.float32)}
    gains = random.dirichlet(np.ones(6), number).astype(np.float32)

    def model_fn(features, labels, mode):
        hidden = v1.layers.dense(features["items"], 32, tf.nn.relu)
        # A bias of all scores has no gradient: Adam would divide rounding by itself.
        scores = tf.squeeze(v1.layers.dense(hidden, 1, use_bias=False), 2)
        return _minimized(v1.losses.softmax_cross_entropy(labels, scores), mode)

    return model_fn, features, gains


@_model("tagger with a CRF")
def _tagger(number: int):
    random = np.random.default_rng(2)
    features = {
        "ids": random.integers(0, 50, [number, 9]),
        "length": random.integers(1, 10, [number]),
    }
    tags = random.integers(0, 4, [number, 9])

    def model_fn(features, labels, mode):
        table = v1.get_variable("table", [50, 16])
        hidden = v1.layers.dense(tf.nn.embedding_lookup(table, features["ids"]), 32)
        scores = v1.layers.dense(tf.tanh(hidden), 4)
        likelihood, _ = crf.crf_log_likelihood(scores, labels, features["length"])
        return _minimized(-tf.reduce_mean(likelihood), mode)

    return model_fn, features, tags


@_model("BERT")
def _bert(number: int):
    """Two layers of BERT's encoder and its classifier, without dropout."""
    config = BertConfig(1000, 64, 2, 4, 256)
    random = np.random.default_rng(3)
    ids = random.integers(1, 1000, [number, 32], np.int32)
    lengths = random.integers(8, 33, [number, 1])
    mask = (np.arange(32) < lengths).astype(np.int32)
    features = {"ids": ids * mask, "mask": mask, "segments": np.zeros_like(ids)}

    def model_fn(features, labels, mode):
        pooled = modeling.encode(
            config,
            *(features[name] for name in ("ids", "mask", "segments")),
            is_training=False,
            is_packed=False,
        ).pooled
        logits = modeling.classifier_logits(pooled, 2, is_training=False)
        loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
        return _minimized(loss, mode, 1e-4)

    return model_fn, features, random.integers(0, 2, [number])


class _Share(logging.Handler):
    """Keeps the share that a run logs [%]."""

    value = float("nan")

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the share."""
        if isinstance(record.msg, str) and "of the activations" in record.msg:
            self.value = min(record.args[0], 100.0)


def _train(model_fn, folder: str, features: dict, labels: np.ndarray, updates: int):
    """Trains a model in a folder, from its checkpoint; returns the estimator."""

    def input_fn():
        return tf.data.Dataset.from_tensor_slices((features, labels)).batch(_BATCH)

    config = tf.estimator.RunConfig(folder, tf_random_seed=1, save_summary_steps=None)
    return tf.estimator.Estimator(model_fn, config=config).train(
        input_fn, steps=updates
    )


def _weights(estimator) -> dict[str, np.ndarray]:
    names = estimator.get_variable_names()
    return {name: estimator.get_variable_value(name) for name in names}


def _difference(ours: dict, theirs: dict) -> float:
    """Returns the largest relative difference of the variables of both."""
    return max(
        float(np.max(np.abs(ours[name] - value)) / max(np.max(np.abs(value)), 1e-12))
        for name, value in theirs.items()
        if value.dtype.kind == "f" and not _HAS_NO_GRADIENT.search(name)
    )


def measure(name: str) -> tuple[float, float]:
    """Returns the share [%] and the largest relative difference of a model."""
    logger, share = logging.getLogger("tensorflow.estimator_accum"), _Share()
    model_fn, *data = MODELS[name](_ROWS)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = f"{folder}/ours", f"{folder}/theirs"
        _train(model_fn, theirs, *data, 1)  # both begin with the same weights
        shutil.copytree(theirs, ours)
        logger.addHandler(share)
        level = logger.level
        logger.setLevel(logging.DEBUG)
        try:
            divided = microbatch_model_fn(model_fn, _MICRO_BATCHES)
            weights = _weights(_train(divided, ours, *data, _UPDATES))
        finally:
            logger.removeHandler(share)
            logger.setLevel(level)
        plain = _weights(_train(model_fn, theirs, *data, _UPDATES))
    return share.value, _difference(weights, plain)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_argument(
        "--models", help="names of rows, separated by commas (default: all)"
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _compare(flags))


def _compare(flags: argparse.Namespace) -> int:
    """Prints the table; returns 1 if a bound is broken."""
    names = flags.models.split(",") if flags.models else list(MODELS)
    if unknown := [name for name in names if name not in MODELS]:
        raise ValueError(
            f"`--models` must be among {', '.join(MODELS)}. "
            f"Received: {', '.join(unknown)}. Leave it out for all of them."
        )
    print("| model | unsplit activations | difference |\n|---|---|---|")
    is_held = True
    for name in names:
        share, difference = measure(name)
        print(f"| {name} | {share:.1f} % | {difference:.1e} |", flush=True)
        is_held &= share <= _LARGEST_SHARE and difference <= _BOUND
    return 0 if is_held else 1


if __name__ == "__main__":
    sys.exit(main())
