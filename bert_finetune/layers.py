"""Building blocks of the encoder: packing, dense layer, layer normalization, GELU.

Each makes few passes over memory and keeps the numerics of google-research/bert, apart
from the activation "gelu" (see `activation`).

B = micro-batch, T = tokens with padding, P = tokens without padding (B * T where shapes
are fixed), H = hidden, N = heads, D = H / N.
"""

import math
import zlib
from collections.abc import Callable

import tensorflow as tf

from estimator_accum import micro_batch_seed

_SQRT_HALF = math.sqrt(0.5)
# Names of the gradients that are written out here.
_DENSE, _LAYER_NORM, _GELU = "BertDense", "BertLayerNorm", "BertGelu"
_WEIGHTED_SUM = "BertWeightedSum"
_LEVELS = 2**16  # of a random number of 16 bits
_DENSITY_AT_ZERO = 1.0 / math.sqrt(2.0 * math.pi)  # of the normal distribution


class TokenPacking:
    """Packs a padded batch into its real tokens, and back.

    `unpack(pack(x)) = x` at real tokens, 0 at padding

    Layers that treat each token independently run on packed tokens: in a batch of 8
    CoLA sentences, padded to the longest, 38 % is padding.

    Args:
        input_mask: integer Tensor [B, T], 0 at padding.
        heads: Number of attention heads N.
    """

    def __init__(self, input_mask: tf.Tensor, heads: int):
        is_token = tf.not_equal(input_mask, 0)
        self._positions = tf.cast(tf.where(is_token), tf.int32)  # [P, 2]
        self._padded_shape = tf.shape(input_mask)
        self._heads = heads
        of_heads = tf.where(tf.tile(is_token[:, :, tf.newaxis], [1, 1, heads]))
        of_heads = tf.gather(of_heads, [0, 2, 1], axis=1)  # from B, T, N
        self._head_positions = tf.cast(of_heads, tf.int32)  # [P * N, 3]

    def pack(self, padded: tf.Tensor) -> tf.Tensor:
        """Returns the real tokens of a Tensor [B, T, ...] as [P, ...]."""
        return tf.gather_nd(padded, self._positions)

    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Returns a Tensor [P, H] as [B, T, H], zeros at padding."""
        width = packed.shape[-1]
        shape = tf.concat([self._padded_shape, [width]], axis=0)
        return tf.scatter_nd(self._positions, packed, shape)

    def split_heads(self, packed: tf.Tensor) -> tf.Tensor:
        """Returns a Tensor [P, H] as [B, N, T, D], zeros at padding.

        One pass, where unpacking and transposing would be two.
        """
        depth = packed.shape[-1] // self._heads
        rows, tokens = tf.unstack(self._padded_shape)
        shape = tf.stack([rows, self._heads, tokens, depth])
        pieces = tf.reshape(packed, [-1, depth])
        return tf.scatter_nd(self._head_positions, pieces, shape)

    def join_heads(self, split: tf.Tensor) -> tf.Tensor:
        """Returns a Tensor [B, N, T, D] as [P, H]."""
        pieces = tf.gather_nd(split, self._head_positions)
        return tf.reshape(pieces, [-1, self._heads * split.shape[-1]])


class FixedShape:
    """A padded batch as one row per token, padding included: shapes never change.

    Args:
        input_mask: integer Tensor [B, T].
        heads: Number of attention heads N.
    """

    def __init__(self, input_mask: tf.Tensor, heads: int):
        self._padded_shape = tf.shape(input_mask)
        self._heads = heads

    def pack(self, padded: tf.Tensor) -> tf.Tensor:
        """Returns a Tensor [B, T, ...] as [B * T, ...]."""
        rest = padded.shape.as_list()[2:]
        return tf.reshape(padded, [-1, *rest])

    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Returns a Tensor [B * T, H] as [B, T, H]."""
        shape = tf.concat([self._padded_shape, [packed.shape[-1]]], axis=0)
        return tf.reshape(packed, shape)

    def split_heads(self, packed: tf.Tensor) -> tf.Tensor:
        """Returns a Tensor [B * T, H] as [B, N, T, D]."""
        depth = packed.shape[-1] // self._heads
        shape = tf.concat([self._padded_shape, [self._heads, depth]], axis=0)
        return tf.transpose(tf.reshape(packed, shape), [0, 2, 1, 3])

    def join_heads(self, split: tf.Tensor) -> tf.Tensor:
        """Returns a Tensor [B, N, T, D] as [B * T, H]."""
        width = self._heads * split.shape[-1]
        return tf.reshape(tf.transpose(split, [0, 2, 1, 3]), [-1, width])


