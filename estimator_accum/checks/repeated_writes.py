"""Writes of a variable that change nothing when they are repeated, such as clipping.

    f(f(x)) = f(x)

for random x, computed by copies of the operations. A variable that every micro-step clips
is the one that every update clips; a variable that every micro-step decays is not.
"""

import numpy as np
import tensorflow as tf

from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.functions import functions_of
from estimator_accum.graph.names import VARIABLES
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.graph.writers import variable_of, varying

_SCALES = (1e-3, 1.0, 1e3, 1e6)  # of random values, for bounds of any size
_SHARE = 1e-3  # of the first change: a second change of less is rounding
_NEW_VALUES = {
    "Assign": lambda old, value: value,
    "AssignVariableOp": lambda old, value: value,
    "AssignAdd": tf.add,
    "AssignAddVariableOp": tf.add,
    "AssignSub": tf.subtract,
    "AssignSubVariableOp": tf.subtract,
}


def changes_once(operation: tf.Operation) -> bool:
    """Returns whether writing a variable again leaves its value, up to rounding.

    Args:
        operation: An operation that writes a variable.
    """
    if operation.type not in _NEW_VALUES:
        return False
    variable, value = variable_of(operation.inputs[0]), operation.inputs[1]
    needed = data_ancestors([value.op], _computing_inputs)
    reads = [op for op in needed if _variable_read_by(op) is not None]
    computed = [op for op in needed if op not in reads]
    variables = {variable, *map(_variable_read_by, reads)}
    is_of_variables = not varying(computed) and not any(map(functions_of, computed))
    reads_parts = any(op.type in VARIABLES for op in computed)  # as a gather does
    if reads_parts or not is_of_variables or not all(map(_can_be_drawn, variables)):
        return False
    definition, _ = define(computed)
    for node in definition.node:
        node.device = ""  # of a cluster, or of a GPU, which this session has not

    def write(values: dict[tf.Operation, tf.Tensor]) -> tf.Tensor:
        inputs = {r.outputs[0].name: values[_variable_read_by(r)] for r in reads}
        (result,) = insert(definition, inputs, [value], "write")
        return _NEW_VALUES[operation.type](values[variable], result)

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        checks = [_repeats(write, variable, variables, scale) for scale in _SCALES]
        try:
            return all(session.run(checks))
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


def _repeats(write, variable: tf.Operation, variables: set, scale: float) -> tf.Tensor:
    """Returns whether `write` changes random values once.

    Args:
        write: Function of the values of variables that returns the variable's new one.
        variable: The variable that is written.
        variables: It, and all others that are read.
        scale: Standard deviation of the values.
    """
    values = {
        op: scale * tf.random.stateless_normal(_shape(op), [n, 0], dtype=_dtype(op))
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
