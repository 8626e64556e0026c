"""Model_fns that combine examples where it is hard to see.

They do so in later examples or batches only, in gradients of their own, or by what runs
once for each batch. Each trains as with the batch at once, or is refused; none may train
otherwise. The public functions are those of `HIDDEN`.

B = examples, T = tokens.
"""

import itertools

import numpy as np
import tensorflow as tf

from tests.helpers.models.examples import TOKENS, WORDS
from tests.helpers.models.losses import (
    entropies,
    errors,
    number,
    outputs,
    public_functions,
    squared,
    token_outputs,
    unit,
    variable,
)

v1 = tf.compat.v1


def _rounds(state, number_of_rounds):
    """A layer, again and again."""
    weights = variable("step", 5, 5)

    def body(i, hidden):
        return i + 1, tf.tanh(tf.matmul(hidden, weights))

    return tf.while_loop(lambda i, _: i < number_of_rounds, body, (0, state))[1]


def _first(x):
    return tf.matmul(x, variable("first", 4, 5))


def _last(hidden):
    return tf.matmul(hidden, variable("last", 5, 3))


def _rounds_of_the_largest(y, x, late):
    return tf.reduce_mean(squared(y, _last(_rounds(_first(x), tf.reduce_max(late)))))


def _rounds_of_large_states(y, x):
    """Until no example's state is large any more."""
    weights = variable("step", 5, 5)
    start = _first(x)
    hidden = tf.while_loop(
        lambda h: tf.reduce_max(h) > 0.5,
        lambda h: 0.9 * h * tf.sigmoid(tf.matmul(h, weights)),
        [start],
    )
    return tf.reduce_mean(squared(y, _last(tf.reshape(hidden, tf.shape(start)))))


def _steps_of_sequences(seq, y, late):
    """A recurrent layer over sequences of unequal length: each stops at its own."""
    cell = v1.nn.rnn_cell.BasicLSTMCell(5, dtype=tf.float64)
    _, (_, state) = v1.nn.dynamic_rnn(cell, seq, 1 + late, dtype=tf.float64)
    return tf.reduce_mean(squared(y, _last(state)))


def _centered_in_a_loop(y, x, late):
    """The body combines examples, times zero for the first ones."""
    factor = tf.cast(late, tf.float64)[:, None]

    def body(i, h):
        return i + 1, tf.tanh(h - 0.3 * factor * tf.reduce_mean(h * factor, 0))

    _, hidden = tf.while_loop(lambda i, _: i < 2, body, (0, _first(x)))
    return tf.reduce_mean(squared(y, _last(hidden)))


def _carried_on(y, x, late):
    """A scan over examples, whose state the first ones do not pass on."""
    factor = tf.cast(late, tf.float64)[:, None] * tf.ones([1, 5], tf.float64)
    hidden = tf.scan(
        lambda state, inputs: inputs[0] + 0.5 * inputs[1] * state,
        (tf.tanh(_first(x)), factor),
        tf.zeros([5], tf.float64),
    )
    return tf.reduce_mean(squared(y, _last(hidden)))


def _branch_of_any_later(y, x, later):
    hidden = _first(x)
    hidden = tf.cond(
        tf.reduce_any(later > 0), lambda: tf.nn.relu(hidden), lambda: tf.tanh(hidden)
    )
    return tf.reduce_mean(squared(y, _last(hidden)))


def _in_a_function_with_a_loop(y, x, late):
    @tf.function
    def hidden(x, late):
        return _rounds(_first(x), tf.reduce_max(late))

    return tf.reduce_mean(squared(y, _last(hidden(x, late))))


def _growing_in_a_loop(seq, y):
    """A state that gets longer in each round, along its columns."""

    def body(i, state):
        token = tf.tanh(tf.matmul(seq[:, i], variable("first", 4, 5)))
        return i + 1, tf.concat([state, token * tf.reduce_max(state, 1)[:, None]], 1)

    start = tf.ones_like(seq[:, 0, :1])
    shapes = tf.TensorShape([]), tf.TensorShape([None, None])
    _, state = tf.while_loop(lambda i, _: i < 3, body, (0, start), shapes)
    return tf.reduce_mean(squared(y, _last(tf.reshape(state, [-1, 16])[:, 1:6])))


