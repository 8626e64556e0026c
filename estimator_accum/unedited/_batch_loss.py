"""The loss of a batch, and whether a declared reduction can be right."""

import tensorflow as tf

from estimator_accum.microbatch._batch import WholeBatch
from estimator_accum.unedited._head import Copies, View, of_batch

# Linear, so that a sum stays a sum.
_LINEAR = {"Add", "AddN", "AddV2", "Cast", "Identity", "Neg", "Sub", "Reshape"}
_SCALING = {"Mul", "RealDiv", "Div", "DivNoNan"}


def loss_of_batch(batch: WholeBatch, loss: tf.Tensor) -> tf.Tensor:
    """Returns the loss of the whole batch, after its last micro-batch.

    Args:
        batch: The batch; the operations that collect what the loss needs are added.
        loss: A tensor of the micro-batch.
    """
    if loss.op not in of_batch(batch):
        return loss
    with tf.control_dependencies(None):
        copies = Copies(batch, is_early=False)
        (value,) = copies.make(View(batch, [loss]), [loss])
    value.set_shape(loss.shape)
    return value


def check_declared(batch: WholeBatch, loss: tf.Tensor) -> None:
    """Raises ValueError if the loss is a sum over examples, declared as a mean.

    Args:
        batch: The batch, of which the reduction is declared.
        loss: The loss of the micro-batch.
    """
    if batch.reduction == "sum" or loss.op not in of_batch(batch):
        return
    view = View(batch, [loss])
    if _is_sum(view, loss):
        raise ValueError(
            "A loss that sums over the examples must be declared as a sum. Received: "
            f"{loss.name}, declared as a mean, the default. Pass reduction='sum' to what "
            "makes the train op, or divide the loss by the number of examples."
        )


def _is_sum(view: View, tensor: tf.Tensor) -> bool:
    """Returns whether a tensor provably is a sum over examples, plus a constant."""
    state, operation = view.state(tensor), tensor.op
    if state.kind != "mixed":
        return False
    kinds = [view.state(each).kind for each in operation.inputs]
    first = operation.inputs[0]
    if operation.type == "Sum" and kinds[0] == "rows":
        axes = view.analysis.value(operation.inputs[1])
        rank = first.shape.rank
        if axes is None or rank is None:
            return False
        return view.state(first).axis in {int(axis) % rank for axis in axes.flat}
    if operation.type in ("Sum", "Mean") and first.shape.rank == 0:
        return _is_sum(view, first)
    if operation.type in _SCALING and kinds.count("mixed") == 1:
        place = kinds.index("mixed")
        if operation.type != "Mul" and place:
            return False
        return set(kinds) <= {"mixed", "fixed"} and _is_sum(
            view, operation.inputs[place]
        )
    if operation.type in _LINEAR:
        parts = [each for each, kind in zip(operation.inputs, kinds) if kind != "fixed"]
        return bool(parts) and all(_is_sum(view, part) for part in parts)
    return False
