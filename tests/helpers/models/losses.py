"""Ordinary losses, as scripts without this library write them.

The arguments of a loss are named after what it reads: features of `tests.helpers.models.examples`,
`y` [B, 3] labels, `z` [B, 3] the network's outputs, `kernel` [4, 5] its first weights,
`tokens` [B, T, 3] outputs for each token.

B = examples, T = tokens.
"""

import inspect
import sys
import zlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tests.helpers.models.examples import (
    BATCH,
    CLASSES,
    COMPOSED,
    FEATURES,
    TOKENS,
    make_dataset,
)

v1 = tf.compat.v1


def variable(name: str, *shape: int, dtype=np.float64) -> tf.Variable:
    """Returns a variable whose first value does not depend on the graph."""
    value = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    with v1.variable_scope(v1.get_variable_scope(), reuse=v1.AUTO_REUSE):
        start = tf.constant_initializer(0.5 * value)
        return v1.get_variable(name, shape, dtype, initializer=start)


def kernel() -> tf.Variable:
    return variable("kernel", 4, 5)


def outputs(x: tf.Tensor) -> tf.Tensor:
    hidden = tf.tanh(tf.matmul(x, kernel()) + variable("bias", 5))
    return tf.matmul(hidden, variable("out", 5, 3)) + variable("out_bias", 3)


def token_outputs(seq: tf.Tensor) -> tf.Tensor:
    hidden = tf.tanh(tf.tensordot(seq, kernel(), 1))
    return tf.tensordot(hidden, variable("out", 5, 3), 1)


_COMPUTED = {
    "kernel": (lambda: kernel(), []),
    "z": (outputs, ["x"]),
    "tokens": (token_outputs, ["seq"]),
}


def input_fn_of(loss: Callable, **options) -> Callable:
    """Returns an input_fn of the features that a loss reads."""
    needed = []
    for name in inspect.signature(loss).parameters:
        needed += _COMPUTED[name][1] if name in _COMPUTED else [name]
    names = [name for name in needed if name in FEATURES or name in COMPOSED]
    return lambda: make_dataset(names, **options)


def call(loss: Callable, features: dict, y: tf.Tensor) -> tf.Tensor:
    """Returns the loss, whose arguments are found by their names."""
    arguments = {**features, "y": y}
    for name, (compute, names) in _COMPUTED.items():
        if name in inspect.signature(loss).parameters:
            arguments[name] = compute(*(features[feature] for feature in names))
    return loss(
        **{name: arguments[name] for name in inspect.signature(loss).parameters}
    )


def model_fn_of(loss: Callable) -> Callable:
    """Returns a model_fn that trains a loss by gradient descent."""

    def model_fn(features, labels, mode):
        value = call(loss, features, labels)
        step = v1.train.get_or_create_global_step()
        train_op = v1.train.GradientDescentOptimizer(0.01).minimize(value, step)
        scalar = value if value.shape.rank == 0 else tf.reduce_mean(value)
        return tf.estimator.EstimatorSpec(mode, loss=scalar, train_op=train_op)

    return model_fn


def public_functions(module: str) -> dict[str, Callable]:
    """Returns the functions that a module defines under public names."""
    return {
        name: value
        for name, value in vars(sys.modules[module]).items()
        if getattr(value, "__module__", "") == module and not name.startswith("_")
    }


def squared(y, z):
    return tf.math.squared_difference(y, z)  # [B, 3]


def errors(y, z):
    return tf.reduce_mean(squared(y, z), 1)  # [B]


def number(tensor):
    return tf.cast(tf.shape(tensor)[0], tf.float64)


def entropies(cls, z):
    """Returns the cross-entropy [B] of each example."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=cls, logits=z)


def unit(z):
    return tf.nn.l2_normalize(z, -1)


def words(length):
    return tf.sequence_mask(length, TOKENS, tf.float64)  # [B, T]


def one_loss_per_token(tags, tokens):
    return entropies(tags, tokens)  # [B, T]


SUMS_AND_MEANS = {
    "mean": lambda y, z: tf.reduce_mean(squared(y, z)),
    "sum": lambda y, z: tf.reduce_sum(squared(y, z)),
    "sum_over_root_of_n": lambda y, z: tf.reduce_sum(errors(y, z)) / tf.sqrt(number(y)),
    "sum_of_sequence_means": lambda tags, tokens: tf.reduce_sum(
        tf.reduce_mean(one_loss_per_token(tags, tokens), 0)
    ),
    "sum_over_unknown_time_of_means": lambda y, padded: tf.reduce_sum(
        tf.reduce_mean(squared(y[:, None], token_outputs(padded)), 0)
    ),
    "rmse": lambda y, z: tf.sqrt(tf.reduce_mean(squared(y, z))),
    "mean_of_column_rmse": lambda y, z: tf.reduce_mean(
        tf.sqrt(tf.reduce_mean(squared(y, z), 0))
    ),
    "mean_and_sum": lambda y, z: tf.reduce_mean(errors(y, z)) + tf.reduce_sum(z**2),
    "examples_with_examples_by_a_bug": lambda y, z: tf.reduce_mean(
        tf.math.squared_difference(y[:, 0], z[:, :1])  # [B, B]
    ),
    "matmul_with_ones": lambda y, z: tf.reduce_sum(
        tf.matmul(tf.ones_like(y[:, :1]), squared(y, z), transpose_a=True)
    ),
    "einsum_over_examples": lambda y, z, w: tf.einsum("n,nc->", w, squared(y, z)),
    "all_flattened": lambda y, z: tf.nn.l2_loss(tf.reshape(z - y, [-1])) / number(y),
    "by_column": lambda y, z: sum(
        tf.reduce_sum(a) / number(a)
        for a in tf.unstack(squared(y, z), axis=1)  # each [B]
    ),
}


def _shared_divisor(y, z, mask):
    total = tf.maximum(tf.reduce_sum(mask), 1)
    first, second = squared(y, z)[:, 0], tf.abs(z[:, 1])
    return tf.reduce_sum(first * mask) / total + tf.reduce_sum(second * mask) / total


def _masked_before_the_last_layer(y, x, mask):
    chosen = tf.boolean_mask(tf.tanh(tf.matmul(x, kernel())), mask > 0)
    predicted = tf.matmul(chosen, variable("out", 5, 3))
    return tf.reduce_mean(squared(tf.boolean_mask(y, mask > 0), predicted))


def _chosen_words(ids, seq):
    """A masked language model's: logits of the chosen words alone."""
    hidden = tf.tanh(tf.tensordot(seq, kernel(), 1))
    chosen = tf.equal(ids % 3, 1)
    logits = tf.matmul(tf.boolean_mask(hidden, chosen), variable("words", 5, 12))
    return tf.reduce_mean(entropies(tf.boolean_mask(ids, chosen), logits))


