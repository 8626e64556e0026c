"""Scripts without this library train in micro-batches as with the batch at once."""

import logging
import re
import time

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import AccumulatingOptimizer, batch_mean, per_example
from estimator_accum.microbatch.own_optimizer import spot_check
from tests.helpers.models.interception import (
    build,
    cut,
    short_of_memory,
    train,
)
from tests.helpers.models.microbatch_runs import (
    embedding_layer,
    hidden_layer,
    input_fn_of,
    make_data,
    make_model_fn,
    output_layer,
    plain,
    spec_of,
    variables_of,
    word_columns,
    words_input_fn,
)
from tests.helpers.models.replicas import TWO_CPUS, two_replicas
from tests.helpers.models.script_models import SCRIPTS
from tests.helpers.models.toy_models import relative_difference

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1

_X, _Y = make_data(16)
_BATCH = ({"x": _X}, _Y)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_trains_as_with_the_batch_at_once(name):
    model_fn, input_fn = SCRIPTS[name]
    theirs, their_losses = train(model_fn, input_fn, 20)
    ours, losses = train(cut(model_fn), input_fn, 20)
    # Batch normalization's averages take in each micro-batch.
    trained = [n for n in theirs if not n.endswith(("moving_mean", "moving_variance"))]
    names = trained if name == "resnet" else None
    assert relative_difference(ours, theirs, names) <= 2e-5
    np.testing.assert_allclose(losses, their_losses, rtol=2e-6)
    assert ours["global_step"] == 20


def test_a_script_that_runs_out_of_memory_trains_as_on_a_larger_machine():
    model_fn, input_fn = SCRIPTS["bert"]
    theirs, _ = train(model_fn, input_fn, 3)
    limited = short_of_memory(model_fn, rows=4)
    ours, _ = train(cut(limited, "auto"), input_fn, 3)
    assert relative_difference(ours, theirs) <= 2e-6


def _adam(loss):
    return plain("adam")(loss)


def _model_fn(loss_of, make_train_op=_adam):
    """Returns a model_fn whose loss is `loss_of(features, labels, predicted)`."""

    def model_fn(features, labels, mode):
        predicted = output_layer(hidden_layer(features["x"]))
        loss = loss_of(features, labels, predicted)
        return spec_of(mode, tf.reduce_mean(loss), make_train_op(loss))

    return model_fn


def _mean(features, labels, predicted) -> tf.Tensor:
    del features
    return tf.reduce_mean(tf.square(predicted - labels))


def _step():
    return v1.train.get_or_create_global_step()


def _fetching(train_op_and_tensors):
    """Returns a model_fn that puts tensors into the collection "fetched"."""

    def model_fn(features, labels, mode):
        predicted = output_layer(hidden_layer(features["x"]))
        loss = _mean(features, labels, predicted)
        train_op, tensors = train_op_and_tensors(loss, features, predicted)
        for tensor in tensors:
            v1.add_to_collection("fetched", tensor)
        return spec_of(mode, loss, train_op)

    return model_fn


def _assert_same_fetched(model_fn, **options):
    _, theirs = train(model_fn, _BATCH, 1, "fetched")
    _, ours = train(cut(model_fn, **options), _BATCH, 1, "fetched")
    assert tf.nest.flatten(theirs)
    for mine, expected in zip(
        tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True
    ):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-7)


def _ways(loss, features, predicted):
    weights = v1.trainable_variables()
    return {
        "version_1": lambda: v1.gradients([loss], weights[1], gate_gradients=True),
        "colocated": lambda: v1.gradients(
            loss, weights, colocate_gradients_with_ops=True, aggregation_method=2
        ),
        "stop_gradients": lambda: tf.gradients(
            loss, weights, stop_gradients=[predicted * 1.0, weights[0].read_value()]
        ),
        "unconnected": lambda: tf.gradients(
            loss, [*weights, _step_like()], unconnected_gradients="zero"
        ),
        "read_value": lambda: tf.gradients(
            tf.reduce_mean(tf.square(features["x"] @ _copy(weights))), _copy.read
        ),
        "second_order": lambda: tf.gradients(
            tf.reduce_mean(tf.square(tf.gradients(predicted, features["x"])[0])),
            weights,
        ),
    }


