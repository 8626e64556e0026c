"""The switch by which `tf.gradients` of the library is left alone."""

import contextlib
import threading

_current = threading.local()  # replicas build their graphs in threads of their own


@contextlib.contextmanager
def without_interception():
    """Lets `tf.gradients` alone that a model_fn's code does not call by itself.

    Inside, `microbatch_model_fn` takes gradients as TensorFlow computes them, for
    callers that sum them over the batch.
    """
    before = is_interception_off()
    _current.is_interception_off = True
    try:
        yield
    finally:
        _current.is_interception_off = before


def is_interception_off() -> bool:
    """Returns whether this thread is inside of `without_interception`."""
    return getattr(_current, "is_interception_off", False)
