"""Static sizes that the code of a step or model_fn reads, such as `x.shape[0]`.

    TensorFlow, Keras    None: what they compute holds for any number of examples
    all other code       the size for the unsplit batch, as within tf.function

So it computes the same as on the unsplit batch, though its graph gets micro-batches.
A size is inferred when it is read, by TensorFlow, in a graph of the unsplit batch.
"""

import contextlib
import functools
import re
import threading
import traceback
from collections.abc import Iterable, Iterator

import tensorflow as tf

from estimator_accum.core.interception import is_interception_off
from estimator_accum.graph.functions import functions_of, graphs_called
from estimator_accum.graph.internals import (
    create_like,
    is_shape_read_outside,
    lazy_shape,
    outer_graph_of,
    static_value,
)
from estimator_accum.graph.lists import (
    OF_LISTS,
    common_shape,
    is_same_shape,
    list_shape,
)
from estimator_accum.graph.names import BRANCHES, CALLERS, CONTROL_FLOW_V1, FED, LOOPS
from estimator_accum.graph.outermost import value_of_graph
from estimator_accum.graph.walks import data_ancestors, in_order
from estimator_accum.graph.writers import is_reference

_SIZES = "_estimator_accum_static_sizes"  # attribute of a graph
_WITH_LISTS = OF_LISTS | CALLERS | {"Identity"}
_KINDS, _SET_SHAPE = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor), "set_shape"
_lock = threading.Lock()
_users, _originals = [], {}


class StaticSizeError(ValueError):
    """Code fails on a size that is None, unless it fails on the unsplit batch, too."""


