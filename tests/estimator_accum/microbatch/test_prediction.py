"""Under "auto" predictions are those of the whole batches, in as little memory."""

import json

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import microbatch_model_fn
from tests.helpers.models.little_memory import Memory
from tests.helpers.models.microbatch_runs import Fetch

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
_BATCHES = [range(16), range(16, 32), range(32, 39)]


def _input_fn():
    """Returns numbers from 0 to 38, in batches of 16."""
    return tf.data.Dataset.range(39).batch(16).map(lambda n: {"n": n})


def _predict(make_predictions, folder, input_fn=_input_fn, memory=None, **options):
    """Returns an auto Estimator's predictions of `make_predictions(features)`."""
    memory = memory or Memory(lambda rows: rows <= 4)

    def model_fn(features, mode):
        name = next(iter(features))
        allocated = {name: memory.allocate(features[name])}
        return tf.estimator.EstimatorSpec(
            mode, predictions=make_predictions({**features, **allocated})
        )

    estimator = tf.estimator.Estimator(
        microbatch_model_fn(model_fn, "auto"), str(folder)
    )
    return list(estimator.predict(input_fn, **options))


def _several(features):
    n = features["n"]
    return {
        "number": n,
        "word": tf.strings.as_string(n),
        "is_odd": tf.equal(n % 2, 1),
        "table": tf.cast(n, tf.float32)[:, tf.newaxis, tf.newaxis] + tf.zeros([2, 3]),
    }


def test_each_example_is_predicted_once_and_in_order(tmp_path, caplog):
    memory = Memory(lambda rows: rows <= 5)
    items = _predict(_several, tmp_path / "new", memory=memory)
    assert memory.sizes == [16, 8, *[4] * 8, *[2, 2, 2, 1]]
    assert [row["number"] for row in items] == list(range(39))
    assert [row["word"] for row in items] == [b"%d" % n for n in range(39)]
    assert [row["is_odd"] for row in items] == [n % 2 == 1 for n in range(39)]
    assert all((row["table"] == n).all() for n, row in enumerate(items))
    assert items[0]["table"].shape == (2, 3) and items[0]["is_odd"].dtype == bool
    # The folder of a model that was never trained did not exist.
    path = tmp_path / "new" / "micro_batches-predict.json"
    assert json.loads(path.read_text()) == {"micro_batches": 4}
    assert "1 -> 2: out of memory at batch 1 of the prediction; the" in caplog.text


def test_an_error_that_comes_late_repeats_no_prediction(tmp_path):
    calls = iter(range(100))
    memory = Memory(lambda rows: next(calls) != 1)
    predictions = _predict(lambda features: features["n"], tmp_path, memory=memory)
    assert memory.sizes == [16, 16, 8, 8, 4, 3]
    assert predictions == list(range(39))


def test_whole_batches_are_joined_too(tmp_path):
    batches = _predict(_several, tmp_path, yield_single_examples=False)
    for batch, numbers in zip(batches, _BATCHES, strict=True):
        assert batch["number"].tolist() == list(numbers)
        assert batch["table"].shape == (len(numbers), 2, 3)


def test_what_predict_keys_leaves_out_is_not_computed(tmp_path):
    computed = []

    def make_predictions(features):
        n = features["n"]
        other = tf.numpy_function(lambda n: computed.append(1) or n, [n], tf.int64)
        return {"number": n, "total": tf.reduce_sum(n), "other": other}

    rows = _predict(make_predictions, tmp_path, predict_keys=["number"])
    assert rows == [{"number": n} for n in range(39)]
    assert not computed


def test_a_prediction_that_does_not_need_the_batch_is_as_it_is(tmp_path):
    def make_predictions(features):
        return {"number": features["n"], "classes": tf.constant([b"a", b"b"])}

    batches = _predict(make_predictions, tmp_path, yield_single_examples=False)
    assert [batch["classes"].tolist() for batch in batches] == [[b"a", b"b"]] * 3
    keys = {"predict_keys": ["classes"]}
    batches = _predict(make_predictions, tmp_path, yield_single_examples=False, **keys)
    assert [batch["classes"].tolist() for batch in batches] == [[b"a", b"b"]] * 3


