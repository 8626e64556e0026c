"""Division of a model_fn's graph: a part for every micro-batch, a part per batch.

forward pass    every micro-batch; changes of anything are moved out of it
train op        once; it is fed with the values of micro-batches that it needs
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.functions import functions_of
from estimator_accum.graph.internals import context_of, set_control_inputs
from estimator_accum.graph.walks import (
    ancestors,
    control_inputs_of,
    data_ancestors,
    data_descendants,
    descendants,
    path_to,
)
from estimator_accum.graph.writers import is_reference, variable_of, writers_of
from estimator_accum.microbatch.repeatable import (
    changes_something,
    changing_kinds,
    shows_something,
)
from estimator_accum.microbatch.work import Work, Works, sum_of


class ModelGraph(NamedTuple):
    """A model_fn's graph with the sums of its gradients.

    Attributes:
        works: The work of a batch, one for each replica whose graph it is.
        of_batch: Operations that compute from a micro-batch, or take it.
        reads: Operations that read the sums.
        handles: Operations whose outputs are handles of the batch's own variables.
        library: Definitions of functions by name.
        computes: Condition on operations: whether they are computed, and not handed on
            by an earlier phase.
    """

    works: list[Works]
    of_batch: set[tf.Operation]
    reads: list[tf.Operation]
    handles: set[tf.Operation]
    library: dict
    computes: Callable[[tf.Operation], bool] | None = None

    @property
    def total(self) -> Work:
        """The work of all replicas."""
        return sum_of(works.total for works in self.works)

    def changes(self, operation: tf.Operation) -> bool:
        """Returns whether an operation changes something outside of a micro-batch."""
        return changes_something(operation, self.library, self.handles)


class BatchPlan(NamedTuple):
    """The part of a graph that runs once per batch.

    Attributes:
        roots: The train op, and others that change something.
        fed: The tensors of a micro-batch that `roots` are computed from.
        waiting: Operations that would wait for the forward pass.
        reads: Operations that read the sums of gradients.
    """

    roots: list[tf.Operation]
    fed: list[tf.Tensor]
    waiting: list[tf.Operation]
    reads: list[tf.Operation]


def divide(
    graph: ModelGraph,
    roots: list[tf.Operation],
    losses: list[tf.Tensor],
    late: Collection[tf.Operation] = (),
) -> BatchPlan:
    """Divides a graph, and removes dependencies of one part on the other.

    1. Operations that change something leave the forward pass, since that runs many
       times. They become roots, so this comes before the roots are followed.
    2. Operations behind the roots that change something run once, late, with all that
       wait for them.
    3. The roots are followed to these, and to the tensors of a micro-batch that are
       computed before them: the train op is fed with those.

    Args:
        graph: The graph.
        roots: The train op, and others that change something.
        losses: Tensors that are fetched in training, with their control inputs.
        late: Further operations that run once, late.

    Raises:
        ValueError: If the forward pass reads a value that changes within a batch.
    """
    forward = ancestors(graph.total.micro_ops, graph.computes)
    moved = _move_out_of_forward(graph, forward, losses)
    roots = [*roots, *moved]
    late = {*late, *_changes_and_what_waits(graph, roots, moved, forward)}
    fed, waiting = _follow(graph, roots, late)
    return BatchPlan(roots, fed, waiting, graph.reads)


def _move_out_of_forward(
    graph: ModelGraph, forward: dict, losses: list[tf.Tensor]
) -> list[tf.Operation]:
    """Moves operations that change something from the forward pass behind it."""
    forward = forward | ancestors([t.op for t in losses], graph.computes)
    changes = {operation for operation in forward if graph.changes(operation)}
    if not changes:
        return []
    needed = data_ancestors(
        [t.op for op in forward if op not in changes for t in op.inputs]
    )
    for operation in changes:
        if operation in needed:
            path = path_to(needed, operation)
            kinds = changing_kinds(operation, graph.library)
            raise ValueError(_sentence_of_change(operation, path, kinds))
    _check_not_read_after(changes, forward)
    for operation in forward:
        if operation not in changes:
            _wait_for(
                operation,
                [op for op in control_inputs_of(operation) if op not in changes],
            )
    return sorted(changes, key=lambda operation: operation.name)


def _sentence_of_change(operation: tf.Operation, path: str, kinds: list[str]) -> str:
    if writers_of([operation]):
        draws = (
            ". If it is the state of random numbers, draw them outside of functions, "
            "branches and loops."
        )
        return (
            "A variable that the forward pass reads must not change within a batch: the "
            f"pass is run once for each micro-batch. Received: {path}, of type "
            f"{operation.type}. Change it after the update"
            f"{draws if functions_of(operation) else '.'}"
        )
    if functions_of(operation):
        return (
            "A function, branch or loop that the loss needs must change nothing: it is run "
            f"once for each micro-batch. Received: {path}, with {', '.join(kinds)}. "
            "Make the change outside, or call the function's Python code in place of it."
        )
    return (
        "A value that all examples share must be the same in all micro-batches. Received: "
        f"{path}, of type {operation.type}, which gives another one in each run. "
        "Compute it in the data set, or train without micro-batches."
    )


def _wait_for(operation: tf.Operation, others: list[tf.Operation]) -> bool:
    """Lets an operation wait for others alone; returns whether it waited for more."""
    waits_for_more = len(others) < len(operation.control_inputs)
    if waits_for_more:
        set_control_inputs(operation, others)
    return waits_for_more


def _check_not_read_after(changes: set[tf.Operation], forward: dict) -> None:
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


def _changes_and_what_waits(
    graph: ModelGraph, roots: list, moved: list, forward: dict
) -> set[tf.Operation]:
    """Returns the operations that change something, or run only after a change."""
    changes = {
        operation
        for operation in ancestors(roots).keys() - forward.keys()
        if shows_something(operation, graph.library) or graph.changes(operation)
    }
    changes |= {*moved}
    return changes | descendants(changes)


def _follow(
    graph: ModelGraph, roots: list[tf.Operation], late: set[tf.Operation]
) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Returns tensors of a micro-batch behind the roots, and operations that wait for it.

    Args:
        graph: The graph.
        roots: Operations that run once per batch.
        late: Operations that change something, or run only after a change.
    """
    sums = [output for read in graph.reads for output in read.outputs]
    once = late | {*graph.reads} | data_descendants(sums)
    done = {tensor.op for tensor in graph.total.done}
    fed, waiting, seen, stack = {}, [], set(), [*roots]
    while stack:
        operation = stack.pop()
        if operation in seen:
            continue
        seen.add(operation)
        if operation in done:
            continue  # it is fed, when its pass has run
        stays = [
            other
            for other in control_inputs_of(operation)
            if other not in graph.of_batch or _is_in_branch(other) or other in late
        ]
        if _wait_for(operation, stays):
            waiting.append(operation)
        stack += stays
        for tensor in operation.inputs:
            if tensor.op not in graph.of_batch or _runs_once(tensor, once):
                stack.append(tensor.op)
            else:
                fed[tensor.ref()] = tensor
    return list(fed.values()), waiting


def _runs_once(tensor: tf.Tensor, once: set[tf.Operation]) -> bool:
    """Returns whether a tensor is computed in the train op's run, not fed there."""
    if tensor.dtype in (tf.resource, tf.variant) or is_reference(tensor):
        return True
    return _is_in_branch(tensor.op) or tensor.op in once


def _is_in_branch(operation: tf.Operation) -> bool:
    return context_of(operation) is not None
