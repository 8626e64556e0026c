"""The train op, micro-step by micro-step."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    get_windows,
    make_accumulating_train_op,
)
from estimator_accum.graph.walks import ancestors
from tests.helpers.models.interfaces import after_each, sgd, start_session
from tests.helpers.models.script_models import Assigning
from tests.helpers.models.toy_models import (
    OPTIMIZERS,
    make_batches,
    make_model,
    train_accumulating,
    train_plain,
)

pytestmark = pytest.mark.usefixtures("fresh_graph", "graph_optimizer")
v1 = tf.compat.v1
_STEPS = "gradient_accumulation_steps"


class _Minimizing(v1.train.GradientDescentOptimizer):
    def minimize(self, loss, *args, **kwargs):
        return super().minimize(2 * loss, *args, **kwargs)


def _linear_loss(initial=0.0):
    """Returns a loss with a fed gradient."""
    gradient = v1.placeholder(tf.float32, [])
    variable = v1.get_variable("x", initializer=initial)
    return gradient, variable, gradient * variable


@pytest.mark.core
def test_state_table():
    """After each micro-step: x, its sum, micro_steps, global_step, update_step."""
    gradient, variable, loss = _linear_loss()
    train_op = make_accumulating_train_op(loss, sgd(), 3)
    names = {v.op.name: v for v in v1.global_variables()}
    columns = [variable, names["x/accumulator"], names["accumulation/micro_steps"]]
    columns += [v1.train.get_global_step(), get_or_create_update_step()]
    with start_session() as session:
        table = [session.run(columns)]
    feeds = [{gradient: value} for value in [1, 2, 6, 4, 4, 4]]
    table += after_each(train_op, feeds, columns)
    assert table == [
        [0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 3, 2, 2, 0],
        [-3, 9, 0, 3, 1],  # the sum stays until the next window overwrites it
        [-3, 4, 1, 4, 1],
        [-3, 8, 2, 5, 1],
        [-7, 12, 0, 6, 2],
    ]


def test_a_window_has_the_attributes_of_its_records():
    make_accumulating_train_op(_linear_loss()[-1], sgd(), 3)
    (window,) = get_windows()
    records = window.plan, window.plan.state, window.step, window.step.result
    for record in records:
        for name in set(record._fields) - {"state"}:
            assert getattr(window, name) is getattr(record, name)
    assert window.state == window.plan.state.saved
    assert (window.name, window.has_several_micro_steps) == ("accumulation", True)
    with pytest.raises(AttributeError, match="A window has no attribute losses"):
        window.losses  # noqa: B018


@pytest.mark.parametrize("steps", [1, 2])
def test_global_step_changes_after_hooks_have_read_it(steps):
    _, _, loss = _linear_loss()
    v1.train.get_or_create_global_step()
    counter = v1.train.StepCounterHook()
    counter.begin()
    read = counter.before_run(None).fetches
    train_op = make_accumulating_train_op(loss, sgd(), steps)
    assert read.op in ancestors([train_op])


@pytest.mark.parametrize("name", ["Adam", "Momentum", "RMSProp (centered)", "Ftrl"])
def test_between_boundaries_nothing_changes_and_on_them_everything_does(name):
    model = make_model()
    optimizer = OPTIMIZERS[name](0.1, None)
    train_op = make_accumulating_train_op(model.loss, optimizer, 3)
    frozen = [model.dense, model.embedding, *optimizer.variables()]
    with start_session() as session:
        before = session.run(frozen)
        for micro_step, batch in enumerate(make_batches(9, 4), start=1):
            session.run(train_op, dict(zip(model.feeds, batch, strict=True)))
            after = session.run(frozen)
            changed = [not np.array_equal(a, b) for a, b in zip(before, after)]
            assert all(changed) if micro_step % 3 == 0 else not any(changed)
            before = after


def test_two_thousand_micro_steps_make_five_hundred_updates_none_off_phase():
    """With 8 threads between operations, the predicate's read has no race."""
    gradient, variable, loss = _linear_loss()
    train_op = make_accumulating_train_op(loss, sgd(), 4)
    update_step = get_or_create_update_step()
    config = v1.ConfigProto(inter_op_parallelism_threads=8)
    with start_session(config) as session:
        run = session.make_callable(train_op, [gradient])
        for micro_step in range(1, 2001):
            run(1.0)
            assert session.run(update_step) == micro_step // 4
        assert session.run(variable) == -500


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_variables_are_those_of_the_plain_graph_plus_accumulation_state(name):
    plain = train_plain(OPTIMIZERS[name], [])
    with v1.variable_scope("unrelated"), tf.name_scope("scope"):
        pass
    model = make_model()
    update_step = get_or_create_update_step()
    optimizer = OPTIMIZERS[name](tf.constant(0.1), update_step)
    make_accumulating_train_op(model.loss, optimizer, 3)
    names = {v.op.name for v in v1.global_variables()}
    ours = ("micro_steps", "weight", "loss")
    accumulators = ("dense/accumulator", "embedding/accumulator")
    assert names == plain.keys() | {
        *("update_step", *(f"accumulation/{name}" for name in ours)),
        *(*accumulators, "embedding/accumulator_rows"),
    }


