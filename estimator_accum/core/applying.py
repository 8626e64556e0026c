"""The optimizer's call in the branch that updates."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.changed_slices import find_reader
from estimator_accum.core.current_batch import current_parts
from estimator_accum.core.gradients import Gradient, cast, scaled
from estimator_accum.core.options import Options
from estimator_accum.core.v1_optimizers import (
    always_reduces,
    innermost,
    may_read_slices,
)
from estimator_accum.graph.internals import (
    change_non_slots,
    is_in_cluster,
    outer_graph_of,
    reads_of_variable,
)
from estimator_accum.graph.outermost import outermost_graph
from estimator_accum.graph.writers import operations_of_updates
from estimator_accum.rows.places import has_one_slice_a_row


class Origins(NamedTuple):
    """Slices of which the gradients for an optimizer are sums.

    Attributes:
        gradients: Those of a micro-batch, one per variable.
        are_rows: Whether the optimizer gets each row once, or as often as replicas have
            it.
    """

    gradients: list[Gradient]
    are_rows: bool


def apply(
    strategy,
    options: Options,
    gradients,
    variables: list[tf.Variable],
    loss: tf.Tensor,
    update_step: tf.Variable,
    origins: Origins | None,
) -> tuple[list[tf.Operation], dict[str, list[tf.Operation]]]:
    """Applies the replicas' gradients, already reduced, in cross-replica context.

    Args:
        strategy: The current strategy.
        options: The caller's options.
        gradients: One gradient per variable, scaled and clipped.
        variables: The variables to update.
        loss: The window's loss; nothing is written before it is computed.
        update_step: Number of updates before this one.
        origins: Slices of which the gradients are sums; None if they are their own.

    Returns:
        (The operations of the update, then those of `after_update_ops`; all that were
        made for them, by the names of their makers).
    """
    call = strategy.extended.call_for_each_replica
    optimizer = innermost(options.optimizer)
    number = _number_of_operations()
    with _finding_variables(optimizer):
        applied = call(
            lambda *args: _apply(
                options.optimizer, update_step, variables, origins, *args
            ),
            args=(gradients, loss),
        )
    done = strategy.experimental_local_results(applied)
    updates = {type(optimizer).__name__: _noted_operations(number)}
    if options.after_update_ops is not None:
        number = _number_of_operations()
        with tf.control_dependencies(done), contextlib.ExitStack() as stack:
            # It is counted behind them; behind a plain train op, it is counted already.
            for component in strategy.experimental_local_results(update_step):
                stack.enter_context(reads_of_variable(component, lambda step: step + 1))
            after = call(_after_update, args=(options.after_update_ops,))
        done = [*done, *strategy.experimental_local_results(after)]
        updates["after_update_ops"] = _noted_operations(number)
    return done, updates


def _number_of_operations() -> int:
    return len(tf.compat.v1.get_default_graph().get_operations())


def _noted_operations(number: int) -> list[tf.Operation]:
    """Returns the graph's operations but the first ones, noted as those of an update."""
    operations = tf.compat.v1.get_default_graph().get_operations()[number:]
    operations_of_updates(outermost_graph()).update(operations)
    return operations


def _apply(optimizer, update_step, variables, origins, gradients, loss):
    """Applies in replica context; the optimizer must not reduce a second time."""
    options = {}
    if tf.distribute.has_strategy() and always_reduces(optimizer):
        _check_no_sparse_sums(gradients)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        gradients = [scaled(g, 1.0 / replicas) for g in gradients]
    elif tf.distribute.has_strategy():
        options["skip_gradients_aggregation"] = True
    # An optimizer may decay a slot before its gradient is computed. A micro-step that
    # fails, such as one at the end of the data, must not change even that slot.
    with tf.control_dependencies([loss]):
        if _requires_global_step(innermost(optimizer)):
            options["global_step"] = update_step + 1
        pairs = zip(gradients, variables, strict=True)
        pairs = [(cast(gradient, v.dtype), v) for gradient, v in pairs]
        number = _number_of_operations()
        applied = optimizer.apply_gradients(pairs, **options)
    if origins is not None and may_read_slices(optimizer):
        _check_slices(optimizer, origins, pairs, number)
    return applied


def _check_slices(optimizer, origins: Origins, pairs: list, number: int) -> None:
    """Refuses an optimizer that needs each slice of a batch, of which a window has sums.

    Args:
        optimizer: The optimizer.
        origins: Slices of which the gradients are sums.
        pairs: The (gradient, variable) pairs that it got.
        number: Number of the graph's operations before.
    """
    graph = tf.compat.v1.get_default_graph()
    operations = {*graph.get_operations()[number:]}
    for (gradient, variable), source in zip(pairs, origins.gradients, strict=True):
        if not isinstance(gradient, tf.IndexedSlices):
            continue
        reader = find_reader(gradient, operations, graph)
        if reader is None:
            continue
        if has_one_slice_a_row(source, current_parts()) is not origins.are_rows:
            raise ValueError(
                "apply_gradients of an optimizer must only scale the slices of a sparse "
                "gradient, or sum those of a row: a window keeps their sum in each row. "
                f"Received: {reader.name} of type {reader.type}, in a "
                f"{type(innermost(optimizer)).__name__}, on the gradient of "
                f"{variable.name}. Pass `clip_norm` if it clips, or make the gradient "
                "dense first, by tf.convert_to_tensor."
            )


def _check_no_sparse_sums(gradients: list[Gradient]) -> None:
    """Raises ValueError if workers would have to reduce rows that differ by window."""
    strategy = tf.distribute.get_strategy()
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    if sparse and is_in_cluster(strategy):
        raise ValueError(
            "Embeddings under MultiWorkerMirroredStrategy must have an optimizer that "
            "leaves the sum over workers to this library: not one that scales the loss, "
            f"and TensorFlow 2.13 or later. Received: TensorFlow {tf.__version__} and "
            f"sparse gradients of {len(sparse)} variables. Install a later TensorFlow, "
            "or look embeddings up by a product with one-hot rows."
        )


def _requires_global_step(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether `apply_gradients` needs the update's number, as LAMB's does."""
    parameters = inspect.signature(optimizer.apply_gradients).parameters
    parameter = parameters.get("global_step")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _after_update(make: Callable) -> tf.Operation:
    """Makes the caller's `after_update_ops` in replica context."""
    graph = tf.compat.v1.get_default_graph()
    older = set(graph.get_operations())
    results = [result for result in tf.nest.flatten(make()) if result is not None]
    for result in results:
        operation = result if isinstance(result, tf.Operation) else result.op
        if operation.graph is not graph or operation in older:
            raise ValueError(
                "`after_update_ops` must make its operations when it is called: others "
                f"run with every micro-step. Received: {operation.name}, made before. "
                "Pass a function, e.g. lambda: [ema.apply(variables)]."
            )
    return tf.group(*results)


@contextlib.contextmanager
def _finding_variables(optimizer: tf.compat.v1.train.Optimizer) -> Iterator[None]:
    """Lets an optimizer in a branch's graph find its variables in the outer graph."""
    change_non_slots(optimizer, _OfOuterGraphs)
    try:
        yield
    finally:
        change_non_slots(optimizer, dict)


class _OfOuterGraphs(dict):
    """Variables by (name, graph); a branch's graph also finds those of outer graphs."""

    def get(self, key, default=None):
        name, graph = key
        while (name, graph) not in self:
            if (graph := outer_graph_of(graph)) is None:
                return default
        return self[name, graph]
