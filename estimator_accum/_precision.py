"""Matrix products in low precision, by TensorFlow's own rewriting of a session's graph.

The rewriting (Grappler's auto_mixed_precision) computes matrix products, convolutions
and what lies between them in bfloat16 or float16. Variables, and so slots and
accumulators, stay float32, and so do losses, softmax, means and sums.
"""

import functools
import time

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2

FLOAT32, BFLOAT16, FLOAT16 = PRECISIONS = ("float32", "bfloat16", "float16")

_ON = rewriter_config_pb2.RewriterConfig.ON
_OFF = rewriter_config_pb2.RewriterConfig.OFF
# Options of the rewriting; TensorFlow 2.8 lacks the first one.
_OF_BFLOAT16 = "auto_mixed_precision_onednn_bfloat16"
_OF_FLOAT16_ON_CPU = "auto_mixed_precision_cpu"
_OF_FLOAT16 = "auto_mixed_precision"
_OPTIONS = [
    option
    for option in (_OF_BFLOAT16, _OF_FLOAT16_ON_CPU, _OF_FLOAT16)
    if hasattr(rewriter_config_pb2.RewriterConfig(), option)
]
_ROWS, _WIDTH, _UNITS = 256, 512, 1024  # of the matrix product that is timed
_SECS = 0.05  # for the products in low precision; the first one is slow


def mixed_precision_config(
    precision: str,
    config: tf.compat.v1.ConfigProto | None = None,
    *,
    is_forced: bool = False,
    is_in_cluster: bool = False,
) -> tf.compat.v1.ConfigProto:
    """Returns a session's config whose matrix products have low precision.

        run_config = tf.estimator.RunConfig(
            session_config=mixed_precision_config("bfloat16"))

    float16 needs a loss scale as well, which sees a window once: wrap the optimizer in
    `tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, "dynamic")`.

    Args:
        precision: "float32" changes nothing. "bfloat16" is for CPUs, "float16" for GPUs.
        config: Config to start from, which is not changed; None is Estimator's default.
        is_forced: Whether a precision that this machine computes more slowly than
            float32 is allowed. A matrix product is timed once per process.
        is_in_cluster: Whether the session is one of a `TF_CONFIG` cluster. There
            convolutions in bfloat16 run only if TensorFlow fuses nothing with them.

    Raises:
        ValueError: If the precision is unknown, or slow, or TensorFlow has none for
            this device.
    """
    if precision not in PRECISIONS:
        raise ValueError(
            "`precision` must be one of 'float32', 'bfloat16' and 'float16'. Received: "
            f"{precision!r}. Use 'float32' for updates that are exact."
        )
    made = tf.compat.v1.ConfigProto()
    options = made.graph_options.rewrite_options
    if config is not None:
        made.CopyFrom(config)
    else:
        made.allow_soft_placement = True
        options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    if precision == FLOAT32:
        return made
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    option = _OF_FLOAT16 if has_gpu else _OF_FLOAT16_ON_CPU
    if precision == BFLOAT16:
        option = None if has_gpu else _OF_BFLOAT16
    if option not in _OPTIONS:
        where = "a GPU" if option is None else f"TensorFlow {tf.__version__}"
        raise ValueError(
            "`precision` must be one that TensorFlow can rewrite a graph to on this "
            f"device. Received: {precision!r}, with {where}. Use "
            f"{'float16' if option is None else 'float32'!r}."
        )
    if not is_forced:
        _check_speed(precision, config)
    if is_in_cluster:
        options.remapping = _OFF
    setattr(options, option, _ON)
    return made


def has_low_precision(session: tf.compat.v1.Session) -> bool:
    """Returns whether the session's config is one of `mixed_precision_config`."""
    config = session._config or tf.compat.v1.ConfigProto()
    options = config.graph_options.rewrite_options
    return any(getattr(options, option) == _ON for option in _OPTIONS)


def _check_speed(precision: str, config: tf.compat.v1.ConfigProto | None) -> None:
    """Raises ValueError if matrix products in a precision are not worth their casts."""
    ratio = _relative_time(precision, config and config.SerializeToString())
    if ratio > 1:
        raise ValueError(
            "`precision` must be one that this machine computes faster than float32. "
            f"Received: {precision!r}, in which a matrix product takes {ratio:.1f} times "
            "as long. Use 'float32', or force the precision."
        )


@functools.cache
def _relative_time(precision: str, config: bytes | None = None) -> float:
    """Returns the time of a matrix product, casts included, relative to float32's.

    Args:
        precision: "bfloat16" or "float16".
        config: Serialized config of the session: the first session of a process
            determines the threads of all.
    """
    with tf.Graph().as_default():
        shapes = (_ROWS, _WIDTH), (_WIDTH, _UNITS)
        factors = [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes]
        values = [np.ones(shape, np.float32) for shape in shapes]
        low = [tf.cast(factor, precision) for factor in factors]
        own = config and tf.compat.v1.ConfigProto.FromString(config)
        with tf.compat.v1.Session(config=own) as session:
            products = tf.matmul(*factors), tf.matmul(*low)
            ends = [product[0, 0] for product in products]
            runs = [session.make_callable(end, factors) for end in ends]
            times = [[], []]
            while sum(times[1]) < _SECS:
                for run, its_times in zip(runs, times, strict=True):
                    start = time.perf_counter()
                    run(*values)
                    its_times.append(time.perf_counter() - start)
    return min(times[1]) / min(times[0])