def test_names_do_not_depend_on_the_callers_scopes():
    with v1.variable_scope("tower"), tf.name_scope("train"):
        _, _, loss = _linear_loss()
        make_accumulating_train_op(loss, sgd(), 3)
    names = {v.op.name for v in v1.global_variables()}
    assert {"tower/x/accumulator", "update_step", "accumulation/micro_steps"} <= names


def test_a_variable_without_gradient_is_skipped():
    gradient, variable, loss = _linear_loss()
    unused = v1.get_variable("unused", initializer=5.0)
    optimizer = v1.train.MomentumOptimizer(1.0, 0.9)
    train_op = make_accumulating_train_op(loss, optimizer, 2, clip_norm=10.0)
    table = after_each(train_op, [{gradient: 1.0}] * 2, [variable, unused])
    assert table[-1] == [-1.0, 5.0]
    assert "unused/accumulator" not in [v.op.name for v in v1.global_variables()]


def test_var_list_trains_nothing_else():
    model = make_model()
    train_op = make_accumulating_train_op(model.loss, sgd(), 2, var_list=[model.dense])
    feeds = [dict(zip(model.feeds, batch, strict=True)) for batch in make_batches(2, 4)]
    before, after = after_each(train_op, feeds, [model.dense, model.embedding])
    assert not np.array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1], before[1])


def test_mixed_dtypes_have_sums_of_their_own_or_of_float32():
    scale = v1.placeholder(tf.float64, [])
    dtypes = [tf.float16, tf.float32, tf.float64]
    variables = [v1.get_variable(d.name, [2], d) for d in dtypes]
    loss = sum(tf.reduce_sum(tf.cast(v, tf.float64)) for v in variables) * scale
    train_op = make_accumulating_train_op(loss, sgd(0.5), 2, clip_norm=1e6)
    accumulators = [v for v in v1.global_variables() if "/accumulator" in v.name]
    sums = [v.dtype.base_dtype for v in accumulators]
    assert sums == [tf.float32, tf.float32, tf.float64]
    before, after = after_each(train_op, [{scale: 2.0}, {scale: 6.0}], variables)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old - 2, rtol=2e-3)


class _SparseSpy(v1.train.GradientDescentOptimizer):
    """Records the last gradients that it was given."""

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        grads_and_vars = list(grads_and_vars)
        self.seen = [gradient for gradient, _ in grads_and_vars]
        rows = self.seen[0].indices
        # A variable, because tensors in a branch of a tf.cond cannot be fetched.
        with tf.init_scope():
            self.rows = v1.get_variable("rows", [4], tf.bool, trainable=False)
        mask = tf.scatter_nd(rows[:, None], tf.ones_like(rows), [4])
        with tf.control_dependencies([self.rows.assign(mask > 0, read_value=False)]):
            return super().apply_gradients(grads_and_vars, *args, **kwargs)


def test_the_optimizer_sees_indexed_slices_over_the_rows_of_the_window():
    ids = v1.placeholder(tf.int32, [None])
    table = v1.get_variable("table", [4, 2], initializer=tf.zeros_initializer())
    optimizer = _SparseSpy(1.0)
    loss = tf.reduce_sum(tf.gather(table, ids))
    train_op = make_accumulating_train_op(loss, optimizer, 2)
    assert isinstance(optimizer.seen[0], tf.IndexedSlices)
    feeds = [{ids: micro_batch} for micro_batch in ((0, 0), (2,), (3,), (3, 1))]
    values = after_each(train_op, feeds, [optimizer.rows, table])
    assert values[1][0].tolist() == [True, False, True, False]
    assert values[3][0].tolist() == [False, True, False, True]
    np.testing.assert_array_equal(values[3][1][:, 0], [-1, -0.5, -0.5, -1])


