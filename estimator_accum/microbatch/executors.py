"""Executors: they run parts of a graph, which is all that the passes of a batch need.

run(fetches, feeds)     the values of tensors and operations, with others fed by name

a session               of TensorFlow 1, as it is
Feeding                 any executor that feeds some tensors in every run
Functions               the graph of a traced function: one function for each pair of
                        fetches and feeds, in TensorFlow 2
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from estimator_accum.graph.functions import (
    called_by,
    functions_of,
    library_of_functions,
)
from estimator_accum.graph.internals import (
    COLOCATION,
    captures_of,
    compute_in_call,
    computed_captures_of,
)
from estimator_accum.graph.walks import in_order, needed_by, walk
from estimator_accum.microbatch.staging import prefix_of_slots

UNUSED = []  # slots of functions that are gone, for `destroy_unused_slots`


class Feeding:
    """An executor that feeds tensors in every run.

    Args:
        run: The method `run` of another executor.
        feeds: Values by tensor or name.
    """

    def __init__(self, run: Callable, feeds: dict):
        self._run, self._feeds = run, feeds

    def run(self, fetches, feed_dict: dict | None = None):
        """Runs the other executor."""
        return self._run(fetches, self._feeds | (feed_dict or {}))


class Functions:
    """Runs parts of the graph of a traced function.

    Values are tensors, of which none is copied. Operations that change something run in
    the order in which they were made: TensorFlow adds this order to each function.

    Args:
        graph: The graph, whose captured tensors keep their values.
    """

    def __init__(self, graph: tf.Graph):
        self._graph, self._functions = graph, {}
        self._places = {}  # of operations, in the order in which they were made

    def run(self, fetches, feeds: dict | None = None):
        """Returns the values of fetches, None for an operation, in their structure.

        Args:
            fetches: Tensors and operations, in any structure.
            feeds: Values by the names of tensors.
        """
        feeds = feeds or {}
        items = tf.nest.flatten(fetches, expand_composites=True)
        computed = [item for item in items if item.name not in feeds]
        names = tuple(item.name for item in computed), tuple(feeds)
        if computed and names not in self._functions:
            self._functions[names] = self._make(computed, list(feeds))
        values = dict(feeds)
        if computed:
            function, dtypes = self._functions[names]
            arguments = map(tf.convert_to_tensor, feeds.values(), dtypes)
            tensors = [item for item in computed if isinstance(item, tf.Tensor)]
            results = function(*arguments)
            values |= {t.name: v for t, v in zip(tensors, results, strict=True)}
        values = [values.get(item.name) for item in items]
        return tf.nest.pack_sequence_as(fetches, values, expand_composites=True)

    def _make(self, items: list, fed: list[str]) -> tuple[Callable, list[tf.DType]]:
        """Returns a function of fed tensors that returns those of `items`, and dtypes."""
        graph = self._graph
        arguments = [graph.get_tensor_by_name(name) for name in fed]
        outside = {inner.name: outer for outer, inner in captures_of(graph)}
        computed = {t.name: (f, t) for f, t in computed_captures_of(graph)}
        captures = {name.split(":")[0] for name in (*outside, *computed)}
        operations = _needed(items, {*fed}, captures)
        # Nothing between an operation and one that it needs, made later, comes before it,
        # such as a read of a variable that it writes.
        places = sorted(operations, key=self._place_of)
        operations = list(
            in_order(places, lambda op: [o for o in needed_by(op) if o in operations])
        )
        definition = _define(operations, graph)
        copied = {operation.name for operation in operations}
        tensors = [item for item in items if isinstance(item, tf.Tensor)]
        results = [tensor.name for tensor in tensors]
        wanted = [tensor.name for tensor in tensors if tensor.op.name in copied]
        read = {name for node in definition.node for name in node.input}

        def part(*values: tf.Tensor) -> list[tf.Tensor]:
            inner = tf.compat.v1.get_default_graph()
            inputs = dict(zip(fed, values, strict=True)) | outside
            inputs = {
                name: inner.capture(inputs[name])
                for name in inputs
                if name in read or name in results
            }
            for name in read & computed.keys():
                inputs[name] = compute_in_call(inner, *computed[name])
            copies = tf.graph_util.import_graph_def(
                definition,
                {name: inputs[name] for name in inputs if name in read},
                return_elements=wanted,
                name="",
            )
            values = inputs | dict(zip(wanted, copies, strict=True))
            return [tf.identity(values[name]) for name in results]

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in arguments]
        function = tf.function(part, autograph=False).get_concrete_function(*specs)
        return function, [tensor.dtype for tensor in arguments]

    def _place_of(self, operation: tf.Operation) -> int:
        if operation not in self._places:
            operations = self._graph.get_operations()
            self._places = {other: i for i, other in enumerate(operations)}
        return self._places[operation]


def slots_of(graph: tf.Graph) -> list[dict]:
    """Returns the resources of a function's slots."""
    prefix, names = prefix_of_slots(graph), ("dtype", "shape", "shared_name")
    handles = [op for op in graph.get_operations() if op.type == "VarHandleOp"]
    slots = [{name: op.get_attr(name) for name in names} for op in handles]
    return [s for s in slots if s["shared_name"].decode().startswith(prefix)]


def destroy_unused_slots() -> None:
    """Frees the memory of slots whose functions are not needed any more.

    Python may collect a function at any time, also where TensorFlow holds a lock.
    """
    with tf.init_scope(), contextlib.suppress(IndexError):  # another thread was faster
        while UNUSED:
            slot = UNUSED.pop()
            for kind in ("CPU", "GPU"):  # a slot may be where its reader is
                for device in tf.config.list_logical_devices(kind):
                    # No GPU has slots of strings.
                    absent = tf.errors.InvalidArgumentError, tf.errors.NotFoundError
                    with tf.device(device.name), contextlib.suppress(*absent):
                        handle = tf.raw_ops.VarHandleOp(**slot)
                        tf.raw_ops.DestroyResourceOp(resource=handle)


def _needed(items: Iterable[Any], fed: set[str], outside: set[str]) -> set:
    """Returns the operations from the fed and captured tensors on to `items`.

    Args:
        items: Tensors and operations.
        fed: Names of the fed tensors.
        outside: Names of the operations that stand for captured tensors.
    """

    def producers(operation: tf.Operation) -> list[tf.Operation]:
        read = [tensor.op for tensor in operation.inputs if tensor.name not in fed]
        others = (*read, *operation.control_inputs)
        return [other for other in others if other.name not in outside]

    starts = [getattr(item, "op", item) for item in items]
    return walk([op for op in starts if op.name not in outside], producers).keys()


def _define(operations: list[tf.Operation], graph: tf.Graph) -> tf.compat.v1.GraphDef:
    """Returns the definition of operations, in their order, with all that they call."""
    definition, copied = tf.compat.v1.GraphDef(), {op.name for op in operations}
    definition.versions.CopyFrom(graph.graph_def_versions)
    called = []
    for operation in operations:
        node = definition.node.add()
        node.CopyFrom(operation.node_def)
        node.attr.pop(COLOCATION, None)  # with operations outside
        del node.input[:]
        node.input.extend(tensor.name for tensor in operation.inputs)
        waits = [other.name for other in operation.control_inputs]
        node.input.extend(f"^{name}" for name in sorted(waits) if name in copied)
        called += [*functions_of(operation), operation.type]
    library = library_of_functions(graph)
    names = sorted(called_by(called, library))
    definition.library.function.extend(library[name] for name in names)
    return definition
