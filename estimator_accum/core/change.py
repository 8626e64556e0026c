"""Gradients that code changes between `compute_gradients` and `apply_gradients`.

    as written    g_i -> change -> apply_gradients
    as run        g_i -> sum | mean over the window -> copy of the change -> optimizer

Clipping, gradient noise or weight decay are meant for the gradient of the batch. So what
is accumulated are the gradients that `compute_gradients` returned, and the operations
between these and what `apply_gradients` gets are copied to the window's boundary. There
they read what they read anyway: variables, constants, other gradients; random numbers
are drawn once per window. A value of a micro-batch, such as its loss, is refused.

Sums and constant multiples of gradients stay where they are: the mean of sums is the sum
of means. For gradients of other origin this is the only proof that nothing was done to
them per micro-batch that belongs behind the mean, so what is more is refused.

A sparse gradient is the mean over the window's rows, each once, where a batch has a slice
for each look-up. Code may scale slices, make them dense, and take the norm of all; their
norm is accumulated beside the rows.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.gradients import Gradient, values_of
from estimator_accum.graph.branches import is_in_branch
from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.names import FED, VARIABLES
from estimator_accum.graph.outermost import value_of_graph
from estimator_accum.graph.walks import (
    ancestors,
    data_ancestors,
    data_descendants,
    descendants,
)
from estimator_accum.graph.writers import (
    SETTLED,
    MicroStepWriters,
    operations_of_updates,
    variable_of,
    varying,
    writers_of,
)

_COMPUTED = "_estimator_accum_computed"  # a graph's attribute
_NORM = "_for_norm"  # suffix of copies that compute a norm of slices
_SUMS = {"Add", "AddN", "AddV2", "Identity", "Neg", "StopGradient", "Sub"}
_CURVED = {  # whose value for a mean is not the mean of the values
    *("Abs", "Exp", "L2Loss", "Log", "Log1p", "Max", "Maximum", "Min", "Minimum"),
    *("Pow", "Prod", "Reciprocal", "Relu", "Rsqrt", "Sigmoid", "Sign", "Softmax"),
    *("Softplus", "Sqrt", "Square", "SquaredDifference", "Tanh"),
}
_PRODUCTS = {"Div", "Mul", "RealDiv"}
_REMEDY = (
    "Pass `clip_norm` if it clips, or leave the optimizer as it is, without "
    "AccumulatingOptimizer, and cut whole batches by microbatch_model_fn."
)


class _Computed(NamedTuple):
    gradient: Gradient
    variable: tf.Variable
    loss: object


def remember(pairs: Iterable[tuple], loss: object) -> None:
    """Makes the (gradient, variable) pairs of a loss known to `find_change`."""
    for gradient, variable in pairs:
        if gradient is not None:
            known = _known(values_of(gradient).graph)
            for tensor in _parts(gradient):
                known[tensor.name] = _Computed(gradient, variable, loss)


def are_as_computed(gradients: list[Gradient]) -> bool:
    """Returns whether gradients are those that `compute_gradients` returned."""
    parts = [part for gradient in gradients for part in _parts(gradient)]
    return all(part.name in _known(part.graph) for part in parts)


def _known(graph: tf.Graph) -> dict[str, _Computed]:
    """Returns what `compute_gradients` returned in a graph, by names of tensors."""
    return value_of_graph(graph, _COMPUTED, {})


def _parts(gradient: Gradient) -> list[tf.Tensor]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]


def find_change(
    gradients: list[Gradient], variables: list[tf.Variable], windows: list
) -> "Change | None":
    """Returns what code does to gradients that it computed; None if nothing.

    Args:
        gradients: Gradients that `apply_gradients` gets.
        variables: Their variables.
        windows: The graph's `Window`s so far.

    Raises:
        ValueError: If a change cannot be made on the mean, or it is unknown whether
            gradients were changed.
    """
    known = {
        name: computed
        for graph in {values_of(gradient).graph for gradient in gradients}
        for name, computed in _known(graph).items()
    }
    later = descendants(part for c in known.values() for part in _parts(c.gradient))
    kept, changed, foreign = [], [], []
    for gradient, variable in zip(gradients, variables, strict=True):
        parts = _parts(gradient)
        is_computed = any(part.op in later for part in parts)
        # A schedule is read once per window, but a loss scale with its micro-batch.
        may_vary = not is_computed or is_in_branch()
        if all(_is_linear(part, known, later, may_vary) for part in parts):
            if not is_computed:  # also one that compute_gradients returned
                foreign += [part for part in parts if part.name not in known]
            kept.append((gradient, variable))
        elif is_computed:
            changed.append(gradient)
        else:
            _check_is_given(gradient, variable)
    _check_losses(foreign)
    if not changed:
        return None
    _check_place(values_of(changed[0]))
    # Gradients of other origin are accumulated as they are.
    for gradient, variable in kept:
        if not any(p.name in known or p.op in later for p in _parts(gradient)):
            given = _Computed(gradient, variable, None)
            known |= {part.name: given for part in _parts(gradient)}
    # A train op that was made before may be waited for, but is no part of the change.
    of_train_ops = descendants(window.update_step_after for window in windows)
    later -= of_train_ops
    return Change(gradients, variables, known, later)


class Factors:
    """Variables by which gradients of other origin were multiplied.

    A factor that the gradient is computed from too, such as a loss scale, does not count.

    Args:
        gradients: Gradients that `apply_gradients` gets.
    """

    def __init__(self, gradients: list[Gradient]):
        self._graph = values_of(gradients[0]).graph
        self._variables = {}
        for part in (part for gradient in gradients for part in _parts(gradient)):
            terms = _terms(part, lambda tensor: tensor.op._original_op is not None)
            computed, factors = terms or ([], [])
            needed = data_ancestors([each.op for each in factors])
            variables = [each for each in needed if each.type in VARIABLES]
            if variables:  # only then: it walks through the whole model
                own = data_ancestors([each.op for each in computed])
                found = [each for each in variables if each not in own]
                self._variables |= dict.fromkeys(found)

    def check_variables(self, windows: list) -> None:
        """Refuses a variable that may be written with every micro-batch."""
        if not self._variables:
            return
        writers = _micro_step_writers(self._graph, windows)
        for variable in self._variables:
            for writer in writers.of(variable):
                _refuse_writer(variable, writer, windows, ())


def _micro_step_writers(graph: tf.Graph, windows: list) -> MicroStepWriters:
    counted = [w.is_boundary for w in windows if w.micro_steps is not None]
    return MicroStepWriters(graph, counted)


def _refuse_writer(
    variable: tf.Operation, writer: tf.Operation, windows: list, needs_batch
) -> None:
    raise ValueError(
        "Gradients must not be changed by a variable that is written with every "
        f"micro-batch. Received: {variable.name}, written by {writer.name}. "
        f"{_remedy_for(variable, windows, needs_batch)}"
    )


def _is_linear(
    tensor: tf.Tensor, known: dict, later: set[tf.Operation], may_vary: bool
) -> bool:
    """Returns whether a tensor is a sum of constant multiples of gradients.

    Args:
        tensor: The tensor.
        known: Gradients, by the names of their tensors.
        later: Operations that compute from these.
        may_vary: Whether factors may be computed from variables.
    """

    def is_gradient(tensor: tf.Tensor) -> bool:
        # TensorFlow notes of which operation an operation is the gradient.
        is_derived = tensor.op._original_op is not None and tensor.op not in later
        return tensor.name in known or is_derived

    found = _terms(tensor, is_gradient)
    if found is None:
        return False
    gradients, factors = ([each.op for each in part] for part in found)
    needed = ancestors(factors)
    if not may_vary and any(each.type in SETTLED for each in needed):
        return False
    of_factors = varying(needed)
    return not of_factors or not of_factors & varying(ancestors(gradients))


def _terms(tensor: tf.Tensor, is_gradient) -> tuple[list, list] | None:
    """Returns the gradients and factors of which a tensor is a sum of products."""
    if is_gradient(tensor):
        return [tensor], []
    inputs = list(tensor.op.inputs)
    if tensor.op.type in _PRODUCTS:
        for one, other in (inputs, inputs[::-1])[: 2 if tensor.op.type == "Mul" else 1]:
            found = _terms(one, is_gradient)
            if found and other.shape.num_elements() == 1:
                return found[0], [*found[1], other]
        return None
    if tensor.op.type == "ConcatV2":  # slices of several look-ups
        inputs.pop()
    elif tensor.op.type == "UnsortedSegmentSum":  # slices that become dense
        del inputs[1:]
    elif tensor.op.type not in _SUMS and not _is_precision(tensor.op):
        return None
    gradients, factors = [], []
    for each in inputs:
        found = _terms(each, is_gradient)
        if found is None:
            return None
        gradients += found[0]
        factors += found[1]
    return gradients, factors


def _check_losses(gradients: list[tf.Tensor]) -> None:
    """Refuses what tf.gradients returns for a function of sums over the micro-batch.

    Such as the norm of a gradient: the mean of norms is not the norm of the mean. A
    gradient for each example, whose first axis is unknown, may be in any function.
    """
    needed = data_ancestors([gradient.op for gradient in gradients])
    sums = {each for each in needed if each._original_op is not None}
    own = {*needed, *(each._original_op for each in sums)}
    own = {each for each in own if each._original_op is None}
    users = {each for each in own if any(tensor.op in sums for tensor in each.inputs)}
    users |= data_descendants(
        (output for each in users for output in each.outputs), own.__contains__
    )
    for user in users:
        of_sums = [each for each in user.inputs if each.op in users or each.op in sums]
        is_product = user.type in {"MatMul", "BatchMatMulV2", *_PRODUCTS}
        is_curved = user.type in _CURVED or (is_product and len(of_sums) > 1)
        if is_curved and all(each.shape.is_fully_defined() for each in of_sums):
            raise ValueError(
                "What tf.gradients differentiates must not be a function of other "
                "gradients, which are those of a micro-batch. Received: "
                f"{user.name} of type {user.type}. If the loss is a mean over examples, "
                "as with a penalty for each, call compute_gradients in place of "
                "tf.gradients. If not, cut whole batches by microbatch_model_fn, and "
                "leave the optimizer as it is, without AccumulatingOptimizer."
            )


def _is_precision(operation: tf.Operation) -> bool:
    """Returns whether an operation only adds bits, or casts integers: none is rounded."""
    if operation.type != "Cast":
        return False
    before, after = operation.inputs[0].dtype, operation.outputs[0].dtype
    if not (before.is_floating and after.is_floating):
        return before.is_floating == after.is_floating
    return before == after or before.size < after.size


def _check_is_given(gradient: Gradient, variable: tf.Variable) -> None:
    for part in _parts(gradient):
        is_fed = part.op.type in FED and not part.graph.building_function
        if not is_fed and varying(data_ancestors([part.op])):
            _check_place(part)
            raise ValueError(
                "Gradients must come from compute_gradients of AccumulatingOptimizer, so "
                "that what is done to them is done to the window's mean; of others only "
                "what tf.gradients returns is taken, its sums and constant multiples. "
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


class Change:
    """Operations that one replica's code puts between two lists of gradients.

    Args:
        changed: Gradients that `apply_gradients` gets.
        variables: Their variables.
        known: Accumulated gradients, by names of their tensors, in order.
        later: Operations that compute from these, or wait for them.

    Attributes:
        gradients: The gradients that are accumulated.
        read: The variables for which they were computed.
        variables: The variables that the optimizer gets.
        with_norm: The gradients that are sparse and have the norm of all slices
            taken.
        operations: The operations that are copied.
        waits: Operations for which they wait and that run with every micro-step.
    """

    def __init__(
        self,
        changed: list,
        variables: list,
        known: dict,
        later: set,
    ):
        self._changed, self.variables, self._later = changed, variables, later
        names = self._walk(known)
        first = {values_of(each.gradient).name: each for each in known.values()}
        read = [each for name, each in first.items() if name in names]
        self.gradients = [each.gradient for each in read]
        self.read = [each.variable for each in read]
        needed = [part.op for g in self.gradients for part in _parts(g)]
        needed += [loss.op for _, _, loss in read if isinstance(loss, tf.Tensor)]
        self._of_batch = varying(ancestors(needed))
        self._graph = values_of(changed[0]).graph
        self._check_operations(self._of_batch)
        self._find_slices()
        definition, _ = define(self.operations)
        self._definition = self._with_norms(definition)

    def _walk(self, known: dict[str, _Computed]) -> set[str]:
        """Finds `operations`, and what they read; returns the names of gradients."""
        names, found, outside, waits = set(), {}, {}, {}
        parts = [part for gradient in self._changed for part in _parts(gradient)]
        waiting = [(tensor, tensor.op, None) for tensor in parts]
        while waiting:
            tensor, operation, user = waiting.pop()
            if tensor is not None and tensor.name in known:
                names.add(values_of(known[tensor.name].gradient).name)
                continue
            if tensor is not None and _stays(operation):
                outside[tensor.name] = tensor
            if operation in found:
                continue
            found[operation] = user
            if _stays(operation):
                continue
            waiting += [(each, each.op, operation) for each in operation.inputs]
            for other in operation.control_inputs:
                if any(each.name in known for each in other.outputs):
                    continue
                if other in self._later or _is_pivot(other):
                    waiting.append((None, other, operation))
                else:
                    waits[other] = None
        self._users, self._outside = found, outside
        self.operations = {each for each in found if not _stays(each)}
        self.waits = [each for each in waits if each not in self.operations]
        return names

    def _check_operations(self, of_batch: set[tf.Operation]) -> None:
        """Refuses values of a micro-batch, which come from `of_batch`."""
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        drawn = varying(self.operations)
        for operation, user in self._users.items():
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
            if operation in self._later and _stays(operation):
                raise ValueError(
                    "A change of gradients must not write a reference variable, or wait "
                    f"to read one. Received: {operation.name}. Make the variable with "
                    "use_resource=True."
                )
            if operation in of_batch:
                value = operation
                while user is not None and user not in self._later:
                    value, user = user, self._users[user]
                needed = "" if user is None else f", which {user.name} needs"
                raise ValueError(
                    "Gradients must be changed by what is the same for all micro-batches "
                    "of an update: variables, constants, random numbers and other "
                    f"gradients. Received: {value.name} of a micro-batch{needed}. "
                    f"{_REMEDY}"
                )

    def check_variables(self, windows: list) -> None:
        """Refuses variables that may be written with every micro-batch.

        Args:
            windows: The graph's `Window`s so far, also the one of this change.
        """
        writers = _micro_step_writers(self._graph, windows)
        updates = operations_of_updates(self._graph)
        with self._graph.as_default():
            written = writers_of(self._graph.get_operations())
        waited = ancestors(self.waits)
        self._check_tables(writers)
        for variable in dict.fromkeys(map(variable_of, self._outside.values())):
            for writer in written.get(variable, ()):
                if writer in updates or writers.is_in_update(writer):
                    continue
                needs_batch = self._of_batch & data_ancestors([writer]).keys()
                if writers.runs(writer):
                    is_refused = writer not in waited or writer in writers.of(variable)
                else:  # copied, or in a session.run of its own
                    is_refused = writer not in self.operations and (
                        writer in waited or needs_batch
                    )
                if is_refused:
                    _refuse_writer(variable, writer, windows, needs_batch)

    def _check_tables(self, writers: MicroStepWriters) -> None:
        """Refuses tables that may be written with every micro-batch."""
        for tensor in self._outside.values():
            users = tensor.consumers() if "HashTable" in tensor.op.type else ()
            for user in users:
                is_write = re.search("Insert|Import|Remove", user.type) is not None
                if is_write and writers.runs(user) and not writers.is_in_update(user):
                    raise ValueError(
                        "Gradients must not be changed by a table that is written with "
                        f"every micro-batch. Received: {tensor.op.name}, written by "
                        f"{user.name}. Pass what writes it as `after_update_ops`, to "
                        "write it once per update."
                    )

    def _find_slices(self) -> None:
        """Finds what is computed from slices; refuses what needs each of them."""
        sparse = [g for g in self.gradients if isinstance(g, tf.IndexedSlices)]
        waiting = [(gradient.values, False, gradient) for gradient in sparse]
        indices = {gradient.indices.name: gradient for gradient in sparse}
        self._slices, self._norms, with_norm = {}, set(), {}
        while waiting:
            tensor, is_squared, gradient = waiting.pop()
            self._slices[tensor.name] = None if is_squared else gradient
            for user in tensor.consumers():
                if user not in self.operations:
                    continue
                kind = _kind_of(user, tensor, is_squared)
                if kind is None:
                    self._refuse(user, gradient)
                if kind == "norm":
                    self._norms.add(user.name)
                    with_norm[gradient.values.name] = gradient
                elif kind != "dense":
                    waiting.append((user.outputs[0], kind == "squares", gradient))
        for gradient in sparse:
            for user in gradient.indices.consumers():
                if user in self.operations and user.type != "UnsortedSegmentSum":
                    self._refuse(user, gradient)
        for gradient in self._changed:
            if isinstance(gradient, tf.IndexedSlices):
                of = self._slices.get(gradient.values.name)
                if of is None or of is not indices.get(gradient.indices.name):
                    self._refuse(gradient.values.op, gradient)
        self.with_norm = list(with_norm.values())

    def _refuse(self, operation: tf.Operation, gradient: tf.IndexedSlices):
        raise ValueError(
            "Slices of a sparse gradient must only be scaled, made dense or have the "
            "norm of all taken: a window keeps their sum in each row. Received: "
            f"{operation.name} of type {operation.type}, on {gradient.values.name}. Make "
            "the gradient dense first, by tf.convert_to_tensor."
        )

    def _with_norms(self, definition):
        """Returns the definition with copies that compute norms of slices."""

        def renamed(name: str) -> str:
            if name not in self._slices:
                return name
            operation, number = name.rsplit(":", 1)
            return f"{operation}{_NORM}:{number}"

        computed = {name.rsplit(":", 1)[0] for name in self._slices}
        for node in list(definition.node) if self._norms else ():
            if node.name in computed:
                twin = definition.node.add()
                twin.CopyFrom(node)
                twin.name += _NORM
            elif node.name in self._norms:
                twin = node
            else:
                continue
            inputs = [renamed(name) for name in node.input]
            twin.input[:] = inputs
        return definition

    def __call__(self, means: list[Gradient], halves: list[tf.Tensor]):
        """Returns the changed means, in a branch that updates.

        Args:
            means: The window's mean of each of `gradients`.
            halves: Half the squared norm of all slices of each of `with_norm`.
        """
        inputs = dict(self._outside)
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
            inputs[f"{operation}{_NORM}:{number}"] = norm
        wanted = [part for gradient in self._changed for part in _parts(gradient)]
        copies = iter(insert(self._definition, inputs, wanted, "change"))
        return [
            tf.IndexedSlices(
                next(copies),
                next(copies),
                tf.constant(variable.shape.as_list(), tf.int64),
            )
            if isinstance(gradient, tf.IndexedSlices)
            else next(copies)
            for gradient, variable in zip(self._changed, self.variables, strict=True)
        ]


def _remedy_for(variable: tf.Operation, windows: list, needs_batch) -> str:
    steps = [each.global_step for each in windows if each.global_step is not None]
    if any(variable.name == step.op.name for step in steps):
        return "Read get_or_create_update_step() in its place."
    if needs_batch:
        return _REMEDY
    return "Pass what writes it as `after_update_ops`, to write it once per update."


def _stays(operation: tf.Operation) -> bool:
    """Returns whether an operation is not copied: it is fed, or a variable or table."""
    tensors = [*operation.outputs, *operation.inputs]
    return (
        operation.type in FED
        or any(each.dtype == tf.resource for each in operation.outputs)
        or any(each.dtype._is_ref_dtype for each in tensors)
    )


def _is_pivot(operation: tf.Operation) -> bool:
    """Returns whether an operation runs only if a branch of TensorFlow 1 is chosen."""
    if operation.type == "Identity":
        operation = operation.inputs[0].op
    return operation.type == "Switch"


def _kind_of(user: tf.Operation, slices: tf.Tensor, is_squared: bool) -> str | None:
    """Returns what `user` computes from slices, or from their squares.

    Returns:
        "slices", "squares", "norm" or "dense"; None if it is anything else.
    """
    inputs = list(user.inputs)
    others = [each for each in inputs if each.name != slices.name]
    if is_squared:
        if user.type != "Sum":
            return None
        axes, rank = tf.get_static_value(inputs[1]), slices.shape.rank
        if axes is None or {int(a) % rank for a in axes.flat} != set(range(rank)):
            return None
        return "norm"
    if user.type == "Square" or (user.type == "Mul" and not others):
        return "squares"
    if user.type == "L2Loss":
        return "norm"
    if user.type == "UnsortedSegmentSum":
        return "dense"
    if user.type in ("Identity", "Neg", "StopGradient") or _is_precision(user):
        return "slices"
    if user.type not in _PRODUCTS or others[0].shape.num_elements() != 1:
        return None
    return "slices" if user.type == "Mul" or inputs[0].name == slices.name else None
