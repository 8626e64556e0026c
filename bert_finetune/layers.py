"""The building blocks of the encoder: packing, dense, layer norm, GELU.

Each is written for few passes over memory, the numerics being those of
google-research/bert.

B = micro-batch, T = tokens with padding, P = tokens without padding (B * T where shapes
are fixed), H = hidden.
"""

import math
import zlib
from collections.abc import Callable

import tensorflow as tf

_SQRT_HALF = math.sqrt(0.5)
_DENSITY_AT_ZERO = 1.0 / math.sqrt(2.0 * math.pi)  # of the standard normal


class TokenPacking:
    """Packs a padded batch into its real tokens, and back.

    `unpack(pack(x)) = x` at real tokens, 0 at padding

    Layers that treat every token alone run on packed tokens: of 8 sentences of CoLA,
    cut to the longest, 38 % is padding.

    Args:
        input_mask: integer Tensor [B, T], 0 at padding.
    """

    def __init__(self, input_mask: tf.Tensor):
        self._positions = tf.cast(tf.where(tf.not_equal(input_mask, 0)), tf.int32)
        self._padded_shape = tf.shape(input_mask)

    def pack(self, padded: tf.Tensor) -> tf.Tensor:
        """Returns the real tokens of a Tensor [B, T, ...] as [P, ...]."""
        return tf.gather_nd(padded, self._positions)

    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Returns a Tensor [P, H] as [B, T, H], zeros at padding."""
        width = packed.shape[-1]
        shape = tf.concat([self._padded_shape, [width]], axis=0)
        return tf.scatter_nd(self._positions, packed, shape)


class FixedShape:
    """A padded batch as one row a token, padding included: shapes never change.

    Args:
        input_mask: integer Tensor [B, T].
    """

    def __init__(self, input_mask: tf.Tensor):
        self._padded_shape = tf.shape(input_mask)

    def pack(self, padded: tf.Tensor) -> tf.Tensor:
        """Returns a Tensor [B, T, ...] as [B * T, ...]."""
        rest = padded.shape.as_list()[2:]
        return tf.reshape(padded, [-1, *rest])

    def unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Returns a Tensor [B * T, H] as [B, T, H]."""
        shape = tf.concat([self._padded_shape, [packed.shape[-1]]], axis=0)
        return tf.reshape(packed, shape)


def first_weights(name: str, deviation: float) -> Callable:
    """Returns the initializer of a variable: a normal distribution, cut at 2 deviations.

    The numbers follow from the graph's seed and the variable's name alone: whatever
    else is in the graph, under any strategy, a run starts from the same weights.

    Args:
        name: Of the variable in the current variable scope.
        deviation: Standard deviation.
    """
    scope = tf.compat.v1.get_variable_scope().name
    seed = zlib.crc32(f"{scope}/{name}".encode()) % 2**31
    return tf.compat.v1.truncated_normal_initializer(stddev=deviation, seed=seed)


def dense(
    x: tf.Tensor, units: int, name: str, *, initializer_range: float
) -> tf.Tensor:
    """`y = x @ kernel + bias`.

    Args:
        x: float Tensor [rows, inputs]; inputs must be static.
        units: Width of the result.
        name: Variable scope.
        initializer_range: Standard deviation of the first kernel; the bias starts at 0.

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
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)


def layer_norm(x: tf.Tensor, epsilon: float, *, is_training: bool) -> tf.Tensor:
    """`y = (x - mean) / sqrt(variance + epsilon) * gamma + beta` over the last axis.

    Args:
        x: float Tensor [rows, H].
        epsilon: > 0.
        is_training: Whether gradients will be asked for: then they are the ones written
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
    if not is_training:
        return _standardize(x, epsilon)[0] * gamma + beta

    @tf.custom_gradient
    def scaled(x, gamma, beta):
        standard, inverse_deviation = _standardize(x, epsilon)

        def gradient(dy):
            d = dy * gamma
            along = tf.reduce_mean(d * standard, axis=-1, keepdims=True)
            d -= tf.reduce_mean(d, axis=-1, keepdims=True)
            dx = inverse_deviation * (d - standard * along)
            return dx, tf.reduce_sum(dy * standard, 0), tf.reduce_sum(dy, 0)

        return standard * gamma + beta, gradient

    # custom_gradient wants tensors: it would treat variables as captured state.
    return scaled(x, tf.identity(gamma), tf.identity(beta))


def activation(name: str, *, is_training: bool) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the function of one of `ACTIVATIONS`.

    `gelu` is `x * Phi(x)` with the exact normal distribution, as when BERT was
    published and as in Hugging Face's BERT. The tanh approximation that later versions
    of google-research/bert compute under the same name is `gelu_new`; the two differ
    by at most 5e-4.
    """
    if name == "gelu" and is_training:
        return _gelu_with_gradient
    return ACTIVATIONS[name]


def _standardize(x: tf.Tensor, epsilon: float) -> tuple[tf.Tensor, tf.Tensor]:
    centered = x - tf.reduce_mean(x, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(centered), axis=-1, keepdims=True)
    inverse_deviation = tf.math.rsqrt(variance + epsilon)
    return centered * inverse_deviation, inverse_deviation


def _gelu(x: tf.Tensor) -> tf.Tensor:
    return 0.5 * x * (1.0 + tf.math.erf(x * _SQRT_HALF))


@tf.custom_gradient
def _gelu_with_gradient(x: tf.Tensor):
    distribution = 0.5 * (1.0 + tf.math.erf(x * _SQRT_HALF))

    def gradient(dy):
        density = _DENSITY_AT_ZERO * tf.exp(-0.5 * tf.square(x))
        return dy * (distribution + x * density)

    return x * distribution, gradient


def _gelu_new(x: tf.Tensor) -> tf.Tensor:
    return tf.nn.gelu(x, approximate=True)


ACTIVATIONS = {
    "gelu": _gelu,
    "gelu_new": _gelu_new,
    "relu": tf.nn.relu,
    "tanh": tf.math.tanh,
    "linear": tf.identity,
}
