"""Measures the peak memory of whole batches, by their number of micro-batches.

    python scripts/experiments/memory_table.py
    python scripts/experiments/memory_table.py --models keras --micro_batches 2 4 8 16

Trains each model on batches of one size: with the plain Estimator, or the plain model of
Keras, and unchanged inside `microbatch_model_fn` or `microbatch`. Each run has its own
process. Models of feature columns, texts and lists are those of share_table.py. Memory is
the peak of the model: all tensors that are alive at the same time, variables included, as
TensorFlow's best-fit allocator counts them. Prints a Markdown table [MB].
"""

import argparse
import os
import pathlib
import sys
import tempfile

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from estimator_accum.programs.command_line import OneSentenceParser, exit_code_of
from scripts.benchmarks.base import run_script, started

# The best-fit allocator counts the bytes of tensors; oneDNN would have one of its own.
_COUNTED = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_ENABLE_ONEDNN_OPTS": "0"}
_UPDATES = 2  # the sums of one are still in memory in the next
_DEFAULT = [1, 4, 16]
_WORDS, _ONE_IN = 30_522, 7  # of which one is masked
_MODELS = {  # name: (row of the table, examples of a batch, shape of an example)
    "conv": ("convolutional net, batches of 1,024", 1024, [28, 28, 1]),
    "dense": ("perceptron of 24 layers, batches of 8,192", 8192, [256]),
    "columns": (
        "perceptron of 8 layers behind feature columns, batches of 8,192",
        8192,
        None,
    ),
    "words": (
        "masked language model, 30,522 words, batches of 256",
        256,
        None,
    ),
    "residual": ("residual net, batches of 256", 256, [28, 28, 1]),
    "residual-apart": (
        'the same, `batch_norm="micro_batch"`',
        256,
        [28, 28, 1],
    ),
    "keras": ("convolutional net of Keras, batches of 512", 512, None),
}
_OF_SHARE_TABLE = {  # examples of a batch
    **dict.fromkeys(("DNNClassifier", "LinearClassifier"), 8192),
    **dict.fromkeys(("DNNLinearCombinedClassifier", "DeepFM", "two towers"), 8192),
    **dict.fromkeys(("wide and deep of the census", "listwise ranking"), 8192),
    "tagger with a CRF": 4096,
    "BERT": 256,
}
_MODELS |= {
    model: (f"{model}, batches of {number:,}", number, None)
    for model, number in _OF_SHARE_TABLE.items()
}


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    models = list(_MODELS)
    add = parser.add_argument
    add("--models", nargs="+", choices=models, default=models, help="default: all")
    counts = f"default: {' '.join(map(str, _DEFAULT))}"
    add("--micro_batches", nargs="+", type=int, default=_DEFAULT, help=counts)
    add("--child", type=int, help=argparse.SUPPRESS)  # the number of one process
    flags = parser.parse_args(arguments)
    if flags.child is not None:
        print(_measure(flags.models[0], flags.child))
        return 0
    return exit_code_of(lambda: _print_table(flags.models, flags.micro_batches))


def _print_table(models: list[str], counts: list[int]) -> None:
    print(f"| | plain | {' | '.join(map(str, counts))} |")
    print(f"|{'---|' * (2 + len(counts))}")
    for model in models:
        measure = _keras_mb if model == "keras" else _estimator_mb
        cells = [f"{measure(model, count):,.0f}" for count in (0, *counts)]
        print(f"| {_MODELS[model][0]} | {' | '.join(cells)} |", flush=True)


def _keras_mb(model: str, micro_batches: int) -> float:
    spec = {"model": "convnet", "loss": "one pass", "is_counted": True}
    spec |= {"batch_size": _MODELS[model][1], "micro_batches": max(micro_batches, 1)}
    with started({model: ("keras_batches", spec)}) as contenders:
        return contenders[model].facts["peak_bytes"] / 1e6


