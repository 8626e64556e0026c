"""Proof that a gradient is a sum of constant multiples of gradients."""

import logging

import tensorflow as tf

from estimator_accum.core.gradients import Gradient, values_of
from estimator_accum.graph.internals import original_of
from estimator_accum.graph.names import (
    COMPARISONS,
    PRODUCTS,
    SETTLED,
    SUMS,
    draws_by_state,
    draws_from_seed,
)
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
_BILINEAR = {"BatchMatMulV2", "MatMul", *PRODUCTS}
# Linear operations of one of their inputs, or of all together.
_STRAIGHT = {
    *("Cast", "ConcatV2", "Pack", "Slice", "Split", "SplitV", "StridedSlice"),
    *("StopGradient", "Transpose", "Unpack", "UnsortedSegmentSum"),
    *_BILINEAR,
    *_REARRANGED,
    *SUMS,
}
_logger = logging.getLogger("tensorflow.estimator_accum")


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

    terms = products_of(tensor, is_gradient)
    if terms is None:
        return False
    gradients, factors = ([tensor.op for tensor in part] for part in terms)
    needed = ancestors(factors)
    if not may_vary and any(op.type in SETTLED for op in needed):
        return False
    of_factors = varying(needed)
    return not of_factors or not of_factors & varying(ancestors(gradients))


def products_of(tensor: tf.Tensor, is_gradient) -> tuple[list, list] | None:
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
        if _is_curved(user, of_sums) and all(
            tensor.shape.is_fully_defined() for tensor in of_sums
        ):
            raise ValueError(
                "A tensor that tf.gradients differentiates must not be a function of other "
                "gradients, which are those of a micro-batch. Received: "
                f"{user.name} of type {user.type}. If the loss is a mean over examples, "
                "as with a penalty for each, call compute_gradients in place of "
                "tf.gradients. If not, split whole batches by microbatch_model_fn, and "
                "leave the optimizer as it is, without AccumulatingOptimizer."
            )


def check_linear(gradients: list[Gradient], optimizer) -> None:
    """Refuses gradients that `compute_gradients` has changed in other than a linear way.

    It warns of operations that may be linear, such as an average over workers.

    Args:
        gradients: Gradients that a `compute_gradients` of an optimizer's own returned.
        optimizer: The optimizer.
    """
    starts = [values_of(gradient).op for gradient in gradients]
    between = data_ancestors(starts, _inputs_after_gradients)
    sums = {op for op in between if original_of(op) is not None}
    users = data_descendants(
        (output for op in sums for output in op.outputs), between.__contains__
    )
    users -= sums
    others, unknown = [], [] if sums else starts  # a tape notes no gradients
    for user in sorted(users, key=lambda operation: operation.name):
        inputs = _inputs_after_gradients(user)
        of_sums = [t for t in inputs if t.op in users or t.op in sums]
        others += [t.op for t in inputs if t.op not in users and t.op not in sums]
        if _is_curved(user, of_sums) or user.type in COMPARISONS:
            _refuse(user, optimizer)
        if user.type not in _STRAIGHT:
            unknown.append(user)
    needed = data_ancestors(others)
    of_others = varying(needed)
    of_batch = of_others & varying(data_ancestors(sums)) if of_others else ()
    for operation in needed:
        is_draw = operation in of_others and draws_by_state(operation.type)
        if is_draw or operation in of_batch or _draws_anew(operation):
            _refuse(operation, optimizer)
    if unknown:
        _logger.warning(
            "compute_gradients of %s changes the gradients of each micro-batch, by %s of "
            "type %s. If this is not linear, as an average over workers is, the weights "
            "are not those of the big batch.",
            type(optimizer).__name__,
            unknown[0].name,
            unknown[0].type,
        )


def _draws_anew(operation: tf.Operation) -> bool:
    """Returns whether an operation draws from a seed that is not a constant."""
    if not draws_from_seed(operation.type):
        return False
    seeds = data_ancestors([tensor.op for tensor in operation.inputs[1:]])
    return any(not seed.inputs and seed.type != "Const" for seed in seeds)


def _inputs_after_gradients(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the inputs that numbers or conditions are computed from, of no gradient."""
    if original_of(operation) is not None:
        return []
    inputs = operation.inputs
    return [t for t in inputs if t.dtype.is_floating or t.dtype == tf.bool]


def _is_curved(user: tf.Operation, of_sums: list[tf.Tensor]) -> bool:
    """Returns whether an operation's value for means is not the mean of its values.

    Args:
        user: The operation.
        of_sums: Those of its inputs that are computed from sums over a batch.
    """
    if user.type in ("Div", "RealDiv") and any(user.inputs[1] is t for t in of_sums):
        return True
    return user.type in _CURVED or (user.type in _BILINEAR and len(of_sums) > 1)


def _refuse(operation: tf.Operation, optimizer) -> None:
    raise ValueError(
        "compute_gradients of an optimizer must only add gradients of a scalar loss, "
        "and multiply them by numbers that micro-batches share: it runs with each of "
        f"them. Received: {operation.name} of type {operation.type}, in a "
        f"{type(optimizer).__name__}. "
        "Pass `clip_norm` if it clips, or change the gradients between compute_gradients "
        "and apply_gradients of AccumulatingOptimizer."
    )
