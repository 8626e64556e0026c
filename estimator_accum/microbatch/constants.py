"""Features that may belong to no example, as the graph of the input pipeline tells.

    data set of examples -> batch -> map -> iterator -> features
                                      |
                                      a constant, which is computed from no example

Whether such a feature has a row for each example, as weights of ones have, or belongs to
none, as the weights of classes do, is not in the graph.
"""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum.graph.data_sets import (
    MAPPED_ELEMENTS,
    SAME_ELEMENTS,
    data_set_of,
    finder_in,
)
from estimator_accum.graph.functions import library_of_functions, producer_of
from estimator_accum.microbatch.inputs import gives_another
from estimator_accum.microbatch.repeatable import is_repeatable
from estimator_accum.microbatch.staging import named_tensors


def constant_features(data: dict) -> list[str]:
    """Returns the names of features and labels that are computed from no example.

    If all are constants, each of them is a whole data set, and none is returned. Neither
    are scalars.

    Args:
        data: "features" and "labels" from input_fn, in any structure.
    """
    pipeline = _Pipeline()
    constants, others = [], []
    for name, value in named_tensors(data):
        components = tf.nest.flatten(value, expand_composites=True)
        is_varying = any(map(pipeline.varies, components))
        if components[0].shape.rank != 0:
            (others if is_varying else constants).append(name)
    return constants if others else []


class _Pipeline:
    """The data sets of the default graph."""

    def __init__(self):
        self._library = library_of_functions()

    def varies(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor may be computed from the examples of a batch."""
        seen, waiting = set(), [tensor]
        while waiting:
            tensor = waiting.pop()
            if tensor.ref() in seen:
                continue
            seen.add(tensor.ref())
            operation = tensor.op
            if operation.type == "IteratorGetNext":
                source = data_set_of(operation.inputs[0].op, self._library)
                place = tensor.value_index
                if source is None or self._varies(source.find, source.name, place):
                    return True
            elif gives_another(operation, self._library):
                return True
            else:
                waiting += operation.inputs
        return False

    def _varies(self, find: Callable, name: str, i: int) -> bool:
        """Returns whether component `i` of a data set's elements varies.

        Args:
            find: Returns a node by name; None for an argument of a function.
            name: Name of the data set's node.
            i: Number of the component.
        """
        node = find(name)
        if node is None:
            return True
        inputs = [producer_of(t) for t in node.input if not t.startswith("^")]
        if SAME_ELEMENTS.match(node.op):
            return self._varies(find, inputs[0], i)
        if MAPPED_ELEMENTS.match(node.op):
            return self._map_varies(find, node, inputs[0], i)
        if node.op == "ZipDataset":
            for other in inputs:
                width = _width(find(other))
                if i < width:
                    return self._varies(find, other, i)
                i -= width
        return node.op != "TensorDataset" and not _has_own_length(node, i)

    def _map_varies(self, find: Callable, node, source: str, i: int) -> bool:
        definition = self._library[node.attr["f"].func.name]
        signature, find_inside = definition.signature, finder_in(definition)
        arguments = [argument.name for argument in signature.input_arg]
        waiting, seen = [definition.ret[signature.output_arg[i].name]], set()
        while waiting:
            name = producer_of(waiting.pop())
            if name in seen:
                continue
            seen.add(name)
            inside = find_inside(name)
            if inside is not None:
                if not is_repeatable(inside, self._library):
                    return True
                waiting += [t for t in inside.input if not t.startswith("^")]
                continue
            place = arguments.index(name)
            # Those behind the elements are captured from outside.
            if place < _width(find(source)) and self._varies(find, source, place):
                return True
        return False


def _width(node) -> int:
    """Returns the number of components of a data set's elements."""
    if node is None:
        return 0
    for attribute in ("output_types", "Toutput_types"):
        if attribute in node.attr:
            return len(node.attr[attribute].list.type)
    return 0


def _has_own_length(node, i: int) -> bool:
    """Returns whether component `i` always has as many rows, and others have not."""
    shapes = node.attr["output_shapes"].list.shape
    lengths = [shape.dim[0].size for shape in shapes if len(shape.dim)]
    length = shapes[i].dim[:1] if i < len(shapes) else ()
    return bool(length) and length[0].size >= 0 and -1 in lengths
