"""Graphs: the library's own variables, branches without captures, walks, replicas."""

from collections.abc import Callable

import tensorflow as tf

# Of a variable: its first initializer, which a warm start may replace.
INITIALIZER_ATTRIBUTE = "_estimator_accum_initializer"


def ancestors(
    operations: list[tf.Operation],
) -> dict[tf.Operation, tf.Operation | None]:
    """Returns `operations` and all that they need, each with who asked for it."""
    return _walk(
        operations,
        lambda operation: [
            *(tensor.op for tensor in operation.inputs),
            *operation.control_inputs,
        ],
    )


def data_ancestors(
    operations: list[tf.Operation],
) -> dict[tf.Operation, tf.Operation | None]:
    """Returns `operations` and whose values they are computed from.

    Goes no way of control dependencies, and out of branches' graphs into outer ones.

    Returns:
        Each with who asked for it.
    """
    captured = {}  # of each graph: what its placeholders stand for

    def needed(operation: tf.Operation) -> list[tf.Operation]:
        graph = operation.graph
        if graph not in captured:
            pairs = getattr(graph, "captures", ())
            captured[graph] = {inner.op: outer.op for outer, inner in pairs}
        outside = captured[graph].get(operation)
        inputs = [tensor.op for tensor in operation.inputs]
        return inputs if outside is None else [*inputs, outside]

    return _walk(operations, needed)


def _walk(
    operations: list[tf.Operation],
    needed: Callable[[tf.Operation], list[tf.Operation]],
) -> dict[tf.Operation, tf.Operation | None]:
    found = dict.fromkeys(operations)
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        for other in needed(operation):
            if other not in found:
                found[other] = operation
                waiting.append(other)
    return found


def fetched_operations(graph: tf.Graph, fetches) -> list[tf.Operation]:
    """Returns the operations that `session.run(fetches)` asks for.

    Args:
        graph: The session's.
        fetches: As `session.run` takes them: tensors, operations, variables, names and
            structures of these.
    """
    found = []
    for item in tf.nest.flatten(fetches, expand_composites=True):
        element = graph.as_graph_element(item)
        found.append(element if isinstance(element, tf.Operation) else element.op)
    return found


def either(predicate: tf.Tensor, if_true: Callable, if_false: Callable) -> list:
    """`tf.cond` without captures.

    Every tensor that the branches of a `tf.cond` read is one of its inputs: a
    placeholder in each of two functions, and a Switch in the session, run at every step.
    Here, in a graph, a branch is what depends on the predicate by control dependencies,
    and is built where it stands.

    Args:
        predicate: Scalar bool.
        if_true: Returns a list of tensors. All that it makes must be made under the
            control dependencies in force.
        if_false: Likewise, of the same dtypes. Within functions and in eager execution
            what holds for `tf.cond` holds for both.

    Returns:
        The tensors of the branch that ran.
    """
    is_eager = tf.executing_eagerly()
    # A tf.function orders operations by itself, and what waits for a dead one is dead.
    if is_eager or tf.compat.v1.get_default_graph().building_function:
        return tf.cond(predicate, if_true, if_false)
    switch = tf.raw_ops.Switch(data=predicate, pred=predicate)
    with tf.control_dependencies([tf.identity(switch.output_true)]):
        true_values = if_true()
    with tf.control_dependencies([tf.identity(switch.output_false)]):
        false_values = if_false()
    return [
        tf.raw_ops.Merge(inputs=values).output
        for values in zip(true_values, false_values, strict=True)
    ]


def run_either(
    predicate: tf.Tensor, if_true: Callable, if_false: Callable
) -> tf.Operation | None:
    """`either`, over functions that return lists of operations.

    Returns:
        What runs after those of one branch; None in eager execution, where they have.
    """
    is_eager = tf.executing_eagerly()

    def run(make) -> list[tf.Tensor]:
        operations = make()
        with tf.control_dependencies([] if is_eager else operations):
            return [tf.constant(True)]

    done = either(predicate, lambda: run(if_true), lambda: run(if_false))[0]
    return None if is_eager else done.op