def first_weights(name: str, deviation: float) -> Callable:
    """Returns a variable's initializer: a normal distribution, truncated at 2 deviations.

    The values depend only on the graph's seed and the variable's name: a run starts
    from the same weights whatever else is in the graph, and under any strategy.

    Args:
        name: Name of the variable in the current variable scope.
        deviation: Standard deviation.
    """
    scope = tf.compat.v1.get_variable_scope().name
    seed = zlib.crc32(f"{scope}/{name}".encode()) % 2**31
    return tf.compat.v1.truncated_normal_initializer(stddev=deviation, seed=seed)


def dense(
    x: tf.Tensor, units: int, name: str, *, initializer_range: float, is_training: bool
) -> tf.Tensor:
    """Applies a dense layer: `y = x @ kernel + bias`.

    Args:
        x: float Tensor [rows, inputs]; inputs must be static.
        units: Width of the result.
        name: Variable scope.
        initializer_range: Standard deviation of the first kernel; the bias starts at 0.
        is_training: Whether gradients will be needed; if so, they are those written
            below, because oneDNN computes that of `x` faster than the derived one.

    Creates: `name/kernel` [inputs, units], `name/bias` [units], float32.

    Returns: float Tensor [rows, units].
    """
    with tf.compat.v1.variable_scope(name):
        kernel = tf.compat.v1.get_variable(
            "kernel",
            [x.shape[-1], units],
            initializer=first_weights("kernel", initializer_range),
        )
        bias = tf.compat.v1.get_variable(
            "bias", [units], initializer=tf.compat.v1.zeros_initializer()
        )
    kernel, bias = tf.identity(kernel), tf.identity(bias)
    y = tf.nn.bias_add(tf.matmul(x, kernel), bias)
    return _with_gradient(_DENSE, y, x, kernel, bias) if is_training else y


@tf.RegisterGradient(_DENSE)
def _dense_gradient(op: tf.Operation, dy: tf.Tensor, *_):
    _, x, kernel, _ = op.inputs
    # If the second factor is transposed, oneDNN has a slow kernel for matrices and a
    # fast one for batches of them, here a batch of one.
    batches = tf.expand_dims(dy, 0), tf.expand_dims(kernel, 0)
    d_kernel = tf.matmul(x, dy, transpose_a=True)
    with tf.control_dependencies([d_kernel]):  # `x` is freed before `dx` is there
        dx = tf.squeeze(tf.matmul(*batches, transpose_b=True), 0)
    d_bias = tf.raw_ops.BiasAddGrad(out_backprop=dy)
    return None, dx, d_kernel, d_bias


def weighted_sum(
    weights: tf.Tensor, values: tf.Tensor, *, is_training: bool
) -> tf.Tensor:
    """Applies attention: `y = weights @ values`.

    Args:
        weights: float Tensor [B, N, R, T].
        values: float Tensor [B, N, T, D].
        is_training: Whether gradients will be needed; if so, the one of `values` comes
            first, so that the weights, the largest tensor, are freed early.

    Returns: float Tensor [B, N, R, D].
    """
    y = tf.matmul(weights, values)
    return _with_gradient(_WEIGHTED_SUM, y, weights, values) if is_training else y


@tf.RegisterGradient(_WEIGHTED_SUM)
def _weighted_sum_gradient(op: tf.Operation, dy: tf.Tensor, *_):
    _, weights, values = op.inputs
    d_values = tf.matmul(weights, dy, transpose_a=True)
    with tf.control_dependencies([d_values]):
        return None, tf.matmul(dy, values, transpose_b=True), d_values


def layer_norm(x: tf.Tensor, epsilon: float, *, is_training: bool) -> tf.Tensor:
    """Applies layer normalization over the last axis.

        y = (x - mean) / sqrt(variance + epsilon) * gamma + beta

    Args:
        x: float Tensor [rows, H].
        epsilon: Added to the variance, > 0.
        is_training: Whether gradients will be needed; if so, they are those written
            below, which take half the memory passes of the derived ones.

    Creates: `LayerNorm/gamma` [H] (ones), `LayerNorm/beta` [H] (zeros), float32.

    Returns: float Tensor [rows, H].
    """
    with tf.compat.v1.variable_scope("LayerNorm"):
        gamma = tf.compat.v1.get_variable(
            "gamma", [x.shape[-1]], initializer=tf.compat.v1.ones_initializer()
        )
        beta = tf.compat.v1.get_variable(
            "beta", [x.shape[-1]], initializer=tf.compat.v1.zeros_initializer()
        )
    gamma, beta = tf.identity(gamma), tf.identity(beta)
    standard, inverse_deviation = _standardize(x, epsilon)
    y = standard * gamma + beta
    if not is_training:
        return y
    needed = x, gamma, beta, standard, inverse_deviation
    return _with_gradient(_LAYER_NORM, y, *needed)


