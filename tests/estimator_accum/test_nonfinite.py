"""NaN or infinity: the state after each policy."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    make_accumulating_train_op,
)
from estimator_accum.graph.walks import ancestors
from tests.helpers.models.interfaces import after_each, sgd, start_session

pytestmark = pytest.mark.usefixtures("fresh_graph", "graph_optimizer")
v1 = tf.compat.v1
NAN, INF = float("nan"), float("inf")


class _Run:
    """A train op with fed gradients; a call returns the variable's values."""

    def __init__(self, steps, sparse=False, **options):
        self.gradient = v1.placeholder(tf.float32, [])
        # The gradient of `other` is 0, so an error must not name it.
        self.x = v1.get_variable("x", initializer=[0.0, 0.0])
        other = v1.get_variable("other", initializer=0.0)
        x = tf.reduce_sum(tf.gather(self.x, [0])) if sparse else self.x[0]
        loss = self.gradient * x + 0.0 * other
        optimizer = v1.train.MomentumOptimizer(1.0, 0.0)
        self.train_op = make_accumulating_train_op(loss, optimizer, steps, **options)
        self.session = start_session()

    def __call__(self, *gradients):
        """Returns x after each micro-step."""
        values = []
        for gradient in gradients:
            self.session.run(self.train_op, {self.gradient: gradient})
            values.append(float(self.session.run(self.x)[0]))
        return values

    def state(self):
        names = ("global_step", "update_step", "accumulation/micro_steps")
        variables = {v.op.name: v for v in v1.global_variables()}
        return [int(self.session.run(variables[n])) for n in names if n in variables]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("sparse", [False, True])
def test_raise_names_variable_and_micro_step_and_accumulates_nothing(bad, sparse):
    run = _Run(3, sparse)
    run(1.0)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"Gradients must be finite\. Received: NaN or infinity at micro-step 2 "
        r"in x\b.*Pass on_nonfinite=",
    ):
        run(bad)
    assert run.state() == [1, 0, 1]
    assert run(2.0, 6.0) == [0.0, -3.0]  # as without the bad one


@pytest.mark.parametrize("sparse", [False, True])
def test_raise_is_the_default_for_one_step_windows_too(sparse):
    run = _Run(1, sparse)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"micro-step 1 in x\b"):
        run(NAN)
    assert run(1.0) == [-1.0]
    assert run.state() == [1, 1]


def test_a_loss_that_is_not_finite_is_named_though_its_gradients_are():
    x = v1.get_variable("x", initializer=0.0)
    bias = v1.placeholder(tf.float32, [])
    train_op = make_accumulating_train_op(x + bias, sgd(), 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="1 in the loss"):
        after_each(train_op, [{bias: INF}], x)


def test_of_many_variables_three_are_named():
    slope = v1.placeholder(tf.float32, [])
    loss = sum(slope * v1.get_variable(name, initializer=1.0) for name in "abcde")
    train_op = make_accumulating_train_op(loss, sgd(), 2)
    sentence = r"1 in a, b, c and 3 more\. Pass on_"  # d, e and the loss
    with pytest.raises(tf.errors.InvalidArgumentError, match=sentence):
        after_each(train_op, [{slope: NAN}], loss)


def test_gradients_too_large_for_their_squares_are_finite_all_the_same():
    run = _Run(2)
    assert run(1e25, 3e25) == [0.0, pytest.approx(-2e25)]


@pytest.mark.parametrize("sparse", [False, True])
def test_finite_gradients_whose_sum_is_not_are_named_and_not_applied(sparse):
    run = _Run(2, sparse)
    run(3e38)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"micro-step 2 in x\b"):
        run(3e38)
    assert run.session.run(run.x)[0] == 0.0
    if sparse:  # the boundary found it in the sum, which stays, as dense ones do
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"step 2 in x\b"):
            run(1.0)
    assert run.session.run(run.x)[0] == 0.0


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("steps", "policy", "clip_norm", "fed", "values", "state"),
    [
        # A micro-batch is left out wherever it stands.
        *(
            (2, "skip_micro_batch", None, fed, [0, 0, 0, -2, -2, -2, -8], [7, 2, 0])
            for fed in ([NAN, 1, NAN, 3, 5, NAN, 7], [INF, 1, INF, 3, 5, INF, 7])
        ),
        # A window ends, and the next one starts clean.
        (
            *(2, "skip_window", 100.0, [1, NAN, 2, 4, INF, 1, 5, 7]),
            *([0, 0, 0, -3, -3, -3, -3, -9], [8, 2, 0]),
        ),
        (1, "skip_micro_batch", None, [1, NAN, 2], [-1, -1, -3], [3, 2]),
        (1, "skip_window", None, [1, NAN, 2], [-1, -1, -3], [3, 2]),
        # Clipping scales by NaN if the norm is not finite; no such value is kept.
        (1, "skip_window", 0.5, [INF, 3, 0.25], [0, -0.5, -0.75], [3, 2]),
    ],
)
def test_what_is_skipped_leaves_no_trace(
    steps, policy, clip_norm, fed, values, state, sparse
):
    run = _Run(steps, sparse, on_nonfinite=policy, clip_norm=clip_norm)
    assert run(*fed) == values
    assert run.state() == state