def test_an_embedding_costs_a_micro_step_the_rows_that_it_touches():
    """No operation of the train op allocates a tensor of the table's size."""
    ids = v1.placeholder(tf.int32, [None])
    table = v1.get_variable("table", [1 << 20, 16], initializer=tf.zeros_initializer())
    optimizer = v1.train.AdagradOptimizer(1.0)
    train_op = make_accumulating_train_op(
        tf.reduce_sum(tf.gather(table, ids)), optimizer, 4, clip_norm=1.0
    )
    table_bytes = (1 << 20) * 16 * 4
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    with start_session() as session:
        for _ in range(4):  # a table's first sparse update copies it, once
            session.run(train_op, {ids: [5, 9, 5]})
        for _ in range(4):
            metadata = v1.RunMetadata()
            session.run(train_op, {ids: [5, 9, 5]}, options, metadata)
            allocated = [
                memory.total_bytes
                for device in metadata.step_stats.dev_stats
                for node in device.node_stats
                for memory in node.memory
            ]
            assert sum(allocated) < table_bytes / 10  # the mask of touched rows


def test_an_optimizer_may_make_variables_inside_apply_gradients():
    """As BERT's AdamWeightDecayOptimizer does."""

    def make(rate, step):
        return Assigning(0.1)

    batches = make_batches(5, 6)
    ours, plain = train_accumulating(make, batches, 2), train_plain(make, batches)
    slots = [name for name in plain if "adam" in name]
    assert len(slots) == 4
    for name in ["dense", "embedding", *slots]:
        np.testing.assert_allclose(ours[name], plain[name], rtol=2e-5, atol=1e-6)


def test_the_meta_graph_can_be_imported_again(tmp_path):
    _, _, loss = _linear_loss()
    train_op = make_accumulating_train_op(loss, sgd(), 3)
    v1.train.export_meta_graph(str(tmp_path / "graph.meta"))
    with tf.Graph().as_default() as graph:
        v1.train.import_meta_graph(str(tmp_path / "graph.meta"))
        (imported,) = graph.get_collection(v1.GraphKeys.TRAIN_OP)
        assert imported.name == train_op.name


@pytest.mark.parametrize("weights", [(1, 1), (1, 3)])
def test_the_window_reports_its_mean_loss_and_norm_before_clipping(weights):
    gradient, _, loss = _linear_loss(initial=2.0)
    weight = v1.placeholder(tf.float32, [])
    options = {"clip_norm": 0.25, "weight": weight}
    train_op = make_accumulating_train_op(loss, sgd(), 2, **options)
    (window,) = get_windows()
    fetches = [window.loss, window.gradient_norm, window.weight, window.mean_loss]
    fetches += [window.has_updated]
    with start_session() as session:
        feed = {gradient: 1.0, weight: weights[0]}
        _, values = session.run([train_op, fetches], feed)
        np.testing.assert_array_equal(values, [np.nan, np.nan, np.nan, 2.0, False])
        feed = {gradient: 5.0, weight: weights[1]}
        _, values = session.run([train_op, fetches], feed)
    mean = np.average([1.0, 5.0], weights=weights)
    expected = [2 * mean, mean, sum(weights), 2 * mean, True]
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({_STEPS: 0}, ValueError, r"integer >= 1\. Received: 0\. Use 1"),
        ({_STEPS: -3}, ValueError, r"integer >= 1\. Received: -3\. Use 1"),
        ({_STEPS: 2.5}, TypeError, r"integer >= 1 or .*Received: 2\.5\. Use 1"),
        ({_STEPS: True}, TypeError, r"integer >= 1 or .*Received: True\. Use 1"),
        ({_STEPS: lambda _: 0.5}, ValueError, "return an integer scalar.*float32 of"),
        ({"clip_norm": 0}, ValueError, "must be a finite number > 0 or None"),
        ({"clip_norm": -1.0}, ValueError, "must be a finite number > 0 or None"),
        ({"clip_norm": float("inf")}, ValueError, "must be a finite number > 0 or N"),
        ({"clip_norm": float("nan")}, ValueError, "must be a finite number > 0 or N"),
        ({"clip_norm": "1"}, TypeError, "must be a number > 0 or None"),
        ({"weight": [1, 1]}, ValueError, r"`weight` must be a scalar.*\(2,\)"),
        ({"weight": 0}, ValueError, "must be > 0; .*Received: 0 for every micro-batch"),
        ({"weight": -1.0}, ValueError, "must be > 0; .*Received: -1.0 for every micro"),
        ({"loss": [1.0, 2.0, 3.0]}, ValueError, r"`loss` must be a sc.*\(3,\).*Reduce"),
        ({"loss": None}, TypeError, r"`loss` must be a scalar Tensor\. Received: None"),
        ({"loss": "loss"}, TypeError, r"`loss` must be a number\. Received: 'loss'"),
        ({"loss": 3}, TypeError, "must be a floating-point scalar"),
        ({"loss": 1.0}, ValueError, "must depend on a trained variable.*Const:0"),
        ({"var_list": "v"}, TypeError, "must hold variables. Received: 'v'. Pass th"),
        ({"name": "a b"}, ValueError, "`name` must be a TensorFlow scope.*Rec.*'a b'"),
        (
            {"optimizer": tf.keras},
            TypeError,
            "train.Optimizer. .* For Keras optimizers",
        ),
        ({"optimizer": "Adam"}, TypeError, "Received: 'Adam'. Make one, such as"),
        (
            {"optimizer": type(sgd())},
            TypeError,
            "Received: <class .* Make one, such as",
        ),
        (
            {"optimizer": _Minimizing(1.0)},
            TypeError,
            r"must not override minimize\(\).* Received: _Minimizing\. Override c",
        ),
        ({"var_list": []}, ValueError, "must depend on a trained variable. Received"),
        ({"sparse_norm": "true"}, ValueError, "must be one of 'rows' and 'slices'"),
        ({"sparse_norm": "slices", "noise_scale": True}, ValueError, "must be 'rows'"),
        ({"on_nonfinite": "ignore"}, ValueError, "nonfinite` must be one.*'ignore'"),
        ({"accumulator_dtype": tf.int32}, ValueError, "must be a floating-point"),
    ],
)
def test_an_argument_that_cannot_be_is_refused(options, error, sentence):
    _, _, loss = _linear_loss()
    arguments = {"loss": loss, "optimizer": sgd(), _STEPS: 2} | options
    with pytest.raises(error, match=sentence):
        make_accumulating_train_op(**arguments)
    loss = arguments.pop("loss")
    if loss != 1.0 and "var_list" not in options:  # those TensorFlow itself refuses
        with pytest.raises(error, match=sentence):
            AccumulatingOptimizer(**arguments).minimize(loss)


