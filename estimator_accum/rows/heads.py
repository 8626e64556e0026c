"""The operations from examples to a loss, which run on random examples.

They are copied into a graph of their own, so no form of a loss is a rule.
"""

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.functions import (
    all_nodes,
    kinds_in,
    library_of_functions,
)
from estimator_accum.graph.internals import (
    context_of,
    is_stateful,
    session_with_own_threads,
)
from estimator_accum.graph.lookups import UNIQUE
from estimator_accum.graph.names import (
    CALLERS,
    CONTROL_FLOW_V1,
    DRAWS,
    FED,
    OF_SHAPES,
    READERS,
    READERS_OF_VALUE,
    SHOWING,
    VARIABLES,
)
from estimator_accum.graph.walks import control_inputs_of, data_ancestors
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.loss_sums import is_one_number

# Operations that select rows of their first input, by the places in their second one.
SELECTING = {"DynamicPartition", "GatherNd", "GatherV2"}
_MOST_OPERATIONS = 300  # also those of functions
_MOST_NUMBERS = 1_000_000  # of variables and tensors to draw; a table may have more
_MOST_STEPS = 50  # from the parts of a batch to a mask
_TIMEOUT_MS = 10_000  # of a loop that random examples may never end
_LENGTH = 3  # of axes that are of no known length
_REPEATABLE = {*CALLERS, *CONTROL_FLOW_V1, *READERS, *VARIABLES, "Assert"}
_LISTS = ("TensorArray", "TensorList", "Stack")


class Rows(NamedTuple):
    """A tensor with rows of examples, or one whose entries are selected from rows.

    Attributes:
        tensor: The tensor.
        axis: Axis of the examples, in the rows.
        span: Number of rows for each example.
        shape: Shape of the rows.
        selection: A result of an operation that selects entries from its first input;
            None for rows.
    """

    tensor: tf.Tensor
    axis: int
    span: int
    shape: tf.TensorShape
    selection: tf.Tensor | None = None


class Head(NamedTuple):
    """The operations between examples and a loss.

    Attributes:
        loss: The loss.
        operations: The operations that combine examples.
        rows: Tensors with rows that they read.
        others: Tensors of no example that they read.
    """

    loss: tf.Tensor
    operations: list[tf.Operation]
    rows: list[Rows]
    others: list[tf.Tensor]


def find_head(
    analysis: Analysis, loss: tf.Tensor, with_parts: bool = False
) -> Head | None:
    """Returns the operations that combine examples; None if they cannot be repeated.

    Args:
        analysis: The states of tensors.
        loss: The loss.
        with_parts: Whether rows that the batch alone decides, such as masks, are computed
            from the parts of the batch, and sizes too. Else any number stands for them.
    """
    rows, others, operations = {}, {}, {}
    library = library_of_functions()
    waiting = collections.deque([loss.op])  # those near the loss first
    while waiting:
        operation = waiting.popleft()
        if operation in operations:
            continue
        operations[operation] = None
        if len(operations) > _MOST_OPERATIONS:
            return None
        if context_of(operation) is not None:  # a branch's constants wait for it
            waiting += control_inputs_of(operation)
        tensors = list(operation.inputs)
        for tensor in tensors:  # grows
            state = analysis.state(tensor)
            if not _is_given(analysis, tensor) or (
                with_parts and _is_computed(analysis, tensor, library)
            ):
                waiting.append(tensor.op)
            elif state.kind == "fixed":
                others[tensor.name] = tensor
            else:
                rows[tensor.name] = _rows_of(analysis, tensor)
                if state.kind == "entries":
                    tensors += rows[tensor.name].selection.op.inputs[1:]
    nodes = all_nodes(operations)
    kinds = {node.op for node in nodes}
    if len(nodes) > _MOST_OPERATIONS or not all(map(_is_repeatable, kinds)):
        return None
    if not with_parts and kinds & UNIQUE.keys():
        return None  # which do not see that an example is repeated
    return Head(loss, list(operations), list(rows.values()), list(others.values()))


