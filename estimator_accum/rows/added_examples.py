"""Proof by numbers that a loss is a sum over examples, with more of which it grows.

    L(A and A) - L(A) = L(A and A and A) - L(A and A) = D(A), not 0
    L(A) - D(A) = L(B) - D(B) = C
    L(A and B) = L(A) + L(B) - C

for random examples A and B; C is a penalty, say. A mean has D = 0. The last equation tells
a mean over pairs of examples apart. It is left out where a normalization joins examples, of
which no pairs are made: repeated examples have the same moments, and others have not. The
equations hold for positive numbers, where logarithms exist, and for those of both signs,
where margins have an end, if the loss is finite there. The operations that combine examples
are copied into a graph of their own, so no form of a sum is a rule.
"""

import collections
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.functions import (
    all_nodes,
    library_of_functions,
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

_MOST_OPERATIONS = 300  # also those of functions
_MOST_NUMBERS = 1_000_000  # of variables and tensors to draw; a table may have more
_TIMEOUT_MS = 10_000  # of a loop that random examples may never end
_EXAMPLES = 4
_LENGTH = 3  # of axes that are of no known length
# Operations that do not see that an example is repeated.
_OF_DISTINCT = {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"}
_REPEATABLE = {*CALLERS, *CONTROL_FLOW_V1, *READERS, *VARIABLES, "Assert"}
_NUMBERS = {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64}
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

    def interleaved(self, values: list[np.ndarray]) -> np.ndarray:
        """Returns a value in which each example of the first is before its like."""
        shape, axis = values[0].shape, self.axis
        apart = (*shape[:axis], -1, self.span, *shape[axis + 1 :])
        joined = np.stack([value.reshape(apart) for value in values], axis + 1)
        return joined.reshape(*shape[:axis], -1, *shape[axis + 1 :])


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
    nodes = all_nodes(operations)
    if len(nodes) > _MOST_OPERATIONS or not all(
        map(_is_repeatable, {node.op for node in nodes})
    ):
        return None
    if operations_with_own_gradients(operations):
        return None
    return Head(loss, list(operations), list(rows.values()), list(others.values()))


def factors_by_numbers(head: Head | None) -> list[float]:
    """Returns possible factors of a sum over examples; none without a proof of a sum.

    The factor is among them, unless it is inside of what has rows.
    """
    if head is None or not head.rows:
        return []
    read = [*(rows.tensor for rows in head.rows), *head.others]
    if not all(map(_can_be_drawn, read)):
        return []
    flags = (True, False) if any(t.dtype == tf.bool for t in head.others) else (True,)
    definition, _ = define(head.operations)
    for node in definition.node:
        node.device = ""
    library = library_of_functions(head.loss.graph)
    definition.library.function.extend(library.values())
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
                return []
            loss_of = functools.partial(_run, session, loss, inputs)
            constants = [_constants_of_sum(head, loss_of, flag) for flag in flags]
        except (tf.errors.OpError, ValueError):  # such as examples that do not fit
            return []
    if None in constants:
        return []
    # A constant of a function scales once; equal ones outside of it are one here.
    numbers = [*(2 * list(itertools.chain(*constants))), *_constants_of_functions(head)]
    pairs = itertools.combinations([1.0, 1.0, *numbers], 2)
    return list({f for a, b in pairs for f in (a * b, a / b, b / a, 1.0 / (a * b))})


def _run(session, loss, inputs, values: dict[str, np.ndarray]) -> float:
    feeds = {inputs[name]: value for name, value in values.items()}
    options = tf.compat.v1.RunOptions(timeout_in_ms=_TIMEOUT_MS)
    return float(np.sum(session.run(loss, feeds, options)))


def _constants_of_sum(head: Head, loss_of: Callable, flag: bool) -> list | None:
    """Returns constants that scale a sum; None if the equations of this file fail.

    Args:
        head: The operations.
        loss_of: Function of values by the names of tensors that returns the loss.
        flag: The value of conditions that no example decides.
    """
    random = np.random.default_rng(0)
    others = {tensor.name: _fixed(random, tensor, flag) for tensor in head.others}
    names = {rows.tensor.name: rows for rows in head.rows}

    def loss(*examples: dict[str, np.ndarray], changed: dict | None = None) -> float:
        """Returns the loss of examples, each beside its likes, with other numbers."""
        values = {
            name: names[name].interleaved([part[name] for part in examples])
            for name in names
        }
        return loss_of({**others, **(changed or {}), **values})

    is_normalized = any(map(_normalizes, all_nodes(head.operations))) and not any(
        map(_may_have_pairs, head.operations)
    )
    one = _examples(random, head, 0.1)
    two = _examples(random, head, 0.1, one)
    differences, by_one = _differences(loss, one, two, is_normalized)
    if not np.all(differences <= 1e-4):
        return None
    one_signed = _examples(random, head, -0.9, one)
    two_signed = _examples(random, head, -0.9, one)
    differences, _ = _differences(loss, one_signed, two_signed, is_normalized)
    if np.isfinite(differences).all() and not np.all(differences <= 1e-4):
        return None

    def are_factors(names: list[str]) -> bool:
        changed = {name: 3 * others[name] for name in names}
        by_three = loss(one, one, changed=changed) - loss(one, changed=changed)
        return _is_power_of_3(by_three / by_one)

    names_of = collections.defaultdict(list)  # the same constant may stand twice
    for tensor in head.others:
        if _is_like_a_number(tensor):
            names_of[_number(tensor)].append(tensor.name)
    unknown = names_of.pop(None, [])
    if any(map(are_factors, (unknown, *([name] for name in unknown)))):
        return None  # such as 1 / batch size
    return [number for number, names in names_of.items() if are_factors(names)]


def _differences(loss: Callable, one: dict, two: dict, is_normalized: bool) -> tuple:
    """Returns by how much the equations of this file fail, and D(A).

    Args:
        loss: Function of examples, each beside its likes.
        one: Examples A.
        two: Examples B.
        is_normalized: Whether a batch normalization joins examples.

    Returns:
        Differences relative to the largest term, infinite if D is nearly 0; and D.
    """
    of_one, of_two = loss(one), loss(two)
    by_one, by_two = loss(one, one) - of_one, loss(two, two) - of_two
    rest = of_one - by_one
    size = max(abs(by_one), abs(by_two), abs(rest))
    if min(abs(by_one), abs(by_two)) <= 1e-2 * size:
        return np.array([np.inf]), by_one
    differences = [
        loss(one, one, one) - of_one - 2 * by_one,
        of_two - by_two - rest,
    ]
    if not is_normalized:
        differences.append(loss(one, two) - of_one - of_two + rest)
    return np.abs(differences) / size, by_one


def _normalizes(node) -> bool:
    return node.op in {"Pow", "Rsqrt", "Sqrt"} or node.op.startswith("FusedBatchNorm")


def _may_have_pairs(operation: tf.Operation) -> bool:
    """Returns whether a result may have an element for each pair of examples."""
    return any(
        tensor.shape.rank is None or tensor.shape.as_list().count(None) > 1
        for tensor in operation.outputs
        if tensor.dtype.is_floating
    )


def _is_power_of_3(number: float) -> bool:
    """Returns whether a number is 3, 1/3, 9 or 1/9, but for rounding."""
    return any(abs(abs(number) * 3.0**n - 1) < 1e-3 for n in (-2, -1, 1, 2))


def _is_given(analysis: Analysis, tensor: tf.Tensor) -> bool:
    """Returns whether random numbers may stand for a tensor."""
    if tensor.dtype in (tf.resource, tf.variant) or context_of(tensor.op) is not None:
        return False
    if tensor.op.type in CONTROL_FLOW_V1:
        return False
    if tensor.op.type == "Const":  # whole numbers decide shapes
        return tensor.dtype.is_floating and _number(tensor) is not None
    state = analysis.state(tensor)
    return state.kind == "fixed" or state.kind == "rows" and state.distance is None


def _is_repeatable(kind: str) -> bool:
    if kind in _REPEATABLE or kind.startswith(_LISTS):
        return True
    if kind in _OF_DISTINCT:
        return False
    return kind not in DRAWS and kind not in FED and not is_stateful(kind)


def _can_be_drawn(tensor: tf.Tensor) -> bool:
    dtype = tensor.dtype
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
    if not is_number or tensor.shape.rank is None:
        return False
    return np.prod([n or _LENGTH for n in tensor.shape.as_list()]) <= _MOST_NUMBERS


def _is_like_a_number(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is one number, or the same one at all places."""
    is_number = tensor.shape.num_elements() == 1 or _number(tensor) is not None
    return is_number and tensor.dtype != tf.bool


def _number(tensor: tf.Tensor) -> float | None:
    """Returns the size of the constant that is at all places of a tensor, or None."""
    value = tf.get_static_value(tensor)
    return None if value is None else _same(value)


def _same(value: np.ndarray) -> float | None:
    """Returns the size of the finite number, not 0, at all places of an array, or None."""
    if not value.size or (value != value.flat[0]).any():
        return None
    size = abs(float(value.flat[0]))
    return size if 0 < size < np.inf else None


def _constants_of_functions(head: Head) -> list[float]:
    """Returns the constants of functions and branches, and 1/2 if there is an L2Loss."""
    nodes = all_nodes(head.operations)
    values = [0.5] * any(node.op == "L2Loss" for node in nodes)
    of_branches = [op.node_def for op in head.operations if context_of(op) is not None]
    for node in [*of_branches, *nodes[len(head.operations) :]]:
        if node.op == "Const" and tf.as_dtype(node.attr["dtype"].type) in _NUMBERS:
            number = _same(tf.make_ndarray(node.attr["value"].tensor))
            if number is not None:
                values.append(number)
    return values


def _shapes(head: Head) -> list[list[int | None]]:
    """Returns the shapes of `rows`, with a free number of examples, and of `others`."""
    shapes = []
    for tensor, axis, _ in head.rows:
        shape = tensor.shape.as_list()
        shape[axis] = None
        shapes.append(shape)
    return shapes + [tensor.shape.as_list() for tensor in head.others]


def _draw_variables(graph: tf.Graph, session) -> bool:
    """Draws the variables; returns False if one may be a factor, or is too large."""
    random = np.random.default_rng(0)
    for handle in [op for op in graph.get_operations() if op.type == "VarHandleOp"]:
        shape = tf.TensorShape(handle.get_attr("shape"))
        dtype = handle.get_attr("dtype")
        number = shape.num_elements()
        if number in (None, 1) or number > _MOST_NUMBERS:
            return False
        value = _draw(random, dtype, shape.as_list())
        write = tf.raw_ops.AssignVariableOp(
            resource=handle.outputs[0], value=tf.constant(value, dtype)
        )
        session.run(write)
    return True


def _draw(random, dtype: tf.DType, shape: list, low: float = 0.1) -> np.ndarray:
    """Returns random numbers; whole ones are 0 or 1, and sorted, if they are in a row."""
    shape = [_LENGTH if length is None else length for length in shape]
    if dtype.is_floating:
        value = random.uniform(low, 0.9, shape)
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


def _examples(random, head: Head, low: float, whole: dict | None = None) -> dict:
    """Returns random examples by the names of tensors.

    Args:
        random: A generator of random numbers.
        head: The operations.
        low: The least of them, but for whole numbers.
        whole: Examples of which the whole numbers are taken, so that groups, which are
            sorted, stay so; None draws them.
    """
    values = {}
    for tensor, axis, span in head.rows:
        shape = tensor.shape.as_list()
        shape[axis] = _EXAMPLES * span
        if whole is None or tensor.dtype.is_floating:
            values[tensor.name] = _draw(random, tensor.dtype, shape, low)
        else:
            values[tensor.name] = whole[tensor.name]
    return values
