"""The data set of an iterator, as the graph has it.

MakeIterator       the data set is in the graph
OneShotIterator    it is in a function, the iterator's factory
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.functions import library_of_functions, producer_of
from estimator_accum.graph.names import BATCH_QUEUES

# Data sets whose elements are those of another one, and that map each of another one's.
SAME_ELEMENTS = re.compile(
    r"(Cache|Filter|Model|Optimize|Options|Prefetch|Repeat|Shuffle\w*|Skip|Take)"
    r"Dataset(V\d)?$|FinalizeDataset$"
)
MAPPED_ELEMENTS = re.compile(r"(Parallel)?MapDataset(V\d)?$")
_BATCHING = re.compile("(Padded|Parallel|MapAnd)?BatchDataset(V2)?")


class DataSet(NamedTuple):
    """A data set, with the nodes of its graph or function.

    Attributes:
        find: Returns a node by its name; None for an argument of a function.
        name: Name of the data set's own node.
        number: Returns the constant of a node by its name; None if it is not known.
    """

    find: Callable
    name: str
    number: Callable


def data_set_of(iterator: tf.Operation, library: dict) -> DataSet | None:
    """Returns the data set of an iterator; None if it is not known.

    Args:
        iterator: The operation that holds the iterator.
        library: Definitions of functions by name.
    """
    if iterator.type == "OneShotIterator":
        definition = library[iterator.get_attr("dataset_factory").name]
        (result,) = definition.ret.values()
        find = finder_in(definition)

        def constant(name: str):
            node = find(name)
            is_constant = node is not None and node.op == "Const"
            return tf.make_ndarray(node.attr["value"].tensor) if is_constant else None

        return DataSet(find, producer_of(result), constant)
    users = iterator.outputs[0].consumers()
    makers = [user for user in users if user.type == "MakeIterator"]
    if len(makers) != 1:
        return None
    graph = iterator.graph
    return DataSet(
        lambda name: graph.get_operation_by_name(name).node_def,
        makers[0].inputs[0].op.name,
        lambda name: tf.get_static_value(graph.get_operation_by_name(name).outputs[0]),
    )


def finder_in(definition) -> Callable:
    """Returns a function that returns a function's node by its name."""
    return {node.name: node for node in definition.node_def}.get


def batch_size_of(source: tf.Operation) -> int | None:
    """Returns the examples in a batch; 0 if that varies, None without known batches."""
    if source.type in BATCH_QUEUES:
        return int(tf.get_static_value(source.inputs[1]) or 0)
    data_set = data_set_of(source.inputs[0].op, library_of_functions())
    if data_set is None:
        return None
    node, is_mapped = data_set.find(data_set.name), False
    while node is not None and (
        SAME_ELEMENTS.match(node.op) or MAPPED_ELEMENTS.match(node.op)
    ):
        is_mapped |= MAPPED_ELEMENTS.match(node.op) is not None
        node = data_set.find(producer_of(node.input[0]))
    if node is None or not _BATCHING.fullmatch(node.op):
        return None
    inputs = [producer_of(name) for name in node.input if not name.startswith("^")]
    # Behind what a function of `map_and_batch` captures, or behind the data set.
    size = inputs[-3] if node.op.startswith("MapAnd") else inputs[1]
    number = data_set.number(size)
    # The function of a map may return another number of rows.
    return 0 if number is None or is_mapped else int(number)
