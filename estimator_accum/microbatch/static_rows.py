"""Whether a model_fn computes the same for batches without a static size.

    loss / x.shape[0]            another number for None, so Python gets the batch's size
    tf.reshape(x, [n, -1])       the same, if n is tf.shape(x)[0] where x.shape[0] is None

A tensor that is made with the batch's size belongs to the batch: all layers behind it
are computed on the whole batch, and an evaluation has no such part. Google's BERT makes
every layer so, unless it reads None. So a model_fn that reads sizes is also called in
two graphs of its own, and reads None if it computes with the same numbers.
"""

import collections
import contextlib
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from estimator_accum.graph.functions import all_nodes, functions_of, numbers_of
from estimator_accum.graph.names import OF_SHAPES, WRITERS
from estimator_accum.graph.walks import ancestors, data_ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.patches import Request, intercepting
from estimator_accum.microbatch.staging import named_tensors
from estimator_accum.microbatch.static_sizes import (
    StaticSizeError,
    StaticSizes,
    sizes_of_graph,
)

# Operations that make floating-point numbers, or copies of them, from integers.
_FROM_INTEGERS = {"BroadcastTo", "Cast", "Fill", "LinSpace", "OneHot", "Tile"}
# Those that choose among floating-point numbers by integers.
_BY_INTEGERS = {"ArgMax", "ArgMin", "GatherNd", "GatherV2", "Max", "Mean", "Min", "Pad"}
_BY_INTEGERS |= {"PadV2", "Prod", "Slice", "SplitV", "StridedSlice", "Sum", "TopKV2"}
_LIKE = {"ZerosLike": 0, "OnesLike": 1}
# Operations that TensorFlow makes, or not, for one value, since it knows a static size:
# those that make constants, which are among the numbers, and that move elements.
_BY_SIZE = {"Const", "Fill", *_LIKE, *OF_SHAPES, "ExpandDims", "Identity", "Pack"}
_BY_SIZE |= {"Placeholder", "Reshape", "Slice", "Squeeze", "StridedSlice", "Transpose"}


def sizes_of_model_fn(
    batch: WholeBatch, whole: dict, make_batch: Callable, build: Callable
) -> StaticSizes | None:
    """Returns the static sizes that a model_fn must read; None if None is the same.

    Args:
        batch: Its batch.
        whole: "features" and "labels" from input_fn.
        make_batch: Returns the `WholeBatch` of such data.
        build: Calls the model_fn on the `sliced` of a batch; returns its EstimatorSpec.
    """
    sizes = _sizes_of(batch, whole)
    if sizes.has_rows:
        numbers, are_read = _call(whole, make_batch, build, is_static=False)
        if numbers is not None and not are_read:
            return None
        if numbers is not None:
            of_whole, _ = _call(whole, make_batch, build, is_static=True)
            if of_whole is not None and not numbers.differences(of_whole):
                return None
    return sizes


def _sizes_of(batch: WholeBatch, whole: dict) -> StaticSizes:
    """Returns the static sizes of the default graph, with those of a batch."""
    sizes = sizes_of_graph(tf.compat.v1.get_default_graph())
    slices = [leaf for leaf in tf.nest.flatten(batch.sliced) if leaf is not None]
    sizes.add(slices, [value for _, value in named_tensors(whole)])
    return sizes


def check_no_sizes(sizes: StaticSizes | None, whole: dict) -> None:
    """Raises ValueError if a model_fn has read a size where all is computed in parts.

    Args:
        sizes: The static sizes that it must read.
        whole: "features" and "labels" from input_fn.
    """
    if sizes is not None and sizes.are_read and sizes.has_rows:
        shapes = [(name, value.shape) for name, value in named_tensors(whole)]
        rows = next(
            f"{s[0]} examples of {name}" for name, s in shapes if s.rank and s[0]
        )
        raise ValueError(
            "The number of examples must be read from tf.shape in an evaluation, a "
            "prediction, and a model_fn that trains by this library: they compute with "
            f"micro-batches alone, which have another one. Received: {rows}, and a "
            "model_fn that computes with other numbers for None. Write "
            "tf.shape(tensor)[0] in place of tensor.shape[0]."
        )


def check_error_is_of_sizes(
    error: StaticSizeError, whole: dict, build: Callable
) -> None:
    """Raises the error that caused another one if the unsplit batch has it, too."""

    def text(error: Exception) -> str:
        return re.sub(r"\d+|None", "", f"{type(error)} {error}")

    with tf.Graph().as_default():
        tf.compat.v1.train.get_or_create_global_step()
        try:
            build(_mapped(_placeholder, whole))
        except Exception as other:  # noqa: BLE001, a user's code raises any
            if text(other) == text(error.__cause__):
                raise error.__cause__ from None


def _call(
    whole: dict, make_batch: Callable, build: Callable, is_static: bool
) -> tuple["Numbers | None", bool]:
    """Calls a model_fn in a graph of its own, whose code reads static sizes or None.

    Returns:
        (the numbers it computes with, None if it fails; whether it has read sizes).
    """
    numbers, outer = Numbers(), tf.compat.v1.get_default_graph()
    with _same_random_numbers(), tf.Graph().as_default() as graph:
        graph.seed = outer.seed
        tf.compat.v1.train.get_or_create_global_step()
        sizes = sizes_of_graph(graph)  # without any: it notes what is read
        try:
            batch = make_batch(_mapped(_placeholder, whole))
            if is_static:
                _sizes_of(batch, whole).may_refuse = False
            taking = numbers.taking(lambda request: request.plain())
            with batch.as_current(), sizes.shown(), intercepting(taking):
                numbers.add(_results_of(build(batch.sliced), batch))
        except Exception:  # noqa: BLE001, a user's code raises any; so will the next call
            return None, sizes.are_read
    return numbers, sizes.are_read


