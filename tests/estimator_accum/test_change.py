"""Changes to gradients before apply_gradients apply to the mean of the window.

The oracle is the plain optimizer, and the same code, on the big batch.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    get_windows,
    make_accumulating_train_op,
)
from tests.helpers.models.interfaces import (
    after_each,
    fed_gradients,
    sgd,
    start_session,
)
from tests.helpers.models.microbatch_runs import (
    INPUT,
    difference,
    embedding_layer,
    loss_of,
    make_model_fn,
    spec_of,
    train,
    train_in_micro_batches,
)
from tests.helpers.models.toy_models import (
    OPTIMIZERS,
    make_batches,
    relative_difference,
    split,
)
from tests.helpers.models.toy_models import train as train_session

v1 = tf.compat.v1
K, UPDATES, BATCH = 3, 6, 6


# Changes: functions of (gradient, variable) pairs and the clock that return pairs.
def _pairs(gradients, pairs):
    return list(zip(gradients, [v for _, v in pairs], strict=True))


def _each(change, is_dense=False):
    """Returns a change of each gradient alone."""

    def changed(pairs, clock):
        if is_dense:
            pairs = [(g if g is None else tf.convert_to_tensor(g), v) for g, v in pairs]
        return [(g if g is None else change(g, v), v) for g, v in pairs]

    return changed


_dense = functools.partial(_each, is_dense=True)


def _scaled(gradient, factor):
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * factor
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _clip_by_global_norm(pairs, clock):
    gradients, _ = tf.clip_by_global_norm([g for g, _ in pairs], 0.3)
    return _pairs(gradients, pairs)


def _scaled_and_clipped_twice(pairs, clock):
    """Half of each gradient's own clipping, then that of all together."""
    clip = _each(lambda g, v: tf.clip_by_norm(_scaled(g, 0.5), 0.4))
    return _clip_by_global_norm(clip(pairs, clock), clock)


def _clipped_by_a_schedule(pairs, clock):
    # Its branches are TensorFlow 1's control flow, if that is on.
    norm = v1.train.piecewise_constant(clock, [1, 3], [0.5, 0.05, 0.2])
    gradients, _ = tf.clip_by_global_norm(
        [g for g, _ in pairs], tf.cast(norm, "double")
    )
    return _pairs(gradients, pairs)


def _only_one_of_the_clipped(pairs, clock):
    return [p for p in _clip_by_global_norm(pairs, clock) if p[1].op.name == "dense"]


def _only_the_dense_are_clipped(pairs, clock):
    is_sparse = [isinstance(g, tf.IndexedSlices) for g, _ in pairs]
    clipped = _each(lambda g, v: tf.clip_by_value(g, -0.1, 0.2))
    dense = [pair for pair, sparse in zip(pairs, is_sparse, strict=True) if not sparse]
    return [*clipped(dense, clock), *(p for p, s in zip(pairs, is_sparse) if s)]


def _in_reverse_order(pairs, clock):
    return _clip_by_global_norm(pairs[::-1], clock)


def _none_are_replaced(pairs, clock):
    """A variable without a gradient gets its own weight decay."""
    pairs = [(0.1 * v if g is None else tf.convert_to_tensor(g), v) for g, v in pairs]
    return _dense(lambda g, v: g + 0.01 * v)(pairs, clock)


def _skipped_if_large(gradient, variable):
    norm = tf.norm(gradient)
    return tf.cond(norm > 9.0, lambda: tf.zeros_like(gradient), lambda: gradient / 2.0)


def _noise(gradient, variable):
    seed = len(variable.op.name)
    noise = tf.random.normal(tf.shape(gradient), seed=seed, dtype=gradient.dtype)
    return gradient + 0.1 * noise


def _by_its_history(pairs, clock):
    """Clips by a running mean of norms, which the change itself writes."""
    dense = [tf.convert_to_tensor(g) for g, _ in pairs if g is not None]
    norm = tf.linalg.global_norm(dense)
    mean = v1.get_variable("mean", initializer=np.float64(0.2), trainable=False)
    with tf.control_dependencies([v1.assign(mean, 0.9 * mean + 0.02 * norm)]):
        now = tf.identity(mean.read_value())
    gradients, _ = tf.clip_by_global_norm([g for g, _ in pairs], now)
    return _pairs(gradients, pairs)


def _of_all_layers(pairs, clock):
    """Each gradient is divided by the mean of all absolute values."""
    dense = [tf.convert_to_tensor(g) for g, _ in pairs if g is not None]
    mean = tf.reduce_mean(tf.concat([tf.reshape(tf.abs(g), [-1]) for g in dense], 0))
    return _dense(lambda g, v: g / mean)(pairs, clock)


CHANGES = {
    "clip_by_global_norm": _clip_by_global_norm,
    "clip_by_norm": _each(lambda g, v: tf.clip_by_norm(g, 0.2)),
    "clip_by_value": _dense(lambda g, v: tf.clip_by_value(g, -0.05, 0.1)),
    "scaled_and_clipped_twice": _scaled_and_clipped_twice,
    "schedule": _clipped_by_a_schedule,
    "one_of_them": _only_one_of_the_clipped,
    "dense_only": _only_the_dense_are_clipped,
    "reverse_order": _in_reverse_order,
    "none_replaced": _none_are_replaced,
    "weight_decay": _dense(lambda g, v: g + 0.1 * v),
    "rounded": _dense(lambda g, v: tf.cast(tf.cast(g, tf.bfloat16), g.dtype)),
    "centralized": _dense(lambda g, v: g - tf.reduce_mean(g)),
    "sign": _dense(lambda g, v: tf.sign(g)),
    "branch": _dense(_skipped_if_large),
    "noise": _dense(_noise),
    "history": _by_its_history,
    "all_layers": _of_all_layers,
}


