"""The spot check: it finds the error of a wrong rule, but lets right code alone."""

import contextlib
import logging

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import per_example
from estimator_accum.microbatch.own_optimizer import derivation, spot_check
from estimator_accum.microbatch.own_optimizer.fingerprints import (
    Fingerprint,
    rounding_of,
)
from estimator_accum.rows.rules.table import RULES
from estimator_accum.rows.states import State
from tests.helpers.models.interception import cut, train
from tests.helpers.models.toy_models import relative_difference

v1 = tf.compat.v1
_random = np.random.default_rng(0)
_N = 16  # examples
_SQUARES = _random.normal(size=(_N, 3, 3)) + 4 * np.eye(3)
_X, _SEQ = _random.normal(size=(_N, 3)), _random.normal(size=(_N, _N, 3))


def _weights():
    return v1.get_variable(
        "weights", [3, 3], tf.float64, tf.random_normal_initializer(seed=1)
    )


def _same(x):
    """Draws random numbers in a function, which do not count."""
    draw = tf.random.uniform
    return tf.function(lambda x: x + 0 * draw(tf.shape(x), dtype=x.dtype))(x)


def _in_a_branch(x):
    is_training = v1.placeholder_with_default(True, [])
    return tf.cond(is_training, lambda: _same(x), lambda: 2 * x)


def _in_a_loop(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, _same(x)), (0, x))[1]


def _in_a_loop_of_tensorflow_1(x):
    """Draws in the loop itself, as DropoutWrapper does in dynamic_rnn."""

    def draw(i, x):
        return i + 1, x + 0 * tf.random.uniform(tf.shape(x), dtype=x.dtype)

    v1.disable_control_flow_v2()
    try:
        return tf.while_loop(lambda i, _: i < 2, draw, (0, x))[1]
    finally:
        v1.enable_control_flow_v2()


def _kept_numbers(x):
    """Dropout, in a function, of numbers that count."""
    return tf.function(lambda x: tf.nn.dropout(x, 0.5))(x)


def _model_fn(loss_of, through):
    def model_fn(features, labels, mode):
        loss = loss_of(features, _weights(), through)
        step = v1.train.get_or_create_global_step()
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def _places(features, weights, through):
    z = through(tf.tensordot(features["seq"], weights, 1))
    z = tf.ensure_shape(z, [None, _N, 3])
    places = tf.tile(tf.range(tf.shape(z)[0])[:, None], [1, 2])
    return tf.reduce_mean(tf.reduce_sum(tf.gather_nd(z, places), 1) ** 2)


def _solved(features, weights, through):
    squares = features["squares"] + tf.linalg.diag(through(features["x"] @ weights))
    solution = tf.linalg.triangular_solve(squares[:, None], features["x"][:, :, None])
    return tf.reduce_mean(tf.reduce_sum(solution, [1, 2, 3]) ** 2)


def _moved(features, weights, through):
    hidden = through(features["x"] @ weights)
    factor = tf.cast(features["late"], tf.float64)[:, None]
    return tf.reduce_mean((hidden + factor * tf.roll(hidden, 1, 0)) ** 2)


_WRONG = {
    "GatherNd": _places,
    "MatrixTriangularSolve": _solved,
    "Roll": _moved,
}
_THROUGH = {
    "as it is": lambda x: x,
    "function": _same,
    "branch": _in_a_branch,
    "loop": _in_a_loop,
    "loop of TensorFlow 1": _in_a_loop_of_tensorflow_1,
    "dropout": _kept_numbers,
}


def _batch(zeros=slice(0), late=1):
    x, squares, seq = _X.copy(), _SQUARES.copy(), _SEQ.copy()
    x[zeros], seq[zeros] = 0, 0
    late = np.full(_N, late)
    return {"x": x, "squares": squares, "seq": seq, "late": late}, np.zeros(_N)


def _with_wrong_rule(monkeypatch, kind: str) -> None:
    monkeypatch.setitem(RULES, kind, lambda *_: State("rows", 0))


@pytest.mark.parametrize(
    ("kind", "through"),
    [(kind, "as it is") for kind in _WRONG]
    + [("GatherNd", through) for through in _THROUGH if through != "as it is"],
)
def test_what_a_wrong_rule_lets_pass_is_refused(kind, through, monkeypatch):
    _with_wrong_rule(monkeypatch, kind)
    model_fn = cut(_model_fn(_WRONG[kind], _THROUGH[through]))
    with pytest.raises(ValueError, match=r"whose rows .* of the examples\. Declare"):
        train(model_fn, _batch())


