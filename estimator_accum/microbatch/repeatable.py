"""Operations that run twice in a batch must give the same result both times.

    random numbers       drawn by a stateless operation instead, seeded by micro-batch;
                         a tf.random.Generator moves once, and gives its state before
    variables, tables    read; an operation that writes to them in between is an error
    others with state    refused

The check includes called functions, such as the branches of a tf.cond.
"""

import functools
import re
from collections.abc import Collection, Iterable, Sequence

import tensorflow as tf

from estimator_accum.core.current_batch import current_batch
from estimator_accum.graph.copies import replace
from estimator_accum.graph.functions import (
    functions_of,
    kinds_in,
    library_of_functions,
    nodes_of,
)
from estimator_accum.graph.internals import context_of, is_stateful
from estimator_accum.graph.names import (
    CALLERS,
    DRAWS,
    LOOK_UPS,
    SETTLED,
    SHOWING,
    STATELESS,
    WRITERS,
    draws_by_state,
    moves_generator,
)
from estimator_accum.graph.walks import ancestors, path_to
from estimator_accum.graph.writers import is_reference, may_be_variable, variable_of
from estimator_accum.microbatch.writes import written_by
from estimator_accum.seed import seed_of_draw

# Operations with state that give one result throughout a batch, and change nothing that
# outlives a run.
_HARMLESS = {
    *SETTLED,
    *LOOK_UPS,
    "HashTable",
    *("Assert", "CheckNumerics", "CheckNumericsV2"),
    *("Empty", "TensorArrayV3", "TensorArraySizeV3", "TensorArrayReadV3"),
    *("TensorArrayWriteV3", "TensorArrayGatherV3", "TensorArrayScatterV3"),
    *("TensorArrayConcatV3", "TensorArraySplitV3", "TensorArrayCloseV3"),
    *("TensorArrayGradV3", "StackV2", "StackPushV2", "StackPopV2", "StackCloseV2"),
    "GuaranteeConst",
}
# Others that leave no change which a later run sees, or only in reports.
_LEAVES_NOTHING = re.compile(
    r"Cudnn|LookupTable(Find|Size|Export|Insert|Import|Remove)|.*Summary|DebugIdentity|"
    r"(Mutex|ConsumeMutex)Lock|(Queue|Stage|Map|OrderedMap)(Size|IsClosed|Peek)|"
    r"Is[A-Z]|Timestamp|DeviceIndex|TensorArray|Stack|TemporaryVariable|"
    r"DestroyTemporaryVariable|DeepCopy|DisableCopyOnRead|NonDeterministicInts|Xla"
)
_RECURRENT = re.compile("CudnnRNN")  # with a state for its dropout alone
_MOST_DRAWS = 2**40  # of an operation in a batch
OUTPUTS = "`outputs` of whole_batch_loss"


@tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
def make_repeatable(tensors: Sequence[tf.Tensor], name: str = OUTPUTS) -> None:
    """Makes `tensors` the same whenever they are computed from one micro-batch.

    Every consumer of a random number that they need gets one of a stateless operation
    instead; so call it when the graph is complete, gradients included.

    Args:
        tensors: Tensors of a micro-batch.
        name: Name of the tensors in messages, a plural.

    Raises:
        ValueError: If they need an operation that must not run twice.
    """
    if not tensors:
        return
    needed = ancestors([tensor.op for tensor in tensors])
    library = library_of_functions()
    for operation in list(needed):
        if _is_drawn_by_example(operation):
            _draw_statelessly(operation, is_shared=False)
        elif takes_state(operation):
            take_state_once(operation, is_shared=False)
        elif not is_repeatable(operation, library):
            raise ValueError(
                f"{name} are computed twice, so their operations must give one result and "
                f"change nothing. Received: {path_to(needed, operation)}, of type "
                f"{operation.type}. Leave it out, do it behind the combination of "
                "examples, or make it stateless; for random numbers in functions, "
                "branches and loops there is micro_batch_seed."
            )


@tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
def check_not_written(
    outputs: Sequence[tf.Tensor], micro_ops: list[tf.Operation]
) -> None:
    """Raises ValueError if `micro_ops` write to variables that `outputs` need."""
    if not outputs:
        return
    read = {
        variable_of(tensor)
        for operation in ancestors([tensor.op for tensor in outputs])
        for tensor in operation.inputs
        if may_be_variable(tensor)
    }
    for variable in written_by(ancestors(micro_ops)):
        if variable in read:
            raise ValueError(
                f"{OUTPUTS} are computed twice, so no micro-batch must change a "
                f"variable that they are computed from. Received: {variable.name}, "
                "which is read and written. Write to it once a batch, after the update "
                "(after_update_ops)."
            )


def draw_by_number(draws: Iterable[tf.Operation], *, is_shared: bool) -> None:
    """Makes random numbers those of a batch's number, in place of a state's.

    A batch that is retried then draws them again.

    Args:
        draws: Operations that draw them.
        is_shared: Whether all micro-batches of a batch draw the same numbers. If not,
            draws in branches and loops, and of an order, are left as they are.
    """
    for operation in draws:
        if is_shared or _is_drawn_by_example(operation):
            _draw_statelessly(operation, is_shared=is_shared)


def changes_something(
    operation: tf.Operation, library: dict, without: Collection[tf.Operation] = ()
) -> bool:
    """Returns whether an operation changes a lasting state other than a random one.

    Args:
        operation: The operation.
        library: Definitions of functions by name.
        without: Operations of handles; those that take one are left out.
    """
    if takes_any(operation, without):
        return False
    if any(is_reference(tensor) for tensor in operation.inputs):
        return bool(written_by([operation]))
    return any(map(_changes, kinds_in(operation, library)))