def _estimator_mb(model: str, micro_batches: int) -> float:
    flags = [f"--models={model}", f"--child={micro_batches}"]
    said = run_script(["-m", "scripts.experiments.memory_table", *flags])
    return float(said.splitlines()[-1])


def _measure(model: str, micro_batches: int) -> float:
    """Trains a model in micro-batches, 0 for a plain Estimator; returns its peak [MB]."""
    os.environ.update(_COUNTED)  # before TensorFlow's import, which reads them
    import numpy as np
    import tensorflow as tf

    from estimator_accum import microbatch_model_fn
    from estimator_accum.compat import enable_estimator
    from estimator_accum.reports._memory import MODEL, peak_bytes
    from scripts.experiments import share_table

    enable_estimator()
    _, batch_size, shape = _MODELS[model]

    def model_fn(features, labels, mode):
        logits = _logits(tf, share_table, model, features)
        if model == "words":
            labels = _chosen(tf, features, features)
        loss = tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, logits)
        optimizer = tf.compat.v1.train.AdamOptimizer(1e-4)
        step = tf.compat.v1.train.get_global_step()
        train_op = optimizer.minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    labels = np.arange(batch_size) % 2
    if model in _OF_SHARE_TABLE:
        model_fn, features, labels = share_table.MODELS[model](batch_size)
    elif model == "columns":
        features, _ = share_table.people(batch_size)
    elif model == "words":
        features = np.random.default_rng(0).integers(0, _WORDS, [batch_size, 128])
    else:
        random = np.random.default_rng(0)
        features = random.normal(size=[batch_size, *shape]).astype(np.float32)

    def input_fn():
        dataset = tf.data.Dataset.from_tensors((features, labels)).repeat()
        return dataset.rebatch(batch_size)  # of any number of examples

    if micro_batches:
        batch_norm = "micro_batch" if model == "residual-apart" else "batch"
        model_fn = microbatch_model_fn(model_fn, micro_batches, batch_norm=batch_norm)
    with tempfile.TemporaryDirectory() as folder:
        config = tf.estimator.RunConfig(folder, save_summary_steps=None)
        estimator = tf.estimator.Estimator(model_fn, config=config)
        estimator.train(input_fn, steps=_UPDATES)
    return peak_bytes().get(MODEL, 0) / 1e6


def _logits(tf, share_table, model: str, features):
    """Returns the logits of a network whose memory is mostly activations."""
    layers = tf.keras.layers
    hidden = features
    if model.startswith("residual"):
        return layers.Dense(10)(tf.reduce_mean(_residual(layers, features), [1, 2]))
    if model == "columns":
        columns = share_table.deep_columns()
        hidden = tf.compat.v1.feature_column.input_layer(features, columns)
    if model == "words":
        hidden = layers.Dense(128, "tanh")(layers.Embedding(_WORDS, 128)(features))
        return layers.Dense(_WORDS)(_chosen(tf, hidden, features))
    for _ in range(24 if model == "dense" else 8):
        if model == "conv":
            hidden = layers.Conv2D(32, 3, padding="same", activation="relu")(hidden)
        else:
            hidden = layers.Dense(256, activation="relu")(hidden)
    if model == "conv":
        hidden = tf.reduce_mean(hidden, [1, 2])
    return layers.Dense(10)(hidden)


def _chosen(tf, values, words):
    """Returns the values of masked words."""
    return tf.boolean_mask(values, tf.equal(words % _ONE_IN, 0))


def _residual(layers, hidden):
    """Returns images behind four blocks of two convolutions, batch normalized."""

    def convolved(images):
        images = layers.Conv2D(16, 3, padding="same", use_bias=False)(images)
        return layers.BatchNormalization()(images, training=True)

    hidden = layers.ReLU()(convolved(hidden))
    for _ in range(4):
        inner = layers.ReLU()(convolved(hidden))
        hidden = layers.ReLU()(hidden + convolved(inner))
    return hidden


if __name__ == "__main__":
    sys.exit(main())