@pytest.mark.parametrize(
    "mix",
    [
        lambda z: tf.roll(z, 1, 0),
        lambda z: z * (1 + tf.reduce_mean(z**2)),
        lambda z: z * tf.cast(tf.shape(z)[0], z.dtype),
    ],
)
@pytest.mark.parametrize("reduce", [tf.reduce_mean, tf.norm])
def test_entries_of_examples_that_are_mixed_are_refused(mix, reduce):
    def loss_of(features, weights, _):
        z = per_example(mix(features["x"] @ weights))
        chosen = tf.boolean_mask(z, features["x"][:, 0] > 0.0)
        return reduce(chosen @ weights * 100)

    with pytest.raises(ValueError, match=r"whose rows .* of the examples\. Declare"):
        train(cut(_model_fn(loss_of, None)), _batch())


@pytest.mark.parametrize(
    ("kind", "zeros"),
    [(kind, slice(None)) for kind in _WRONG]
    + [("GatherNd", slice(8)), ("Roll", slice(8, None))],
)
def test_padding_hides_nothing(kind, zeros, monkeypatch):
    _with_wrong_rule(monkeypatch, kind)
    with pytest.raises(ValueError, match=r"whose rows .* of the examples\. Declare"):
        train(cut(_model_fn(_WRONG[kind], lambda x: x)), _batch(zeros))


@tf.custom_gradient
def _clipped(x):
    return tf.identity(x), lambda d: tf.clip_by_norm(d, 0.5)


@pytest.mark.parametrize("through", _THROUGH)
def test_a_gradient_that_combines_examples_is_refused(through, monkeypatch):
    monkeypatch.setattr(derivation, "check_own_gradients", lambda *_: None)

    def loss_of(features, weights, through):
        return tf.reduce_mean(through(_clipped(features["x"] @ weights)) ** 2)

    with pytest.raises(ValueError, match=r"add up to the batch.*other examples\. L"):
        train(cut(_model_fn(loss_of, _THROUGH[through])), _batch())


@pytest.mark.once
def test_a_batch_that_is_not_cut_is_not_looked_at(monkeypatch):
    _with_wrong_rule(monkeypatch, "Roll")
    model_fn = _model_fn(_moved, lambda x: x)
    theirs, _ = train(model_fn, _batch(), 2)
    ours, _ = train(cut(model_fn, "auto"), _batch(), 2)
    assert relative_difference(ours, theirs) <= 1e-9


@pytest.mark.once
@pytest.mark.parametrize(
    ("fails", "attempts"), [([0], 3), ([0, 1], 2), ([0, 2], 3), ([], 1)]
)
def test_two_looks_of_three_must_fail(fails, attempts, monkeypatch):
    numbers, look = [], spot_check.SpotCheck._look_once

    def failing(self, session, rows, number, is_first, feeds, random):
        numbers.append(random.bit_generator.state["state"]["state"])
        look(self, session, rows, number, is_first, feeds, random)
        if len(numbers) - 1 in fails:
            raise spot_check._Difference("rows differ")

    monkeypatch.setattr(spot_check.SpotCheck, "_look_once", failing)
    is_refused = pytest.raises(ValueError, match="rows differ")
    with is_refused if len(fails) == 2 else contextlib.nullcontext():
        train(cut(_model_fn(_moved, lambda x: x)), _batch(late=0))
    assert len(set(numbers)) == len(numbers) == attempts


def _late(first: int):
    """Returns an input_fn whose examples are combined from one batch on."""

    def input_fn():
        before, after = (tf.data.Dataset.from_tensors(_batch(late=n)) for n in (0, 1))
        return before.repeat(first - 1).concatenate(after.repeat(3))

    return input_fn


def test_what_is_wrong_later_ends_the_training_before_its_update(monkeypatch):
    _with_wrong_rule(monkeypatch, "Roll")
    hooks = {}

    def model_fn(features, labels, mode):
        spec = _model_fn(_moved, lambda x: x)(features, labels, mode)
        hooks["session"] = _Keep()
        return spec._replace(training_hooks=[hooks["session"]])

    sentence = (
        r"Declare .*\. It was seen at update 10: updates since the last one that passed"
    )
    with pytest.raises(ValueError, match=sentence):
        train(cut(model_fn), _late(10), updates=12)
    assert hooks["session"].steps == list(range(1, 10))


