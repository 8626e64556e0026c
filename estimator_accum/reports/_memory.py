"""Peak memory of a process."""

import contextlib
import resource
import sys

import tensorflow as tf

MODEL = "the model"  # all tensors that are alive at the same time, variables included


def peak_bytes() -> dict[str, int]:
    """Returns the most memory that was in use, by name.

    The names are "the process"; without GPUs `MODEL`, if TensorFlow's allocator counts
    its tensors, as oneDNN's does; and "GPU:0", which are tensors as well.
    """
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = {"the process": size if sys.platform == "darwin" else size * 1024}
    gpus = tf.config.list_logical_devices("GPU")
    for gpu in gpus:
        name = ":".join(gpu.name.split(":")[-2:])
        peaks[name] = tf.config.experimental.get_memory_info(name)["peak"]
    if not gpus:
        with contextlib.suppress(ValueError, tf.errors.InvalidArgumentError):
            # With oneDNN, tensors of a small model are not counted.
            if peak := tf.config.experimental.get_memory_info("CPU:0")["peak"]:
                peaks[MODEL] = peak
    return peaks


def spoken(size: int) -> str:
    """Returns a number of bytes as text with a unit."""
    for unit, bytes_of_it in (("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_of_it:
            return f"{size / bytes_of_it:,.1f} {unit}"
    return f"{size / 1e3:,.0f} kB"
