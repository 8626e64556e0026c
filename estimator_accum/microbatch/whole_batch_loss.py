"""`whole_batch_loss`: losses over the whole batch, such as in-batch negatives.

    pass 1    outputs of each micro-batch, forward alone -> slots
    after     loss_fn(all outputs) and its gradient, once -> slots
    pass 2    forward and backward of each micro-batch, from its rows of that gradient

This is GradCache (Gao et al. 2021, https://arxiv.org/abs/2101.06983). If one
micro-batch is the whole batch, pass 2 does the work of the others in the same run: its
reads of the slots then wait for the operations that write them.

N = number of examples in the batch, b = in the micro-batch.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from estimator_accum.core.arguments import check_loss
from estimator_accum.core.current_batch import current_batch, made_inside
from estimator_accum.core.interception import without_interception
from estimator_accum.graph.branches import is_in_branch
from estimator_accum.graph.names import VARIABLES, is_draw
from estimator_accum.graph.walks import ancestors, path_to
from estimator_accum.graph.writers import needed_by_updates, variable_of
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.collecting import (
    WHOLE_BATCH_LOSS,
    collect,
    keep,
    keep_rows,
)
from estimator_accum.microbatch.gather import gather
from estimator_accum.microbatch.writes import written_by

_GRADIENT = "EstimatorAccumWholeBatchLoss"
_SECOND = "EstimatorAccumSecondDerivative"
_ONE_ROW = (
    "`outputs` of whole_batch_loss must have one row for each example, of one shape."
)


@tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
def whole_batch_loss(
    outputs: Any, loss_fn: Callable[[Any], tf.Tensor], *, across_replicas: bool = False
) -> tf.Tensor:
    """Returns a loss over all examples of the batch that `microbatch_model_fn` splits.

        loss = whole_batch_loss((queries, documents), in_batch_negatives)

    Up to rounding, the update equals the update of the unsplit batch. Every micro-batch
    runs forward, then `loss_fn` and its gradient are computed from the outputs of all,
    then every micro-batch runs forward and backward. This takes the memory of one
    micro-batch, of all outputs, their gradients, and the tensors of `loss_fn`. If one
    micro-batch is the whole batch, it runs once. Several calls in a model_fn share their
    passes.

    Where `microbatch_model_fn` splits no batch, as in evaluation with a fixed number, and
    without it, this is `loss_fn(outputs)`; so if a window is several micro-steps, it is
    the loss of the micro-batch.

    Both passes compute the same values:

    * `tf.nn.dropout` and other random numbers that `outputs` need come from stateless
      operations, seeded by the micro-batch (see `micro_batch_seed`);
    * updates that layers register, such as batch normalization's averages, run once per
      micro-batch;
    * other operations with state that `outputs` need, such as counters and `tf.print`,
      are refused.

    Args:
        outputs: Tensors [b, ...] in any structure, such as embeddings and labels: one
            row for each example, and rows of the same shape in all micro-batches.
        loss_fn: Function of that structure, with Tensors [N, ...], that returns a
            floating-point scalar. It may read trainable variables, which get their
            gradients; variables of `trainable=False` get none, also if a `var_list`
            names them. It must use no other tensor of the micro-batch and change no
            variable, and is called once.
        across_replicas: Whether N counts the examples of all replicas that train in
            sync; then each computes the same loss. False: each replica's own examples.

    Returns:
        Scalar, the loss of the whole batch. If the loss sums over examples
        (`reduction="sum"` of `microbatch_model_fn`), the micro-batch's share of it:
        b / N.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an output has no rows, the call is in a branch, loop or
            tf.function, something must not be computed twice, or a train op of the
            model_fn has a `weight`.
        tf.errors.InvalidArgumentError: From the session, if an output lacks a row for an
            example, or has rows of other shapes in other micro-batches.
    """
    if not callable(loss_fn):
        raise TypeError(
            "`loss_fn` must be a function of the whole batch's outputs. "
            f"Received: {loss_fn!r}. Pass the function, not its result."
        )
    if not isinstance(across_replicas, bool):
        raise TypeError(
            "`across_replicas` must be True or False. "
            f"Received: {across_replicas!r}. Use False for each replica's own examples."
        )
    batch = current_batch()
    if batch is None:
        return loss_fn(outputs)
    _check_place()
    tensors = [_checked(leaf, across_replicas) for leaf in tf.nest.flatten(outputs)]
    _check_needs_no_loss(tensors)

    graph = tf.compat.v1.get_default_graph()
    scope = graph.get_name_scope()

    def loss_of(everything: list[tf.Tensor]) -> tf.Tensor:
        # Keras names variables by the scope; they are those of loss_fn(outputs).
        with graph.name_scope(scope and f"{scope}/"):
            return loss_fn(tf.nest.pack_sequence_as(outputs, everything))

    with tf.name_scope("whole_batch_loss"):
        with tf.control_dependencies(None):
            whole_loss = _Loss(batch, tensors, loss_of, across_replicas)
            value = whole_loss.value
            if batch.reduction == "sum":
                value *= whole_loss.share(value.dtype)
        with graph.gradient_override_map({"IdentityN": _GRADIENT}):
            value, *_ = tf.identity_n([value, *whole_loss.sources])
    setattr(value.op, WHOLE_BATCH_LOSS, whole_loss)
    return value


class _Loss:
    """A loss over all rows; its gradient is built on first use.

    Args:
        batch: The batch.
        outputs: Outputs of the micro-batch.
        loss_of: Function of a list of Tensors.
        across: Whether all replicas' examples count, if there are several.

    Attributes:
        loss: The loss, computed once after the first pass.
        value: The loss, read in a later run.
        is_joint: Whether it is computed from the rows of all replicas.
        sources: The micro-batch's tensors that get gradients: outputs, then tensors
            that are of no micro-batch, such as variables.
    """

    def __init__(
        self,
        batch: WholeBatch,
        outputs: list[tf.Tensor],
        loss_of: Callable[[list[tf.Tensor]], tf.Tensor],
        across: bool,
    ):
        self.is_joint = across and tf.distribute.get_strategy().num_replicas_in_sync > 1
        self._batch, self._first = batch, batch.works.first_turn(self.is_joint)
        everything = collect(batch, self._first, outputs)
        batch.works.add(self._first, twice=outputs)
        self._is_own = None
        if self.is_joint:  # the rows of this replica are those where `_is_own`
            everything, self._is_own = gather(batch.works, everything)
        self.loss, self._captured = _computed(batch, loss_of, everything, self.is_joint)
        kept = [self.loss]
        if self.is_joint:
            kept.append(tf.size(self._is_own, out_type=tf.int64))
        self.value, *total = keep(batch, self._first, "loss", kept)
        self._total = total[0] if self.is_joint else batch.rows  # N
        pairs = zip(outputs, everything, strict=True)
        pairs = [pair for pair in pairs if pair[0].dtype.is_floating]
        self._everything = [rows for _, rows in pairs]
        self.sources = [output for output, _ in pairs]
        self.sources += map(_value_of, self._captured)
        self._derived = None

    def share(self, dtype: tf.DType) -> tf.Tensor:
        """Returns b / N; exactly 1 for a whole batch."""
        return tf.cast(self._batch.size, dtype) / tf.cast(self._total, dtype)

    def part(self, arrived: tf.Tensor) -> tf.Tensor:
        """Returns a micro-batch's share of the gradient that arrives at the whole loss."""
        if self._batch.reduction == "sum":
            return arrived
        share = tf.cast(self._batch.size, tf.float64) / tf.cast(
            self._batch.rows, tf.float64
        )
        return arrived * tf.cast(share, arrived.dtype)

    def gradients(self, arrived: tf.Tensor) -> list[tf.Tensor | None]:
        """Returns the micro-batch's gradients of `sources`.

        Args:
            arrived: The gradient of the loss, a scalar.
        """
        if self._derived is None:  # once, also if there are several train ops
            with tf.control_dependencies(None), without_interception():
                self._derived = self._derive()
        is_sum = self._batch.reduction == "sum"
        scaled = []
        for i, gradient in enumerate(self._derived):
            if gradient is None:
                scaled.append(None)
                continue
            wide = tf.float64 if gradient.dtype == tf.float64 else tf.float32
            factor = tf.cast(arrived, wide)
            # A mean counts the micro-batch b times out of N, a sum counts it once. Of an
            # output it has b of N rows, of a captured tensor the whole gradient.
            if i < len(self._everything):
                factor = factor if is_sum else factor / self.share(wide)
            elif is_sum:
                factor *= self.share(wide)
            scaled.append(tf.cast(tf.cast(gradient, wide) * factor, gradient.dtype))
        return scaled

    def _derive(self) -> list[tf.Tensor | None]:
        sources = [*self._everything, *self._captured]
        derived = tf.gradients(self.loss, sources, stop_gradients=sources)
        number = len(self._everything)
        for gradient, source in zip(derived[number:], self._captured, strict=True):
            _check_dense(gradient, source.name)
        # Rows that the loss looks up, such as hard negatives, have sparse gradients.
        derived = [None if g is None else tf.convert_to_tensor(g) for g in derived]
        if self._is_own is not None:
            derived[:number] = [
                None if g is None else tf.boolean_mask(g, self._is_own)
                for g in derived[:number]
            ]
        places = [i for i, gradient in enumerate(derived) if gradient is not None]
        axes = [0 if i < number else None for i in places]
        wanted = [derived[i] for i in places]
        kept = keep_rows(self._batch, self._first, "gradient", wanted, axes)
        for i, gradient in zip(places, kept, strict=True):
            derived[i] = gradient
        return derived