class StaticSizes:
    """Static sizes of the tensors of a graph for the unsplit batch.

    Args:
        graph: The graph of a step or model_fn.

    Attributes:
        are_read: Whether its code has read one that differs among batches.
        has_rows: Whether the unsplit batch has a static number of examples.
        may_refuse: Whether a size that cannot be inferred is refused; else it is
            assumed, so that a graph differs from that of None wherever it can.
    """

    def __init__(self, graph: tf.Graph):
        self._step = graph
        self._parts, self._values = {}, []  # whose keys are places in memory
        self._copies = _Copies(tf.Graph(), self._parts, set(), {})
        self._wholes = []  # shapes of parts, without their components
        self.are_read, self.has_rows, self._has_rank = False, False, True
        self.may_refuse = True

    def add(self, micro_batch: Iterable, wholes: Iterable) -> None:
        """Adds the tensors of a micro-batch.

        Args:
            micro_batch: Tensors, sparse and ragged ones.
            wholes: For each, the tensor or type of the unsplit batch.
        """
        for value, whole in zip(micro_batch, wholes, strict=True):
            self._has_rank &= whole.shape.rank is not None
            if whole.shape.rank == 0:
                continue
            # Without one, there is none to infer. `shape[0]` may be a Dimension.
            has_rank = bool(whole.shape.rank)
            self.has_rows |= has_rank and whole.shape.as_list()[0] is not None
            self._wholes.append(whole.shape)
            pairs = [tf.nest.flatten(x, expand_composites=True) for x in (value, whole)]
            for part, unsplit in [(value, whole), *zip(*pairs, strict=True)]:
                self._parts[_key(part)] = unsplit.shape
                self._values.append(part)

    def number_of(self, parts: Iterable) -> int | None:
        """Returns the static number of examples that all parts of a batch have.

        Args:
            parts: Parts of the batch.
        """
        slices = [part.sliced for part in parts if part.has_rows]
        shapes = [self._parts.get(tensor.ref()) for tensor in slices]
        numbers = {s.as_list()[0] if s is not None and s.rank else None for s in shapes}
        return numbers.pop() if len(numbers) == 1 else None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Has the code of the graph read these sizes.

        Raises:
            StaticSizeError: If the code fails, perhaps on a size that is None.
            ValueError: If it fails on a rank that is not known.
        """
        with _lock:
            if not _users:
                for kind in _KINDS:
                    _originals[kind] = kind.shape
                    kind.shape = property(functools.partial(_shape, kind.shape))
                _originals[_SET_SHAPE] = tf.Tensor.set_shape
                tf.Tensor.set_shape = _set_shape
            _users.append(self)
        try:
            yield
        except (TypeError, ValueError) as error:
            self._check_error(error)
            raise
        finally:
            with _lock:
                _users.remove(self)
                if not _users:
                    tf.Tensor.set_shape = _originals[_SET_SHAPE]
                    for kind in _KINDS:
                        kind.shape = _originals[kind]

    def _check_error(self, error: Exception) -> None:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_own = frame.f_globals.get("__name__", "").startswith("estimator_accum.")
        is_of_none = re.search("None|not fully defined", str(error))
        text = str(error).rstrip(". \n")
        received = f"Received: {type(error).__name__}: {text}. "
        if not self._has_rank and re.search("unknown|undefined", str(error)):
            raise ValueError(
                "Each part of a batch must have a static rank where code needs it. "
                f"{received}Call tensor.set_shape in the data set, with None for sizes "
                "that differ."
            ) from error
        if (self.are_read or self.has_rows) and is_of_none and not is_own:
            raise StaticSizeError(
                "The number of examples must be read from tf.shape where it is not "
                f"static, as in micro-batches. {received}Write tf.shape(tensor)[0] in "
                "place of tensor.shape[0]."
            ) from error

    def of(self, tensor) -> tf.TensorShape:
        """Returns the shape of a tensor for the unsplit batch, as far as it is static.

        Args:
            tensor: A tensor, or a sparse or ragged one of the batch.

        Raises:
            ValueError: If it cannot be inferred.
        """
        self.are_read = True
        if not self.has_rows:
            return _of_micro_batch(tensor)
        shape = self._inferred(tensor)
        if shape is not None:
            return shape
        if not self.may_refuse:
            return self._assumed(tensor)
        raise ValueError(
            "The static number of examples must not be read from a tensor that control "
            "flow of TensorFlow 1 computes, or that is computed and sparse. Received: "
            f"the shape of {getattr(tensor, 'name', tensor)}. Use `tf.shape(x)[0]`."
        )

    def sizes_of(self, tensor) -> list[int | None]:
        """Returns the sizes of a tensor for the unsplit batch, which no code has read."""
        shape = None
        with contextlib.suppress(ValueError):
            shape = self._inferred(tensor)
        return (shape or _of_micro_batch(tensor)).as_list()  # False without a rank

    def _inferred(self, tensor) -> tf.TensorShape | None:
        if _key(tensor) in self._parts:
            return self._parts[_key(tensor)]
        if not isinstance(tensor, tf.Tensor) or tensor.graph is not self._step:
            return None
        copy = self._copies.of(tensor)
        shape = _of_micro_batch(copy)
        is_known = shape.is_fully_defined() or copy.ref() not in self._copies.opaque
        return shape if is_known else None

    def _assumed(self, tensor) -> tf.TensorShape:
        """Returns a shape with the number of examples where one may be."""
        sizes = _of_micro_batch(tensor).as_list()
        shapes = [shape.as_list() for shape in self._wholes if shape.rank]
        number = next(shape[0] for shape in shapes if shape[0] is not None)
        # Lengths of this batch may differ from those of others.
        last = 1 if any(None in shape[1:] for shape in shapes) else len(sizes)
        first = [number if size is None else size for size in sizes[:last]]
        return tf.TensorShape(first + sizes[last:])

    def set_to(self, tensor: tf.Tensor, shape: tf.TensorShape) -> tf.TensorShape:
        """Returns the part of a shape that holds for each micro-batch.

        Args:
            tensor: A tensor of the step, of known rank.
            shape: The shape that the step sets for the unsplit batch, of the same rank.

        Raises:
            ValueError: If it has a number of examples that is not known.
        """
        before = _of_micro_batch(tensor)
        sets_rows = _gets_number(before, shape)
        if not sets_rows and not self.has_rows:
            return shape
        unsplit = self._inferred(tensor)
        if unsplit is None and not sets_rows:
            return shape
        if unsplit is None and self.may_refuse:
            unsplit = self.of(tensor)
        elif unsplit is None:
            unsplit = tf.TensorShape([shape[0], *before[1:]])
        elif _key(tensor) in self._parts:
            self._parts[_key(tensor)] = unsplit.merge_with(shape)
        else:
            _originals[_SET_SHAPE](self._copies.of(tensor), shape)
        unsplit.assert_is_compatible_with(shape)
        if sets_rows and unsplit.as_list()[0] is None and self._is_of_batch(tensor):
            raise ValueError(
                "The static number of examples must not be set, which micro-batches do "
                f"not have. Received: the shape {shape} for {tensor.name}. Set None "
                "as its first size, or let the data set have it: drop_remainder=True."
            )
        partial = zip(before.as_list(), unsplit.as_list(), shape.as_list(), strict=True)
        return tf.TensorShape([new if k is None else old for old, k, new in partial])

    def without_number(
        self, tensor: tf.Tensor, shape: tf.TensorShape
    ) -> tf.TensorShape:
        """Returns a shape, with None in place of the number of rows for the unsplit batch.

        Args:
            tensor: A tensor of the step, of known rank.
            shape: The shape that a layer sets, of the same rank.
        """
        # The shape of a gradient is that of its variable.
        if is_interception_off() or not self.has_rows or not self._is_of_batch(tensor):
            return shape
        if self.sizes_of(tensor)[0] != shape.as_list()[0]:
            return shape
        self.are_read = True
        return tf.TensorShape([None, *shape[1:]])

    def _is_of_batch(self, tensor: tf.Tensor) -> bool:
        parts = {value.op for value in self._values if isinstance(value, tf.Tensor)}
        return bool(parts & data_ancestors([tensor.op]).keys())


class _Copies:
    """Copies of a graph's tensors in a graph of the unsplit batch.

    Args:
        graph: That graph.
        parts: Shapes of the unsplit batch's parts, by references to the tensors.
        opaque: To fill with references to copies whose shapes cannot be inferred.
        copies: The copies of a function's arguments.
    """

    def __init__(self, graph: tf.Graph, parts: dict, opaque: set, copies: dict):
        self._graph, self._parts = graph, parts
        self._copies, self.opaque = copies, opaque

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of that graph."""

        def before(reference) -> list:
            other = reference.deref()
            inputs = [] if self._begins(other) else other.op.inputs
            return [needed.ref() for needed in inputs]

        with self._graph.as_default():
            for reference in in_order([tensor.ref()], before):
                if reference not in self._copies:
                    self._make(reference.deref())
        return self._copies[tensor.ref()]

    def _begins(self, tensor: tf.Tensor) -> bool:
        """Returns whether the copy of a tensor needs nothing before it."""
        is_list = tensor.dtype == tf.variant and tensor.op.type in _WITH_LISTS
        # An integer is perhaps a size.
        is_value = tensor.dtype.is_integer or tensor.dtype.is_bool or is_list
        return (
            tensor.ref() in self._copies
            or tensor.ref() in self._parts
            or tensor.op.type in FED
            or tensor.op.type in CONTROL_FLOW_V1
            or tensor.dtype == tf.resource
            or (tensor.dtype == tf.variant and not is_list)
            or is_reference(tensor)
            or (bool(functions_of(tensor.op)) and tensor.op.type not in CALLERS)
            or (tensor.shape.is_fully_defined() and not is_value)
        )

    def _make(self, tensor: tf.Tensor) -> None:
        operation = tensor.op
        if self._begins(tensor):
            shape = self._parts.get(tensor.ref(), tensor.shape)
            copy = tf.compat.v1.placeholder(tensor.dtype.base_dtype, shape)
            self._copies[tensor.ref()] = copy
            is_flow = functions_of(operation) or operation.type in CONTROL_FLOW_V1
            if is_flow or tensor.dtype == tf.variant:
                self.opaque.add(copy.ref())
            return
        inputs = [self._copies[other.ref()] for other in operation.inputs]
        if operation.type in LOOPS:
            self._loop(operation, inputs)
        elif functions_of(operation):
            self._call(operation, inputs)
        elif operation.type in OF_LISTS:
            self._list(operation, inputs)
        elif tensor.dtype == tf.variant:  # a list, which is passed on
            self._copies[tensor.ref()] = inputs[0]
        else:
            copies = create_like(operation, self._graph, inputs).outputs
            is_opaque = any(other.ref() in self.opaque for other in inputs)
            for output, copy in zip(operation.outputs, copies, strict=True):
                copy.set_shape(_of_micro_batch(output))
                self.add(output, copy, is_opaque)

    def add(self, tensor: tf.Tensor, copy: tf.Tensor, is_opaque: bool) -> None:
        """Adds the copy of a tensor; `is_opaque` if its shape cannot be inferred."""
        self._copies[tensor.ref()] = copy
        if is_opaque:
            self.opaque.add(copy.ref())

    def _list(self, operation: tf.Operation, inputs: list[tf.Tensor]) -> None:
        """Copies a list of tensors, or takes an item or all of them."""
        (output,) = operation.outputs
        is_new = operation.type == "TensorListReserve"
        number = static_value(inputs[1]) if is_new else None
        claimed = _of_micro_batch(output)
        shape = list_shape(operation, inputs, number, claimed)
        copy = tf.compat.v1.placeholder(output.dtype.base_dtype, shape)
        is_opaque = any(other.ref() in self.opaque for other in inputs)
        is_item = output.dtype != tf.variant
        has_none = is_item and (inputs[0].shape.rank or 0) < 2
        self.add(output, copy, is_opaque or has_none)

    def _loop(self, operation: tf.Operation, inputs: list[tf.Tensor]) -> None:
        """Copies a loop, whose variables have the shapes that each round keeps."""
        body, _ = graphs_called(operation)
        shapes = [_of_micro_batch(copy) for copy in inputs]
        are_opaque = [copy.ref() in self.opaque for copy in inputs]
        while True:  # until no round changes a shape
            copies = {}
            inner = _Copies(self._graph, self._parts, self.opaque, copies)
            for argument, shape, is_opaque in zip(
                body.inputs, shapes, are_opaque, strict=True
            ):
                dtype = argument.dtype.base_dtype
                inner.add(argument, tf.compat.v1.placeholder(dtype, shape), is_opaque)
            begins = list(copies.values())
            ends = [inner.of(output) for output in body.outputs]
            before = shapes, are_opaque
            pairs = list(zip(begins, ends, strict=True))
            shapes = [common_shape(begin, _of_micro_batch(end)) for begin, end in pairs]
            are_opaque = [
                begin.ref() in self.opaque or end.ref() in self.opaque
                for begin, end in pairs
            ]
            if before[1] == are_opaque and all(map(is_same_shape, before[0], shapes)):
                break
        for output, copy, is_opaque in zip(
            operation.outputs, begins, are_opaque, strict=True
        ):
            if output.dtype != tf.variant:
                copy.set_shape(_of_micro_batch(output))
            self.add(output, copy, is_opaque)

    def _call(self, operation: tf.Operation, inputs: list[tf.Tensor]) -> None:
        """Copies a function that an operation calls, or all of its branches."""
        first = operation.type in BRANCHES  # the number of the branch
        branches = []
        for function in graphs_called(operation):
            pairs = zip(function.inputs, inputs[first:], strict=True)
            copies = {argument.ref(): copy for argument, copy in pairs}
            inner = _Copies(self._graph, self._parts, self.opaque, copies)
            branches.append([inner.of(output) for output in function.outputs])
        for output, copies in zip(operation.outputs, zip(*branches)):
            shape, *others = map(_of_micro_batch, copies)
            for other in others:
                shape = shape.most_specific_common_supertype([other])
            copy = tf.compat.v1.placeholder(output.dtype.base_dtype, shape)
            if output.dtype != tf.variant:
                copy.set_shape(_of_micro_batch(output))
            is_opaque = any(copy.ref() in self.opaque for copy in copies)
            self.add(output, copy, is_opaque)