@contextlib.contextmanager
def runs_of(head: Head, further: Iterable[tf.Tensor] = ()) -> Iterator[Callable]:
    """Yields a function that computes the loss from values of `rows` and `others`.

    It takes a dictionary of arrays by the names of tensors, and returns the values of the
    loss and of `further` results of the head's operations, or entries that it reads: of
    those with several elements how many they are. Variables have random values.

    Raises:
        ValueError: If values cannot be drawn, or the operations need another shape.
        tf.errors.OpError: The same, where numbers decide, also from the function.
    """
    read = [*(rows.tensor for rows in head.rows), *head.others]
    shapes = [rows.shape for rows in head.rows] + [t.shape for t in head.others]
    if not all(map(_can_be_drawn, [t.dtype for t in read], shapes)):
        raise ValueError("Tensors must have numbers that can be drawn.")
    definition, _ = define(head.operations)
    _add_selections(definition, head.rows)
    for node in definition.node:
        node.device = ""
    library = library_of_functions(head.loss.graph)
    definition.library.function.extend(library.values())
    config = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0}, allow_soft_placement=True
    )
    options = tf.compat.v1.RunOptions(timeout_in_ms=_TIMEOUT_MS)
    with tf.Graph().as_default() as graph, session_with_own_threads(config) as session:
        inputs = {
            tensor.name: tf.compat.v1.placeholder(tensor.dtype.base_dtype, shape)
            for tensor, shape in zip(read, _shapes(head), strict=True)
        }
        wanted = [head.loss, *further]
        results = insert(definition, inputs, wanted, "loss")
        places = {
            r.tensor.name: r.selection.value_index
            for r in head.rows
            if r.selection is not None
        }
        for i, tensor in enumerate(wanted):
            if tensor.name in places:  # entries, not the rows that stand for them
                (selection,) = results[i].consumers()
                results[i] = selection.outputs[places[tensor.name]]
        results[1:] = [t if is_one_number(t) else tf.size(t) for t in results[1:]]
        _draw_variables(graph, session)

        def run(values: dict[str, np.ndarray]) -> list[np.ndarray]:
            feeds = {inputs[name]: value for name, value in values.items()}
            return session.run(results, feeds, options)

        yield run


def draw_examples(
    random, head: Head, number: int, low: float, high: float = 0.9, wholes: int = 2
) -> dict[str, np.ndarray]:
    """Returns random examples by the names of tensors.

    Args:
        random: A generator of random numbers.
        head: The operations.
        number: Number of examples.
        low: The least of the numbers, but for whole ones.
        high: The largest one.
        wholes: Whole numbers are below this one.

    Raises:
        ValueError: If they are too many.
    """
    values = {}
    for tensor, axis, span, row_shape, _ in head.rows:
        shape = [_LENGTH if n is None else n for n in row_shape.as_list()]
        shape[axis] = number * span
        if np.prod(shape) > _MOST_NUMBERS:
            raise ValueError("Examples must have numbers that can be drawn.")
        values[tensor.name] = _draw(random, tensor.dtype, shape, low, high, wholes)
    return values


def draw_others(random, head: Head, flag: bool) -> dict[str, np.ndarray]:
    """Returns values of tensors of no example: constant, or random, or `flag`."""
    return {tensor.name: _fixed(random, tensor, flag) for tensor in head.others}


def number_of(tensor: tf.Tensor) -> float | None:
    """Returns the size of the constant that is at all places of a tensor, or None."""
    value = tf.get_static_value(tensor)
    return None if value is None else size_of(value)


def size_of(value: np.ndarray) -> float | None:
    """Returns the size of the finite number, not 0, at all places of an array, or None."""
    if not value.size or (value != value.flat[0]).any():
        return None
    size = abs(float(value.flat[0]))
    return size if 0 < size < np.inf else None


def _fixed(random: np.random.Generator, tensor: tf.Tensor, flag: bool) -> np.ndarray:
    value = tf.get_static_value(tensor)
    if value is not None:
        return value
    value = _draw(random, tensor.dtype, tensor.shape.as_list())
    if tensor.dtype == tf.bool:
        return np.full_like(value, flag)
    return np.maximum(value, 1) if tensor.dtype.is_integer else value


def _is_given(analysis: Analysis, tensor: tf.Tensor) -> bool:
    """Returns whether random numbers may stand for a tensor."""
    if tensor.dtype in (tf.resource, tf.variant) or context_of(tensor.op) is not None:
        return False
    if tensor.op.type in CONTROL_FLOW_V1:
        return False
    if tensor.op.type == "Const":  # whole numbers decide shapes
        return tensor.dtype.is_floating and number_of(tensor) is not None
    state = analysis.state(tensor)
    if state.kind == "entries":
        return tensor.dtype.is_floating and _selection(analysis, tensor) is not None
    return state.kind == "fixed" or state.kind == "rows" and state.distance is None


