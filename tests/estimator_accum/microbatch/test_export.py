"""An exported graph is the plain model's; an export runs no forward pass."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from estimator_accum import microbatch_model_fn
from tests.helpers.models.little_memory import Memory
from tests.helpers.models.microbatch_runs import (
    WIDTH,
    by_train_op,
    hidden_layer,
    input_fn_of,
    make_model_fn,
    output_layer,
)

v1 = tf.compat.v1


def _receiver():
    x = v1.placeholder(tf.float32, [None, WIDTH], "x")
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})


def _supervised_receiver():
    export = tf.estimator.experimental
    y = v1.placeholder(tf.float32, [None, 1], "y")
    features = _receiver().features
    return export.build_raw_supervised_input_receiver_fn(features, y)()


def _graphs(folder: bytes) -> list[bytes]:
    """Returns the graphs of a SavedModel with their signatures."""
    model = saved_model_pb2.SavedModel()
    with open(f"{folder.decode()}/saved_model.pb", "rb") as file:
        model.ParseFromString(file.read())
    return [graph.SerializeToString(deterministic=True) for graph in model.meta_graphs]


@pytest.mark.parametrize("micro_batches", ["auto", 4])
def test_every_mode_exports_the_plain_models_graph(micro_batches, tmp_path):
    model_fn = make_model_fn(by_train_op("adam"))
    folder = str(tmp_path / "model")
    ours = microbatch_model_fn(model_fn, micro_batches)
    ours = tf.estimator.Estimator(ours, folder)
    ours.train(input_fn_of(16, 16))
    modes = tf.estimator.ModeKeys
    receivers = {mode: _supervised_receiver for mode in (modes.TRAIN, modes.EVAL)}
    receivers[modes.PREDICT] = _receiver
    exports = [
        estimator.experimental_export_all_saved_models(str(tmp_path / name), receivers)
        for name, estimator in (
            ("ours", ours),
            ("plain", tf.estimator.Estimator(model_fn, folder)),
        )
    ]
    assert len(_graphs(exports[0])) == 3
    assert _graphs(exports[0]) == _graphs(exports[1])


def test_an_export_runs_no_forward_pass(tmp_path):
    memory = Memory(lambda rows: rows <= 4)

    def model_fn(features, labels, mode):
        predicted = output_layer(hidden_layer(memory.allocate(features["x"])))
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={"y": predicted})
        loss = tf.reduce_mean(tf.square(predicted - labels))
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=by_train_op("sgd")(loss)
        )

    model_fn = microbatch_model_fn(model_fn, "auto")
    estimator = tf.estimator.Estimator(model_fn, str(tmp_path / "model"))
    estimator.train(input_fn_of(16, 16))
    memory.sizes.clear()
    assert _graphs(estimator.export_saved_model(str(tmp_path / "export"), _receiver))
    assert memory.sizes == []


_X = np.linspace(-1, 1, 3 * WIDTH, dtype=np.float32).reshape(3, WIDTH)


def _fed_input_fn():
    x = v1.placeholder(tf.float32, [None, WIDTH], "x")
    return {"x": x}, v1.placeholder_with_default(np.zeros([3, 1], np.float32), [3, 1])


class _Feed(v1.train.SessionRunHook):
    def before_run(self, run_context):
        return v1.train.SessionRunArgs(None, {"x:0": _X})


def test_placeholders_that_a_hook_feeds_are_evaluated_whole_and_not_trained(tmp_path):
    model_fn = make_model_fn(by_train_op("sgd"))
    ours = tf.estimator.Estimator(microbatch_model_fn(model_fn), str(tmp_path))
    plain = tf.estimator.Estimator(model_fn, str(tmp_path))
    ours.train(input_fn_of(16, 16))
    results = [
        net.evaluate(_fed_input_fn, steps=2, hooks=[_Feed()]) for net in (ours, plain)
    ]
    assert results[0] == results[1]
    expected = "must return batches of a data set or a queue. Received: placeholders"
    with pytest.raises(ValueError, match=expected):
        ours.train(_fed_input_fn, steps=1, hooks=[_Feed()])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: v1.placeholder(tf.string, [None]), True),
        (lambda: v1.sparse_placeholder(tf.float32), True),
        (lambda: v1.placeholder_with_default([1.0], [None]), True),
        (lambda: tf.constant([1.0]), False),
    ],
)
def test_what_comes_from_placeholders_alone_is_fed(make, expected):
    """The model_fn gets it as it is, and not a micro-batch."""
    inputs = []

    def model_fn(features, mode):
        inputs.append(features)
        return tf.estimator.EstimatorSpec(mode, predictions=tf.constant([0.0]))

    with tf.Graph().as_default():
        features = make()
        microbatch_model_fn(model_fn)(features, mode=tf.estimator.ModeKeys.PREDICT)
    assert (inputs[0] is features) is expected


def test_a_default_placeholder_beside_a_data_set_is_cut_with_it(tmp_path):
    memory = Memory(lambda rows: rows <= 8)

    def input_fn():
        scale = v1.placeholder_with_default(2.0, [])
        batch = v1.data.make_one_shot_iterator(input_fn_of(16, 16)()).get_next()
        return {"x": batch[0]["x"] * scale}, batch[1]

    def model_fn(features, labels, mode):
        predicted = output_layer(memory.allocate(hidden_layer(features["x"])))
        loss = tf.reduce_mean(tf.square(predicted - labels))
        return tf.estimator.EstimatorSpec(mode, loss=loss)

    model_fn = microbatch_model_fn(model_fn)
    tf.estimator.Estimator(model_fn, str(tmp_path)).evaluate(input_fn)
    assert memory.sizes == [16, 8, 8]
