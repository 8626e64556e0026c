"""Order of the train op's operations, where the graph has none.

operations without gradients    before the gradients are read: without micro-batches
                                they take longest
a read of a variable            before a write of it: the only order that TensorFlow's
                                own runs have in common, since a read waits for nothing
"""

import collections
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.internals import (
    add_control_inputs,
    context_of,
    context_of_outputs,
    control_outputs,
    is_in_while_loop,
)
from estimator_accum.graph.names import (
    BRANCHES,
    CONTROL_FLOW_V1,
    READERS_OF_NO_VALUE,
    VARIABLES,
)
from estimator_accum.graph.outermost import value_of_graph
from estimator_accum.graph.walks import ancestors, descendants, walk
from estimator_accum.graph.writers import writers_of
from estimator_accum.microbatch.own_optimizer.division import BatchPlan

_PLANS_ATTRIBUTE = "_estimator_accum_plans"
_TIMELESS = {"Const", "Placeholder", *VARIABLES}
# Operations that pass a handle on, or the memory of a reference variable or a part.
_SHARING = {
    *CONTROL_FLOW_V1,
    *("Identity", "RefIdentity", "StopGradient", "PreventGradient", "EnsureShape"),
    *("Reshape", "ExpandDims", "Squeeze", "Slice", "StridedSlice"),
}


class Unordered(NamedTuple):
    """A write and the reads of its variable that run in any order with it."""

    variable: tf.Operation
    writer: tf.Operation
    readers: list[tf.Operation]


def order(plan: BatchPlan) -> None:
    """Orders the train op, when the last replica's part of it is complete.

    Args:
        plan: The part that runs once per batch on this replica, with all its feeds.
    """
    plans = value_of_graph(tf.compat.v1.get_default_graph(), _PLANS_ATTRIBUTE, [])
    plans.append(plan)

    def finish(strategy):  # replicas may wait for each other
        del strategy
        _update_last(plans)
        plans.clear()

    tf.distribute.get_replica_context().merge_call(finish)


def _update_last(plans: list[BatchPlan]) -> None:
    """Makes the reads of gradients wait for all that needs none, in all replicas.

    So an average of variables beside the update, or a schedule that reads a counter,
    sees the values from before it.
    """
    reads = {read for plan in plans for read in plan.reads}
    after = descendants(reads)
    fed = {tensor.op for plan in plans for tensor in plan.fed}
    roots = [root for plan in plans for root in plan.roots]
    needed = ancestors(roots, lambda operation: operation not in fed)
    before = [
        operation
        for operation in needed
        if operation not in after
        and operation not in reads
        and operation.type not in _TIMELESS
        and context_of(operation) is None
    ]
    with tf.control_dependencies(None):
        done = tf.group(*before, name="before_update")
    for operation in reads:
        add_control_inputs(operation, [done])
    waiting = {operation for plan in plans for operation in plan.waiting}
    late = waiting | descendants([*waiting, *(t for plan in plans for t in plan.fed)])
    for _, writer, readers in find_unordered(needed, set(before), after):
        last = [] if writer in late else [op for op in readers if op in late]
        for reader in last:
            if not is_in_while_loop(reader):
                add_control_inputs(reader, [writer])
        first = [reader for reader in readers if reader not in last]
        add_control_inputs(writer, _ends(first, writer, needed))


def find_unordered(
    operations: Collection[tf.Operation],
    before: Collection[tf.Operation] = (),
    after: Collection[tf.Operation] = (),
) -> Iterator[Unordered]:
    """Yields the writes in one run that have no order with a read of their variable.

    A write inside of a loop is left out, since it can wait for nothing outside of it.

    Args:
        operations: All operations of the run.
        before: Operations that run before those of `after`.
        after: Others.
    """
    for variable, writers in writers_of(operations).items():
        readers = _readers(variable, set(writers) | {variable}, operations)
        for writer in writers:
            if is_in_while_loop(writer):
                continue
            earlier, later = writer in before, writer in after
            others = {
                reader
                for reader in readers
                if not (reader in before and later or reader in after and earlier)
            }
            others -= _before(writer, others)
            free = [
                reader
                for reader in sorted(others, key=lambda op: op.name)
                if not any(
                    _before(end, {writer})
                    for end in _ends([reader], writer, operations)
                )
            ]
            if free:
                yield Unordered(variable, writer, free)


def _readers(
    variable: tf.Operation, without: set[tf.Operation], operations: Collection
) -> set[tf.Operation]:
    """Returns the operations that take the value of a variable.

    The value of a reference variable is its memory, which a write changes: it is read
    by those that compute from it.
    """

    def users(operation: tf.Operation) -> list[tf.Operation]:
        if operation.type not in _SHARING and operation is not variable:
            return []
        consumers = {user for out in operation.outputs for user in out.consumers()}
        others = [user for user in consumers - without if user in operations]
        return [user for user in others if user.type not in READERS_OF_NO_VALUE]

    readers = walk([variable], users).keys() - {variable}
    return {reader for reader in readers if reader.type not in _SHARING}


def _ends(
    readers: Iterable[tf.Operation], writer: tf.Operation, operations: Collection
) -> list[tf.Operation]:
    """Returns the operations after which readers have run.

    In a branch or loop of TensorFlow 1 those are its results, for an operation that
    waits for one of a branch that is not taken is not run either. TensorFlow 2's branches
    have run only where their results are taken: a session divides them, and what waits for
    the operation itself does not wait for all of it.
    """
    outside = (None, context_of(writer))

    def takers(operation: tf.Operation) -> list[tf.Operation]:
        users = [user for out in operation.outputs for user in out.consumers()]
        return [user for user in users if user in operations]

    def is_end(operation: tf.Operation) -> bool:
        is_divided = operation.type in BRANCHES and takers(operation)
        return context_of_outputs(operation) in outside and not is_divided

    def users(operation: tf.Operation) -> list[tf.Operation]:
        if is_end(operation):
            return []
        if context_of_outputs(operation) in outside:
            return takers(operation)
        waiting = [op for op in control_outputs(operation) if op in operations]
        return [*waiting, *takers(operation)]

    return list(filter(is_end, walk(readers, users)))


def _before(operation: tf.Operation, others: set[tf.Operation]) -> set[tf.Operation]:
    """Returns those of `others` that `operation` waits for, or is."""
    earlier, seen, waiting = set(), {operation}, collections.deque([operation])
    while waiting and len(earlier) < len(others):
        current = waiting.popleft()
        if current in others:
            earlier.add(current)
        for other in (*(t.op for t in current.inputs), *current.control_inputs):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return earlier
