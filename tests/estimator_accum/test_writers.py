"""Each operation of TensorFlow that may write a variable is known as a writer.

The definitions of all operations tell: one that may write a variable has state, or gets a
reference, and an input that may be its handle. So an operation that a later TensorFlow
adds fails here until somebody has looked at it.
"""

import types

import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from estimator_accum.graph.names import PASSING, READERS, WRITERS
from estimator_accum.graph.writers import writers_of, writes

pytestmark = pytest.mark.core

v1 = tf.compat.v1
# Names of inputs that are handles of something else, such as queues, tables, iterators.
_OTHER_HANDLES = {
    *("cache", "communicator", "handle", "iteration_counter", "iterator", "iterators"),
    *(
        "multi_device_iterator",
        "mutex",
        "ordering_token",
        "quantile_stream_resource_handle",
    ),
    *("queue_handle", "reader_handle", "resource_handle", "seed_generator"),
    *("stats_aggregator", "summary", "table_handle", "thread_pool"),
    *("tree_ensemble_handle", "writer"),
}
# Those that leave the values of variables as they are.
_LEAVING = {
    *("DestroyResourceOp", "DestroyTemporaryVariable"),  # there is none behind them
    *("FakeQueue", "IteratorGetDevice", "ExperimentalIteratorGetDevice"),  # of others
    "ReadVariableXlaSplitND",  # taken for a writer, as is all that is not known
    "RefSelect",  # one of several references, of which none is followed
}


def _handles(kind: str) -> list[str]:
    """Returns the names of an operation's inputs that may be handles of variables."""
    definition = op_def_registry.get(kind)
    resource, text = (t.as_datatype_enum for t in (tf.resource, tf.string))
    return [
        argument.name
        for argument in definition.input_arg
        if argument.name not in _OTHER_HANDLES
        and (argument.is_ref or (definition.is_stateful and argument.type == resource))
        and argument.type != text  # a reference to a queue, say
    ]


def _is_known(kind: str) -> bool:
    node = types.SimpleNamespace(op=kind, attr={})
    return writes(node) or kind in READERS | PASSING | _LEAVING


def _kinds() -> list[str]:
    return [kind for kind in dir(tf.raw_ops) if op_def_registry.get(kind) is not None]


def test_an_operation_that_may_write_a_variable_is_known_as_a_writer():
    kinds = [kind for kind in _kinds() if _handles(kind)]
    assert len(kinds) > 100
    assert [kind for kind in kinds if not _is_known(kind)] == []


def test_readers_and_others_are_no_writers_by_their_names():
    others = READERS | PASSING | _LEAVING
    assert not any(map(WRITERS.search, others))
    assert {kind for kind in others if op_def_registry.get(kind) is None} == set()


@pytest.mark.parametrize("use_resource", [False, True])
def test_a_variable_that_counts_up_is_written(use_resource, fresh_graph):
    options = {"initializer": 0, "use_resource": use_resource}
    count = v1.get_variable("count", **options)
    if use_resource:
        number = tf.raw_ops.ResourceCountUpTo(
            resource=count.handle, limit=9, T=tf.int32
        )
    else:
        number = v1.count_up_to(count, 9)
    ((variable, operations),) = writers_of([number.op]).items()
    assert variable.name == "count" and operations == [number.op]
