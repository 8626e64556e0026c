"""This library's calls in a model_fn inside `microbatch_model_fn`."""

import csv

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    batch_mean,
    get_or_create_update_step,
    get_windows,
    make_accumulating_train_op,
    make_accumulation_hooks,
)
from tests.helpers.models.interception import cut, tensors_of
from tests.helpers.models.microbatch_runs import (
    INPUT,
    OPTIMIZERS,
    Fetch,
    by_optimizer,
    by_train_op,
    difference,
    hidden_layer,
    input_fn_of,
    loss_of,
    make_data,
    make_model_fn,
    output_layer,
    plain,
    spec_of,
    train,
    train_in_micro_batches,
)
from tests.helpers.models.summaries import read_scalars

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1


def _summaries(folder, tag) -> list[float]:
    return [value for name, _, value in read_scalars(folder) if name == tag]


def test_clipping_schedules_and_the_reported_loss_see_the_batch(tmp_path):
    def rate(step):
        return v1.train.exponential_decay(0.1, step, 1, 0.9)

    def clipping(loss):
        step = v1.train.get_or_create_global_step()
        optimizer = v1.train.GradientDescentOptimizer(rate(step))
        gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.3)
        return optimizer.apply_gradients(zip(gradients, variables, strict=True), step)

    def ours(loss):
        optimizer = v1.train.GradientDescentOptimizer(rate(get_or_create_update_step()))
        return make_accumulating_train_op(loss, optimizer, 1, clip_norm=0.3)

    theirs = train(make_model_fn(clipping), tmp_path / "plain", INPUT)
    for count, tolerance in ((1, 0), (4, 5e-7)):
        folder, model_fn = tmp_path / str(count), make_model_fn(ours)
        values = train_in_micro_batches(model_fn, folder, INPUT, count)
        assert difference(values, theirs) <= tolerance
    losses = [_summaries(tmp_path / folder, "loss") for folder in ("plain", "4")]
    assert len(losses[0]) == 6
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize(
    ("interface", "counts"), [("train_op", [1, 4]), ("optimizer", [4])]
)
def test_token_weighted_losses_count_tokens(interface, counts, tmp_path, caplog):
    def make(train_op_of):
        def model_fn(features, labels, mode):
            predicted = output_layer(hidden_layer(features["x"]))
            tokens = 1.0 + tf.floor(tf.abs(features["x"][:, :1]) * 3)
            weight = tf.reduce_sum(tokens)
            loss = tf.reduce_sum(tokens * tf.square(predicted - labels)) / weight
            return spec_of(mode, loss, train_op_of(loss, weight))

        return model_fn

    def ours(loss, weight):
        if interface == "train_op":
            return by_train_op("sgd", weight=weight)(loss)
        return by_optimizer("sgd", weight=lambda: weight)(loss)

    theirs = train(make(lambda loss, _: plain("sgd")(loss)), tmp_path / "a", INPUT)
    for count in counts:
        folder = tmp_path / str(count)
        values = train_in_micro_batches(make(ours), folder, INPUT, count)
        assert difference(values, theirs) <= (5e-7 if count > 1 else 0)
        losses = [_summaries(path, "loss") for path in (folder, tmp_path / "a")]
        np.testing.assert_allclose(*losses, rtol=1e-6 if count > 1 else 0)
    warning = "Without `weight`, each micro-batch counts by its examples, so the update"
    assert warning not in caplog.text
    unweighted = make(lambda loss, _: by_train_op("sgd")(loss))
    values = train_in_micro_batches(unweighted, tmp_path / "b", INPUT, 4)
    assert difference(values, theirs) > 1e-3
    assert warning in caplog.text and "Write weight=tf.reduce_sum(mask)" in caplog.text


