"""Networks behind each kind of feature column are split, with the weights of the batch.

    indicator, embedding     of each kind of categorical column
    shared, sequence         embeddings of several columns, and of lists
    a column of its own      declared by per_example, or computed on the whole batch

The features are parsed from texts, as input functions of Estimators do.
"""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.feature_column import feature_column_v2

from estimator_accum import per_example
from tests.helpers.oracles.exactness import assert_exact

v1, fc = tf.compat.v1, tf.feature_column
_BATCH, _JOBS = 7, ["baker", "cook", "judge"]


def _examples() -> list[bytes]:
    """Returns serialized examples, some of them without an entry."""
    random = np.random.default_rng(0)

    def example(i: int) -> bytes:
        number = int(random.integers(0, 4))
        words = [f"w{j}".encode() for j in random.integers(0, 5, number)]
        weights = random.uniform(0.5, 2, number)
        features = {
            "age": [float(20 + 7 * i)],
            "job": [random.choice(_JOBS).encode()],
            "title": [random.choice(_JOBS).encode()],
            "said": [f"w{j}".encode() for j in range((i * 3) % 4)],
            "words": words,
            "weights": [float(weight) for weight in weights],
            "item": [int(random.integers(0, 6))],
            "bought": [int(n) for n in random.integers(0, 6, (i * 3) % 4)],
            "prices": [float(n) for n in random.uniform(0, 1, (i * 3) % 4)],
        }
        kinds = {bytes: "bytes_list", float: "float_list", int: "int64_list"}
        parts = {}
        for name, values in features.items():
            part = tf.train.Feature()
            if values:
                getattr(part, kinds[type(values[0])]).value.extend(values)
            parts[name] = part
        features = tf.train.Features(feature=parts)
        return tf.train.Example(features=features).SerializeToString()

    return [example(i) for i in range(2 * _BATCH)]


def _categorical(folder) -> dict:
    """Returns columns of numbers of classes by their kind."""
    path = folder / "jobs.txt"
    path.write_text("\n".join(_JOBS))
    words = fc.categorical_column_with_hash_bucket("words", 5)
    ages = fc.bucketized_column(fc.numeric_column("age"), [30, 60])
    return {
        "bucketized": ages,
        "vocabulary": fc.categorical_column_with_vocabulary_list("job", _JOBS),
        "file": fc.categorical_column_with_vocabulary_file("title", str(path)),
        "hashed": words,
        "identity": fc.categorical_column_with_identity("bought", 6),
        "weighted": fc.weighted_categorical_column(words, "weights"),
        "crossed": fc.crossed_column([ages, "job"], 7),
        "crossed of words": fc.crossed_column(["words", "job"], 7),
    }


def _dense(folder) -> list:
    parts = [*_categorical(folder).values()]
    combiners = ["sum", "mean", "sqrtn", "mean"] * 2
    embeddings = [
        fc.embedding_column(part, 3, combiner=way, max_norm=0.5 if i % 3 else None)
        for i, (part, way) in enumerate(zip(parts, combiners, strict=True))
    ]
    indicators = [fc.indicator_column(part) for part in parts]
    number = fc.numeric_column("age", normalizer_fn=lambda x: x / 90)
    return [number, *embeddings, *indicators]


def _of_items() -> list:
    names = "item", "bought"
    return [fc.categorical_column_with_identity(name, 6) for name in names]


def _sequences() -> list:
    ids = fc.sequence_categorical_column_with_identity("bought", 6)
    words = fc.sequence_categorical_column_with_hash_bucket("said", 5)
    embeddings = [fc.embedding_column(part, 3) for part in (ids, words)]
    return [
        *embeddings,
        fc.indicator_column(ids),
        fc.sequence_numeric_column("prices"),
    ]


def _input_layer(columns, features):
    return v1.feature_column.input_layer(features, columns)


def _in_parts(columns, features):
    with v1.variable_scope("parts", partitioner=v1.fixed_size_partitioner(2)):
        return _input_layer(columns, features)


def _linear_model(columns, features):
    return v1.feature_column.linear_model(features, columns)


def _dense_features(columns, features):
    return tf.keras.layers.DenseFeatures(columns)(features)


def _sequence_features(columns, features):
    layer = tf.keras.experimental.SequenceFeatures(columns)
    steps, lengths = layer(features)
    mask = tf.sequence_mask(lengths, tf.shape(steps)[1], tf.float32)
    total = tf.reduce_sum(steps * mask[..., None], 1)
    return tf.concat([total, tf.cast(lengths, tf.float32)[:, None]], 1)


