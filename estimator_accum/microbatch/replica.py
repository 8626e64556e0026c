"""Parts of the graph of a batch, complete."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.repeatable import lasting_changes
from estimator_accum.microbatch.staging import task_of
from estimator_accum.microbatch.work import Turn, Work
from estimator_accum.microbatch.writes import snapshot


class Refusal(NamedTuple):
    """A fact that a split batch relies on; an operation fails where it does not hold.

    Attributes:
        guard: The fact, with its `sentence`.
        is_of_model: Whether the operation is the model's, so that it fails in a batch
            that is not split as it does without this library.
    """

    guard: Any
    is_of_model: bool


class ReplicaBatch(NamedTuple):
    """All that a runner feeds, fetches and runs.

    Attributes:
        batch: The batch, to which nothing is added any more.
        passes: The work of each pass, in their order.
        total: All of it; its `roll_back` undoes the micro-batches so far.
        snapshot: Operations that copy the variables that micro-batches write.
        lasting: Operations of micro-batches whose changes no roll back undoes.
        reported: (tensor, result) pairs: tensors of the micro-batch with whose values
            for the batch the train op is fed, and the results of these after the last
            pass. If one micro-batch is the batch, its own are fetched with it.
        refusals: Operations that fail if a batch cannot be split, and the reasons.
        constants: Names of features that may belong to no example, and must not then be
            as many as the examples of a batch that is split.
        spot_check: Check before the first update; None if there is nothing to check.
    """

    batch: WholeBatch
    passes: dict[Turn, Work]
    total: Work
    snapshot: Sequence[tf.Operation]
    lasting: Sequence[tf.Operation]
    reported: Sequence[tuple[tf.Tensor, tf.Tensor]]
    refusals: Mapping[tf.Operation, Refusal]
    constants: Sequence[str]
    spot_check: Any


class StepPhase(NamedTuple):
    """A phase of a step or model_fn, complete.

    Attributes:
        replicas: What a runner runs.
        results: Results of the step that this phase computes, by their numbers.
        changes: Operations that run once, after the passes.
        kept: Values that this phase computes, and that later ones need.
        earlier: Reported tensors of earlier phases, with whose values its runs are fed.
        times: When operations run, with what they read; None if this is the only phase
            of a model_fn.
    """

    replicas: list[ReplicaBatch]
    results: dict[int, tf.Tensor]
    changes: list[tf.Operation]
    kept: list[tf.Tensor]
    earlier: list[tf.Tensor]
    times: Any


def complete(
    batch: WholeBatch,
    fetched: Iterable[tf.Tensor] = (),
    *,
    reported: Sequence[tuple[tf.Tensor, tf.Tensor]] = (),
    refusals: Mapping | tuple = (),
    constants: Sequence[str] = (),
    spot_check=None,
) -> ReplicaBatch:
    """Returns the replica's part; nothing may be added to the batch any more.

    Args:
        batch: The batch.
        fetched: Tensors that may be fetched with each micro-batch.
        reported, refusals, constants, spot_check: As for `ReplicaBatch`.
    """
    works, take, restore, lasting = batch.works, [], [], []
    works.is_closed = True
    if batch.is_auto or not batch.keeps_sums or spot_check is not None:
        operations = [*works.micro_ops, *(tensor.op for tensor in fetched)]
        take, restore = snapshot(operations, works.handles, task_of(batch.rows.device))
        lasting = lasting_changes(operations, works.handles)
    total = works.total
    total = total._replace(roll_back=[*restore, *total.roll_back, *total.release])
    parts = reported, dict(refusals), constants, spot_check
    return ReplicaBatch(batch, works.passes, total, take, lasting, *parts)
