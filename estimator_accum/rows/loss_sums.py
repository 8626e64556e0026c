"""Proof that a loss, or a term of it, is a sum over examples."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.names import PRODUCTS, SUMS
from estimator_accum.rows.analysis import Analysis

# Operations through which a sum of terms stays one.
LINEAR = {*SUMS, "Cast", "ExpandDims", "Pack", "Reshape", "Squeeze"}
# Operations whose result is their first input.
SHOWN = {"CheckNumerics", "CheckNumericsV2", "Print"}
SCALING = {*PRODUCTS, "DivNoNan"}


def is_one_number(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is a scalar, or has axes of length 1 alone."""
    return tensor.shape.num_elements() == 1


_MOST_STEPS = 10_000  # from a loss to its terms


class Sum(NamedTuple):
    """A sum over examples, which is a term of a loss.

    Attributes:
        tensor: The sum.
        factors: Numbers that scale it in the loss, 1/2 for L2Loss; None for one that is
            not constant.
    """

    tensor: tf.Tensor
    factors: tuple[float | None, ...]


def terms_of(analysis: Analysis, tensor: tf.Tensor) -> list[Sum | None]:
    """Returns the terms of a tensor that provably are sums over examples.

    Args:
        analysis: The states of the tensors that it is computed from.
        tensor: The tensor.

    Returns:
        None in the place of any other term of examples. Terms without examples, and
        those that are multiplied by 0, have no place.
    """
    terms, waiting, steps = [], [(tensor, ())], 0
    while waiting:
        part, scales = waiting.pop()
        terms_here, parts = _split(analysis, part, scales)
        terms += terms_here
        waiting += reversed(parts)
        steps += 1
        if steps > _MOST_STEPS:  # a sum that holds itself again and again
            return [None]
    return terms


def _split(
    analysis: Analysis, tensor: tf.Tensor, factors: tuple
) -> tuple[list[Sum | None], list[tuple[tf.Tensor, tuple]]]:
    """Returns the terms that a tensor is, and tensors with factors that it adds up."""
    operation = tensor.op
    state = analysis.state(tensor)
    if state.kind != "mixed":
        return ([], []) if state.kind == "fixed" else ([None], [])
    kinds = [analysis.state(tensor).kind for tensor in operation.inputs]
    first = operation.inputs[0] if operation.inputs else None
    if operation.type == "L2Loss" and kinds[0] == "rows":
        return [Sum(tensor, (*factors, 0.5))], []
    if operation.type == "Sum" and kinds[0] == "rows":
        return [Sum(tensor, factors) if sums_rows(analysis, operation) else None], []
    if operation.type == "Mean":
        return [], [(first, (*factors, _share(operation)))]
    if operation.type in {"Sum", *SHOWN} or (
        operation.type == "StridedSlice" and is_one_number(first)
    ):
        return [], [(first, factors)]
    if operation.type in ("Einsum", "MatMul"):
        is_sum = combines_rows(analysis, operation)
        return [Sum(tensor, factors) if is_sum else None], []
    if operation.type in SCALING and sorted(kinds) == ["fixed", "mixed"]:
        place = kinds.index("mixed")
        if operation.type != "Mul" and place:
            return [None], []
        by = tf.get_static_value(operation.inputs[1 - place])
        if by is not None and not by.any():
            return [], []
        by = None if by is None or by.size != 1 else float(by.item())
        if by is not None and operation.type != "Mul":
            by = 1.0 / by
        return [], [(operation.inputs[place], (*factors, by))]
    if operation.type not in LINEAR:
        return [None], []
    return [], [(part, factors) for part in operation.inputs]


def _share(operation: tf.Operation) -> float | None:
    """Returns 1 / the number of elements that a mean has each result of."""
    before = operation.inputs[0].shape.num_elements()
    after = operation.outputs[0].shape.num_elements()
    return after / before if before and after else None


def sums_rows(analysis: Analysis, operation: tf.Operation) -> bool:
    """Returns whether a sum of a tensor with rows is over these."""
    axes, rank = analysis.value(operation.inputs[1]), operation.inputs[0].shape.rank
    if axes is None or rank is None:
        return False
    rows = analysis.state(operation.inputs[0]).axis
    return rows in {int(axis) % rank for axis in axes.flat}


def combines_rows(analysis: Analysis, operation: tf.Operation) -> bool:
    """Returns whether a product of two tensors with rows sums over these."""
    labels = _labels(operation)
    states = [analysis.state(tensor) for tensor in operation.inputs]
    if labels is None or any(state.kind != "rows" for state in states):
        return False
    *inputs, output = labels
    of_rows = {names[s.axis] for names, s in zip(inputs, states, strict=True)}
    return len(of_rows) == 1 and of_rows.isdisjoint(output)


def _labels(operation: tf.Operation) -> list[str] | None:
    """Returns letters for the axes of a product's inputs and of its output."""
    if operation.type == "Einsum":
        equation = operation.get_attr("equation").decode()
        return None if "." in equation else equation.replace("->", ",").split(",")
    first = "ki" if operation.get_attr("transpose_a") else "ik"
    return [first, "jk" if operation.get_attr("transpose_b") else "kj", "ij"]


def may_be_sum(loss: tf.Tensor, has_batch: Callable[[tf.Operation], bool]) -> bool:
    """Returns whether a loss may be a sum: a look that costs nothing at a usual mean.

    Args:
        loss: The loss.
        has_batch: Whether an operation is computed from the batch.
    """
    waiting, seen = [(loss, False)], set()
    while waiting:
        tensor, is_mean = waiting.pop()
        if (tensor.name, is_mean) in seen:
            continue
        seen.add((tensor.name, is_mean))
        operation, inputs = tensor.op, list(tensor.op.inputs)
        if operation.type in ("Einsum", "L2Loss", "MatMul") or (
            operation.type == "Sum" and not is_one_number(inputs[0])
        ):
            if has_batch(operation):
                return True
        elif operation.type in {"Mean", "Sum", *SHOWN}:
            is_mean |= operation.type == "Mean" and not is_one_number(inputs[0])
            waiting.append((inputs[0], is_mean))
        elif operation.type in LINEAR:
            waiting += [(summand, is_mean) for summand in inputs]
        elif operation.type in SCALING:
            if operation.type == "Mul" or not has_batch(inputs[1].op):
                waiting += [
                    (t, is_mean) for t in inputs if tf.get_static_value(t) is None
                ]
        elif not is_mean and has_batch(operation):
            return True
    return False


def refuse_sum(loss: tf.Tensor, is_whole: bool, of_weights: str) -> None:
    """Raises ValueError for a loss that is a sum and declared as a mean.

    Args:
        loss: The loss.
        is_whole: Whether all of its terms are such sums.
        of_weights: Remedy for a sum with weights whose sum is 1.
    """
    if not is_whole:
        raise ValueError(
            "The terms of a loss must all be means over the examples, or all be sums. "
            f"Received: {loss.name}, declared as a mean, the default, which adds a sum "
            "over the examples to other terms. Divide this sum by the number of examples "
            "in the micro-batch, such as tf.shape(labels)[0], or by the sum of their "
            "weights. If the other terms are sums too, pass reduction='sum'."
        )
    raise ValueError(
        "A loss that sums over the examples must be declared as a sum. Received: "
        f"{loss.name}, declared as a mean, the default. Pass reduction='sum' to the "
        "function that makes the train op, or divide the loss by the number of examples, "
        "apart from any weight. "
        f"If it has weights that the input pipeline normalizes, {of_weights}."
    )
