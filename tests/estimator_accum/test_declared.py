"""A loss that sums over its examples, declared as a mean, in step-wise mode."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import AccumulatingOptimizer, make_accumulating_train_op
from tests.helpers.models.interfaces import sgd
from tests.helpers.models.replicas import two_replicas
from tests.helpers.processes.legacy_runs import run_python
from tests.helpers.tables import first, rows

v1 = tf.compat.v1
X, Y = np.ones([32, 3], np.float32), np.ones([32], np.float32)
SENTENCE = (
    r"must be declared as a sum\. Received: .*Pass reduction='sum'.* If it has weights "
    r"that the input pipeline normalizes, divide the loss by tf\.reduce_sum\(weights\)"
)


def _examples():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def _next(examples):
    return v1.data.make_initializable_iterator(examples).get_next()


def _queue():
    make = v1.estimator.inputs.numpy_input_fn(X, Y, batch_size=8, shuffle=True)
    return make()


def _windows():
    def joined(x, y):
        return tf.data.Dataset.zip((x.batch(4), y.batch(4)))

    return _next(_examples().window(4).flat_map(joined))


# Batches of examples, by which a sum is known to be one, and what may be one example.
BATCHES = {
    "data_set": lambda: _next(_examples().shuffle(9).repeat().batch(8).prefetch(1)),
    "mapped": lambda: _next(_examples().batch(8).map(lambda x, y: (2.0 * x, y))),
    "padded": lambda: _next(_examples().padded_batch(8)),
    "one_shot": lambda: v1.data.make_one_shot_iterator(_examples().batch(8)).get_next(),
    "one_shot_map_and_batch": lambda: v1.data.make_one_shot_iterator(
        _examples().apply(tf.data.experimental.map_and_batch(lambda x, y: (x, y), 8))
    ).get_next(),
    "queue": _queue,
    "static": lambda: _next(_examples().batch(8, drop_remainder=True)),
    "map_and_batch": lambda: _next(
        _examples().apply(tf.data.experimental.map_and_batch(lambda x, y: (x, y), 8))
    ),
}
MAY_BE_ONE = {
    "batches_of_one": lambda: _next(_examples().batch(1)),
    "windows": _windows,
    "placeholder": lambda: (
        v1.placeholder(tf.float32, [None, 3]),
        v1.placeholder(tf.float32, [None]),
    ),
}


class _Regression:
    def __init__(self, batch=BATCHES["data_set"]):
        x, self.y = batch()
        self.x, self.y = tf.cast(x, tf.float32), tf.cast(self.y, tf.float32)
        self.w = v1.get_variable("w", [3], use_resource=True)
        self.errors = tf.linalg.matvec(self.x, self.w) - self.y
        self.squares = tf.square(self.errors)
        self.terms = self.errors[:, None] * self.x  # [B, 3]
        tokens = tf.tile(self.errors[:, None, None], [1, 5, 4])  # [B, 5, 4]
        self.tokens = tf.reduce_sum(tokens, 2)
        self.of_tokens = self.y[:, None] - tf.range(5.0)  # [B, 5]
        self.mask = tf.cast(self.y > 0.0, tf.float32)
        self.kept = tf.boolean_mask(self.squares, self.y > 0.0)
        self.groups = tf.cast(self.y, tf.int32)
        self.size = tf.cast(tf.size(self.y), tf.float32)


def _sum(m):
    return tf.reduce_sum(m.squares)


def _in_a_function(m, reduce):
    return tf.function(lambda x, y: reduce((tf.linalg.matvec(x, m.w) - y) ** 2))(
        m.x, m.y
    )


def _either(m, first, second):
    is_first = v1.placeholder_with_default(True, [])
    return tf.cond(is_first, lambda: first(m.squares), lambda: second(m.squares))


def _normalized(rows):
    mean, variance = tf.nn.moments(rows, 0)
    return tf.nn.batch_normalization(rows, mean, variance, None, None, 1e-3)


def _folded(rows):
    return tf.foldl(lambda total, row: total + row, rows, 0.0)


def _over_8(rows):
    return tf.reduce_sum(rows) / 8.0


def _margins(rows, margin=0.2):
    """Returns the hinge of each pair of rows [B] -> [B, B]."""
    return tf.nn.relu(margin - rows[:, None] + rows[None, :])


@tf.custom_gradient
def _divided(squares):
    return tf.identity(squares), lambda gradient: gradient / 8.0


def _minimize(loss, steps, **options):
    ours = AccumulatingOptimizer(sgd(), steps, **options)
    return ours.minimize(loss, v1.train.get_or_create_global_step())


def _train_op(loss, steps, **options):
    return make_accumulating_train_op(loss, sgd(), steps, **options)


@pytest.mark.parametrize("make", [_train_op, _minimize])
@pytest.mark.parametrize("name", BATCHES)
def test_a_sum_over_a_batch_is_refused(name, make, fresh_graph):
    loss = _sum(_Regression(BATCHES[name]))
    with pytest.raises(ValueError, match=SENTENCE):
        make(loss, 4)


def _mean_of_rare(m):
    """The mean over examples that random ones are never like; 0.0 without any."""
    are_rare = tf.cast(m.y > 5.0, tf.float32)
    total = tf.reduce_sum(m.squares * are_rare)
    mean = total / tf.maximum(tf.reduce_sum(are_rare), 1.0)
    return tf.where(tf.math.is_nan(mean), 0.0, mean)


SUMS = {
    "of_rare_examples": lambda m: tf.reduce_sum(tf.boolean_mask(m.squares, m.y > 5.0)),
    "half": lambda m: 0.5 * _sum(m),
    "l2_loss": lambda m: tf.nn.l2_loss(m.errors),
    "by_a_weight": lambda m: 0.31 * _sum(m),
    "by_another_number": lambda m: _sum(m) / 100.0,
    "by_four_batches": lambda m: _sum(m) / 32.0,
    "and_nothing": lambda m: tf.reduce_sum(
        m.squares + (0.0 * m.errors + tf.reduce_sum(0.0 * m.terms, 1) / 2.0)
    ),
    "by_less_than_the_batch": lambda m: 0.625 * _sum(m) + tf.nn.l2_loss(m.w),
    "by_factors_of_one": lambda m: 0.1 * tf.reduce_sum(10.0 * m.squares),
    "of_means": lambda m: tf.reduce_sum(tf.reduce_mean(m.terms, 1)),
    "of_sums": lambda m: tf.reduce_sum(tf.reduce_sum(m.terms, 1)) + _sum(m),
    "masked": lambda m: tf.reduce_sum(m.squares * m.mask),
    "of_kept_axes": lambda m: tf.reduce_mean(tf.reduce_sum(m.terms, keepdims=True)),
    "squeezed": lambda m: tf.squeeze(tf.reduce_sum(m.squares, 0, keepdims=True)),
    "with_penalty": lambda m: _sum(m) + 0.1 * tf.nn.l2_loss(m.w),
    "with_weight_decay": lambda m: _sum(m) + 1e-4 * tf.nn.l2_loss(m.w),
    "element": lambda m: tf.reduce_sum(m.squares, keepdims=True)[0],
    "of_columns": lambda m: tf.reduce_sum(tf.reduce_sum(m.terms, 0)),
    "mean_of_columns": lambda m: tf.reduce_mean(tf.reduce_sum(m.terms, 0)),
    "stacked": lambda m: tf.reduce_sum(tf.stack([_sum(m), tf.reduce_sum(m.terms)])),
    "checked": lambda m: tf.debugging.check_numerics(_sum(m), "loss"),
    "printed": lambda m: v1.Print(_sum(m), [tf.reduce_mean(m.squares)]),
    "einsum": lambda m: tf.einsum("b,b->", m.errors, m.errors),
    "product": lambda m: tf.reduce_sum(tf.matmul(m.terms, m.x, transpose_a=True)),
    "tf.losses": lambda m: v1.losses.mean_squared_error(
        m.y, m.errors, reduction=v1.losses.Reduction.SUM
    ),
    # Proved by numbers.
    "boolean_mask": lambda m: tf.reduce_sum(m.kept),
    "cumsum": lambda m: tf.cumsum(m.squares)[-1],
    "segment_sum": lambda m: tf.reduce_sum(tf.math.segment_sum(m.squares, m.groups)),
    "unsorted_segment_sum": lambda m: tf.reduce_sum(
        tf.math.unsorted_segment_sum(m.squares, m.groups, 2)
    ),
    "cond": lambda m: _either(m, tf.reduce_sum, lambda rows: 0.5 * tf.reduce_sum(rows)),
    "map_fn": lambda m: tf.reduce_sum(tf.map_fn(tf.square, m.errors)),
    "foldl": lambda m: _folded(m.squares),
    "scan": lambda m: tf.scan(tf.add, m.squares)[-1] + tf.nn.l2_loss(m.w),
    "function": lambda m: _in_a_function(m, tf.reduce_sum),
    "powers_in_a_function": lambda m: _in_a_function(
        m, lambda rows: tf.reduce_sum(rows**8.0**0.5)
    ),
    "concat": lambda m: tf.reduce_sum(
        tf.concat([tf.reduce_sum(m.terms, 0), _sum(m)[None]], 0)
    ),
    "tensordot": lambda m: tf.tensordot(m.squares, tf.ones_like(m.squares), 1),
    "weights": lambda m: tf.einsum("b,b->", m.squares, m.y),
    "einsum_with_ones": lambda m: tf.einsum("b,b->", m.squares, tf.ones_like(m.y)),
    "normalized": lambda m: tf.reduce_sum(_normalized(m.terms) ** 3),
    "normalized_twice": lambda m: tf.reduce_sum(
        _normalized(tf.nn.relu(_normalized(m.terms))) ** 3
    ),
    "normalized_by_deviation": lambda m: tf.reduce_sum(
        (m.terms / tf.math.reduce_std(m.terms, 0)) ** 3
    ),
    "logarithms": lambda m: -_folded(tf.math.log(tf.sigmoid(m.errors))),
    "logarithms_in_a_function": lambda m: _in_a_function(
        m, lambda rows: -tf.reduce_sum(tf.math.log(rows))
    ),
    "with_a_bias": lambda m: tf.norm(m.errors + m.w[0]) ** 2,
    "trace": lambda m: tf.linalg.trace(tf.matmul(m.terms, m.x, transpose_a=True)),
}


def _of_words(hidden, labels):
    """Returns the loss of each token, of a vocabulary that is too large to draw."""
    words = v1.get_variable("words", [3, 400_000], use_resource=True)
    logits = tf.matmul(hidden, words)  # [tokens, 400,000]
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(labels, tf.int32), logits
    )


def _places(mask):
    """Returns where a mask [B] is true."""
    return tf.reshape(tf.where(mask), [-1])


def _all_tokens(m):
    """Returns the features [B, 5, 3] of tokens, and their labels [B, 5]."""
    return tf.tile(m.terms[:, None], [1, 5, 1]), m.of_tokens


def _flat_tokens(m):
    """Returns the features [B * 5, 3] of tokens, and their labels [B * 5]."""
    features, labels = _all_tokens(m)
    return tf.reshape(features, [-1, 3]), tf.reshape(labels, [-1])


def _parts(rows, mask):
    """Returns the rows where a mask [B] is false, and the others."""
    return tf.dynamic_partition(rows, tf.cast(mask, tf.int32), 2)


def _by_nonzero(m, weights):
    return v1.losses.mean_squared_error(m.y, m.errors, weights)


def _masked(m):
    return tf.reduce_sum(m.squares * m.mask)


@tf.function
def _in_functions(losses, mask):
    total = tf.function(lambda a, b: tf.reduce_sum(a * b))
    return total(losses, mask) / total(mask, tf.ones_like(mask))


# Means over as many elements as the examples say, for which equal weights are wrong.
OF_OWN_NUMBERS = {
    "by_its_mask": lambda m: _masked(m) / tf.reduce_sum(m.mask),
    "by_a_guarded_mask": lambda m: (
        0.5 * _masked(m) / tf.maximum(tf.reduce_sum(m.mask), 1.0)
    ),
    "without_nan": lambda m: tf.math.divide_no_nan(_masked(m), tf.reduce_sum(m.mask)),
    "by_a_number_of_tokens": lambda m: (
        _masked(m) / (tf.cast(tf.math.count_nonzero(m.mask), tf.float32) + 1e-5)
    ),
    "times_its_share": lambda m: _masked(m) * (1.0 / tf.reduce_sum(m.mask)),
    "of_shares": lambda m: tf.reduce_sum(m.squares * (m.mask / tf.reduce_sum(m.mask))),
    "of_scaled_weights": lambda m: tf.reduce_mean(
        m.squares * m.mask / tf.reduce_mean(m.mask)
    ),
    "guarded": lambda m: tf.where(
        tf.reduce_sum(m.mask) > 0.0, _masked(m) / tf.reduce_sum(m.mask), 0.0
    ),
    "with_penalty": lambda m: (
        _masked(m) / tf.reduce_sum(m.mask) + 0.1 * tf.nn.l2_loss(m.w)
    ),
    "tf.losses_by_nonzero_weights": lambda m: _by_nonzero(m, m.mask),
    "tf.losses_by_weights": lambda m: v1.losses.mean_squared_error(
        m.y, m.errors, m.mask, reduction=v1.losses.Reduction.MEAN
    ),
    "of_five_tokens": lambda m: (
        tf.reduce_sum(m.tokens * m.mask[:, None]) / (5.0 * tf.reduce_sum(m.mask))
    ),
    "weights_by_their_sum": lambda m: (
        tf.einsum("b,b->", m.squares, m.y) / tf.reduce_sum(m.y)
    ),
    "by_a_clipped_mask": lambda m: (
        _masked(m) / tf.clip_by_value(tf.reduce_sum(m.mask), 1.0, 1e9)
    ),
    "by_a_product": lambda m: _masked(m) / tf.einsum("b,b->", m.mask, m.mask),
    "by_a_sum_of_columns": lambda m: (
        _masked(m) / tf.add_n(tf.unstack(tf.reduce_sum(m.x, 0)))
    ),
    "by_a_histogram": lambda m: (
        _masked(m) / tf.cast(tf.math.bincount(m.groups)[1], tf.float32)
    ),
    "by_a_loop": lambda m: _masked(m) / _folded(m.mask),
    "by_exponents": lambda m: tf.exp(
        tf.math.log(_masked(m)) - tf.math.log(tf.reduce_sum(m.mask))
    ),
    "by_a_power": lambda m: _masked(m) * tf.reduce_sum(m.mask) ** -1.0,
    "by_a_squared_norm": lambda m: _masked(m) / tf.square(tf.norm(m.mask)),
    "by_a_root": lambda m: _masked(m) / tf.sqrt(tf.square(tf.reduce_sum(m.mask))),
    "by_a_part_of_sums": lambda m: (
        _masked(m) / tf.reduce_sum(tf.stack([m.squares, m.mask], 1), 0)[1]
    ),
    "printed": lambda m: v1.Print(_masked(m) / tf.reduce_sum(m.mask), [m.mask]),
    "of_labels_but_one": lambda m: (
        tf.reduce_sum(m.squares * tf.cast(tf.not_equal(m.y, -100.0), tf.float32))
        / tf.reduce_sum(tf.cast(tf.not_equal(m.y, -100.0), tf.float32))
    ),
    "in_bfloat16": lambda m: (
        tf.cast(tf.reduce_sum(tf.cast(m.squares * m.mask, tf.bfloat16)), tf.float32)
        / tf.reduce_sum(m.mask)
    ),
    "behind_batch_normalization": lambda m: (
        tf.reduce_sum(tf.reduce_sum(_normalized(m.terms) ** 3, 1) * m.mask)
        / tf.reduce_sum(m.mask)
    ),
    "in_functions": lambda m: _in_functions(m.squares, m.mask),
    "divisor_of_a_function": lambda m: _masked(m) / tf.function(tf.reduce_sum)(m.mask),
    "in_a_branch": lambda m: tf.cond(
        tf.reduce_sum(m.mask) > 0.0,
        lambda: _masked(m) / tf.reduce_sum(m.mask),
        lambda: tf.constant(0.0),
    ),
    "boolean_mask": lambda m: tf.reduce_mean(m.kept),
    "boolean_mask_by_size": lambda m: (
        tf.reduce_sum(m.kept) / tf.cast(tf.size(m.kept), tf.float32)
    ),
    "gathered": lambda m: tf.reduce_mean(
        tf.gather_nd(m.squares, tf.where(m.y > 0.0)) ** 2
    ),
    "selected_before_a_large_layer": lambda m: tf.reduce_mean(
        _of_words(tf.boolean_mask(m.terms, m.y > 0.0), tf.boolean_mask(m.y, m.y > 0.0))
    ),
    "gathered_before_a_large_layer": lambda m: tf.reduce_mean(
        _of_words(*(tf.gather_nd(t, tf.where(m.y > 0.0)) for t in (m.terms, m.y)))
    ),
    "reshaped_places_before_a_large_layer": lambda m: tf.reduce_mean(
        _of_words(*(tf.gather(t, _places(m.y > 0.0)) for t in (m.terms, m.y)))
    ),
    "a_column_of_places_before_a_large_layer": lambda m: tf.reduce_mean(
        _of_words(*(tf.gather(t, tf.where(m.y > 0.0)[:, 0]) for t in (m.terms, m.y)))
    ),
    "a_part_before_a_large_layer": lambda m: tf.reduce_mean(
        _of_words(*(_parts(t, m.y > 0.0)[1] for t in (m.terms, m.y)))
    ),
    "tokens_before_a_large_layer": lambda m: tf.reduce_mean(
        _of_words(
            *(tf.gather(t, _places(_flat_tokens(m)[1] > 0.0)) for t in _flat_tokens(m))
        )
    ),
    "tokens_by_a_mask_before_a_large_layer": lambda m: tf.reduce_mean(
        _of_words(*(tf.boolean_mask(t, m.of_tokens > 0.0) for t in _all_tokens(m)))
    ),
    "parts_of_tokens_before_a_large_layer": lambda m: tf.reduce_mean(
        _of_words(*(_parts(t, _flat_tokens(m)[1] > 0.0)[1] for t in _flat_tokens(m)))
    ),
}
# Those by the number of elements in a tensor.
OF_SIZE = {"boolean_mask", "gathered", "selected_before_a_large_layer"}
OF_SIZE |= {name for name in OF_OWN_NUMBERS if name.endswith("_before_a_large_layer")}
# With no divisor that is a tensor of the graph, computed from masks alone.
UNNAMED = {"in_functions", "by_a_part_of_sums"}
# Losses to which no example adds a number of its own, with no divisor that is one.
OF_NO_WEIGHT = {
    "of_two_divisors": lambda m: (
        _masked(m) / tf.reduce_sum(m.mask) + tf.reduce_mean(m.squares)
    ),
    "by_a_deviation": lambda m: tf.reduce_mean(m.squares / tf.math.reduce_std(m.y)),
    "by_a_norm": lambda m: tf.reduce_mean(m.squares / tf.norm(m.y)),
    "dice": lambda m: (
        1.0 - tf.reduce_sum(m.errors * m.y) / tf.reduce_sum(m.errors + m.y)
    ),
    "with_a_binding_limit": lambda m: (
        _masked(m) / tf.minimum(tf.reduce_sum(m.mask), 3.0)
    ),
    "negatives_of_unit_length": lambda m: tf.reduce_logsumexp(
        tf.matmul(*[tf.nn.l2_normalize(m.terms, 1)] * 2, transpose_b=True)
    ),
    "logsumexp": lambda m: tf.reduce_logsumexp(m.squares),
    "deviation": lambda m: tf.math.reduce_std(m.errors),
    "power": lambda m: tf.reduce_mean(m.squares) ** 0.5,
    "largest": lambda m: tf.reduce_mean(tf.math.top_k(m.squares, 2)[0]),
    "of_each_class": lambda m: tf.reduce_sum(
        tf.math.unsorted_segment_mean(m.squares, tf.cast(m.mask, tf.int32), 2)
    ),
}
# Divisors that are the same for all, known from shapes alone, or of another kind.
OF_EQUAL_NUMBERS = {
    "joined": lambda m: (
        tf.reduce_mean(tf.concat([m.squares, 2 * m.squares], 0))
        + 0 * tf.reduce_sum(tf.cast(tf.where(m.squares > 1), tf.float32))
    ),
    "mean": lambda m: tf.reduce_mean(m.squares),
    "by_its_size": lambda m: _sum(m) / m.size,
    "tf.losses": lambda m: _by_nonzero(m, 1.0),
    "tf.losses_weights_of_1": lambda m: _by_nonzero(m, 1),
    "tf.losses_ones": lambda m: _by_nonzero(m, tf.ones_like(m.y)),
    "tf.losses_weights_of_a_shape": lambda m: _by_nonzero(m, tf.ones(tf.shape(m.y))),
    "tf.losses_mean": lambda m: v1.losses.mean_squared_error(
        m.y, m.errors, reduction=v1.losses.Reduction.MEAN
    ),
    "tf.losses_by_the_batch": lambda m: v1.losses.mean_squared_error(
        m.y, m.errors, m.mask, reduction=v1.losses.Reduction.SUM_OVER_BATCH_SIZE
    ),
    "keras": lambda m: tf.keras.losses.MeanSquaredError(
        reduction="sum_over_batch_size"
    )(m.y[:, None], m.errors[:, None], sample_weight=m.mask),
    "of_means_of_examples": lambda m: tf.reduce_mean(
        tf.reduce_sum(m.tokens * m.mask[:, None], 1)
        / (1.0 + tf.reduce_sum(m.tokens * m.mask[:, None], 1))
    ),
    "by_the_sum_of_constants": lambda m: (
        tf.reduce_mean(m.squares) / tf.reduce_sum(tf.constant([0.5, 0.25]))
    ),
    "selected_before": lambda m: tf.reduce_mean(
        m.squares + tf.reduce_sum(tf.stop_gradient(m.kept))
    ),
    "selected_before_a_large_layer": lambda m: (
        tf.reduce_sum(
            _of_words(
                tf.boolean_mask(m.terms, m.y > 0.0), tf.boolean_mask(m.y, m.y > 0.0)
            )
        )
        / m.size
    ),
    "a_part_before_a_large_layer": lambda m: (
        tf.reduce_sum(_of_words(*(_parts(t, m.y > 0.0)[1] for t in (m.terms, m.y))))
        / m.size
    ),
    "one_example_of_many": lambda m: tf.reduce_sum(
        tf.reduce_mean(m.terms, 0) / tf.reduce_sum(tf.ones_like(m.mask))
    ),
}
# A sum beside terms that are none, or are not known to be one.
PARTS = {
    "mean": lambda m: tf.reduce_mean(m.squares) + 0.1 * _sum(m),
    "penalty_of_rows": lambda m: (
        tf.reduce_mean(m.squares) + 1e-4 * tf.nn.l2_loss(m.terms)
    ),
    "as_if_of_the_batch": lambda m: _sum(m) + 0.125 * tf.reduce_sum(m.terms),
    "by_a_fed_weight": lambda m: (
        _sum(m) + v1.placeholder(tf.float32, []) * tf.reduce_sum(m.terms)
    ),
}
# Means, and what may be one: it stays as declared.
OTHERS = {
    "mean": lambda m: tf.reduce_mean(m.squares),
    "of_the_batch": lambda m: _sum(m) / 8.0,
    "inside_of_the_sum": lambda m: tf.reduce_sum(m.squares / 8.0),
    "weighted": lambda m: 0.7 * _sum(m) / 8.0 + 0.3 * tf.reduce_sum(m.terms) / 8.0,
    "by_weights_and_the_batch": lambda m: tf.reduce_sum(
        m.terms * (tf.constant([0.3, 0.5, 0.2]) / 8.0)
    ),
    "by_a_weight_and_the_batch": lambda m: _sum(m) * (0.31 / 8),
    "by_the_batch_and_a_weight": lambda m: _sum(m) / (8 * 0.71),
    "half_squares": lambda m: 2.0 * tf.nn.l2_loss(m.errors) / 8.0,
    "squares": lambda m: tf.nn.l2_loss(m.errors) / 4.0,
    "tf.losses_sum": lambda m: v1.losses.mean_squared_error(
        m.y, m.errors, weights=0.125, reduction=v1.losses.Reduction.SUM
    ),
    "by_its_gradient": lambda m: tf.reduce_sum(_divided(m.squares)),
    "of_all_tokens": lambda m: tf.reduce_sum(m.terms) / 24.0,
    "by_its_size": lambda m: _sum(m) / tf.cast(tf.shape(m.y)[0], tf.float32),
    "by_its_weights": lambda m: tf.reduce_sum(m.squares * tf.nn.softmax(m.y)),
    "by_a_variable": lambda m: _sum(m) * m.w[0],
    "over_columns": lambda m: tf.reduce_sum(tf.reduce_mean(m.terms, 0)),
    "dot_of_the_batch": lambda m: tf.tensordot(m.errors, m.errors / 8.0, 1),
    "einsum_of_the_batch": lambda m: tf.einsum("b,b->", m.errors, m.errors) / 8.0,
    "einsum_of_weights": lambda m: tf.einsum("b,b->", m.squares, tf.nn.softmax(m.y)),
    "product_of_columns": lambda m: tf.reduce_mean(tf.matmul(m.terms, m.w[:, None])),
    "printed_sum": lambda m: v1.Print(tf.reduce_mean(m.squares), [_sum(m)]),
    "stacked": lambda m: tf.reduce_mean(tf.stack([_sum(m) / 8.0] * 3)),
    "of_sums": lambda m: tf.reduce_mean(tf.reduce_sum(m.terms, 1)),
    "with_penalty": lambda m: tf.reduce_mean(m.squares) + tf.reduce_sum(m.w**2),
    "with_nothing_of_a_sum": lambda m: tf.reduce_mean(m.squares) + 0.0 * _sum(m),
    "with_a_sum_of_zeros": lambda m: (
        tf.reduce_mean(m.squares) + tf.reduce_sum(0.0 * m.squares)
    ),
    "of_all_steps": lambda m: tf.add_n([_sum(m)] * 5) / (8 * 5),
    "of_all_steps_of_an_example": lambda m: (
        tf.reduce_sum(tf.add_n([m.squares] * 5)) / (8 * 5)
    ),
    "of_steps_from_zero": lambda m: (
        tf.reduce_sum(0.0 + m.squares + m.errors + tf.abs(m.errors)) / (8 * 3)
    ),
    "of_three_heads_and_a_mean": lambda m: (
        (_sum(m) + tf.reduce_sum(m.errors) + tf.reduce_sum(tf.abs(m.errors))) / (3 * 8)
        + tf.reduce_mean(m.squares)
    ),
    "of_five_scales": lambda m: (
        tf.add_n([tf.reduce_sum(m.squares - m.errors)] * 5) / (8 * 5)
    ),
    "of_a_product": lambda m: (
        tf.reduce_sum(tf.matmul(m.terms, m.x, transpose_a=True)) / (8 * 3 * 3)
    ),
    "a_weight_by_the_batch": lambda m: 0.31 * (_sum(m) / 8.0),
    "of_tokens_and_columns": lambda m: tf.reduce_sum(m.tokens) / (8 * 20),
    "of_an_epoch": lambda m: 60_000 / 8 * _sum(m) + tf.nn.l2_loss(m.w),
    "tf.losses": lambda m: v1.losses.mean_squared_error(m.y, m.errors),
}
# No proof by numbers either.
OTHERS_BY_NUMBERS = {
    "mean_of_rare_examples": _mean_of_rare,
    "cumsum_of_the_batch": lambda m: tf.cumsum(m.squares)[-1] / 8.0,
    "segment_mean": lambda m: tf.reduce_sum(tf.math.segment_mean(m.squares, m.groups)),
    "segment_sum_of_shares": lambda m: tf.reduce_sum(
        tf.math.unsorted_segment_sum(m.squares / m.size, m.groups, 2)
    ),
    "cond": lambda m: _either(m, tf.reduce_mean, tf.reduce_max),
    "cond_of_both": lambda m: _either(m, tf.reduce_mean, tf.reduce_sum),
    "map_fn": lambda m: tf.reduce_mean(tf.map_fn(tf.square, m.errors)),
    "foldl_of_the_batch": lambda m: _folded(m.squares * 0.125),
    "foldl_by_size": lambda m: _folded(m.squares) / m.size,
    "scan_of_the_batch": lambda m: tf.scan(tf.add, m.squares)[-1] / 8.0,
    "function": lambda m: _in_a_function(m, tf.reduce_mean),
    "function_by_size": lambda m: _in_a_function(
        m, lambda rows: tf.reduce_sum(rows) / tf.cast(tf.size(rows), tf.float32)
    ),
    "function_of_columns": lambda m: (
        tf.function(lambda x: tf.reduce_sum(x[:, None] * tf.ones([5])))(m.squares)
        / 40.0
    ),
    "function_of_the_batch": lambda m: _in_a_function(
        m, lambda rows: tf.reduce_sum(rows) / 8.0
    ),
    "concat": lambda m: tf.reduce_sum(
        tf.concat([tf.reduce_mean(m.terms, 0), tf.reduce_mean(m.squares)[None]], 0)
    ),
    "tensordot": lambda m: tf.tensordot(m.squares, tf.ones_like(m.y) / 8.0, 1),
    "einsum_of_shares": lambda m: tf.einsum(
        "b,b->", m.squares, tf.fill([tf.size(m.y)], 1.0 / m.size)
    ),
    "normalized": lambda m: tf.reduce_sum(tf.reduce_mean(_normalized(m.terms) ** 3, 0)),
    "by_a_fed_number": lambda m: _folded(m.squares) / v1.placeholder(tf.float32, []),
    "root": lambda m: tf.sqrt(_sum(m)),
    "concat_of_the_batch": lambda m: tf.reduce_sum(
        tf.concat([tf.reduce_sum(m.terms, 0) / 8.0, (_sum(m) / 8.0)[None]], 0)
    ),
    "cond_of_the_batch": lambda m: _either(m, _over_8, _over_8),
    "function_with_infinity": lambda m: _in_a_function(
        m, lambda rows: tf.reduce_sum(tf.where(rows < 0.0, -np.inf, rows)) / 8.0
    ),
    "of_groups": lambda m: tf.reduce_sum(
        m.squares / tf.cast(tf.size(tf.unique(m.groups)[0]), tf.float32)
    ),
    "negatives": lambda m: tf.reduce_mean(
        tf.reduce_sum(_margins(m.errors) * (1.0 - tf.eye(tf.size(m.errors))), 1)
    ),
    "pairs_with_themselves": lambda m: tf.reduce_mean(
        tf.reduce_sum(_margins(m.errors), 1)
    ),
    "normalized_pairs": lambda m: tf.reduce_mean(
        tf.reduce_sum(_margins(tf.reduce_sum(_normalized(m.terms), 1)), 1)
    ),
    "pairs_with_a_wide_margin": lambda m: tf.reduce_mean(
        tf.reduce_sum(_margins(m.errors, 1.0), 1)
    ),
    "products_of_pairs_with_penalty": lambda m: (
        tf.reduce_mean(tf.reduce_sum(m.errors[:, None] * m.errors[None], 1))
        + 0.1 * tf.nn.l2_loss(m.w)
    ),
    "of_a_large_table": lambda m: _folded(
        tf.gather(tf.fill([2_000_000], m.w[0]), tf.sort(m.groups))
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_refused(name, fresh_graph):
    with pytest.raises(ValueError, match=SENTENCE):
        _train_op(SUMS[name](_Regression()), 4)


@pytest.mark.parametrize("name", ["half", "stacked"])
def test_a_sum_is_refused_where_sizes_are_dimensions(name, fresh_graph):
    v1.disable_v2_tensorshape()  # as under --v1
    try:
        with pytest.raises(ValueError, match=SENTENCE):
            _train_op(SUMS[name](_Regression()), 4)
    finally:
        v1.enable_v2_tensorshape()


@pytest.mark.parametrize("name", PARTS)
def test_a_sum_beside_other_terms_is_refused(name, fresh_graph):
    with pytest.raises(ValueError, match="all be sums.*adds a sum over the examples"):
        _train_op(PARTS[name](_Regression()), 4)


# Those in which what an example adds depends on the others.
JOINING = {"by_its_weights", "einsum_of_weights", "products_of_pairs_with_penalty"}
JOINING |= {"cond", "root", "negatives", "pairs_with_themselves"}
JOINING |= {"pairs_with_a_wide_margin", "of_groups"}
# Where a static number of examples could be taken for the divisor.
_OF_STATIC_SIZE = ["mean", "of_the_batch", "inside_of_the_sum", "half_squares"]
_OF_STATIC_SIZE += ["of_all_tokens", "einsum_of_the_batch", "tf.losses"]
_OF_STATIC_SIZE += ["of_tokens_and_columns", "of_all_steps", "of_a_product"]


_FIRST = {
    *("weighted", "half_squares", "by_its_gradient", "by_its_size", "by_its_weights"),
    *("by_a_variable", "dot_of_the_batch", "einsum_of_weights", "printed_sum"),
    *("with_penalty", "with_nothing_of_a_sum", "of_three_heads_and_a_mean"),
    *("by_a_weight_and_the_batch", "by_the_batch_and_a_weight", "of_an_epoch"),
    *("with_a_sum_of_zeros", "squares", "of_all_steps_of_an_example", "of_a_product"),
    *("by_weights_and_the_batch", "tf.losses"),
}
_FIRST_STATIC = {"einsum_of_the_batch", "of_tokens_and_columns"}


@pytest.mark.parametrize(
    ("name", "batch"),
    first(
        [(name, "data_set") for name in OTHERS]
        + [(name, "static") for name in _OF_STATIC_SIZE],
        {*zip(_FIRST, itertools.repeat("data_set"))}
        | {*zip(_FIRST_STATIC, itertools.repeat("static"))},
    ),
)
def test_what_is_no_sum_stays_as_declared(name, batch, fresh_graph, caplog):
    loss = OTHERS[name](_Regression(BATCHES[batch]))
    caplog.clear()  # TensorFlow's own, of functions that it will remove
    _train_op(loss, 3)
    assert [OF_OTHERS in text for text in caplog.messages] == [True] * (name in JOINING)


_DAILY_BY_NUMBERS = {
    *("segment_sum_of_shares", "cond", "foldl_of_the_batch", "function", "concat"),
    *("function_by_size", "function_of_the_batch", "cond_of_the_batch"),
    "pairs_with_a_wide_margin",
}


@pytest.mark.parametrize("name", rows(OTHERS_BY_NUMBERS, _DAILY_BY_NUMBERS))
def test_what_numbers_show_to_be_no_sum_stays_as_declared(name, fresh_graph, caplog):
    _train_op(OTHERS_BY_NUMBERS[name](_Regression()), 3)
    assert [OF_OTHERS in text for text in caplog.messages] == [True] * (name in JOINING)


@pytest.mark.parametrize("name", MAY_BE_ONE)
def test_what_may_be_one_example_stays_as_declared(name, fresh_graph):
    _train_op(0.31 * _sum(_Regression(MAY_BE_ONE[name])), 4)


def test_a_declared_sum_a_single_micro_batch_and_scaled_gradients_are_taken(
    fresh_graph,
):
    loss = _sum(_Regression())
    _train_op(loss, 4, reduction="sum")
    _train_op(loss, 1)
    optimizer = AccumulatingOptimizer(sgd(), 4)
    pairs = [(g / 8.0, v) for g, v in optimizer.compute_gradients(loss)]
    optimizer.apply_gradients(pairs)


@pytest.mark.parametrize(
    ("scale", "steps", "is_warned_of"),
    [
        (lambda loss: loss / 4.0, 4, True),
        (lambda loss: tf.identity(0.25 * loss), 4, True),
        (lambda loss: tf.math.divide_no_nan(loss, 4.0), 4, True),
        (lambda loss: loss / 4.0, 8, False),
        (lambda loss: loss / 2.0, 2, False),  # half of a loss is a usual one
    ],
)
def test_a_loss_divided_by_k_is_warned_of(
    scale, steps, is_warned_of, fresh_graph, caplog
):
    _train_op(scale(tf.reduce_mean(_Regression().squares)), steps)
    words = "divides the loss by 4, as many as gradient_accumulation_steps"
    assert [words in message for message in caplog.messages] == [True] * is_warned_of


@pytest.mark.once
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_loss_of_many_terms_trains(factor, fresh_graph):
    """One after the other, or each the sum of two of the one before."""
    x, y = BATCHES["data_set"]()
    w = v1.get_variable("w", [3], initializer=v1.zeros_initializer())
    loss = tf.reduce_mean((tf.linalg.matvec(x, w) - y) ** 2)
    for _ in range(500):
        loss += 1e-4 * tf.nn.l2_loss(w)
    for _ in range(25):
        loss = factor * loss + (1 - factor / 2) * loss
    make_accumulating_train_op(loss, sgd(), 2)


_THREADS = """
import os
import tensorflow as tf
from estimator_accum import make_accumulating_train_op

