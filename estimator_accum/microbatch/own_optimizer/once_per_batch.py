"""Builds the train op of a model_fn that has an optimizer of its own.

    micro-batches    forward and backward; sums of gradients, rows that are reported
    once             the train op, and whatever else the model_fn writes

The second part gets the batch's gradients (interception.py) and, by feeding, the batch's
value of every other tensor that it is computed from (batch_values.py).
"""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum.graph.devices import of_strings
from estimator_accum.graph.functions import library_of_functions
from estimator_accum.graph.walks import ancestors, path_to
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.outside import check_sources
from estimator_accum.microbatch.own_optimizer.activations import report_activations
from estimator_accum.microbatch.own_optimizer.batch_norm import find_moments
from estimator_accum.microbatch.own_optimizer.batch_values import (
    Values,
    draws_of_passes,
    whole_batch_values,
)
from estimator_accum.microbatch.own_optimizer.division import (
    BatchPlan,
    ModelGraph,
    divide,
)
from estimator_accum.microbatch.own_optimizer.head import View, of_batch
from estimator_accum.microbatch.own_optimizer.interception import Interception
from estimator_accum.microbatch.own_optimizer.order import order
from estimator_accum.microbatch.own_optimizer.patches import intercepting
from estimator_accum.microbatch.own_optimizer.sparse_gradients import add_slices
from estimator_accum.microbatch.own_optimizer.spot_check import SpotCheck
from estimator_accum.microbatch.repeatable import draw_by_number, make_repeatable
from estimator_accum.microbatch.work import Work
from estimator_accum.rows.guards import LastEntry


def build_unedited(batch: WholeBatch, build: Callable):
    """Returns the EstimatorSpec of a model_fn, and arguments of `complete`.

    If it trains by this library, the latter are None. If it has a train op of its own,
    that needs no micro-batch any more.

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
    if batch.has_train_op and not interception.is_used:
        with batch.as_current():
            make_repeatable(batch.works.total.twice)
        return spec, None
    train_op = getattr(spec.train_op, "op", spec.train_op)
    _check_trains(batch, interception, train_op)
    losses = [spec.loss, *(loss for call in interception.calls for loss in call.losses)]
    losses += tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)
    with batch.as_current():
        model = complete_model(batch, interception)
        plan = divide(model.graph, [train_op, *model.waits], losses)
        values = model.values(plan, losses)
        parts = model.parts(values, losses)
        fed = [*(tensor for tensor, _ in values.pairs), *batch.works.total.done]
        order(plan._replace(fed=fed))
    with tf.control_dependencies(None):
        train_op = tf.group(train_op, *plan.moved, *model.clear, name="train_batch")
    return spec._replace(train_op=train_op), parts


def complete_model(batch: WholeBatch, interception: Interception) -> "Model":
    """Returns a graph to which nothing is added any more."""
    find_moments(batch)  # of networks without gradients, too
    # Complete, so what reads the sums of sparse gradients is known.
    calls = interception.calls
    slices = [slice_sum for call in calls for slice_sum in call.sums.slices]
    clear = [op for slice_sum in slices for op in add_slices(batch, slice_sum)]
    check_sources(batch)
    return Model(batch, interception, clear)


class Model:
    """A model's graph, complete with the sums of its gradients.

    Args:
        batch: The batch.
        interception: The gradients.
        clear: Operations that run after all others.

    Attributes:
        graph: The graph, for `divide`.
        waits: Operations for which gradients waited.
        clear: As given.
    """

    def __init__(self, batch: WholeBatch, interception: Interception, clear: list):
        self._batch, self._calls = batch, interception.calls
        self._early, self.clear = interception.copies, clear
        handles, library = batch.works.handles, library_of_functions()
        reads = list(interception.reads)
        of = of_batch(batch)
        self.graph = ModelGraph([batch.works], of, reads, handles, library)
        self.waits = [operation for call in self._calls for operation in call.waits]

    def values(self, plan: BatchPlan, losses: list[tf.Tensor]) -> Values:
        """Returns the values with which the part that runs once is fed."""
        losses = self._of_batch(losses)
        values = whole_batch_values(self._batch, plan, losses, self._early)
        _check_passes(self._batch, self.graph, [value for _, value in values.pairs])
        return values

    def share_draws(self, values: Values) -> None:
        """Makes random numbers that all examples share those of their batch."""
        _share_draws(self._batch, values.view)

    def parts(self, values: Values, losses: list[tf.Tensor]) -> dict:
        """Returns arguments of `complete`."""
        batch, calls = self._batch, self._calls
        _share_draws(batch, values.view)
        make_repeatable(batch.works.total.twice)
        rows = [tensor for tensor, _ in self._early.collected]
        make_repeatable(rows, "Rows of examples that the loss combines")
        derivations = [call.derivation for call in calls if call.derivation.rows]
        views = [values.view, *(derivation.view for derivation in derivations)]
        guards = _check_guards(batch, views)
        # Those that it looks at are not the last examples of their batch.
        looked = [
            op for op, guard in guards.items() if not isinstance(guard, LastEntry)
        ]
        spot_check = SpotCheck(batch, derivations, values.collected, looked)
        report_activations(values.view, self._of_batch(losses))
        return {
            "reported": values.pairs,
            "refusals": {op: guard.sentence for op, guard in guards.items()},
            "spot_check": spot_check,
        }

    def _of_batch(self, losses: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tensor for tensor in losses if tensor.op in self.graph.of_batch]


def _check_trains(batch: WholeBatch, interception: Interception, train_op) -> None:
    if batch.has_train_op:
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
    reads = interception.reads
    if reads and not reads.keys() & ancestors([train_op]):
        raise ValueError(
            "The train op must use the gradients: nothing else has a micro-batch, such "
            f"as operations that a hook runs. Received: {train_op.name}, which needs "
            "none of them. Put all updates into the train op, or train without "
            "micro-batches."
        )


def _check_passes(
    batch: WholeBatch, graph: ModelGraph, values: list[tf.Tensor]
) -> None:
    """Raises ValueError if something changes before the train op runs."""
    works = batch.works
    needed = ancestors([*works.total.micro_ops, *(value.op for value in values)])
    graph = graph._replace(handles=works.handles)  # those of the copies, too
    for operation in needed:
        if graph.changes(operation):
            raise ValueError(
                "An operation that needs the micro-batch must not wait for one that "
                "changes a variable: there are several micro-batches for one change. "
                f"Received: {path_to(needed, operation)}. Make the change "
                "after the update, or group it with the train op (tf.group)."
            )


def _share_draws(batch: WholeBatch, view: View) -> None:
    draws = draws_of_passes(batch)
    fixed = [draw for draw in draws if view.state(draw.outputs[0]).kind == "fixed"]
    draw_by_number(fixed, is_shared=True)


def _check_guards(batch: WholeBatch, views: list[View]) -> dict:
    """Returns operations that fail where the analysis took a wrong fact, and the facts.

    Every micro-batch runs them.
    """
    checks = {}
    guards = {
        (type(guard), *guard.key): guard
        for view in views
        for guard in view.analysis.guards
    }
    for guard in guards.values():
        with tf.control_dependencies(None):
            holds = guard.holds(batch.size)
            with of_strings():
                check = tf.raw_ops.Assert(condition=holds, data=["row"])
            batch.works.add(Work(micro_ops=[check]))
            checks[check] = guard
    return checks
