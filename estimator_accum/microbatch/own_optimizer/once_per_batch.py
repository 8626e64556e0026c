"""Builds the train op of a model_fn that computes its gradients and updates by itself.

    micro-batches    forward and backward; sums of gradients, rows that are reported
    once             the train op, and whatever else the model_fn writes

The second part gets what it has without micro-batches: the gradients
(estimator_accum/microbatch/own_optimizer/interception.py) and, by feeding, the value for the whole batch
of every other tensor that it is computed from.
"""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum.graph.branches import is_in_loop
from estimator_accum.graph.functions import library_of_functions
from estimator_accum.graph.internals import context_of, set_control_inputs
from estimator_accum.graph.names import SHOWING, is_draw
from estimator_accum.graph.walks import ancestors, data_ancestors, descendants, path_to
from estimator_accum.graph.writers import is_reference, variable_of, writers_of
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.collecting import WHOLE_BATCH_LOSS, keep
from estimator_accum.microbatch.outside import check_sources
from estimator_accum.microbatch.own_optimizer.activations import report_activations
from estimator_accum.microbatch.own_optimizer.head import Copies, View, of_batch
from estimator_accum.microbatch.own_optimizer.interception import Interception
from estimator_accum.microbatch.own_optimizer.order import Cut, order_update
from estimator_accum.microbatch.own_optimizer.patches import intercepting
from estimator_accum.microbatch.own_optimizer.spot_check import SpotCheck
from estimator_accum.microbatch.repeatable import (
    changes_something,
    draw_once_per_batch,
    make_repeatable,
)


def build_unedited(batch: WholeBatch, build: Callable):
    """Returns the EstimatorSpec of a model_fn, and the spot check of its gradients.

    If it trains by this library, there is no spot check, None. If it has a train op of its
    own, that needs no micro-batch any more.

    Args:
        batch: The batch; the operations of its micro-batches are added to it.
        build: Calls the model_fn on a micro-batch.

    Raises:
        ValueError: If no gradient with respect to a variable is computed, or what the
            model_fn does with a micro-batch cannot be done with several.
    """
    interception = Interception(batch)
    with batch.as_current(), intercepting(interception.gradients):
        spec = build()
    if batch.weight is not None and not interception.is_used:
        with batch.as_current():
            make_repeatable(batch.computed_twice)
        return spec, None
    train_op = getattr(spec.train_op, "op", spec.train_op)
    _check_trains(batch, interception, train_op)
    interception.finish()
    check_sources(batch)
    once = _Once(batch, interception, [train_op, *interception.waited_for])
    with batch.as_current():
        spot_check = once.finish(_losses(spec, interception))
    with tf.control_dependencies(None):
        clear = interception.clear
        train_op = tf.group(train_op, *once.moved, *clear, name="train_batch")
    return spec._replace(train_op=train_op), spot_check


def _check_trains(batch: WholeBatch, interception: Interception, train_op) -> None:
    if batch.weight is not None:
        raise ValueError(
            "A model_fn must train by this library or by optimizers of its own, not by "
            f"both. Received: {train_op.name}. Wrap all optimizers in "
            "AccumulatingOptimizer, or none."
        )
    if not interception.is_used:
        raise ValueError(
            "A model_fn must train by gradients with respect to variables. Received: "
            f"{getattr(train_op, 'name', None)} as the train op, and no call of "
            "tf.gradients or an optimizer. Train without micro-batches."
        )
    if interception.sums and not interception.sums.keys() & ancestors([train_op]):
        raise ValueError(
            "The train op must use the gradients: nothing else has a micro-batch, such "
            f"as operations that a hook runs. Received: {train_op.name}, which needs "
            "none of them. Put all updates into the train op, or train without "
            "micro-batches."
        )


def _losses(spec, interception: Interception) -> list[tf.Tensor]:
    losses = [spec.loss, *interception.losses]
    return losses + tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)


