"""Batches that can be cut into micro-batches, or are refused."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op, microbatch_model_fn
from estimator_accum.microbatch.constants import constant_features

v1 = tf.compat.v1
_Pair = collections.namedtuple("_Pair", ["left", "right"])


def _train(model_fn, input_fn, tmp_path, micro_batches):
    config = tf.estimator.RunConfig(str(tmp_path), save_summary_steps=None)
    model_fn = microbatch_model_fn(model_fn, micro_batches)
    tf.estimator.Estimator(model_fn, config=config).train(input_fn)


class _Seen:
    """A model_fn that records `read(features, labels)` of every micro-batch."""

    def __init__(self, read):
        self.micro_batches = []
        self._read = read

    def __call__(self, features, labels, mode):
        def note(*values):
            self.micro_batches.append(values)
            return np.float32(0)

        noted = tf.numpy_function(note, self._read(features, labels), tf.float32)
        weight = v1.get_variable("weight", initializer=1.0)
        loss = weight * tf.ensure_shape(noted, [])
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        train_op = make_accumulating_train_op(loss, optimizer, 1)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def of(self, i) -> list:
        return [micro_batch[i].tolist() for micro_batch in self.micro_batches]


def test_tensors_in_dicts_and_tuples_are_cut_alike(tmp_path):
    """Numbers and strings are cut; a scalar goes to every micro-batch as it is."""

    def input_fn():
        ids = np.arange(10)
        nested = {"b": (ids * 2, ids * 3), "a": _Pair(ids * 4, ids.astype(str))}
        data = tf.data.Dataset.from_tensor_slices((nested, ids)).batch(7)
        return data.map(lambda parts, ids: ({**parts, "c": tf.constant(0.5)}, ids))

    def read(features, labels):
        (twice, thrice), pair = features["b"], features["a"]
        assert isinstance(pair, _Pair)
        return [twice, thrice, pair.left, pair.right, labels, features["c"]]

    seen = _Seen(read)
    _train(seen, input_fn, tmp_path, 3)
    # ceil(7 / 3) = 3 examples at a time; the last batch has 3, in three micro-batches
    ids = [[0, 1, 2], [3, 4, 5], [6], [7], [8], [9]]
    assert seen.of(4) == ids
    for i, factor in enumerate([2, 3, 4]):
        assert seen.of(i) == [[factor * n for n in part] for part in ids]
    assert seen.of(3) == [[b"%d" % n for n in part] for part in ids]
    assert seen.of(5) == [0.5] * 6


def test_without_labels_a_tensor_loses_its_static_batch_size_alone(tmp_path):
    def input_fn():
        data = tf.data.Dataset.from_tensor_slices(np.zeros([8, 2, 3]))
        return data.batch(4, drop_remainder=True)

    def read(features, labels):
        assert labels is None
        assert features.shape[1:].as_list() == [2, 3]
        return [tf.shape(features)]

    seen = _Seen(read)
    _train(seen, input_fn, tmp_path, 4)
    assert seen.of(0) == [[1, 2, 3]] * 8


def test_sparse_tensors_are_cut_by_their_rows(tmp_path):
    def input_fn():
        sparse = tf.SparseTensor([[0, 1], [2, 0], [2, 2], [4, 1]], [6, 7, 8, 9], [5, 3])
        data = tf.data.Dataset.from_tensors({"s": sparse, "x": tf.range(5)})
        return data.repeat(2)

    def read(features, labels):
        sparse = features["s"]
        assert sparse.dense_shape.shape.as_list() == [2]
        return [sparse.indices, sparse.values, sparse.dense_shape, features["x"]]

    seen = _Seen(read)
    _train(seen, input_fn, tmp_path, 2)
    assert seen.of(0) == 2 * [[[0, 1], [2, 0], [2, 2]], [[1, 1]]]
    assert seen.of(1) == 2 * [[6, 7, 8], [9]]
    assert seen.of(2) == 2 * [[3, 3], [2, 3]]
    assert seen.of(3) == 2 * [[0, 1, 2], [3, 4]]


def test_ragged_tensors_are_cut_by_their_rows(tmp_path):
    rows = [[1], [2, 3], [], [4, 5, 6], [7]]
    deep = [[[1], []], [[2, 3]], [], [[4]], [[5], [6]]]

    def input_fn():
        parts = {"flat": tf.ragged.constant(rows), "deep": tf.ragged.constant(deep)}
        return tf.data.Dataset.from_tensor_slices(parts).batch(5).repeat(2)

    def read(features, labels):
        flat, deep = features["flat"], features["deep"]
        assert isinstance(flat, tf.RaggedTensor) and deep.ragged_rank == 2
        return [flat.values, flat.row_lengths(), deep.flat_values, deep.row_lengths()]

    seen = _Seen(read)
    _train(seen, input_fn, tmp_path, 2)
    assert seen.of(0) == 2 * [[1, 2, 3], [4, 5, 6, 7]]
    assert seen.of(1) == 2 * [[1, 2, 0], [3, 1]]
    assert seen.of(2) == 2 * [[1, 2, 3], [4, 5, 6]]
    assert seen.of(3) == 2 * [[2, 1, 0], [1, 2]]


def _disagreeing():
    batch = {"x": tf.zeros([4, 2]), "vocabulary": tf.zeros([7])}
    return tf.data.Dataset.from_tensors((batch, tf.zeros([4])))


def _of_scalars_alone():
    return tf.data.Dataset.from_tensors({"x": tf.constant(1.0)})


def _with_an_empty_batch():
    data = tf.data.Dataset.from_tensors(tf.range(4))
    return data.concatenate(tf.data.Dataset.from_tensors(tf.range(0)))


def _with_weights_of_four_classes():
    data = tf.data.Dataset.from_tensor_slices(np.arange(8)).batch(4)
    return data.map(lambda x: {"x": x, "classes": tf.constant([1.0, 2, 3, 4])})


def _of_another_kind():
    return {"x": tf.zeros([4]), "what": object()}, None


@pytest.mark.parametrize(
    ("input_fn", "error", "sentence", "trained"),
    [
        (
            _disagreeing,
            ValueError,
            r"same number of examples.*\['vocabulary'\] has 7, .*'x'\] has 4, labels has 4",
            0,
        ),
        (_of_scalars_alone, ValueError, r"Received: scalars only, features\['x'", 0),
        (_with_an_empty_batch, ValueError, r"Received: none at upd.* 2", 2),
        pytest.param(
            _with_weights_of_four_classes,
            ValueError,
            r"no example.*\['classes'\], with 4",
            0,
            id="constant_in_features",
        ),
        (_of_another_kind, TypeError, r"\['what'\] must be a Tensor.* R.*: object", 0),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(
    input_fn, error, sentence, trained, tmp_path
):
    seen = _Seen(lambda features, labels: tf.nest.flatten(features)[:1])
    with pytest.raises(error, match=sentence):
        _train(seen, input_fn, tmp_path, 2)
    assert len(seen.micro_batches) == trained


def test_auto_warns_before_it_trains_of_batches_that_it_cannot_split(tmp_path, caplog):
    seen = _Seen(lambda features, labels: tf.nest.flatten(features)[:1])
    _train(seen, _with_weights_of_four_classes, tmp_path, "auto")
    assert len(seen.micro_batches) == 2  # as memory suffices
    (message,) = (m for m in caplog.messages if "will not be retried" in m)
    assert "no example" in message and "['classes'], with 4" in message


def _examples():
    return tf.data.Dataset.from_tensor_slices((np.zeros([8, 3]), np.arange(8)))


def _mapped(function, data=None, **options):
    data = data or _examples().batch(4, **options)
    return data.map(lambda x, y: ({"x": x, "c": function(x, y)}, y)).prefetch(1)


def _weights(*_):
    return tf.constant([1.0, 2.0, 3.0, 4.0])


def _captured():
    weights = _weights()
    return _mapped(lambda x, y: weights + 1)


def _beside_the_data_set():
    x, y = v1.data.make_one_shot_iterator(_examples().batch(4)).get_next()
    return {"x": x, "c": _weights() * 2}, y


def _zipped():
    weights = tf.data.Dataset.from_tensors(np.ones(4)).repeat()
    data = tf.data.Dataset.zip((_examples().batch(4).shuffle(2), weights))
    return data.map(lambda batch, c: ({"x": batch[0], "c": c}, batch[1]))


def _generated():
    kinds = {"x": tf.TensorSpec([None, 3]), "c": tf.TensorSpec([4])}
    kinds = kinds, tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(lambda: iter(()), output_signature=kinds)


def _all_at_once():
    return tf.data.Dataset.from_tensors(({"x": np.zeros([4, 3])}, np.ones(4))).repeat()


def _of_a_queue():
    return v1.estimator.inputs.numpy_input_fn(
        {"x": np.arange(8)}, np.ones(8), batch_size=4, num_epochs=1, shuffle=False
    )()


_OF_EXAMPLES = {
    "a function of the examples": lambda: _mapped(lambda x, y: y + 1),
    "ones like them": lambda: _mapped(lambda x, y: tf.ones(tf.shape(y))),
    "noise": lambda: _mapped(lambda x, y: tf.random.normal([4])),
    "Python": lambda: _mapped(lambda x, y: tf.numpy_function(np.ones, [4], tf.float64)),
    "static batches": lambda: _mapped(lambda x, y: y, drop_remainder=True),
    "constants of each example": lambda: _mapped(lambda x, y: 1.0, _examples()).batch(
        4
    ),
    "scalars": lambda: _mapped(lambda x, y: tf.constant(0.5)),
    "all at once": _all_at_once,
    "a queue": _of_a_queue,
}
_OF_NONE = {
    "made by a map": lambda: _mapped(_weights),
    "weights of other classes": lambda: _mapped(lambda x, y: tf.range(5.0)),
    "a weight of one class": lambda: _mapped(lambda x, y: tf.constant([1.0])),
    "of static batches": lambda: _mapped(_weights, drop_remainder=True),
    "captured": _captured,
    "beside the data set": _beside_the_data_set,
    "zipped": _zipped,
    "of another length": _generated,
}


def _constants(input_fn) -> list[str]:
    with tf.Graph().as_default():
        data = input_fn()
        if isinstance(data, tf.data.Dataset):
            data = v1.data.make_initializable_iterator(data).get_next()
        return constant_features(dict(zip(("features", "labels"), data, strict=True)))


@pytest.mark.parametrize("name", _OF_EXAMPLES)
def test_features_of_examples_are_known_as_such(name):
    assert _constants(_OF_EXAMPLES[name]) == []


@pytest.mark.parametrize("name", _OF_NONE)
def test_features_that_are_computed_from_no_example_are_found(name):
    assert _constants(_OF_NONE[name]) == ["features['c']"]


def test_a_queue_of_arrays_is_cut_too(tmp_path):
    # A queue adds a summary of its own, of how full it is.
    input_fn = v1.estimator.inputs.numpy_input_fn(
        {"x": np.arange(7)}, batch_size=4, num_epochs=1, shuffle=False
    )
    seen = _Seen(lambda features, labels: [features["x"]])
    _train(seen, input_fn, tmp_path, 2)
    assert seen.of(0) == [[0, 1], [2, 3], [4, 5], [6]]
