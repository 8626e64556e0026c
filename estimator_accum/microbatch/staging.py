"""Storage of a batch, from which micro-batches can be sliced repeatedly.

    stage:    input_fn's tensors -> slots, once a batch
    slice:    slots[begin : begin + size], once a micro-batch, any number of times

A slot is a bare resource, not a `tf.Variable`: it holds strings too, its shape may
change with every batch, it is in no collection and no checkpoint, and `tf.distribute`
does not see it. Slots are on the CPU, like the input pipeline's tensors.

N = number of examples in the batch.
"""

import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from estimator_accum.graph.outermost import value_of_graph

_PREFIX = "_estimator_accum_prefix_of_slots"  # attribute of a graph


class Slot:
    """Holds one tensor of any dtype between runs of a session.

    Args:
        name: Its name.
        dtype: Dtype of the tensor.
        shape: Static shape of the tensor.
        task: Device of its task, which no parameter server replaces; empty outside
            clusters.
    """

    def __init__(
        self, name: str, dtype: tf.DType, shape: tf.TensorShape, task: str = ""
    ):
        self._dtype = dtype
        graph = tf.compat.v1.get_default_graph()
        shared_name = graph.unique_name(f"slot/{name}")
        if graph.building_function:  # resources of all functions are in one place
            shared_name = f"{prefix_of_slots(graph)}/{shared_name}"
        with tf.device(task):
            self.handle = tf.raw_ops.VarHandleOp(
                dtype=dtype, shape=shape, shared_name=shared_name
            )

    def write(self, value: tf.Tensor) -> tf.Operation:
        """Returns the operation that stores `value` in the slot."""
        return tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def read(self) -> tf.Tensor:
        """Returns the value that was stored last."""
        value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self._dtype)
        if value.graph.building_function:
            # Behind values of replicas that can be derived, their all_reduce looks for
            # TensorFlow's variables, of which a slot is none.
            value = tf.stop_gradient(value)
        return value


def prefix_of_slots(graph: tf.Graph) -> str:
    """Returns the beginning of the names of a function's slots."""
    return value_of_graph(graph, _PREFIX, uuid.uuid4().hex)


class Part(NamedTuple):
    """One component of a part of the batch.

    Attributes:
        sliced: The micro-batch's.
        whole: The batch's, in a run after it is staged.
        has_rows: Whether it has one row for each example; else the examples of a sparse
            or ragged tensor have any number of entries.
        sparse: Name of its sparse tensor; None for a part of another one.
        ragged: Name of its ragged tensor; None for a part of another one.
    """

    sliced: tf.Tensor
    whole: tf.Tensor
    has_rows: bool
    sparse: str | None
    ragged: str | None


def stage(
    data: dict, begin: tf.Tensor, size: tf.Tensor
) -> tuple[list[str], tuple, list[Part], Any]:
    """Stages a batch and slices the micro-batches out of it.

    Args:
        data: "features" and "labels": Tensors, SparseTensors and RaggedTensors of N
            examples, and scalars, which every micro-batch gets; in any structure.
        begin, size: Scalars int64 [examples], the micro-batch's range.

    Returns:
        (names of the features and labels, such as `features['x']`; fetches that take the
        next batch, which are the shape of each of them, int64 [rank], and the operations
        that fill the slots; the components that are sliced; the current micro-batch, in
        the structure of `data`).

    Raises:
        TypeError: If a feature or label has another type.
    """
    named, task = named_tensors(data), task_of(begin.device)
    shapes, writes, parts, sliced = [], [], [], []
    for name, value in named:
        components = tf.nest.flatten(value, expand_composites=True)
        slots = [
            Slot(f"component_{len(writes) + i}", c.dtype, _any_batch(value, c), task)
            for i, c in enumerate(components)
        ]
        writes += [s.write(c) for s, c in zip(slots, components, strict=True)]
        shapes.append(_shape_of(value))
        # tf.custom_gradient looks for variables, as far back as gradients flow.
        reads = [tf.stop_gradient(s.read()) for s in slots]
        held = tf.nest.pack_sequence_as(without_static_rows(value), reads, True)
        sliced.append(_slice(held, begin, size))
        pairs = [tf.nest.flatten(t, expand_composites=True) for t in (sliced[-1], held)]
        if held.shape.rank != 0:
            has_rows = isinstance(held, tf.Tensor)
            sparse = name if isinstance(value, tf.SparseTensor) else None
            ragged = name if isinstance(value, tf.RaggedTensor) else None
            parts += [
                Part(*pair, has_rows, sparse, ragged)
                for pair in zip(*pairs, strict=True)
            ]
    leaves = iter(sliced)
    structure = {
        key: tf.nest.map_structure(
            lambda value: None if value is None else next(leaves), value
        )
        for key, value in data.items()
    }
    return [name for name, _ in named], (shapes, writes), parts, structure


def task_of(device: str) -> str:
    """Returns the job, replica and task of a device; empty outside clusters."""
    spec = tf.DeviceSpec.from_string(device)
    return tf.DeviceSpec(spec.job, spec.replica, spec.task).to_string()


