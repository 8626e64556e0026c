"""Detects oneDNN, which rewrites graphs to bfloat16."""

from tensorflow.python.util import _pywrap_util_port


def is_onednn_on() -> bool:
    """Returns whether this TensorFlow uses oneDNN on this processor."""
    return _pywrap_util_port.IsMklEnabled()
