"""Networks of scripts without this library, in front of a weighted mean.

The arguments of a network are named after what it reads, as those of the losses in
`tests.helpers.models.losses`; a network returns [B, 3].

B = examples, T = tokens, H = hidden units.
"""

import inspect
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tests.helpers.models.examples import TOKENS, WORDS
from tests.helpers.models.losses import public_functions, variable, words

v1 = tf.compat.v1
_WIDTH, _HEADS = 6, 2


def _dense(name: str, x, units: int, activation=None):
    """A layer over the last axis."""
    weights = variable(f"{name}/kernel", x.shape[-1], units)
    y = tf.tensordot(x, weights, 1) + variable(f"{name}/bias", units)
    return y if activation is None else activation(y)


def _layer(kind: str, *args, **options):
    return getattr(tf.keras.layers, kind)(*args, dtype="float64", **options)


def _output(hidden):
    return _dense("output", hidden, 3)


def dense_of_tensorflow_1(x):
    hidden = v1.layers.dense(x, 5, tf.nn.elu)
    return v1.layers.dense(hidden, 3, name="last")


def best_experts(x):
    """The best two experts of each example."""
    gates, chosen = tf.nn.top_k(tf.nn.softmax(_dense("gate", x, 4)), 2)
    experts = tf.gather(variable("experts", 4, 4, 3), chosen)  # [B, 2, 4, 3]
    return tf.einsum("nk,ni,nkio->no", gates, x, experts)


def generated_weights(x, pair):
    """The weights of a layer are computed from each example."""
    weights = tf.reshape(_dense("generator", pair, 12), [-1, 4, 3])
    return tf.squeeze(tf.matmul(x[:, None], weights), 1)


def conv_of_tensorflow_1(image):
    filters = variable("filters", 3, 3, 2, 4)
    hidden = tf.nn.conv2d(image, filters, 1, "SAME")
    hidden = tf.nn.relu(tf.nn.bias_add(hidden, variable("bias", 4)))
    hidden = tf.nn.max_pool2d(hidden, 2, 2, "VALID")
    return _output(tf.reshape(hidden, [-1, 3 * 3 * 4]))


def flattened_by_shape(image):
    hidden = tf.nn.conv2d(image, variable("filters", 3, 3, 2, 4), 2, "SAME")
    flat = tf.reshape(tf.nn.relu(hidden), [tf.shape(image)[0], 36])
    return _output(flat)


def separable(image):
    hidden = _layer("SeparableConv2D", 4, 3, activation="relu")(image)
    hidden = _layer("AveragePooling2D")(hidden)
    return _output(_layer("GlobalAveragePooling2D")(hidden))


def transposed(image):
    small = _layer("Conv2D", 3, 3, strides=2)(image)
    large = _layer("Conv2DTranspose", 3, 3, strides=2)(tf.nn.relu(small))
    return _output(tf.reduce_max(large, [1, 2]))


def patches(image):
    """A vision transformer's first layer, a class token, and positions."""
    patches = tf.image.extract_patches(
        image, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"
    )
    tokens = _dense("patch", tf.reshape(patches, [-1, 9, 8]), _WIDTH)
    first = tf.broadcast_to(
        variable("class", 1, 1, _WIDTH), [tf.shape(image)[0], 1, _WIDTH]
    )
    tokens = tf.concat([first, tokens], 1) + variable("position", 1, 10, _WIDTH)
    return _output(_attention(tokens)[:, 0])


def rearranged(image):
    hidden = tf.nn.space_to_depth(image, 2)
    hidden = tf.nn.relu(_dense("in", hidden, 4))
    hidden = tf.pad(tf.nn.depth_to_space(hidden, 2), [[0, 0], [1, 1], [1, 1], [0, 0]])
    columns = [column[:, 1:3] for column in tf.unstack(hidden, axis=1)]
    return _output(tf.reshape(tf.stack(columns, 1), [-1, 16]))