def _key(value):
    return value.ref() if isinstance(value, tf.Tensor) else id(value)


def _of_micro_batch(tensor) -> tf.TensorShape:
    kind = next(kind for kind in _KINDS if isinstance(tensor, kind))
    return _originals[kind].fget(tensor)


def _shape(original: property, tensor) -> tf.TensorShape:
    """Returns the shape of a tensor, for the code that reads it."""
    shape = original.fget(tensor)
    if shape.rank is None or shape.is_fully_defined():
        return shape
    if not is_shape_read_outside():  # as most are, so it is asked first
        return shape
    sizes = _sizes_around()
    if sizes is None:
        return shape
    return lazy_shape(shape, functools.partial(sizes.of, tensor))


def _set_shape(tensor: tf.Tensor, shape) -> None:
    """Sets a static shape, without the sizes that differ among micro-batches."""
    before, shape = _of_micro_batch(tensor), tf.TensorShape(shape)
    # A shape that says no more asks for no size.
    is_new = not shape.is_compatible_with(before) or before != before.merge_with(shape)
    if is_new and before.rank is not None and shape.rank is not None:
        sizes = None if before.is_fully_defined() else _sizes_around()
        if sizes is not None and is_shape_read_outside():
            shape = sizes.set_to(tensor, shape)
        elif sizes is not None and _gets_number(before, shape):
            shape = sizes.without_number(tensor, shape)  # a layer had it of its input
    _originals[_SET_SHAPE](tensor, shape)


def _gets_number(before: tf.TensorShape, shape: tf.TensorShape) -> bool:
    """Returns whether a shape has a number of rows, which was None before."""
    return before.as_list()[0] is None and shape.as_list()[0] is not None


def _sizes_around() -> StaticSizes | None:
    """Returns the sizes of the default graph, or of one around it, while code reads them."""
    graph, sizes = tf.compat.v1.get_default_graph(), None
    while sizes is None and graph is not None:
        sizes, graph = getattr(graph, _SIZES, None), outer_graph_of(graph)
    return sizes if sizes in _users else None


def sizes_of_graph(graph: tf.Graph) -> StaticSizes:
    """Returns the static sizes of a graph, which all replicas share."""
    return value_of_graph(graph, _SIZES, StaticSizes(graph))