def _train(optimizer_of, change, batches, accumulate=None, scale=1.0):
    """Trains on batches; returns all values by name.

    Args:
        optimizer_of: Makes the optimizer of (rate, clock).
        change: The change.
        batches: The batches.
        accumulate: Makes the optimizer an AccumulatingOptimizer; None does not.
        scale: Scale of the loss.
    """

    def make_train_op(model):
        v1.set_random_seed(3)
        v1.get_variable("unused", initializer=np.float64([0.5, -1.0]))
        step = v1.train.get_or_create_global_step()
        clock = step if accumulate is None else get_or_create_update_step()
        optimizer = optimizer_of(tf.constant(0.05, tf.float64), clock)
        if accumulate is not None:
            optimizer = accumulate(optimizer)
        pairs = optimizer.compute_gradients(model.loss * scale)
        if scale != 1.0:
            pairs = _each(lambda g, v: _scaled(g, 1.0 / scale))(pairs, clock)
        return optimizer.apply_gradients(change(pairs, clock), step)

    return train_session(make_train_op, batches, tf.float64)


class _Own(v1.train.GradientDescentOptimizer):
    """Changes gradients in its own compute_gradients."""

    def __init__(self, change):
        super().__init__(0.05)
        self._change = change

    def compute_gradients(self, *args, **kwargs):
        return self._change(super().compute_gradients(*args, **kwargs), None)


def _all_reduced(gradient, variable):
    """Like an average over workers by another library, of one worker."""
    value = tf.py_function(lambda g: g, [gradient], gradient.dtype)
    return tf.ensure_shape(value, variable.shape)


def _by_loss_scale(change):
    """Returns the optimizer in a loss-scaling one, whose own gradients are scaled."""
    scaling = v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    return scaling(_Own(change), v1.mixed_precision.FixedLossScale(8.0))


def _drawn(gradient, seed):
    seed = tf.stack([tf.cast(part, tf.int64) for part in seed])
    return tf.random.stateless_normal(gradient.shape, seed, dtype=gradient.dtype)


LINEAR = {
    name: CHANGES[name] for name in ("weight_decay", "none_replaced", "centralized")
}
LINEAR |= {
    "shared_noise": _dense(lambda g, v: g + _drawn(g, [1, 2])),
    "halved": _each(lambda g, v: _scaled(g, 0.5)),
    "all_reduced": _dense(_all_reduced),
}
NOT_LINEAR = {
    name: CHANGES[name]
    for name in (
        *("clip_by_global_norm", "clip_by_norm", "clip_by_value", "one_of_them"),
        *("sign", "branch", "noise", "all_layers"),
    )
}
NOT_LINEAR["noise_of_a_micro_step"] = _dense(
    lambda g, v: g + _drawn(g, [v1.train.get_global_step(), 0])
)


def _trained_by(optimizer, accumulate, batches) -> dict[str, np.ndarray]:
    def make_train_op(model):
        v1.set_random_seed(3)
        v1.get_variable("unused", initializer=np.float64([0.5, -1.0]))
        v1.train.get_or_create_global_step()
        return accumulate(optimizer, model.loss)

    return train_session(make_train_op, batches, tf.float64)


def _minimize(optimizer, loss):
    return optimizer.minimize(loss)


_INTERFACES = [
    lambda optimizer, loss: AccumulatingOptimizer(optimizer, K).minimize(loss),
    lambda optimizer, loss: make_accumulating_train_op(loss, optimizer, K, weight=50.0),
]


@pytest.mark.parametrize("accumulate", _INTERFACES)
@pytest.mark.parametrize("name", LINEAR)
def test_an_own_compute_gradients_that_is_linear_runs_with_each_micro_batch(
    name, accumulate, caplog
):
    batches = make_batches(UPDATES, BATCH)
    parts = [part for batch in batches for part in split(batch, K)]
    plain = _trained_by(_Own(LINEAR[name]), _minimize, batches)
    ours = _trained_by(_Own(LINEAR[name]), accumulate, parts)
    assert _difference(ours, plain) < 1e-12
    is_unknown = "compute_gradients of _Own changes the gradients" in caplog.text
    assert is_unknown == (name == "all_reduced")


@pytest.mark.parametrize("accumulate", _INTERFACES)
@pytest.mark.parametrize("name", NOT_LINEAR)
def test_an_own_compute_gradients_that_is_not_linear_is_refused(name, accumulate):
    batches = make_batches(1, BATCH)
    with pytest.raises(ValueError, match="must only add gradients of a scalar loss"):
        _trained_by(_Own(NOT_LINEAR[name]), accumulate, batches)


def test_an_own_compute_gradients_by_sizes_of_micro_batches_is_refused():
    def make(optimizer, loss):
        fed = v1.get_default_graph().get_tensor_by_name("Placeholder:0")
        size = tf.cast(tf.shape(fed)[0], tf.float64)
        optimizer._change = _each(lambda g, v: _scaled(g, 1.0 / size))
        return _INTERFACES[0](optimizer, loss)

    with pytest.raises(ValueError, match="must only add gradients of a scalar loss"):
        _trained_by(_Own(None), make, make_batches(1, BATCH))


@pytest.mark.parametrize("name", ["halved", "clip_by_norm"])
def test_loss_scaling_around_an_own_compute_gradients_is_linear(name, fresh_graph):
    x = v1.get_variable("x", initializer=[1.0, 2.0])
    loss = tf.reduce_sum(tf.square(x))
    optimizer = _by_loss_scale(CHANGES.get(name) or LINEAR[name])
    if name == "halved":
        train_op = make_accumulating_train_op(loss, optimizer, 2)
        np.testing.assert_allclose(after_each(train_op, [{}] * 2, x)[1], [0.95, 1.9])
        return
    with pytest.raises(ValueError, match="must only add gradients of a scalar loss"):
        make_accumulating_train_op(loss, optimizer, 2)