def group_norm(image):
    hidden = tf.nn.conv2d(image, variable("filters", 3, 3, 2, 4), 1, "SAME")
    shape = tf.shape(hidden)
    groups = tf.reshape(hidden, [shape[0], shape[1], shape[2], 2, 2])
    mean, variance = tf.nn.moments(groups, [1, 2, 4], keepdims=True)
    groups = (groups - mean) * tf.math.rsqrt(variance + 1e-5)
    hidden = tf.reshape(groups, shape) * variable("scale", 4) + variable("shift", 4)
    return _output(tf.reduce_mean(tf.nn.relu(hidden), [1, 2]))


def batch_norm_of_inference(x):
    hidden = _layer("BatchNormalization")(_dense("in", x, 5), training=False)
    return _output(tf.nn.relu(hidden))


def looked_up(ids, types):
    """Rows of one table, looked up twice, and of a partitioned one."""
    table = variable("table", WORDS, 4)
    both = [tf.nn.embedding_lookup(table, kind) for kind in (ids, types)]
    parts = [variable(f"part_{i}", WORDS // 2, 4) for i in range(2)]
    both.append(tf.nn.embedding_lookup(parts, ids))
    return _output(tf.reduce_sum(tf.concat(both, 2), 1))


def keras_embedding(ids):
    hidden = _layer("Embedding", WORDS, 4, mask_zero=True)(ids)
    return _output(_layer("GlobalAveragePooling1D")(hidden))


def last_word(seq, length):
    """The output at each sequence's last word, by gather_nd."""
    hidden = _dense("in", seq, 5, tf.tanh)
    n = tf.shape(seq)[0]
    return _output(tf.gather_nd(hidden, tf.stack([tf.range(n), length - 1], 1)))


def last_word_of_flat_words(seq, length):
    hidden = tf.reshape(_dense("in", seq, 5, tf.tanh), [-1, 5])
    last = tf.range(tf.shape(seq)[0]) * tf.shape(seq)[1] + length - 1
    return _output(tf.gather(hidden, last))


def reversed(seq, length):
    backwards = tf.reverse_sequence(_dense("in", seq, 5), length, seq_axis=1)
    return _output(tf.reduce_max(tf.cumsum(backwards, 1), 1))


def _attention(hidden):
    query, key, value = tf.split(_dense("qkv", hidden, 3 * _WIDTH), 3, -1)
    scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(_WIDTH)
    return tf.matmul(tf.nn.softmax(scores), value)


def split_heads(seq):
    """tensor2tensor: heads by tf.split and tf.stack, a causal bias, relative ones."""
    hidden = _dense("in", seq, _WIDTH)

    def heads(name):
        parts = tf.split(_dense(name, hidden, _WIDTH), _HEADS, axis=-1)
        return tf.stack(parts, axis=1)  # [B, heads, T, H / heads]

    scores = tf.matmul(heads("query"), heads("key"), transpose_b=True)
    lower = tf.linalg.band_part(tf.ones([TOKENS, TOKENS], tf.float64), -1, 0)
    places = tf.range(TOKENS)
    away = tf.clip_by_value(places[:, None] - places, -2, 2) + 2
    scores += tf.transpose(tf.gather(variable("relative", 5, _HEADS), away), [2, 0, 1])
    mixed = tf.matmul(tf.nn.softmax(scores - 1e9 * (1 - lower)), heads("value"))
    joined = tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, TOKENS, _WIDTH])
    return _output(tf.reduce_mean(joined, 1))


def einsum_heads(seq):
    hidden = _dense("in", seq, _WIDTH)

    def heads(name):
        weights = variable(name, _WIDTH, _HEADS, 3)
        return tf.einsum("btd,dnh->btnh", hidden, weights)

    scores = tf.einsum("btnh,bfnh->bnft", heads("key"), heads("query"))
    mixed = tf.einsum("bnft,btnh->bfnh", tf.nn.softmax(scores), heads("value"))
    joined = tf.einsum("bfnh,nhd->bfd", mixed, variable("join", _HEADS, 3, _WIDTH))
    return _output(joined[:, -1])