def _selection(analysis: Analysis, tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns entries that an operation selects from rows at the places of others.

    An entry is computed from its own example alone. So a number of a row, selected at
    the same place, may stand for it, whatever is computed between them.

    Args:
        analysis: The states of tensors.
        tensor: The other entries.
    """
    name, waiting, seen = analysis.state(tensor).of, collections.deque([tensor]), set()
    while waiting:
        result = waiting.popleft()
        operation = result.op
        if operation in seen:
            continue
        seen.add(operation)
        states = [analysis.state(t) for t in operation.inputs]
        if operation.type in SELECTING and context_of(operation) is None:
            table, places = states[:2]
            is_part = operation.type == "DynamicPartition"
            selected = analysis.state(result) if is_part else places
            is_same = selected.kind == "entries" and selected.of == name
            if table.kind == "rows" and is_same:
                return result
        of_inputs = zip(operation.inputs, states, strict=True)
        waiting += [t for t, s in of_inputs if s.kind == "entries" and s.of == name]
    return None


def _rows_of(analysis: Analysis, tensor: tf.Tensor) -> Rows:
    """Returns the rows that stand for a tensor."""
    state, shape, selection = analysis.state(tensor), tensor.shape, None
    if state.kind == "entries":
        selection = _selection(analysis, tensor)
        table, places = selection.op.inputs[:2]
        state = analysis.state(table)
        axes = places.shape[-1] if selection.op.type == "GatherNd" else 1
        shape = table.shape[:axes].concatenate(shape[1:])
    length = state.span.factor * _LENGTH ** len(state.span.symbols)
    return Rows(tensor, state.axis, length, shape, selection)


def _add_selections(
    definition: tf.compat.v1.GraphDef, all_rows: Iterable[Rows]
) -> None:
    """Lets operations read entries that are selected from rows in their place."""
    selected, names = {}, set()
    for rows in all_rows:
        if rows.selection is not None:
            node = definition.node.add()
            node.CopyFrom(define([rows.selection.op])[0].node[0])
            node.name = f"{rows.tensor.name.replace(':', '_')}_selected"
            node.input[0] = rows.tensor.name
            is_part = node.op == "DynamicPartition"
            dtype = rows.tensor.dtype.as_datatype_enum
            node.attr["T" if is_part else "Tparams"].type = dtype
            place = rows.selection.value_index
            selected[rows.tensor.name] = f"{node.name}:{place}"
            names.add(node.name)
    for node in definition.node:
        if node.name not in names:
            node.input[:] = [selected.get(name, name) for name in node.input]


def _is_computed(analysis: Analysis, tensor: tf.Tensor, library: dict) -> bool:
    """Returns whether a few steps compute rows from parts of the batch, or a fixed size."""
    if analysis.state(tensor).kind == "fixed":
        is_size = tensor.dtype.is_integer and tf.get_static_value(tensor) is None
        return is_size and _is_repeatable(tensor.op.type)
    if analysis.is_given(tensor):
        return False
    waiting, seen = [tensor], set()
    while waiting:
        operation = waiting.pop().op
        if operation in seen:
            continue
        seen.add(operation)
        kinds = kinds_in(operation, library)
        if len(seen) > _MOST_STEPS or not all(map(_is_repeatable, kinds)):
            return False
        for other in [] if operation.type in OF_SHAPES else operation.inputs:
            is_fixed = analysis.state(other).kind == "fixed"
            is_part = analysis.is_given(other)
            if not (is_fixed or is_part) or not _is_given(analysis, other):
                waiting.append(other)
                continue
            is_learned = is_fixed and _is_learned(other)
            if is_learned or not _can_be_drawn(other.dtype, other.shape):
                return False
    return True


def _is_learned(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor of no example is computed from a variable."""
    if tf.get_static_value(tensor) is not None:
        return False
    kinds = {operation.type for operation in data_ancestors([tensor.op])}
    return not kinds.isdisjoint({*READERS_OF_VALUE, *VARIABLES})


def _is_repeatable(kind: str) -> bool:
    if kind in _REPEATABLE or kind.startswith(_LISTS):
        return True
    if kind in SHOWING:
        return False
    return kind not in DRAWS and kind not in FED and not is_stateful(kind)


def _can_be_drawn(dtype: tf.DType, shape: tf.TensorShape) -> bool:
    if not _is_number(dtype) or shape.rank is None:
        return False
    return np.prod([n or _LENGTH for n in shape.as_list()]) <= _MOST_NUMBERS


def _is_number(dtype: tf.DType) -> bool:
    return dtype.is_floating or dtype.is_integer or dtype.is_bool


def _shapes(head: Head) -> list[list[int | None]]:
    """Returns the shapes of `rows`, with a free number of examples, and of `others`."""
    shapes = []
    for rows in head.rows:
        shape = rows.shape.as_list()
        shape[rows.axis] = None
        shapes.append(shape)
    return shapes + [tensor.shape.as_list() for tensor in head.others]


def _draw_variables(graph: tf.Graph, session) -> None:
    """Draws the variables; raises ValueError if one is of no known size, or too large."""
    random = np.random.default_rng(0)
    for handle in [op for op in graph.get_operations() if op.type == "VarHandleOp"]:
        shape = tf.TensorShape(handle.get_attr("shape"))
        dtype = handle.get_attr("dtype")
        if (
            not _is_number(dtype)
            or not 0 < (shape.num_elements() or 0) <= _MOST_NUMBERS
        ):
            raise ValueError("Variables must have numbers that can be drawn.")
        value = _draw(random, dtype, shape.as_list())
        write = tf.raw_ops.AssignVariableOp(
            resource=handle.outputs[0], value=tf.constant(value, dtype)
        )
        session.run(write)


def _draw(
    random,
    dtype: tf.DType,
    shape: list,
    low: float = 0.1,
    high: float = 0.9,
    wholes: int = 2,
) -> np.ndarray:
    """Returns random numbers; whole ones are sorted, if they are in a row."""
    shape = [_LENGTH if length is None else length for length in shape]
    if dtype.is_floating:
        value = random.uniform(low, high, shape)
    elif dtype.is_bool:
        value = random.random(shape) < 0.7
    else:
        value = random.integers(0, wholes, shape)
        value = np.sort(value) if len(shape) == 1 else value
    return value.astype(dtype.base_dtype.as_numpy_dtype)