def nan(dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Returns what is reported where there is no number."""
    return tf.constant(float("nan"), dtype)


def first_of(strategy, values):
    """Returns one replica's value, of what every replica knows alike."""
    return strategy.experimental_local_results(values)[0]


def flatten(strategy, values) -> list:
    """Returns every replica's values, of any structure."""
    per_value = tf.nest.map_structure(strategy.experimental_local_results, values)
    return tf.nest.flatten(per_value)


def create_shared_scalar(
    name: str, dtype: tf.DType = tf.int64, collections: list[str] | None = None
) -> tf.Variable:
    """Creates a scalar, 0, that every replica sees with the same value.

    Args:
        name: Its name from the graph's root, whatever scope is open.
        dtype: Its dtype.
        collections: Graph collections; None is GLOBAL_VARIABLES.
    """
    return create_variable(
        name,
        [],
        dtype,
        collections=collections,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def create_variable(
    name: str, shape, dtype: tf.DType, has_idle_rows: bool = False, **options
) -> tf.Variable:
    """Creates a variable of zeros that is saved and not trained.

    Args:
        name: Its name from the graph's root, whatever scope is open.
        shape: Its static shape.
        dtype: Its dtype.
        has_idle_rows: Whether rows that are never written to should take no memory.
        **options: Of tf.compat.v1.Variable.
    """
    # Not by get_variable: what users do to all variables of a scope (partitioners,
    # init_from_checkpoint) is not meant for these.
    make_zeros = idle_zeros if has_idle_rows else zeros
    with tf.init_scope(), tf.compat.v1.name_scope(None):
        variable = tf.compat.v1.Variable(
            lambda: make_zeros(shape, dtype),
            name=name,
            shape=shape,
            trainable=False,
            use_resource=True,  # a reference variable's read races its increment
            **options,
        )
        if not tf.executing_eagerly():
            setattr(variable, INITIALIZER_ATTRIBUTE, variable.initializer)
    return variable


def zeros(shape, dtype: tf.DType) -> tf.Tensor:
    """Makes the zeros that a variable is to begin with, or is assigned later.

    Of tf.zeros the session would make a constant when the graph is optimized, and keep
    it for as long as it lives: the variables' bytes once more.

    Args:
        shape: The variable's, static.
        dtype: Its dtype.
    """
    shape = tf.TensorShape(shape).as_list()
    return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)


def idle_zeros(shape, dtype: tf.DType) -> tf.Tensor:
    """Makes `zeros` whose rows take no memory until they are written to, on a CPU.

    What is allocated there in a large piece are the operating system's pages, zeros that
    exist from their first write on. Only what has been in use before is made zeros.

    Args:
        shape: The variable's, static.
        dtype: Its dtype.
    """
    allocated = tf.raw_ops.Empty(shape=tf.TensorShape(shape).as_list(), dtype=dtype)
    # Of the bits: to TensorFlow's kernels the smallest numbers, denormal ones, equal 0.
    are_zeros = tf.equal(tf.reduce_max(tf.bitcast(allocated, tf.uint8)), 0)
    (value,) = either(
        are_zeros, lambda: [tf.identity(allocated)], lambda: [zeros(shape, dtype)]
    )
    return value


def read(variable: tf.Variable) -> tf.Tensor:
    """Reads this replica's copy."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    value.set_shape(variable.shape)
    return value


def add_to(counter: tf.Variable, value) -> tf.Tensor:
    """Adds to a variable; returns its value afterwards."""
    value = tf.cast(value, counter.dtype.base_dtype)
    with tf.control_dependencies([tf.compat.v1.assign_add(counter, value)]):
        return tf.identity(counter.read_value())


def set_to(variable: tf.Variable, value) -> tf.Tensor:
    """Assigns to a variable; returns its value afterwards."""
    value = tf.cast(value, variable.dtype.base_dtype)
    with tf.control_dependencies([tf.compat.v1.assign(variable, value)]):
        return tf.identity(variable.read_value())
