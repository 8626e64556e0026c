"""An optimizer inside the branch that updates."""

import re

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    make_accumulating_train_op,
    micro_batch_seed,
)
from tests.helpers.models.interfaces import after_each, sgd

v1 = tf.compat.v1
K, UPDATES = 4, 3
BATCHES = np.random.default_rng(0).normal(size=[UPDATES, K, 2]).astype(np.float32)


def _train(make_optimizer, steps=K, after=None, use_resource=True, **options):
    """Returns all variables' values after UPDATES updates; `steps` = 0 is plain."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 2])
        global_step = v1.train.get_or_create_global_step()
        initial = tf.constant([1.0, -2.0])
        w = v1.get_variable("w", initializer=initial, use_resource=use_resource)
        loss = tf.reduce_mean(tf.square(tf.linalg.matvec(x, w) - 1.0))
        optimizer = make_optimizer(global_step)
        after = after and (lambda make=after: [make(w)])
        if steps:
            options["after_update_ops"] = after
            train_op = make_accumulating_train_op(loss, optimizer, steps, **options)
        else:
            pairs = optimizer.compute_gradients(loss)
            train_op = optimizer.apply_gradients(pairs, global_step=global_step)
            with tf.control_dependencies([train_op]):
                train_op = tf.group(after()) if after else train_op
        session.run(v1.global_variables_initializer())
        for batch in BATCHES.reshape([-1, 1 if steps else K, 2]):
            session.run(train_op, {x: batch})
        variables = v1.global_variables()
        values = session.run(variables)
        return {v.op.name: x for v, x in zip(variables, values, strict=True)}


class Lamb(v1.train.GradientDescentOptimizer):
    """Like NVIDIA's: its bias correction depends on the number of the update."""

    def apply_gradients(self, grads_and_vars, global_step, name=None):
        number = tf.cast(global_step, tf.float32)
        factor = 1.0 / (1.0 - 0.5**number)
        pairs = [(gradient * factor, variable) for gradient, variable in grads_and_vars]
        return super().apply_gradients(pairs, name=name)


@pytest.mark.parametrize("size", [1, K])  # examples in a window's micro-steps
def test_an_optimizer_that_requires_global_step_gets_the_number_of_the_update(size):
    ours = _train(lambda _: Lamb(0.1), size)["w"]
    w = np.array([1.0, -2.0])
    for number, x in enumerate(BATCHES.reshape([-1, size, 2]), 1):
        gradient = np.mean(2 * (x @ w - 1)[:, None] * x, 0)
        w = w - 0.1 * gradient / (1 - 0.5**number)
    np.testing.assert_allclose(ours, w, rtol=1e-5)


class MultistepAdam(v1.train.GradientDescentOptimizer):
    """Looks up its variable in the default graph, as tensor2tensor's does."""

    def _create_slots(self, var_list):
        first = min(var_list, key=lambda variable: variable.name)
        self._create_non_slot_variable(1.0, "power", first)

    def _finish(self, update_ops, name_scope):
        def halve():
            graph = v1.get_default_graph()
            power = self._get_non_slot_variable("power", graph=graph)
            return v1.assign(power, power * 0.5, use_locking=False).op

        with tf.control_dependencies(update_ops):
            outside = halve()
            with tf.control_dependencies([outside]):
                inside = tf.cond(tf.constant(True), lambda: tf.group(halve()), tf.no_op)
        return tf.group(outside, inside, name=name_scope)


def test_an_optimizer_finds_its_variables_by_the_default_graph(control_flow):
    values = _train(lambda _: MultistepAdam(0.1))
    assert values["power"] == 0.25**UPDATES
    plain = _train(lambda _: sgd(0.1), 0)
    np.testing.assert_allclose(values["w"], plain["w"], rtol=1e-5)


def _average(w):
    return tf.train.ExponentialMovingAverage(0.5).apply([w])