def test_another_argument_in_the_place_of_the_number_is_told_its_name():
    _, _, loss = _linear_loss()
    step, remedy = (
        v1.train.get_or_create_global_step(),
        "other arguments by their names",
    )
    for make, *arguments in (
        (make_accumulating_train_op, loss, sgd(), step),
        (make_accumulating_train_op, loss, 4, sgd()),
        (AccumulatingOptimizer, 4, sgd()),
    ):
        with pytest.raises(
            TypeError, match=f"Received: <.* number of Python.* {remedy}"
        ):
            make(*arguments)


def test_a_variable_of_unknown_shape_is_refused():
    x = v1.Variable([1.0], shape=[None], name="x", use_resource=True)
    with pytest.raises(ValueError, match=r"static shape\. Received: x:0 of shape \(No"):
        make_accumulating_train_op(tf.reduce_sum(x * x), sgd(), 2)


def test_a_schedule_that_falls_to_zero_is_an_error_when_it_runs():
    gradient, _, loss = _linear_loss()
    train_op = make_accumulating_train_op(loss, sgd(), lambda step: 1 - step)
    with start_session() as session:
        session.run(train_op, {gradient: 1.0})
        with pytest.raises(tf.errors.InvalidArgumentError, match="integer >= 1"):
            session.run(train_op, {gradient: 1.0})


def test_cross_replica_context_is_refused():
    _, _, loss = _linear_loss()
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    with strategy.scope(), pytest.raises(ValueError, match="in replica context"):
        make_accumulating_train_op(loss, v1.train.AdamOptimizer(), 2)


def test_a_reference_variable_is_refused_where_tf_cond_cannot_hold_it():
    if not v1.control_flow_v2_enabled():
        pytest.skip("v1 control flow holds reference variables")
    x = v1.get_variable("x", [], use_resource=False)
    with pytest.raises(ValueError, match=r"reference variable x:0.*use_resource=True"):
        make_accumulating_train_op(x * 1.0, v1.train.AdamOptimizer(), 2)