def _accumulating(steps=K, **options):
    return lambda optimizer: AccumulatingOptimizer(optimizer, steps, **options)


def _difference(ours, plain) -> float:
    names = [name for name in plain if name != "global_step"]
    return relative_difference(ours, plain, names)


@pytest.mark.parametrize(
    ("name", "control_flow"),
    [(name, "v2") for name in CHANGES] + [("schedule", "v1"), ("branch", "v1")],
    indirect=["control_flow"],
)
def test_the_weights_are_those_of_the_same_code_on_the_big_batch(name, control_flow):
    batches = make_batches(UPDATES, BATCH)
    parts = [part for batch in batches for part in split(batch, K)]
    make = OPTIMIZERS["Momentum"]
    plain = _train(make, CHANGES[name], batches)
    ours = _train(make, CHANGES[name], parts, _accumulating())
    assert ours["update_step"] == UPDATES
    assert _difference(ours, plain) < 1e-12
    # The change matters, and is not what it would be on each micro-batch.
    assert relative_difference(_unchanged(), plain, ["dense"]) > 1e-4


@functools.cache
def _unchanged() -> dict[str, np.ndarray]:
    batches = make_batches(UPDATES, BATCH)
    return _train(OPTIMIZERS["Momentum"], lambda pairs, clock: pairs, batches)


def test_loss_scales_by_hand_are_taken_off_the_mean():
    batches = make_batches(UPDATES, BATCH)
    parts = [part for batch in batches for part in split(batch, K)]
    make = OPTIMIZERS["Momentum"]
    plain = _train(make, _clip_by_global_norm, batches)
    ours = _train(make, _clip_by_global_norm, parts, _accumulating(), scale=128.0)
    assert _difference(ours, plain) < 1e-12


@pytest.mark.parametrize("name", ["clip_by_global_norm", "noise"])
def test_one_step_windows_are_the_plain_optimizer_bit_for_bit(name):
    batches = make_batches(UPDATES, BATCH)
    plain = _train(OPTIMIZERS["Adam"], CHANGES[name], batches)
    ours = _train(OPTIMIZERS["Adam"], CHANGES[name], batches, _accumulating(1))
    for key, value in plain.items():
        np.testing.assert_array_equal(ours[key], value, err_msg=key)


def test_windows_may_grow():
    batches = make_batches(3, BATCH)
    parts = [p for i, batch in enumerate(batches) for p in split(batch, i + 1)]
    steps = _accumulating(lambda updates: updates + 1)
    plain = _train(OPTIMIZERS["Momentum"], _clip_by_global_norm, batches)
    ours = _train(OPTIMIZERS["Momentum"], _clip_by_global_norm, parts, steps)
    assert _difference(ours, plain) < 1e-12


def test_clip_norm_clips_what_is_changed():
    def and_clip(pairs, clock):
        pairs = CHANGES["weight_decay"](pairs, clock)
        gradients, _ = tf.clip_by_global_norm(
            [g for g, _ in pairs if g is not None], 0.3
        )
        return list(zip(gradients, [v for g, v in pairs if g is not None], strict=True))

    batches = make_batches(UPDATES, BATCH)
    parts = [part for batch in batches for part in split(batch, K)]
    plain = _train(OPTIMIZERS["Momentum"], and_clip, batches)
    accumulate = _accumulating(clip_norm=0.3)
    ours = _train(OPTIMIZERS["Momentum"], CHANGES["weight_decay"], parts, accumulate)
    assert ours["accumulation/clipped_updates"] == UPDATES
    assert _difference(ours, plain) < 1e-12


@pytest.mark.parametrize("is_sum", [False, True])
def test_unequal_micro_batches_are_weighted_or_added_up(is_sum):
    batch = make_batches(1, 8)[0]

    def change(pairs):
        return _clip_by_global_norm(pairs, None)

    def make_train_op(model, accumulate=None):
        size, options = tf.shape(model.feeds.targets)[0], {"reduction": "sum"}
        loss = model.loss * tf.cast(size, tf.float64) if is_sum else model.loss
        optimizer = sgd(0.05)
        if accumulate:
            options = options if is_sum else {"weight": size}
            optimizer = AccumulatingOptimizer(optimizer, 3, **options)
        return optimizer.apply_gradients(change(optimizer.compute_gradients(loss)))

    uneven = np.split(np.arange(8), [1, 6])
    parts = [type(batch)(*(field[part] for field in batch)) for part in uneven]
    plain = train_session(make_train_op, [batch], tf.float64)
    make_ours = functools.partial(make_train_op, accumulate=True)
    ours = train_session(make_ours, parts, tf.float64)
    assert relative_difference(ours, plain, ["dense", "embedding"]) < 1e-12


@pytest.fixture
def clipped(fresh_graph):
    """Returns a function that makes a train op of a clipped, fed gradient."""

    def make(steps, optimizer=None, **options):
        (gradient,), (variable,), loss = fed_gradients(0.0)
        ours = AccumulatingOptimizer(optimizer or sgd(), steps, **options)
        pairs = [
            (tf.clip_by_value(g, -2.0, 2.0), v) for g, v in ours.compute_gradients(loss)
        ]
        step = v1.train.get_or_create_global_step()
        return ours.apply_gradients(pairs, step), gradient, variable

    return make


