"""One phase of a model_fn with an optimizer of its own, or of a step.

    micro-batches    forward and backward; sums of gradients, rows that are reported
    once             the train op, and whatever else the model_fn writes

The second part gets the batch's gradients (interception.py) and, by feeding, the batch's
value of every other tensor that it is computed from (batch_values.py).
"""

from collections.abc import Callable

import tensorflow as tf

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
from estimator_accum.microbatch.own_optimizer.division import BatchPlan, ModelGraph
from estimator_accum.microbatch.own_optimizer.head import check_guards, of_batch
from estimator_accum.microbatch.own_optimizer.interception import Interception
from estimator_accum.microbatch.own_optimizer.sparse_gradients import add_slices
from estimator_accum.microbatch.own_optimizer.spot_check import SpotCheck
from estimator_accum.microbatch.repeatable import draw_by_number, make_repeatable
from estimator_accum.rows.guards import LastEntry


class Model:
    """A model's graph, complete with the sums of its gradients.

    Args:
        interception: The gradients, of a graph to which nothing is added any more.

    Attributes:
        graph: The graph, for `divide`.
        waits: Operations for which gradients waited.
        clear: Operations that run after all others.
    """

    def __init__(self, interception: Interception):
        batch, self._calls = interception.batch, interception.calls
        self._batch, self._early = batch, interception.copies
        find_moments(batch)  # of networks without gradients, too
        # Complete, so what reads the sums of sparse gradients is known.
        slices = [s for call in self._calls for s in call.sums.slices]
        self.clear = [op for s in slices for op in add_slices(batch, s)]
        check_sources(batch)
        handles, library = batch.works.handles, library_of_functions()
        of, reads = of_batch(batch), interception.reads
        self.graph = ModelGraph([batch.works], of, reads, handles, library)
        self.waits = [operation for call in self._calls for operation in call.waits]

    def values(
        self,
        plan: BatchPlan,
        losses: list[tf.Tensor],
        earlier: list[tf.Tensor] = (),
        computes: Callable[[tf.Operation], bool] | None = None,
    ) -> Values:
        """Returns the values with which the part that runs once is fed.

        Args:
            plan: That part.
            losses: Losses, whose values are shown.
            earlier: Tensors that are fed with values of the whole batch.
            computes: As in `ModelGraph`.
        """
        losses = self._of_batch(losses)
        seen = self._calls[-1].derivation.view if self._calls else None
        values = whole_batch_values(
            self._batch, plan, losses, self._early, earlier, seen
        )
        graph = self.graph._replace(computes=computes)
        _check_passes(self._batch, graph, [value for _, value in values.pairs])
        return values

    def share_draws(self, values: Values) -> None:
        """Makes random numbers that all examples share those of their batch."""
        draws = draws_of_passes(self._batch)
        fixed = [draw for draw in draws if values.view.is_shared_draw(draw.outputs[0])]
        draw_by_number(fixed, is_shared=True)

    def parts(self, values: Values, losses: list[tf.Tensor]) -> dict:
        """Returns arguments of `complete`."""
        batch, calls = self._batch, self._calls
        make_repeatable(batch.works.total.twice)
        rows = [tensor for tensor, _ in self._early.collected] + self._early.counted
        make_repeatable(rows, "Rows of examples that the loss combines")
        derivations = [call.derivation for call in calls if call.derivation.rows]
        views = [values.view, *(call.derivation.view for call in calls)]
        refusals = check_guards(batch, views)
        # Those that it looks at are not the last examples of their batch.
        looked = [
            op for op, r in refusals.items() if not isinstance(r.guard, LastEntry)
        ]
        spot_check = SpotCheck(batch, derivations, values.collected, looked)
        report_activations(values.view, self._of_batch(losses))
        return {
            "reported": values.pairs,
            "refusals": refusals,
            "spot_check": spot_check,
        }

    def _of_batch(self, losses: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tensor for tensor in losses if tensor.op in self.graph.of_batch]


def _check_passes(
    batch: WholeBatch, graph: ModelGraph, values: list[tf.Tensor]
) -> None:
    """Raises ValueError if something changes before the train op runs."""
    works = batch.works
    ends = [*works.total.micro_ops, *(value.op for value in values)]
    needed = ancestors(ends, graph.computes)
    graph = graph._replace(handles=works.handles)  # those of the copies, too
    for operation in needed:
        if graph.changes(operation):
            raise ValueError(
                "An operation that needs the micro-batch must not wait for one that "
                "changes a variable: there are several micro-batches for one change. "
                f"Received: {path_to(needed, operation)}. Make the change "
                "after the update, or group it with the train op (tf.group)."
            )
