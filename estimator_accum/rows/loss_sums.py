"""Proof that a tensor is a sum over examples."""

import itertools
from collections.abc import Callable

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


def factors_of_sums(analysis: Analysis, tensor: tf.Tensor) -> list[float | None]:
    """Returns the factor of each sum over examples of which a tensor consists.

    Args:
        analysis: The states of the tensors that it is computed from.
        tensor: The tensor.

    Returns:
        A number for each sum, 1/2 for L2Loss, None for one that is not constant; an
        empty list unless the tensor provably is such sums, plus terms without examples.
    """
    operation = tensor.op
    if analysis.state(tensor).kind != "mixed":
        return []
    kinds = [analysis.state(tensor).kind for tensor in operation.inputs]
    first = operation.inputs[0] if operation.inputs else None
    if operation.type == "L2Loss" and kinds[0] == "rows":
        return [0.5]
    if operation.type == "Sum" and kinds[0] == "rows":
        return [1.0] if _sums_rows(analysis, operation) else []
    if operation.type in ("Sum", "Mean"):
        by = 1.0 if operation.type == "Sum" else _share(operation)
        return _scaled(factors_of_sums(analysis, first), by)
    if operation.type in SHOWN or (
        operation.type == "StridedSlice" and is_one_number(first)
    ):
        return factors_of_sums(analysis, first)
    if operation.type in ("Einsum", "MatMul"):
        return [1.0] if _combines_rows(analysis, operation) else []
    if operation.type in SCALING and sorted(kinds) == ["fixed", "mixed"]:
        place = kinds.index("mixed")
        if operation.type != "Mul" and place:
            return []
        by = tf.get_static_value(operation.inputs[1 - place])
        if by is None or by.size != 1 or not by.all():
            by = None
        elif operation.type != "Mul":
            by = 1.0 / by
        return _scaled(factors_of_sums(analysis, operation.inputs[place]), by)
    if operation.type not in LINEAR:
        return []
    factors = []
    for summand, kind in zip(operation.inputs, kinds):
        if kind != "fixed":
            factors.append(factors_of_sums(analysis, summand))
    return list(itertools.chain(*factors)) if all(factors) else []


def _scaled(factors: list[float | None], by: float | None) -> list[float | None]:
    return [None if by is None or f is None else float(f * by) for f in factors]


def _share(operation: tf.Operation) -> float | None:
    """Returns 1 / the number of elements that a mean has each result of."""
    before = operation.inputs[0].shape.num_elements()
    after = operation.outputs[0].shape.num_elements()
    return after / before if before and after else None


def _sums_rows(analysis: Analysis, operation: tf.Operation) -> bool:
    """Returns whether a sum of a tensor with rows is over these."""
    axes, rank = analysis.value(operation.inputs[1]), operation.inputs[0].shape.rank
    if axes is None or rank is None:
        return False
    rows = analysis.state(operation.inputs[0]).axis
    return rows in {int(axis) % rank for axis in axes.flat}


def _combines_rows(analysis: Analysis, operation: tf.Operation) -> bool:
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
    waiting, may_be = [(loss, False)], False
    while waiting:
        tensor, is_mean = waiting.pop()
        operation, inputs = tensor.op, list(tensor.op.inputs)
        if operation.type in ("Einsum", "L2Loss", "MatMul") or (
            operation.type == "Sum" and not is_one_number(inputs[0])
        ):
            may_be = True
        elif operation.type in {"Mean", "Sum", *SHOWN}:
            is_mean |= operation.type == "Mean" and not is_one_number(inputs[0])
            waiting.append((inputs[0], is_mean))
        elif operation.type in LINEAR:
            waiting += [(summand, is_mean) for summand in inputs]
        elif operation.type in SCALING:
            if operation.type != "Mul" and has_batch(inputs[1].op):
                return False
            waiting += [(t, is_mean) for t in inputs if tf.get_static_value(t) is None]
        elif has_batch(operation):
            if is_mean:
                return False
            may_be = True
    return may_be


def refuse_sum(loss: tf.Tensor, of_weights: str) -> None:
    """Raises ValueError for a loss that is a sum and declared as a mean.

    Args:
        loss: The loss.
        of_weights: Remedy for a sum with weights whose sum is 1.
    """
    raise ValueError(
        "A loss that sums over the examples must be declared as a sum. Received: "
        f"{loss.name}, declared as a mean, the default. Pass reduction='sum' to the "
        "function that makes the train op, or divide the loss by the number of examples. "
        f"If it has weights that the input pipeline normalizes, {of_weights}."
    )
