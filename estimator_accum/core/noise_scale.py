"""Gradient noise scale: an estimate of the largest batch that is still useful.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1
(https://arxiv.org/abs/1812.06162). A batch far below it wastes updates, one far above
it wastes examples. Their estimate needs batches of two sizes, and accumulation has
both: the micro-batches and the window. For n micro-batches of weight w_i with mean
gradients g_i, W = sum w_i and the window's mean gradient g:

    E |g_i|^2 = |G|^2 + S / w_i          E |g|^2 = |G|^2 + S / W
    S     = (sum w_i |g_i|^2 / W - |g|^2) * W / (n - 1)      the noise
    |G|^2 = |g|^2 - S / W                                    the signal
    noise scale = mean of S / mean of |G|^2                  [unit of the weights]

If weights are numbers of examples, it is a batch size in examples; without weights, in
micro-batches.
"""

import tensorflow as tf

from estimator_accum.graph.variables import create_shared_scalar

# Share of one update in the running means, which so cover about a hundred updates.
_SHARE = 0.01


def create_noise_scale(name: str) -> list[tf.Variable]:
    """Creates the running means `<name>/noise` and `<name>/signal`, float32 scalars.

    Only their quotient is meaningful.
    """
    return [
        create_shared_scalar(f"{name}/{part}", tf.float32)
        for part in ("noise", "signal")
    ]


def update_noise_scale(
    means: list[tf.Variable],
    squares: tf.Tensor,
    count: tf.Tensor,
    weight: tf.Tensor,
    norm: tf.Tensor,
) -> tf.Tensor:
    """Adds one window to the means; returns the noise scale so far.

    Args:
        means: Those of noise and signal.
        squares: Sum of w_i |g_i|^2 over micro-batches and replicas.
        count: Number of micro-batches in that sum; a window of one changes nothing.
        weight: Sum of their weights.
        norm: Norm of the window's mean gradient.
    """
    weight, norm, squares, count = (
        tf.cast(value, tf.float32) for value in (weight, norm, squares, count)
    )
    mean_square = tf.math.divide_no_nan(squares, weight)
    noise = (mean_square - norm**2) * tf.math.divide_no_nan(weight, count - 1.0)
    signal = norm**2 - tf.math.divide_no_nan(noise, weight)
    share = tf.where(count > 1.0, _SHARE, 0.0)
    written = [
        # Both begin at 0: the quotient of two such means needs no correction.
        mean.assign_add(share * (value - mean.read_value()), read_value=False)
        for mean, value in zip(means, (noise, signal), strict=True)
    ]
    with tf.control_dependencies(written):
        return tf.math.divide(*(mean.read_value() for mean in means))