def learned_queries(seq):
    """Queries of the model, repeated for each example, attend to the tokens."""
    n = tf.shape(seq)[0]
    queries = tf.tile(variable("queries", 1, 3, _WIDTH), [n, 1, 1])
    scores = tf.matmul(queries, _dense("key", seq, _WIDTH), transpose_b=True)
    read = tf.matmul(tf.nn.softmax(scores), _dense("value", seq, _WIDTH))
    return _output(tf.reshape(read, [n, 3 * _WIDTH]))


def repeated_state(x):
    """An initial state of the model, repeated by multiples of the batch size."""
    n = tf.shape(x)[0]
    state = tf.zeros([n, 5], tf.float64) + variable("state", 5)
    state = tf.concat([state, tf.fill([n, 1], tf.constant(2.0, tf.float64))], 1)
    for _ in range(2):
        state = tf.tanh(_dense("step", tf.concat([x, state], 1), 6))
    return _output(state)


def time_major(seq):
    """[T, B, H] throughout; the last layer is over [T x B, H]."""
    hidden = _dense("in", tf.transpose(seq, [1, 0, 2]), 5, tf.tanh)
    flat = tf.reshape(hidden, [-1, 5])
    flat = tf.matmul(flat, variable("second", 5, 5))
    hidden = tf.reshape(flat, [TOKENS, -1, 5])
    return _output(tf.reduce_sum(tf.nn.softmax(hidden, 0) * hidden, 0))


def graph_convolution(seq, x):
    """A graph for each example, its adjacency computed from distances."""
    distances = tf.reduce_sum((seq[:, :, None] - seq[:, None]) ** 2, -1)
    adjacency = tf.exp(-distances)
    adjacency /= tf.reduce_sum(adjacency, -1, keepdims=True)
    hidden = tf.nn.relu(tf.matmul(adjacency, _dense("in", seq, 5)))
    return _output(tf.concat([tf.reduce_mean(hidden, 1), x], 1))


def capsules(x):
    capsules = tf.reshape(_dense("in", x, 12), [-1, 4, 3])
    votes = tf.einsum("nid,ijdk->nijk", capsules, variable("votes", 4, 2, 3, 3))
    routes = tf.zeros([tf.shape(x)[0], 4, 2], tf.float64)
    for _ in range(2):
        weights = tf.nn.softmax(routes, -1)[..., None]
        total = tf.reduce_sum(weights * votes, 1)
        squares = tf.reduce_sum(total**2, -1, keepdims=True)
        outputs = total * tf.sqrt(squares) / (1 + squares)
        routes += tf.reduce_sum(votes * outputs[:, None], -1)
    return _output(tf.reshape(outputs, [-1, 6]))


def solved(x, pair):
    """A ridge regression for each example, differentiated through its solution."""
    hidden = tf.reshape(_dense("in", tf.concat([x, pair], 1), 12), [-1, 4, 3])
    gram = tf.matmul(hidden, hidden, transpose_a=True) + tf.eye(3, dtype=tf.float64)
    right = tf.matmul(hidden, x[:, :, None], transpose_a=True)
    return _output(tf.linalg.solve(gram, right)[:, :, 0])


def squeezed(x):
    """tf.squeeze without an axis."""
    column = tf.squeeze(_dense("in", x, 1, tf.tanh)[:, :, None])
    return tf.expand_dims(column, -1) * variable("row", 3)


def _contrib_layer_norm(hidden, name):
    """tf.contrib.layers: moments over the last axis, tf.nn.batch_normalization."""
    width = hidden.shape[-1]
    mean, variance = tf.nn.moments(hidden, [-1], keepdims=True)
    return tf.nn.batch_normalization(
        hidden,
        mean,
        variance,
        variable(f"{name}/beta", width),
        variable(f"{name}/gamma", width),
        1e-12,
    )


