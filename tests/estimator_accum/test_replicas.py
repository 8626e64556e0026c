"""Two replicas in one process."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    get_windows,
    make_accumulating_train_op,
)
from estimator_accum.core import applying
from estimator_accum.core.replica_divisor import replica_divisor_of
from estimator_accum.core.v1_optimizers import always_reduces
from estimator_accum.graph.walks import ancestors
from estimator_accum.keras import accumulate
from tests.helpers.models.interfaces import sgd, start_session
from tests.helpers.models.replicas import TWO_CPUS, two_replicas

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
NAN = float("nan")


class _TwoReplicas:
    """Two replicas of x, each with its own fed gradient."""

    def __init__(self, make_train_op, divides_the_loss=False):
        with tf.Graph().as_default():
            strategy = two_replicas()
            # Estimator sets it around its model_fn.
            strategy._scale_loss_for_estimator = divides_the_loss
            with strategy.scope():
                self._build(strategy, make_train_op)

    def _build(self, strategy, make_train_op):
        self._gradients = v1.placeholder(tf.float32, [2])
        v1.train.get_or_create_global_step()

        def replica():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            x = v1.get_variable("x", initializer=0.0)
            return make_train_op(x * self._gradients[number])

        results = strategy.extended.call_for_each_replica(replica)
        self._train_op = strategy.group(results)
        x = next(v for v in v1.global_variables() if v.op.name == "x")
        self._x = [v.read_value() for v in strategy.experimental_local_results(x)]
        self._window = get_windows()[0]
        self._update_step = get_or_create_update_step().read_value()
        self.saver = v1.train.Saver()
        self.session = start_session(TWO_CPUS)

    def __call__(self, *gradients):
        """Returns x after each micro-step; it is the same on both replicas."""
        values = []
        for pair in gradients:
            fetches = [self._train_op, self._window.noise_scale]
            _, self.noise_scale = self.session.run(fetches, {self._gradients: pair})
            first, second = self.session.run(self._x)
            assert first == second
            values.append(float(first))
        return values

    def update_step(self):
        return self.session.run(self._update_step)


def _train_op(steps, **options):
    return lambda loss: make_accumulating_train_op(loss, sgd(), steps, **options)


def _minimize(loss):
    return AccumulatingOptimizer(sgd(), 2).minimize(loss, v1.train.get_global_step())


def _apply_own_gradients_after_a_call_of_compute_gradients(loss):
    sgd().compute_gradients(loss)
    x = v1.trainable_variables()
    gradients = tf.gradients(loss, x)
    pairs = [(gradients[i], v) for i, v in enumerate(x)]  # AutoGraph's zip of 2.12
    step = v1.train.get_global_step()
    return AccumulatingOptimizer(sgd(), 2).apply_gradients(pairs, step)


def _apply_gradients_that_another_optimizer_computed(loss):
    pairs = [(1.0 * g, v) for g, v in sgd().compute_gradients(loss)]
    step = v1.train.get_global_step()
    return AccumulatingOptimizer(sgd(), 2).apply_gradients(pairs, step)


def _halve_in_a_function_named_as_tensorflows(loss):
    def _scale_loss(loss):
        return 4.0 * loss * tf.constant(0.5)  # 1 / replicas

    return _apply_own_gradients_after_a_call_of_compute_gradients(_scale_loss(loss) / 2)


@pytest.mark.parametrize(
    "make_train_op",
    [
        _train_op(2),
        _minimize,
        _apply_own_gradients_after_a_call_of_compute_gradients,
        _apply_gradients_that_another_optimizer_computed,
        _halve_in_a_function_named_as_tensorflows,
    ],
)
def test_whoever_computes_the_gradients_they_are_averaged_once(make_train_op):
    run = _TwoReplicas(make_train_op, divides_the_loss=True)
    assert run((1, 2), (3, 6), (1, 1), (1, 1)) == [0, -3, -3, -4]


@pytest.mark.parametrize(
    ("steps", "fed", "expected"),
    [(1, [(0, 6), (4, 0)], [-1, -1.5]), (2, [(0, 0), (0, 8), (1, 1)], [0, -1, -1])],
)
def test_the_mean_over_replicas_is_changed(steps, fed, expected):
    """Clipped to 1, with weight decay from the replica's own copy."""

    def make(loss):
        optimizer = AccumulatingOptimizer(sgd(), steps)
        ((gradient, x),) = optimizer.compute_gradients(loss)
        gradient = tf.clip_by_value(gradient, 0.0, 1.0) + 0.5 * x
        step = v1.train.get_global_step()
        return optimizer.apply_gradients([(gradient, x)], step)

    run = _TwoReplicas(make, divides_the_loss=True)
    assert run(*fed) == expected


