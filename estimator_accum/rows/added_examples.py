"""Proof by numbers that a loss is a sum over examples, with more of which it grows.

    L(A and A) - L(A) = L(A and A and A) - L(A and A) = D(A), not 0
    L(A) - D(A) = L(B) - D(B) = C                L(A and B) = D(A) + D(B) + C

for random examples A and B; C is a penalty, say. A mean has D = 0. The operations that
combine examples are copied into a graph of their own, so no form of a sum is a rule.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.functions import (
    functions_of,
    library_of_functions,
    nodes_of,
    operations_with_own_gradients,
)
from estimator_accum.graph.internals import context_of, is_stateful
from estimator_accum.graph.names import (
    CALLERS,
    CONTROL_FLOW_V1,
    DRAWS,
    FED,
    READERS,
    VARIABLES,
)
from estimator_accum.graph.walks import control_inputs_of
from estimator_accum.rows.analysis import Analysis

_MOST_OPERATIONS = 300
_EXAMPLES = 4
_LENGTH = 3  # of axes that are of no known length
_REPEATABLE = {*CALLERS, *CONTROL_FLOW_V1, *READERS, *VARIABLES, "Assert"}
_LISTS = ("TensorArray", "TensorList", "Stack")


class Rows(NamedTuple):
    """A tensor with rows of examples.

    Attributes:
        tensor: The tensor.
        axis: Axis of the examples.
        span: Number of rows for each example.
    """

    tensor: tf.Tensor
    axis: int
    span: int

    def repeated(self, value: np.ndarray, times: int) -> np.ndarray:
        """Returns a value of the tensor in which each example follows itself."""
        shape, axis = value.shape, self.axis
        apart = (*shape[:axis], -1, self.span, *shape[axis + 1 :])
        value = np.repeat(value.reshape(apart), times, axis)
        return value.reshape(*shape[:axis], -1, *shape[axis + 1 :])


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

    def factors(self) -> list[float]:
        """Returns 1, its products with one or two constants, and their inverses.

        The factor of the sum is among them, unless it is inside of what has rows.
        """
        nodes = _nodes(self.operations)
        values = [
            tf.make_ndarray(node.attr["value"].tensor)
            for node in nodes
            if node.op == "Const"
        ]
        values += [np.array(0.5)] * any(node.op == "L2Loss" for node in nodes)
        values += [tf.get_static_value(tensor) for tensor in self.others]
        values = [
            v for v in values if v is not None and v.dtype.kind in "fiu" and v.size
        ]
        numbers = {abs(float(v.flat[0])) for v in values if (v == v.flat[0]).all()}
        scales = {1.0, *(n for n in numbers if n), *(1.0 / n for n in numbers if n)}
        return [a * b for a, b in itertools.combinations_with_replacement(scales, 2)]


def find_head(analysis: Analysis, loss: tf.Tensor) -> Head | None:
    """Returns the operations that combine examples; None if they cannot be repeated."""
    rows, others, waiting, operations = {}, {}, [loss.op], {}
    while waiting:
        operation = waiting.pop()
        if operation in operations:
            continue
        operations[operation] = None
        if len(operations) > _MOST_OPERATIONS:
            return None
        if context_of(operation) is not None:  # a branch's constants wait for it
            waiting += control_inputs_of(operation)
        for tensor in operation.inputs:
            if not _is_given(analysis, tensor):
                waiting.append(tensor.op)
            elif analysis.state(tensor).kind == "fixed":
                others[tensor.name] = tensor
            else:
                _, axis, span, *_ = analysis.state(tensor)
                length = span.factor * _LENGTH ** len(span.symbols)
                rows[tensor.name] = Rows(tensor, axis, length)
    if not all(map(_is_repeatable, {node.op for node in _nodes(operations)})):
        return None
    if operations_with_own_gradients(operations):
        return None
    return Head(loss, list(operations), list(rows.values()), list(others.values()))


def is_sum(head: Head | None) -> bool:
    """Returns whether random examples prove that a loss is a sum over them."""
    if head is None or not head.rows:
        return False
    read = [*(rows.tensor for rows in head.rows), *head.others]
    if not all(map(_can_be_drawn, read)):
        return False
    flags = (True, False) if any(t.dtype == tf.bool for t in head.others) else (True,)
    definition, _ = define(head.operations)
    for node in definition.node:
        node.device = ""
    definition.library.CopyFrom(head.loss.graph.as_graph_def().library)
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    with (
        tf.Graph().as_default() as graph,
        tf.compat.v1.Session(config=config) as session,
    ):
        inputs = {
            tensor.name: tf.compat.v1.placeholder(tensor.dtype.base_dtype, shape)
            for tensor, shape in zip(read, _shapes(head), strict=True)
        }
        try:
            (loss,) = insert(definition, inputs, [head.loss], "loss")
            if not _draw_variables(graph, session):
                return False
            loss_of = functools.partial(_run, session, loss, inputs)
            return all(_adds_up(head, loss_of, flag) for flag in flags)
        except (tf.errors.OpError, ValueError):  # such as examples that do not fit
            return False


def _run(session, loss, inputs, values: dict[str, np.ndarray]) -> float:
    feeds = {inputs[name]: value for name, value in values.items()}
    return float(np.sum(session.run(loss, feeds)))


def _adds_up(head: Head, loss_of, flag: bool) -> bool:
    """Returns whether the equations of this file hold.

    Args:
        head: The operations.
        loss_of: Function of values by the names of tensors that returns the loss.
        flag: The value of conditions that no example decides.
    """
    random = np.random.default_rng(0)
    others = {tensor.name: _fixed(random, tensor, flag) for tensor in head.others}
    one, two = _examples(random, head, 0), _examples(random, head, 1)

    def loss(**times: int) -> float:
        """Returns the loss of each example of `one`, then of `two`, some times."""
        values = {}
        for rows in head.rows:
            name = rows.tensor.name
            parts = [({"one": one, "two": two}[k][name], n) for k, n in times.items()]
            parts = [rows.repeated(value, number) for value, number in parts]
            values[name] = np.concatenate(parts, rows.axis)
        return loss_of({**others, **values})

    of_one, of_two, of_both = loss(one=1), loss(two=1), loss(one=1, two=1)
    by_one, by_two = loss(one=2) - of_one, loss(two=2) - of_two
    rest = of_one - by_one
    differences = [
        loss(one=3) - of_one - 2 * by_one,
        of_two - by_two - rest,
        of_both - by_one - by_two - rest,
    ]
    for tensor in filter(_may_be_factor, head.others):
        others[tensor.name] = 3 * others[tensor.name]
        differences.append(loss(one=2) - loss(one=1) - by_one)
    size = max(abs(by_one), abs(by_two), abs(rest))
    is_close = all(abs(difference) <= 1e-4 * size for difference in differences)
    return is_close and min(abs(by_one), abs(by_two)) > 1e-2 * size


def _is_given(analysis: Analysis, tensor: tf.Tensor) -> bool:
    """Returns whether random numbers may stand for a tensor."""
    if tensor.dtype in (tf.resource, tf.variant) or context_of(tensor.op) is not None:
        return False
    if tensor.op.type in CONTROL_FLOW_V1 or tensor.op.type == "Const":
        return False
    state = analysis.state(tensor)
    return state.kind == "fixed" or state.kind == "rows" and state.distance is None


def _nodes(operations: Iterable[tf.Operation]) -> list:
    library = library_of_functions()
    called = [name for operation in operations for name in functions_of(operation)]
    return [*(op.node_def for op in operations), *nodes_of(called, library)]


def _is_repeatable(kind: str) -> bool:
    if kind in _REPEATABLE or kind.startswith(_LISTS):
        return True
    return kind not in DRAWS and kind not in FED and not is_stateful(kind)


def _can_be_drawn(tensor: tf.Tensor) -> bool:
    dtype = tensor.dtype
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
    return is_number and tensor.shape.rank is not None


def _may_be_factor(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is one number of unknown value, such as 1 / batch size."""
    is_number = tensor.shape.num_elements() == 1 and tensor.dtype != tf.bool
    return is_number and tf.get_static_value(tensor) is None