@pytest.mark.parametrize(
    ("on_nonfinite", "expected"),
    [("skip_micro_batch", [0, 0, -2, -2]), ("skip_window", [0, 0, 0, -1.5])],
)
def test_policies_see_micro_batches_before_and_windows_after_the_change(
    clipped, on_nonfinite, expected
):
    train_op, gradient, variable = clipped(2, on_nonfinite=on_nonfinite)
    feeds = [{gradient: value} for value in (np.nan, 5.0, 1.0, 2.0)]
    assert after_each(train_op, feeds, variable) == expected


def test_what_is_not_finite_in_a_micro_batch_is_named(clipped):
    train_op, gradient, _ = clipped(2)
    with (
        start_session() as session,
        pytest.raises(tf.errors.InvalidArgumentError, match="micro-step 1 in vari"),
    ):
        session.run(train_op, {gradient: np.nan})


def test_what_the_change_makes_infinite_is_named(fresh_graph):
    (gradient,), _, loss = fed_gradients(0.0)
    optimizer = AccumulatingOptimizer(sgd(), 2)
    pairs = [(g / tf.norm(g), v) for g, v in optimizer.compute_gradients(loss)]
    train_op = optimizer.apply_gradients(pairs)
    with start_session() as session:
        session.run(train_op, {gradient: 1.0})
        with pytest.raises(tf.errors.InvalidArgumentError, match=" in variable_0"):
            session.run(train_op, {gradient: -1.0})


def test_a_partial_window_is_changed_without_a_micro_batch(clipped):
    train_op, gradient, variable = clipped(3)
    (window,) = get_windows()
    with start_session() as session:
        for value in (7.0, 1.0):
            session.run(train_op, {gradient: value})
        fetches = [window.update_step_after, window.gradient_norm]
        assert session.run(fetches, {window.is_boundary: True}) == [1, 2.0]
        assert session.run(variable) == -2.0


def test_the_noise_scale_is_that_of_the_gradients_as_they_were():
    def noise_scales(change):
        with tf.Graph().as_default():
            (gradient,), _, loss = fed_gradients(np.zeros(2))
            optimizer = AccumulatingOptimizer(sgd(0.0), 2, noise_scale=True)
            pairs = [(change(g), v) for g, v in optimizer.compute_gradients(loss)]
            train_op = optimizer.apply_gradients(pairs)
            (window,) = get_windows()
            values = np.random.default_rng(0).normal(1.0, size=[4, 2])
            with start_session() as session:
                return [
                    session.run([window.noise_scale, train_op], {gradient: value})[0]
                    for value in values
                ]

    clipped = noise_scales(lambda g: tf.clip_by_norm(g, 0.1))
    np.testing.assert_allclose(clipped, noise_scales(lambda g: g), rtol=1e-5)
    assert np.isfinite(clipped[1::2]).all()


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("scale", [4.0, "dynamic"])
def test_loss_scaling_optimizers_go_inside_or_have_a_fixed_scale(
    clipped, is_inside, scale
):
    scaling = v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    if is_inside:
        train_op, gradient, variable = clipped(2, scaling(sgd(), scale))
    else:
        (gradient,), (variable,), loss = fed_gradients(0.0)
        optimizer = scaling(AccumulatingOptimizer(sgd(), 2), scale)
        pairs = optimizer.compute_gradients(loss)
        if scale == "dynamic":  # changed with every micro-batch, but not the gradients
            clip = [(tf.clip_by_value(g, -2.0, 2.0), v) for g, v in pairs]
            with pytest.raises(
                ValueError, match="Put the loss-scaling optimizer inside"
            ):
                optimizer.apply_gradients(clip)
        else:
            pairs = [(tf.clip_by_value(g, -2.0, 2.0), v) for g, v in pairs]
        train_op = optimizer.apply_gradients(pairs)
    feeds = [{gradient: value} for value in (1.0, 5.0, 0.0, 1.0)]
    clip = is_inside or scale != "dynamic"
    first = -2.0 if clip else -3.0
    expected = [0.0, first, first, first - 0.5]
    assert after_each(train_op, feeds, variable) == expected


def test_half_precision_is_changed_as_it_is_and_summed_in_more(fresh_graph):
    (gradient,), (variable,), loss = fed_gradients([1.0, 0.5], dtype=tf.float16)
    optimizer = AccumulatingOptimizer(sgd(), 2)
    ((g, v),) = optimizer.compute_gradients(loss)
    g, _ = tf.clip_by_global_norm([g], 2.5)
    train_op = optimizer.apply_gradients([(g[0] + 2 * v, v)])
    feeds = [{gradient: value} for value in ([6.0, 0.0], [0.0, 8.0])]
    # The mean [3, 4] is clipped to [1.5, 2].
    assert after_each(train_op, feeds, variable)[-1].tolist() == [-2.5, -2.5]


def test_two_optimizers_may_share_one_norm(fresh_graph):
    def build(wrap):
        feeds, variables, loss = fed_gradients(1.0, 2.0)
        first, second = wrap(sgd()), wrap(sgd(0.5))
        gradients, variables = zip(*first.compute_gradients(loss), strict=True)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        pairs = list(zip(gradients, variables, strict=True))
        one = first.apply_gradients(pairs[:1])
        with tf.control_dependencies([one]):
            gradients = [tf.identity(pair[0]) for pair in pairs]
            two = second.apply_gradients([(gradients[1], variables[1])])
        return feeds, variables, two

    fed = np.array([[1.0, 6.0], [5.0, 2.0], [2.0, 2.0], [4.0, 4.0]])
    feeds, variables, train_op = build(
        lambda optimizer: AccumulatingOptimizer(optimizer, 2)
    )
    ours = after_each(
        train_op, [dict(zip(feeds, f, strict=True)) for f in fed], variables
    )
    with tf.Graph().as_default():
        feeds, variables, train_op = build(lambda optimizer: optimizer)
        means = fed.reshape(2, 2, 2).mean(1)
        steps = [dict(zip(feeds, f, strict=True)) for f in means]
        plain = after_each(train_op, steps, variables)
    np.testing.assert_allclose(ours[1::2], plain, rtol=1e-6)


