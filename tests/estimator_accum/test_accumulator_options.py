"""accumulator_dtype, reduction, norms, update_ops: their effect."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op
from tests.helpers.models.interfaces import after_each, sgd
from tests.helpers.models.toy_models import (
    OPTIMIZERS,
    make_batches,
    make_model,
    relative_difference,
    split,
    train_accumulating,
    train_plain,
)

pytestmark = pytest.mark.usefixtures("fresh_graph", "graph_optimizer")
v1 = tf.compat.v1


def _variables():
    return {variable.op.name: variable for variable in v1.global_variables()}


def test_sums_of_half_precision_are_float32_unless_another_dtype_is_asked_for():
    """2048 + 1 is 2048 in float16."""

    def train(dtype):
        with tf.Graph().as_default():
            slope = v1.placeholder(tf.float16, [])
            x = v1.get_variable("x", initializer=tf.constant(0, tf.float16))
            options = {"accumulator_dtype": dtype}
            train_op = make_accumulating_train_op(x * slope, sgd(), 4, **options)
            sum_dtype = _variables()["x/accumulator"].dtype.base_dtype
            assert sum_dtype == (dtype or tf.float32)
            return after_each(train_op, [{slope: n} for n in (2048, 1, 1, 2)], x)[-1]

    assert train(None) == -513
    assert train(tf.float16) == -512.5


def test_large_weights_do_not_overflow_half_precision_gradients():
    x = v1.get_variable("x", initializer=tf.constant(0, tf.float16))
    loss = x * tf.constant(100, tf.float16)
    options = {"weight": tf.constant(4096)}
    train_op = make_accumulating_train_op(loss, sgd(), 2, **options)
    assert after_each(train_op, [{}, {}], x)[-1] == -100


@pytest.mark.parametrize("sparse_rows", [0, 11])
def test_there_is_one_accumulator_a_variable_and_scalars_beside(sparse_rows):
    model = make_model()
    options = {"clip_norm": 1.0, "noise_scale": True}
    options["var_list"] = [model.dense, *([model.embedding] if sparse_rows else [])]
    make_accumulating_train_op(model.loss, v1.train.AdamOptimizer(), 2, **options)
    trained = 3 + sparse_rows * 2
    slots = 2 * trained
    ours = [v for n, v in _variables().items() if "accumulator" in n]
    sizes = [int(np.prod(v.shape)) for v in ours]
    assert sum(sizes) == trained + sparse_rows  # and the mask of touched rows
    scalars = [v for v in v1.global_variables() if v.shape.rank == 0]
    total = sum(int(np.prod(v.shape)) for v in v1.global_variables())
    untrained = 0 if sparse_rows else 22
    assert total == trained + untrained + slots + sum(sizes) + len(scalars)


def test_losses_that_are_sums_add_up():
    """Like the big batch's sum; the mean rule would give a third of it."""
    batches = make_batches(4, 6)
    model = make_model()
    loss = model.loss * tf.cast(tf.shape(model.feeds.targets)[0], tf.float32)
    train_op = make_accumulating_train_op(loss, sgd(0.05 / 6), 3, reduction="sum")
    parts = [part for batch in batches for part in split(batch, 3)]
    feeds = [dict(zip(model.feeds, part, strict=True)) for part in parts]
    weights = after_each(train_op, feeds, model.dense)[-1]
    plain = train_plain(OPTIMIZERS["GradientDescent"], batches)  # on the mean loss
    np.testing.assert_allclose(weights, plain["dense"], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "max"}, r"`reduction` must be one of 'mean' and 'sum'.*'max'"),
        ({"reduction": "sum", "weight": 2.0}, "neither `weight` nor `noise_scale`"),
        ({"reduction": "sum", "noise_scale": True}, "neither `weight` nor"),
    ],
)
def test_reductions_are_checked(options, message):
    x = v1.get_variable("x", initializer=1.0)
    with pytest.raises(ValueError, match=message):
        make_accumulating_train_op(x * x, sgd(), 2, **options)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("choice", ["nothing", "control dependency", "other ops"])
def test_update_ops_run_once_every_micro_step_unless_others_are_chosen(steps, choice):
    """Without the caller's control dependency, and not twice with it."""
    x = v1.get_variable("x", initializer=1.0)
    average = v1.get_variable("average", initializer=0.0, trainable=False)
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, average.assign_add(1.0).op)
    wrapped = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
    wrapped = wrapped if choice == "control dependency" else []
    options = {"update_ops": []} if choice == "other ops" else {}
    with tf.control_dependencies(wrapped):
        train_op = make_accumulating_train_op(x * x, sgd(), steps, **options)
    expected = [0] * 6 if choice == "other ops" else [1, 2, 3, 4, 5, 6]
    assert after_each(train_op, [{}] * 6, average) == expected


@pytest.mark.parametrize("options", [{}, {"update_ops": []}])
def test_update_ops_of_two_train_ops_are_warned_of(options, caplog):
    x = v1.get_variable("x", initializer=1.0)
    average = v1.get_variable("average", initializer=0.0, trainable=False)
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, average.assign_add(1.0).op)
    make_accumulating_train_op(x * x, sgd(), 1)
    make_accumulating_train_op(x * x, sgd(), 1, **options)
    assert caplog.text.count("pass `update_ops` to each train op") == (not options)


@pytest.mark.parametrize("steps", [1, 3])
def test_norms_by_slices_clip_as_tf_clip_by_global_norm(steps):
    batches = make_batches(6, 6)
    options = {"clip_norm": 0.7, "sparse_norm": "slices"}
    run = OPTIMIZERS["Momentum"], batches
    ours = train_accumulating(*run, steps, **options)
    theirs = train_plain(*run, **options)
    by_rows = train_plain(*run, clip_norm=0.7)
    names = ["dense", "embedding"]
    assert relative_difference(ours, theirs, names) < (1e-6 if steps > 1 else 1e-30)
    assert relative_difference(by_rows, theirs, names) > 0.01
