"""TensorFlow's functions that compute gradients, replaced while a model_fn is called.

tf.gradients, optimizers     gradients_util._GradientsHelper
tf.GradientTape              imperative_grad, watch
tf.autodiff                  ForwardAccumulator.jvp, which no gradient of a batch has

A tape's gradients flow through its record, which the tape can tell. A tensor that was
computed elsewhere and is watched begins a record: the tape knows it, not its operation.
"""

import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.interception import is_interception_off, without_interception
from estimator_accum.graph.copies import change_input
from estimator_accum.graph.internals import (
    GRADIENTS,
    GRADIENTS_OF_TAPE,
    are_recorded,
    is_composite,
    is_function,
    outer_graph_of,
    record_of,
    replace_function,
)
from estimator_accum.graph.outermost import in_graph, value_of_graph
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.microbatch.own_optimizer.refusals import check_first_order

_local = threading.local()  # replicas build their graphs in threads of their own
_lock = threading.Lock()
_users = []
# Attribute of an Identity that was put behind a tensor after tapes had recorded it.
PASSES_ON = "_estimator_accum_passes_on"
_GRADIENTS = "_estimator_accum_gradients"  # attribute of a graph
_own = []  # functions of TensorFlow that are replaced: (their place, name, function)


class Request(NamedTuple):
    """One call of tf.gradients.

    Attributes:
        ys: Tensors to derive.
        xs: Variables and tensors.
        grad_ys: Gradients of `ys`; None are ones.
        plain: Returns d ys / d xs as TensorFlow computes them.
        compute: tf.gradients, a function of ys, xs, grad_ys and stop_gradients.
    """

    ys: list[tf.Tensor]
    xs: list
    grad_ys: list | None
    plain: Callable[[], list]
    compute: Callable

    @property
    def tops(self) -> list[tf.Tensor]:
        """All tensors that gradients are computed from."""
        arriving = [gradient for gradient in self.grad_ys or [] if gradient is not None]
        return tf.nest.flatten([*self.ys, *arriving], expand_composites=True)


def source_of(x) -> tf.Operation:
    """Returns the operation of a tensor, or of a variable's handle."""
    return in_graph(getattr(x, "handle", x)).op


@contextlib.contextmanager
def intercepting(gradients: Callable, graph: tf.Graph | None = None) -> Iterator[None]:
    """Gives calls of tf.gradients and tf.GradientTape to a function.

    Args:
        gradients: Function of a `Request`, as `Interception.gradients`.
        graph: Graph in which calls of other threads are given to it as well, such as
            those of a strategy's replicas; None for this thread alone.
    """
    with _lock:
        if not _users:
            for place, make in _REPLACED:
                original = replace_function(place, make)
                _own.append((*place, original))
        _users.append(gradients)
    _local.gradients, _local.watched = gradients, []
    if graph is not None:
        value_of_graph(graph, _GRADIENTS, gradients)
    try:
        yield
    finally:
        _local.gradients, _local.watched = None, []
        with _lock:
            _users.remove(gradients)
            while _own and not _users:
                setattr(*_own.pop())


def _taker() -> Callable | None:
    """Returns the function that takes the current call; None leaves it to TensorFlow."""
    if tf.executing_eagerly() or is_interception_off():
        return None
    taker, graph = getattr(_local, "gradients", None), tf.compat.v1.get_default_graph()
    while taker is None and graph is not None:
        taker, graph = getattr(graph, _GRADIENTS, None), outer_graph_of(graph)
    return taker


def _watched() -> list:
    """Returns (record, tensor) pairs of this thread."""
    if not hasattr(_local, "watched"):
        _local.watched = []
    return _local.watched


def _compute(ys, xs, grad_ys, stop_gradients, **options):
    with without_interception():
        return getattr(*GRADIENTS)(
            ys, xs, grad_ys, stop_gradients=stop_gradients, **options
        )


def _helper(original: Callable) -> Callable:
    """Returns the stand-in for the function behind tf.gradients."""
    signature = inspect.signature(original)

    def gradients(*args, **kwargs):
        arguments = signature.bind(*args, **kwargs).arguments
        ys, xs = _as_list(arguments.pop("ys")), _as_list(arguments.pop("xs"))
        take = _taker()
        # A source graph is given by TensorFlow itself, inside of functions.
        is_inner = arguments.pop("src_graph", None) is not None
        # Of composite tensors it calls itself, with their parts.
        if take is None or is_inner or _are_composite([*ys, *xs]):
            return original(*args, **kwargs)
        ys = [tf.convert_to_tensor(y) for y in ys]
        grad_ys = arguments.pop("grad_ys", None)
        grad_ys = None if grad_ys is None else _as_list(grad_ys)
        stops = _as_list(arguments.pop("stop_gradients", None) or [])

        def compute(ys, xs, grad_ys, more):
            return _compute(ys, xs, grad_ys, [*stops, *more], **arguments)

        def plain():
            return compute(ys, xs, grad_ys, [])

        return take(Request(ys, xs, grad_ys, plain, compute))

    return gradients