def test_random_numbers_of_a_change_are_the_same_in_all_replicas():
    def make(draw):
        def make_train_op(loss):
            optimizer = AccumulatingOptimizer(sgd(), 2)
            ((gradient, x),) = optimizer.compute_gradients(loss)
            step = v1.train.get_global_step()
            return optimizer.apply_gradients([(gradient + draw(), x)], step)

        return make_train_op

    with pytest.raises(ValueError, match="Use tf.random.stateless_normal, say, with"):
        _TwoReplicas(make(lambda: tf.random.normal([])))

    def stateless():
        seed = tf.stack([tf.constant(5, tf.int64), get_or_create_update_step()])
        return tf.random.stateless_normal([], seed)

    run = _TwoReplicas(make(stateless))
    noise = run((1, 2), (3, 6))[-1] + 3.0, run((0, 0), (0, 0))[-1] + 3.0
    assert noise[0] != 0.0 and noise[1] != 2.0 * noise[0]


def _central_storage():
    """Strategy whose replicas would all apply the window to the shared variables."""
    devices = ["/cpu:0", "/cpu:1"]
    return tf.distribute.experimental.CentralStorageStrategy(devices, "/cpu:0")


def test_a_variable_that_replicas_share_is_refused():
    strategy = _central_storage()
    with tf.Graph().as_default(), strategy.scope():
        v1.train.get_or_create_global_step()

        def replica():
            return _train_op(2)(1.0 * v1.get_variable("x", initializer=0.0))

        sentence = "Received: x:0 with 1 for 2 replicas of a"
        with pytest.raises(ValueError, match=sentence):
            strategy.extended.call_for_each_replica(replica)


def test_a_variable_that_replicas_share_is_refused_with_keras(kind):
    with _central_storage().scope():
        variable = tf.Variable(0.0)
        optimizer = accumulate(kind.optimizer("SGD", 1.0), 2)
        with pytest.raises(ValueError, match="with 1 for 2 replicas of a CentralStor"):
            optimizer.build([variable])


@pytest.mark.core
@pytest.mark.parametrize("steps", [1, 2])
def test_sums_add_up_over_replicas(steps):
    run = _TwoReplicas(_train_op(steps, reduction="sum"))
    assert run(*[(1, 2), (3, 6)][:steps]) == [[-3], [0, -12]][steps - 1]


@pytest.mark.parametrize(
    ("steps", "fed", "expected", "updates"),
    [
        (1, [(NAN, 4), (2, 4), (NAN, NAN), (1, 3)], [-4, -7, -7, -9], 3),
        (2, [(NAN, 4), (2, 6), (1, 1), (1, NAN)], [0, -4, -4, -5], 2),
    ],
)
def test_a_micro_batch_of_one_replica_is_left_out_alone(steps, fed, expected, updates):
    run = _TwoReplicas(_train_op(steps, on_nonfinite="skip_micro_batch"))
    assert run(*fed) == expected
    assert run.update_step() == updates


def test_a_window_with_a_bad_replica_is_skipped_by_both():
    run = _TwoReplicas(_train_op(2, on_nonfinite="skip_window"))
    assert run((1, NAN), (1, 1), (2, 4), (2, 4)) == [0, 0, 0, -3]
    assert run.update_step() == 1


def test_a_bad_replica_is_named_by_the_variable():
    run = _TwoReplicas(_train_op(2))
    with pytest.raises(tf.errors.InvalidArgumentError, match="at micro-step 1 in x"):
        run((1, NAN))


class _OneReplica:
    """Like `_TwoReplicas`, on one device."""

    def __init__(self, make_train_op):
        with tf.Graph().as_default():
            self._gradient = v1.placeholder(tf.float32, [])
            v1.train.get_or_create_global_step()
            x = v1.get_variable("x", initializer=0.0)
            self._train_op, self._x = make_train_op(x * self._gradient), x.read_value()
            self.saver = v1.train.Saver()
            self.session = start_session()

    def __call__(self, *gradients):
        """Returns x after each micro-step."""
        values = []
        for gradient in gradients:
            self.session.run(self._train_op, {self._gradient: gradient})
            values.append(float(self.session.run(self._x)))
        return values


def _held(run, name):
    """Returns a variable's values, one for each replica that has a copy of it."""
    with run.session.graph.as_default() as graph:
        handles = [
            operation.outputs[0]
            for operation in graph.get_operations()
            if operation.type == "VarHandleOp"
            and operation.name.partition("/replica_")[0] == name
        ]
        dtype = tf.int64 if name.endswith("steps") else tf.float32
        reads = [tf.raw_ops.ReadVariableOp(resource=h, dtype=dtype) for h in handles]
        return run.session.run(reads)


def test_an_open_window_goes_on_with_another_number_of_replicas(tmp_path):
    first, second = [], []
    for before, after, run_before, run_after, sums, weights in (
        (_TwoReplicas, _OneReplica, [(1, 3), (5, 7)], [3, 5], [16], [4]),
        (_OneReplica, _TwoReplicas, [4, 8], [(1, 3), (5, 3)], [6, 6], [1, 1]),
    ):
        run = before(_train_op(4))
        first.append(run(*run_before))
        with run.session.graph.as_default():
            path = run.saver.save(run.session, str(tmp_path / before.__name__))
        run = after(_train_op(4))
        with run.session.graph.as_default():
            run.saver.restore(run.session, path)
        assert _held(run, "x/accumulator") == sums  # each has an equal share
        assert _held(run, "accumulation/weight") == weights
        assert set(_held(run, "accumulation/micro_steps")) == {2}
        second.append(run(*run_after))
    assert first == [[0, 0], [0, 0]]
    assert second == [[0, -4], [0, -4]]  # the mean of 6 gradients