def _words_of_sentences(tags, seq, length):
    """A tagger's: tf.where in place of the mask, the root of a mean, a count."""
    hidden = tf.tanh(tf.tensordot(seq, kernel(), 1))
    places = tf.where(tf.sequence_mask(length, tf.shape(hidden)[1]))
    logits = tf.matmul(tf.gather_nd(hidden, places), variable("out", 5, 3))
    losses = entropies(tf.gather_nd(tags, places), logits)
    mean = tf.reduce_sum(losses) / number(logits)
    return mean + tf.sqrt(tf.reduce_mean(losses**2))


def _several_lists(y, x, z, mask, w):
    """Chosen examples, some of these, others, and all."""
    hidden = tf.tanh(tf.matmul(x, kernel()))
    first = tf.matmul(tf.boolean_mask(hidden, mask > 0), variable("out", 5, 3))
    labels = tf.boolean_mask(y, mask > 0)
    again = tf.boolean_mask(w, mask > 0) > 0.5
    second = tf.matmul(tf.boolean_mask(first, again), variable("square", 3, 3))
    other = tf.matmul(tf.boolean_mask(hidden, w > 1.0), variable("other", 5, 3))
    loss = tf.reduce_mean(squared(tf.boolean_mask(labels, again), second))
    loss += tf.reduce_mean(tf.abs(other)) * tf.sqrt(tf.reduce_mean(squared(y, z)))
    return loss + tf.reduce_sum(squared(labels, first)) / number(other)


def _hard_examples(x):
    """The network chooses examples, which another layer gets."""
    hidden = tf.tanh(tf.matmul(x, kernel()))
    is_hard = tf.stop_gradient(tf.reduce_sum(hidden, 1)) > 0
    hard = tf.matmul(tf.boolean_mask(hidden, is_hard), variable("out", 5, 3))
    return tf.reduce_mean(hard**2) + tf.reduce_mean(hidden)


def _similar_among_chosen(x, mask, word):
    """Compares the chosen ones, which have texts that the network decides."""
    hidden = tf.tanh(tf.matmul(x, kernel()))
    z = unit(tf.matmul(tf.boolean_mask(hidden, mask > 0), variable("out", 5, 3)))
    largest = tf.strings.as_string(tf.argmax(z, 1))
    texts = tf.strings.join([tf.boolean_mask(word, mask > 0), largest])
    scores = tf.matmul(z, z, transpose_b=True) / 0.1
    losses = entropies(tf.range(tf.shape(z)[0]), scores)
    return tf.reduce_mean(losses) * number(tf.unique(texts).y)


def _masked_language_model(ids, seq, at):
    """google-research/bert: gathered positions, weights, sum / (sum + 1e-5)."""
    hidden = tf.tanh(tf.tensordot(seq, kernel(), 1))
    first = tf.reshape(tf.range(tf.shape(seq)[0]) * TOKENS, [-1, 1])
    chosen = tf.gather(tf.reshape(hidden, [-1, 5]), tf.reshape(at + first, [-1]))
    labels = tf.reshape(tf.gather(ids, at, batch_dims=1), [-1])
    logits = tf.matmul(chosen, variable("words", 5, 12))
    weights = tf.cast(labels > 0, tf.float64)
    losses = entropies(labels, logits)
    return tf.reduce_sum(weights * losses) / (tf.reduce_sum(weights) + 1e-5)


def _partitioned(y, z, mask):
    chosen = tf.cast(mask, tf.int32)
    without, those = tf.dynamic_partition(errors(y, z), chosen, 2)
    return 2 * tf.reduce_mean(those) + tf.reduce_mean(tf.square(without))


def _up_to_the_longest(tags, tokens, length):
    longest = tf.reduce_max(length)
    losses = one_loss_per_token(tags[:, :longest], tokens[:, :longest])
    return tf.reduce_mean(losses * tf.sequence_mask(length, dtype=tf.float64))


def _time_major(tags, tokens, length):
    logits = tf.transpose(tokens, [1, 0, 2])  # [T, B, 3]
    losses = entropies(tf.transpose(tags), logits) * tf.transpose(words(length))
    return tf.reduce_mean(tf.reduce_sum(losses, 0))


def _flat_tokens(tags, tokens, length):
    """A causal language model's: shifted, flattened, selected by a mask."""
    logits = tf.reshape(tokens[:, :-1], [-1, CLASSES])
    labels, mask = tf.reshape(tags[:, 1:], [-1]), tf.reshape(words(length)[:, 1:], [-1])
    losses = tf.boolean_mask(entropies(labels, logits), mask > 0)
    return tf.reduce_mean(losses)


def _ragged_rows(ragged):
    """Mean over sequences of the mean over a sequence."""
    predicted = tf.tanh(tf.matmul(ragged.flat_values, kernel()))
    rows = ragged.with_flat_values(tf.reduce_sum(predicted**2, 1))
    return tf.reduce_mean(tf.reduce_mean(rows, 1))


