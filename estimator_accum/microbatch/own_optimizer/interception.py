"""Stands in for tf.gradients in a model_fn that knows nothing of micro-batches.

The model_fn gets reads of sums over the batch, which are computed before the train op
runs. So all that it does with them (clipping, its optimizer, schedules,
counters) runs once per batch, with the whole batch's gradient.
"""

import contextlib
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.interception import without_interception
from estimator_accum.graph.internals import context_of, current_control_dependencies
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.activations import report_unsplit
from estimator_accum.microbatch.own_optimizer.batch_norm import find_moments
from estimator_accum.microbatch.own_optimizer.derivation import Derivation, derive
from estimator_accum.microbatch.own_optimizer.draws import draw_by_micro_batch
from estimator_accum.microbatch.own_optimizer.gradient_sums import (
    Sums,
    sum_over_batch,
)
from estimator_accum.microbatch.own_optimizer.head import Copies, View, of_batch
from estimator_accum.microbatch.own_optimizer.missing_rows import add_missing_rows
from estimator_accum.microbatch.own_optimizer.patches import Request, source_of
from estimator_accum.microbatch.own_optimizer.refusals import (
    check_not_repeated,
    check_outside,
    check_shapes,
    is_inside,
)


class Call(NamedTuple):
    """A call of tf.gradients for a loss of the batch.

    Attributes:
        losses: The tensors whose gradients were computed.
        waits: Operations of the micro-batch that the gradients waited for.
        derivation: The gradients with respect to variables.
        sums: Their sums over the batch.
    """

    losses: list[tf.Tensor]
    waits: list[tf.Operation]
    derivation: Derivation
    sums: Sums


class Interception:
    """The gradients that one replica's model_fn computes.

    Args:
        batch: The replica's batch; the operations of its micro-batches are added to it.

    Attributes:
        batch: As given.
        copies: Copies that run before gradients flow, after the first pass.
        calls: The calls so far, in their order.
        is_used: Whether a gradient with respect to a variable was computed.
    """

    def __init__(self, batch: WholeBatch):
        self.batch = batch
        self._graph = tf.compat.v1.get_default_graph()
        self.copies = Copies(batch, is_early=True)
        self.calls: list[Call] = []
        self.is_used = False

    @property
    def reads(self) -> list[tf.Operation]:
        """The operations that read sums of gradients."""
        return [read for call in self.calls for read in call.sums.reads]

    def gradients(self, request: Request) -> list:
        """Returns d ys / d xs of the whole batch where x is not of a micro-batch.

        Raises:
            ValueError: If they cannot be summed over micro-batches.
        """
        ys, xs = request.ys, request.xs
        sources = [source_of(x) for x in xs]
        with contextlib.ExitStack() as stack:
            graph = tf.compat.v1.get_default_graph()
            if graph is not self._graph or context_of(graph):
                # A micro-batch is as inside as what is computed there.
                outer = {op for op in sources if op.graph is self._graph}
                if any(is_inside(self._graph, y) for y in ys):
                    outer -= of_batch(self.batch)
                if all(map(context_of, outer)):
                    return request.plain()
                check_outside(self._graph, ys)
                if self._graph.building_function:  # which init_scope would leave
                    stack.enter_context(self._graph.as_default())
                else:
                    stack.enter_context(tf.init_scope())
            of_micro_batch = of_batch(self.batch)
            check_shapes(self.batch)
            places = [i for i, op in enumerate(sources) if op not in of_micro_batch]
            self.is_used |= bool(places)
            is_of_batch = any(top.op in of_micro_batch for top in request.tops)
            if not places:
                return request.plain()
            if not is_of_batch:
                report_unsplit(request.tops)
                return request.plain()
            if self._graph.building_function:  # else functions would share the seeds
                tops = [top.op for top in request.tops]
                draw_by_micro_batch(self.batch, data_ancestors(tops))
            check_not_repeated(ys)
            find_moments(self.batch)
            view = self._view(request.tops)
            add_missing_rows(self.batch, view)
            waits, after = self._dependencies(of_micro_batch)
            stack.enter_context(tf.control_dependencies(None))
            stack.enter_context(without_interception())
            has_others = len(places) < len(xs)
            gradients = request.plain() if has_others else [None] * len(xs)
            fixed = request._replace(xs=[xs[i] for i in places])
            derivation = derive(self.batch, self.copies, fixed, view.of_now(fixed.tops))
            sums = sum_over_batch(self.batch, fixed.xs, derivation, after)
            self.calls.append(Call(ys, waits, derivation, sums))
            for i, total in zip(places, sums.totals, strict=True):
                gradients[i] = total
            return gradients

    def _view(self, tops: list[tf.Tensor]) -> View:
        """Returns an analysis of the graph, that of the last call where it holds."""
        if self.calls:
            return self.calls[-1].derivation.view.of_now(tops)
        return View(self.batch, tops)

    def _dependencies(
        self, of_micro_batch: set[tf.Operation]
    ) -> tuple[list[tf.Operation], list[tf.Operation]]:
        """Returns the caller's control dependencies: those of a micro-batch, and others."""
        dependencies = current_control_dependencies(self._graph)
        operations = [getattr(other, "op", other) for other in dependencies]
        waits = [op for op in operations if op in of_micro_batch]
        return waits, [op for op in operations if op not in of_micro_batch]