def bert(ids, types, length):
    """google-research/bert: its shapes, from one-hot types to the pooled output."""
    batch, seq_length = tf.shape(ids)[0], TOKENS
    flat = tf.reshape(tf.expand_dims(ids, -1), [-1])
    hidden = tf.gather(variable("word", WORDS, _WIDTH), flat)
    hidden = tf.reshape(hidden, [batch, seq_length, _WIDTH])
    flat_types = tf.one_hot(tf.reshape(types, [-1]), 2, dtype=tf.float64)
    of_types = tf.matmul(flat_types, variable("type", 2, _WIDTH))
    hidden += tf.reshape(of_types, [batch, seq_length, _WIDTH])
    places = tf.slice(variable("position", 16, _WIDTH), [0, 0], [seq_length, -1])
    hidden += tf.reshape(places, [1, seq_length, _WIDTH])
    hidden = _contrib_layer_norm(hidden, "embeddings/norm")
    to_mask = tf.cast(tf.reshape(words(length), [batch, 1, seq_length]), tf.float64)
    mask = tf.ones([batch, seq_length, 1], tf.float64) * to_mask
    previous = tf.reshape(hidden, [-1, _WIDTH])

    def heads(name, flat):
        four = tf.reshape(
            _dense(name, flat, _WIDTH), [batch, seq_length, _HEADS, _WIDTH // _HEADS]
        )
        return tf.transpose(four, [0, 2, 1, 3])

    for layer in range(2):
        with v1.variable_scope(f"layer_{layer}"):
            scores = tf.matmul(
                heads("query", previous), heads("key", previous), transpose_b=True
            )
            scores = tf.multiply(scores, 1 / math.sqrt(_WIDTH / _HEADS))
            scores += (1 - tf.expand_dims(mask, [1])) * -10000.0
            context = tf.matmul(tf.nn.softmax(scores), heads("value", previous))
            context = tf.transpose(context, [0, 2, 1, 3])
            context = tf.reshape(context, [batch * seq_length, _WIDTH])
            attended = _dense("output", context, _WIDTH)
            attended = _contrib_layer_norm(attended + previous, "attention/norm")
            inner = _dense("intermediate", attended, 12, tf.nn.gelu)
            inner = _dense("projection", inner, _WIDTH)
            previous = _contrib_layer_norm(inner + attended, "norm")
    last = tf.reshape(previous, [batch, seq_length, _WIDTH])
    first = tf.squeeze(last[:, 0:1, :], axis=1)
    return _output(_dense("pooler", first, _WIDTH, tf.tanh))


def _keras_rnn(kind, **options):
    def network(seq):
        # Loops of TensorFlow 1 fail in Keras where only the last output is returned.
        return _output(_layer(kind, 4, return_sequences=True, **options)(seq)[:, -1])

    return network


def _keras_masked_lstm(ids):
    hidden = _layer("Embedding", WORDS, 4, mask_zero=True)(ids)
    return _output(_layer("LSTM", 4, return_sequences=True)(hidden)[:, -1])


def _bidirectional(seq):
    layer = tf.keras.layers.Bidirectional(
        _layer("GRU", 3, return_sequences=True), dtype="float64"
    )
    return _output(tf.reduce_max(layer(seq), 1))


def _dynamic_rnn(seq, length):
    cell = v1.nn.rnn_cell.BasicLSTMCell(4, dtype=tf.float64)
    _, (_, state) = v1.nn.dynamic_rnn(cell, seq, length, dtype=tf.float64)
    return _output(state)


def _loop_with_an_array(seq):
    """A recurrent layer by hand: a while_loop that writes into a TensorArray."""
    written = tf.TensorArray(tf.float64, tf.shape(seq)[1])
    start = tf.zeros([tf.shape(seq)[0], 4], tf.float64)

    def body(t, state, written):
        state = tf.tanh(_dense("step", tf.concat([seq[:, t], state], 1), 4))
        return t + 1, state, written.write(t, state)

    *_, written = tf.while_loop(
        lambda t, *_: t < tf.shape(seq)[1], body, (0, start, written)
    )
    return _output(tf.reduce_mean(tf.transpose(written.stack(), [1, 0, 2]), 1))


def _mapped(image):
    """Each image by itself, in a loop."""
    centered = tf.map_fn(lambda row: row - tf.reduce_mean(row), image)
    return _output(tf.reshape(tf.nn.relu(_dense("in", centered, 2)), [-1, 72]))


# Loops and branches, of both kinds of control flow.
WITH_CONTROL_FLOW = {
    "keras_lstm": _keras_rnn("LSTM"),
    "keras_masked_lstm": _keras_masked_lstm,
    "bidirectional": _bidirectional,
    "dynamic_rnn": _dynamic_rnn,
    "loop_with_an_array": _loop_with_an_array,
    "mapped": _mapped,
}


def _keras_layer_norm(seq):
    """Keras computes it by a fused batch normalization, of examples as channels."""
    hidden = tf.keras.layers.Dense(5)(tf.cast(seq, tf.float32))
    hidden = tf.keras.layers.LayerNormalization()(hidden)
    return tf.keras.layers.Dense(3)(tf.reduce_mean(hidden, 1))


def _columns():
    column = tf.feature_column
    number = column.numeric_column("x", [4])
    first = column.numeric_column("length")
    word = column.categorical_column_with_hash_bucket("word", 7)
    identity = column.categorical_column_with_identity("cls", 3)
    return number, column.bucketized_column(first, [2, 4]), word, identity


def _feature_columns(x, length, word, cls):
    number, bucket, words_, identity = _columns()
    columns = [number, bucket, tf.feature_column.embedding_column(words_, 3)]
    columns.append(tf.feature_column.indicator_column(identity))
    features = {"x": x, "length": length, "word": word, "cls": cls}
    hidden = v1.feature_column.input_layer(features, columns)
    return v1.layers.dense(hidden, 3)


def _linear_model(x, length, word, cls):
    number, bucket, words_, identity = _columns()
    crossed = tf.feature_column.crossed_column(["word", bucket], 9)
    features = {"x": x, "length": length, "word": word, "cls": cls}
    return v1.feature_column.linear_model(
        features, [number, bucket, words_, identity, crossed], units=3
    )


def _vocabulary(word):
    words = tf.lookup.KeyValueTensorInitializer(
        ["word 1", "word 3", "word 5"], tf.range(3, dtype=tf.int64)
    )
    table = tf.lookup.StaticVocabularyTable(words, 2)
    hidden = tf.keras.layers.Embedding(5, 4)(table.lookup(word))
    return tf.keras.layers.Dense(3)(hidden)


def _single_lstm(seq):
    """Keras's LSTM in float32 and without a mask, as it is by default."""
    hidden = tf.keras.layers.LSTM(4)(tf.cast(seq, tf.float32))
    return tf.keras.layers.Dense(3)(hidden)


# In float32.
SINGLE = {
    "keras_layer_norm": _keras_layer_norm,
    "feature_columns": _feature_columns,
    "linear_model": _linear_model,
    "vocabulary": _vocabulary,
    "keras_lstm": _single_lstm,
}


def _half(dtype):
    """Variables in float32, layers in half precision."""

    def network(x):
        hidden = tf.cast(x, dtype)
        for i, width in enumerate([4, 5]):
            weights = variable(f"kernel_{i}", width, 5, dtype=np.float32)
            hidden = tf.tanh(tf.matmul(hidden, tf.cast(weights, dtype)))
        last = variable("last", 5, 3, dtype=np.float32)
        return tf.matmul(tf.cast(hidden, tf.float32), last)

    return network


HALF = {"bfloat16": _half(tf.bfloat16), "float16": _half(tf.float16)}


def _keras_batch_norm(x):
    hidden = _layer("BatchNormalization", momentum=0.9)(_dense("in", x, 5), True)
    return _output(tf.nn.relu(hidden))


def _v1_batch_norm(image):
    """Fused, in float32."""
    hidden = v1.layers.conv2d(tf.cast(image, tf.float32), 4, 3, use_bias=False)
    hidden = v1.layers.batch_normalization(hidden, training=True)
    return v1.layers.dense(tf.reduce_mean(tf.nn.relu(hidden), [1, 2]), 3)


def _joined_towers(x, pair):
    """Both inputs of a siamese network as one batch of 2 x B."""
    both = _dense("tower", tf.concat([x, pair], 0), 5, tf.tanh)
    first, second = tf.split(both, 2)
    return _output(first * second)


def _dispatched(x):
    """Mixture of experts: each gets the examples that chose it."""
    chosen = tf.argmax(_dense("gate", x, 2), 1, tf.int32)
    parts = tf.dynamic_partition(x, chosen, 2)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), chosen, 2)
    outputs = [_dense(f"expert_{i}", part, 3) for i, part in enumerate(parts)]
    return tf.dynamic_stitch(places, outputs)


