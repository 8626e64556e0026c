"""Proof that a gradient is a sum of constant multiples of gradients."""

import tensorflow as tf

from estimator_accum.core.gradients import Gradient
from estimator_accum.graph.internals import original_of
from estimator_accum.graph.names import PRODUCTS, SETTLED, SUMS
from estimator_accum.graph.walks import (
    ancestors,
    data_ancestors,
    data_descendants,
    walk,
)
from estimator_accum.graph.writers import varying

# Linear operations of their first input, by the shape or the axes in the second.
_REARRANGED = {"ExpandDims", "Mean", "Reshape", "Squeeze", "Sum"}
_CURVED = {  # whose value for a mean is not the mean of the values
    *("Abs", "Exp", "L2Loss", "Log", "Log1p", "Max", "Maximum", "Min", "Minimum"),
    *("Pow", "Prod", "Reciprocal", "Relu", "Rsqrt", "Sigmoid", "Sign", "Softmax"),
    *("Softplus", "Sqrt", "Square", "SquaredDifference", "Tanh"),
}


def parts_of(gradient: Gradient) -> list[tf.Tensor]:
    """Returns the tensors of a gradient: itself, or a sparse one's values and rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def is_linear(
    tensor: tf.Tensor, results: dict, later: set[tf.Operation], may_vary: bool
) -> bool:
    """Returns whether a tensor is a sum of constant multiples of gradients.

    Args:
        tensor: The tensor.
        results: Gradients, by the names of their tensors.
        later: Operations that compute from these.
        may_vary: Whether factors may be computed from variables.
    """

    def is_gradient(tensor: tf.Tensor) -> bool:
        # TensorFlow notes of which operation an operation is the gradient.
        is_derived = original_of(tensor.op) is not None and tensor.op not in later
        return tensor.name in results or is_derived

    terms = terms_of(tensor, is_gradient)
    if terms is None:
        return False
    gradients, factors = ([tensor.op for tensor in part] for part in terms)
    needed = ancestors(factors)
    if not may_vary and any(op.type in SETTLED for op in needed):
        return False
    of_factors = varying(needed)
    return not of_factors or not of_factors & varying(ancestors(gradients))


def terms_of(tensor: tf.Tensor, is_gradient) -> tuple[list, list] | None:
    """Returns the gradients and factors of which a tensor is a sum of products."""
    ways = {}  # by tensor: (summands, factors); None where it is no such sum
    waiting = [tensor]
    while waiting:
        part = waiting[-1]
        options = [([], [])] if is_gradient(part) else _ways(part)
        new = [t for parts, _ in options for t in parts if t.ref() not in ways]
        waiting += new
        if not new:
            waiting.pop()
            sums = [way for way in options if all(ways[t.ref()] for t in way[0])]
            ways[part.ref()] = next(iter(sums), None)
    if ways[tensor.ref()] is None:
        return None
    needed = walk([tensor.ref()], lambda ref: [t.ref() for t in ways[ref][0]])
    gradients = [ref.deref() for ref in needed if not ways[ref][0]]
    return gradients, [factor for ref in needed for factor in ways[ref][1]]


def _ways(tensor: tf.Tensor) -> list[tuple[list, list]]:
    """Returns (summands, factors) pairs, by any of which a tensor may be such a sum."""
    inputs = list(tensor.op.inputs)
    if tensor.op.type in PRODUCTS:
        pairs = (inputs, inputs[::-1])[: 2 if tensor.op.type == "Mul" else 1]
        return [([a], [b]) for a, b in pairs if b.shape.num_elements() == 1]
    if tensor.op.type == "ConcatV2":  # slices of several look-ups
        inputs.pop()
    elif tensor.op.type in _REARRANGED:  # towers' gradients, before their mean
        is_known = all(tf.get_static_value(t) is not None for t in inputs[1:])
        if not (is_known and inputs[0].shape.is_fully_defined()):
            return []
        del inputs[1:]
    elif tensor.op.type == "UnsortedSegmentSum":  # slices that become dense
        del inputs[1:]
    elif tensor.op.type not in {*SUMS, "Pack", "StopGradient"} and not keeps_precision(
        tensor.op
    ):
        return []
    return [(inputs, [])]


def keeps_precision(operation: tf.Operation) -> bool:
    """Returns whether an operation only adds bits, or casts integers: none is rounded."""
    if operation.type != "Cast":
        return False
    before, after = operation.inputs[0].dtype, operation.outputs[0].dtype
    if not (before.is_floating and after.is_floating):
        return before.is_floating == after.is_floating
    return before == after or before.size < after.size


def check_losses(gradients: list[tf.Tensor]) -> None:
    """Refuses gradients of a function of sums over the micro-batch.

    Such as the norm of a gradient: the mean of norms is not the norm of the mean. A
    gradient for each example, whose first axis is unknown, may be in any function.
    """
    needed = data_ancestors([gradient.op for gradient in gradients])
    sums = {op for op in needed if original_of(op) is not None}
    forward = {*needed, *(original_of(op) for op in sums)}
    forward = {op for op in forward if original_of(op) is None}
    users = {op for op in forward if any(tensor.op in sums for tensor in op.inputs)}
    users |= data_descendants(
        (output for op in users for output in op.outputs), forward.__contains__
    )
    for user in users:
        of_sums = [t for t in user.inputs if t.op in users or t.op in sums]
        is_product = user.type in {"MatMul", "BatchMatMulV2", *PRODUCTS}
        is_curved = user.type in _CURVED or (is_product and len(of_sums) > 1)
        if is_curved and all(tensor.shape.is_fully_defined() for tensor in of_sums):
            raise ValueError(
                "A tensor that tf.gradients differentiates must not be a function of other "
                "gradients, which are those of a micro-batch. Received: "
                f"{user.name} of type {user.type}. If the loss is a mean over examples, "
                "as with a penalty for each, call compute_gradients in place of "
                "tf.gradients. If not, split whole batches by microbatch_model_fn, and "
                "leave the optimizer as it is, without AccumulatingOptimizer."
            )