def test_gradients_of_several_losses_may_be_clipped_apart(fresh_graph):
    """Each loss has accumulators of its own, of the same variable."""
    (a, b), (variable, other), _ = fed_gradients(0.0, 0.0)
    optimizer = AccumulatingOptimizer(sgd(), 2)
    pairs = [
        optimizer.compute_gradients(x * variable + other, [variable]) for x in (a, b)
    ]
    ((first, _),), ((second, _),) = pairs
    total = tf.clip_by_value(first, -1.0, 1.0) + tf.clip_by_value(second, -3.0, 3.0)
    train_op = optimizer.apply_gradients([(total, variable)])
    feeds = [{a: 0.0, b: 9.0}, {a: 4.0, b: -5.0}]  # means 2 and 2
    assert after_each(train_op, feeds, variable) == [0.0, -3.0]


def test_operations_that_a_change_waits_for_run_with_every_micro_step(fresh_graph):
    (gradient,), (variable,), loss = fed_gradients(0.0)
    counter = v1.get_variable("counter", initializer=0, trainable=False)
    optimizer = AccumulatingOptimizer(sgd(), 2)
    ((g, v),) = optimizer.compute_gradients(loss)
    with tf.control_dependencies([v1.assign_add(counter, 1)]):
        g = tf.clip_by_value(g, -2.0, 2.0)
    train_op = optimizer.apply_gradients([(g, v)])
    values = after_each(train_op, [{gradient: 5.0}] * 4, [counter, variable])
    assert values == [[1, 0.0], [2, -2.0], [3, -2.0], [4, -4.0]]


def test_sums_and_constant_multiples_are_accumulated_as_they_are(fresh_graph):
    (a, b), variables, loss = fed_gradients(1.0, 2.0)
    optimizer = AccumulatingOptimizer(sgd(), 2)
    gradients = [g for g, _ in optimizer.compute_gradients(loss)]
    gradients += tf.gradients(loss, variables)
    total = tf.add_n([gradients[0], 2.0 * gradients[1], -gradients[2] / 4.0])
    train_op = optimizer.apply_gradients([(tf.identity(total), variables[0])])
    feeds = [{a: 4.0, b: 1.0}, {a: 8.0, b: 2.0}]
    assert after_each(train_op, feeds, variables[0])[-1] == 1.0 - (6 + 3 - 1.5)
    names = [
        operation.name
        for operation in tf.compat.v1.get_default_graph().get_operations()
    ]
    assert not [name for name in names if name.startswith("change")]


def test_a_gradient_of_other_origin_is_averaged_beside_a_changed_one(fresh_graph):
    (a, b), (x, y), loss = fed_gradients(0.0, 0.0)
    optimizer = AccumulatingOptimizer(sgd(), 2)
    ((gradient, _),) = optimizer.compute_gradients(loss, [x])
    clipped = tf.clip_by_value(gradient, -1.0, 1.0)
    pairs = [(clipped, x), *zip(tf.gradients(loss, [y]), [y], strict=True)]
    train_op = optimizer.apply_gradients(pairs)
    feeds = [{a: 4.0, b: 1.0}, {a: -3.0, b: 3.0}]  # means 0.5 and 2
    assert after_each(train_op, feeds, [x, y])[-1] == [-0.5, -2.0]


def test_towers_that_average_have_one_accumulator_for_each_variable(fresh_graph):
    """As scripts of TensorFlow 1 for several GPUs do, by concat and reduce_mean."""
    x = v1.get_variable("x", initializer=[1.0, 2.0])
    feeds = v1.placeholder(tf.float32, [2, 2])
    optimizer = AccumulatingOptimizer(sgd(), 2)
    towers = [
        optimizer.compute_gradients(tf.reduce_sum(feeds[i] * x)) for i in range(2)
    ]
    averages = []
    for pairs in zip(*towers, strict=True):
        gradients = [tf.expand_dims(gradient, 0) for gradient, _ in pairs]
        averages.append((tf.reduce_mean(tf.concat(gradients, axis=0), 0), pairs[0][1]))
    train_op = optimizer.apply_gradients(averages)
    names = [v.op.name for v in v1.global_variables()]
    assert [name for name in names if "accumulator" in name] == ["x/accumulator"]
    batches = np.arange(8.0).reshape(2, 2, 2)
    values = after_each(train_op, [{feeds: batch} for batch in batches], x)
    np.testing.assert_allclose(values[-1], [1.0, 2.0] - batches.mean((0, 1)), 1e-6)


@pytest.mark.parametrize("ids_dtype", [tf.int32, tf.int64])
def test_what_tf_gradients_adds_up_is_its_own(ids_dtype, control_flow, fresh_graph):
    """Sums over a table looked up twice, one that is a weight too, and a loop."""
    x = v1.placeholder(tf.float32, [None, 2])
    ids = tf.cast(x[:, 0], tf.int64), tf.cast(x[:, 1], ids_dtype)
    tables = [v1.get_variable(n, initializer=np.ones([3, 2], "f")) for n in "ab"]
    twice, tied = [[tf.gather(table, i) for i in ids] for table in tables]
    looped = tf.while_loop(
        lambda i, h: i < 2, lambda i, h: (i + 1, h @ (tables[1][:2])), [0, x]
    )[1]
    loss = tf.reduce_mean(twice[0] * twice[1] * looped)
    loss += tf.reduce_mean(tf.matmul(tied[0], tables[1], transpose_b=True))
    gradients = tf.gradients(loss, tables)
    optimizer = AccumulatingOptimizer(sgd(), 2)
    train_op = optimizer.apply_gradients(zip(gradients, tables, strict=True))
    feeds = [{x: [[0.0, 1.0]]}, {x: [[2.0, 1.0]]}]
    plain = sgd().compute_gradients(loss, tables)
    with start_session() as session:
        start = session.run(tables)
        fetches = [tf.convert_to_tensor(g) for g, _ in plain]
        mean = np.mean([session.run(fetches, feed) for feed in feeds], 0)
        for feed in feeds:
            session.run(train_op, feed)
        np.testing.assert_allclose(session.run(tables), start - mean, rtol=1e-6)