def _step_like() -> tf.Variable:
    return v1.get_variable("unused", initializer=[1.0, 2.0])


def _copy(weights) -> tf.Tensor:
    _copy.read = weights[0] * 1.0
    return _copy.read


_WAYS = "version_1 colocated stop_gradients unconnected read_value second_order"


# Other ways have the scripts of tests.helpers.models.model_fns.
@pytest.mark.parametrize("way", _WAYS.split())
def test_gradients_are_the_batchs_whichever_way_they_are_computed(way):
    def fetch(loss, features, predicted):
        tensors = tf.nest.flatten(_ways(loss, features, predicted)[way]())
        return tf.group(*tensors, _step().assign_add(1)), tensors

    _assert_same_fetched(_fetching(fetch))


def test_gradients_with_respect_to_a_micro_batch_are_its_own():
    def fetch(loss, features, predicted):
        (of_x,) = tf.gradients(tf.reduce_sum(predicted), features["x"])
        train_op = plain("sgd")(loss)
        return train_op, [batch_mean(tf.reduce_mean(of_x))]

    _assert_same_fetched(_fetching(fetch))


def test_what_needs_no_gradient_runs_before_the_update():
    def make(loss):
        weights = v1.trainable_variables()[0]
        before = v1.get_variable("before", shape=weights.shape)
        # Late, if nothing makes the update wait.
        late = tf.numpy_function(lambda: np.float32(_pause()), [], tf.float32)
        with tf.control_dependencies([late]):
            kept = before.assign(weights.read_value())
        return tf.group(plain("sgd")(loss), kept)

    values, _ = train(cut(_model_fn(_mean, make)), _BATCH)
    start = np.linspace(-1, 1, values["before"].size).reshape(values["before"].shape)
    np.testing.assert_allclose(values["before"], start, atol=1e-6)
    assert np.max(np.abs(values["hidden"] - start)) > 1e-4


def _pause() -> float:
    time.sleep(0.2)
    return 0.0


def _average_of_the_loss(loss):
    """The CIFAR-10 tutorial's: gradients wait for averages of the losses."""
    average = tf.train.ExponentialMovingAverage(0.5)
    with tf.control_dependencies([average.apply([loss])]):
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        pairs = optimizer.compute_gradients(loss)
    return optimizer.apply_gradients(pairs, _step())


def _plateau(loss):
    """A learning rate that falls when the loss does not, here once a batch."""
    best = v1.get_variable("best", initializer=np.float32(0), trainable=False)
    rate = v1.get_variable("rate", initializer=np.float32(0.1), trainable=False)
    lowered = rate.assign(tf.where(loss < best, rate, rate * 0.5))
    with tf.control_dependencies([lowered]):
        kept = best.assign(tf.minimum(best, loss))
    with tf.control_dependencies([kept]):
        optimizer = v1.train.GradientDescentOptimizer(rate.read_value())
        return optimizer.minimize(loss, _step())


def _in_turn(loss):
    """Two optimizers in the branches of a tf.cond on the global step."""
    first = v1.train.GradientDescentOptimizer(0.1)
    second = v1.train.GradientDescentOptimizer(0.05)
    twice, step = loss * 2.0, _step()
    updated = tf.cond(
        tf.equal(step % 2, 0),
        lambda: tf.group(first.minimize(loss)),
        lambda: tf.group(second.minimize(twice)),
    )
    with tf.control_dependencies([updated]):
        return step.assign_add(1)


def _loss_scale_optimizer(loss):
    optimizer = v1.train.MomentumOptimizer(0.05, 0.9)
    scaling = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, "dynamic")
    return scaling.minimize(loss, _step())


def _keras_optimizer(loss):
    optimizer = tf.keras.optimizers.legacy.Adam(0.01)
    optimizer.iterations = _step()
    return tf.group(optimizer.get_updates(loss, v1.trainable_variables()))