@pytest.mark.parametrize("use_resource", [True, False])
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip_window"])
def test_after_update_ops_run_once_an_update(on_nonfinite, use_resource, control_flow):
    if control_flow == "v2" and not use_resource:
        pytest.skip("refused: no tf.cond of control flow v2 holds reference variables")

    options = {"after": _average, "use_resource": use_resource}
    options["make_optimizer"] = lambda _: v1.train.AdamOptimizer(0.1)
    ours = _train(on_nonfinite=on_nonfinite, **options)
    plain = _train(steps=0, **options)
    for name in ("w", "w/ExponentialMovingAverage"):
        np.testing.assert_allclose(ours[name], plain[name], rtol=1e-5)


def test_after_update_ops_read_the_number_of_their_update(control_flow):
    """As behind a plain train op; in a branch, too."""

    def train(number, **options):
        variables = []

        def make_optimizer(_):
            start = tf.zeros([], tf.int64)
            seen = v1.get_variable("seen", initializer=start, use_resource=True)
            variables.append(seen)
            return sgd(0.1)

        def after(w):
            average = tf.train.ExponentialMovingAverage(0.9, num_updates=number())
            (seen,) = variables
            is_even = tf.equal(number() % 2, 0)
            note = tf.cond(
                is_even, lambda: seen.assign(number()), lambda: tf.identity(seen)
            )
            return tf.group(average.apply([w]), note)

        return _train(make_optimizer, after=after, **options)

    plain = train(v1.train.get_global_step, steps=0)
    ours = train(get_or_create_update_step)
    assert ours["seen"] == 2  # of three updates
    for name in ("seen", "w/ExponentialMovingAverage"):
        np.testing.assert_allclose(ours[name], plain[name], rtol=1e-5)


def test_after_update_ops_that_exist_already_are_refused():
    with tf.Graph().as_default():
        ops = tf.no_op()
        with pytest.raises(TypeError, match="`after_update_ops` must be a function"):
            AccumulatingOptimizer(sgd(), K, after_update_ops=[ops])
    ops = []
    with pytest.raises(ValueError, match="must make its operations when it is called"):
        _train(lambda s: ops.append(tf.identity(s)) or sgd(), after=lambda _: ops[0])


class Adafactor(v1.train.GradientDescentOptimizer):
    """Reads the graph's global step without being given it, as tensor2tensor's does."""

    def _prepare(self):
        step = tf.cast(v1.train.get_global_step(), tf.float32)
        self._learning_rate = 0.1 / (1.0 + step)
        super()._prepare()


def _decayed(clock):
    rate = v1.train.polynomial_decay(0.1, clock, 12, 0.01)
    return v1.train.AdamOptimizer(rate)


def _halved(step):
    return 0.5 ** tf.cast(step, tf.float32)


@pytest.mark.parametrize(
    "make_optimizer, on_nonfinite, words",
    [
        (_decayed, "raise", "PolynomialDecay, from which AdamOptimizer comput"),
        (lambda _: Adafactor(0.1), "skip_window", "Adafactor reads global_step, which"),
        (
            lambda step: v1.train.AdagradDAOptimizer(0.1, step),
            "raise",
            "AdagradDAOptimizer re",
        ),
        (
            lambda step: v1.train.AdamOptimizer(lambda: _halved(step)),
            "skip_window",
            "AdamOptimizer r",
        ),
        (lambda _: _decayed(get_or_create_update_step()), "skip_window", None),
        (lambda _: v1.train.AdamOptimizer(0.1), "raise", None),
    ],
)
def test_a_micro_step_clock_is_warned_of(make_optimizer, on_nonfinite, words, caplog):
    _train(make_optimizer, on_nonfinite=on_nonfinite)
    if words is None:
        assert not caplog.messages
    else:
        (message,) = caplog.messages
        assert words in message and "counts micro-steps" in message
    caplog.clear()
    _train(make_optimizer, 1)  # with K = 1 both clocks are equal
    assert not caplog.messages