_OF_VERSION_1 = {_input_layer, _in_parts, _linear_model}
# Every third one runs on the newest TensorFlow, too.
_LAYERS = {
    "DenseFeatures": (_dense_features, _dense),
    "input_layer": (_input_layer, _dense),
    "linear_model": (_linear_model, lambda folder: [*_categorical(folder).values()]),
    "SequenceFeatures": (_sequence_features, lambda _: _sequences()),
    "shared_embedding_columns": (
        _input_layer,
        lambda _: v1.feature_column.shared_embedding_columns(_of_items(), 3),
    ),
    "shared_embeddings": (
        _dense_features, lambda _: fc.shared_embeddings(_of_items(), 3)
    ),
    "variables of several parts": (
        _in_parts,
        lambda _: [fc.embedding_column(part, 3) for part in _of_items()],
    ),
}  # fmt: skip


def _share(folder, layer, make_columns) -> float:
    """Returns the share of the activations that is computed on the whole batch."""
    with tf.Graph().as_default():
        of_version = v1.feature_column if layer in _OF_VERSION_1 else fc
        spec = of_version.make_parse_example_spec(make_columns(folder))

    def model_fn(features, labels, mode):
        columns = layer(make_columns(folder), features)
        hidden = v1.layers.dense(columns, 50, tf.tanh)
        outputs = v1.layers.dense(hidden, 1)
        loss = v1.losses.mean_squared_error(labels, outputs)
        optimizer = v1.train.GradientDescentOptimizer(0.01)
        train_op = optimizer.minimize(loss, v1.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def input_fn():
        data = tf.data.Dataset.from_tensor_slices(_examples()).batch(_BATCH)

        def parse(texts):
            labels = tf.cast(tf.strings.length(texts), tf.float32)[:, None] / 100
            return tf.io.parse_example(texts, spec), labels

        return data.map(parse)

    return assert_exact(model_fn, input_fn, micro_batches=3)


@pytest.mark.parametrize("name", _LAYERS)
def test_a_network_behind_columns_is_split(name, tmp_path):
    assert _share(tmp_path, *_LAYERS[name]) < 1


def _scale(x):
    return x / 90


class _Scaled(feature_column_v2.DenseColumn):
    """A column of a user's own, computed by Python."""

    def __init__(self, is_declared: bool):
        self.is_declared = is_declared

    name = property(lambda self: "scaled")
    variable_shape = property(lambda self: tf.TensorShape([1]))
    parents = property(lambda self: ["age"])
    _is_v2_column = property(lambda self: True)
    parse_example_spec = property(
        lambda self: {"age": tf.io.FixedLenFeature([1], tf.float32)}
    )

    def transform_feature(self, transformation_cache, state_manager):
        ages = transformation_cache.get("age", state_manager)
        scaled = tf.numpy_function(_scale, [ages], tf.float32, stateful=False)
        scaled.set_shape([None, 1])
        return per_example(scaled) if self.is_declared else scaled

    def get_dense_tensor(self, transformation_cache, state_manager):
        return transformation_cache.get(self, state_manager)

    def get_config(self):
        return {}

    from_config = classmethod(lambda cls, *_: cls())


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_column_of_its_own_is_split_if_it_is_declared(tmp_path, is_declared):
    share = _share(tmp_path, _dense_features, lambda _: [_Scaled(is_declared)])
    assert share < 1 if is_declared else share > 95


def test_tensorflows_graph_optimizer_does_not_fail_a_look_at_lookups(graph_optimizer):
    """It has rows of unique ids read by the ids themselves, unless they are fetched."""
    del graph_optimizer

    def model_fn(features, labels, mode):
        column = fc.embedding_column(fc.categorical_column_with_identity("item", 8), 4)
        hidden = v1.feature_column.input_layer(features, [column])
        logits = v1.layers.dense(hidden, 10)
        loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(
            loss, v1.train.get_global_step()
        )
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def input_fn():
        items = np.random.default_rng(0).integers(0, 8, [32, 1])
        data = tf.data.Dataset.from_tensor_slices(({"item": items}, items[:, 0] % 2))
        return data.repeat().batch(16)

    assert assert_exact(model_fn, input_fn, micro_batches=4, updates=1) < 1