def _cut_to_the_longest(seq, length):
    longest = tf.reduce_max(length)
    hidden = _dense("in", seq[:, :longest], 5, tf.tanh)
    mask = tf.sequence_mask(length, longest, tf.float64)[:, :, None]
    return _output(tf.reduce_sum(hidden * mask, 1))


def _without_padding(seq, length):
    """Only the words go through the network; they are scattered back."""
    places = tf.where(words(length) > 0)
    hidden = _dense("in", tf.gather_nd(seq, places), 5, tf.tanh)
    shape = tf.cast(tf.concat([tf.shape(seq)[:2], [5]], 0), tf.int64)
    return _output(tf.reduce_sum(tf.scatter_nd(places, hidden, shape), 1))


def ragged_words(ragged):
    hidden = _dense("in", ragged.flat_values, 5, tf.tanh)
    return _output(tf.reduce_mean(ragged.with_flat_values(hidden), 1))


def _sparse_words(sparse):
    ids = tf.SparseTensor(
        sparse.indices, tf.range(tf.size(sparse.values)) % WORDS, sparse.dense_shape
    )
    table = variable("table", WORDS, 4)
    return _output(v1.nn.embedding_lookup_sparse(table, ids, sparse, "mean"))


def _attention_between_examples(x):
    hidden = _dense("in", x, _WIDTH)
    return _output(_attention(hidden[None])[0])