class _Once:
    """Makes what a model_fn does beside gradients happen once per batch.

    Args:
        batch: The batch.
        interception: Its gradients.
        roots: The train op, and what else changes something.

    Attributes:
        moved: Operations that change something, which waited for a micro-batch or which
            the forward pass waited for.
    """

    def __init__(self, batch: WholeBatch, interception: Interception, roots: list):
        self._batch, self._interception = batch, interception
        self._library = library_of_functions()
        self._handles = {handle.op for handle in batch.handles}
        self._of_batch = of_batch(batch)
        self._sums = set(interception.sums)
        self._roots = roots
        self._fed, self._with_sums = {}, {}
        self._forward, self._done, self._late = set(), set(), set()
        self._waiting = set()
        self.moved = []

    def finish(self, losses: list[tf.Tensor]) -> SpotCheck:
        """Divides the graph, and finds the values for the batch that are needed.

        Args:
            losses: Tensors that hooks and summaries may read.
        """
        batch, early = self._batch, self._interception.early
        for other in batch.earlier_passes:
            self._done |= {each.op for each in other.done}
        self._move_out_of_forward(losses)
        self._late = self._changes_and_what_waits()
        self._divide()
        losses = [tensor for tensor in losses if tensor.op in self._of_batch]
        view = View(batch, [*self._fed.values(), *losses])
        # If the first pass runs the network anyway, the values are computed after it.
        is_twice = bool(early.collected)
        copies = early if is_twice else Copies(batch, is_early=False)
        copies.take_losses(view, losses)
        for tensor in _scalars(copies.border(view, losses), losses, view):
            self._fed.setdefault(tensor.ref(), tensor)
        tensors = list(self._fed.values())
        with tf.control_dependencies(None):
            values = copies.make(view, tensors)
            if is_twice:
                values = keep(batch, batch.first_pass(), "reported", values)
        self._handles = {handle.op for handle in batch.handles}
        self._check_passes(values)
        batch.register(reported=dict(zip(tensors, values, strict=True)))
        draw_once_per_batch(self._shared_draws())
        make_repeatable(batch.computed_twice)
        rows = [tensor for tensor, _ in early.collected]
        make_repeatable(rows, "Rows of examples that the loss combines")
        derived = self._interception.derived
        guards = _check_places(batch, [each.view for each in derived])
        spot_check = SpotCheck(batch, derived, copies.collected, view, guards)
        report_activations(view, losses)
        done = [each for other in batch.earlier_passes for each in other.done]
        roots = [*self._roots, *self.moved]
        fed = [*tensors, *done]
        order_update(Cut(roots, list(self._sums), fed, list(self._waiting)))
        return spot_check

    def _shared_draws(self) -> list[tf.Operation]:
        """Returns the operations whose random numbers all examples share."""
        passes = [op for each in self._batch.passes for op in each.each]
        draws = [
            each for each in filter(is_draw, ancestors(passes)) if not is_in_loop(each)
        ]
        view = View(self._batch, [each.outputs[0] for each in draws])
        return [e for e in draws if view.state(e.outputs[0]).kind == "fixed"]

    def _check_passes(self, values: list[tf.Tensor]) -> None:
        """Raises ValueError if something changes before the train op runs."""
        each = [op for other in self._batch.passes for op in other.each]
        needed = ancestors([*each, *(value.op for value in values)])
        for operation in needed:
            if self._changes(operation):
                raise ValueError(
                    "What needs the micro-batch must not wait for what changes a "
                    "variable: there are several micro-batches for one change. "
                    f"Received: {path_to(needed, operation)}. Group it with the train "
                    "op (tf.group) without a dependency."
                )

    def _move_out_of_forward(self, losses: list[tf.Tensor]) -> None:
        """Moves what the forward pass waits for, and what changes something, behind it.

        Args:
            losses: Tensors that are fetched in training, with what they wait for.
        """
        forward = ancestors(self._batch.micro_ops)
        for other in self._batch.earlier_passes:
            forward |= ancestors(other.each)
        self._forward = set(forward)
        forward |= ancestors([tensor.op for tensor in losses])
        changes = {each for each in forward if self._changes(each)}
        if not changes:
            return
        needed = data_ancestors(
            [t.op for op in forward if op not in changes for t in op.inputs]
        )
        for operation in changes:
            if operation in needed:
                raise ValueError(
                    "What the forward pass reads must not change within a batch: it is "
                    "run once for each micro-batch. Received: "
                    f"{path_to(needed, operation)}, of type {operation.type}. Change it "
                    "after the update, beside the train op."
                )
        self._check_not_read_after(changes, forward)
        for operation in forward:
            waits = [each for each in operation.control_inputs if each in changes]
            if waits and operation not in changes:
                rest = [e for e in operation.control_inputs if e not in changes]
                set_control_inputs(operation, rest)
        self.moved += sorted(changes, key=lambda each: each.name)

    def _check_not_read_after(self, changes: set, forward: dict) -> None:
        written = writers_of(changes)
        for reader in forward:
            variables = {variable_of(t) for t in reader.inputs} & written.keys()
            if reader in changes or not variables:
                continue
            before = ancestors([reader])
            for variable in variables:
                for writer in written[variable]:
                    if writer in before:
                        raise ValueError(
                            "A variable must not be read by the forward pass after the "
                            "batch has changed it: every micro-batch would change it. "
                            f"Received: {variable.name}, written by {writer.name} and "
                            f"read by {reader.name}. Change it after the update."
                        )

    def _changes(self, operation: tf.Operation) -> bool:
        """Returns whether an operation changes something outside of a micro-batch."""
        if any(tensor.op in self._handles for tensor in operation.inputs):
            return False
        return changes_something(operation, self._library)

    def _divide(self) -> None:
        """Finds the tensors of a micro-batch that the roots are computed from."""
        seen, waiting = set(), [*self._roots, *self.moved]
        while waiting:
            operation = waiting.pop()
            if operation in seen:
                continue
            seen.add(operation)
            if operation in self._done:
                continue  # it is fed, when its pass has run
            rest = [each for each in operation.control_inputs if self._stays(each)]
            if len(rest) < len(operation.control_inputs):
                self._waiting.add(operation)
                set_control_inputs(operation, rest)
            waiting += rest
            for tensor in operation.inputs:
                if tensor.op not in self._of_batch or self._runs_once(tensor):
                    waiting.append(tensor.op)
                else:
                    self._fed[tensor.ref()] = tensor

    def _runs_once(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is computed in the train op's run, not fed there."""
        operation = tensor.op
        if tensor.dtype in (tf.resource, tf.variant) or is_reference(tensor):
            return True
        if context_of(operation) is not None:
            return True
        return operation in self._late or self._needs_sums(operation)

    def _stays(self, operation: tf.Operation) -> bool:
        """Returns whether the train op still has to wait for an operation."""
        if operation not in self._of_batch:
            return True
        is_in_branch = context_of(operation) is not None
        return is_in_branch or operation in self._late

    def _changes_and_what_waits(self) -> set[tf.Operation]:
        """Returns the operations that change something, or run only after a change."""
        needed = ancestors([*self._roots, *self.moved])
        changes = {
            operation
            for operation in needed.keys() - self._forward
            if operation.type in SHOWING or self._changes(operation)
        }
        changes |= {*self.moved}
        return changes | descendants(changes)

    def _needs_sums(self, operation: tf.Operation) -> bool:
        if operation not in self._with_sums:
            needed = data_ancestors([operation])
            self._with_sums[operation] = not self._sums.isdisjoint(needed)
        return self._with_sums[operation]


def _check_places(batch: WholeBatch, views: list[View]) -> list[tf.Operation]:
    """Returns operations that fail where rows are looked up in other examples.

    Every micro-batch runs them.
    """
    made = []
    guards = {g.places.ref(): g for view in views for g in view.analysis.guards}
    for places, axis, table in guards.values():
        with tf.control_dependencies(None):
            distance = tf.shape(table, tf.int64)[0] // batch.size
            each = tf.shape(places, tf.int64)[axis] // batch.size
            shape = [1] * axis + [-1] + [1] * (places.shape.rank - axis - 1)
            numbers = tf.reshape(tf.range(batch.size * each) // each, shape)
            fits = tf.equal(tf.cast(places, tf.int64) // distance, numbers)
            guard = tf.raw_ops.Assert(condition=tf.reduce_all(fits), data=["row"])
            sentence = (
                "A row must be looked up in its own example, for its batch to be cut. "
                f"Received: {places.name}, which are places of others."
            )
            batch.register(each=[guard], refusals={guard: sentence})
            made.append(guard)
    return made


def _scalars(border, losses: list[tf.Tensor], view: View) -> list[tf.Tensor]:
    """Returns the scalars between rows and losses, which summaries may show."""
    found = [output for op in border.operations for output in op.outputs]
    return [
        tensor
        for tensor in [*losses, *found]
        if tensor.dtype.is_floating
        and context_of(tensor.op) is None
        and (tensor.shape.rank == 0 or any(tensor is each for each in losses))
        and (view.state(tensor).kind != "fixed" or hasattr(tensor.op, WHOLE_BATCH_LOSS))
    ]