class CountingAdafactor(Adafactor):
    """Moves the graph's global step with each of its updates."""

    def _finish(self, update_ops, name_scope):
        with tf.control_dependencies(update_ops):
            return v1.assign_add(v1.train.get_global_step(), 1, name=name_scope).op


def test_a_clock_that_the_optimizer_moves_counts_updates(caplog, fresh_graph):
    step = v1.train.get_or_create_global_step()
    w = v1.get_variable("w", initializer=1.0, use_resource=True)
    optimizer = AccumulatingOptimizer(CountingAdafactor(0.1), K)
    pairs = optimizer.compute_gradients(w * w, [w])
    steps = after_each(optimizer.apply_gradients(pairs), [{}] * 2 * K, step)
    assert [*steps] == [0] * (K - 1) + [1] * K + [2]
    assert not caplog.messages


class _Model:
    """A loss whose parts may depend on a step, with the other parts of its train op."""

    def __init__(self):
        self.step = v1.train.get_or_create_global_step()
        self.w = v1.get_variable("w", initializer=[1.0, -2.0], use_resource=True)
        self.outputs = tf.linalg.matvec(v1.placeholder(tf.float32, [None, 2]), self.w)
        self.options = {}

    @property
    def loss(self):
        return tf.reduce_mean(tf.square(self.outputs))

    @property
    def number(self):
        return tf.cast(self.step, tf.float32)

    def averaged(self, step):
        ema = tf.train.ExponentialMovingAverage(0.9, num_updates=step)
        return self.loss, {"after_update_ops": lambda: [ema.apply([self.w])]}

    def logged(self):
        return {"after_update_ops": lambda: [tf.print(self.step)]}

    def in_function(self, shows):
        @tf.function
        def scaled(value):
            if shows:
                tf.print(self.step)
            return value * (1.0 if shows else self.number)

        return scaled(self.loss)


def _moving(model):
    mean = v1.get_variable("mean", initializer=0.5, trainable=False, use_resource=True)
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, mean.assign(mean / model.number))
    return model.loss


def _stateless(model, seed, **options):
    noise = tf.random.stateless_uniform(tf.shape(model.outputs), seed, **options)
    return tf.reduce_mean(noise * model.outputs)


def _in_a_loop(model):
    return tf.while_loop(
        lambda i, _: i < 2, lambda i, h: (i + 1, h * model.number), [0, model.loss]
    )[1]


def _from_data(model):
    weights = tf.data.Dataset.range(9).map(lambda i: model.number / tf.cast(i, "float"))
    return model.loss * v1.data.make_initializable_iterator(weights).get_next()


def _copied(model):
    copy = v1.get_variable("copy", initializer=0.0, trainable=False, use_resource=True)
    with tf.control_dependencies([copy.assign(2.0 * model.number)]):
        return model.loss * copy.read_value()


def _reversed(model):
    @tf.custom_gradient
    def reverse(loss):
        return tf.identity(loss), lambda gradient: -model.number * gradient

    return reverse(model.loss)


def _shown_in_branch(model):
    loss = model.loss
    return tf.cond(model.step > 1, lambda: v1.Print(loss, [loss]), lambda: loss)


