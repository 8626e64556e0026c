"""Reduction of a loss over its examples, read from the graph.

    Mean, Sum / number of elements       the batch's loss is the mean of micro-batches
    Sum, Sum / constant                  it is the sum
    Sum / Sum(mask), also + or max       the mean, with the divisor of the whole batch

In the last case the divisor's sums are computed before, in a pass of their own through
the batch's micro-batches, and the graph is changed to divide by

    divisor(sums of the batch) * examples of the micro-batch / examples of the batch

Terms that do not depend on examples, such as a penalty of weights, count once.
"""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum._graph import data_ancestors
from estimator_accum.microbatch._batch import Pass, WholeBatch
from estimator_accum.microbatch._staging import Slot

# Linear in all inputs, in the first of two, and in either of two.
_LINEAR = {"Add", "AddN", "AddV2", "Cast", "Identity", "Neg", "StopGradient", "Sub"}
_DIVISIONS = {"Div", "DivNoNan", "RealDiv"}
_SUMS = {"Add", "AddN", "AddV2", "Sub"}
_SHAPES = {"OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"}
_SELECTIONS = {"Where", "Unique", "UniqueV2"}
_CHANGED = "_estimator_accum_changed"  # attribute of an operation that is done


class Reduction(NamedTuple):
    """Reduction of a loss over its examples.

    Attributes:
        is_sum: Whether the batch's loss is the sum of the micro-batches', not the mean.
        unknown: An operation that is not known to be either; None if there is none.
    """

    is_sum: bool
    unknown: tf.Operation | None = None


