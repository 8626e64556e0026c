"""Changes that code makes to gradients before `apply_gradients`.

    as written    g_i -> change -> apply_gradients
    as run        g_i -> sum | mean over the window -> copy of the change -> optimizer

Clipping, gradient noise or weight decay are meant for the gradient of the batch. So the
gradients of `compute_gradients` are accumulated, and the operations between these and the
arguments of `apply_gradients` are copied to the window's boundary. There they read their
usual inputs: variables, constants, other gradients; random numbers are drawn once per
window. A value of a micro-batch, such as its loss, is refused.

Sums and constant multiples of gradients stay where they are: the mean of sums is the sum
of means. For gradients of other origin this is the only proof that nothing was done to
them per micro-batch that belongs behind the mean, so anything more is refused.

A sparse gradient is the mean over the window's rows, each once, where a batch has a slice
for each look-up. Code may scale slices, make them dense, and take the norm of all; their
norm is accumulated beside the rows.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.changed_slices import NORM, Slices, add_norms, find_slices
from estimator_accum.core.gradients import Gradient, values_of
from estimator_accum.core.linear import check_losses, is_linear, parts_of
from estimator_accum.core.multipliers import REMEDY, refuse_writer
from estimator_accum.graph.branches import is_in_branch
from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.names import FED
from estimator_accum.graph.outermost import value_of_graph
from estimator_accum.graph.walks import (
    ancestors,
    control_inputs_of,
    data_ancestors,
    descendants,
)
from estimator_accum.graph.writers import (
    MicroStepWriters,
    is_reference,
    micro_step_writers,
    operations_of_updates,
    variable_of,
    varying,
    writers_of,
)

_COMPUTED = "_estimator_accum_computed"  # a graph's attribute


class _Computed(NamedTuple):
    gradient: Gradient
    variable: tf.Variable
    loss: object


def remember(pairs: Iterable[tuple], loss: object) -> None:
    """Makes the (gradient, variable) pairs of a loss known to `find_change`."""
    for gradient, variable in pairs:
        if gradient is not None:
            results = _known(values_of(gradient).graph)
            for tensor in parts_of(gradient):
                results[tensor.name] = _Computed(gradient, variable, loss)


def are_as_computed(gradients: list[Gradient]) -> bool:
    """Returns whether gradients are those that `compute_gradients` returned."""
    parts = [part for gradient in gradients for part in parts_of(gradient)]
    return all(part.name in _known(part.graph) for part in parts)


def losses_of(gradients: list[Gradient]) -> list:
    """Returns the losses, each once, of which `compute_gradients` took the gradients."""
    losses = {}

    def inputs_of(operation: tf.Operation) -> list[tf.Tensor]:
        results = _known(operation.graph)
        names = [tensor.name for tensor in operation.outputs if tensor.name in results]
        losses.update({id(results[n].loss): results[n].loss for n in names})
        return [] if names else list(operation.inputs)

    # Not from their rows, which gradients of several losses share.
    data_ancestors([values_of(gradient).op for gradient in gradients], inputs_of)
    return list(losses.values())


def _known(graph: tf.Graph) -> dict[str, _Computed]:
    """Returns the results of `compute_gradients` in a graph, by names of tensors."""
    return value_of_graph(graph, _COMPUTED, {})


def find_change(
    gradients: list[Gradient], variables: list[tf.Variable], windows: list
) -> "Change | None":
    """Returns the change of gradients after they were computed; None if there is none.

    Args:
        gradients: Gradients that `apply_gradients` gets.
        variables: Their variables.
        windows: The graph's `Window`s so far.

    Raises:
        ValueError: If a change cannot be made on the mean, or it is unknown whether
            gradients were changed.
    """
    results = {
        name: computed
        for graph in {values_of(gradient).graph for gradient in gradients}
        for name, computed in _known(graph).items()
    }
    later = descendants(part for c in results.values() for part in parts_of(c.gradient))
    kept, changed, foreign = [], [], []
    for gradient, variable in zip(gradients, variables, strict=True):
        parts = parts_of(gradient)
        is_computed = any(part.op in later for part in parts)
        # A schedule is read once per window, but a loss scale with its micro-batch.
        may_vary = not is_computed or is_in_branch()
        if all(is_linear(part, results, later, may_vary) for part in parts):
            if not is_computed:  # also one that compute_gradients returned
                foreign += [part for part in parts if part.name not in results]
            kept.append((gradient, variable))
        elif is_computed:
            changed.append(gradient)
        else:
            _check_is_given(gradient, variable)
    check_losses(foreign)
    if not changed:
        return None
    _check_place(values_of(changed[0]))
    # Gradients of other origin are accumulated as they are.
    for gradient, variable in kept:
        if not any(p.name in results or p.op in later for p in parts_of(gradient)):
            computed = _Computed(gradient, variable, None)
            results |= {part.name: computed for part in parts_of(gradient)}
    # A train op that was made before may be waited for, but is no part of the change.
    of_train_ops = descendants(window.update_step_after for window in windows)
    later -= of_train_ops
    return _plan_change(gradients, variables, results, later)


def _check_is_given(gradient: Gradient, variable: tf.Variable) -> None:
    for part in parts_of(gradient):
        is_fed = part.op.type in FED and not part.graph.building_function
        if not is_fed and varying(data_ancestors([part.op])):
            _check_place(part)
            raise ValueError(
                "Gradients must come from compute_gradients of AccumulatingOptimizer, or be "
                "results of tf.gradients, their sums or constant multiples. All else may be "
                "a change, which applies to the window's mean. "
                f"Received: {part.name} of type {part.op.type} for {variable.name}. Call "
                "compute_gradients in place of tf.gradients; for a gradient of another "
                "origin its loss is "
                "tf.reduce_sum(tf.stop_gradient(gradient) * variable)."
            )


def _check_place(gradient: tf.Tensor) -> None:
    if is_in_branch():
        raise ValueError(
            "Gradients that are changed must not be applied in a branch, which would be "
            f"chosen by micro-batch. Received: {gradient.name} in a tf.cond, or an "
            "optimizer with dynamic loss scaling around AccumulatingOptimizer. Put the "
            "loss-scaling optimizer inside, and apply outside of the branch."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """Operations that one replica's code puts between two lists of gradients.

    Attributes:
        changed: The gradients that `apply_gradients` gets.
        variables: Their variables.
        gradients: The gradients that are accumulated.
        sources: The variables for which they were computed.
        slices: Uses of their slices, of those that are sparse.
        operations: The operations that are copied.
        outside: Tensors by name that these read, and that are not copied.
        awaited: Operations for which they wait and that run with every micro-step.
        of_batch: Operations by which one micro-batch differs from another.
        definition: The copied operations.
    """

    changed: list[Gradient]
    variables: list[tf.Variable]
    gradients: list[Gradient]
    sources: list[tf.Variable]
    slices: Slices
    operations: set[tf.Operation]
    outside: dict[str, tf.Tensor]
    awaited: list[tf.Operation]
    of_batch: set[tf.Operation]
    definition: tf.compat.v1.GraphDef

    @property
    def with_norm(self) -> list[tf.IndexedSlices]:
        """The gradients that are sparse and have the norm of all slices taken."""
        return self.slices.with_norm

    def check_variables(self, windows: list) -> None:
        """Refuses variables that may be written with every micro-batch.

        Args:
            windows: The graph's `Window`s so far, also the one of this change.
        """
        graph = values_of(self.changed[0]).graph
        writers = micro_step_writers(graph, windows)
        updates = operations_of_updates(graph)
        with graph.as_default():
            written = writers_of(graph.get_operations())
        waited = ancestors(self.awaited)
        self._check_tables(writers)
        for variable in dict.fromkeys(map(variable_of, self.outside.values())):
            for writer in written.get(variable, ()):
                if writer in updates or writers.is_in_update(writer):
                    continue
                needs_batch = self.of_batch & data_ancestors([writer]).keys()
                if writers.runs(writer):
                    is_refused = writer not in waited or writer in writers.of(variable)
                else:  # copied, or in a session.run of its own
                    is_refused = writer not in self.operations and (
                        writer in waited or needs_batch
                    )
                if is_refused:
                    refuse_writer(variable, writer, windows, needs_batch)

    def _check_tables(self, writers: MicroStepWriters) -> None:
        """Refuses tables that may be written with every micro-batch."""
        for tensor in self.outside.values():
            users = tensor.consumers() if "HashTable" in tensor.op.type else ()
            for user in users:
                is_write = re.search("Insert|Import|Remove", user.type) is not None
                if is_write and writers.runs(user) and not writers.is_in_update(user):
                    raise ValueError(
                        "Gradients must not be changed by a table that is written with "
                        f"every micro-batch. Received: {tensor.op.name}, written by "
                        f"{user.name}. Pass the write as `after_update_ops`, to "
                        "write it once per update."
                    )

    def __call__(self, means: list[Gradient], halves: list[tf.Tensor]):
        """Returns the changed means, in a branch that updates.

        Args:
            means: The window's mean of each of `gradients`.
            halves: Half the squared norm of all slices of each of `with_norm`.
        """
        inputs = dict(self.outside)
        for gradient, mean in zip(self.gradients, means, strict=True):
            inputs[values_of(gradient).name] = values_of(mean)
            if isinstance(mean, tf.IndexedSlices):
                name = gradient.indices.name
                inputs[name] = tf.cast(mean.indices, gradient.indices.dtype)
        for gradient, half in zip(self.with_norm, halves, strict=True):
            # A single slice whose norm is that of all.
            operation, number = gradient.values.name.rsplit(":", 1)
            norm = tf.cast(tf.sqrt(half + half), gradient.values.dtype)
            norm = tf.reshape(norm, [1] * gradient.values.shape.rank)
            inputs[f"{operation}{NORM}:{number}"] = norm
        wanted = [part for gradient in self.changed for part in parts_of(gradient)]
        copies = iter(insert(self.definition, inputs, wanted, "change"))
        return [
            tf.IndexedSlices(
                next(copies),
                next(copies),
                tf.constant(variable.shape.as_list(), tf.int64),
            )
            if isinstance(gradient, tf.IndexedSlices)
            else next(copies)
            for gradient, variable in zip(self.changed, self.variables, strict=True)
        ]


class _Walk(NamedTuple):
    """Operations between two lists of gradients.

    Attributes:
        names: Names of the gradients that are read.
        users: The operation that needs another, by that one; also those outside.
        operations: The operations that are copied.
        outside: Tensors by name that these read, and that are not copied.
        awaited: Operations for which they wait.
    """

    names: set[str]
    users: dict[tf.Operation, tf.Operation | None]
    operations: set[tf.Operation]
    outside: dict[str, tf.Tensor]
    awaited: list[tf.Operation]


def _plan_change(
    changed: list[Gradient],
    variables: list[tf.Variable],
    results: dict[str, _Computed],
    later: set[tf.Operation],
) -> Change:
    """Returns the change; raises ValueError if it cannot be made on the mean.

    Args:
        changed: Gradients that `apply_gradients` gets.
        variables: Their variables.
        results: Accumulated gradients, by names of their tensors, in order.
        later: Operations that compute from these, or wait for them.
    """
    walk = _walk(changed, results, later)
    first = {values_of(c.gradient).name: c for c in results.values()}
    accumulated = [c for name, c in first.items() if name in walk.names]
    gradients = [computed.gradient for computed in accumulated]
    needed = [part.op for gradient in gradients for part in parts_of(gradient)]
    needed += [loss.op for _, _, loss in accumulated if isinstance(loss, tf.Tensor)]
    of_batch = varying(ancestors(needed))
    _check_operations(walk, later, of_batch)
    slices = find_slices(gradients, changed, walk.operations)
    definition, _ = define(walk.operations)
    add_norms(definition, slices)
    return Change(
        changed=changed,
        variables=variables,
        gradients=gradients,
        sources=[computed.variable for computed in accumulated],
        slices=slices,
        operations=walk.operations,
        outside=walk.outside,
        awaited=walk.awaited,
        of_batch=of_batch,
        definition=definition,
    )


def _walk(changed: list[Gradient], results: dict, later: set[tf.Operation]) -> _Walk:
    """Walks from the changed gradients back to those that are accumulated."""
    names, users, outside, awaited = set(), {}, {}, {}
    parts = [part for gradient in changed for part in parts_of(gradient)]
    waiting = [(tensor, tensor.op, None) for tensor in parts]
    while waiting:
        tensor, operation, user = waiting.pop()
        if tensor is not None and tensor.name in results:
            names.add(values_of(results[tensor.name].gradient).name)
            continue
        if tensor is not None and _stays(operation):
            outside[tensor.name] = tensor
        if operation in users:
            continue
        users[operation] = user
        if _stays(operation):
            continue
        waiting += [(tensor, tensor.op, operation) for tensor in operation.inputs]
        for other in control_inputs_of(operation):
            if any(output.name in results for output in other.outputs):
                continue
            if other in later or _is_pivot(other):
                waiting.append((None, other, operation))
            else:
                awaited[other] = None
    operations = {op for op in users if not _stays(op)}
    awaited = [op for op in awaited if op not in operations]
    return _Walk(names, users, operations, outside, awaited)


def _check_operations(
    walk: _Walk, later: set[tf.Operation], of_batch: set[tf.Operation]
) -> None:
    """Refuses values of a micro-batch, which come from `of_batch`."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    drawn = varying(walk.operations)
    for operation, user in walk.users.items():
        if operation.type in ("Enter", "RefEnter"):
            raise ValueError(
                "A change of gradients must not loop by control flow of TensorFlow "
                f"1. Received: {operation.name}. Call "
                "tf.compat.v1.enable_control_flow_v2() at the program's start."
            )
        if replicas > 1 and operation.outputs and operation in drawn:
            raise ValueError(
                "With several replicas a change of gradients must not draw random "
                "numbers by operations with a state: each replica would add others. "
                f"Received: {operation.name} of type {operation.type}. Use "
                "tf.random.stateless_normal, say, with a seed computed from "
                "get_or_create_update_step()."
            )
        if operation in later and _stays(operation):
            raise ValueError(
                "A change of gradients must not write a reference variable, or wait "
                f"to read one. Received: {operation.name}. Make the variable with "
                "use_resource=True."
            )
        if operation in of_batch:
            value = operation
            while user is not None and user not in later:
                value, user = user, walk.users[user]
            needed = "" if user is None else f", which {user.name} needs"
            raise ValueError(
                "Gradients must be changed by values that are equal in all micro-batches "
                "of an update: variables, constants, random numbers and other "
                f"gradients. Received: {value.name} of a micro-batch{needed}. "
                f"{REMEDY}"
            )


def _stays(operation: tf.Operation) -> bool:
    """Returns whether an operation is not copied: it is fed, or a variable or table."""
    tensors = [*operation.outputs, *operation.inputs]
    return (
        operation.type in FED
        or any(output.dtype == tf.resource for output in operation.outputs)
        or any(is_reference(tensor) for tensor in tensors)
    )


def _is_pivot(operation: tf.Operation) -> bool:
    """Returns whether an operation runs only if a branch of TensorFlow 1 is chosen."""
    if operation.type == "Identity":
        operation = operation.inputs[0].op
    return operation.type == "Switch"