def _rate_of_the_batch(loss):
    examples = loss.graph.get_tensor_by_name("tag:0")
    rate = 0.1 / tf.cast(examples, tf.float32)
    optimizer = v1.train.GradientDescentOptimizer(rate)
    return optimizer.minimize(loss, _step())


def _chosen_by_the_batch(loss):
    examples = loss.graph.get_tensor_by_name("tag:0")
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(loss)
    updated = tf.cond(
        tf.equal(examples, 16),
        lambda: tf.group(optimizer.apply_gradients(pairs)),
        lambda: tf.no_op(),
    )
    return tf.group(updated, _step().assign_add(1))


def _kept_examples(loss):
    examples = tf.cast(loss.graph.get_tensor_by_name("tag:0"), tf.float32)
    kept = v1.get_variable("kept", initializer=0.0, trainable=False)
    return tf.group(plain("sgd")(loss), kept.assign(kept * 0.9 + examples))


_TRAIN_OPS = {
    "rate_of_the_batch": _rate_of_the_batch,
    "chosen_by_the_batch": _chosen_by_the_batch,
    "kept_examples": _kept_examples,
    "average_of_the_loss": _average_of_the_loss,
    "plateau": _plateau,
    "in_turn": _in_turn,
    "loss_scale_optimizer": _loss_scale_optimizer,
    "keras_optimizer": _keras_optimizer,
}


@pytest.mark.parametrize("name", _TRAIN_OPS)
def test_a_train_op_does_once_a_batch_what_it_did(name):
    def loss_of(features, labels, predicted):
        tf.size(features["x"][:, 0], name="tag")
        return _mean(features, labels, predicted)

    model_fn = _model_fn(loss_of, _TRAIN_OPS[name])
    theirs, their_losses = train(model_fn, _BATCH, 4)
    ours, losses = train(cut(model_fn), _BATCH, 4)
    assert relative_difference(ours, theirs) <= 1e-6
    np.testing.assert_allclose(losses, their_losses, rtol=1e-6)


def test_a_branch_of_version_1_computes_gradients_of_a_loss_outside():
    v1.disable_control_flow_v2()
    try:
        test_a_train_op_does_once_a_batch_what_it_did("in_turn")
    finally:
        v1.enable_control_flow_v2()


def _clip_norm(gradients):
    return tf.clip_by_global_norm(gradients, 0.05)[0]


def _clip_values(gradients):
    return [
        tf.IndexedSlices(tf.clip_by_value(g.values, -1e-3, 1e-3), g.indices)
        if isinstance(g, tf.IndexedSlices)
        else g
        for g in gradients
    ]


def _clip_each(gradients):
    return [tf.clip_by_norm(gradient, 0.02) for gradient in gradients]


@pytest.mark.parametrize(
    ("clip", "optimizer"),
    [
        *((_clip_norm, "momentum"), (_clip_values, "adam")),
        *((_clip_each, "adam"), (list, "momentum")),
    ],
)
def test_sparse_gradients_are_clipped_as_slices_and_update_touched_rows(
    clip, optimizer
):
    optimizers = {
        "momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
        "adam": lambda: v1.train.AdamOptimizer(0.01),
    }

    def make(loss):
        variables = v1.trainable_variables()
        gradients = tf.gradients(loss, variables)
        assert any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        pairs = zip(clip(gradients), variables, strict=True)
        return optimizers[optimizer]().apply_gradients(pairs, _step())

    model_fn = make_model_fn(make, embedding_layer)
    theirs, _ = train(model_fn, _BATCH, 4)
    ours, _ = train(cut(model_fn), _BATCH, 4)
    assert relative_difference(ours, theirs) <= 3e-6


_CANNED = {
    "version_1": lambda columns: v1.estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=columns[1:2],
        linear_optimizer=v1.train.FtrlOptimizer(0.1),
        dnn_feature_columns=[columns[0], columns[2]],
        dnn_optimizer=v1.train.AdagradOptimizer(0.1),
        dnn_hidden_units=[4],
    ),
    "keras": lambda columns: tf.estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=columns[1:2],
        dnn_feature_columns=[columns[0], columns[2]],
        dnn_hidden_units=[4],
    ),
}


