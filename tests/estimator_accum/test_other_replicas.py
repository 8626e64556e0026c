"""An open window is resumed by another number of replicas."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_windows,
    make_accumulating_train_op,
)
from estimator_accum.core.options import Options
from estimator_accum.keras._window import Variables, run_micro_step
from tests.helpers.models.interfaces import sgd
from tests.helpers.models.replicas import replicas_on_cpus
from tests.helpers.tables import first

v1 = tf.compat.v1
COUNTS = (1, 2, 3)
KERAS = "keras", "keras_mean", "keras_reduced"  # weighted, of batches, their sums
_PAIRS = [*itertools.product(COUNTS, COUNTS)]
STEPS, CLIP = 3, 0.5  # K and the clipping norm
ROWS, EXAMPLES = 5, 2

rng = np.random.default_rng(0)
DENSE = rng.normal(size=[STEPS, max(COUNTS), EXAMPLES, 3])
LOOKED_UP = rng.integers(
    0, ROWS - 1, size=[STEPS, max(COUNTS), EXAMPLES]
)  # not the last row
SLICES = rng.normal(size=[STEPS, max(COUNTS), EXAMPLES, 2])
WEIGHTS = rng.uniform(1.0, 3.0, size=[STEPS, max(COUNTS)])


class _Replicas:
    """Train ops of all interfaces under a number of replicas."""

    def __init__(self, count):
        with tf.Graph().as_default() as graph:
            strategy = replicas_on_cpus(count)
            strategy._scale_loss_for_estimator = True  # as Estimator sets it
            self._feeds = [
                [
                    v1.placeholder(tf.float64, [EXAMPLES, 3]),
                    v1.placeholder(tf.int64, [EXAMPLES]),
                    v1.placeholder(tf.float64, [EXAMPLES, 2]),
                    v1.placeholder(tf.float64, []),
                ]
                for _ in range(count)
            ]
            with strategy.scope():
                v1.train.get_or_create_global_step()
                self._keras = self._create_keras(strategy)
                results = strategy.extended.call_for_each_replica(self._train)
                self._train_op = strategy.group(results)
                self._saver = v1.train.Saver()
                trained = [v for v in v1.global_variables() if _is_trained(v.op.name)]
                self._values = {v.op.name: v.read_value() for v in trained}
                observed = get_windows()[1]
                self._observed = [observed.loss, observed.noise_scale]
            self._initialize = v1.global_variables_initializer()
            sizes = {"CPU": count}
            config = v1.ConfigProto(device_count=sizes, allow_soft_placement=True)
            self._session = v1.Session(config=config, graph=graph)

    def _create_keras(self, strategy):
        self._count = strategy.num_replicas_in_sync
        windows = {}
        for scope in KERAS:
            names = [f"{scope}/dense", f"{scope}/table"]
            trained = [
                v1.get_variable(name, initializer=tf.zeros(shape, tf.float64))
                for name, shape in zip(names, ([3], [ROWS, 2]), strict=True)
            ]
            windows[scope] = trained, Variables(names, trained)
        return windows

    def _train(self):
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        number = tf.get_static_value(tf.convert_to_tensor(number))
        *batch, weight = self._feeds[number]
        done = []
        for scope, weigh in (("slices", None), ("minimize", None), ("weights", weight)):
            with v1.variable_scope(scope):
                loss, variables = _loss(*batch)
            if scope == "minimize":
                optimizer = AccumulatingOptimizer(sgd(), STEPS, noise_scale=True)
                done.append(optimizer.minimize(loss, var_list=variables))
                continue
            options = {"clip_norm": CLIP, "sparse_norm": "slices"}
            step = make_accumulating_train_op(
                loss,
                sgd(),
                STEPS,
                weight=weigh,
                var_list=variables,
                **(options if weigh is None else {}),
            )
            done.append(step)
        return tf.group(*done, *(self._keras_step(k, batch, weight) for k in KERAS))

    def _keras_step(self, scope, batch, weight):
        (dense, table), window = self._keras[scope]
        examples, rows, slices = batch
        size = EXAMPLES * self._count  # Keras's loss is divided by replicas
        slices = tf.IndexedSlices(slices / size, rows, tf.constant([ROWS, 2], tf.int64))
        gradients = [tf.reduce_sum(examples, 0) / size, slices]
        if scope == "keras_reduced":  # as Keras 2's own optimizers may have done
            all_reduce = tf.distribute.get_replica_context().all_reduce
            gradients = all_reduce("SUM", [*map(tf.convert_to_tensor, gradients)])

        def apply(gradients, indices):
            del indices
            of_dense, of_table = gradients
            of_table = tf.convert_to_tensor(of_table)
            return [dense.assign_sub(of_dense).op, table.assign_sub(of_table).op]

        return run_micro_step(
            window,
            dict(enumerate(gradients)),
            weight if scope == "keras" else None,
            None,
            tf.constant(0, tf.int64),
            Options(None, STEPS),
            scope == "keras_reduced",
            apply,
        )

    def open(self, path):
        """Saves a window with all micro-batches but the last; returns its file."""
        self._session.run(self._initialize)
        for step in range(STEPS - 1):
            self._run(step)
        with self._session.graph.as_default():
            return self._saver.save(self._session, path)

    def close(self, path):
        """Resumes the window; returns values, the window's loss and noise scale."""
        with self._session.graph.as_default():
            self._saver.restore(self._session, path)
        loss, noise_scale = self._run(STEPS - 1)
        return self._session.run(self._values), loss, noise_scale

    def _run(self, step):
        batches = zip(DENSE[step], LOOKED_UP[step], SLICES[step], WEIGHTS[step])
        feeds = {
            feed: value
            for of_replica, batch in zip(self._feeds, batches)
            for feed, value in zip(of_replica, batch, strict=True)
        }
        return self._session.run([self._train_op, *self._observed], feeds)[1:]