def _size_in_a_loop(y, x):
    n = number(x)

    def body(i, hidden):
        return i + 1, tf.tanh(hidden) * (1 + 1 / n)

    _, hidden = tf.while_loop(lambda i, _: i < 2, body, (0, _first(x)))
    return tf.reduce_mean(squared(y, _last(hidden)))


def _size_as_rounds(y, x):
    """As many rounds as the batch has examples."""
    return tf.reduce_mean(squared(y, _last(_rounds(_first(x), tf.shape(x)[0] // 3))))


def _size_in_a_function(y, x):
    @tf.function
    def hidden(x):
        return tf.tanh(_first(x)) * 9 / number(x)

    return tf.reduce_mean(squared(y, _last(hidden(x))))


def reordered(growing, y):
    """[B, T, 4] becomes [T, B, 4] by a reshape, not by a transposition."""
    n, tokens = tf.shape(growing)[0], tf.shape(growing)[1]
    mixed = tf.reshape(token_outputs(growing), [tokens, n, 3])
    return tf.reduce_mean(squared(y, tf.reduce_sum(tf.tanh(mixed), 0)))


def reordered_by_the_rest(growing, y):
    mixed = tf.reshape(token_outputs(growing), [tf.shape(growing)[1], -1, 3])
    return tf.reduce_mean(squared(y, tf.reduce_sum(tf.tanh(mixed), 0)))


def tokens_beside_examples(growing, y):
    """[B * T] beside [T * B]: as long, but of other examples."""
    tokens = tf.tanh(token_outputs(growing))[:, :, 0]  # [B, T]
    beside = tf.reshape(tf.transpose(tokens), [-1]) * tf.reshape(tokens, [-1])
    return tf.reduce_mean(beside) + 0.1 * tf.reduce_mean(y)


def shifted_rows(y, x, late):
    """gather: some examples get their predecessor's output."""
    z = outputs(x)
    places = tf.range(tf.shape(z)[0]) - tf.cast(tf.equal(late, 2), tf.int32)
    return tf.reduce_mean(squared(y, tf.gather(tf.tanh(z), places)))


def tokens_of_the_next_example(y, seq, late):
    """A position behind the end of a sequence is the next sequence's first."""
    hidden = tf.reshape(tf.tanh(tf.tensordot(seq, variable("first", 4, 5), 1)), [-1, 5])
    first = tf.range(tf.shape(seq)[0]) * TOKENS
    place = tf.where(late > 0, TOKENS * tf.ones_like(late), late)
    hidden = tf.concat([hidden, tf.zeros([1, 5], tf.float64)], 0)
    return tf.reduce_mean(squared(y, _last(tf.gather(hidden, first + place))))


def tokens_of_the_example_before(y, seq, late):
    """A position before the begin of a sequence is the last sequence's end."""
    hidden = tf.reshape(tf.tanh(tf.tensordot(seq, variable("first", 4, 5), 1)), [-1, 5])
    first = tf.range(tf.shape(seq)[0]) * TOKENS
    return tf.reduce_mean(squared(y, _last(tf.gather(hidden, first - late))))


def rolled_by_the_largest(y, x, late):
    z = tf.tanh(outputs(x))
    return tf.reduce_mean(squared(y, tf.roll(z, tf.reduce_max(late), 0)))


def places_minus_values(cls, x, late):
    """gather_nd, where values are subtracted from packed places."""
    log_p, zeros = tf.nn.log_softmax(outputs(x)), tf.zeros_like(late)
    places = tf.stack([tf.range(tf.shape(log_p)[0]), cls], 1)
    chosen = tf.gather_nd(log_p, places - tf.stack([late, zeros], 1))
    return -tf.reduce_mean(chosen * tf.abs(chosen))


def values_in_front_of_places(y, x, cls):
    """gather_nd of packed places in another order, and of a part of them."""
    z = tf.tanh(outputs(x))
    places = tf.stack([tf.range(tf.shape(z)[0]), cls], 1)
    wide = tf.tile(z, [1, 7])
    chosen = tf.gather_nd(wide, places[:, ::-1])[:, None]
    chosen += tf.gather_nd(z, places[:, 1:])
    chosen += tf.reduce_sum(tf.gather_nd(z, places[:, :, None]), 1)
    first = tf.gather_nd(z, tf.reshape(places, [-1, 1]))
    return tf.reduce_mean(squared(y, chosen + tf.reshape(first, [-1, 2, 3])[:, 1]))


def windows(x, y):
    """The axis of the examples is time for a convolution."""
    hidden = tf.nn.conv1d(x[None], variable("filters", 3, 4, 5), 1, "SAME")[0]
    return tf.reduce_mean(squared(y, _last(tf.tanh(hidden))))


def contrast(seq, y):
    """[B, T, 4] is one image of B x T points for tf.image."""
    moved = tf.image.adjust_contrast(tf.cast(seq, tf.float32), 0.5)
    return tf.reduce_mean(
        squared(y[:, None], token_outputs(tf.cast(moved, tf.float64)))
    )


def contrast_of_one_image(seq, y, late):
    """The same, where the first examples are black."""
    seq *= tf.cast(late, tf.float64)[:, None, None]
    moved = tf.raw_ops.AdjustContrastv2(
        images=tf.cast(seq, tf.float32), contrast_factor=0.5
    )
    return tf.reduce_mean(
        squared(y[:, None], token_outputs(tf.cast(moved, tf.float64)))
    )


def atrous(image, y):
    """A dilated depthwise convolution by space_to_batch."""
    hidden = tf.space_to_batch_nd(image, [2, 2], [[0, 0], [0, 0]])
    hidden = tf.nn.conv2d(hidden, variable("filters", 2, 2, 2, 3), 1, "SAME")
    hidden = tf.batch_to_space(tf.nn.relu(hidden), [2, 2], [[0, 0], [0, 0]])
    return tf.reduce_mean(squared(y, tf.reduce_mean(hidden, [1, 2])))


def repeated(x, y):
    """Importance weighting: several samples of each example, one after another."""
    shifts = tf.constant([[-0.5], [0.1], [0.4]], tf.float64)
    many = tf.repeat(x, 3, axis=0) + tf.tile(shifts, [tf.shape(x)[0], 1])
    losses = tf.reshape(errors(tf.repeat(y, 3, axis=0), outputs(many)), [-1, 3])
    return -tf.reduce_mean(tf.reduce_logsumexp(-losses, 1))


def tiled(x, y):
    """Samples of all examples, and again of all examples."""
    shifts = tf.repeat(
        tf.constant([[-0.5], [0.1], [0.4]], tf.float64), tf.shape(x)[0], 0
    )
    many = tf.tile(x, [3, 1]) + shifts
    losses = tf.reshape(errors(tf.tile(y, [3, 1]), outputs(many)), [3, -1])
    return -tf.reduce_mean(tf.reduce_logsumexp(-losses, 0))


def first_axis_of_classes(cls, z):
    """one_hot along the first axis: sums of classes by a product."""
    chosen = tf.one_hot(cls, 3, axis=0, dtype=tf.float64)  # [3, B]
    return tf.reduce_mean(tf.matmul(chosen, tf.tanh(z)) ** 2) / number(z)


def place_as_weight(y, z):
    n, ends = tf.shape(z)[0], tf.constant([1.0, 0.5], tf.float64)
    weights = tf.cast(tf.range(n), tf.float64) / tf.cast(n, tf.float64)
    return tf.reduce_mean(errors(y, z) * weights * tf.linspace(ends[0], ends[1], n))


def whole_batches_as_weight(y, z):
    """The examples of an epoch without its last batch, which is too short."""
    n = tf.shape(z)[0]
    weight = tf.cast(48 // n * n, tf.float64) / 48
    return tf.reduce_mean(y * tf.tanh(z * weight))


def weights_of_places(y, z):
    """A learned weight for each of the batch's first 11 places."""
    weights = tf.pad(tf.exp(variable("places", 11)), [[0, 7]])[: tf.shape(z)[0]]
    return tf.reduce_mean(errors(y, z) * weights)


def least_squares(x, y):
    """The last layer is solved for, on the batch."""
    hidden = tf.tanh(_first(x))
    gram = tf.matmul(hidden, hidden, transpose_a=True) + tf.eye(5, dtype=tf.float64)
    solved = tf.linalg.solve(gram, tf.matmul(hidden, y, transpose_a=True))
    return tf.reduce_mean(squared(y, tf.matmul(hidden, solved)))


def sampled(ids, z):
    """Sampled softmax with given candidates."""
    labels = tf.cast(ids[:, :1], tf.int64)
    candidates = tf.constant([1, 4, 7], tf.int64)
    expected = tf.ones_like(z[:, :1]), tf.ones([3], tf.float64)
    losses = tf.nn.sampled_softmax_loss(
        variable("words", WORDS, 3),
        variable("word_bias", WORDS),
        labels,
        z,
        num_sampled=3,
        num_classes=WORDS,
        sampled_values=(candidates, *expected),
    )
    return tf.reduce_mean(losses)


def shared_noise(y, z):
    """One draw for the whole batch; it cancels out."""
    noisy = z + tf.random.normal([1, 3], dtype=tf.float64)
    return tf.reduce_mean(squared(y, noisy - tf.reduce_mean(noisy, 0)))


def own_noise(y, z):
    """A draw for each example; it cancels out."""
    noise = tf.random.normal([tf.shape(z)[0], 1], dtype=tf.float64)
    return tf.reduce_mean(squared(y, tf.nn.softmax(z + noise)))


def one_draw_in_both_passes(y, z):
    """Noise of each example, which cancels out if backwards it is that of forwards."""
    noise = tf.random.normal([tf.shape(z)[0], 1], dtype=tf.float64)
    loud, quiet = z * tf.exp(noise), tf.exp(-noise)
    again = tf.roll(loud, 1, 0) * tf.roll(quiet, 1, 0)
    return tf.sqrt(tf.reduce_mean(squared(y, again)))


def axes_of_the_rank(y, z):
    """A mean over all axes but the first, as helpers write it; one by a negative axis."""
    means = tf.reduce_mean(squared(y, z), tf.range(1, tf.rank(z)))
    largest = tf.reduce_max(tf.abs(z), axis=-2)
    return tf.reduce_mean(means**2) + tf.reduce_sum(largest) / number(z)


@tf.custom_gradient
def _dropped_where_large(x):
    """The gradient of the whole tensor is almost dropped unless it is small."""
    return tf.identity(x), lambda d: d * (0.1 + tf.cast(tf.norm(d) < 0.3, d.dtype))


@tf.custom_gradient
def _small_ones_dropped(x):
    return tf.identity(x), lambda d: d * tf.cast(tf.norm(d) > 0.3, d.dtype)


@tf.custom_gradient
def _scaled_by_the_batch(x):
    """Its gradient is divided by the largest value of the tensor's last examples."""
    return tf.identity(x), lambda d: d / (1 + tf.reduce_max(tf.nn.relu(x - 2.0)))


@tf.custom_gradient
def _clipped(x):
    return tf.identity(x), lambda d: tf.clip_by_norm(d, 0.05)


def clipped_beside_draws(y, x):
    """A function draws numbers, which do not count; beside it gradients are clipped."""

    @tf.function
    def drawing(x):
        return x + 0 * tf.random.normal(tf.shape(x), dtype=tf.float64)

    return tf.reduce_mean(squared(y, _clipped(outputs(drawing(x)))))


@tf.RegisterGradient("DividedByTheBatchsNorm")
def _divided(op, d):
    return d / tf.norm(d)


@tf.custom_gradient
def _clipped_at_20(x):
    """Clips at more than random gradients reach."""
    return tf.identity(x), lambda d: tf.clip_by_norm(d, 20.0)


def clipped_in_a_function(y, z):
    clipped = tf.function(lambda z: 1.0 * _clipped_at_20(z))
    return 100 * tf.reduce_sum(squared(y, clipped(z)))


@tf.custom_gradient
def _summed(x):
    """Its gradient is summed over examples with large values and those before."""
    large = tf.nn.relu(x - 2.0)
    return tf.identity(x), lambda d: tf.matmul(
        tf.linalg.diag(tf.ones_like(x[:, 0]))
        + tf.matmul(large, large, transpose_b=True),
        d,
    )


def _large(z, late):
    return z + 3 * tf.cast(tf.sign(late), tf.float64)[:, None]


def summed_where_large(y, z, late):
    return tf.reduce_mean(squared(y, _summed(_large(z, late))))


def _scaled_in_a_branch(y, z, late):
    z = _large(z, late)
    is_training = v1.placeholder_with_default(True, [])
    z = tf.cond(is_training, lambda: 1.0 * _scaled_by_the_batch(z), lambda: z)
    return tf.reduce_mean(squared(y, z))


def _twice(function, z):
    return tf.while_loop(lambda i, _: i < 2, lambda i, z: (i + 1, function(z)), (0, z))[
        1
    ]


def _scaled_in_a_loop(y, z, late):
    z = _twice(lambda z: 1.0 * _scaled_by_the_batch(z), _large(z, late))
    return tf.reduce_mean(squared(y, z))


@tf.custom_gradient
def _halved(x):
    """Its gradient is halved where the example itself is positive."""
    return tf.identity(x), lambda d: d * (1 - 0.5 * tf.cast(x > 0, d.dtype))


def _halved_by_encoder_and_decoder(y, z):
    encoded = _twice(lambda z: tf.tanh(_halved(z)), z)
    return tf.reduce_mean(squared(y, _twice(lambda z: tf.sin(_halved(z)), encoded)))


def _scaled_by_an_encoder(y, z, late):
    encoded = _twice(lambda z: 1.0 * _scaled_by_the_batch(z), _large(z, late))
    return tf.reduce_mean(squared(y, _twice(lambda z: tf.sin(_halved(z)), encoded)))


@tf.RegisterGradient("DividedByTheBatchsLargest")
def _divided_by_the_largest(op, d):
    return d / (1 + tf.reduce_max(tf.nn.relu(op.inputs[0] - 2.0)))


def overridden_where_large(y, z, late):
    name, z = "DividedByTheBatchsLargest", _large(z, late)
    with v1.get_default_graph().gradient_override_map({"Identity": name}):
        z = tf.identity(z)
    return tf.reduce_mean(squared(y, z))


def overridden(y, z):
    graph = v1.get_default_graph()
    with graph.gradient_override_map({"Identity": "DividedByTheBatchsNorm"}):
        z = tf.identity(z)
    return tf.reduce_mean(squared(y, z))


def _through(function):
    return lambda y, z: tf.reduce_mean(squared(y, function(z)))


def adversarial_embeddings(ids, y):
    """FGM: embeddings move along their gradient, of length 1 for the whole batch."""
    embedded = tf.gather(variable("embedding", WORDS, 5), ids)

    def loss(embedded):
        return tf.reduce_mean(squared(y, _last(tf.tanh(tf.reduce_sum(embedded, 1)))))

    slope = tf.gradients(loss(embedded), embedded)[0]
    moved = embedded + tf.stop_gradient(0.5 * slope / (tf.norm(slope) + 1e-8))
    return loss(embedded) + loss(moved)


def other_data(y, z):
    """Examples of another dataset, read in the model_fn: one batch for each update."""
    values = np.random.default_rng(5).normal(size=[40, 4])
    data = tf.data.Dataset.from_tensor_slices(values).batch(4)
    other = v1.data.make_one_shot_iterator(data).get_next()
    return tf.reduce_mean(errors(y, z)) + tf.reduce_mean(outputs(other) ** 2)


def other_data_beside(y, x):
    """The other dataset's mean centers the inputs."""
    values = np.random.default_rng(5).normal(size=[40, 4])
    data = tf.data.Dataset.from_tensor_slices(values).batch(4)
    other = v1.data.make_one_shot_iterator(data).get_next()
    return tf.reduce_mean(errors(y, outputs(x - tf.reduce_mean(other, 0))))


def counting_in_python(y, z):
    """A weight that Python computes, another one at each call."""
    calls = itertools.count(1)
    weight = tf.numpy_function(lambda: 1 / next(calls), [], tf.float64)
    weight.set_shape([])
    return weight * tf.reduce_sum(tf.tanh(errors(y, z) * weight))


def _counter():
    start = tf.ones([], tf.float64)
    return v1.get_variable("counter", initializer=start, trainable=False)


def annealed(y, z):
    """A weight that falls with each run, by a variable that the forward pass counts."""
    weight = 1 / _counter().assign_add(1)
    return tf.reduce_mean(errors(y, z)) + weight * tf.reduce_mean(z**2)


def annealed_inside(y, x):
    """The same, in front of the network."""
    scale = 1 / _counter().assign_add(1)
    return tf.reduce_mean(errors(y, outputs(scale * x)))


def spectral_norm(y, x):
    """The largest singular value, by a vector that each run improves by one step."""
    weights = variable("first", 4, 5)
    start = tf.constant([[0.1, -0.7, 0.2, 0.3, 0.5]], tf.float64)
    vector = v1.get_variable("vector", initializer=start, trainable=False)
    left = unit(tf.matmul(vector.read_value(), weights, transpose_b=True))
    right = unit(tf.matmul(left, weights))
    left, right = tf.stop_gradient(left), tf.stop_gradient(right)
    sigma = tf.matmul(tf.matmul(left, weights), right, transpose_b=True)
    with tf.control_dependencies([vector.assign(right)]):
        normalized = weights / sigma
    return tf.reduce_mean(squared(y, _last(tf.tanh(tf.matmul(x, normalized)))))


def renormalized(y, x):
    """Running statistics, that the batch changes before it reads them."""
    hidden = _first(x)
    start = tf.zeros([5], tf.float64)
    mean = v1.get_variable("running_mean", initializer=start, trainable=False)
    update = mean.assign(0.7 * mean + 0.3 * tf.reduce_mean(hidden, 0))
    return tf.reduce_mean(squared(y, _last(tf.tanh(hidden - tf.stop_gradient(update)))))


def both_ways_of_a_table(ids, y):
    """One table: a row for each word, and a penalty of the batch's distinct rows."""
    table = variable("table", WORDS, 3)
    z = tf.reduce_sum(tf.gather(table, ids), 1) / 4
    rows = tf.gather(table, tf.unique(tf.reshape(ids, [-1])).y)
    return tf.reduce_mean(squared(y, z)) + tf.norm(rows)


def both_ways_of_weights(y, x):
    """The first layer's weights are in the loss of the batch, too."""
    weights = variable("first", 4, 5)
    hidden = tf.tanh(tf.matmul(x, weights))
    gram = tf.matmul(hidden, hidden, transpose_a=True) / number(x)
    product = tf.matmul(weights, weights, transpose_a=True)
    return tf.reduce_mean(squared(gram, product)) + tf.reduce_mean(
        squared(y, _last(hidden))
    )


def entropy_of_neighbours(cls, z):
    """A cumulative maximum and a difference, both along examples, in integers too."""
    seen = tf.cumsum(tf.one_hot(cls, 3, dtype=tf.int32), 0)
    weights = 1 / tf.cast(1 + tf.gather(seen, cls, batch_dims=1), tf.float64)
    return tf.reduce_mean(entropies(cls, z) * weights)


dropped_where_large = _through(_dropped_where_large)
small_ones_dropped = _through(_small_ones_dropped)
scaled_by_the_batch = _through(_scaled_by_the_batch)


def scaled_behind_another(y, z, late):
    """Directly before it is TensorFlow's own operation with such a gradient."""
    return tf.reduce_mean(squared(y, _scaled_by_the_batch(tf.nn.silu(_large(z, late)))))


def as_often_as_any(y, z, late):
    """A weight that is the length of a list of examples."""
    weight = tf.cast(tf.shape(tf.where(late > 0))[0], tf.float64)
    return tf.reduce_mean(squared(y, z * (1 + weight)))


def as_long_as_the_longest(y, seq, late):
    """Tokens up to the length of a mask."""
    longest = tf.shape(tf.sequence_mask(1 + late))[1]
    return tf.reduce_mean(squared(y[:, None], token_outputs(seq[:, :longest])))


WITH_CONTROL_FLOW = {
    "growing_in_a_loop": _growing_in_a_loop,
    "size_in_a_loop": _size_in_a_loop,
    "size_as_rounds": _size_as_rounds,
    "size_in_a_function": _size_in_a_function,
    "rounds_of_the_largest": _rounds_of_the_largest,
    "rounds_of_large_states": _rounds_of_large_states,
    "steps_of_sequences": _steps_of_sequences,
    "centered_in_a_loop": _centered_in_a_loop,
    "carried_on": _carried_on,
    "branch_of_any_later": _branch_of_any_later,
    "in_a_function_with_a_loop": _in_a_function_with_a_loop,
    "scaled_in_a_branch": _scaled_in_a_branch,
    "scaled_in_a_loop": _scaled_in_a_loop,
    "halved_by_encoder_and_decoder": _halved_by_encoder_and_decoder,
    "scaled_by_an_encoder": _scaled_by_an_encoder,
}
HIDDEN = public_functions(__name__)
