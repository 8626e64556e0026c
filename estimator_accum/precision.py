"""Matrix products in low precision, by TensorFlow's own rewriting of a session's graph.

The rewriting (Grappler's auto_mixed_precision) computes matrix products, convolutions
and what lies between them in bfloat16 or float16. Variables, and so slots and
accumulators, stay float32, and so do losses, softmax, means and sums.
"""

import functools
import logging

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
# Instructions that multiply in a precision, by their names in /proc/cpuinfo. bfloat16:
# oneDNN's avx512_core_amx and avx512_core_bf16 (dnnl_cpu_isa_t of its developer guide),
# and FEAT_BF16 of ARM (Linux's "ARM64 ELF hwcaps"). float16: the one that TensorFlow's
# rewriting asks for on CPUs, oneDNN's avx512_core_amx_fp16.
_INSTRUCTIONS = {
    BFLOAT16: ("amx_bf16", "avx512_bf16", "bf16"),
    FLOAT16: ("amx_fp16",),
}
_logger = logging.getLogger("tensorflow.estimator_accum")


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
        is_forced: Whether a processor without instructions for the precision may stay
            without a warning. Such processors are slower than in float32, or compute in
            float32.
        is_in_cluster: Whether the session is one of a `TF_CONFIG` cluster. There
            convolutions in bfloat16 run only if TensorFlow fuses nothing with them.

    Raises:
        ValueError: If the precision is unknown, or TensorFlow has none for this device.
    """
    if precision not in PRECISIONS:
        raise ValueError(
            "`precision` must be one of 'float32', 'bfloat16' and 'float16'. Received: "
            f"{precision!r}. Use 'float32' for updates that are exact."
        )
    result = tf.compat.v1.ConfigProto()
    options = result.graph_options.rewrite_options
    if config is not None:
        result.CopyFrom(config)
    else:
        result.allow_soft_placement = True
        options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    if precision == FLOAT32:
        return result
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
    if not (is_forced or has_gpu):
        _warn_of_processor(precision)
    if is_in_cluster:
        options.remapping = _OFF
    setattr(options, option, _ON)
    return result


def config_of_functions() -> tf.compat.v1.ConfigProto:
    """Returns the config that TensorFlow 2's functions run with, of this rewriting."""
    config = tf.compat.v1.ConfigProto()
    chosen = tf.config.optimizer.get_experimental_options()
    for option in _OPTIONS:
        if chosen.get(option):
            setattr(config.graph_options.rewrite_options, option, _ON)
    return config


def has_low_precision(config: tf.compat.v1.ConfigProto) -> bool:
    """Returns whether a config is one of `mixed_precision_config`."""
    options = config.graph_options.rewrite_options
    return any(getattr(options, option) == _ON for option in _OPTIONS)


@functools.cache  # once per process
def _warn_of_processor(precision: str) -> None:
    """Logs a warning if the processor is known to lack a precision's instructions."""
    instructions = _INSTRUCTIONS[precision]
    flags = _processor_flags()
    if flags is not None and flags.isdisjoint(instructions):
        _logger.warning(
            "`precision` (--precision) should be one that the processor multiplies in: "
            "others are slower than float32, or have no effect. Received: '%s', on a "
            "processor without %s. Use float32, or is_forced=True (--force_precision) "
            "to turn this warning off.",
            precision,
            " and ".join(instructions),
        )


def _processor_flags() -> frozenset[str] | None:
    """Returns the names of the processor's instructions; None if they are unknown.

    Only Linux lists them, as "flags" on x86 and "Features" on ARM.
    """
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, values = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(values.split())
    except OSError:
        pass
    return None