class Losses:
    """Finds the reductions of a model's losses, and changes divisors.

    Args:
        batch: The batch.
        reduction: "mean" or "sum", for all losses; "auto" finds it.
    """

    def __init__(self, batch: WholeBatch, reduction: str):
        self._batch, self._reduction = batch, reduction
        self._found = {}

    def of(self, loss: tf.Tensor, of_batch: set[tf.Operation]) -> Reduction:
        """Returns the reduction of `loss`.

        Args:
            loss: A tensor that depends on a micro-batch.
            of_batch: The operations whose inputs are computed from a micro-batch.
        """
        if self._reduction != "auto":
            return Reduction(self._reduction == "sum")
        if loss.name not in self._found:
            self._found[loss.name] = self._find(loss, of_batch)
        return self._found[loss.name]

    def _find(self, loss: tf.Tensor, of_batch: set[tf.Operation]) -> Reduction:
        leaves, fixed = _terms(loss, of_batch)
        kinds = [(leaf, self._kind(leaf, of_batch)) for leaf in leaves]
        unknown = next((leaf for leaf, kind in kinds if kind is None), None)
        is_sum = {kind == "sum" for _, kind in kinds if kind is not None}
        if len(is_sum) > 1:
            unknown = next(leaf for leaf, kind in kinds if kind == "sum")
        is_sum = is_sum == {True} and unknown is None
        if is_sum:
            for user, i in fixed:
                term = user.inputs[i]
                with tf.control_dependencies(None):
                    part = term * self._share(term.dtype)
                    user._update_input(i, part)
                setattr(part.op, _CHANGED, True)
        return Reduction(is_sum, unknown)

    def _kind(self, operation: tf.Operation, of_batch: set) -> str | None:
        """Returns "mean", "sum", or None if it is unknown or neither."""
        if operation in self._batch.means:
            return "mean"
        if operation.type == "Mean":
            is_scaled = _has_scalar_factor(operation.inputs[0].op, of_batch)
            return None if is_scaled or _is_selection(operation) else "mean"
        if operation.type == "L2Loss":
            return "sum"
        if operation.type == "Sum":
            return self._kind_of_sum(operation.inputs[0], of_batch)
        if operation.type in _DIVISIONS:
            return self._kind_of_division(operation, of_batch)
        return None

    def _kind_of_sum(self, summed: tf.Tensor, of_batch: set) -> str | None:
        if summed.shape.rank is None or None in summed.shape.as_list():
            return None if _has_scalar_factor(summed.op, of_batch) else "sum"
        kinds = {self._kind(leaf, of_batch) for leaf in _terms(summed, of_batch)[0]}
        return kinds.pop() if len(kinds) == 1 else None

    def _kind_of_division(self, division: tf.Operation, of_batch: set) -> str | None:
        above, below = division.inputs
        if getattr(division, _CHANGED, False):
            return "mean"
        leaves, fixed = _terms(above, of_batch)
        if fixed or below.shape.rank != 0:
            return None
        if any(self._kind(leaf, of_batch) != "sum" for leaf in leaves):
            return None
        of_values = _computed_from_values(self._batch)
        if below.op not in of_values:
            return "mean"  # the number of elements
        sums, inside = _sums_of(below.op, of_values)
        if not sums or _needs_variables(sums):
            return None
        for operation in sums:
            total = self._total(operation.outputs[0])
            for user in operation.outputs[0].consumers():
                if user in inside or user is division:
                    _replace(user, operation.outputs[0], total)
        with tf.control_dependencies(None):
            below = division.inputs[1]
            division._update_input(1, below * self._share(below.dtype))
        setattr(division, _CHANGED, True)
        return "mean"

    def _total(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum of `tensor` over the micro-batches, from a pass before."""
        slot = Slot("divisor", tensor.dtype, tensor.shape)
        with tf.control_dependencies(None):
            zero, total = tf.zeros([], tensor.dtype), slot.read()
            before = tf.where(self._batch.is_first, zero, slot.read())
            written, empty = slot.write(before + tensor), slot.write(zero)
            self._batch.initialize_ops.append(slot.write(zero))
        self._batch.handles.append(slot.handle)
        self._batch.earlier_passes.append(Pass([written], [empty]))
        return total

    def _share(self, dtype: tf.DType) -> tf.Tensor:
        """Returns the micro-batch's share of the batch's examples."""
        return tf.cast(self._batch.share(), dtype)


def computed_from(batch: WholeBatch, known: list[tf.Tensor] = ()) -> set[tf.Operation]:
    """Returns the operations whose inputs are computed from a micro-batch.

    Args:
        batch: The batch.
        known: Tensors of it that count as known.
    """
    stops = {tensor.name for tensor in known}
    found, waiting = set(), [batch.begin, batch.size]
    while waiting:
        tensor = waiting.pop()
        if tensor.name in stops:
            continue
        for operation in tensor.consumers():
            if operation not in found:
                found.add(operation)
                waiting += operation.outputs
    return found


def reduction_of(batch: WholeBatch, loss: tf.Tensor) -> str:
    """Returns "sum" if `loss` is the sum over examples, else "mean".

    A divisor that is computed from the batch becomes that of the whole batch.

    Args:
        batch: The batch.
        loss: A scalar.
    """
    of_batch = computed_from(batch)
    if loss.op not in of_batch:
        return "mean"
    return "sum" if Losses(batch, "auto").of(loss, of_batch).is_sum else "mean"


def _terms(
    loss: tf.Tensor, of_batch: set[tf.Operation]
) -> tuple[list[tf.Operation], list[tuple[tf.Operation, int]]]:
    """Returns the terms of `loss` that depend on a micro-batch, and those that do not.

    Returns:
        Operations whose output is a term, and (operation, index of its input).
    """
    leaves, fixed, seen, waiting = {}, {}, set(), [loss]
    while waiting:
        operation = waiting.pop().op
        if operation in seen:
            continue
        seen.add(operation)
        if operation.type == "Mul" and getattr(operation, _CHANGED, False):
            continue
        inputs = list(operation.inputs)
        of_it = [tensor.op in of_batch for tensor in inputs]
        is_scalar = bool(inputs) and inputs[0].shape.rank == 0
        if operation.type in ("Mean", "Sum") and is_scalar:
            places = [0]
        elif operation.type in _LINEAR or operation.type == "Pack":
            places = range(len(inputs))
        elif operation.type == "Mul" and sum(of_it) == 1:
            places = [of_it.index(True)]
        elif operation.type in (*_DIVISIONS, "Reshape", "Squeeze") and of_it[0]:
            places = [] if any(of_it[1:]) else [0]
        else:
            places = []
        if not places:
            leaves[operation] = None
        for i in places:
            if of_it[i]:
                waiting.append(inputs[i])
            elif operation.type in _SUMS:
                fixed[operation, i] = None
    return list(leaves), list(fixed)


def _computed_from_values(batch: WholeBatch) -> set[tf.Operation]:
    """Returns what is computed from a micro-batch's values, not only its shapes."""
    found, waiting = set(), [batch.begin]
    while waiting:
        for user in waiting.pop().consumers():
            if user not in found:
                found.add(user)
                if user.type not in _SHAPES:
                    waiting += user.outputs
    return {each for each in found if each.type not in _SHAPES}


def _sums_of(
    operation: tf.Operation, of_values: set[tf.Operation]
) -> tuple[set[tf.Operation], set[tf.Operation]]:
    """Returns the sums from which a scalar is computed, and what is between; or none."""
    sums, inside, waiting = set(), set(), [operation]
    while waiting:
        operation = waiting.pop()
        if operation.type == "Sum":
            sums.add(operation)
            continue
        inside.add(operation)
        if any(tensor.shape.rank != 0 for tensor in operation.inputs):
            return set(), set()
        waiting += [each.op for each in operation.inputs if each.op in of_values]
        if not any(each.op in of_values for each in operation.inputs):
            return set(), set()
    return sums, inside


def _needs_variables(operations: set[tf.Operation]) -> bool:
    """Returns whether values, not only shapes, are computed from trained variables."""
    trained = {variable.op for variable in tf.compat.v1.trainable_variables()}
    found, waiting = set(operations), list(operations)
    while waiting:
        operation = waiting.pop()
        if operation in trained:
            return True
        if operation.type not in _SHAPES:
            new = {tensor.op for tensor in operation.inputs} - found
            found |= new
            waiting += new
    return False


def _has_scalar_factor(operation: tf.Operation, of_batch: set) -> bool:
    """Returns whether elements are multiplied by a scalar of the micro-batch."""
    while operation.type in ("Mul", *_DIVISIONS, *_LINEAR) and operation.inputs:
        of_it = [each for each in operation.inputs if each.op in of_batch]
        if any(each.shape.rank == 0 for each in of_it):
            return True
        if len(of_it) != 1:
            return False
        operation = of_it[0].op
    return False


def _is_selection(mean: tf.Operation) -> bool:
    """Returns whether a mean is over elements that are selected by their values."""
    operation = mean
    while operation.inputs and operation.type not in ("MatMul", "BatchMatMulV2"):
        if operation.type in ("GatherV2", "GatherNd") and operation is not mean:
            needed = data_ancestors([operation.inputs[1].op])
            return any(each.type in _SELECTIONS for each in needed)
        operation = operation.inputs[0].op
    return False


def _replace(user: tf.Operation, tensor: tf.Tensor, by: tf.Tensor) -> None:
    for i, each in enumerate(user.inputs):
        if each.name == tensor.name:
            user._update_input(i, by)