def _by_change(change, wrap=None):
    def make_train_op(loss):
        optimizer = OPTIMIZERS["Momentum"](tf.constant(0.1), None)
        optimizer = wrap(optimizer) if wrap else optimizer
        clock = v1.train.get_or_create_global_step()
        pairs = change(optimizer.compute_gradients(loss), clock)
        return optimizer.apply_gradients(pairs, clock)

    return make_train_op


@pytest.mark.parametrize(
    "name", ["clip_by_global_norm", "scaled_and_clipped_twice", "noise", "weight_decay"]
)
def test_batches_that_are_cut_are_changed_as_a_whole(name, tmp_path):
    """With the plain optimizer, and this library's inside of `microbatch_model_fn`."""
    model_fn = make_model_fn(_by_change(CHANGES[name]), embedding_layer)
    theirs = train(model_fn, tmp_path / "plain", INPUT)
    wrapped = _by_change(CHANGES[name], wrap=_accumulating(1))
    for count in (1, 4):
        model_fn = make_model_fn(wrapped, embedding_layer)
        values = train_in_micro_batches(model_fn, tmp_path / str(count), INPUT, count)
        assert difference(values, theirs) <= 5e-7


def test_batches_that_are_cut_wait_for_what_the_change_waits_for(tmp_path):
    def model_fn(features, labels, mode):
        loss = loss_of(features, labels)
        zero = v1.zeros_initializer()
        counters = [
            v1.get_variable(name, [], tf.int64, zero, trainable=False)
            for name in ("batches", "examples")
        ]
        optimizer = AccumulatingOptimizer(sgd(0.1), 1)
        pairs = optimizer.compute_gradients(loss)
        added = [v1.assign_add(counters[0], 1)]
        size = tf.shape(features["x"], out_type=tf.int64)[0]
        added.append(v1.assign_add(counters[1], size))
        with tf.control_dependencies(added):
            pairs = _clip_by_global_norm(pairs, None)
        step = v1.train.get_or_create_global_step()
        return spec_of(mode, loss, optimizer.apply_gradients(pairs, step))

    values = train_in_micro_batches(model_fn, tmp_path, INPUT, 4)
    assert (values["batches"], values["examples"]) == (6, 5 * 16 + 7)


# Refusals: what is done to the gradients of a model, in the terms of its parts.
def _foreign(parts, change):
    gradients = tf.gradients(parts.loss, parts.variables)
    return list(zip(change(gradients), parts.variables, strict=True))


def _of_all(change):
    return lambda parts: [(change(g, parts), v) for g, v in parts.pairs]


def _with_gradient_of_hidden(gradient, parts):
    (of_hidden,) = tf.gradients(parts.loss, parts.hidden)
    return tf.convert_to_tensor(gradient) * tf.norm(of_hidden)


def _by_written_variable(gradient, parts):
    with v1.variable_scope("", reuse=v1.AUTO_REUSE):
        mean = v1.get_variable("average", initializer=1.0, trainable=False)
    with tf.control_dependencies([v1.assign(mean, 0.9 * mean + 0.1 * parts.loss)]):
        return tf.clip_by_norm(tf.convert_to_tensor(gradient), mean.read_value())


def _per_row(gradient, parts):
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.gather(parts.variables[0], gradient.indices)
    return tf.IndexedSlices(gradient.values + rows, gradient.indices)


def _per_slice(gradient, parts):
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.sign(gradient)
    return tf.IndexedSlices(tf.sign(gradient.values), gradient.indices)


def _of_slices(change):
    """Returns a change of the values and rows of sparse gradients alone."""

    def changed(gradient, parts):
        if not isinstance(gradient, tf.IndexedSlices):
            return 0.5 * gradient
        return tf.IndexedSlices(*change(gradient.values, gradient.indices))

    return _of_all(changed)


def _in_a_branch(parts):
    def apply():
        gradients, variables = zip(*parts.pairs, strict=True)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        pairs = zip(gradients, variables, strict=True)
        return parts.optimizer.apply_gradients(pairs)

    tf.cond(parts.loss > 0.0, apply, tf.no_op)


