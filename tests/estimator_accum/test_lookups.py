"""Norms of an embedding's slices are those of the batch at once, however it is looked up.

B = 4 examples of a micro-batch, 4 micro-batches, T = 3 words of a text.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import AccumulatingOptimizer, make_accumulating_train_op
from tests.helpers.models.replicas import TWO_CPUS, two_replicas
from tests.helpers.tables import rows

v1 = tf.compat.v1
_random = np.random.default_rng(0)
_WORDS = _random.integers(0, 5, (48, 3))
_TARGETS = _random.normal(size=48)
_TABLES = [_random.normal(size=(6, 2)) for _ in "12"]
_STEPS, _CLIP = 4, 0.3


def _looked_up_once(tables, words, partitions=None):
    shape = tf.shape(words, tf.int64)
    rows, columns = tf.meshgrid(tf.range(shape[0]), tf.range(shape[1]), indexing="ij")
    places = tf.stack([tf.reshape(rows, [-1]), tf.reshape(columns, [-1])], 1)
    ids = tf.SparseTensor(places, tf.reshape(words, [-1]), shape)
    table = partitions or tables[0]
    return tf.nn.embedding_lookup_sparse(table, ids, None, combiner="mean")


def _with_counts(tables, words):
    rows, places, _ = tf.unique_with_counts(tf.reshape(words, [-1]))
    embedded = tf.gather(tf.gather(tables[0], rows), places)
    return tf.reduce_mean(tf.reshape(embedded, [-1, 3, 2]), 1)


def _at(make_places):
    """Returns a lookup at places that words or their shape decide."""

    def look_up(tables, words):
        rows = tf.gather(tables[0], make_places(words))
        rows = rows if rows.shape.rank == 3 else rows[tf.newaxis]
        return tf.reduce_mean(rows * tf.cast(words, rows.dtype)[..., None], 1)

    return look_up


def _range(words):
    return tf.range(tf.shape(words)[1])


_LOOKUPS = {
    "once": _looked_up_once,
    "once, in a table that is a tensor": lambda tables, words: _looked_up_once(
        [tf.convert_to_tensor(table) for table in tables], words
    ),
    "once, with counts": _with_counts,
    "each": lambda tables, words: tf.reduce_mean(tf.gather(tables[0], words), 1),
    "positions": _at(_range),
    "positions with a new axis": _at(lambda words: _range(words)[tf.newaxis, :]),
    "positions from 2 on": _at(lambda words: tf.expand_dims(_range(words) + 2, 0)),
    "written positions": _at(lambda words: tf.constant([0, 2, 1])),
    "positions of each example": _at(
        lambda words: tf.tile(_range(words)[tf.newaxis], [tf.shape(words)[0], 1])
    ),
    "the same word": _at(lambda words: tf.fill(tf.shape(words), 1)),
    "partitions": lambda tables, words: tf.reduce_mean(
        tf.nn.embedding_lookup(tables, words), 1
    ),
    "two tables": lambda tables, words: (
        _looked_up_once(tables[:1], words) + tf.gather(tables[1], words[:, 0])
    ),
}
_UNKNOWN = {
    "both": lambda tables, words: (
        _looked_up_once(tables, words) + tf.gather(tables[0], words[:, 0])
    ),
    "twice once": lambda tables, words: (
        _looked_up_once(tables, words) + _looked_up_once(tables, words[:, :1])
    ),
    "repeated positions": lambda tables, words: (
        tf.reduce_mean(tf.gather(tables[0], [0, 1, 0]))
        * tf.cast(words[:, :2], tf.float64)
    ),
    "clamped positions": _at(lambda words: tf.minimum(_range(words), 1)),
    "positions from the batch on": _at(
        lambda words: _range(words) + tf.cast(tf.reduce_min(words), tf.int32)
    ),
    "positions of the first example": _at(lambda words: tf.argsort(words[0])),
    "positions of the first example, by Python": _at(
        lambda words: tf.ensure_shape(
            tf.numpy_function(np.fliplr, [words], tf.int64), [None, 3]
        )[0]
    ),
    "positions that all examples decide": _at(
        lambda words: tf.argsort(tf.reduce_max(words, 0))
    ),
    "positions in a function": _at(lambda words: tf.function(_range)(words) // 2),
    "partitions, once": lambda tables, words: _looked_up_once(tables, words, tables),
    "in a function": lambda tables, words: tf.function(
        lambda words: _looked_up_once(tables, words)
    )(words),
}


def _clip_all(gradients):
    return tf.clip_by_global_norm(gradients, _CLIP)[0]


def _clip_each(gradients):
    return [tf.clip_by_norm(gradient, _CLIP) for gradient in gradients]


def _train(make_train_op, lookup, size: int) -> list[np.ndarray]:
    """Returns the tables after batches of as many examples."""
    with tf.Graph().as_default(), v1.Session() as session:
        words = v1.placeholder(tf.int64, [None, 3])
        targets = v1.placeholder(tf.float64, [None])
        tables = [
            v1.get_variable(f"table_{i}", initializer=table, use_resource=True)
            for i, table in enumerate(_TABLES)
        ]
        v1.train.get_or_create_global_step()
        rows = lookup(tables, words)
        loss = tf.reduce_mean((tf.reduce_sum(rows, 1) - 3 * targets) ** 2)
        train_op = make_train_op(loss)
        session.run(v1.global_variables_initializer())
        for begin in range(0, len(_WORDS), size):
            part = slice(begin, begin + size)
            session.run(train_op, {words: _WORDS[part], targets: _TARGETS[part]})
        return session.run(tables)


def _descent():
    return v1.train.GradientDescentOptimizer(0.5)


def _changed_by(clip, optimizer):
    def make(loss):
        gradients, variables = zip(*_pairs(optimizer.compute_gradients(loss)))
        return optimizer.apply_gradients(zip(clip(gradients), variables))

    return make


def _pairs(pairs):
    return [
        (gradient, variable) for gradient, variable in pairs if gradient is not None
    ]


def _clipped_by_slices(loss, steps=_STEPS):
    return make_accumulating_train_op(
        loss, _descent(), steps, clip_norm=_CLIP, sparse_norm="slices"
    )


_DAILY = {
    *itertools.product([_clip_all, _clip_each], ["each", "the same word"]),
    *(
        (_clip_all, "positions"),
        (_clip_all, "positions from 2 on"),
        (_clip_each, "once"),
    ),
}


@pytest.mark.parametrize(
    ("clip", "name"),
    rows(
        [(_clip_all, name) for name in _LOOKUPS]
        + [(_clip_each, name) for name in [*_LOOKUPS][::3]],
        _DAILY,
    ),
)
def test_a_norm_of_slices_is_that_of_the_batch_at_once(name, clip):
    expected = _train(_changed_by(clip, _descent()), _LOOKUPS[name], 16)
    ours = AccumulatingOptimizer(_descent(), _STEPS)
    trained = [_train(_changed_by(clip, ours), _LOOKUPS[name], 4)]
    if clip is _clip_all:
        trained.append(_train(_clipped_by_slices, _LOOKUPS[name], 4))
    for tables in trained:
        np.testing.assert_allclose(tables, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.once
@pytest.mark.parametrize("name", _UNKNOWN)
def test_a_norm_of_slices_of_several_kinds_is_refused(name):
    ours = AccumulatingOptimizer(_descent(), _STEPS)
    with pytest.raises(ValueError, match="must be of one kind of look-up"):
        _train(_changed_by(_clip_all, ours), _UNKNOWN[name], 4)
    with pytest.raises(
        ValueError, match="must not be used for an embedding that is lo"
    ):
        _train(_clipped_by_slices, _UNKNOWN[name], 4)


@pytest.mark.once
def test_a_micro_batch_that_is_its_own_window_has_the_norm_of_its_slices():
    for lookup in _UNKNOWN.values():
        expected = _train(_changed_by(_clip_all, _descent()), lookup, 16)
        tables = _train(lambda loss: _clipped_by_slices(loss, 1), lookup, 16)
        np.testing.assert_allclose(tables, expected, rtol=1e-12, atol=1e-13)


class _Own(v1.train.GradientDescentOptimizer):
    """Changes gradients in its own apply_gradients."""

    def __init__(self, change):
        super().__init__(0.5)
        self._change = change

    def apply_gradients(
        self, pairs, global_step=None, name=None, skip_gradients_aggregation=False
    ):
        gradients, variables = zip(*_pairs(pairs))
        pairs = zip(self._change(gradients, variables), variables)
        options = {"skip_gradients_aggregation": skip_gradients_aggregation}
        return super().apply_gradients(pairs, global_step, name, **options)


class _SkippingNan(v1.train.GradientDescentOptimizer):
    """Applies in a branch, as dynamic loss scaling does."""

    def apply_gradients(self, pairs, global_step=None, name=None):
        pairs = _pairs(pairs)
        finite = [tf.reduce_all(tf.math.is_finite(g.values)) for g, _ in pairs]

        def apply():
            return super(_SkippingNan, self).apply_gradients(pairs, global_step, name)

        return tf.cond(tf.reduce_all(tf.stack(finite)), apply, tf.no_op)


def _each(change, is_dense=False):
    """Returns a change of each gradient: of its slices, or made dense first."""

    def changed(gradients, variables):
        for gradient, variable in zip(gradients, variables, strict=True):
            if is_dense:
                yield change(tf.convert_to_tensor(gradient), variable)
            else:
                values = change(gradient.values, gradient.indices)
                yield tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)

    return lambda *args: [*changed(*args)]


def _lamb(gradient, variable):
    update = gradient / (tf.sqrt(tf.square(gradient)) + 0.1) + 0.01 * variable
    return update * tf.norm(variable) / tf.norm(update)


def _lars(gradient, variable):
    norms = tf.norm(gradient) + 0.1 * tf.norm(variable)
    return 0.1 * tf.norm(variable) / norms * (gradient + 0.1 * variable)


def _clipped_rows(values, indices):
    rows, places = tf.unique(indices)
    sums = tf.math.unsorted_segment_sum(values, places, tf.size(rows))
    return values * tf.minimum(_CLIP / tf.norm(sums), 1.0)


def _mean_of_a_row(values, indices):
    _, places, counts = tf.unique_with_counts(indices)
    return values / tf.cast(tf.gather(counts, places), values.dtype)[:, None]


def _clipped_in_a_branch(values, indices):
    del indices

    def clip():
        return values * (_CLIP / tf.norm(values))

    return tf.cond(tf.reduce_sum(values) > -1e9, clip, lambda: values)


_OF_ROWS = {
    "LAMB": lambda: _Own(_each(_lamb, is_dense=True)),
    "LARS": lambda: _Own(_each(_lars, is_dense=True)),
    "clipped": lambda: _Own(_each(lambda g, _: tf.clip_by_norm(g, _CLIP), True)),
    "rows clipped": lambda: _Own(_each(_clipped_rows)),
    "scaled": lambda: _Own(_each(lambda values, _: values / 2.0)),
    "branch": lambda: _SkippingNan(0.5),
    "Adagrad": lambda: v1.train.AdagradOptimizer(0.5),
    "a rate of unknown shape": lambda: v1.train.GradientDescentOptimizer(
        v1.placeholder_with_default(tf.constant(0.5, tf.float64), None)
    ),
}
_OF_SLICES = {
    "global norm": lambda: _Own(lambda gradients, _: _clip_all(gradients)),
    "norms": lambda: _Own(lambda gradients, _: _clip_each(gradients)),
    "values": lambda: _Own(_each(lambda v, _: tf.clip_by_value(v, -0.01, 0.02))),
    "number": lambda: _Own(_each(lambda v, _: v / tf.cast(tf.shape(v)[0], v.dtype))),
    "mean of a row": lambda: _Own(_each(_mean_of_a_row)),
    "norm in a branch": lambda: _Own(_each(_clipped_in_a_branch)),
}


_DAILY_ROWS = {"LAMB", "LARS", "clipped", "scaled", "a rate of unknown shape"}
_DAILY_SLICES = {"global norm", "norms", "values", "mean of a row"}


def _accumulated(make_optimizer, lookup) -> list[list[np.ndarray]]:
    """Returns the tables that each interface trains."""

    def by_call(loss):
        return make_accumulating_train_op(loss, make_optimizer(), _STEPS)

    def by_optimizer(loss):
        return AccumulatingOptimizer(make_optimizer(), _STEPS).minimize(loss)

    return [_train(make, lookup, 4) for make in (by_call, by_optimizer)]


@pytest.mark.parametrize(
    ("name", "lookup", "control_flow"),
    rows(
        [
            *((name, "each", "v2") for name in _OF_ROWS),
            ("branch", "each", "v1"),
            *((name, "once", "v2") for name in _OF_SLICES),
            ("global norm", "positions", "v2"),
        ],
        {
            *itertools.product(_DAILY_ROWS, ["each"], ["v2"]),
            *itertools.product(_DAILY_SLICES, ["once"], ["v2"]),
        },
    ),
    indirect=["control_flow"],
)
def test_an_own_apply_gradients_gets_the_slices_that_it_needs(
    name, lookup, control_flow
):
    make = {**_OF_ROWS, **_OF_SLICES}[name]

    def plain(loss):
        return make().minimize(loss)

    expected = _train(plain, _LOOKUPS[lookup], 16)
    for tables in _accumulated(make, _LOOKUPS[lookup]):
        np.testing.assert_allclose(tables, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", _OF_SLICES)
@pytest.mark.parametrize("control_flow", ["v1", "v2"], indirect=True)
def test_an_own_apply_gradients_that_needs_each_slice_is_refused(name, control_flow):
    with pytest.raises(ValueError, match="must only scale the slices of a sparse grad"):
        _accumulated(_OF_SLICES[name], _LOOKUPS["each"])


def _of_two_replicas(make_train_op, lookup) -> list[np.ndarray]:
    """Returns the tables after one batch, of which each replica has a half."""
    with tf.Graph().as_default(), v1.Session(config=TWO_CPUS) as session:
        strategy = two_replicas()
        strategy._scale_loss_for_estimator = True  # as Estimator sets it
        words = v1.placeholder(tf.int64, [None, 3])
        targets = v1.placeholder(tf.float64, [None])

        def train():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            half = [slice(0, 8), slice(8, 16)][tf.get_static_value(number)]
            tables = [
                v1.get_variable(f"table_{i}", None, tf.float64, tf.constant(table))
                for i, table in enumerate(_TABLES)
            ]
            rows = lookup(tables, words[half])
            errors = tf.reduce_sum(rows, 1) - 3 * targets[half]
            return make_train_op(tf.reduce_mean(errors**2))

        with strategy.scope():
            v1.train.get_or_create_global_step()
            train_op = strategy.group(strategy.extended.call_for_each_replica(train))
            trained = [v.read_value() for v in v1.trainable_variables()[:2]]
        session.run(v1.global_variables_initializer())
        session.run(train_op, {words: _WORDS[:16], targets: _TARGETS[:16]})
        return session.run(trained)


@pytest.mark.parametrize("name", ["once", "each"])
def test_a_row_of_two_replicas_has_the_norm_of_the_batch_at_once(name, monkeypatch):
    monkeypatch.setattr("tests.estimator_accum.test_lookups._WORDS", _WORDS[:16])
    expected = _train(_changed_by(_clip_all, _descent()), _LOOKUPS[name], 16)
    clipping = _changed_by(_clip_all, AccumulatingOptimizer(_descent(), 1))
    for make in (clipping, lambda loss: _clipped_by_slices(loss, 1)):
        tables = _of_two_replicas(make, _LOOKUPS[name])
        np.testing.assert_allclose(tables, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["once", "each"])
def test_an_own_apply_gradients_gets_the_slices_of_two_replicas(name, monkeypatch):
    monkeypatch.setattr("tests.estimator_accum.test_lookups._WORDS", _WORDS[:16])
    make = _OF_SLICES["global norm"]

    def ours(loss):
        return make_accumulating_train_op(loss, make(), 1)

    if name == "once":  # it gets a row of each replica
        with pytest.raises(ValueError, match="must only scale the slices of a sparse"):
            _of_two_replicas(ours, _LOOKUPS[name])
        return
    expected = _train(lambda loss: make().minimize(loss), _LOOKUPS[name], 16)
    tables = _of_two_replicas(ours, _LOOKUPS[name])
    np.testing.assert_allclose(tables, expected, rtol=1e-12, atol=1e-13)