@pytest.mark.parametrize("scale", [4.0, "dynamic"])
def test_loss_scaling_inside_reduces_to_the_same_mean(scale):
    def make(loss):
        optimizer = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(sgd(), scale)
        return make_accumulating_train_op(loss, optimizer, 2)

    run = _TwoReplicas(make)
    assert run((1, 2), (3, 6)) == [0, -3]
    if scale == "dynamic":
        assert run((1, NAN), (1, 1), (1, 1), (1, 1)) == [-3, -3, -3, -4]
        assert run.update_step() == 2


@pytest.mark.parametrize("steps", [1, 3])
def test_the_noise_scale_is_that_of_all_micro_batches(steps):
    """Compares with the formula, on the gradients of one window."""
    run = _TwoReplicas(_train_op(steps, noise_scale=True))
    gradients = np.array([(1.0, 2.0), (3.0, 6.0), (0.5, 1.0)])[:steps]
    run(*gradients)
    n, mean = gradients.size, gradients.mean()
    noise = (np.mean(gradients**2) - mean**2) * n / (n - 1)
    assert run.noise_scale == pytest.approx(noise / (mean**2 - noise / n), rel=1e-5)


def test_an_optimizer_of_older_tensorflows_reduces_what_is_divided(monkeypatch):
    for module in ("core.replica_context", "core.applying"):
        name = f"estimator_accum.{module}.always_reduces"
        monkeypatch.setattr(name, lambda optimizer: True)
    run = _TwoReplicas(_train_op(2))
    assert run((1, 2), (3, 6), (1, 1), (1, 1)) == [0, -3, -3, -4]


def test_a_tensorflow_whose_division_of_losses_has_moved_is_refused(monkeypatch):
    monkeypatch.delattr(v1.train.Optimizer, "_scale_loss")
    with tf.Graph().as_default():
        gradients = [tf.constant(1.0)]
        assert replica_divisor_of(gradients) == 1  # right with one replica
        with two_replicas().scope(), pytest.raises(RuntimeError) as refusal:
            replica_divisor_of(gradients)
    assert "Received: 2 replicas and TensorFlow 2." in str(refusal.value)


def test_sparse_gradients_that_workers_cannot_reduce_are_refused(monkeypatch):
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(strategy.extended, "_in_multi_worker_mode", lambda: True)
    dense, sparse = tf.zeros([2]), tf.IndexedSlices(tf.zeros([1]), [0], [2])
    applying._check_no_sparse_sums([dense])
    with pytest.raises(ValueError, match="sparse gradients of 1 variables. Install a"):
        applying._check_no_sparse_sums([dense, sparse])


@pytest.mark.skipif(
    always_reduces(sgd()), reason="before TensorFlow 2.13 every optimizer reduces again"
)
def test_an_optimizer_that_would_reduce_again_is_refused():
    class Own(v1.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            return super().apply_gradients(grads_and_vars, global_step, name)

    sentence = r"`skip_gradients_aggregation`.*Received: Own"
    with pytest.raises(ValueError, match=sentence):
        _TwoReplicas(lambda loss: make_accumulating_train_op(loss, Own(1.0), 2))


def test_each_replica_runs_the_updates_that_it_has_made():
    """One of another replica would need the other's micro-batch."""
    updates = []

    def make_train_op(loss):
        updates.append(tf.no_op("update"))
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, updates[-1])
        context = tf.distribute.get_replica_context()
        context.merge_call(lambda strategy: None)  # now all have made theirs
        return _train_op(2)(loss)

    graph = _TwoReplicas(make_train_op).session.graph
    first, second = (
        [
            operation.name
            for operation in graph.get_operations()
            if update in operation.control_inputs
        ]
        for update in updates
    )
    assert first and not any(name.startswith("replica_1/") for name in first)
    assert second and all(name.startswith("replica_1/") for name in second)


def test_without_replicas_all_updates_run():
    with tf.Graph().as_default():
        updates = [tf.no_op("update"), tf.no_op("replica_1/update")]
        for update in updates:
            v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
        train_op = _train_op(2)(2.0 * v1.get_variable("x", initializer=0.0))
        assert {*updates} <= {*ancestors([train_op])}


def test_a_half_in_an_imported_graph_scales_no_loss():
    """As in the copies of a recomputed layer: they do not say who made them."""
    with tf.Graph().as_default() as graph:
        tf.constant(0.5, name="half")
    definition = graph.as_graph_def()

    def make_train_op(loss):
        (half,) = tf.graph_util.import_graph_def(definition, return_elements=["half:0"])
        return _train_op(2)(2.0 * half * loss)

    assert _TwoReplicas(make_train_op)((1, 2), (3, 6)) == [0, -3]