def number():
    return len(os.listdir("/proc/self/task"))

v1 = tf.compat.v1
with tf.Graph().as_default():
    x, mask = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
    loss = tf.reduce_sum(x * v1.get_variable("w", []) * mask) / tf.reduce_sum(mask)
    v1.train.get_or_create_global_step()
    make_accumulating_train_op(loss, v1.train.GradientDescentOptimizer(0.1), 2)
    before = number()
    config = v1.ConfigProto(
        intra_op_parallelism_threads=20, inter_op_parallelism_threads=30
    )
    with v1.Session(config=config) as session:
        session.run(v1.global_variables_initializer())
        print(number() - before >= 45)
"""
WARNING = "is a mean over another number of elements in each micro-batch"
OF_OTHERS = (
    "is not a mean over examples alone: what one of them adds depends on the others"
)


def _with_batches(losses):
    """Returns all losses with one kind of batch, and every third one with another."""
    return [*zip(losses, itertools.repeat("data_set"))] + [
        (name, "static") for name in [*losses][::3]
    ]


def _messages(make, batch, caplog):
    """Returns the warnings of a train op of a loss, without those of TensorFlow."""
    loss = make(_Regression(BATCHES[batch]))
    caplog.clear()
    _train_op(loss, 3)
    return caplog.messages


_DAILY_NUMBERS = {
    *("by_its_mask", "without_nan", "times_its_share", "of_scaled_weights", "guarded"),
    *("tf.losses_by_weights", "by_a_clipped_mask", "by_a_product", "by_exponents"),
    *("by_a_sum_of_columns", "by_a_squared_norm", "by_a_root", "in_functions"),
    *("divisor_of_a_function", "boolean_mask", "tokens_before_a_large_layer"),
    "parts_of_tokens_before_a_large_layer",
}
_DAILY_STATIC = {
    *("by_its_mask", "by_a_number_of_tokens", "of_scaled_weights", "boolean_mask"),
    *("tf.losses_by_nonzero_weights", "weights_by_their_sum", "by_exponents"),
    *("by_a_sum_of_columns", "by_a_root", "of_labels_but_one"),
    *("selected_before_a_large_layer", "a_column_of_places_before_a_large_layer"),
}


@pytest.mark.parametrize(
    ("name", "batch"),
    rows(
        _with_batches(OF_OWN_NUMBERS),
        {*zip(_DAILY_NUMBERS, itertools.repeat("data_set"))}
        | {*zip(_DAILY_STATIC, itertools.repeat("static"))},
    ),
)
def test_a_mean_over_tokens_is_told_its_weight(name, batch, fresh_graph, caplog):
    (message,) = _messages(OF_OWN_NUMBERS[name], batch, caplog)
    is_of_size = name in OF_SIZE
    line = "elements), tf.float32)" if is_of_size else "weight=tf.reduce_sum(mask)"
    sentence = WARNING
    if name in UNNAMED:
        sentence, line = OF_OTHERS, "divides all of it, pass that number as `weight`"
    assert sentence in message and line in message


@pytest.mark.parametrize(("name", "batch"), _with_batches(OF_NO_WEIGHT))
def test_a_loss_that_no_weight_fits_is_told_so(name, batch, fresh_graph, caplog):
    (message,) = _messages(OF_NO_WEIGHT[name], batch, caplog)
    assert OF_OTHERS in message and "let microbatch_model_fn split" in message


def test_a_look_at_numbers_leaves_later_sessions_their_threads():
    """A process has them once, so it is a new one."""
    done = run_python(_THREADS)
    assert done.stdout == "True\n", done.output


def test_a_mean_over_tokens_with_its_weight_or_alone_is_not_warned_of(
    fresh_graph, caplog
):
    m = _Regression()
    loss = OF_OWN_NUMBERS["by_its_mask"](m)
    _train_op(loss, 3, weight=tf.reduce_sum(m.mask), name="weighted")
    _train_op(loss, 1, name="plain")
    assert not caplog.messages


@pytest.mark.parametrize(("name", "batch"), _with_batches(OF_EQUAL_NUMBERS))
def test_a_plain_mean_is_not_warned_of(name, batch, fresh_graph, caplog):
    assert not _messages(OF_EQUAL_NUMBERS[name], batch, caplog)


@pytest.mark.parametrize("batch", ["queue", "static", "one_shot", "mapped"])
def test_a_mean_over_tokens_of_any_batches_is_told_its_weight(
    batch, fresh_graph, caplog
):
    loss = OF_OWN_NUMBERS["by_its_mask"](_Regression(BATCHES[batch]))
    _train_op(loss, lambda update_step: 2)
    assert caplog.text.count(WARNING) == 1


def test_a_mean_over_tokens_that_are_fed_is_told_its_weight(fresh_graph, caplog):
    m = _Regression(MAY_BE_ONE["placeholder"])
    _train_op(m.squares[0] / v1.placeholder(tf.float32, []), 2)
    _train_op(
        tf.reduce_sum(m.squares) / tf.reduce_sum(v1.placeholder(tf.float32, [3])),
        2,
        name="of_classes",
    )
    assert WARNING not in caplog.text
    optimizer = AccumulatingOptimizer(sgd(), 2)
    pairs = optimizer.compute_gradients(OF_OWN_NUMBERS["by_its_mask"](m))
    gradients, variables = zip(*pairs, strict=True)
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    assert caplog.text.count(WARNING) == 1


@pytest.mark.parametrize("name", ["by_its_mask", "boolean_mask"])
def test_fed_batches_of_a_static_size_are_batches(name, fresh_graph, caplog):
    batch = (v1.placeholder(tf.float32, shape) for shape in ([4, 3], [4]))
    m = _Regression(lambda: batch)
    _train_op(OF_OWN_NUMBERS[name](m), 2)
    assert caplog.text.count(WARNING) == 1


def test_a_mean_over_tokens_is_told_its_weight_once_for_all_replicas(caplog):
    with tf.Graph().as_default(), two_replicas().scope():
        strategy = tf.distribute.get_strategy()
        strategy.extended.call_for_each_replica(
            lambda: _train_op(OF_OWN_NUMBERS["by_its_mask"](_Regression()), 2)
        )
    assert caplog.text.count(WARNING) == 1


def _token_losses(tokens):
    table = v1.get_variable("tokens", [9, 5])
    output = v1.get_variable("output", [5, 9])
    logits = tf.tensordot(tf.gather(table, tokens), output, 1)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tokens, logits=logits)


def _mean_by_a_mask(batch):
    is_sparse = isinstance(batch, tf.SparseTensor)
    tokens = tf.sparse.to_dense(batch) if is_sparse else batch.to_tensor()
    mask = tf.cast(tokens > 0, tf.float32)
    return tf.reduce_sum(_token_losses(tokens) * mask) / tf.reduce_sum(mask)


def _mean_of_examples(batch):
    if isinstance(batch, tf.SparseTensor):
        batch = tf.RaggedTensor.from_sparse(batch)
    return tf.reduce_mean(
        tf.reduce_mean(batch.with_values(_token_losses(batch.values)), 1)
    )


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize(
    ("make", "is_warned_of"),
    [
        (lambda batch: tf.reduce_mean(_token_losses(batch.values)), True),
        (_mean_by_a_mask, True),
        (_mean_of_examples, False),
    ],
    ids=["entries", "mask", "examples"],
)
def test_a_mean_over_tokens_of_a_batch_of_lists_is_told_its_weight(
    make, is_warned_of, kind, fresh_graph, caplog
):
    tokens = tf.ragged.constant([[1, 2, 3], [4]] * 8, dtype=tf.int64)
    tokens = tokens if kind == "ragged" else tokens.to_sparse()
    batches = tf.data.Dataset.from_tensor_slices(tokens).batch(8)
    batch = v1.data.make_one_shot_iterator(batches).get_next()
    _train_op(make(batch), 3)
    assert caplog.text.count(WARNING) == is_warned_of


def test_a_ragged_tensor_of_unknown_rank_is_let_alone(fresh_graph):
    spec = tf.RaggedTensorSpec(None, tf.float32, ragged_rank=1)
    batch = tf.ragged.constant([[1.0, 2.0], [3.0]])
    batches = tf.data.Dataset.from_generator(lambda: [batch], output_signature=spec)
    words = v1.data.make_one_shot_iterator(batches).get_next()
    values = words.values * v1.get_variable("w", [])
    padded = words.with_values(values).to_tensor()
    _train_op(tf.reduce_mean(tf.reduce_sum(padded, 1) ** 2), 3)


def test_sparse_tensors_of_other_ranks_are_let_alone(fresh_graph, caplog):
    sparse = tf.sparse.from_dense(np.ones([16, 5, 3], np.float32))
    batches = tf.data.Dataset.from_tensor_slices((sparse, Y[:16])).batch(8)
    x, y = v1.data.make_one_shot_iterator(batches).get_next()
    weight = v1.get_variable("w", [])
    errors = tf.reduce_sum(tf.sparse.to_dense(x), [1, 2]) * weight - y
    _train_op(tf.reduce_mean(tf.reduce_sum(tf.square(errors)[:, None], 1)), 3)
    assert not caplog.messages


def test_whole_numbers_are_no_larger_than_those_of_a_one_hot(fresh_graph, caplog):
    actions = tf.data.Dataset.from_tensor_slices(np.arange(32) % 2)
    x, y, action = _next(
        tf.data.Dataset.zip((_examples(), actions)).map(lambda a, b: (*a, b)).batch(8)
    )
    scores = x @ v1.get_variable("w", [3, 2])
    weights = tf.one_hot(action, 2)
    targets = tf.stack([y, y], 1)
    _train_op(v1.losses.mean_squared_error(targets, scores, weights), 3)
    assert WARNING not in caplog.text
