"""Uses of the slices of sparse gradients: scaled, made dense, or their norm taken."""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.current_batch import current_parts
from estimator_accum.core.linear import keeps_precision
from estimator_accum.graph.functions import arguments_in
from estimator_accum.graph.internals import captures_of
from estimator_accum.graph.lookups import SUMMING
from estimator_accum.graph.names import PRODUCTS, SHOWING
from estimator_accum.graph.walks import walk
from estimator_accum.rows.places import has_one_slice_a_row

NORM = "_for_norm"  # suffix of copies that compute a norm of slices
_COUNTING = {"Bincount", "DenseBincount", "UniqueWithCounts", "UniqueWithCountsV2"}


class Slices(NamedTuple):
    """Uses of slices by the operations of a change.

    Attributes:
        tensors: Names of the tensors that hold slices, or their squares, of `with_norm`.
        norms: Names of operations that sum the squares of their slices.
        with_norm: The sparse gradients whose norm is taken, and of which a batch has
            several slices in a row.
    """

    tensors: set[str]
    norms: set[str]
    with_norm: list[tf.IndexedSlices]


def find_slices(accumulated: list, changed: list, operations: set) -> Slices:
    """Finds the results of slices; refuses operations that need each of them.

    Args:
        accumulated: Gradients that the change begins with.
        changed: Gradients that it results in.
        operations: Its operations.
    """
    sparse = [g for g in accumulated if isinstance(g, tf.IndexedSlices)]
    waiting = [(gradient.values, False, gradient) for gradient in sparse]
    origins, norms, with_norm = {}, set(), {}  # origins: of slices, or of their squares
    while waiting:
        tensor, is_squared, gradient = waiting.pop()
        origins[tensor.name] = gradient, is_squared
        for user in tensor.consumers():
            if user not in operations:
                continue
            kind = _kind_of(user, tensor, is_squared)
            if kind is None:
                _refuse(user, gradient)
            if kind == "norm":
                if not _has_single_rows(gradient):
                    norms.add(user.name)
                    with_norm[gradient.values.name] = gradient
            elif kind != "dense":
                waiting.append((user.outputs[0], kind == "squares", gradient))
    for gradient in sparse:
        for user in gradient.indices.consumers():
            if user in operations and user.type != "UnsortedSegmentSum":
                _refuse(user, gradient)
    indices = {gradient.indices.name: gradient for gradient in sparse}
    for gradient in changed:
        if isinstance(gradient, tf.IndexedSlices):
            origin, is_squared = origins.get(gradient.values.name, (None, True))
            if is_squared or origin is not indices.get(gradient.indices.name):
                _refuse(gradient.values.op, gradient)
    tensors = {
        name for name, (origin, _) in origins.items() if origin.values.name in with_norm
    }
    return Slices(tensors, norms, list(with_norm.values()))


def add_norms(definition, slices: Slices) -> None:
    """Adds copies to a definition, which compute norms of slices by themselves."""

    def renamed(name: str) -> str:
        if name not in slices.tensors:
            return name
        operation, number = name.rsplit(":", 1)
        return f"{operation}{NORM}:{number}"

    computed = {name.rsplit(":", 1)[0] for name in slices.tensors}
    for node in list(definition.node) if slices.norms else ():
        if node.name in computed:
            twin = definition.node.add()
            twin.CopyFrom(node)
            twin.name += NORM
        elif node.name in slices.norms:
            twin = node
        else:
            continue
        inputs = [renamed(name) for name in node.input]
        twin.input[:] = inputs