class _Keep(v1.train.SessionRunHook):
    """Keeps the global_step after each update."""

    def __init__(self):
        self.steps = []

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(v1.train.get_global_step())

    def after_run(self, run_context, run_values):
        self.steps.append(int(run_context.session.run(v1.train.get_global_step())))


def test_some_batches_are_looked_at_by_no_more_examples_than_a_micro_batch_has(
    monkeypatch,
):
    looks = []
    monkeypatch.setattr(spot_check, "_BATCHES", (1, 2, 5))
    look = spot_check.SpotCheck._look

    def noting(self, session, rows, number, turn, feeds):
        looks.append((number, turn))
        look(self, session, rows, number, turn, feeds)

    monkeypatch.setattr(spot_check.SpotCheck, "_look", noting)
    model_fn = _model_fn(_moved, lambda x: x)
    train(cut(model_fn, 4), _late(7), updates=7)
    assert looks == [(4, (0, 0)), (4, (1, 0)), (4, (2, 0))]
    looks.clear()
    train(cut(model_fn, _N), _late(7), updates=1)  # no more than a micro-batch takes
    assert looks == [(2, (0, 0)), (2, (0, 2))]
    looks.clear()
    train(cut(model_fn, 1), _late(7), updates=1)
    assert not looks


@pytest.mark.parametrize(("most", "numbers"), [(3, [4, 2, 2]), (1, [4, 2])])
def test_memory_that_runs_out_in_a_look_has_fewer_examples_looked_at(
    most, numbers, monkeypatch, caplog
):
    looks = []

    def compare(self, look, is_scaled, random):
        looks.append((look.number, look.is_noisy))
        if look.number > most:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")

    monkeypatch.setattr(spot_check.SpotCheck, "_compare", compare)
    train(cut(_model_fn(_moved, lambda x: x), 4), _batch(late=0), updates=1)
    assert looks == [(number, True) for number in numbers]
    assert ("two examples do not fit in memory together" in caplog.text) == (most == 1)


def _empty_rows_along_another_axis(features, weights, through):
    rows = tf.transpose(features["x"] @ weights)[:, :, None]
    return tf.reduce_sum(tf.reduce_sum(rows[:, :, :0], 1) ** 2)


def _empty_draws_of_two_blocks(features, weights, through):
    rows = tf.concat([features["x"]] * 2, 0) @ weights[:, :0]
    rows += tf.random.normal(tf.shape(rows), dtype=rows.dtype)
    return tf.reduce_sum(rows @ tf.transpose(rows))


@pytest.mark.parametrize(
    "loss_of", [_empty_rows_along_another_axis, _empty_draws_of_two_blocks]
)
def test_rows_without_a_number_are_looked_at(loss_of):
    def loss(*arguments):
        return _moved(*arguments) + loss_of(*arguments)

    train(cut(_model_fn(loss, lambda x: x)), _batch(late=0), updates=1)


def _log_of_a_probability(x):
    return tf.math.log(1 / (1 + tf.exp(-x))) + tf.math.log(
        tf.abs(x) ** 0 * x[:, :1] ** 2
    )


def _as_numbers_of_words(x):
    table = tf.constant(np.arange(15.0).reshape(5, 3))
    return tf.gather(table, tf.cast(tf.sign(x[:, 0]) + 1, tf.int32))


def _as_places(x):
    """Places in a text, which noise moves behind its end."""
    places = tf.cast(tf.math.ceil(tf.abs(x[:, 0]) * 0 + 1), tf.int32)
    places += tf.cast(x[:, 1] > 3.0, tf.int32) * 7
    values = tf.gather(tf.reshape(x, [-1]), tf.range(tf.shape(x)[0]) * 3 + places)
    return values[:, None] * tf.ones([1, 3], tf.float64)


def _checked(x):
    with tf.control_dependencies([v1.assert_less(tf.abs(x), 4.0 + 0 * x)]):
        return tf.identity(x)


def _factored(x):
    squares = tf.linalg.matmul(x[:, None], x[:, None], transpose_a=True)
    return tf.reduce_sum(tf.linalg.cholesky(squares + tf.eye(3, dtype=tf.float64)), 1)