@pytest.mark.parametrize("where", ["microbatch_model_fn", "train_op", "optimizer"])
def test_losses_that_sum_over_examples_are_summed(where, tmp_path):
    def make(make_train_op):
        def model_fn(features, labels, mode):
            predicted = output_layer(hidden_layer(features["x"]))
            loss = tf.reduce_sum(tf.square(predicted - labels))
            return spec_of(mode, loss, make_train_op(loss * 0.05))

        return model_fn

    inner = {} if where == "microbatch_model_fn" else {"reduction": "sum"}
    outer = {"reduction": "sum"} if where == "microbatch_model_fn" else {}
    interface = by_optimizer if where == "optimizer" else by_train_op
    theirs = train(make(plain("sgd")), tmp_path / "a", INPUT)
    counts = {1: 0, 4: 1e-6} if where == "microbatch_model_fn" else {4: 1e-6}
    for count, tolerance in counts.items():
        folder, model_fn = tmp_path / str(count), make(interface("sgd", **inner))
        values = train_in_micro_batches(model_fn, folder, INPUT, count, **outer)
        assert difference(values, theirs) <= tolerance
        losses = [_summaries(path, "loss") for path in (folder, tmp_path / "a")]
        np.testing.assert_allclose(*losses, rtol=1e-6)


def test_batch_mean_reports_the_batch_and_is_the_tensor_elsewhere(tmp_path):
    def model_fn(features, labels, mode):
        mean = tf.reduce_mean(features["x"])
        largest = tf.reduce_max(features["x"])
        reported = batch_mean(mean)
        v1.add_to_collection("mean", reported)
        v1.add_to_collection("ones", batch_mean(tf.constant(1.0), reduction="sum"))
        v1.add_to_collection("weighted", batch_mean(mean, weight=tf.abs(largest)))
        if mode == tf.estimator.ModeKeys.EVAL:
            assert reported is mean
        v1.summary.scalar("reported", reported)
        loss = loss_of(features, labels)
        return spec_of(mode, loss, by_train_op("sgd")(loss))

    fetched = {name: Fetch(name) for name in ("mean", "ones", "weighted")}
    train_in_micro_batches(model_fn, tmp_path, INPUT, 4, hooks=fetched.values())
    x, _ = make_data(5 * 16 + 7)
    batches = np.split(x, range(16, len(x), 16))
    means = [batch.mean() for batch in batches]
    np.testing.assert_allclose(fetched["mean"].values, means, atol=1e-6)
    np.testing.assert_allclose(_summaries(tmp_path, "reported"), means, atol=1e-6)
    assert fetched["ones"].values == [4] * 6
    parts = [batch[i : i + 4] for batch in batches[:1] for i in range(0, 16, 4)]
    weights = [abs(part.max()) for part in parts]
    expected = np.average([part.mean() for part in parts], weights=weights)
    assert fetched["weighted"].values[0] == pytest.approx(expected, abs=1e-6)


def test_summaries_and_hooks_of_a_micro_batch_get_the_batch(tmp_path):
    def model_fn(features, labels, mode):
        size = tf.shape(features["x"])[0]
        v1.add_to_collection("size", size)
        v1.summary.scalar("size", size)
        loss = loss_of(features, labels)
        return spec_of(mode, loss, by_train_op("sgd")(loss))

    sizes = Fetch("size")
    train_in_micro_batches(model_fn, tmp_path, INPUT, 3, hooks=[sizes])
    assert sizes.values == [16] * 5 + [7]
    assert _summaries(tmp_path, "size") == sizes.values


@pytest.mark.parametrize("grouped", ["collection", "control_dependencies", "group"])
def test_batch_normalization_runs_once_a_micro_batch(grouped, tmp_path):
    def model_fn(features, labels, mode):
        hidden = hidden_layer(features["x"])
        hidden = v1.layers.batch_normalization(hidden, training=True, momentum=0.5)
        loss = tf.reduce_mean(tf.square(output_layer(hidden) - labels))
        update_ops = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
        assert update_ops
        if grouped == "collection":
            train_op = by_train_op("sgd")(loss)
        elif grouped == "group":
            train_op = tf.group(by_train_op("sgd", update_ops=[])(loss), *update_ops)
        else:
            with tf.control_dependencies(update_ops):
                train_op = by_optimizer("sgd", update_ops=[])(loss)
        return spec_of(mode, loss, train_op)

    # One batch, so the hidden layer is the same in every micro-batch.
    values = train_in_micro_batches(model_fn, tmp_path, input_fn_of(16, 16), 4)
    x, _ = make_data(16)
    kernel = np.linspace(-1, 1, 40).reshape(5, 8).astype(np.float32)
    expected = np.zeros(8)
    for part in np.split(np.tanh(x @ kernel), 4):
        expected = 0.5 * expected + 0.5 * part.mean(0)
    name = "batch_normalization/moving_mean"
    np.testing.assert_allclose(values[name], expected, atol=1e-6)