@tf.RegisterGradient(_GRADIENT)
def _gradient(operation: tf.Operation, arrived: tf.Tensor, *_):
    whole_loss: _Loss | None = getattr(operation, WHOLE_BATCH_LOSS, None)
    if whole_loss is None:
        _refuse_second(operation)
    gradients = whole_loss.gradients(arrived)
    present = [gradient for gradient in gradients if gradient is not None]
    # They are read from slots, so a gradient of theirs would be lost without a word.
    with operation.graph.gradient_override_map({"IdentityN": _SECOND}):
        held = iter(tf.identity_n([*present, *operation.inputs[1:]]))
    return [None, *(None if g is None else next(held) for g in gradients)]


@tf.RegisterGradient(_SECOND)
def _refuse_second(operation: tf.Operation, *_):
    raise ValueError(
        "The gradient of whole_batch_loss must be taken once. Received: a second "
        f"derivative, or a copy, of {operation.name}. Compute its users in "
        "loss_fn."
    )


def _computed(
    batch: WholeBatch, loss_of: Callable, everything: list[tf.Tensor], is_joint: bool
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """Returns the loss, and the tensors with gradients that it uses beside `everything`."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    # What loss_fn makes, such as a penalty of gradients, is of no micro-batch.
    with made_inside(None), without_interception():
        loss = check_loss(loss_of(everything))
    after = graph.get_operations()[before:]
    needed = ancestors([loss.op])
    created = [op for op in after if op in needed]
    captured = _captured(loss, created, everything)
    _check_of_no_micro_batch(captured, batch)
    updates = needed_by_updates(graph)
    registered = [op for op in after if op in updates]
    _check_loss_fn(created, registered, is_joint)
    return loss, [tensor for tensor in captured if _is_trained(tensor)]


def _captured(
    loss: tf.Tensor, created: list[tf.Operation], everything: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the tensors from outside of loss_fn that it uses beside `everything`."""
    used = [tensor for operation in created for tensor in operation.inputs]
    # A variable is outside, also if loss_fn creates it.
    inside = {op for op in created if op.type not in VARIABLES}
    names = {tensor.name for tensor in everything}
    outside = {t.name: t for t in [*used, loss] if t.op not in inside}
    return [tensor for name, tensor in outside.items() if name not in names]


def _is_trained(tensor: tf.Tensor) -> bool:
    """Returns whether a captured tensor is computed from trainable variables."""
    variables = tf.compat.v1.trainable_variables()
    trained = {getattr(variable, "handle", variable).op for variable in variables}
    if tensor.dtype == tf.resource:
        return variable_of(tensor) in trained
    needed = ancestors([tensor.op]).keys()
    return tensor.dtype.is_floating and not trained.isdisjoint(needed)


def _value_of(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype != tf.resource:
        return tensor
    dtype = tf.as_dtype(variable_of(tensor).get_attr("dtype"))
    return tf.raw_ops.ReadVariableOp(resource=tensor, dtype=dtype)


def _check_place() -> None:
    if is_in_branch():
        raise ValueError(
            "whole_batch_loss must be called in the model_fn itself. Received: a "
            "tf.function, branch or loop. Call it with the results of that."
        )


def _checked(output, across: bool) -> tf.Tensor:
    """Returns an output as a Tensor; raises unless it has rows."""
    try:
        tensor = tf.convert_to_tensor(output)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "`outputs` must be Tensors. Received: "
            f"{type(output).__name__}. Convert it, or leave it out."
        ) from error
    if tensor.dtype.is_complex:
        raise TypeError(
            "`outputs` must be real. Received: "
            f"{tensor.name} of dtype {tensor.dtype.name}. Pass its parts."
        )
    if not tensor.shape.rank:
        raise ValueError(
            f"{_ONE_ROW} Received: {tensor.name} of shape {tensor.shape}. Let loss_fn "
            "use a tensor that belongs to no example, or give the Tensor its shape "
            "(set_shape)."
        )
    if across and not tensor.shape[1:].is_fully_defined():
        raise ValueError(
            "Rows that replicas exchange must have a static shape. Received: "
            f"{tensor.name} of shape {tensor.shape}. Give it one (set_shape)."
        )
    return tensor


def _check_needs_no_loss(tensors: list[tf.Tensor]) -> None:
    for operation in ancestors([tensor.op for tensor in tensors]):
        if hasattr(operation, WHOLE_BATCH_LOSS):
            raise ValueError(
                "`outputs` must not be computed from another whole_batch_loss. "
                f"Received: {operation.name}. Compute both losses in one loss_fn."
            )


def _check_of_no_micro_batch(captured: list[tf.Tensor], batch: WholeBatch) -> None:
    needed = ancestors([tensor.op for tensor in captured])
    if batch.begin.op in needed:
        raise ValueError(
            "`loss_fn` is called with the whole batch, so it must use no tensor of a "
            f"micro-batch. Received: {path_to(needed, batch.begin.op)}. Pass it in "
            "`outputs`."
        )


def _check_loss_fn(
    created: list[tf.Operation], registered: list[tf.Operation], is_joint: bool
) -> None:
    """Raises ValueError if loss_fn changes something, or replicas' losses differ.

    Args:
        created: Operations of loss_fn that the loss needs.
        registered: Operations that its updates need, which would run with each micro-batch.
        is_joint: Whether all replicas compute the loss.
    """
    received = [variable.name for variable in written_by([*created, *registered])]
    if is_joint:
        received += [operation.name for operation in created if is_draw(operation)]
    if received:
        raise ValueError(
            "`loss_fn` must change no variable and, across replicas, draw no random "
            f"numbers. Received: {received[0]}. Change variables in after_update_ops, "
            "and use stateless random operations with one seed for all."
        )


def _check_dense(gradient, name: str) -> None:
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    if is_sparse:
        raise ValueError(
            "`loss_fn` must not look up rows of a trainable variable. Received: "
            f"{name}. Look them up outside, and pass them in `outputs`."
        )