_RIGHT = [_log_of_a_probability, _as_numbers_of_words, _as_places, _checked, _factored]


@pytest.mark.parametrize("function", _RIGHT)
def test_noise_is_no_proof_where_a_model_cannot_take_it(function, caplog):
    def loss_of(features, weights, through):
        return tf.reduce_mean(tf.tanh(function(features["x"]) @ weights) ** 2)

    model_fn, batch = _model_fn(loss_of, None), _batch(zeros=slice(6, 8))
    if function is _log_of_a_probability:
        batch = _batch()
    theirs, _ = train(model_fn, batch, 2)
    with caplog.at_level(logging.WARNING):
        ours, _ = train(cut(model_fn), batch, 2)
    assert relative_difference(ours, theirs) <= 1e-9
    assert not caplog.records


def _fingerprint(value):
    products = np.full([2, 4], value)
    return Fingerprint(products, np.array(1), value, value, True, (3,))


@pytest.mark.parametrize(("difference", "is_right"), [(1.2e-7, True), (1e-4, False)])
def test_a_model_that_fits_its_examples_has_the_rounding_of_larger_numbers(
    difference, is_right
):
    """Its gradients 1 - p, and its losses, are the differences of such numbers."""
    one, other = _fingerprint(1e-3), _fingerprint(1e-3 + difference)
    tolerance, four = rounding_of(tf.float32), [one, one, one, other]
    ratio = spot_check._ratio_of_same_rows(four, [1] * 4, tolerance)
    assert (ratio <= 1) == is_right
    with (
        contextlib.nullcontext() if is_right else pytest.raises(ValueError, match="g,")
    ):
        gradients = [{"0 g": fingerprint} for fingerprint in four]
        spot_check._judge_exchanged_sums(gradients, 1.0, {"0 g": tolerance})


def test_examples_of_any_structure_are_looked_at(monkeypatch):
    texts = np.array([b"a", b"bb"] * 8)
    dense = np.where(_random.uniform(size=(_N, 4)) > 0.5, 1.5, 0)
    sparse = tf.sparse.from_dense
    ragged = [list(range(n % 4 + 1)) for n in range(_N)]

    def input_fn():
        features = {"text": texts, "x": _X, "few": (sparse(dense), tf.constant(2.0))}
        features["lists"] = tf.ragged.constant(ragged, tf.float64)
        return tf.data.Dataset.from_tensors((features, None))

    def model_fn(features, labels, mode):
        parts = features["few"][0], features["lists"], features["text"]
        widths = tf.strings.length(parts[2])[:, None]
        x = features["x"] * tf.cast(widths, tf.float64)
        x += tf.sparse.to_dense(parts[0])[:, :3] + tf.reduce_sum(parts[1], 1)[:, None]
        loss = tf.reduce_mean(tf.tanh(x @ _weights()) ** 2)
        step = v1.train.get_or_create_global_step()
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    seen = []
    compare = spot_check.SpotCheck._compare

    def noting(self, look, *rest):
        seen.append((look.is_noisy, look.feeds))
        compare(self, look, *rest)

    monkeypatch.setattr(spot_check.SpotCheck, "_compare", noting)
    theirs, _ = train(model_fn, input_fn)
    ours, _ = train(cut(model_fn), input_fn)
    assert relative_difference(ours, theirs) <= 1e-9
    assert [is_noisy for is_noisy, _ in seen] == [True]
    # One example of each quarter of the batch twice, and the others in its place.
    numbers = {tuple(row): i for i, row in enumerate(_X)}
    (text,) = (array for array in seen[0][1].values() if np.shape(array) == (16,))
    (x,) = (array for array in seen[0][1].values() if np.shape(array) == (16, 3))
    (entries,) = (array for array in seen[0][1].values() if np.shape(array)[1:] == (2,))
    ours = [numbers.get(tuple(row)) for row in x]
    assert [n if n is None else n // 4 for n in ours[:4]] == [0, 1, 2, 3]
    assert ours[4:] == [None, None, *ours[2:4], *ours[:2], *4 * [None], None, None][:12]
    assert [*text[:4]] == [texts[n] for n in ours[:4]]
    assert sum(entries[:, 0] < 4) == np.count_nonzero(dense[ours[:4]])
