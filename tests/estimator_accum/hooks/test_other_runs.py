"""The hooks add nothing to a `session.run` that is not a micro-step."""

import csv
import logging
import signal

import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    make_accumulating_train_op,
    make_accumulation_hooks,
)
from tests.helpers.models.interfaces import sgd
from tests.helpers.processes import running

pytestmark = pytest.mark.usefixtures("fresh_graph")
v1 = tf.compat.v1


def _variable(name: str):
    return v1.get_variable(name, [], initializer=v1.zeros_initializer())


def _train_op(loss, variable, steps=2):
    return make_accumulating_train_op(loss, sgd(), steps, var_list=[variable])


def _updates(path) -> list[str]:
    with open(path, newline="") as file:
        return [row["update_step"] for row in csv.DictReader(file)]


def test_runs_of_anything_else_train_nothing(tmp_path):
    w, v = _variable("w"), _variable("v")
    loss = -w - v
    d, g = _train_op(loss, w), _train_op(loss, v)
    step = v1.train.get_global_step()
    hooks = make_accumulation_hooks(metrics_dir=tmp_path)
    with v1.train.MonitoredSession(hooks=hooks) as session:
        for fetches in (d, g, loss, {"w": w, "names": ["v:0", loss.op]}):
            for _ in range(4):
                session.run(fetches)
        assert session.run([w, v, step]) == [2.0, 2.0, 8]
        session.run([d, g])
        session.run([d, g])
        assert session.run([w, v, step]) == [3.0, 3.0, 12]
    assert _updates(tmp_path / "train_metrics.csv") == ["1", "2", "3"]
    assert _updates(tmp_path / "train_metrics_accumulation_1.csv") == ["1", "2", "3"]


class _Restore(v1.train.SessionRunHook):
    """Sets variables after the hooks before it, like one that broadcasts them."""

    def __init__(self, value):
        self._write = get_or_create_update_step().assign(value)

    def after_create_session(self, session, coord):
        session.run(self._write)


def test_updates_of_variables_that_a_hook_sets_are_not_missed(caplog):
    w = _variable("w")
    train_op = _train_op(-w, w)
    hooks = [*make_accumulation_hooks(), _Restore(1000)]
    with v1.train.MonitoredSession(hooks=hooks) as session:
        for _ in range(4):
            session.run(train_op)
    assert "no report shows" not in caplog.text


class _RunTrainOps(v1.train.SessionRunHook):
    """Trains like TF-GAN, whose EstimatorSpec has a train op that only counts."""

    def __init__(self, train_ops):
        self._train_ops = train_ops

    def before_run(self, run_context):
        for train_op in self._train_ops:
            run_context.session.run(train_op)


def test_train_ops_that_a_hook_runs_make_one_micro_step_each(caplog):
    caplog.set_level(logging.INFO, "tensorflow.estimator_accum")
    w, v = _variable("w"), _variable("v")
    train_ops = [_train_op(-w, w), _train_op(-v, v)]
    count = v1.assign_add(_variable("count"), 1.0)
    hooks = [_RunTrainOps(train_ops), *make_accumulation_hooks()]
    with v1.train.MonitoredSession(hooks=hooks) as session:
        for _ in range(8):
            session.run(count)
        assert session.run([w, v]) == [4.0, 4.0]
    lines = [m for m in caplog.messages if m.startswith("trained ")]
    assert [line.partition(",")[0] for line in lines] == ["trained 4 updates"]
    assert "The first update needs" not in caplog.text
    for name in ("accumulation", "accumulation_1"):
        assert f"{name}: no report shows 4 updates of runs that" in caplog.text


@pytest.mark.once
@pytest.mark.parametrize(("when", "runs"), [(True, 7), ("update", 8)])
def test_a_signal_stops_train_ops_that_a_hook_runs(tmp_path, when, runs):
    w = _variable("w")
    train_op, count = _train_op(-w, w), v1.assign_add(_variable("count"), 1.0)
    hooks = [_RunTrainOps([train_op]), *make_accumulation_hooks(save_on_signal=when)]
    with (
        pytest.raises(SystemExit),
        v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), hooks=hooks
        ) as session,
    ):
        for n in range(20):
            if n == 6:
                running.signal_training(signal.SIGTERM)
            if not session.should_stop():
                session.run(count)
    assert tf.train.load_variable(str(tmp_path), "count") == runs