def _sparse_mean(sparse):
    predicted = tf.tanh(tf.matmul(sparse.values[:, None], variable("slope", 1, 1)))
    return tf.reduce_mean(tf.math.squared_difference(predicted, 0.3))


def _sparse_product(y, sparse):
    """A linear model of a sparse matrix."""
    predicted = tf.sparse.sparse_dense_matmul(sparse, variable("slopes", TOKENS, 3))
    return tf.reduce_mean(squared(y, predicted))


MASKED = {
    "sum_over_max_of_count_and_1": lambda y, z, mask: (
        tf.reduce_sum(errors(y, z) * mask) / tf.maximum(tf.reduce_sum(mask), 1)
    ),
    "boolean_mask": lambda y, z, mask: tf.reduce_mean(
        tf.boolean_mask(errors(y, z), mask > 0)
    ),
    "boolean_mask_of_outputs": lambda y, z, mask: tf.reduce_mean(
        squared(tf.boolean_mask(y, mask > 0), 1 - tf.boolean_mask(z, mask > 0))
    ),
    "gather_of_where": lambda y, z, mask: tf.reduce_mean(
        tf.gather(errors(y, z), tf.where(mask > 0)[:, 0])
    ),
    "count_by_size_of_selected": lambda y, z, mask: (
        tf.reduce_sum(errors(y, z) * mask)
        / tf.cast(tf.size(tf.boolean_mask(mask, mask > 0)), tf.float64)
    ),
    "dynamic_partition": _partitioned,
    "two_terms_over_one_divisor": _shared_divisor,
    "missing_labels_by_column": lambda y, z: tf.reduce_mean(
        tf.reduce_sum(squared(y, z) * tf.cast(y > -0.5, tf.float64), 0)
        / (tf.reduce_sum(tf.cast(y > -0.5, tf.float64), 0) + 1)
    ),
    "masked_before_the_last_layer": _masked_before_the_last_layer,
    "chosen_words": _chosen_words,
    "words_of_sentences": _words_of_sentences,
    "several_lists": _several_lists,
    "hard_examples": _hard_examples,
    "similar_among_chosen": _similar_among_chosen,
    "masked_language_model": _masked_language_model,
    "tokens_over_sum_of_lengths": lambda tags, tokens, length: (
        tf.reduce_sum(one_loss_per_token(tags, tokens) * words(length))
        / tf.cast(tf.reduce_sum(length), tf.float64)
    ),
    "time_major": _time_major,
    "flat_tokens": _flat_tokens,
    "up_to_the_longest": _up_to_the_longest,
    "ragged_rows": _ragged_rows,
    "ragged_to_tensor": lambda y, ragged: tf.reduce_mean(
        squared(y[:, None], token_outputs(ragged.to_tensor()))
    ),
    "sparse_values": _sparse_mean,
    "sparse_product": _sparse_product,
}


def _class_balanced(cls, z):
    counts = tf.reduce_sum(tf.one_hot(cls, CLASSES, dtype=tf.float64), 0)
    weights = number(z) / (CLASSES * tf.maximum(counts, 1))
    return tf.reduce_mean(entropies(cls, z) * tf.gather(weights, cls))


def _mean_of_class_means(cls, z):
    sums = tf.math.unsorted_segment_sum(entropies(cls, z), cls, CLASSES)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(z[:, 0]), cls, CLASSES)
    return tf.reduce_mean(sums / tf.maximum(counts, 1))


def _advantages(cls, z, w):
    """A policy gradient: returns standardized in the batch, an entropy bonus."""
    mean, variance = tf.nn.moments(w, [0])
    advantage = tf.stop_gradient((w - mean) / (tf.sqrt(variance) + 1e-8))
    log_p = tf.nn.log_softmax(z)
    entropy = -tf.reduce_mean(tf.reduce_sum(tf.exp(log_p) * log_p, 1))
    return tf.reduce_mean(advantage * entropies(cls, z)) - 0.01 * entropy


WEIGHTED = {
    "softmax_of_weights": lambda y, z, w: tf.tensordot(
        tf.nn.softmax(w), errors(y, z), 1
    ),
    "class_balanced": _class_balanced,
    "mean_of_class_means": _mean_of_class_means,
    "standardized_advantages": _advantages,
}


def _in_batch_negatives(z, pair):
    scores = tf.matmul(unit(z), unit(outputs(pair)), transpose_b=True) / 0.1
    return tf.reduce_mean(entropies(tf.range(tf.shape(z)[0]), scores))


def _two_views(z, pair):
    """SimCLR: both views in one batch of 2 x B, an example is no negative of itself."""
    both = unit(tf.concat([z, outputs(pair)], 0))
    scores = tf.matmul(both, both, transpose_b=True) / 0.5
    scores -= 1e9 * tf.eye(tf.shape(both)[0], dtype=tf.float64)
    n = tf.shape(z)[0]
    labels = tf.concat([tf.range(n) + n, tf.range(n)], 0)
    return tf.reduce_mean(entropies(labels, scores))


def _distances(z):
    squares = tf.reduce_sum(z**2, 1)
    return squares[:, None] - 2 * tf.matmul(z, z, transpose_b=True) + squares


def _hardest_triplets(z, cls):
    distances, same = _distances(z), tf.equal(cls[:, None], cls[None])
    farthest = tf.reduce_max(
        tf.where(same, distances, tf.zeros_like(distances)), axis=1
    )
    nearest = tf.reduce_min(
        tf.where(same, distances + tf.reduce_max(distances), distances), axis=1
    )
    return tf.reduce_mean(tf.nn.softplus(farthest - nearest))


def _area_under_curve(z, mask):
    """A squared hinge for each pair of a positive and a negative example."""
    positive = tf.boolean_mask(z[:, 0], mask > 0)
    negative = tf.boolean_mask(z[:, 0], mask <= 0)
    return tf.reduce_mean(tf.nn.relu(1 - (positive[:, None] - negative[None])) ** 2)