def _shapes(head: Head) -> list[list[int | None]]:
    """Returns the shapes of `rows`, with a free number of examples, and of `others`."""
    shapes = []
    for tensor, axis, _ in head.rows:
        shape = tensor.shape.as_list()
        shape[axis] = None
        shapes.append(shape)
    return shapes + [tensor.shape.as_list() for tensor in head.others]


def _draw_variables(graph: tf.Graph, session) -> bool:
    """Gives random values to the variables; returns False if one may be a factor."""
    random = np.random.default_rng(0)
    for handle in [op for op in graph.get_operations() if op.type == "VarHandleOp"]:
        shape = tf.TensorShape(handle.get_attr("shape"))
        dtype = handle.get_attr("dtype")
        if shape.num_elements() in (None, 1):
            return False
        value = _draw(random, dtype, shape.as_list())
        write = tf.raw_ops.AssignVariableOp(
            resource=handle.outputs[0], value=tf.constant(value, dtype)
        )
        session.run(write)
    return True


def _draw(random: np.random.Generator, dtype: tf.DType, shape: list) -> np.ndarray:
    """Returns random numbers; whole ones are 0 or 1, and sorted, if they are in a row."""
    shape = [_LENGTH if length is None else length for length in shape]
    if dtype.is_floating:
        value = random.uniform(0.1, 0.9, shape)
    elif dtype.is_bool:
        value = random.random(shape) < 0.7
    else:
        value = random.integers(0, 2, shape)
        value = np.sort(value) if len(shape) == 1 else value
    return value.astype(dtype.base_dtype.as_numpy_dtype)


def _fixed(random: np.random.Generator, tensor: tf.Tensor, flag: bool) -> np.ndarray:
    value = tf.get_static_value(tensor)
    if value is not None:
        return value
    value = _draw(random, tensor.dtype, tensor.shape.as_list())
    if tensor.dtype == tf.bool:
        return np.full_like(value, flag)
    return np.maximum(value, 1) if tensor.dtype.is_integer else value


def _examples(random, head: Head, least: int) -> dict[str, np.ndarray]:
    """Returns random examples by name; whole numbers in a row are at least `least`."""
    values = {}
    for tensor, axis, span in head.rows:
        shape = tensor.shape.as_list()
        shape[axis] = _EXAMPLES * span
        value = _draw(random, tensor.dtype, shape)
        if tensor.dtype.is_integer and value.ndim == 1:
            value = np.maximum(value, least)
        values[tensor.name] = value
    return values