def test_counters_run_once_a_batch_and_of_examples_once_a_micro_batch(tmp_path):
    def model_fn(features, labels, mode):
        def counter(name):
            zero = v1.zeros_initializer()
            return v1.get_variable(name, [], tf.int64, zero, trainable=False)

        loss = loss_of(features, labels)
        size = tf.shape(features["x"], out_type=tf.int64)[0]
        batches, micro_batches, examples = map(
            counter, ["batches", "micro_batches", "examples"]
        )
        with tf.control_dependencies([size]):
            once_each = v1.assign_add(micro_batches, 1)
        inner = tf.group(by_train_op("sgd")(loss), v1.assign_add(examples, size))
        train_op = tf.group(inner, v1.assign_add(batches, 1), once_each)
        return spec_of(mode, loss, train_op)

    values = train_in_micro_batches(model_fn, tmp_path, INPUT, 4)
    assert values["examples"] == 5 * 16 + 7
    assert values["batches"] == 6
    assert values["micro_batches"] == 24


def _loss_scaling(optimizer):
    scale = v1.mixed_precision.DynamicLossScale(256.0, increment_period=2)
    return v1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, scale)


def test_the_loss_scale_moves_once_a_batch(tmp_path):
    def make_train_op(loss):
        return make_accumulating_train_op(loss, _loss_scaling(OPTIMIZERS["sgd"]()), 1)

    theirs = train(make_model_fn(plain("sgd")), tmp_path / "plain", INPUT)
    model_fn = make_model_fn(make_train_op)
    ours = train_in_micro_batches(model_fn, tmp_path / "ours", INPUT, 4)
    assert difference(ours, theirs) <= 5e-7
    assert ours["current_loss_scale"] == 256 * 2**3  # doubled every two updates of six


def _in_a_branch(loss):
    accumulating = AccumulatingOptimizer(OPTIMIZERS["sgd"](), 1)
    return _loss_scaling(accumulating).minimize(loss, v1.train.get_global_step())


def _waiting_for_the_update(loss):
    with tf.control_dependencies([by_train_op("sgd")(loss)]):
        return tf.identity(loss, name="mixed")


def _with_a_rate_of_the_micro_batch(loss):
    optimizer = v1.train.GradientDescentOptimizer(tf.abs(loss, name="rate"))
    return make_accumulating_train_op(loss, optimizer, 1)


def _writing_by_hand(loss):
    (variable,) = v1.trainable_variables()[:1]
    written = variable.assign_sub(0.1 * loss * variable)
    return tf.group(by_train_op("sgd")(loss), written)


def _communicating(loss):
    sizes = {"group_size": 1, "group_key": 1, "instance_key": 1}
    ops = {"merge_op": "Add", "final_op": "Id", "subdiv_offsets": [0]}
    loss = tf.raw_ops.CollectiveReduce(input=loss, name="synchronize", **sizes, **ops)
    weight = v1.get_variable("weight", initializer=1.0)
    return by_train_op("sgd")(tf.stop_gradient(loss) * weight)


@pytest.mark.parametrize(
    ("make_train_op", "sentence"),
    [
        (_in_a_branch, "not be made inside a tf.cond.* Received: a branch.*inside Acc"),
        (_waiting_for_the_update, "not wait for .* Received: mixed, which n.*Group it"),
        (_with_a_rate_of_the_micro_batch, "not depend on one micro-batch.*rate"),
        (_writing_by_hand, "not be changed by.*from a micro-batch.* written by Assign"),
        (_communicating, "not communicate.*: synchronize of type CollectiveReduce"),
    ],
)
def test_train_ops_that_would_not_be_the_batchs_are_refused(
    make_train_op, sentence, tmp_path
):
    with pytest.raises(ValueError, match=sentence):
        train_in_micro_batches(make_model_fn(make_train_op), tmp_path, INPUT, 4)