@pytest.mark.parametrize(
    ("reduced", "received"),
    [
        (tf.reduce_sum, r"\['total'\] of shape \[\] for 4 of 16 examples"),
        (lambda n: tf.reduce_sum(n, 0, True), r"\['total'\] of shape \[1\] for 4 of"),
        (lambda n: tf.reshape(n, [-1, 2]), r"\['total'\] of shape \[2, 2\] for 4 of 1"),
    ],
)
def test_a_prediction_of_several_examples_is_refused_where_a_batch_is_cut(
    reduced, received, tmp_path
):
    def make_predictions(features):
        return {"number": features["n"], "total": reduced(features["n"])}

    expected = rf"must have one row per example.*Received: predictions{received}"
    options = {"yield_single_examples": False}
    with pytest.raises(ValueError, match=expected):
        _predict(make_predictions, tmp_path / "cut", **options)
    whole, one = Memory(lambda rows: True), lambda: _input_fn().take(1)
    (batch,) = _predict(make_predictions, tmp_path / "a", one, whole, **options)
    assert batch["total"].sum() == sum(range(16))


def test_a_mean_that_keeps_its_dimension_is_refused_at_one_example_too(tmp_path):
    memory = Memory(lambda rows: rows == 1)
    with pytest.raises(ValueError, match=r"predictions of shape \[1\] for 1 of 16"):
        _predict(lambda f: tf.reduce_sum(f["n"], 0, True), tmp_path, memory=memory)


def test_rows_that_differ_between_micro_batches_are_refused(tmp_path):
    def input_fn():
        rows = tf.ragged.range(tf.range(1, 9))
        return tf.data.Dataset.from_tensors({"n": tf.range(8), "rows": rows})

    def make_predictions(features):
        with tf.control_dependencies([features["n"]]):
            return features["rows"].to_tensor()  # padded to the longest of these rows

    expected = (
        r"rows of one shape.*Received: predictions with rows of \[4\] and \[8\]\."
    )
    with pytest.raises(ValueError, match=expected):
        _predict(make_predictions, tmp_path / "cut", input_fn)
    memory = Memory(lambda rows: True)
    predictions = _predict(make_predictions, tmp_path / "whole", input_fn, memory)
    assert np.shape(predictions) == (8, 8)


def test_what_a_prediction_writes_is_rolled_back(tmp_path):
    calls = iter(range(100))
    memory = Memory(lambda rows: next(calls) not in (1, 5))

    def make_predictions(features):
        """Returns each number and, added to it, how many were predicted before."""
        n, zero = features["n"], v1.zeros_initializer()
        seen = v1.get_variable("seen", [], tf.int64, zero, use_resource=True)
        with tf.control_dependencies([n]):
            before = seen.read_value()
        with tf.control_dependencies([before]):
            after = v1.assign_add(seen, tf.size(n, tf.int64))
        with tf.control_dependencies([after]):
            return n + before

    predictions = _predict(make_predictions, tmp_path, memory=memory)
    assert memory.sizes == [16, 16, 8, 8, 4, 3, 2, 2, 2, 1]
    begins = [0, 16, 24, 32, 34, 36, 38]
    assert predictions == [
        n + max(begin for begin in begins if begin <= n) for n in range(39)
    ]


def test_hooks_of_the_model_get_the_batch(tmp_path):
    sizes = Fetch("size")

    def model_fn(features, mode):
        predictions = features["n"] + 0
        v1.add_to_collection("size", tf.size(predictions + features["n"]))
        spec = tf.estimator.EstimatorSpec(mode, predictions=predictions)
        return spec._replace(prediction_hooks=[sizes])

    (tmp_path / "micro_batches-predict.json").write_text('{"micro_batches": 2}')
    model_fn = microbatch_model_fn(model_fn, "auto")
    rows = list(tf.estimator.Estimator(model_fn, str(tmp_path)).predict(_input_fn))
    assert rows == list(range(39))
    assert sizes.values == [16, 16, 7]
