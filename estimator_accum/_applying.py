"""The optimizer's call inside the branch that updates: gradients, variables, clock."""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from estimator_accum._gradients import Gradient, cast, scaled
from estimator_accum._graph import data_ancestors
from estimator_accum._options import Options, always_reduces, innermost

_logger = logging.getLogger("tensorflow.estimator_accum")


def apply(
    strategy,
    options: Options,
    gradients,
    variables: list[tf.Variable],
    loss: tf.Tensor,
    update_step: tf.Variable,
    counter: tf.Variable | None,
    changed: Iterable[tf.Operation],
) -> list[tf.Operation]:
    """Applies the replicas' gradients, already reduced, in cross-replica context.

    Args:
        strategy: The current strategy.
        options: The caller's options.
        gradients: One gradient per variable, scaled and clipped.
        variables: The variables to update.
        loss: The window's loss; nothing is written before it is computed.
        update_step: Number of updates before this one.
        counter: Variable that counts micro-steps, for a warning of what reads it; None if
            each is an update.
        changed: Operations that changed the gradients.

    Returns:
        The operations of the update, then those of `after_update_ops`.
    """
    call = strategy.extended.call_for_each_replica
    graph = tf.compat.v1.get_default_graph()
    number = len(graph.get_operations())
    with _finding_variables(innermost(options.optimizer)):
        applied = call(
            lambda *args: _apply(options.optimizer, update_step, variables, *args),
            args=(gradients, loss),
        )
    done = strategy.experimental_local_results(applied)
    if counter is not None:
        optimizer, made = innermost(options.optimizer), graph.get_operations()[number:]
        _warn_of_clock(strategy, counter, optimizer, made, list(changed))
    if options.after_update_ops is not None:
        with tf.control_dependencies(done):
            after = call(_after_update, args=(options.after_update_ops,))
        done = [*done, *strategy.experimental_local_results(after)]
    return done


def _apply(optimizer, update_step, variables, gradients: list[Gradient], loss):
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
        return optimizer.apply_gradients(pairs, **options)


def _check_no_sparse_sums(gradients: list[Gradient]) -> None:
    """Raises ValueError if workers would have to reduce rows that differ by window."""
    strategy = tf.distribute.get_strategy()
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    if sparse and strategy.extended._in_multi_worker_mode():
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
    known = set(graph.get_operations())
    made = [each for each in tf.nest.flatten(make()) if each is not None]
    for each in made:
        operation = each if isinstance(each, tf.Operation) else each.op
        if operation.graph is not graph or operation in known:
            raise ValueError(
                "`after_update_ops` must make its operations when it is called: others "
                f"run with every micro-step. Received: {operation.name}, made before. "
                "Pass a function, e.g. lambda: [ema.apply(variables)]."
            )
    return tf.group(*made)


@contextlib.contextmanager
def _finding_variables(optimizer: tf.compat.v1.train.Optimizer) -> Iterator[None]:
    """Lets an optimizer in a branch's graph find its variables in the outer graph."""
    made = optimizer._non_slot_dict
    optimizer._non_slot_dict = _OfOuterGraphs(made)
    try:
        yield
    finally:
        optimizer._non_slot_dict = dict(optimizer._non_slot_dict)


class _OfOuterGraphs(dict):
    """Variables by (name, graph); a branch's graph also finds those of outer graphs."""

    def get(self, key, default=None):
        name, graph = key
        while (name, graph) not in self:
            if (graph := getattr(graph, "outer_graph", None)) is None:
                return default
        return self[name, graph]


def _warn_of_clock(
    strategy,
    counter: tf.Variable,
    optimizer: tf.compat.v1.train.Optimizer,
    operations: list[tf.Operation],
    changed: list[tf.Operation],
) -> None:
    """Warns if the optimizer's `operations` are computed from global_step."""
    parts = strategy.experimental_local_results(counter)
    clocks = {getattr(part, "handle", part).op for part in parts}
    found = data_ancestors(operations)
    reader = next(filter(found.__contains__, clocks), None)
    if reader is None or _counts_updates(clocks, operations):
        return
    what = "The change of gradients before apply_gradients"
    if not clocks & data_ancestors(changed).keys():
        last = _last_outside(reader, found, operations)
        what = type(optimizer).__name__
        if last not in clocks and last.type != "ReadVariableOp":
            what = f"{last.name}, from which {what} computes,"
    _logger.warning(
        "%s reads global_step, which counts micro-steps and not updates: a schedule "
        "will end K times too early. Compute schedules from get_or_create_update_step();"
        " an optimizer that reads global_step by itself is right in microbatch_model_fn, "
        "where that counts updates.",
        what,
    )


def _last_outside(
    reader: tf.Operation, found: dict, operations: list[tf.Operation]
) -> tf.Operation:
    """Returns the last operation before `operations` on the way from `reader`.

    Args:
        reader: An ancestor of `operations`.
        found: Their `data_ancestors`.
        operations: Operations.
    """
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
    inside, last = set(operations), reader
    while reader is not None:
        if reader.graph is graph and reader not in inside and reader.type != "Switch":
            last = reader
        reader = found[reader]
    return last


def _counts_updates(clocks: set[tf.Operation], operations: list[tf.Operation]) -> bool:
    """Returns whether the optimizer's `operations` write global_step themselves."""
    written = [each.inputs[0].op for each in operations if "Assign" in each.type]
    return any(clocks & data_ancestors([handle]).keys() for handle in written)