@pytest.mark.parametrize("version", _CANNED)
def test_wide_and_deep_trains_as_with_the_batch_at_once(version):
    classifier = _CANNED[version](word_columns())

    def model_fn(features, labels, mode):
        tf.keras.utils.set_random_seed(3)
        return classifier.model_fn(features, labels, mode, classifier.config)

    theirs, their_losses = train(model_fn, words_input_fn, 2)
    ours, losses = train(cut(model_fn), words_input_fn, 2)
    assert relative_difference(ours, theirs) <= 2e-6
    np.testing.assert_allclose(losses, their_losses, rtol=1e-6)


def _loop(loss):
    weights = v1.trainable_variables()[0]

    def step(i, total):
        inner = tf.reduce_sum(weights * loss)
        return i + 1, total + tf.reduce_sum(tf.gradients(inner, weights)[0])

    return tf.while_loop(lambda i, _: i < 2, step, (0, 0.0))[1].op


def _second_order(loss):
    weights = v1.trainable_variables()
    (gradient,) = tf.gradients(loss, weights[:1])
    return plain("sgd")(loss + tf.reduce_sum(tf.square(gradient)))


def _both(loss):
    (first, second), step = v1.trainable_variables(), _step()
    ours = AccumulatingOptimizer(v1.train.GradientDescentOptimizer(0.1), 1)
    theirs = v1.train.GradientDescentOptimizer(0.1)
    return tf.group(
        ours.minimize(loss, var_list=[first]),
        theirs.minimize(loss, step, var_list=[second]),
    )


def _by_a_hook(loss):
    plain("sgd")(loss)  # a hook runs it
    return _step().assign_add(1).op


_REFUSED = {
    "loop": (_loop, r"made inside of tf\.cond, tf\.while_loop .*Make the loss outside"),
    "second_order": (_second_order, r"must not contain gradients .* hidden/?.*"),
    "both": (_both, r"by this library or by optimizers of its own, not by both\. Rece"),
    "nothing": (lambda loss: _step().assign_add(1).op, r"must train by gradients .*"),
    "by_a_hook": (_by_a_hook, r"must use the gradients: .*, which needs none of them"),
}


@pytest.mark.usefixtures("control_flow")
@pytest.mark.parametrize("name", _REFUSED)
def test_what_several_micro_batches_cannot_do_is_refused(name):
    make, sentence = _REFUSED[name]

    with pytest.raises(ValueError, match=sentence):
        build(_model_fn(_mean, make), _BATCH)


def test_random_numbers_that_examples_share_are_refused_if_of_another_kind():
    def loss(features, labels, predicted):
        _, counts, _ = tf.random.learned_unigram_candidate_sampler([[1]], 1, 1, True, 4)
        return _mean(features, labels, predicted * tf.reduce_sum(counts))

    message = r"same in all micro-batches.*LearnedUnigramCandidateSampler, wh"
    with pytest.raises(ValueError, match=message):
        build(_model_fn(loss), _BATCH)


def test_a_model_fn_inside_a_cut_one_is_not_cut_again():
    theirs, _ = train(_model_fn(_mean), _BATCH)
    ours, _ = train(cut(cut(_model_fn(_mean), 2)), _BATCH)
    assert relative_difference(ours, theirs) <= 1e-6


def test_metrics_and_counts_take_in_every_micro_batch():
    def make(loss):
        examples = tf.size(loss.graph.get_tensor_by_name("tag:0"))
        seen = v1.get_variable("seen", initializer=0, trainable=False)
        _, updated = v1.metrics.mean(loss, name="mean_loss")
        return tf.group(plain("sgd")(loss), seen.assign_add(examples), updated)

    def loss_of(features, labels, predicted):
        tf.identity(features["x"][:, 0], name="tag")
        return _mean(features, labels, predicted)

    model_fn = _model_fn(loss_of, make)
    ours, _ = train(cut(model_fn), _BATCH, 2)
    assert ours["seen"] == 32


