"""Operations on the library's own variables."""

import contextlib
import functools

import tensorflow as tf

from estimator_accum.graph.branches import either

# A variable's attribute with its first initializer, which a warm start may replace.
INITIALIZER_ATTRIBUTE = "_estimator_accum_initializer"


def find_global_step() -> tf.Variable | tf.Tensor | None:
    """Returns the global step of the graph; None if there is none.

    TensorFlow also finds it by name. Of a resource variable that name is the handle,
    which it refuses.
    """
    keys = tf.compat.v1.GraphKeys
    if not tf.compat.v1.get_collection(keys.GLOBAL_STEP):
        for variable in tf.compat.v1.get_collection(keys.GLOBAL_VARIABLES):
            if variable.op.name == "global_step":
                return variable
    return tf.compat.v1.train.get_global_step()


def create_shared_scalar(
    name: str,
    dtype: tf.DType = tf.int64,
    collections: list[str] | None = None,
    device: str | None = None,
) -> tf.Variable:
    """Creates a scalar 0 with the same value in every replica.

    Args:
        name: Its name from the graph's root, whatever scope is open.
        dtype: Its dtype.
        collections: Graph collections; None is GLOBAL_VARIABLES.
        device: Its device; None is the caller's.
    """
    return create_variable(
        name,
        [],
        dtype,
        collections=collections,
        device=device,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def create_variable(
    name: str,
    shape,
    dtype: tf.DType,
    has_idle_rows: bool = False,
    device: str | None = None,
    **options,
) -> tf.Variable:
    """Creates a variable of zeros that is saved and not trained.

    Args:
        name: Its name from the graph's root, whatever scope is open.
        shape: Its static shape; an unknown dimension begins as 0.
        dtype: Its dtype.
        has_idle_rows: Whether rows that are never written to should take no memory.
        device: Its device; None is the caller's.
        **options: Further arguments of tf.compat.v1.Variable.
    """
    # Not by get_variable: partitioners and init_from_checkpoint, set by users for all
    # variables of a scope, must not change these.
    make_zeros = idle_zeros if has_idle_rows else zeros
    first = [size or 0 for size in tf.TensorShape(shape).as_list()]
    place = contextlib.nullcontext() if device is None else tf.device(device)
    with tf.init_scope(), tf.compat.v1.name_scope(None), place:
        variable = tf.compat.v1.Variable(
            functools.partial(make_zeros, first, dtype),
            name=name,
            shape=shape,
            trainable=False,
            use_resource=True,  # a reference variable's read races its increment
            **options,
        )
        if not tf.executing_eagerly():
            setattr(variable, INITIALIZER_ATTRIBUTE, variable.initializer)
    return variable


def is_of_library(initial_value) -> bool:
    """Returns whether an initial value is that of a variable of `create_variable`."""
    return getattr(initial_value, "func", None) in (zeros, idle_zeros)


def zeros(shape, dtype: tf.DType) -> tf.Tensor:
    """Returns zeros to initialize a variable or to assign to it.

    The session would turn tf.zeros into a constant when it optimizes the graph, and
    keep it until the session ends: as many bytes as the variables again.

    Args:
        shape: The variable's static shape.
        dtype: The variable's dtype.
    """
    shape = tf.TensorShape(shape).as_list()
    return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)


def idle_zeros(shape, dtype: tf.DType) -> tf.Tensor:
    """Returns zeros whose rows, on a CPU, take no memory until they are written to.

    A large allocation there is fresh pages of the operating system, which read as zeros
    and take memory from their first write on. Only reused memory is filled with zeros.

    Args:
        shape: The variable's static shape.
        dtype: The variable's dtype.
    """
    allocated = tf.raw_ops.Empty(shape=tf.TensorShape(shape).as_list(), dtype=dtype)
    # Compares bits: in TensorFlow's kernels denormal numbers, the smallest, equal 0.
    are_zeros = tf.equal(tf.reduce_max(tf.bitcast(allocated, tf.uint8)), 0)
    (value,) = either(
        are_zeros, lambda: [tf.identity(allocated)], lambda: [zeros(shape, dtype)]
    )
    return value


def read(variable: tf.Variable) -> tf.Tensor:
    """Returns the value of this replica's copy."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    value.set_shape(variable.shape)
    return value


def reads_of(variable: tf.Variable) -> list[tf.Operation]:
    """Returns the operations so far that read a variable's whole value."""
    kind, source = "Identity", variable.op.outputs[0]  # of a reference variable
    if hasattr(variable, "handle"):
        kind, source = "ReadVariableOp", variable.handle
    return [user for user in source.consumers() if user.type == kind]


def add_to(counter: tf.Variable, value) -> tf.Tensor:
    """Adds to a variable; returns its value afterwards."""
    return _write(tf.compat.v1.assign_add, counter, value)


def set_to(variable: tf.Variable, value) -> tf.Tensor:
    """Assigns to a variable; returns its value afterwards."""
    return _write(tf.compat.v1.assign, variable, value)


def _write(assign, variable: tf.Variable, value) -> tf.Tensor:
    value = tf.cast(value, variable.dtype.base_dtype)
    with tf.control_dependencies([assign(variable, value)]):
        return tf.identity(variable.read_value())