def test_a_skipped_window_moves_no_slot_and_no_clock():
    x = v1.get_variable("x", initializer=0.0)
    slope = v1.placeholder(tf.float32, [])
    adam = v1.train.AdamOptimizer(0.1)
    options = {"on_nonfinite": "skip_window"}
    train_op = make_accumulating_train_op(x * slope, adam, 2, **options)
    frozen = [x, *adam.variables(), get_or_create_update_step()]
    values = after_each(train_op, [{slope: g} for g in (1.0, 2.0, NAN, 2.0)], frozen)
    np.testing.assert_array_equal(values[3], values[1])


@pytest.mark.parametrize("policy", ["skip_window", "skip_micro_batch"])
def test_an_estimator_goes_on_where_its_loss_is_kept_finite(tmp_path, policy):
    """Its NanTensorHook reads EstimatorSpec.loss; update ops run all the same."""

    def model_fn(features, labels, mode):
        x = v1.get_variable("x", initializer=0.0)
        seen = v1.get_variable("seen", initializer=0.0, trainable=False)
        loss = x * features + labels
        with tf.control_dependencies([loss]):
            v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, seen.assign_add(1.0).op)
        train_op = make_accumulating_train_op(loss, sgd(), 2, on_nonfinite=policy)
        finite = tf.where(tf.math.is_finite(loss), loss, 0.0)
        return tf.estimator.EstimatorSpec(mode, loss=finite, train_op=train_op)

    values = [1.0, 3.0, NAN, 2.0, 4.0, 6.0]
    estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices((values, [0.0] * 6)))
    # Windows (1, 3), (4, 6) and 2 skipped with NaN; or (1, 3), (2, 4) and 6 left over.
    expected = -7.0 if policy == "skip_window" else -5.0
    assert estimator.get_variable_value("x") == expected
    assert estimator.get_variable_value("seen") == len(values)


def _half_model():
    """Returns a model with fed d loss / d x, which overflows above 65504 / scale."""
    slope = v1.placeholder(tf.float32, [])
    x = v1.get_variable("x", initializer=0.0)
    loss = tf.cast(tf.cast(x, tf.float16) * tf.cast(slope, tf.float16), tf.float32)
    return slope, x, loss


def _scaling(optimizer, scale):
    return v1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, scale)


def _dynamic():
    return v1.mixed_precision.DynamicLossScale(1024.0, increment_period=2)


@pytest.mark.parametrize("where", ["inside", "outside", "train_op"])
@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
def test_loss_scaling_gives_the_weights_of_training_without(where, kind):
    slope, x, loss = _half_model()
    scale = 8.0 if kind == "fixed" else _dynamic()
    step = v1.train.get_or_create_global_step()
    if where == "outside":
        optimizer = _scaling(AccumulatingOptimizer(sgd(), 2), scale)
        train_op = optimizer.minimize(loss, step)
    elif where == "inside":
        optimizer = AccumulatingOptimizer(_scaling(sgd(), scale), 2)
        train_op = optimizer.minimize(loss, step)
    else:
        train_op = make_accumulating_train_op(loss, _scaling(sgd(), scale), 2)
    feeds = [{slope: value} for value in (1.0, 3.0, 0.5, 0.25)]
    table = after_each(train_op, feeds, [x, step, get_or_create_update_step()])
    assert [row[0] for row in table] == [0, -2, -2, -2.375]
    assert table[-1][1:] == [4, 2]


def test_inside_the_rule_the_scale_moves_once_a_window_and_voids_it_by_itself():
    slope, x, loss = _half_model()
    scale = _dynamic()
    train_op = make_accumulating_train_op(loss, _scaling(sgd(), scale), 2)
    # 100 * 1024 is out of float16's range; 1 * 512 is in it.
    feeds = [{slope: value} for value in (1.0, 100.0, 1.0, 3.0, 1.0, 1.0)]
    table = after_each(train_op, feeds, [x, scale(), get_or_create_update_step()])
    values, scales, updates = zip(*table, strict=True)
    assert values == (0, 0, 0, -2, -2, -3) and updates[-1] == 2
    assert scales == (1024, 512, 512, 512, 512, 1024)  # doubled after two good windows


def test_outside_the_rule_one_micro_batch_is_left_out_and_the_scale_falls():
    slope, x, loss = _half_model()
    scale = _dynamic()
    optimizer = _scaling(AccumulatingOptimizer(sgd(), 2), scale)
    train_op = optimizer.minimize(loss, v1.train.get_or_create_global_step())
    feeds = [{slope: value} for value in (1.0, 100.0, 3.0)]
    table = after_each(train_op, feeds, [x, scale()])
    assert table == [[0, 1024], [0, 512], [-2, 512]]