def _of_tape(original: Callable) -> Callable:
    """Returns the stand-in for the function behind GradientTape.gradient."""

    def gradients(
        tape,
        target,
        sources,
        output_gradients=None,
        sources_raw=None,
        unconnected_gradients="none",
    ):
        options = output_gradients, sources_raw, unconnected_gradients
        take = _taker()
        if take is None:
            return original(tape, target, sources, *options)
        xs = _variables_of(sources, sources_raw or [])
        not_recorded = _not_recorded(tape, target)

        def compute(ys, xs, grad_ys, stops):
            return _compute(ys, xs, grad_ys, [*stops, *not_recorded])

        def plain():
            with without_interception():
                return original(tape, target, wanted, output_gradients)

        places = _recorded(tape, target, sources)
        wanted = [sources[i] for i in places]
        results = [None] * len(sources)
        if places:
            parts = [xs[i] for i in places]
            grad_ys = _with_complex_ones(target, output_gradients)
            taken = take(Request(target, parts, grad_ys, plain, compute))
            for i, gradient in zip(places, taken, strict=True):
                results[i] = gradient
        if tf.UnconnectedGradients(unconnected_gradients).value == "zero":
            pairs = zip(results, xs, strict=True)
            results = [tf.zeros_like(x) if g is None else g for g, x in pairs]
        return results

    return gradients


def _with_complex_ones(ys: list, grad_ys: list | None) -> list | None:
    """Returns gradients with the ones of complex targets, which tf.gradients demands."""
    if not any(y.dtype.is_complex for y in ys):
        return grad_ys
    pairs = zip(ys, grad_ys or [None] * len(ys), strict=True)
    return [
        tf.ones_like(y) if gradient is None and y.dtype.is_complex else gradient
        for y, gradient in pairs
    ]


def _variables_of(sources: list, variables: list) -> list:
    """Returns the sources of a tape, those that are a variable's handle as variables."""
    by_handle = {
        id(getattr(x, "handle", x)): x for x in variables if isinstance(x, tf.Variable)
    }
    return [by_handle[id(x)] if id(x) in by_handle else in_graph(x) for x in sources]


def _recorded(tape, target: list, sources: list) -> list[int]:
    """Returns the places of the sources that a tape has recorded, or that are targets."""
    targets = {id(y) for y in target}
    are_known = _known(tape, sources)
    return [
        i for i, source in enumerate(sources) if are_known[i] or id(source) in targets
    ]


def _watch(original: Callable) -> Callable:
    def watch(tape, tensor):
        if _taker() is not None:
            parts = tf.nest.flatten(tensor, expand_composites=True)
            parts = [part for part in parts if not hasattr(part, "handle")]
            record = record_of(tape)
            are_known = _known(record, parts) if record else [True] * len(parts)
            watched = _watched()
            watched += [
                (record, part)
                for part, is_known in zip(parts, are_known, strict=True)
                if not is_known
            ]
        original(tape, tensor)

    return watch


def _jvp(original: Callable) -> Callable:
    def jvp(accumulator, primals, *args, **kwargs):
        if _taker() is not None:
            check_first_order(tf.nest.flatten(primals, expand_composites=True))
        return original(accumulator, primals, *args, **kwargs)

    return jvp


_REPLACED = [
    (GRADIENTS, _helper),
    (GRADIENTS_OF_TAPE, _of_tape),
    ((tf.GradientTape, "watch"), _watch),
    ((tf.autodiff.ForwardAccumulator, "jvp"), _jvp),
]


def _known(tape, tensors: list[tf.Tensor]) -> list[bool]:
    """Returns which tensors a tape watches or has recorded the computation of.

    Args:
        tape: A tf.GradientTape's own record.
        tensors: Tensors.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # without other tapes
        return thread.submit(are_recorded, tape, tensors).result()


def _not_recorded(tape, ys: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors through which gradients of a tape do not flow."""
    watched = {tensor.ref() for owner, tensor in _watched() if owner is tape}
    needed = data_ancestors([y.op for y in ys])
    tensors = [
        output
        for operation in needed
        for output in operation.outputs
        if not hasattr(operation, PASSES_ON)
        and (output.dtype.is_floating or output.dtype.is_complex)
    ]
    stops = [
        tensor
        for tensor, is_known in zip(tensors, _known(tape, tensors), strict=True)
        if not is_known or tensor.ref() in watched
    ]
    calls = [tensor for tensor in stops if _is_call(tensor.op)]
    return [*stops, *put_behind(calls, needed).values()]


def put_behind(
    tensors: Iterable[tf.Tensor], readers: Iterable[tf.Operation]
) -> dict[str, tf.Tensor]:
    """Puts an Identity behind tensors, for gradients to be stopped there.

    They are stopped at operations only, not at one of several results, and not at the
    call of a function.

    Args:
        tensors: Tensors.
        readers: Operations that read the results from now on.

    Returns:
        The results by the names of the tensors.
    """
    identities = {}
    for tensor in tensors:
        graph = tensor.graph
        without = graph.control_dependencies(None)
        with graph.as_default(), graph.colocate_with(tensor.op), without:
            identities[tensor.name] = tf.identity(tensor, "rows")
        setattr(identities[tensor.name].op, PASSES_ON, True)
    for operation in readers:
        for i, tensor in enumerate(operation.inputs):
            if tensor.name in identities and tensor.graph is operation.graph:
                change_input(operation, i, identities[tensor.name])
    return identities


def _is_call(operation: tf.Operation) -> bool:
    is_function_call = is_function(operation.graph, operation.type)
    return is_function_call or "PartitionedCall" in operation.type


def _as_list(value) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def _are_composite(values: list) -> bool:
    return any(
        is_composite(value) and not isinstance(value, tf.Variable) for value in values
    )