class Numbers:
    """The constants and operations that a model_fn computes with.

    Attributes:
        floats: How often each floating-point number occurs.
        integers: Constants by which floating-point numbers are made or chosen. Those of
            micro-batches are known of a batch of static size, too.
        kinds: How often each type of operation occurs whose results are no integers, and
            each within a function.
    """

    def __init__(self):
        self.floats, self.integers = collections.Counter(), set()
        self.kinds = collections.Counter()
        self._gradients = set()  # their operations compute with static sizes themselves

    def taking(self, gradients: Callable) -> Callable:
        """Returns a function of a `Request`, whose numbers are added."""

        def take(request: Request) -> list:
            self.add(request.tops)
            results = gradients(request)
            parts = tf.nest.flatten(results, expand_composites=True)
            self._gradients |= {part.op for part in parts if part is not None}
            return results

        return take

    def _begins(self, operation: tf.Operation) -> bool:
        kinds = {*_LIKE, *OF_SHAPES}
        return operation in self._gradients or operation.type in kinds

    def add(self, tensors: Iterable[tf.Tensor]) -> None:
        """Adds the constants from which tensors are computed."""
        operations = data_ancestors(
            [tensor.op for tensor in tensors],
            lambda op: () if self._begins(op) else op.inputs,
        )
        counts, kinds = collections.Counter(), collections.Counter()
        for operation in operations:
            tensor = next(iter(operation.outputs), None)
            is_chosen = operation.type in _BY_INTEGERS
            is_chosen = is_chosen and not operation.inputs[0].dtype.is_integer
            if operation.type in _FROM_INTEGERS or is_chosen:
                self.integers |= set(_integers_of(operation))
            if operation.type in _LIKE and tensor.dtype.is_floating:
                counts[_LIKE[operation.type]] += 1
            if not (_is_of_integers(operation) or _is_by_size(operation)):
                kinds[operation.type] += 1
            if operation.type == "Const" and tensor.dtype.is_floating:
                counts.update(numbers_of([operation]))
                if tensor.shape.rank:
                    self.integers.add(("Const", tuple(tensor.shape)))
        callers = [operation for operation in operations if functions_of(operation)]
        counts |= collections.Counter(numbers_of(callers))
        inner = all_nodes(callers)[len(callers) :]
        kinds.update({n.op for n in inner if not _counts_integers(n)} - _BY_SIZE)
        self.floats += {n: k for n, k in counts.items() if not np.isnan(n)}
        self.kinds += kinds

    def differences(self, whole: "Numbers") -> list[str]:
        """Returns the numbers that one call has, and that of the whole batch has not."""
        floats = {*(whole.floats - self.floats), *(self.floats.keys() - whole.floats)}
        integers = sorted(self.integers - whole.integers, key=str)
        kinds = {*(self.kinds - whole.kinds), *(whole.kinds - self.kinds)}
        integers = (f"{n} for {kind}" for kind, n in integers)
        return [*map(str, sorted(floats)), *integers, *sorted(kinds)]


def _is_of_integers(operation: tf.Operation) -> bool:
    return all(tensor.dtype.is_integer for tensor in operation.outputs)


def _is_by_size(operation: tf.Operation) -> bool:
    if operation.type == "Mul":  # by ones, where weights may have to be broadcast
        return any(map(_is_of_ones, operation.inputs))
    return operation.type in _BY_SIZE


def _is_of_ones(tensor: tf.Tensor) -> bool:
    if tensor.op.type == "OnesLike":
        return True
    value = tensor.op.inputs[1] if tensor.op.type == "Fill" else tensor
    return value.op.type == "Const" and numbers_of([value.op]) == {1.0}


def _counts_integers(node) -> bool:
    """Returns whether a function's node computes with integers."""
    names = ("T", "Tparams", "DstT", "dtype", "Tidx")  # that of its result first
    kinds = [node.attr[name].type for name in names if name in node.attr]
    return bool(kinds) and bool(kinds[0]) and tf.as_dtype(kinds[0]).is_integer


def _integers_of(operation: tf.Operation) -> Iterator[tuple]:
    """Yields the integer constants among an operation's inputs."""
    for i, tensor in enumerate(operation.inputs):
        value = tf.get_static_value(tensor) if tensor.dtype.is_integer else None
        if value is not None:
            yield f"input {i} of {operation.type}", (*value.ravel().tolist(),)


def _results_of(spec, batch: WholeBatch) -> list[tf.Tensor]:
    """Returns the results of a model_fn that depend on its examples."""
    results = [spec.loss, spec.predictions, batch.weight, *batch.losses]
    results = tf.nest.flatten(results, expand_composites=True)
    # Some metrics wait for a change whose value they do not take.
    metrics = tf.nest.flatten(spec.eval_metric_ops)
    updates = ancestors([getattr(metric, "op", metric) for metric in metrics])
    written = [op.inputs[-1] for op in updates if WRITERS.search(op.type)]
    return [t for t in [*results, *written] if isinstance(t, tf.Tensor)]


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leaves the random numbers of Python and NumPy as they were."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _mapped(function: Callable, *structures) -> Any:
    """Returns a structure with a function's results, and with None where it has None."""
    return tf.nest.map_structure(
        lambda *values: None if values[0] is None else function(*values), *structures
    )


def _placeholder(value):
    """Returns a tensor for a feature, of the same static shape."""
    if not isinstance(value, tf.SparseTensor | tf.RaggedTensor | tf.Tensor):
        value = tf.constant(value)
    return tf.nest.map_structure(
        lambda part: tf.compat.v1.placeholder(part.dtype, part.shape),
        value,
        expand_composites=True,
    )