def test_a_network_that_combines_examples_is_reported(caplog):
    with caplog.at_level(logging.INFO):
        build(SCRIPTS["resnet"][0], _BATCH)
        build(_model_fn(_mean), _BATCH)
    said = [record.getMessage() for record in caplog.records]
    said = [line for line in said if line.startswith("micro-batches: ")]
    assert len(said) == 1
    assert re.search(
        r"8\d% of the activations are computed on the whole batch, so .* "
        r"see bn_0/moments/mean of type Mean \(it combines the examples\)\. batch_norm=",
        said[0],
    )


def test_the_forward_pass_changes_variables_once():
    def model_fn(features, labels, mode):
        calls = v1.get_variable("calls", initializer=0.0, trainable=False)
        with tf.control_dependencies([calls.assign_add(1.0)]):
            features = {"x": tf.identity(features["x"])}
        predicted = output_layer(hidden_layer(features["x"]))
        loss = _mean(features, labels, predicted)
        return spec_of(mode, loss, plain("sgd")(loss))

    values, _ = train(cut(model_fn), _BATCH, 3)
    assert values["calls"] == 3


def test_sparse_sums_are_cleared_without_writes_that_gradients_wait_for():
    def model_fn(features, labels, mode):
        calls = v1.get_variable("calls", initializer=0.0, trainable=False)
        table = v1.get_variable("table", [2, 1])
        rows = tf.gather(table, tf.cast(features["x"][:, 0] > 0, tf.int32))
        loss = _mean(features, labels, output_layer(hidden_layer(features["x"])) + rows)
        with tf.control_dependencies([calls.assign_add(1.0)]):
            return spec_of(mode, loss, plain("sgd")(loss))

    values, _ = train(cut(model_fn), _BATCH, 3)
    assert values["calls"] == 3


def test_tensorflow_is_left_as_it_was():
    from tensorflow.python.eager import backprop, imperative_grad
    from tensorflow.python.ops import gradients_util

    def functions():
        tape = imperative_grad.imperative_grad, backprop.GradientTape.watch
        return gradients_util._GradientsHelper, *tape

    before = functions()

    def failing(loss):
        assert not {*before} & {*functions()}
        raise KeyError("script's own")

    with pytest.raises(KeyError):
        build(_model_fn(_mean, failing), _BATCH)
    build(_model_fn(_mean), _BATCH)
    assert before == functions()


@pytest.mark.once
def test_two_replicas_train_as_with_their_batches_at_once(tmp_path):
    """The update, and all before it, waits for both replicas' gradients."""

    def make(loss):
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            gradients, variables = zip(
                *v1.train.AdamOptimizer(0.01).compute_gradients(loss), strict=True
            )
        gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
        pairs = zip(gradients, variables, strict=True)
        return optimizer.apply_gradients(pairs, _step())

    def trained(model_fn, folder):
        config = tf.estimator.RunConfig(
            str(folder), train_distribute=two_replicas(), session_config=TWO_CPUS
        )
        estimator = tf.estimator.Estimator(model_fn, config=config)
        estimator.train(input_fn_of(64, 16))
        return variables_of(estimator)

    model_fn = make_model_fn(make, embedding_layer)
    theirs = trained(model_fn, tmp_path / "whole")
    ours = trained(cut(model_fn), tmp_path / "cut")
    assert theirs["global_step"] == 2
    assert relative_difference(ours, theirs) <= 1e-6


def test_the_forward_pass_runs_once_for_each_micro_batch(monkeypatch):
    monkeypatch.setattr(spot_check.SpotCheck, "is_due", lambda *_: False)
    sizes = []

    def note(x):
        sizes.append(len(x))
        return x

    def model_fn(features, labels, mode):
        x = tf.numpy_function(note, [features["x"]], tf.float32)
        x = per_example(tf.ensure_shape(x, [None, 5]))
        return _model_fn(_mean, _average_of_the_loss)({"x": x}, labels, mode)

    train(cut(model_fn, 3), _BATCH, 2)
    assert sizes == [6, 6, 4] * 2