def test_a_loop_over_epochs_may_initialize_its_iterator_again():
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0])
    iterator = v1.data.make_initializable_iterator(dataset)
    w = _variable("w")
    train_op = _train_op(-w * iterator.get_next(), w)
    with v1.train.MonitoredSession(hooks=make_accumulation_hooks()) as session:
        for _ in range(3):
            session.run(iterator.initializer)
            with pytest.raises(tf.errors.OutOfRangeError):
                while True:
                    session.run(train_op)
        assert session.run(w) == 3 * (1.5 + 3.5)


@pytest.mark.parametrize("is_over", [True, False])
def test_auto_knows_the_datas_end_behind_other_runs(tmp_path, is_over):
    """Three micro-steps at K = 2; then something else runs, then the session ends."""
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 4.0])
    iterator = v1.data.make_initializable_iterator(dataset)
    w = _variable("w")
    train_op = _train_op(-w * iterator.get_next(), w)
    saver = v1.train.CheckpointSaverHook(str(tmp_path), save_steps=1000)
    hooks = [saver, *make_accumulation_hooks()]
    with v1.train.MonitoredSession(hooks=hooks) as session:
        session.run(iterator.initializer)
        for _ in range(3):
            session.run(train_op)
        if is_over:
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(train_op)
        session.run(w)
    reader = tf.train.load_checkpoint(str(tmp_path))
    assert reader.get_tensor("w") == (5.5 if is_over else 1.5)
    assert reader.get_tensor("accumulation/micro_steps") == (0 if is_over else 1)


def test_a_train_op_inside_a_branch_is_refused_by_the_hooks(control_flow):
    w = _variable("w")
    optimizer = AccumulatingOptimizer(sgd(), 2)
    step = v1.train.get_or_create_global_step()
    pairs = optimizer.compute_gradients(-w)
    train_op = optimizer.apply_gradients
    v1.cond(step < 5, lambda: tf.group(train_op(pairs, step)), tf.no_op)
    with pytest.raises(ValueError, match="one inside a tf.cond or a loop. Make the"):
        v1.train.MonitoredSession(hooks=make_accumulation_hooks())


@pytest.mark.once
def test_sums_of_another_dtype_are_resumed_at_a_boundary(tmp_path):
    def train(dtype, micro_steps):
        with tf.Graph().as_default():
            v1.train.get_or_create_global_step()
            w = _variable("w")
            options = {"accumulator_dtype": dtype}
            train_op = make_accumulating_train_op(-w, sgd(), 2, **options)
            hooks = make_accumulation_hooks()
            with v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), hooks=[*hooks, _Counts()]
            ) as session:
                for _ in range(micro_steps):
                    session.run(train_op)
        reader = tf.train.load_checkpoint(str(tmp_path))
        return [reader.get_tensor(n) for n in ("w", "update_step", "counted")]

    assert train(tf.float64, 2) == [1.0, 1.0, 2.0]
    assert train(None, 3) == [2.0, 2.0, 5.0]  # the hook's variable is restored too
    with pytest.raises(ValueError, match="Restart with accumulator_dtype=tf.float32"):
        train(tf.float64, 1)
    assert train(None, 1) == [3.0, 3.0, 6.0]


@pytest.mark.parametrize("first_steps", [None, 1])
def test_every_train_op_counts_on_where_accumulation_begins(tmp_path, first_steps):
    def train(steps, runs):
        with tf.Graph().as_default():
            w, v = _variable("w"), _variable("v")
            step = v1.train.get_or_create_global_step()
            if steps is None:
                ops, hooks = [v1.assign_add(step, 1)], []
            else:
                ops = [_train_op(-w, w, steps), _train_op(-v, v, steps)]
                hooks = make_accumulation_hooks(metrics_dir=tmp_path)
            with v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path), hooks=hooks
            ) as session:
                for _ in range(runs):
                    for op in ops:
                        session.run(op)
        return tf.train.load_checkpoint(str(tmp_path))

    train(first_steps, 3)
    reader = train(2, 4)
    for name in ("update_step", "accumulation_1/update_step"):
        assert reader.get_tensor(name) == 3 + 2
    updates = _updates(tmp_path / "train_metrics_accumulation_1.csv")
    assert updates == [str(n) for n in range(1 if first_steps else 4, 6)]


class _Counts(v1.train.SessionRunHook):
    """Makes a variable after the hooks before it."""

    def begin(self):
        self._count = v1.assign_add(_variable("counted"), 1.0)

    def before_run(self, run_context):
        is_step = isinstance(run_context.original_args.fetches, tf.Operation)
        return v1.train.SessionRunArgs(self._count) if is_step else None