@pytest.mark.parametrize("policy", ["skip_micro_batch", "skip_window", "raise"])
def test_what_is_not_finite_is_left_out_as_step_wise(policy, tmp_path):
    def batches(x, y):
        return tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(16)

    def input_fn():
        x, y = make_data(32)
        x[5] = np.nan  # in the second of four micro-batches of the first batch
        return batches(x, y)

    def clean_input_fn():
        x, y = make_data(32)
        first = slice(0, 0) if policy == "skip_window" else np.r_[0:4, 8:16]
        return batches(x[first], y[first]).concatenate(batches(x[16:], y[16:]))

    inner = make_model_fn(by_train_op("adam", on_nonfinite=policy))

    def model_fn(features, labels, mode):
        spec = inner(features, labels, mode)
        loss = get_windows()[0].mean_loss  # an Estimator stops at NaN
        finite = tf.where(tf.math.is_finite(loss), loss, 0.0)
        return spec if policy == "raise" else spec._replace(loss=finite)

    if policy == "raise":
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be finite"):
            train_in_micro_batches(model_fn, tmp_path / "ours", input_fn, 4)
        return
    ours = train_in_micro_batches(model_fn, tmp_path / "ours", input_fn, 4)
    theirs = train(make_model_fn(plain("adam")), tmp_path / "plain", clean_input_fn)
    del theirs["global_step"]
    assert difference(ours, theirs) <= 1e-6


def test_a_batch_whose_update_fails_leaves_no_rows_for_the_next_one_in_its_session():
    def model_fn(features, labels, mode):
        table = v1.get_variable("table", initializer=[[0.0], [0.0]])
        loss = tf.reduce_mean(tf.gather(table, features)[:, 0] * labels)
        train_op = by_train_op("sgd", on_nonfinite="raise")(loss)
        return spec_of(mode, loss, train_op)

    def input_fn():  # the first batch has finite gradients, whose sum is infinite
        data = np.repeat([0, 1], 4), np.repeat(np.float32([3e38, 1.0]), 4)
        return tf.data.Dataset.from_tensor_slices(data).batch(4)

    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        spec = cut(model_fn, 2)(*tensors_of(input_fn), mode="train")
        with v1.train.SingularMonitoredSession(spec.training_hooks) as session:
            with pytest.raises(tf.errors.InvalidArgumentError, match="must be finite"):
                session.run(spec.train_op)
            session.run(spec.train_op)
            (table,) = session.raw_session().run(v1.trainable_variables())
    np.testing.assert_allclose(table, [[0.0], [-0.1]])


def test_the_windows_report_is_the_batchs(tmp_path):
    model_fn = make_model_fn(by_train_op("sgd", clip_norm=1.0, noise_scale=True))
    metrics = {"metrics_dir": tmp_path / "metrics", "weight_unit": "examples"}
    hooks = make_accumulation_hooks(**metrics)
    train_in_micro_batches(model_fn, tmp_path / "run", INPUT, 4, hooks=hooks)
    with open(tmp_path / "metrics" / "train_metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["update_step"] for row in rows] == list("123456")
    assert [float(row["examples"]) for row in rows] == [16, 32, 48, 64, 80, 87]
    losses = _summaries(tmp_path / "run", "loss")
    np.testing.assert_allclose([float(row["loss"]) for row in rows], losses, rtol=1e-6)
    sizes = _summaries(tmp_path / "metrics", "accumulation/effective_batch_size")
    assert sizes == [16] * 5 + [7]
    assert _summaries(tmp_path / "metrics", "accumulation/noise_scale")


def test_k_and_its_schedule_are_the_batchs_whatever_they_say(tmp_path):
    values = []
    for steps in (5, lambda step: step + 7):

        def make_train_op(loss, steps=steps):
            return make_accumulating_train_op(loss, OPTIMIZERS["sgd"](), steps)

        folder, model_fn = tmp_path / str(len(values)), make_model_fn(make_train_op)
        values.append(train_in_micro_batches(model_fn, folder, INPUT, 4))
    assert difference(values[0], values[1]) == 0
    assert values[0]["update_step"] == 6