_OF_MICRO_BATCH = "must be changed by values that are equal in all micro-batches"
_ORIGIN = "must come from compute_gradients of AccumulatingOptimizer"
_SLICES = "Slices of a sparse gradient must only be scaled"
REFUSED = {
    "loss": (_of_all(lambda g, p: _scaled(g, p.loss)), rf"{_OF_MICRO_BATCH}.* Mean "),
    "batch_size": (
        _of_all(lambda g, p: _scaled(g, tf.cast(tf.shape(p.x)[0], tf.float32))),
        rf"{_OF_MICRO_BATCH}.* `clip_norm` .* microbatch_model_fn\.$",
    ),
    "inputs": (
        _of_all(lambda g, p: tf.clip_by_norm(g, tf.reduce_max(p.x))),
        rf"{_OF_MICRO_BATCH}.* Received: \S+ of a micro-batch, which clip_by_norm",
    ),
    "drawn_for_the_loss": (
        _of_all(lambda g, p: _scaled(g, p.drawn)),
        rf"{_OF_MICRO_BATCH}.* Received: drawn",
    ),
    "gradient_of_hidden": (_of_all(_with_gradient_of_hidden), _OF_MICRO_BATCH),
    "written_variable": (
        _of_all(_by_written_variable),
        "by a variable that is written with every .* Received: average, written by Assign",
    ),
    "tf.gradients": (
        lambda parts: _foreign(parts, lambda g: tf.clip_by_global_norm(g, 1.0)[0]),
        rf"{_ORIGIN}.* Received: clip_by_global_norm/.*table:0",
    ),
    "of_the_norm": (
        lambda parts: _foreign(
            parts, lambda g: tf.gradients(tf.norm(g[1]), g[1])[:1] * 2
        ),
        "must not be a function of other gradients.* Received: norm/",
    ),
    "of_squares": (
        lambda parts: _foreign(
            parts, lambda g: tf.gradients(tf.nn.l2_loss(g[1]), parts.variables)
        ),
        "must not be a function of other gradients.* Received: L2Loss of type L2Loss",
    ),
    "of_a_quotient": (
        lambda parts: _foreign(
            parts, lambda g: tf.gradients(tf.reduce_sum(1.0 / g[1]), parts.variables)
        ),
        "must not be a function of other gradients.* of type RealDiv",
    ),
    "rounded": (
        lambda parts: _foreign(parts, lambda g: [tf.cast(g[1], tf.bfloat16)] * 2),
        rf"{_ORIGIN}.* of type Cast",
    ),
    "by_hand": (
        lambda parts: [(tf.reduce_mean(parts.x, 0), parts.variables[1])],
        rf"{_ORIGIN}.* Received: Mean_1:0 of type Mean for w:0",
    ),
    "rows": (_of_all(_per_row), rf"{_SLICES}.*of type AddV2"),
    "slices": (_of_all(_per_slice), rf"{_SLICES}.*of type Sign.* dense first"),
    "other_rows": (
        _of_slices(lambda values, rows: (0.5 * values, (rows + 1) % 5)),
        rf"{_SLICES}.*of type AddV2",
    ),
    "squares": (
        _of_slices(lambda values, rows: (tf.square(values), rows)),
        rf"{_SLICES}.*of type Square",
    ),
    "largest_square": (
        _of_slices(lambda v, rows: (v / tf.reduce_max(tf.square(v)), rows)),
        rf"{_SLICES}.*of type Max",
    ),
    "norm_of_each": (
        _of_slices(lambda v, rows: (v / tf.reduce_sum(v * v, 1, True), rows)),
        rf"{_SLICES}.*of type (Sum|RealDiv)",
    ),
    "part_of_the_norm": (
        _of_all(lambda g, p: tf.clip_by_norm(g, 1.0, axes=[-1])),
        rf"{_SLICES}.*of type (Sum|RealDiv)",
    ),
    "branch": (_in_a_branch, "must not be applied in a branch"),
}


class _Parts:
    """A model with a table, a weight, and a random number in its loss."""

    def __init__(self, **options):
        self.x = v1.placeholder(tf.float32, [None, 3], "x")
        table = v1.get_variable("table", [5, 3], initializer=v1.ones_initializer())
        w = v1.get_variable("w", [3], initializer=v1.ones_initializer())
        self.variables = [table, w]
        words = v1.placeholder_with_default([0, 1, 0], [3])
        self.hidden = self.x + tf.gather(table, words)
        self.drawn = tf.random.uniform([], name="drawn")
        self.loss = tf.reduce_mean(self.drawn * tf.linalg.matvec(self.hidden, w))
        self.optimizer = AccumulatingOptimizer(sgd(), 2, **options)
        self.pairs = self.optimizer.compute_gradients(self.loss)


@pytest.mark.parametrize("name", REFUSED)
def test_changes_that_are_not_those_of_the_mean_are_refused(name, fresh_graph):
    change, sentence = REFUSED[name]
    parts = _Parts()
    with pytest.raises(ValueError, match=sentence):
        parts.optimizer.apply_gradients(change(parts))


class _Threshold:
    """Gradients that are clipped by a variable, with ways to write that."""

    def __init__(self, options=None):
        (self.fed,), (variable,), self.loss = fed_gradients(0.0)
        self.most = v1.get_variable("most", initializer=4.0, trainable=False)
        self.step = v1.train.get_or_create_global_step()
        self.optimizer = AccumulatingOptimizer(sgd(), 2, **(options or {}))
        ((self.gradient, _),) = self.optimizer.compute_gradients(self.loss)
        self.variable = variable

    def apply(self, gradient=None):
        if gradient is None:
            gradient = tf.clip_by_value(self.gradient, -self.most, self.most)
        return self.optimizer.apply_gradients([(gradient, self.variable)], self.step)

    def halve(self, *_):
        return v1.assign(self.most, 0.5 * self.most)

    def then(self, write, train_op=None):
        with tf.control_dependencies([train_op or self.apply()]):
            return tf.group(write())


def _by_momentum(t):
    sums = 0.9 * t.most + t.gradient
    return t.then(lambda: v1.assign(t.most, sums), t.apply(sums))


def _as_update_op(t):
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, t.halve())
    return t.apply()


def _in_a_branch_of_its_own(t):
    is_large = t.most > 1.0
    return t.then(lambda: tf.cond(is_large, lambda: tf.group(t.halve()), tf.no_op))


def _waited_for_twice(t):
    with tf.control_dependencies([v1.assign(t.most, 0.9 * t.most + t.gradient)]):
        return t.apply(t.most.read_value())


