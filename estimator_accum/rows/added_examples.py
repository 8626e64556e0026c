"""Proof by numbers that a loss is a sum over examples, with more of which it grows.

    L(A and A) - L(A) = L(A and A and A) - L(A and A) = D(A), not 0
    L(A) - D(A) = L(B) - D(B) = C
    L(A and B) = L(A) + L(B) - C

for random examples A and B; C is a penalty, say. A mean has D = 0. The last equation tells
a mean over pairs of examples apart. It is left out where a normalization joins examples, of
which no pairs are made: repeated examples have the same moments, and others have not. The
equations hold for positive numbers, where logarithms exist, and for those of both signs,
where margins have an end, if the loss is finite there.
"""

import collections
import itertools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from estimator_accum.graph.functions import all_nodes, operations_with_own_gradients
from estimator_accum.graph.internals import context_of
from estimator_accum.rows.heads import (
    Head,
    Rows,
    draw_examples,
    draw_others,
    number_of,
    runs_of,
    size_of,
)

_EXAMPLES = 4
_NUMBERS = {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64}


def factors_by_numbers(head: Head | None) -> list[float]:
    """Returns possible factors of a sum over examples; none without a proof of a sum.

    The factor is among them, unless it is inside of what has rows.
    """
    if head is None or not head.rows or _may_scale_unseen(head.operations):
        return []
    flags = (True, False) if any(t.dtype == tf.bool for t in head.others) else (True,)
    try:
        with runs_of(head) as run:
            constants = [_constants_of_sum(head, run, flag) for flag in flags]
    except (tf.errors.OpError, ValueError):  # such as examples that do not fit
        return []
    if None in constants:
        return []
    # A constant of a function scales once; equal ones outside of it are one here.
    numbers = [*(2 * list(itertools.chain(*constants))), *_constants_of_functions(head)]
    pairs = itertools.combinations([1.0, 1.0, *numbers], 2)
    return list({f for a, b in pairs for f in (a * b, a / b, b / a, 1.0 / (a * b))})


def _may_scale_unseen(operations: list[tf.Operation]) -> bool:
    """Returns whether a variable or a user's gradient may be a factor."""
    handles = [op for op in operations if op.type == "VarHandleOp"]
    shapes = [tf.TensorShape(handle.get_attr("shape")) for handle in handles]
    is_one = any(shape.num_elements() == 1 for shape in shapes)
    return is_one or bool(operations_with_own_gradients(operations))


def _constants_of_sum(head: Head, run: Callable, flag: bool) -> list | None:
    """Returns constants that scale a sum; None if the equations of this file fail.

    Args:
        head: The operations.
        run: Function of values by the names of tensors that returns the loss.
        flag: The value of conditions that no example decides.
    """
    random = np.random.default_rng(0)
    others = draw_others(random, head, flag)
    names = {rows.tensor.name: rows for rows in head.rows}

    def loss(*examples: dict[str, np.ndarray], changed: dict | None = None) -> float:
        """Returns the loss of examples, each beside its likes, with other numbers."""
        values = {
            name: _interleaved(names[name], [part[name] for part in examples])
            for name in names
        }
        return float(np.sum(run({**others, **(changed or {}), **values})[0]))

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
            names_of[number_of(tensor)].append(tensor.name)
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


def _is_like_a_number(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is one number, or the same one at all places."""
    is_number = tensor.shape.num_elements() == 1 or number_of(tensor) is not None
    return is_number and tensor.dtype != tf.bool


def _constants_of_functions(head: Head) -> list[float]:
    """Returns the constants of functions and branches, and 1/2 if there is an L2Loss."""
    nodes = all_nodes(head.operations)
    values = [0.5] * any(node.op == "L2Loss" for node in nodes)
    of_branches = [op.node_def for op in head.operations if context_of(op) is not None]
    for node in [*of_branches, *nodes[len(head.operations) :]]:
        if node.op == "Const" and tf.as_dtype(node.attr["dtype"].type) in _NUMBERS:
            number = size_of(tf.make_ndarray(node.attr["value"].tensor))
            if number is not None:
                values.append(number)
    return values


def _interleaved(rows: Rows, values: list[np.ndarray]) -> np.ndarray:
    """Returns a value in which each example of the first is before its like."""
    shape, axis = values[0].shape, rows.axis
    apart = (*shape[:axis], -1, rows.span, *shape[axis + 1 :])
    joined = np.stack([value.reshape(apart) for value in values], axis + 1)
    return joined.reshape(*shape[:axis], -1, *shape[axis + 1 :])


def _examples(random, head: Head, low: float, whole: dict | None = None) -> dict:
    """Returns random examples by the names of tensors.

    Args:
        random: A generator of random numbers.
        head: The operations.
        low: The least of them, but for whole numbers.
        whole: Examples of which the whole numbers are taken, so that groups, which are
            sorted, stay so; None draws them.
    """
    values = draw_examples(random, head, _EXAMPLES, low)
    if whole is None:
        return values
    wholes = [t.name for t, *_ in head.rows if not t.dtype.is_floating]
    return values | {name: whole[name] for name in wholes}