def rows_of(names: list[str], shapes: list) -> int:
    """Returns N for the shapes from a run of the fetches of `stage`.

    Raises:
        ValueError: If the parts have different N, or all are scalars.
    """
    rows = {
        name: int(shape[0])
        for name, shape in zip(names, shapes, strict=True)
        if len(shape)
    }
    if not rows:
        raise ValueError(
            "A batch must have a part with examples along its first dimension. "
            f"Received: scalars only, {', '.join(names) or 'nothing'}. Batch the data "
            "set."
        )
    if len(set(rows.values())) > 1:
        received = ", ".join(f"{name} has {n}" for name, n in rows.items())
        raise ValueError(
            "All parts of a batch must have the same number of examples, to be split "
            f"into micro-batches. Received: {received}. Repeat a value of the "
            "whole batch for each of its examples, or make it a scalar. Pass several rows "
            "of an example with an axis of their own, or as a ragged tensor, and join "
            "them later."
        )
    return next(iter(rows.values()))


def describe_example(names: list[str], shapes: list) -> str:
    """Returns the shape of one example: `features['ids'] [512], labels []`."""
    return ", ".join(
        f"{name} {[int(n) for n in shape[1:]]}"
        for name, shape in zip(names, shapes, strict=True)
        if len(shape)
    )


def check_rows(names: list[str], shapes: list, constants: list[str]) -> None:
    """Raises ValueError if nothing tells whether a feature belongs to the examples.

    Args:
        names: Names of all features and labels.
        shapes: The shape of each of them.
        constants: Names of those that are computed from no example.
    """
    for name, shape in zip(names, shapes, strict=True):
        if name in constants:
            raise ValueError(
                "A feature that is computed from no example must not have as many rows "
                "as its batch has examples: it may have one for each of them, or belong "
                f"to none. Received: {name}, with {int(shape[0])} rows for "
                f"{int(shape[0])} examples, computed from none of them. Make it in "
                "model_fn if it belongs to none, or compute it from a feature that has a "
                "row for each, as tf.ones_like does."
            )


def named_tensors(data: dict) -> list[tuple[str, Any]]:
    """Returns the name of each feature and label, and its tensor."""
    return [
        (name, _as_tensor(name, value))
        for key, structure in data.items()
        for name, value in named_leaves(key, structure)
        if value is not None
    ]


def named_leaves(name: str, structure) -> list[tuple[str, Any]]:
    """Returns (name, leaf) pairs in the order of `tf.nest.map_structure`."""
    if isinstance(structure, Mapping):
        return [
            leaf
            for key in sorted(structure)
            for leaf in named_leaves(f"{name}[{key!r}]", structure[key])
        ]
    if isinstance(structure, list | tuple):
        return [
            leaf
            for i, value in enumerate(structure)
            for leaf in named_leaves(f"{name}[{i}]", value)
        ]
    return [(name, structure)]


def _as_tensor(name: str, value):
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor | tf.Tensor):
        return value
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be a Tensor, a SparseTensor or a RaggedTensor. "
            f"Received: {type(value).__name__}. Convert it in input_fn."
        ) from error


def _any_batch(value, component: tf.Tensor) -> tf.TensorShape:
    """Returns the component's static shape for any number of examples."""
    if component.shape.rank is None or component.shape.rank == 0:
        return component.shape
    if isinstance(value, tf.SparseTensor) and component is value.dense_shape:
        return component.shape
    return tf.TensorShape([None]).concatenate(component.shape[1:])


def without_static_rows(value):
    """Returns the structure for `tf.nest` to pack: `value` for any number of rows."""
    if not isinstance(value, tf.RaggedTensor):
        return value
    return with_shape(tf.type_spec_from_value(value), [None, *value.shape[1:]])


def with_shape(spec: tf.TypeSpec, shape) -> tf.TypeSpec:
    """Returns the type of a tensor with another static shape."""
    if isinstance(spec, tf.RaggedTensorSpec):
        more = spec.ragged_rank, spec.row_splits_dtype
        return tf.RaggedTensorSpec(shape, spec.dtype, *more)
    kind = (
        tf.SparseTensorSpec if isinstance(spec, tf.SparseTensorSpec) else tf.TensorSpec
    )
    return kind(shape, spec.dtype)


def _shape_of(value) -> tf.Tensor:
    """Returns the shape, int64 [rank]; a ragged dimension is its longest row."""
    if isinstance(value, tf.SparseTensor):
        return value.dense_shape
    if isinstance(value, tf.RaggedTensor):
        return tf.cast(value.bounding_shape(), tf.int64)
    return tf.shape(value, out_type=tf.int64)


def _slice(value, begin: tf.Tensor, size: tf.Tensor):
    """Returns the micro-batch's examples of one feature or label."""
    if isinstance(value, tf.SparseTensor):
        rest = value.dense_shape[1:]
        first = tf.concat([[begin], tf.zeros_like(rest)], 0)
        return tf.sparse.slice(value, first, tf.concat([[size], rest], 0))
    if value.shape.rank == 0:
        return value
    if isinstance(value, tf.RaggedTensor):
        # TensorFlow slices one of equal rows with an assertion that only the whole passes.
        parts = tf.nest.flatten(value, expand_composites=True)
        spec = tf.type_spec_from_value(value)
        spec = with_shape(spec, [None] * value.shape.rank)
        sliced = tf.nest.pack_sequence_as(spec, parts, True)[begin : begin + size]
        parts = tf.nest.flatten(sliced, expand_composites=True)
        return tf.nest.pack_sequence_as(without_static_rows(value), parts, True)
    return value[begin : begin + size]