def _table(t):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 4.0)
    key = tf.constant(0, tf.int64)
    most = table.lookup(key)
    train_op = t.apply(tf.clip_by_value(t.gradient, -most, most))
    return t.then(lambda: table.insert(key, 0.5 * table.lookup(key)), train_op)


def _of_other_origin(t):
    (gradient,) = tf.gradients(t.loss, t.variable)
    return t.then(t.halve, t.apply(gradient * t.most))


WRITTEN = {
    "other_origin": _of_other_origin,
    "table": _table,
    "behind": lambda t: t.then(t.halve),
    "beside": lambda t: tf.group(t.apply(), t.halve()),
    "added": lambda t: tf.group(t.apply(), v1.assign_add(t.most, 0.1)),
    "set_behind": lambda t: t.then(lambda: v1.assign(t.most, 2.0)),
    "branch": _in_a_branch_of_its_own,
    "update_ops": _as_update_op,
    "momentum": _by_momentum,
    "loss": lambda t: t.then(lambda: v1.assign(t.most, tf.abs(t.fed))),
    "change_itself": _waited_for_twice,
    "global_step": lambda t: t.apply(t.gradient / tf.cast(t.step + 1, tf.float32)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_variable_that_micro_steps_write_changes_no_gradient(name, fresh_graph):
    """Wherever it is written: the first session.run sees the finished graph."""
    sentence = (
        "must not be changed by a (variable|table) that is written with every "
        "micro-batch"
    )
    with pytest.raises(ValueError, match=sentence) as error:
        after_each(WRITTEN[name](_Threshold()), [], [])
    remedy = "`after_update_ops`, to write it once per update"
    if name in ("momentum", "loss", "change_itself"):
        remedy = "split whole batches by microbatch_model_fn"
    elif name == "global_step":
        remedy = "Read get_or_create_update_step() in its place."
    assert remedy in str(error.value)


def _where_updated(t):
    def write():
        halved = tf.where(get_windows()[0].has_updated, 0.5 * t.most, t.most)
        return v1.assign(t.most, halved)

    return t.then(write)


def _scheduled(t):
    """Written in every micro-step, but with one value in a window."""
    number = tf.cast(get_or_create_update_step(), tf.float32)
    with tf.control_dependencies([v1.assign(t.most, 4.0 * 0.5**number)]):
        now = tf.identity(t.most.read_value())
    return t.apply(tf.clip_by_value(t.gradient, -now, now))


def _fed(t):
    most = v1.placeholder_with_default(2.0, [])
    return t.apply(tf.clip_by_value(t.gradient, -most, most) * 4.0 / t.most)


def _loss_scale(t):
    """Written with every micro-step, but the gradient has it too."""
    (gradient,) = tf.gradients(t.loss * t.most, t.variable)
    return t.then(t.halve, t.apply(gradient * (1.0 / t.most)))


WRITTEN_ONCE = {
    "loss_scale": (_loss_scale, [-9.0, -18.0]),
    "after_update_ops": (lambda t: t.apply(), [-4.0, -6.0]),
    "where_updated": (_where_updated, [-4.0, -6.0]),
    "schedule": (_scheduled, [-4.0, -6.0]),
    "fed": (_fed, [-2.0, -4.0]),
    "assignment": (lambda t: t.apply(v1.assign(t.most, t.gradient)), [-9.0, -18.0]),
}


@pytest.mark.parametrize("name", WRITTEN_ONCE)
def test_a_variable_that_updates_write_may_change_gradients(name, fresh_graph):
    build, expected = WRITTEN_ONCE[name]
    options = {}
    if name == "after_update_ops":
        options[name] = lambda: [threshold.halve()]
    threshold = _Threshold(options)
    feeds = [{threshold.fed: value} for value in (8.0, 10.0)] * 2
    values = after_each(build(threshold), feeds, threshold.variable)
    assert values[1::2] == expected


def test_a_reference_variable_that_a_change_writes_is_refused(fresh_graph):
    threshold = _Threshold()
    old = v1.get_variable("old", initializer=0.0, trainable=False, use_resource=False)
    with pytest.raises(ValueError, match="must not write a reference variable"):
        threshold.apply(v1.assign(old, threshold.gradient))


def test_what_is_refused_in_a_window_is_as_it_was_without_one(fresh_graph):
    parts = _Parts()
    ours = AccumulatingOptimizer(sgd(), 1)
    pairs = REFUSED["slices"][0](parts)
    assert isinstance(ours.apply_gradients(pairs), tf.Operation)


def test_loops_of_tensorflow_1_are_refused(fresh_graph, control_flow):
    parts = _Parts()

    def halved(gradient):
        return tf.while_loop(
            lambda g: tf.norm(g) > 1.0, lambda g: [g / 2.0], [gradient]
        )[0]

    pairs = [(halved(tf.convert_to_tensor(g)), v) for g, v in parts.pairs]
    if not v1.control_flow_v2_enabled():
        with pytest.raises(ValueError, match="must not loop by control flow of Tensor"):
            parts.optimizer.apply_gradients(pairs)
    else:
        train_op = parts.optimizer.apply_gradients(pairs)
        feeds = [{parts.x: np.full([3, 3], value)} for value in (1.0, 3.0)]
        assert np.all(after_each(train_op, feeds, parts.variables[1])[1] < 1.0)


def test_the_norm_of_slices_is_the_callers_if_gradients_are_changed(fresh_graph):
    parts = _Parts(sparse_norm="slices", clip_norm=1.0)
    pairs = _clip_by_global_norm(parts.pairs, None)
    with pytest.raises(ValueError, match="`sparse_norm='slices'` must not be combined"):
        parts.optimizer.apply_gradients(pairs)