def _ranking_in_groups(z, group, w):
    """A softmax over the examples of each query, of which a batch has several."""
    scores = z[:, 0]
    top = tf.math.unsorted_segment_max(scores, group, 5)
    shifted = scores - tf.gather(top, group)
    total = tf.math.unsorted_segment_sum(tf.exp(shifted), group, 5)
    log_p = shifted - tf.math.log(tf.gather(total, group))
    queries = tf.cast(tf.size(tf.unique(group).y), tf.float64)
    return -tf.reduce_sum(log_p * w) / queries


def _means_of_pairs(z, pair, mask):
    """Contrastive loss of given pairs, each its own."""
    distance = tf.norm(z - outputs(pair), axis=1)
    losses = mask * distance**2 + (1 - mask) * tf.nn.relu(3 - distance) ** 2
    return tf.reduce_mean(losses)


def _redundancy(z, pair):
    """Barlow Twins: the cross-correlation of two views' standardized columns."""
    n = number(z)

    def standardize(a):
        mean, variance = tf.nn.moments(a, [0])
        return (a - mean) / tf.sqrt(variance + 1e-4)

    views = standardize(z), standardize(outputs(pair))
    correlation = tf.matmul(*views, transpose_a=True) / n  # [3, 3]
    on = tf.linalg.diag_part(correlation)
    off = correlation - tf.linalg.diag(on)
    return tf.reduce_sum((on - 1) ** 2) + 0.05 * tf.reduce_sum(off**2)


def _prototypes(z, pair, cls):
    """Few-shot: classes' means in the support, cross-entropy of the queries."""
    chosen = tf.one_hot(cls, CLASSES, dtype=tf.float64)
    means = tf.matmul(chosen, z, transpose_a=True) / (
        tf.reduce_sum(chosen, 0)[:, None] + 1e-8
    )
    distances = tf.reduce_sum(squared(outputs(pair)[:, None], means), -1)
    return tf.reduce_mean(entropies(cls, -distances))


COMPARING = {
    "in_batch_negatives": _in_batch_negatives,
    "two_views": _two_views,
    "hardest_triplets": _hardest_triplets,
    "area_under_curve": _area_under_curve,
    "ranking_in_groups": _ranking_in_groups,
    "pairs_of_one_example": _means_of_pairs,
    "redundancy": _redundancy,
    "prototypes": _prototypes,
}


def _dice_per_class(cls, z):
    target, p = tf.one_hot(cls, CLASSES, dtype=tf.float64), tf.nn.softmax(z)
    both = tf.reduce_sum(target * p, 0)
    return tf.reduce_mean(
        1 - (2 * both + 1e-6) / (tf.reduce_sum(target + p, axis=0) + 1e-6)
    )


def _lovasz(mask, z):
    """Sorted hinge errors, weighted by the gradient of the Jaccard index."""
    errors = 1 - z[:, 0] * (2 * mask - 1)
    errors, order = tf.nn.top_k(errors, k=tf.shape(errors)[0])
    target = tf.gather(mask, order)
    total = tf.reduce_sum(target)
    both, either = total - tf.cumsum(target), total + tf.cumsum(1 - target)
    jaccard = 1 - both / either
    steps = tf.concat([jaccard[:1], jaccard[1:] - jaccard[:-1]], 0)
    return tf.tensordot(tf.nn.relu(errors), tf.stop_gradient(steps), 1)


def _balanced_experts(z, cls):
    """Mixture of experts: share of examples times mean probability, and a z-loss."""
    p = tf.nn.softmax(z)
    chosen = tf.one_hot(tf.argmax(p, 1), CLASSES, dtype=tf.float64)
    balance = tf.reduce_sum(tf.reduce_mean(chosen, 0) * tf.reduce_mean(p, 0))
    scale = tf.reduce_mean(tf.reduce_logsumexp(z, 1) ** 2)
    return tf.reduce_mean(entropies(cls, z)) + 3 * balance + 0.1 * scale


def _correlation(y, z):
    a, b = y - tf.reduce_mean(y, 0), z - tf.reduce_mean(z, 0)
    norms = tf.norm(a, axis=0) * tf.norm(b, axis=0)
    return 1 - tf.reduce_mean(tf.reduce_sum(a * b, 0) / norms)


def _soft_histogram(y, z):
    """Squared distance of two distributions' histograms."""
    centers = tf.constant([-1.0, 0, 1], tf.float64)

    def histogram(a):
        return tf.reduce_mean(tf.exp(-squared(a[..., None], centers)), [0, 1])

    return tf.reduce_sum(squared(histogram(y), histogram(z)))


def _normalized_outputs(y, z):
    """Batch normalization by hand, in front of the loss."""
    mean, variance = tf.nn.moments(z, [0])
    normalized = tf.nn.batch_normalization(z, mean, variance, None, None, 1e-3)
    return tf.reduce_mean(squared(y, normalized))


def _whitened(z, y):
    centered = z - tf.reduce_mean(z, 0)
    covariance = tf.matmul(centered, centered, transpose_a=True) / number(z)
    root = tf.linalg.cholesky(covariance + tf.eye(3, dtype=tf.float64))
    whitened = tf.linalg.triangular_solve(root, tf.transpose(centered))
    return tf.reduce_mean(squared(tf.transpose(y), whitened))


STATISTICS = {
    "dice_per_class": _dice_per_class,
    "lovasz": _lovasz,
    "balanced_experts": _balanced_experts,
    "correlation": _correlation,
    "soft_histogram": _soft_histogram,
    "normalized_outputs": _normalized_outputs,
    "whitened": _whitened,
    "gram_matrix": lambda y, z: (
        tf.reduce_sum(
            squared(
                tf.matmul(y, y, transpose_a=True), tf.matmul(z, z, transpose_a=True)
            )
        )
        / number(y) ** 2
    ),
    "nuclear_norm": lambda z: (
        -tf.reduce_sum(tf.linalg.svd(z, compute_uv=False)[..., :2])
    ),
}