def test_two_train_ops_have_windows_of_their_own_even_over_one_variable():
    """Both train x: the first every 2nd micro-step, the second every 3rd."""
    x = v1.get_variable("x", initializer=0.0)
    first = make_accumulating_train_op(x * 1.0, sgd(), 2)
    second = make_accumulating_train_op(x * 100.0, sgd(), 3)
    windows = get_windows()
    assert [window.name for window in windows] == ["accumulation", "accumulation_1"]
    values = []
    with start_session() as session:
        for _ in range(6):
            session.run(first)
            session.run(second)
            values.append(int(session.run(x)))
        counts = session.run([window.update_step for window in windows])
    assert values == [0, -1, -101, -102, -102, -203]
    assert counts == [3, 2]
    assert get_or_create_update_step() is windows[0].update_step


def test_the_name_of_a_train_op_is_its_own():
    x = v1.get_variable("x", [])
    make_accumulating_train_op(x * 1.0, sgd(), 2, name="first")
    with pytest.raises(ValueError, match=r"`name` must be unique.*'first'"):
        make_accumulating_train_op(x * 1.0, sgd(), 2, name="first")


@pytest.mark.parametrize("steps", [1, 2])
def test_the_weight_counts_and_is_not_differentiated(steps):
    """The gradient of w * w at 2 is 4, whatever its weight."""
    x = v1.get_variable("x", initializer=2.0)
    train_op = make_accumulating_train_op(x * x, sgd(), steps, weight=x)
    assert after_each(train_op, [{}] * steps, x)[-1] == -2


def test_a_micro_step_that_fails_leaves_the_accumulators_as_they_were():
    ids = v1.placeholder(tf.int32, [None])
    target = v1.placeholder(tf.float32, [None])
    table = v1.get_variable("table", [4], initializer=tf.zeros_initializer())
    checked = tf.debugging.check_numerics(target, "no target")
    loss = tf.reduce_mean(tf.gather(table, ids) - checked)
    train_op = make_accumulating_train_op(loss, v1.train.MomentumOptimizer(1.0, 0.9), 4)
    with start_session() as session:
        session.run(train_op, {ids: [0], target: [1.0]})
        before = session.run(v1.global_variables())
        for _ in range(20):
            with pytest.raises(tf.errors.InvalidArgumentError):
                session.run(train_op, {ids: [2], target: [np.nan]})
        for old, new in zip(before, session.run(v1.global_variables()), strict=True):
            np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("interface", ["train_op", "optimizer"])
def test_autograph_leaves_the_library_as_it_is(interface):
    """Under a strategy, Estimator calls a model_fn with AutoGraph enabled."""
    seen = []

    class Recording(v1.train.GradientDescentOptimizer):
        def compute_gradients(self, *args, **kwargs):
            seen.append(ag_ctx.control_status_ctx().status)
            return super().compute_gradients(*args, **kwargs)

        def apply_gradients(self, *args, **kwargs):
            seen.append(ag_ctx.control_status_ctx().status)
            return super().apply_gradients(*args, **kwargs)

    _, _, loss = _linear_loss()
    with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):
        if interface == "train_op":
            make_accumulating_train_op(loss, Recording(1.0), 2)
        else:
            step = v1.train.get_or_create_global_step()
            AccumulatingOptimizer(Recording(1.0), 2).minimize(loss, step)
    assert len(seen) == 2 and ag_ctx.Status.ENABLED not in seen


@pytest.mark.parametrize("wrap", [lambda function: function, tf.function])
def test_large_weights_do_not_overflow_what_is_computed_in_half_precision(wrap):
    x = v1.get_variable("x", initializer=0.0)

    @wrap
    def in_half(x):
        product = tf.cast(x, tf.float16) * tf.constant(100, tf.float16)
        return tf.cast(product, tf.float32)

    loss, weight = in_half(x), tf.constant(4096.0)
    train_op = make_accumulating_train_op(loss, sgd(), 2, weight=weight)
    assert after_each(train_op, [{}, {}], x)[-1] == -100.0


@pytest.mark.parametrize("wrap", [lambda function: function, tf.function])
def test_a_gradient_that_somebody_wrote_gets_no_weight(wrap):
    @wrap
    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda gradient: tf.clip_by_value(gradient, -1.0, 1.0)

    slope, x, _ = _linear_loss()
    weight = v1.placeholder(tf.float32, [])
    loss = slope * clipped(x)
    train_op = make_accumulating_train_op(loss, sgd(), 2, weight=weight)
    feeds = [{slope: 0.5, weight: 6.0}, {slope: 0.25, weight: 2.0}]
    assert after_each(train_op, feeds, x)[-1] == -0.4375
