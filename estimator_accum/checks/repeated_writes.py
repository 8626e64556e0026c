"""Writes of a variable that change nothing when they are repeated, such as clipping.

    f(f(x)) = f(x)

for random x, computed by copies of the operations. A variable that every micro-step clips
is the one that every update clips; a variable that every micro-step decays is not.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.functions import functions_of
from estimator_accum.graph.names import VARIABLES
from estimator_accum.graph.walks import ancestors, data_ancestors
from estimator_accum.graph.writers import MicroStepWriters, variable_of, varying

_SCALES = (1e-3, 1.0, 1e3, 1e6)  # of random values, for bounds of any size
_FEW, _DRAWS = 1000, 8  # a variable of few numbers is drawn several times
_SHARE = 1e-3  # of the first change: a second change of less is rounding
_NEW_VALUES = {
    "Assign": lambda old, value: value,
    "AssignVariableOp": lambda old, value: value,
    "AssignAdd": tf.add,
    "AssignAddVariableOp": tf.add,
    "AssignSub": tf.subtract,
    "AssignSubVariableOp": tf.subtract,
}


def changes_once(variable: tf.Operation, writers: MicroStepWriters) -> bool:
    """Returns whether writing a variable again leaves its value, up to rounding.

    Several writes of it must have an order, and count as one. A read must come after the
    other writes of its variable.

    Args:
        variable: A variable.
        writers: The writers of every micro-step, at least one of the variable.
    """
    writes = [_write_of(writer) for writer in writers.of(variable)]
    if None in writes:
        return False
    several = [write.operation for write in writes] if len(writes) > 1 else []
    needed = {operation: ancestors([operation]) for operation in several}

    def place_of(write: _Write) -> int:
        return sum(other in needed[write.operation] for other in several)

    writes = sorted(writes, key=place_of)
    for place, write in enumerate(writes):
        earlier = {other.operation for other in writes[:place]}
        if earlier and not earlier <= needed[write.operation].keys():
            return False
        for read, source in write.reads.items():
            others = earlier if source is variable else set(writers.changing(source))
            if not others:
                continue
            if read is source or not others <= ancestors([read]).keys():
                return False
            if source is not variable and not changes_once(source, writers):
                return False
    return _change_once(variable, writes)


class _Write(NamedTuple):
    """A write whose value is computed from whole variables.

    Attributes:
        operation: The operation.
        reads: The variables by the operations that read them.
        definition: The operations by which the value is computed from these.
    """

    operation: tf.Operation
    reads: dict[tf.Operation, tf.Operation]
    definition: tf.compat.v1.GraphDef

    def __call__(self, variable: tf.Operation, values: dict) -> tf.Tensor:
        """Returns the new value of a variable, from those of all variables."""
        inputs = {r.outputs[0].name: values[v] for r, v in self.reads.items()}
        value = self.operation.inputs[1]
        (result,) = insert(self.definition, inputs, [value], "write")
        return _NEW_VALUES[self.operation.type](values[variable], result)


def _write_of(operation: tf.Operation) -> _Write | None:
    """Returns the write of an operation; None if its value has other sources."""
    if operation.type not in _NEW_VALUES:
        return None
    needed = data_ancestors([operation.inputs[1].op], _computing_inputs)
    reads = {op: _variable_read_by(op) for op in needed}
    reads = {read: variable for read, variable in reads.items() if variable is not None}
    computed = [op for op in needed if op not in reads]
    reads_parts = any(op.type in VARIABLES for op in computed)  # as a gather does
    if reads_parts or varying(computed) or any(map(functions_of, computed)):
        return None
    definition, _ = define(computed)
    for node in definition.node:
        node.device = ""  # of a cluster, or of a GPU, which this session has not
    return _Write(operation, reads, definition)


def _change_once(variable: tf.Operation, writes: list[_Write]) -> bool:
    """Returns whether writes, one after the other, change random values once."""
    variables = {variable, *(v for write in writes for v in write.reads.values())}
    if not all(map(_can_be_drawn, variables)):
        return False

    def write(values: dict[tf.Operation, tf.Tensor]) -> tf.Tensor:
        for one in writes:
            values = {**values, variable: one(variable, values)}
        return values[variable]

    draws = range(_DRAWS if _shape(variable).num_elements() < _FEW else 1)
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})  # which training needs
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        scale, draw = (tf.compat.v1.placeholder(t, []) for t in (tf.float32, tf.int32))
        check = _repeats(write, variable, variables, scale, draw)
        try:
            return all(
                session.run(check, {scale: size, draw: number})
                for size in _SCALES
                for number in draws
            )
        except tf.errors.OpError:  # such as a factorization of random values
            return False


def _variable_read_by(operation: tf.Operation) -> tf.Operation | None:
    """Returns the variable whose whole value an operation has; None if it has none."""
    if operation.type == "ReadVariableOp":
        return variable_of(operation.inputs[0])
    is_reference = operation.type in VARIABLES - {"VarHandleOp"}
    return operation if is_reference else None


def _computing_inputs(operation: tf.Operation) -> list[tf.Tensor]:
    is_read = _variable_read_by(operation) is not None
    return [] if is_read else list(operation.inputs)


def _repeats(
    write, variable: tf.Operation, variables: set, scale: tf.Tensor, draw: tf.Tensor
) -> tf.Tensor:
    """Returns whether `write` changes random values once.

    Args:
        write: Function of the values of variables that returns the variable's new one.
        variable: The variable that is written.
        variables: It, and all others that are read.
        scale: Standard deviation of the values.
        draw: Number that decides the values.
    """
    values = {
        op: tf.cast(scale, _dtype(op))
        * tf.random.stateless_normal(_shape(op), [n, draw], dtype=_dtype(op))
        for n, op in enumerate(sorted(variables, key=lambda op: op.name))
    }
    once = write(values)
    twice = write({**values, variable: once})
    first, second = tf.abs(once - values[variable]), tf.abs(twice - once)
    epsilon = np.finfo(once.dtype.as_numpy_dtype).eps
    is_rounding = second <= _SHARE * first + 4 * epsilon * tf.abs(once)
    is_small = tf.reduce_max(second) <= _SHARE * tf.reduce_max(first)
    return tf.logical_and(tf.reduce_all(is_rounding), is_small)


def _shape(variable: tf.Operation) -> tf.TensorShape:
    return tf.TensorShape(variable.get_attr("shape"))


def _dtype(variable: tf.Operation) -> tf.DType:
    return tf.as_dtype(variable.get_attr("dtype"))


def _can_be_drawn(variable: tf.Operation) -> bool:
    return _dtype(variable).is_floating and _shape(variable).is_fully_defined()
