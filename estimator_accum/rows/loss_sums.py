"""Proof that a tensor is a sum over examples."""

import itertools

import tensorflow as tf

from estimator_accum.graph.names import PRODUCTS, SUMS
from estimator_accum.rows.analysis import Analysis

# Operations through which a sum of terms stays one.
LINEAR = {*SUMS, "Cast", "ExpandDims", "Reshape", "Squeeze"}
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
        axes = analysis.value(operation.inputs[1])
        rank = first.shape.rank
        if axes is None or rank is None:
            return []
        is_over = analysis.state(first).axis in {int(axis) % rank for axis in axes.flat}
        return [1.0] if is_over else []
    if operation.type in ("Sum", "Mean") and is_one_number(first):
        return factors_of_sums(analysis, first)
    if operation.type in SCALING and sorted(kinds) == ["fixed", "mixed"]:
        place = kinds.index("mixed")
        if operation.type != "Mul" and place:
            return []
        by = tf.get_static_value(operation.inputs[1 - place])
        return [
            None
            if by is None or factor is None or by.size != 1 or not by.all()
            else float(factor * by if operation.type == "Mul" else factor / by)
            for factor in factors_of_sums(analysis, operation.inputs[place])
        ]
    if operation.type not in LINEAR:
        return []
    factors = []
    for summand, kind in zip(operation.inputs, kinds):
        if kind != "fixed":
            factors.append(factors_of_sums(analysis, summand))
    return list(itertools.chain(*factors)) if all(factors) else []


def refuse_sum(loss: tf.Tensor) -> None:
    """Raises ValueError for a loss that is a sum and declared as a mean."""
    raise ValueError(
        "A loss that sums over the examples must be declared as a sum. Received: "
        f"{loss.name}, declared as a mean, the default. Pass reduction='sum' to what "
        "makes the train op, or divide the loss by the number of examples."
    )
