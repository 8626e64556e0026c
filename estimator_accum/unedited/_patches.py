"""TensorFlow's functions that compute gradients, replaced while a model_fn is called.

tf.gradients, optimizers     gradients_util._GradientsHelper
tf.GradientTape              gradient; what else it has to know of: when it recorded
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf
from tensorflow.python.eager import backprop
from tensorflow.python.ops import gradients_util

from estimator_accum._gradients import is_interception_off, without_interception
from estimator_accum._graph import data_ancestors

_local = threading.local()  # replicas build their graphs in threads of their own
_lock = threading.Lock()
_users = []
_own = []  # functions of TensorFlow that are replaced: (their place, name, function)


@contextlib.contextmanager
def intercepting(gradients: Callable) -> Iterator[None]:
    """Gives this thread's calls of tf.gradients and tf.GradientTape to a function.

    Args:
        gradients: As `Interception.gradients`.
    """
    with _lock:
        if not _users:
            for place, name, make in _REPLACED:
                own = getattr(place, name)
                _own.append((place, name, own))
                setattr(place, name, functools.wraps(own)(make(own)))
        _users.append(gradients)
    _local.gradients = gradients
    try:
        yield
    finally:
        _local.gradients = None
        with _lock:
            _users.remove(gradients)
            while _own and not _users:
                setattr(*_own.pop())


def _taker() -> Callable | None:
    """Returns the function that takes the current call; None leaves it to TensorFlow."""
    if tf.executing_eagerly() or is_interception_off():
        return None
    return getattr(_local, "gradients", None)


def _compute(ys, xs, grad_ys, stop_gradients, **options):
    with without_interception():
        return gradients_util._GradientsHelper(
            ys, xs, grad_ys, stop_gradients=stop_gradients, **options
        )


def _helper(own: Callable) -> Callable:
    """Returns what stands in for the function behind tf.gradients."""
    signature = inspect.signature(own)

    def gradients(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        ys, xs = _as_list(given.pop("ys")), _as_list(given.pop("xs"))
        take = _taker()
        # A source graph is given by TensorFlow itself, inside of functions.
        is_inner = given.pop("src_graph", None) is not None
        # Of composite tensors it calls itself, with their parts.
        if take is None or is_inner or _are_composite([*ys, *xs]):
            return own(*args, **kwargs)
        ys = [tf.convert_to_tensor(y) for y in ys]
        grad_ys = given.pop("grad_ys", None)
        grad_ys = None if grad_ys is None else _as_list(grad_ys)
        stops = _as_list(given.pop("stop_gradients", None) or [])

        def compute(ys, xs, grad_ys, more):
            return _compute(ys, xs, grad_ys, [*stops, *more], **given)

        return take(ys, xs, grad_ys, compute)

    return gradients


def _gradient_of_tape(own: Callable) -> Callable:
    def gradient(
        tape, target, sources, output_gradients=None, unconnected_gradients="none"
    ):
        take = _taker()
        if take is None:
            return own(tape, target, sources, output_gradients, unconnected_gradients)
        ys = [tf.convert_to_tensor(y) for y in tf.nest.flatten(target)]
        xs = tf.nest.flatten(sources)
        _check_watches_itself(tape)
        watched = {id(variable) for variable in tape.watched_variables()}
        not_recorded = _not_recorded(tape, ys)
        own(tape, target, [])  # ends it, or refuses a second call
        given = None
        if output_gradients is not None:
            given = tf.nest.flatten(output_gradients)

        def compute(ys, xs, grad_ys, stops):
            return _compute(ys, xs, grad_ys, [*stops, *not_recorded])

        found = take(ys, xs, given, compute)
        for i, x in enumerate(xs):
            if isinstance(x, tf.Variable) and id(x) not in watched:
                found[i] = None
            is_zero = tf.UnconnectedGradients(unconnected_gradients).value == "zero"
            if found[i] is None and is_zero:
                found[i] = tf.zeros_like(x)
        return tf.nest.pack_sequence_as(sources, found)

    return gradient


def _push_tape(own: Callable) -> Callable:
    def push(tape):
        own(tape)
        _recorded(tape).append([_version(), None])

    return push


def _pop_tape(own: Callable) -> Callable:
    def pop(tape):
        _recorded(tape)[-1][1] = _version()
        own(tape)

    return pop


def _reset_tape(own: Callable) -> Callable:
    def reset(tape):
        own(tape)
        del _recorded(tape)[:-1]

    return reset


_REPLACED = [
    (gradients_util, "_GradientsHelper", _helper),
    (backprop.GradientTape, "gradient", _gradient_of_tape),
    (backprop.GradientTape, "_push_tape", _push_tape),
    (backprop.GradientTape, "_pop_tape", _pop_tape),
    (backprop.GradientTape, "reset", _reset_tape),
]


def _version() -> int:
    """Returns the number of the last operation of the graph."""
    operations = tf.compat.v1.get_default_graph().get_operations()
    return operations[-1]._id if operations else -1


def _recorded(tape: tf.GradientTape) -> list[list]:
    """Returns the half-open ranges of operations that a tape has recorded."""
    return vars(tape).setdefault("_estimator_accum_recorded", [])


def _not_recorded(tape: tf.GradientTape, ys: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors through which gradients of a tape do not flow."""
    ranges = [(begin, end or _version()) for begin, end in _recorded(tape)]
    return [
        output
        for operation in data_ancestors([y.op for y in ys])
        if not any(begin < operation._id <= end for begin, end in ranges)
        for output in operation.outputs
        if output.dtype.is_floating or output.dtype.is_complex
    ]


def _check_watches_itself(tape: tf.GradientTape) -> None:
    """Raises ValueError if uses of a variable may not count, for it was watched late."""
    if not tape._watch_accessed_variables:
        raise ValueError(
            "A tf.GradientTape must watch variables by itself, for its gradients to be "
            "those of the whole batch. Received: watch_accessed_variables=False, for "
            f"the gradient of {tape!r}. Leave it out, or train without micro-batches."
        )


def _as_list(value) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def _are_composite(values: list) -> bool:
    return any(
        isinstance(value, tf.__internal__.CompositeTensor)
        and not isinstance(value, tf.Variable)
        for value in values
    )