@tf.RegisterGradient(_LAYER_NORM)
def _layer_norm_gradient(op: tf.Operation, dy: tf.Tensor, *_):
    _, _, gamma, _, standard, inverse_deviation = op.inputs
    d = dy * gamma
    along = tf.reduce_mean(d * standard, axis=-1, keepdims=True)
    d -= tf.reduce_mean(d, axis=-1, keepdims=True)
    dx = inverse_deviation * (d - standard * along)
    d_gamma, d_beta = tf.reduce_sum(dy * standard, 0), tf.reduce_sum(dy, 0)
    return None, dx, d_gamma, d_beta, None, None


def dropout(x: tf.Tensor, rate: float) -> tf.Tensor:
    """Applies dropout: `x / (1 - rate)` with probability `1 - rate`, else 0.

    The mask depends on the name scope and on `micro_batch_seed` alone, so it is the
    same if the micro-batch is computed again, or if the run is resumed there.

    Args:
        x: float Tensor.
        rate: 0 <= rate < 1, rounded to 1 / 65,536.
    """
    levels = round(rate * _LEVELS)
    if not levels:
        return x
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    # Not the product of the shape, which TensorFlow computes from `x` itself, late: a
    # recomputed layer would have to keep it.
    shape, size = tf.shape(x), tf.size(x)
    # 16 bits an element: drawing is what dropout takes most of its time for.
    drawn = tf.random.stateless_uniform(
        [(size + 3) // 4],
        micro_batch_seed(f"{scope}/dropout"),
        minval=None,
        maxval=None,
        dtype=tf.uint64,
        alg="philox",  # not "auto_select", which differs by the kind of device
    )
    drawn = tf.reshape(tf.bitcast(drawn, tf.int16), [-1])[:size]
    is_kept = tf.reshape(drawn, shape) >= tf.constant(levels - _LEVELS // 2, tf.int16)
    return tf.where(is_kept, x * (_LEVELS / (_LEVELS - levels)), 0.0)


def activation(name: str, *, is_training: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the activation function with a name from `ACTIVATIONS`.

    `gelu` is `x * Phi(x)` with the exact normal distribution, as when BERT was
    published and as in Hugging Face's BERT. The tanh approximation that later versions
    of google-research/bert compute under the same name is `gelu_new`; the two differ
    by at most 5e-4, the pooled output of an encoder by up to about 1e-3.
    """
    if name == "gelu" and is_training:
        return _gelu_with_gradient
    return ACTIVATIONS[name]


def _with_gradient(name: str, y: tf.Tensor, *needed: tf.Tensor) -> tf.Tensor:
    """Returns `y`, with a registered gradient instead of the derived one.

    `tf.custom_gradient` would register a function for each call, which keeps the graph
    for the rest of the process; training in parts makes many graphs.

    Args:
        name: Name of the gradient, a function of the operation, whose inputs are `y`
            and `needed`, and of the gradient of `y`. It returns one for each input.
        y: The result.
        needed: Tensors that get a gradient, or that the gradient is computed from.
    """
    graph = tf.compat.v1.get_default_graph()
    with graph.gradient_override_map({"IdentityN": name}):
        return tf.identity_n([y, *needed])[0]


def _standardize(x: tf.Tensor, epsilon: float) -> tuple[tf.Tensor, tf.Tensor]:
    centered = x - tf.reduce_mean(x, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centered), axis=-1, keepdims=True)
    inverse_deviation = tf.math.rsqrt(variance + epsilon)
    return centered * inverse_deviation, inverse_deviation


def _gelu(x: tf.Tensor) -> tf.Tensor:
    return 0.5 * x * (1.0 + tf.math.erf(x * _SQRT_HALF))


def _gelu_with_gradient(x: tf.Tensor) -> tf.Tensor:
    # 0.5 * (1 + erf), in a form that TensorFlow does not fuse with the dense layer: it
    # would where no backward pass reads `distribution`, and round differently there.
    distribution = 0.5 * tf.math.erf(x * _SQRT_HALF) + 0.5
    return _with_gradient(_GELU, x * distribution, x, distribution)


@tf.RegisterGradient(_GELU)
def _gelu_gradient(op: tf.Operation, dy: tf.Tensor, *_):
    _, x, distribution = op.inputs
    density = _DENSITY_AT_ZERO * tf.exp(-0.5 * tf.square(x))
    return None, dy * (distribution + x * density), None


def _gelu_new(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.gelu(x, approximate=True)


ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_new": _gelu_new,
    "relu": tf.nn.relu,
    "tanh": tf.math.tanh,
    "linear": tf.identity,
}
