"""AdamW with the schedule of google-research/bert, counted in updates."""

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import optimization
from estimator_accum import get_or_create_update_step, make_accumulating_train_op
from tests.helpers.oracles import numpy_reference

v1 = tf.compat.v1


@pytest.mark.parametrize(
    ("name", "decay"),
    [
        ("dense/kernel", 0.01),
        ("dense/bias", 0.0),
        ("output/LayerNorm/gamma", 0.0),
        ("output/layer_norm/beta", 0.0),
        ("output_bias", 0.0),
        ("output_weights", 0.01),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "tolerance_of_v"),
    [(np.float32, 1e-6, 2e-5), (np.float64, 1e-12, 1e-12)],
)
def test_updates_equal_the_numpy_oracle_with_decay_where_bert_has_it(
    name, decay, dtype, tolerance, tolerance_of_v
):
    gradients = np.random.default_rng(0).normal(size=[30, 4]).astype(dtype)
    start = np.array([3.0, -2.0, 0.0, 0.5], dtype)
    rate = float(np.float32(0.01))
    oracle, expected = numpy_reference.AdamW(rate, decay), start.astype(np.float64)
    with tf.Graph().as_default(), v1.Session() as session:
        gradient = v1.placeholder(dtype, [4])
        variable = v1.get_variable(name, initializer=start)
        optimizer = optimization.AdamWeightDecayOptimizer(0.01)
        train_op = optimizer.apply_gradients([(gradient, variable)])
        session.run(v1.global_variables_initializer())
        for value in gradients:
            session.run(train_op, {gradient: value})
            expected = oracle.step(expected, value.astype(np.float64))
            np.testing.assert_allclose(
                session.run(variable), expected, rtol=tolerance, atol=tolerance
            )
        m, v = session.run([optimizer.get_slot(variable, slot) for slot in "mv"])
    np.testing.assert_allclose(m, oracle.m, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(v, oracle.v, rtol=tolerance_of_v)


def test_variables_of_half_precision_are_refused():
    with tf.Graph().as_default():
        variable = v1.get_variable("kernel", [2], tf.float16)
        optimizer = optimization.AdamWeightDecayOptimizer(0.1)
        with pytest.raises(ValueError, match="Invalid type .*float16"):
            optimizer.minimize(tf.reduce_sum(variable))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_table_of_which_rows_have_gradients_is_updated_as_a_dense_one(dtype):
    """Bit for bit, with few active rows, many, and moments from elsewhere."""
    numbers = np.random.default_rng(0)
    batches = [([7, 2, 7], 0), ([5], 0), ([7, 0], 1), (range(30, 40), 0), ([20], 0)]
    batches = [(rows, numbers.normal(size=[len(rows), 3]), n) for rows, n in batches]
    moments = [(4 * numbers.normal(size=[60, 3])).astype(np.int32) / 4 for _ in "mv"]
    moments[0][:20], moments[1][:18] = 0, 0
    moments[0][24:] = moments[1][24:] = 0
    moments[0][20:22, 0] = 0  # not seen in the first column

    def train(is_dense: bool):
        tables, start = [], np.linspace(-1, 1, 180).reshape([60, 3]).astype(dtype)
        with tf.Graph().as_default(), v1.Session() as session:
            table = v1.get_variable("table", initializer=start)
            rows, values = v1.placeholder(tf.int64, [None]), v1.placeholder(dtype)
            gradient = tf.IndexedSlices(values, rows, start.shape)
            if is_dense:
                gradient = tf.convert_to_tensor(gradient)
            optimizer = optimization.AdamWeightDecayOptimizer(0.1)
            update = optimizer.apply_gradients([(gradient, table)])
            slots = [optimizer.get_slot(table, name) for name in ("m", "v")]
            session.run(v1.global_variables_initializer())
            for indices, value, is_restored in batches:
                for slot, moment in zip(slots, moments):
                    if is_restored:
                        slot.load(session.run(slot) + abs(moment), session)
                session.run(update, {rows: indices, values: value})
                tables.append(session.run([table, *slots]))
        return tables

    for ours, theirs in zip(train(False), train(True), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_slots_are_named_as_in_checkpoints_of_bert():
    with tf.Graph().as_default():
        variable = v1.get_variable("layer/kernel", [2])
        optimizer = optimization.AdamWeightDecayOptimizer(0.1)
        optimizer.apply_gradients([(tf.ones([2]), variable)])
        names = {v.op.name for v in v1.global_variables()}
    assert names == {"layer/kernel", "layer/kernel/adam_m", "layer/kernel/adam_v"}


_HALF_WAVE = (1 + np.cos(np.pi * np.arange(5) / 4)) / 2


@pytest.mark.parametrize(
    ("schedule", "updates", "warm_up", "expected"),
    [
        ("linear", 10, 4, [0, 0.25, 0.5, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0, 0]),
        ("linear", 4, 0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 4, 0, _HALF_WAVE),
        ("cosine", 6, 2, [0, 0.5, *_HALF_WAVE, 0]),
        ("cosine", 2, 2, [0, 0.5]),
        ("constant", 4, 2, [0, 0.5, 1, 1, 1]),
    ],
)
def test_the_rate_rises_in_warm_up_then_follows_its_schedule(
    schedule, updates, warm_up, expected
):
    with tf.Graph().as_default(), v1.Session() as session:
        update_step = get_or_create_update_step()
        rate = optimization.learning_rate(1.0, update_step, updates, warm_up, schedule)
        session.run(v1.global_variables_initializer())
        for step, value in enumerate(expected):
            update_step.load(step, session)
            np.testing.assert_allclose(session.run(rate), value, rtol=1e-6, atol=1e-7)


def test_accumulating_over_a_window_equals_the_big_batch():
    gradients = np.random.default_rng(1).normal(size=[10, 4, 3]).astype(np.float32)

    def train(windows, steps):
        with tf.Graph().as_default(), v1.Session() as session:
            gradient = v1.placeholder(tf.float32, [3])
            variable = v1.get_variable("kernel", initializer=np.ones(3, np.float32))
            rate = optimization.learning_rate(0.1, get_or_create_update_step(), 10, 2)
            loss = tf.reduce_sum(variable * gradient)
            optimizer = optimization.AdamWeightDecayOptimizer(rate)
            train_op = make_accumulating_train_op(loss, optimizer, steps, clip_norm=1.0)
            session.run(v1.global_variables_initializer())
            for value in windows:
                session.run(train_op, {gradient: value})
            return session.run(variable)

    ours = train(gradients.reshape([40, 3]), 4)
    np.testing.assert_allclose(ours, train(gradients.mean(1), 1), rtol=1e-6)