def _sharing_axis(x):
    """Halves of a batch, side by side as columns."""
    n = 2 * (tf.shape(x)[0] // 2)
    halves = tf.reshape(x[:n], [2, -1, 4])
    both = tf.concat(tf.unstack(halves), 1)  # [B / 2, 8]
    mixed = tf.tile(_dense("in", both, 5, tf.tanh), [2, 1])
    rest = tf.zeros([tf.shape(x)[0] - n, 5], tf.float64)
    return _output(tf.concat([mixed, rest], 0))


# The network itself, or a layer of it, needs several examples at once: exact, or
# refused; never another update. Averages of batch normalization are not compared.
EXACT_OR_REFUSED = {
    "keras_batch_norm": _keras_batch_norm,
    "batch_norm_of_tensorflow_1": _v1_batch_norm,
    "joined_towers": _joined_towers,
    "dispatched": _dispatched,
    "cut_to_the_longest": _cut_to_the_longest,
    "without_padding": _without_padding,
    "sparse_words": _sparse_words,
    "attention_between_examples": _attention_between_examples,
    "sharing_axis": _sharing_axis,
}


def _weighted(network: Callable) -> Callable:
    """Returns a network's loss, the mean of squares by the examples' weights."""
    names = [*inspect.signature(network).parameters]

    def loss(**features):
        predicted = network(**{name: features[name] for name in names})
        y, w = features["y"], features["w"]
        losses = tf.math.squared_difference(tf.cast(predicted, y.dtype), y)
        return tf.reduce_sum(losses * w[:, None]) / tf.reduce_sum(w)

    read = dict.fromkeys([*names, "y", "w"])
    kind = inspect.Parameter.KEYWORD_ONLY
    loss.__signature__ = inspect.Signature(inspect.Parameter(n, kind) for n in read)
    return loss


NETWORKS = public_functions(__name__)
for table in (NETWORKS, WITH_CONTROL_FLOW, SINGLE, HALF, EXACT_OR_REFUSED):
    table |= {name: _weighted(network) for name, network in table.items()}