# Losses, or (loss, options of the train op), and the operation that a warning names.
READERS = {
    "weight_of_a_term": (
        lambda m: m.loss + tf.minimum(1.0, m.number / 9.0) * tf.nn.l2_loss(m.w),
        "truediv, from which the loss is computed",
    ),
    "turns": (
        lambda m: tf.cond(m.step % 2 > 0, lambda: m.loss, lambda: 2.0 * m.loss),
        "mod, from which the loss is computed",
    ),
    "numbers_by_branch": (
        lambda m: m.loss * tf.cond(m.step < 5, lambda: 0.5, lambda: 1.0),
        "Less, from which",
    ),
    "frozen_at_first": (
        lambda m: tf.where(m.step > 5, m.loss, tf.stop_gradient(m.loss)),
        "Greater, from which",
    ),
    "schedule": (
        lambda m: m.loss * v1.train.exponential_decay(0.5, m.step, 4, 0.5),
        "ExponentialDecay, from which",
    ),
    "loop": (_in_a_loop, r"while\S*, from which"),
    "function": (lambda m: m.in_function(shows=False), "Call, from which"),
    "weight": (lambda m: (m.loss, {"weight": 1.0 + m.number}), "the weight is"),
    "data_set": (_from_data, "MapDataset, from which the loss is computed"),
    "copy": (_copied, "mul, from which a variable is written before the loss"),
    "average": (lambda m: m.averaged(m.step), "from which after_update_ops computes"),
    "update_ops": (_moving, "truediv, from which UPDATE_OPS computes"),
    "windows": (
        lambda m: (m.loss, {"gradient_accumulation_steps": lambda _: m.step + 2}),
        "add, from which gradient_accumulation_steps is computed",
    ),
    "divided": (
        lambda m: m.loss * tf.cast(1 + m.step // K, tf.float32),
        "floordiv, from which the loss is computed, reads .* as long as no partial win",
    ),
    "size": (
        lambda m: m.loss * tf.cast(tf.size(tf.range(m.step)), tf.float32),
        "range, from which the l",
    ),
    "own_gradient": (_reversed, "IdentityN, from which the loss is computed"),
    # An operation that only shows it, draws from it or counts updates is no reader.
    "summary": (lambda m: (v1.summary.scalar("step", m.step), m.loss)[1:], None),
    "print": (lambda m: v1.Print(m.loss, [m.step]), None),
    "shown_in_branch": (_shown_in_branch, None),
    "shown_in_function": (lambda m: m.in_function(shows=True), None),
    "shown_after_updates": (lambda m: (m.loss, m.logged()), None),
    "seed": (lambda m: _stateless(m, tf.stack([m.step, 1])), None),
    "philox": (lambda m: _stateless(m, tf.stack([m.step, 1]), alg="philox"), None),
    "own_seed": (lambda m: _stateless(m, micro_batch_seed("noise")), None),
    "without_gradient": (lambda m: m.loss + m.number, None),
    "update_step": (lambda m: m.averaged(get_or_create_update_step()), None),
}


# Rows that differ in control flow v1: in branches, loops and functions, and beside them.
_WITH_CONTROL_FLOW = ("turns", "numbers_by_branch", "loop", "function", "average")
_WITH_CONTROL_FLOW += ("update_ops", "windows", "shown_in_branch", "shown_in_function")


@pytest.mark.parametrize(
    ("name", "control_flow"),
    [(name, "v2") for name in READERS] + [(name, "v1") for name in _WITH_CONTROL_FLOW],
    indirect=["control_flow"],
)
def test_what_reads_global_step_is_named_once(name, control_flow, caplog, fresh_graph):
    build, words = READERS[name]
    model = _Model()
    result = build(model)
    loss, *options = result if isinstance(result, tuple) else (result,)
    options = {"gradient_accumulation_steps": K, **(options[0] if options else {})}
    make_accumulating_train_op(loss, sgd(), **options)
    ours = [m for m in caplog.messages if "global_step" in m]
    assert len(ours) == (words is not None)
    if words is not None:
        assert re.search(words, ours[0])
        assert re.search(r"global_step \(test_applying.py, line \d+\), ", ours[0])


def _next_of(data):
    return v1.data.make_one_shot_iterator(data).get_next()


def _numbers():
    return tf.data.Dataset.range(9).map(lambda i: tf.cast(i, tf.float32))


def _labels():
    return tf.data.Dataset.from_tensor_slices([1.0, 2.0])


def _by_size(batch):
    return 0.1 / tf.cast(tf.shape(batch)[0], tf.float32)


def _with_batches(weight):
    batches = tf.data.Dataset.from_tensor_slices([1.0, 2.0]).repeat().batch(2)
    return weight * tf.reduce_mean(_next_of(batches))


# Factors of the loss, learning rates, and the part of the update that a warning names.
CLOCKS = {
    "rate_of_data": (lambda: (1.0, _next_of(_numbers())), "decides the update"),
    "rate_of_python": (
        lambda: (1.0, tf.py_function(lambda: 0.1, [], tf.float32)),
        "EagerPyFunc.* decides the update",
    ),
    "weight": (
        lambda: (_with_batches(_next_of(_numbers())), 0.1),
        "decides the gradients",
    ),
    # A value with an input of its own, of one example of many, or random is no clock.
    "python_of_updates": (
        lambda: (
            1.0,
            tf.py_function(lambda i: 0.1, [get_or_create_update_step()], tf.float32),
        ),
        None,
    ),
    "examples": (lambda: (_next_of(_numbers()), 0.1), None),
    "drawn": (lambda: (_with_batches(_next_of(_numbers().shuffle(9))), 0.1), None),
    "fed": (lambda: (1.0, v1.placeholder(tf.float32, [])), None),
    "size": (lambda: (1.0, _by_size(_next_of(_numbers().batch(2)))), None),
    "labels": (lambda: (_with_batches(_next_of(_labels())), 0.1), None),
}


def _in_python():
    return tf.reshape(tf.py_function(lambda: 0.1, [], tf.float32), [])


@pytest.mark.parametrize("make", [_in_python, lambda: _next_of(_numbers())])
def test_a_schedule_that_scales_gradients_is_named(make, caplog, fresh_graph):
    model = _Model()
    loss = _with_batches(1.0) * model.loss
    optimizer, scale = AccumulatingOptimizer(sgd(), K), make()
    pairs = [
        (scale * g, v) for g, v in optimizer.compute_gradients(loss) if g is not None
    ]
    optimizer.apply_gradients(pairs, v1.train.get_global_step())
    assert [m for m in caplog.messages if "and decides the gradients" in m]


@pytest.mark.parametrize("name", CLOCKS)
def test_a_schedule_that_moves_with_every_micro_step_is_named(
    name, caplog, fresh_graph
):
    build, words = CLOCKS[name]
    factor, rate = build()
    model = _Model()
    make_accumulating_train_op(factor * model.loss, sgd(rate), K)
    ours = [m for m in caplog.messages if "takes its next value with every" in m]
    assert len(ours) == (words is not None)
    assert words is None or re.search(words, ours[0])


def test_a_loss_for_each_example_is_shown_the_way():
    class Private(v1.train.GradientDescentOptimizer):
        """Clips every example's gradient, as TF Privacy's optimizers do."""

        def compute_gradients(self, loss, var_list=None, **_):
            (w,) = v1.trainable_variables()
            total = tf.zeros_like(w)
            for one in tf.unstack(loss):
                total += tf.clip_by_norm(tf.gradients(one, w)[0], 1.0)
            return [(total / K, w)]

    with tf.Graph().as_default():
        w = v1.get_variable("w", initializer=[1.0, -2.0])
        fed = v1.placeholder(tf.float32, BATCHES[0].shape)
        loss = tf.square(tf.linalg.matvec(fed, w) - 1.0)
        with pytest.raises(
            ValueError, match=r"Optimizer\(optimizer, K\)\.minimize\(lo"
        ):
            make_accumulating_train_op(loss, Private(0.1), 2)
        train_op = AccumulatingOptimizer(Private(0.1), 2).minimize(loss)
        values = after_each(train_op, [{fed: BATCHES[0]}] * 2, w)
    x, start = BATCHES[0], np.array([1.0, -2.0])
    rows = 2 * (x @ start - 1)[:, None] * x
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)
    np.testing.assert_allclose(values[0], start, rtol=1e-5)
    np.testing.assert_allclose(values[1], start - 0.1 * np.mean(rows, 0), rtol=1e-5)