def _is_trained(name):
    return name.endswith(("/dense", "/table"))


def _loss(examples, rows, slices):
    """Returns a loss whose gradients do not depend on the variables, and those."""
    zeros = v1.zeros_initializer()
    dense = v1.get_variable("dense", [3], tf.float64, zeros)
    table = v1.get_variable("table", [ROWS, 2], tf.float64, zeros)
    products = tf.linalg.matvec(examples, dense + 1.0)
    products += tf.reduce_sum(tf.gather(table, rows) * slices, 1)
    return tf.reduce_mean(products), [dense, table]


def _expected(before, after):
    """Returns `close` of a window, by NumPy, from all its micro-batches."""
    members = [(s, r) for s in range(STEPS - 1) for r in range(before)]
    members += [(STEPS - 1, r) for r in range(after)]
    dense = np.array([DENSE[member].mean(0) for member in members])
    tables = np.zeros([len(members), ROWS, 2])
    for table, member in zip(tables, members, strict=True):
        np.add.at(table, LOOKED_UP[member], SLICES[member] / EXAMPLES)
    weights = np.array([WEIGHTS[member] for member in members])
    # Keras shares a batch among the replicas: it counts once, whatever their number.
    shares = [after if step == STEPS - 1 else before for step, _ in members]
    of_batch = 1.0 / np.array(shares)
    values = {}
    for scope, weigh in (
        ("slices", np.ones_like(weights)),
        ("minimize", np.ones_like(weights)),
        ("weights", weights),
        ("keras", weights),
        ("keras_mean", of_batch),
        ("keras_reduced", of_batch),
    ):
        values[f"{scope}/dense"] = -np.average(dense, 0, weigh)
        values[f"{scope}/table"] = -np.average(tables, 0, weigh)
    slices = [SLICES[member] / EXAMPLES / len(members) for member in members]
    squares = np.sum(np.square(slices)) + np.sum(values["slices/dense"] ** 2)
    for name in ("slices/dense", "slices/table"):
        values[name] = values[name] * min(1.0, CLIP / np.sqrt(squares))
    loss = dense.sum(1).mean()
    n = len(members)
    square = sum(np.sum(values[f"minimize/{name}"] ** 2) for name in ("dense", "table"))
    noise = (np.sum(dense**2) + np.sum(tables**2)) / n - square
    noise *= n / (n - 1)
    return values, loss, noise / (square - noise / n)


@functools.cache
def _replicas(count):
    return _Replicas(count)


@pytest.mark.once
@pytest.mark.parametrize(
    ("before", "after"), first(_PAIRS, itertools.product([1, 2], [1, 2]))
)
def test_the_window_is_the_mean_of_all_its_micro_batches(tmp_path, before, after):
    file = _replicas(before).open(str(tmp_path / "open"))
    values, loss, noise_scale = _replicas(after).close(file)
    expected, expected_loss, expected_noise_scale = _expected(before, after)
    assert values.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(values[name], expected[name], rtol=1e-12, atol=1e-14)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert noise_scale == pytest.approx(expected_noise_scale, rel=1e-4)