def takes_any(operation: tf.Operation, handles: Collection[tf.Operation]) -> bool:
    """Returns whether an operation reads or writes a resource, of some handles."""
    return any(tensor.op in handles for tensor in operation.inputs)


def shows_something(operation: tf.Operation, library: dict) -> bool:
    """Returns whether an operation, or one that it calls, shows or checks something."""
    return not SHOWING.isdisjoint(kinds_in(operation, library))


def changing_kinds(operation: tf.Operation, library: dict) -> list[str]:
    """Returns the types by which an operation changes a lasting state, and its functions.

    Args:
        operation: The operation.
        library: Definitions of functions by name.
    """
    return sorted(filter(_changes, kinds_in(operation, library)))


def lasting_changes(
    operations: list[tf.Operation], without: Collection[tf.Operation]
) -> list[tf.Operation]:
    """Returns operations whose changes no `snapshot` undoes, such as those of queues.

    Args:
        operations: Operations of each micro-batch, with all that they need.
        without: Operations of handles that need no copy.
    """
    library = library_of_functions()

    def lasts(operation: tf.Operation) -> bool:
        itself = {operation.type} - library.keys()
        kinds = kinds_in(operation, library) - itself
        writes_others = {kind for kind in kinds if "Accumulator" in kind}
        kinds -= {kind for kind in kinds if WRITERS.search(kind)} - writes_others
        handles = [tensor for tensor in operation.inputs if may_be_variable(tensor)]
        is_restored = any(variable_of(t) or t.op in without for t in handles)
        dtypes = {tensor.dtype for tensor in operation.outputs}
        makes_handle = dtypes and dtypes <= {tf.resource, tf.variant}
        if not is_restored and not makes_handle:
            kinds |= itself
        return any(_changes(k) and not _LEAVES_NOTHING.match(k) for k in kinds)

    return [operation for operation in ancestors(operations) if lasts(operation)]


def is_repeatable(node, library: dict) -> bool:
    """Returns whether an operation gives one result throughout a batch.

    Args:
        node: The operation, or a node of a function.
        library: Definitions of functions by name.
    """
    kinds = kinds_in(node, library)
    layers = set(filter(_RECURRENT.match, kinds))
    if layers and not _has_dropout(node, library):
        kinds -= layers
    return all(map(_is_repeatable, kinds))


def _has_dropout(node, library: dict) -> bool:
    """Returns whether a layer of cuDNN, or one that a function calls, has dropout."""
    definition = getattr(node, "node_def", node)
    nodes = [definition, *nodes_of(functions_of(node), library)]
    return any(
        "dropout" in inner.attr and inner.attr["dropout"].f
        for inner in nodes
        if _RECURRENT.match(inner.op)
    )


def _is_drawn_by_example(operation: tf.Operation) -> bool:
    # An order of the batch cannot be drawn by micro-batch.
    is_by_example = operation.type in STATELESS.keys() - {"RandomShuffle"}
    return is_by_example and context_of(operation) is None


def _draw_statelessly(operation: tf.Operation, *, is_shared: bool) -> None:
    (drawn,) = operation.outputs
    draw, names = STATELESS[operation.type]
    inputs = dict(zip(names, operation.inputs, strict=True))
    with tf.control_dependencies(None), tf.device(operation.device):
        seed = seed_of_draw(operation, is_shared=is_shared)
        replacement = draw(**inputs, seed=seed, dtype=drawn.dtype)
    replacement.set_shape(drawn.shape)
    replace(drawn, replacement)


def takes_state(operation: tf.Operation) -> bool:
    """Returns whether an operation takes a tf.random.Generator's state.

    Those in functions, branches and loops are left as they are.
    """
    return operation.type == "RngReadAndSkip" and context_of(operation) is None


def take_state_once(
    operation: tf.Operation,
    *,
    is_shared: bool,
    skipped: tf.Tensor | None = None,
    after: Sequence[tf.Operation] = (),
) -> tf.Operation:
    """Has a generator's state taken once for the current batch, before all passes.

    Args:
        operation: The operation that takes it.
        is_shared: Whether all micro-batches of a batch get the same state.
        skipped: Scalar uint64, the numbers that it skips; None for as many as a batch may
            draw.
        after: Operations that run before.

    Returns:
        The operation that takes it now.
    """
    handle, algorithm, _ = operation.inputs
    (state,), batch = operation.outputs, current_batch()
    if skipped is None:
        skipped = tf.constant(_MOST_DRAWS, tf.uint64)
    with tf.control_dependencies(None), tf.device(operation.device):
        slot = batch.works.slot("state_of_generator", state.dtype, state.shape)
        with tf.control_dependencies(after):
            taken = tf.raw_ops.RngReadAndSkip(
                resource=handle, alg=tf.identity(algorithm), delta=skipped
            )
        batch.works.add(before=[slot.write(taken)])
        replacement = slot.read()
        if not is_shared:
            replacement = with_place(replacement, batch.begin)
    replacement.set_shape(state.shape)
    replace(state, replacement)
    return taken.op


def with_place(state: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
    """Returns the state of a generator for the micro-batch that begins at an example."""
    # The second number is no part of what draws move by less than 2**64.
    begin = tf.cast(begin, state.dtype)
    return state + begin * tf.one_hot(1, state.shape[0], dtype=state.dtype)


@functools.cache
def _changes(kind: str) -> bool:
    """Returns whether a type changes a lasting state other than a random one."""
    return not (
        _is_repeatable(kind)
        or kind in SHOWING | DRAWS
        or _RECURRENT.match(kind)
        or draws_by_state(kind)
        or moves_generator(kind)
    )


def _is_repeatable(kind: str) -> bool:
    """Returns whether a type has no state, aside from functions that it calls."""
    return kind in _HARMLESS | CALLERS or is_stateful(kind) is False