def find_reader(
    gradient: tf.IndexedSlices, operations: set[tf.Operation], graph: tf.Graph
) -> tf.Operation | None:
    """Returns an operation that may need each slice, not the sum in each row.

    Args:
        gradient: The slices.
        operations: The operations to look at, and in the functions that they call.
        graph: Their graph, that of a branch perhaps, which captures the slices.
    """
    inside = {outer.ref(): inner for outer, inner in captures_of(graph)}
    parts = gradient.values, gradient.indices
    values, indices = (inside.get(part.ref(), part) for part in parts)
    slices, readers = _uses_of(values, operations, _slices_from)
    rows, others = _uses_of(indices, operations, _rows_from)
    # Their number in a row matters, not which rows there are.
    counting = [user for user in others if user.type in {*SUMMING, *_COUNTING}]
    for user in (*readers, *counting):
        places = SUMMING.get(user.type)
        if places is None or any(
            user.inputs[place].ref() not in tensors
            for place, tensors in zip(places, (slices, rows), strict=True)
        ):
            return user
    return None


def _uses_of(start: tf.Tensor, operations: set[tf.Operation], passed_on) -> tuple:
    """Returns a tensor and those that pass it on, by reference, and their other users."""
    users = {}

    def next_of(reference) -> list:
        tensor, passed = reference.deref(), []
        is_inside = tensor.graph is not start.graph
        if is_inside and any(tensor is result for result in tensor.graph.outputs):
            users[tensor.op] = None
        for user in tensor.consumers():
            if not is_inside and user not in operations:
                continue
            further = arguments_in(user, tensor) or passed_on(user, tensor)
            if further is None:
                users[user] = None
            passed += further or ()
        return [other.ref() for other in passed]

    return walk([start.ref()], next_of), list(users)


def _slices_from(user: tf.Operation, slices: tf.Tensor) -> list[tf.Tensor] | None:
    """Returns the slices that `user` passes on; None if it does something else."""
    if user.type in ("IsFinite", "IsInf", "IsNan", *SHOWING):  # so are their sums
        return []
    is_passed = user.type in ("CheckNumerics", "ConcatV2", "Switch")
    if is_passed or _kind_of(user, slices, False) == "slices":
        return list(user.outputs)
    return None


def _rows_from(user: tf.Operation, rows: tf.Tensor) -> list[tf.Tensor] | None:
    """Returns the rows of slices that `user` passes on; None if it does something else."""
    if user.type in ("Unique", "UniqueV2"):  # in the first result each is there once
        return [user.outputs[1]]
    is_passed = user.type in ("Cast", "ConcatV2", "Identity", "Reshape", "Switch")
    return list(user.outputs) if is_passed else None


def _has_single_rows(gradient: tf.IndexedSlices) -> bool:
    """Returns whether the norm of slices is that of the rows of a window."""
    is_single = has_one_slice_a_row(gradient, current_parts())
    if is_single is None:
        raise ValueError(
            "The norm of a sparse gradient must be of one kind of look-up: one slice for "
            "each row, as by tf.nn.embedding_lookup_sparse, or one for each look-up, as "
            f"by tf.gather. Received: {gradient.values.name}, of both or of another "
            "kind. Make the gradient dense first, by tf.convert_to_tensor."
        )
    return is_single


def _refuse(operation: tf.Operation, gradient: tf.IndexedSlices) -> None:
    raise ValueError(
        "Slices of a sparse gradient must only be scaled, made dense or have the "
        "norm of all taken: a window keeps their sum in each row. Received: "
        f"{operation.name} of type {operation.type}, on {gradient.values.name}. Make "
        "the gradient dense first, by tf.convert_to_tensor."
    )


def _kind_of(user: tf.Operation, slices: tf.Tensor, is_squared: bool) -> str | None:
    """Returns the kind of results that `user` has of slices, or of their squares.

    Returns:
        "slices", "squares", "norm" or "dense"; None if it is anything else.
    """
    inputs = list(user.inputs)
    others = [tensor for tensor in inputs if tensor.name != slices.name]
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
    if user.type in ("Identity", "Neg", "StopGradient") or keeps_precision(user):
        return "slices"
    if user.type not in PRODUCTS or not others or others[0].shape.num_elements() != 1:
        return None
    return "slices" if user.type == "Mul" or inputs[0].name == slices.name else None
