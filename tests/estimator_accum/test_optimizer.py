"""AccumulatingOptimizer: the rule for code that takes an optimizer."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    get_windows,
    make_accumulating_train_op,
    make_accumulation_hooks,
)
from tests.helpers.models.interfaces import sgd, start_session
from tests.helpers.models.microbatch_runs import variables_of
from tests.helpers.models.toy_models import (
    OPTIMIZERS,
    make_batches,
    make_model,
    relative_difference,
    split,
    train,
    train_accumulating,
    train_plain,
)

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
K, UPDATES, BATCH = 3, 8, 6


@pytest.mark.parametrize("name", ["Adam", "Momentum", "Ftrl"])
def test_minimize_is_make_accumulating_train_op_bit_for_bit(name):
    batches = make_batches(UPDATES, BATCH)

    def minimize(model):
        clock = get_or_create_update_step()
        rate = 0.05 / (1.0 + 0.1 * tf.cast(clock, tf.float32))
        optimizer = AccumulatingOptimizer(OPTIMIZERS[name](rate, clock), K, 0.5)
        return optimizer.minimize(model.loss, v1.train.get_or_create_global_step())

    ours = train(minimize, [part for b in batches for part in split(b, K)])
    theirs = train_accumulating(OPTIMIZERS[name], batches, K, clip_norm=0.5, decay=0.1)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value, err_msg=key)


def test_gradients_that_the_caller_computed_are_accumulated_likewise():
    batches = make_batches(UPDATES, BATCH)

    def apply(model):
        optimizer = AccumulatingOptimizer(sgd(0.05), K)
        variables = [model.dense, model.embedding]
        gradients = tf.gradients(model.loss, variables)
        return optimizer.apply_gradients(zip(gradients, variables, strict=True))

    ours = train(apply, [part for b in batches for part in split(b, K)])
    plain = train_plain(OPTIMIZERS["GradientDescent"], batches)
    assert relative_difference(ours, plain, ["dense", "embedding"]) < 1e-6
    assert "global_step" not in ours  # not requested


@pytest.mark.usefixtures("fresh_graph")
def test_a_variable_that_is_named_global_step_numbers_micro_steps():
    weight = v1.Variable(1.0, use_resource=True)
    step = v1.Variable(6, name="global_step", trainable=False, use_resource=True)
    train_op = AccumulatingOptimizer(sgd(0.1), K).minimize(weight * float("nan"))
    with start_session() as session:
        assert session.run(step) == 6
        with pytest.raises(tf.errors.InvalidArgumentError, match="at micro-step 7"):
            session.run(train_op)


def test_without_a_loss_there_is_none_to_report():
    with tf.Graph().as_default():
        x = v1.get_variable("x", initializer=1.0)
        optimizer = AccumulatingOptimizer(sgd(), 2)
        train_op = optimizer.apply_gradients([(tf.constant(1.0), x)])
        (window,) = get_windows()
        fetches = [train_op, window.loss, window.mean_loss, window.weight]
        with start_session() as session:
            session.run(train_op)
            values = session.run(fetches)[1:]
    np.testing.assert_array_equal(values, [np.nan, np.nan, 2.0])


def test_a_weight_may_be_a_callable():
    batch = make_batches(1, BATCH)[0]

    def minimize(model):
        options = {"weight": lambda: tf.shape(model.feeds.targets)[0]}
        return AccumulatingOptimizer(sgd(0.05), 2, **options).minimize(model.loss)

    uneven = [type(batch)(*(f[part] for f in batch)) for part in ([0], range(1, 6))]
    ours = train(minimize, uneven)
    plain = train_plain(OPTIMIZERS["GradientDescent"], [batch])
    assert relative_difference(ours, plain, ["dense", "embedding"]) < 1e-6


def test_slots_are_the_wrapped_optimizers_and_so_are_variables_but_the_windows():
    with tf.Graph().as_default():
        model = make_model()
        adam = v1.train.AdamOptimizer()
        optimizer = AccumulatingOptimizer(adam, K)
        optimizer.minimize(model.loss)
        assert optimizer.get_slot_names() == ["m", "v"]
        assert optimizer.get_slot(model.dense, "m") is adam.get_slot(model.dense, "m")
        window = get_windows()[0]
        assert optimizer.variables() == [*adam.variables(), *window.state]


def test_an_accumulating_optimizer_inside_another_is_refused():
    inner = AccumulatingOptimizer(v1.train.AdamOptimizer(), 2)
    with pytest.raises(TypeError, match=r"must not accumulate already\. Received: Acc"):
        AccumulatingOptimizer(inner, 2)


def test_a_keras_model_as_an_estimator_goes_on_in_mid_window(tmp_path):
    """Its checkpoints are object-based: they have the variables that it tracks."""

    def train(folder, *parts):
        v1.keras.backend.clear_session()
        with tf.Graph().as_default():
            model = tf.keras.Sequential(
                [tf.keras.layers.Dense(1, kernel_initializer="ones", input_shape=[4])]
            )
            adam = v1.train.AdamOptimizer(0.05)
            model.compile(optimizer=AccumulatingOptimizer(adam, 4), loss="mse")
            ours = tf.keras.estimator.model_to_estimator(model, model_dir=str(folder))
        first = 0
        for part in parts:
            ours.train(lambda n=first: _keras_input_fn().skip(n), steps=part)
            first += part
        name = next(n for n in ours.get_variable_names() if "kernel/.ATTR" in n)
        return ours.get_variable_value(name)

    whole = train(tmp_path / "whole", 16)
    np.testing.assert_allclose(train(tmp_path / "parts", 6, 10), whole, rtol=1e-6)
    assert not np.any(whole == 1)


def _keras_input_fn():
    random = np.random.default_rng(5)
    x = random.normal(size=[32, 4]).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(2)


# Canned estimators and heads: one run over big batches, one over micro-batches.
_COLUMNS = [tf.feature_column.numeric_column("x", shape=[4])]


def _input_fn(batch_size, count=BATCH * UPDATES):
    def input_fn():
        random = np.random.default_rng(3)
        x = random.normal(size=[count, 4]).astype(np.float32)
        y = (x.sum(axis=1) > 0).astype(np.int64)
        return tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(batch_size)

    return input_fn


def _accumulating(**options):
    def wrap(kind, rate):
        def make():
            optimizer = kind(_decayed(rate, get_or_create_update_step()))
            return AccumulatingOptimizer(optimizer, K, **options)

        return make

    return wrap


def _plain(kind, rate):
    return lambda: kind(_decayed(rate, v1.train.get_or_create_global_step()))


def _decayed(rate, step):
    """Returns a rate that decays with every update, so a wrong clock is noticed."""
    return rate / (1.0 + 0.5 * tf.cast(step, tf.float32))


def _dnn(wrap, reduction, folder):
    return v1.estimator.DNNClassifier(
        [5],
        _COLUMNS,
        model_dir=folder,
        optimizer=wrap(v1.train.AdamOptimizer, 0.05),
        loss_reduction=reduction,
        config=tf.estimator.RunConfig(tf_random_seed=1),
    )


def _combined(wrap, reduction, folder):
    return v1.estimator.DNNLinearCombinedClassifier(
        folder,
        _COLUMNS,
        wrap(v1.train.FtrlOptimizer, 0.5),
        _COLUMNS,
        wrap(v1.train.AdagradOptimizer, 0.1),
        [5],
        loss_reduction=reduction,
        config=tf.estimator.RunConfig(tf_random_seed=1),
    )


@pytest.mark.parametrize(("make", "reduction"), [(_dnn, "sum"), (_combined, "mean")])
def test_canned_estimators_take_it_and_train_as_on_the_big_batch(
    tmp_path, make, reduction
):
    theirs = "SUM" if reduction == "sum" else "SUM_OVER_BATCH_SIZE"
    theirs = getattr(v1.losses.Reduction, theirs)
    ours = make(_accumulating(reduction=reduction), theirs, str(tmp_path / "ours"))
    ours.train(_input_fn(BATCH // K), hooks=make_accumulation_hooks())
    plain = make(_plain, theirs, str(tmp_path / "plain"))
    plain.train(_input_fn(BATCH))
    values, expected = variables_of(ours), variables_of(plain)
    del expected["global_step"]
    theirs = ("accumul", "global_step", "update_step")
    names = {name for name in values if not any(part in name for part in theirs)}
    assert names == expected.keys()
    assert relative_difference(values, expected, expected) < 1e-5
    assert ours.get_variable_value("update_step") == UPDATES
    assert ours.get_variable_value("global_step") == UPDATES * K


def test_a_partial_window_of_two_optimizers_is_applied(tmp_path, caplog):
    mean = v1.losses.Reduction.SUM_OVER_BATCH_SIZE
    estimator = _combined(_accumulating(), mean, str(tmp_path))
    caplog.set_level("INFO", "tensorflow.estimator_accum")
    hooks = make_accumulation_hooks("apply", metrics_dir=tmp_path)
    estimator.train(_input_fn(2, 10), hooks=hooks)  # 5 micro-steps: 3 and 2
    applied = [r.getMessage() for r in caplog.records if "applied" in r.getMessage()]
    assert [line.split(":")[0] for line in applied] == [
        "partial window of accumulation_1",
        "partial window of accumulation",
    ]
    assert estimator.get_variable_value("update_step") == 2
    assert estimator.get_variable_value("accumulation_1/update_step") == 2
    assert estimator.get_variable_value("accumulation/micro_steps") == 0
    rows = (tmp_path / "train_metrics.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in rows[1:]] == [["1", "3"], ["2", "5"]]


@pytest.mark.once
@pytest.mark.usefixtures("fresh_graph")
def test_each_train_op_has_the_loss_that_its_gradients_are_of():
    d, g = (v1.get_variable(name, initializer=1.0) for name in "dg")
    factor = v1.placeholder_with_default(100.0, [])
    ours = AccumulatingOptimizer(sgd(), 2)
    of_d = ours.compute_gradients(2.0 * d, [d])
    of_g = ours.compute_gradients(factor * g, [g])
    clipped = [(tf.clip_by_norm(gradient, 1.0), v) for gradient, v in of_d]
    train_op = ours.apply_gradients(of_d)
    for pairs in (of_g, clipped, [*of_d, *of_g], [(tf.gradients(3.0 * d, d)[0], d)]):
        ours.apply_gradients(pairs)
    knows = ["loss" in window.sums for window in get_windows()]
    assert knows == [True, True, True, False, False]
    session = start_session()
    for _ in range(2):  # the other loss is NaN
        fetched = session.run([train_op, get_windows()[0].loss], {factor: np.nan})
    assert fetched[1] == 2.0
    assert session.run(d) == 1.0 - 2.0


class _OfFewArguments(v1.train.GradientDescentOptimizer):
    def compute_gradients(self, loss, var_list=None):
        return super().compute_gradients(loss, var_list)


class _HandsOn(v1.train.GradientDescentOptimizer):
    """Calls another optimizer with all arguments that it gets."""

    def compute_gradients(self, *args, **kwargs):
        return _OfFewArguments(1.0).compute_gradients(*args, **kwargs)


@pytest.mark.once
@pytest.mark.usefixtures("fresh_graph")
@pytest.mark.parametrize("optimizer", [_OfFewArguments, _HandsOn])
@pytest.mark.parametrize("way", ["train op", "optimizer"])
def test_an_optimizer_needs_no_gates(way, optimizer):
    x = v1.get_variable("x", initializer=0.0)
    if way == "train op":
        train_op = make_accumulating_train_op(2.0 * x, optimizer(1.0), 2)
    else:
        step = v1.train.get_or_create_global_step()
        train_op = AccumulatingOptimizer(optimizer(1.0), 2).minimize(2.0 * x, step)
    session = start_session()
    for _ in range(2):
        session.run(train_op)
    assert session.run(x) == -2.0