def test_dynamic_loss_scaling_refuses_to_skip_single_micro_batches():
    _, _, loss = _half_model()
    optimizer = _scaling(sgd(), _dynamic())
    with pytest.raises(ValueError, match=r"cannot be 'skip_micro_batch' where dynamic"):
        make_accumulating_train_op(loss, optimizer, 2, on_nonfinite="skip_micro_batch")


@pytest.mark.parametrize(
    ("is_dynamic", "on_nonfinite"),
    [(False, "raise"), (False, "skip_micro_batch"), (False, "skip_window")]
    + [(True, "raise")],
)
def test_nothing_is_written_before_every_gradient_is_there(is_dynamic, on_nonfinite):
    """Nor before the loss: a micro-batch whose computation fails adds nothing."""
    loss = sum(v1.get_variable(name, initializer=1.0) ** 2 for name in "abc")
    optimizer = _scaling(sgd(), "dynamic") if is_dynamic else sgd()
    ours = AccumulatingOptimizer(optimizer, 2, on_nonfinite=on_nonfinite)
    pairs = [(tf.identity(g), v) for g, v in ours.compute_gradients(loss)]
    train_op = ours.apply_gradients(pairs, v1.train.get_or_create_global_step())
    handles = {
        v.handle.op for v in v1.global_variables() if v.op.name.endswith("/accumulator")
    }
    writes = [
        operation
        for operation in ancestors([train_op])
        if operation.type == "AssignVariableOp" and operation.inputs[0].op in handles
    ]
    assert len(writes) >= len(pairs)
    for write in writes:
        needed = ancestors([write])
        assert all(value.op in needed for value in [loss, *(g for g, _ in pairs)])


def test_a_negative_weight_fails_its_micro_step():
    weight = v1.placeholder(tf.float32, [])
    run = _Run(2, weight=weight)
    run.session.run(run.train_op, {run.gradient: 1.0, weight: 1.0})
    with pytest.raises(tf.errors.InvalidArgumentError, match="`weight` must be >= 0"):
        run.session.run(run.train_op, {run.gradient: 5.0, weight: -1.0})
    run.session.run(run.train_op, {run.gradient: 4.0, weight: 2.0})
    assert float(run.session.run(run.x)[0]) == -3.0


@pytest.mark.parametrize(
    ("policy", "value"),
    [("raise", -3.0), ("skip_micro_batch", -3.0), ("skip_window", 0)],
)
def test_a_weight_that_is_nan_is_for_the_policy(policy, value):
    weight = v1.placeholder(tf.float32, [])
    run = _Run(2, weight=weight, on_nonfinite=policy)
    run.session.run(run.train_op, {run.gradient: 1.0, weight: 1.0})
    feeds = {run.gradient: 5.0, weight: np.nan}
    if policy == "raise":
        with pytest.raises(tf.errors.InvalidArgumentError, match="the weight"):
            run.session.run(run.train_op, feeds)
    else:
        run.session.run(run.train_op, feeds)
    run.session.run(run.train_op, {run.gradient: 4.0, weight: 2.0})
    assert float(run.session.run(run.x)[0]) == value


def test_strings_are_on_no_gpu():
    """Else a session without soft placement would not run the train op."""
    with tf.device("/gpu:0"):
        x, weight = v1.get_variable("x", initializer=0.0), v1.placeholder(tf.int32, [])
        options = {"weight": weight, "on_nonfinite": "raise"}
        make_accumulating_train_op(x, sgd(), lambda step: step + 1, **options)
    definition = v1.get_default_graph().as_graph_def()
    inner = [n for function in definition.library.function for n in function.node_def]
    nodes = [*definition.node, *inner]
    of_strings = [
        n for n in nodes if n.attr["dtype"].type == tf.string.as_datatype_enum
    ]
    of_strings += [n for n in nodes if n.op in ("StringJoin", "ReduceJoin", "AsString")]
    assert len(of_strings) > 6
    assert [n.name for n in of_strings if "GPU" in n.device.upper()] == []


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("policy", ["raise", "skip_micro_batch", "skip_window"])
def test_a_mean_over_nothing_adds_nothing(policy, place):
    """Its weight is 0 and its mean 0 / 0, as when all tokens are masked."""
    mask = v1.placeholder(tf.float32, [3])
    x = v1.get_variable("x", initializer=0.0)
    table = v1.get_variable("table", initializer=[0.0, 0.0])
    value = x + tf.gather(table, 1)
    loss = tf.reduce_sum(mask * value * [1.0, 2.0, 6.0]) / tf.reduce_sum(mask)
    options = {"weight": tf.reduce_sum(mask), "on_nonfinite": policy}
    train_op = make_accumulating_train_op(loss, sgd(), 4, **options)
    masks = [[1, 1, 0], [1, 0, 0], [0, 0, 1]]
    masks.insert(place, [0, 0, 0])
    fetches = [x, table, get_or_create_update_step()]
    values = after_each(train_op, [{mask: fed} for fed in masks * 2], fetches)[-1]
    assert values[0] == -5.0 and values[1].tolist() == [0.0, -5.0] and values[2] == 2
