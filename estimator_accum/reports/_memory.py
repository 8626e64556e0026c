"""Peak memory of a process and of its GPUs."""

import resource
import sys

import tensorflow as tf


def peak_bytes() -> dict[str, int]:
    """Returns the most memory that was in use, by name: "the process", "GPU:0"."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = {"the process": size if sys.platform == "darwin" else size * 1024}
    for gpu in tf.config.list_logical_devices("GPU"):
        name = ":".join(gpu.name.split(":")[-2:])
        peaks[name] = tf.config.experimental.get_memory_info(name)["peak"]
    return peaks


def spoken(size: int) -> str:
    """Returns a number of bytes as text with a unit."""
    for unit, bytes_of_it in (("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_of_it:
            return f"{size / bytes_of_it:,.1f} {unit}"
    return f"{size / 1e3:,.0f} kB"