def _hard_share(y, z):
    k = tf.cast(0.4 * number(y), tf.int32)
    return tf.reduce_mean(tf.nn.top_k(errors(y, z), k).values)


def _hard_negatives(cls, z):
    """SSD: all positives, and three times as many hardest negatives."""
    losses, positive = entropies(cls, z), tf.cast(cls > 0, tf.float64)
    positives = tf.reduce_sum(positive)
    k = tf.cast(tf.minimum(3 * positives, number(z) - positives), tf.int32)
    hardest = tf.nn.top_k(losses * (1 - positive), k).values
    return (tf.reduce_sum(losses * positive) + tf.reduce_sum(hardest)) / positives


def _median(y, z):
    return tf.sort(errors(y, z))[tf.shape(y)[0] // 2]


def _sorted_against_sorted(y, z):
    """The Wasserstein distance of one column."""
    return tf.reduce_mean(tf.abs(tf.sort(y[:, 0]) - tf.sort(z[:, 0])))


def _survival(z, w, mask):
    """Cox: each event against all that are at risk, by a cumulative sum."""
    order = tf.argsort(w, direction="DESCENDING")
    scores, event = tf.gather(z[:, 0], order), tf.gather(mask, order)
    at_risk = tf.math.cumulative_logsumexp(scores)
    return -tf.reduce_sum((scores - at_risk) * event) / tf.reduce_sum(event)


def _mixed_up(x, y):
    """Mixup with the batch in reverse order."""
    mixed = 0.7 * x + 0.3 * tf.reverse(x, [0])
    target = 0.7 * y + 0.3 * tf.reverse(y, [0])
    return tf.reduce_mean(squared(target, outputs(mixed)))


def _hardest_example(y, z):
    return errors(y, z)[tf.argmax(errors(y, z))]


def _of_distinct(z, cls):
    """Mean over the distinct classes of the batch, of whatever number."""
    classes, index = tf.unique(cls)
    sums = tf.math.unsorted_segment_sum(z, index, tf.size(classes))
    return tf.reduce_mean(tf.reduce_sum(sums**2, 1))


ORDERED = {
    "hard_share": _hard_share,
    "hard_negatives": _hard_negatives,
    "median": _median,
    "sorted_against_sorted": _sorted_against_sorted,
    "survival": _survival,
    "mixed_up": _mixed_up,
    "hardest_example": _hardest_example,
    "of_distinct_classes": _of_distinct,
    "largest": lambda y, z: tf.reduce_max(errors(y, z)),
    "cumulative_sum": lambda y, z: (
        0.01 * tf.reduce_mean(tf.cumsum(squared(y, z), 0) ** 2)
    ),
    "rolled": lambda z: tf.reduce_mean(squared(z, tf.roll(z, 1, 0))),
    "halves": lambda z: tf.reduce_mean(
        tf.nn.relu(1 - z[: tf.shape(z)[0] // 2] + z[-(tf.shape(z)[0] // 2) :])
    ),
    "even_and_odd": lambda y, z: (
        tf.reduce_mean(z[::2] ** 2) + tf.reduce_mean(tf.abs(z[1::2]))
    ),
    "first_examples": lambda y, z: tf.reduce_mean(squared(y, z)[:7]),
    "reshaped_as_columns": lambda y, z: tf.reduce_mean(
        tf.reduce_mean(tf.reshape(squared(y, z), [3, -1]), 1) ** 2
    ),
}


def _quantiles(y, z):
    error = y - z
    q = tf.constant([0.1, 0.5, 0.9], tf.float64)
    return tf.reduce_mean(tf.maximum(q * error, (q - 1) * error))


def _gaussian(y, x, z):
    """Negative log-likelihood; the variance is predicted too."""
    log_variance = tf.matmul(x, variable("variance", 4, 3))
    losses = squared(y, z) * tf.exp(-log_variance) + log_variance
    return 0.5 * tf.reduce_mean(tf.reduce_sum(losses, -1))


def _margin_of_angles(cls, z, kernel):
    """ArcFace."""
    cosine = tf.matmul(unit(z), tf.nn.l2_normalize(kernel[:3, :3], 0))
    chosen = tf.one_hot(cls, CLASSES, dtype=tf.float64)
    angle = tf.acos(tf.clip_by_value(cosine, -0.999, 0.999)) + 0.3 * chosen
    return tf.reduce_mean(entropies(cls, 8 * tf.cos(angle)))


def _mixture_density(y, z):
    log_pi = tf.nn.log_softmax(z)
    log_p = -0.5 * squared(y[:, :1], tf.cumsum(z, 1))
    return -tf.reduce_mean(tf.reduce_logsumexp(log_pi + log_p, 1))


def _distillation(cls, z, pair):
    teacher = tf.stop_gradient(tf.nn.softmax(outputs(pair) / 2))
    soft = tf.nn.softmax_cross_entropy_with_logits(teacher, z / 2)
    return tf.reduce_mean(entropies(cls, z)) + 4 * tf.reduce_mean(soft)


def _ctc(tokens, tags):
    """Connectionist temporal classification, time-major, dense labels."""
    n = tf.shape(tokens)[0]
    losses = tf.nn.ctc_loss(
        labels=tf.ones_like(tags[:, :2]) + tags[:, :2] % 2,
        logits=tf.cast(tf.transpose(tokens, [1, 0, 2]), tf.float32),
        label_length=tf.fill([n], 2),
        logit_length=tf.fill([n], TOKENS),
        blank_index=0,
    )
    return tf.reduce_mean(losses)


def _ctc_of_tensorflow_1(tokens, tags, length):
    labels = tf.sparse.from_dense(1 + tags[:, :1] % 2)
    labels = tf.SparseTensor(labels.indices, labels.values - 1, labels.dense_shape)
    losses = v1.nn.ctc_loss(
        labels, tf.cast(tokens, tf.float32), length, time_major=False
    )
    return tf.reduce_mean(losses / tf.cast(length, tf.float32))


def _crf_by_hand(tokens, tags, length):
    """The log-likelihood of tags in a chain, unrolled."""
    transitions = variable("transitions", CLASSES, CLASSES)
    mask, alpha = words(length), tokens[:, 0]
    for i in range(1, TOKENS):
        following = tf.reduce_logsumexp(alpha[:, :, None] + transitions, 1)
        is_word = mask[:, i, None] > 0
        alpha = tf.where(is_word, following + tokens[:, i], alpha)
    pairs = tf.gather_nd(transitions, tf.stack([tags[:, :-1], tags[:, 1:]], 2))
    emissions = tf.gather(tokens, tags, batch_dims=2)
    path = tf.reduce_sum(emissions * mask, 1) + tf.reduce_sum(pairs * mask[:, 1:], 1)
    return tf.reduce_mean(tf.reduce_logsumexp(alpha, 1) - path)


def _yolo(z, y, mask):
    """Three terms with weights of their own; roots of sizes; a sum over the batch."""
    places = tf.reduce_sum(mask * squared(y[:, 0], z[:, 0]))
    sizes = tf.reduce_sum(
        mask * squared(tf.sqrt(tf.abs(y[:, 1])), tf.sqrt(tf.nn.softplus(z[:, 1])))
    )
    objects = tf.reduce_sum((0.5 + 0.5 * mask) * squared(mask, tf.sigmoid(z[:, 2])))
    return 5 * places + 5 * sizes + objects


OF_ONE_EXAMPLE = {
    "gathered_log_probability": lambda cls, z: (
        -tf.reduce_mean(tf.gather(tf.nn.log_softmax(z), cls, batch_dims=1))
    ),
    "gather_nd_of_range_and_class": lambda cls, z: (
        -tf.reduce_sum(
            tf.gather_nd(
                tf.nn.log_softmax(z), tf.stack([tf.range(tf.shape(z)[0]), cls], 1)
            )
        )
    ),
    "quantiles": _quantiles,
    "gaussian": _gaussian,
    "margin_of_angles": _margin_of_angles,
    "mixture_density": _mixture_density,
    "distillation": _distillation,
    "crf_by_hand": _crf_by_hand,
    "detection": _yolo,
}


def _l2():
    return tf.add_n([tf.nn.l2_loss(v) for v in v1.trainable_variables()])


def _collected(y, z, kernel):
    """Losses and penalties of the graph's collections."""
    v1.losses.add_loss(tf.reduce_mean(squared(y, z)))
    v1.losses.add_loss(0.1 * tf.reduce_mean(tf.abs(z)))
    v1.add_to_collection(v1.GraphKeys.REGULARIZATION_LOSSES, tf.nn.l2_loss(kernel))
    return v1.losses.get_total_loss()


def _learned_weights(y, z, cls):
    """Two tasks, weighted by learned uncertainties."""
    a, b = variable("task_a"), variable("task_b")
    first, second = tf.reduce_mean(errors(y, z)), tf.reduce_sum(entropies(cls, z))
    return tf.exp(-a) * first + tf.exp(-b) * second + a + b


def _ratio_of_tasks(y, z, cls):
    """The second task counts as much as the first, whatever it amounts to."""
    first, second = tf.reduce_mean(errors(y, z)), tf.reduce_mean(entropies(cls, z))
    return first + second * tf.stop_gradient(first / second)


PENALIZED = {
    "mean_and_l2": lambda y, z: tf.reduce_mean(errors(y, z)) + 0.1 * _l2(),
    "sum_of_list": lambda y, z: tf.reduce_sum([tf.reduce_sum(errors(y, z)), 9 * _l2()]),
    "penalty_for_each_example": lambda y, z: tf.reduce_sum(errors(y, z) + 0.1 * _l2()),
    "penalty_times_loss": lambda y, z: tf.reduce_mean(errors(y, z)) * (1 + _l2()),
    "collected": _collected,
    "learned_weights_of_tasks": _learned_weights,
    "ratio_of_tasks": _ratio_of_tasks,
    "only_a_penalty": lambda kernel: tf.nn.l2_loss(kernel),
    "penalty_of_batchs_rows": lambda z, ids: (
        tf.reduce_mean(z**2)
        + tf.nn.l2_loss(
            tf.gather(variable("table", 12, 3), tf.unique(tf.reshape(ids, [-1])).y)
        )
    ),
}

SHAPED = {
    "shape_1": lambda y, z: tf.reduce_sum(errors(y, z)[:, None], 0),
    "one_per_example": lambda y, z: errors(y, z),
    "one_per_column": lambda y, z: tf.reduce_sum(squared(y, z), 0),
    "one_per_output": lambda y, z: squared(y, z),
    "time_major_matrix": lambda tags, tokens: tf.transpose(
        one_loss_per_token(tags, tokens)
    ),
    "joined": lambda y, z: tf.concat([errors(y, z), tf.abs(z[:, 0])], 0),
    "selected": lambda y, z, mask: tf.boolean_mask(errors(y, z), mask > 0),
    "with_a_penalty": lambda y, z: tf.concat([errors(y, z), [_l2()]], 0),
}


def _v1_loss(reduction: str):
    return lambda y, z, w: v1.losses.mean_squared_error(
        y, z, weights=w[:, None], reduction=getattr(v1.losses.Reduction, reduction)
    )


def _keras_loss(kind: str, reduction: str, **options):
    def loss(y, z, w):
        keras_loss = getattr(tf.keras.losses, kind)(
            reduction=getattr(tf.keras.losses.Reduction, reduction), **options
        )
        value = keras_loss(tf.nn.softmax(y), tf.nn.softmax(z), sample_weight=w)
        return tf.reduce_sum(value) / 18 if reduction == "NONE" else value

    return loss


V1_LOSSES = {
    "v1_none": _v1_loss("NONE"),
    "v1_sum": _v1_loss("SUM"),
    "v1_sum_over_nonzero_weights": _v1_loss("SUM_OVER_NONZERO_WEIGHTS"),
    "v1_nonzero_mask": lambda cls, z, mask: v1.losses.sparse_softmax_cross_entropy(
        cls, z, weights=mask
    ),
    "v1_pairwise": lambda y, z: v1.losses.mean_pairwise_squared_error(
        tf.cast(y, tf.float32), tf.cast(z, tf.float32)
    ),
    "v1_onehot": lambda cls, z: v1.losses.softmax_cross_entropy(
        tf.one_hot(cls, CLASSES), z, label_smoothing=0.1
    ),
}

KERAS_LOSSES = {
    "keras_auto": _keras_loss("KLDivergence", "AUTO"),
    "keras_sum": _keras_loss("CategoricalCrossentropy", "SUM", label_smoothing=0.1),
    "keras_none": _keras_loss("Huber", "NONE"),
    "keras_sparse": lambda cls, z: tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True
    )(cls, z),
}


@tf.custom_gradient
def _reversed_gradient(x):
    return tf.identity(x), lambda d: -0.3 * d


@tf.custom_gradient
def _straight_through(x):
    return tf.round(x), lambda d: d


@tf.custom_gradient
def _weighted_gradient(x):
    """Its gradient is weighted by a sum over the example's own columns."""
    return tf.identity(x), lambda d: d * tf.sigmoid(tf.reduce_sum(d * x, 1, True))


def _weighted_gradient_of_columns(y, z):
    """Behind the gradient that a user wrote are operations whose gradients have no rule."""
    z = _weighted_gradient(z)
    columns = tf.sort(tf.concat([z[:, ::2], tf.slice(z, [0, 1], [-1, 1])], 1))
    columns = tf.gather(tf.transpose(tf.tile(columns, [1, 2])), [0, 4, 2])
    return tf.reduce_mean(squared(y, tf.transpose(columns)))


def _gradient_penalty(y, x, z):
    """WGAN-GP: a loss of derivatives with respect to inputs."""
    slopes = tf.gradients(tf.reduce_sum(outputs(x), 1), x)[0]
    norms = tf.sqrt(tf.reduce_sum(slopes**2, 1) + 1e-12)
    return tf.reduce_mean(errors(y, z)) + 10 * tf.reduce_mean((norms - 1) ** 2)


def _penalty_of_a_mean(y, x, z):
    """R1 of a mean: the slopes have the batch's 1 / n in them."""
    slopes = tf.gradients(tf.reduce_mean(outputs(x)), x)[0]
    return tf.reduce_mean(errors(y, z)) + 50 * tf.reduce_sum(slopes**2)


def _second_derivatives(x, y):
    """A physics-informed network: u_xx + u = f."""
    u = outputs(x)
    first = tf.gradients(u, x)[0]
    second = tf.gradients(first[:, 0], x)[0][:, 0]
    return tf.reduce_mean(squared(y[:, 0], second + u[:, 0]))


def _tape_inside(x, y):
    with tf.GradientTape() as tape:
        tape.watch(x)
        energy = tf.reduce_sum(tf.exp(-0.1 * outputs(x) ** 2))
    forces = tape.gradient(energy, x)
    return tf.reduce_mean(squared(y, forces[:, :3]))


def _adversarial(x, cls):
    """FGSM: examples moved along the sign of the loss's slope."""
    losses = tf.reduce_mean(entropies(cls, outputs(x)))
    slopes = tf.stop_gradient(tf.sign(tf.gradients(losses, x)[0]))
    return tf.reduce_mean(entropies(cls, outputs(x + 0.1 * slopes)))


def _virtual_adversarial(x, z):
    """The direction is normalized for each example."""
    p = tf.stop_gradient(tf.nn.log_softmax(z))

    def divergence(direction):
        q = tf.nn.log_softmax(outputs(x + direction))
        return tf.reduce_mean(tf.reduce_sum(tf.exp(p) * (p - q), 1))

    start = 0.1 * tf.nn.l2_normalize(tf.sin(3 * x), 1)
    slope = tf.stop_gradient(tf.gradients(divergence(start), start)[0])
    return tf.reduce_mean(z**2) + divergence(tf.nn.l2_normalize(slope, 1))


DERIVED = {
    "swish_of_tensorflow": lambda y, z: tf.reduce_mean(squared(y, tf.nn.swish(z))),
    "reversed_gradient": lambda y, z, cls: (
        tf.reduce_mean(errors(y, z))
        + tf.reduce_mean(entropies(cls, _reversed_gradient(z)))
    ),
    "weighted_gradient_of_columns": _weighted_gradient_of_columns,
    "straight_through": lambda y, z: tf.reduce_mean(squared(y, _straight_through(z))),
    "gradient_penalty": _gradient_penalty,
    "penalty_of_a_mean": _penalty_of_a_mean,
    "second_derivatives": _second_derivatives,
    "tape_inside": _tape_inside,
    "adversarial": _adversarial,
    "virtual_adversarial": _virtual_adversarial,
}


def _mapped(y, z):
    losses = tf.map_fn(lambda pair: tf.norm(pair[0] - pair[1]), (y, z), tf.float64)
    return tf.reduce_mean(losses)


def _vectorized(y, z):
    losses = tf.vectorized_map(lambda pair: tf.norm(pair[0] - pair[1]), (y, z))
    return tf.reduce_mean(losses)


def _loop_to_the_longest(tags, tokens, length):
    """Adds up in a loop whose number of rounds is the batch's."""

    def body(i, total):
        losses = entropies(tags[:, i], tokens[:, i]) * tf.cast(i < length, tf.float64)
        return i + 1, total + tf.reduce_sum(losses)

    start = 0, tf.zeros([], tf.float64)
    total = tf.while_loop(lambda i, _: i < tf.reduce_max(length), body, start)[1]
    return total / tf.cast(tf.reduce_max(length), tf.float64)


def _crf(tokens, tags, length):
    transitions = variable("transitions", CLASSES, CLASSES)
    mask = words(length)

    def step(alpha, inputs):
        scores, is_word = inputs
        following = tf.reduce_logsumexp(alpha[:, :, None] + transitions, 1)
        return tf.where(is_word[:, None] > 0, following + scores, alpha)

    over_time = tf.transpose(tokens, [1, 0, 2])[1:], tf.transpose(mask)[1:]
    last = tf.scan(step, over_time, initializer=tokens[:, 0])[-1]
    emissions = tf.reduce_sum(tf.gather(tokens, tags, batch_dims=2) * mask, 1)
    return tf.reduce_sum(tf.reduce_logsumexp(last, 1) - emissions) / tf.reduce_sum(mask)


def _discounted(z, w):
    """Returns of a trajectory: a scan over the examples of the batch."""
    total = tf.scan(lambda a, r: r + 0.9 * a, w, tf.zeros([], tf.float64), reverse=True)
    return tf.reduce_mean(squared(total, z[:, 0]))


def _cond_of_examples(y, z):
    """The network's outputs pass through a branch."""
    is_training = v1.placeholder_with_default(True, [])
    chosen = tf.cond(is_training, lambda: tf.tanh(z), lambda: z)
    return tf.reduce_mean(squared(y, chosen))


def _if_any(y, z, mask):
    """Selected examples, if the batch has any."""
    losses = errors(y, z)
    return tf.cond(
        tf.reduce_any(mask > 0),
        lambda: tf.reduce_sum(losses * mask) / tf.reduce_sum(mask),
        lambda: 3 * tf.reduce_mean(losses),
    )


def _switched(y, z, cls):
    """One of three losses, chosen by the most frequent class of the batch."""
    counts = tf.math.bincount(cls, minlength=CLASSES)
    branches = [
        lambda: tf.reduce_mean(errors(y, z)),
        lambda: tf.reduce_sum(tf.abs(z)),
        lambda: tf.reduce_max(z**2),
    ]
    return tf.switch_case(tf.argmax(counts, output_type=tf.int32), branches)


def _network_in_a_function(x, y):
    weights = kernel(), variable("out", 5, 3)

    @tf.function
    def predict(x):
        return tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[1])

    return tf.reduce_mean(squared(y, predict(x)))


def _sinkhorn(z, pair):
    """Optimal transport between two views, by a loop."""
    scores = tf.matmul(unit(z), unit(outputs(pair)), transpose_b=True)

    def body(i, plan):
        plan -= tf.reduce_logsumexp(plan, 0, keepdims=True)
        return i + 1, plan - tf.reduce_logsumexp(plan, 1, keepdims=True)

    _, plan = tf.while_loop(lambda i, _: i < 3, body, (0, scores))
    return -tf.reduce_sum(tf.exp(plan) * scores)


WITH_CONTROL_FLOW = {
    "mapped": _mapped,
    "vectorized": _vectorized,
    "loop_to_the_longest": _loop_to_the_longest,
    "crf": _crf,
    "discounted": _discounted,
    "cond_of_examples": _cond_of_examples,
    "if_any": _if_any,
    "switched": _switched,
    "network_in_a_function": _network_in_a_function,
    "sinkhorn": _sinkhorn,
}

# In float32, which these operations want.
SINGLE = V1_LOSSES | {"ctc": _ctc, "ctc_of_tensorflow_1": _ctc_of_tensorflow_1}


@tf.custom_gradient
def _clipped_gradient(x):
    """Its gradient depends on all examples: no gradient of parts adds up to it."""
    return tf.identity(x), lambda d: tf.clip_by_norm(d, 0.05)


@tf.custom_gradient
def _gradient_of_the_batchs_mean(x):
    return tf.identity(x), lambda d: d * tf.reduce_mean(tf.abs(x))


def _outside_of_the_graph(of):
    def loss(y, z):
        moved = tf.numpy_function(of, [y], tf.float64)
        moved.set_shape(y.shape)
        return tf.reduce_mean(squared(moved, z))

    return loss


def _differentiable_python(y, z):
    moved = tf.py_function(lambda a: a * tf.reduce_mean(tf.abs(a)), [z], tf.float64)
    moved.set_shape(z.shape)
    return tf.reduce_mean(squared(y, moved))


# Exact, or refused; never another update.
EXACT_OR_REFUSED = {
    "clipped_gradient": lambda y, z: tf.reduce_mean(squared(y, _clipped_gradient(z))),
    "gradient_of_the_batchs_mean": lambda y, z: tf.reduce_mean(
        squared(y, _gradient_of_the_batchs_mean(z))
    ),
    "python_per_example": _outside_of_the_graph(np.tanh),
    "python_over_the_batch": _outside_of_the_graph(lambda a: a - a.mean(0)),
    "python_over_more_than_8": _outside_of_the_graph(
        lambda a: a * (a.mean() if len(a) > 8 else 1)
    ),
    "differentiable_python": _differentiable_python,
    "static_batch_size": lambda y, z: tf.reduce_mean(
        squared(y, tf.reshape(z, [BATCH, 3]))
    ),
}

LOSSES = (
    SUMS_AND_MEANS
    | MASKED
    | WEIGHTED
    | COMPARING
    | STATISTICS
    | ORDERED
    | OF_ONE_EXAMPLE
    | PENALIZED
    | SHAPED
    | KERAS_LOSSES
    | DERIVED
)
