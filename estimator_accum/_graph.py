"""Graph helpers: ancestors, copies, branches without captures, variables, replicas."""

from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

# A variable's attribute with its first initializer, which a warm start may replace.
INITIALIZER_ATTRIBUTE = "_estimator_accum_initializer"
# Values that a session gets from outside, under this name and no copy's.
FED = {"Placeholder", "PlaceholderV2", "PlaceholderWithDefault"}
VARIABLES = {"VarHandleOp", "Variable", "VariableV2"}
# Operations that take a variable's handle and leave the variable as it is.
READERS = {
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd"),
    *("VarIsInitializedOp", "VariableShape"),
}
_OWN_GRADIENT = "_gradient_op_type"  # attribute of an operation with one


def ancestors(
    operations: Iterable[tf.Operation],
    where: Callable[[tf.Operation], bool] = lambda operation: True,
) -> dict[tf.Operation, tf.Operation | None]:
    """Maps `operations` to None, and what they need to an operation that needs it.

    Args:
        operations: Operations.
        where: Condition on the others; the search stops at one that fails it.
    """

    def needed(operation: tf.Operation) -> list[tf.Operation]:
        found = (*(t.op for t in operation.inputs), *operation.control_inputs)
        return [each for each in found if where(each)]

    return _walk(list(operations), needed)


def path_to(needed: dict, operation: tf.Operation | None, first: int = 3) -> str:
    """Returns the names of operations that need each other, down to `operation`.

    Args:
        needed: The result of `ancestors`.
        operation: One of its keys.
        first: Number of names before three dots; the last three are always there.
    """
    names = []
    while operation is not None:
        names.append(operation.name)
        operation = needed[operation]
    names.reverse()
    if len(names) > first + 3:
        names[first:-3] = ["..."]
    return ", which needs ".join(names)


def data_ancestors(
    operations: Iterable[tf.Operation],
    inputs_of: Callable[[tf.Operation], Iterable[tf.Tensor]] = lambda each: each.inputs,
) -> dict[tf.Operation, tf.Operation | None]:
    """Returns `operations` and all operations whose values they are computed from.

    Ignores control dependencies; follows captures from branches' graphs to outer ones.

    Args:
        operations: Operations.
        inputs_of: Function of an operation that returns the tensors to follow.

    Returns:
        Each operation with one that needs it; None for `operations` themselves.
    """
    captured = {}  # per graph: outer operation by the placeholder that stands for it

    def needed(operation: tf.Operation) -> list[tf.Operation]:
        graph = operation.graph
        if graph not in captured:
            pairs = getattr(graph, "captures", ())
            captured[graph] = {inner.op: outer.op for outer, inner in pairs}
        outside = captured[graph].get(operation)
        inputs = [tensor.op for tensor in inputs_of(operation)]
        return inputs if outside is None else [*inputs, outside]

    return _walk(list(operations), needed)


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


def descendants(sources: Iterable[tf.Tensor | tf.Operation]) -> set[tf.Operation]:
    """Returns the operations that compute from tensors or operations, or wait for them."""
    found, waiting = set(), []

    def add(tensors, operation: tf.Operation) -> None:
        users = [user for tensor in tensors for user in tensor.consumers()]
        for user in (*users, *operation._control_outputs):
            if user not in found:
                found.add(user)
                waiting.append(user)

    for source in sources:
        if isinstance(source, tf.Operation):
            add(source.outputs, source)
        else:
            add([source], source.op)
    while waiting:
        operation = waiting.pop()
        add(operation.outputs, operation)
    return found


def data_descendants(
    tensors: Iterable[tf.Tensor],
    where: Callable[[tf.Operation], bool] = lambda operation: True,
) -> set[tf.Operation]:
    """Returns the operations that compute from `tensors`.

    Args:
        tensors: Tensors.
        where: Condition on the operations; the search stops at one that fails it.
    """
    found, waiting = set(), list(tensors)
    while waiting:
        for user in waiting.pop().consumers():
            if user not in found and where(user):
                found.add(user)
                waiting += user.outputs
    return found


def replace(tensor: tf.Tensor, other: tf.Tensor) -> None:
    """Makes all that reads `tensor` so far read `other`."""
    for consumer in tensor.consumers():
        for i, read in enumerate(consumer.inputs):
            if read.name == tensor.name:
                consumer._update_input(i, other)


def define(
    operations: Iterable[tf.Operation],
    in_order: frozenset[tf.Operation] = frozenset(),
    first: Iterable[tf.Operation] = (),
    late: Iterable[tf.Operation] = (),
) -> tuple[tf.compat.v1.GraphDef, dict[str, tf.Operation]]:
    """Returns a definition of operations, for `insert` to make copies.

    Args:
        operations: The operations to copy.
        in_order: Operations whose copies wait for what the originals wait for; the others
            wait for each other only.
        first: Some of `operations`, for which the copies of `late` wait.
        late: Others.

    Returns:
        The definition, and the operations outside for which copies wait, as inputs.
    """
    waits, copied = {}, {operation.name for operation in operations}
    definition = tf.compat.v1.GraphDef()
    for operation in sorted(operations, key=lambda each: each.name):  # always the same
        definition.versions.CopyFrom(operation.graph.graph_def_versions)
        node = definition.node.add()
        node.CopyFrom(operation.node_def)
        node.attr.pop("_class", None)  # colocation with what is not copied
        del node.input[:]
        node.input.extend(tensor.name for tensor in operation.inputs)
        for other in operation.control_inputs:
            if other.name in copied or operation in in_order:
                node.input.append(f"^{other.name}")
            if other.name not in copied and operation in in_order:
                waits[f"^{other.name}"] = other
        if operation in late:
            node.input.extend(f"^{other.name}" for other in first)
    return definition, waits


def insert(
    definition: tf.compat.v1.GraphDef,
    inputs: dict[str, tf.Tensor | tf.Operation],
    wanted: list[tf.Tensor],
    name: str,
) -> list[tf.Tensor]:
    """Copies operations into the default graph.

    Args:
        definition: Result of `define`.
        inputs: Tensors and operations, by name, that copies read or wait for in place
            of originals that are not copied.
        wanted: Results of copied operations, or tensors of `inputs`.
        name: Scope of the copies.

    Returns:
        The copies of `wanted`.
    """
    if not definition.node:
        return [inputs[tensor.name] for tensor in wanted]
    graph = tf.compat.v1.get_default_graph()
    if graph.building_function:  # a branch's graph
        inputs = {name: graph.capture(tensor) for name, tensor in inputs.items()}
    scope = graph.unique_name(name)
    for node in definition.node:
        if "frame_name" in node.attr:  # a loop of its own
            node.attr["frame_name"].s += f"/{scope}".encode()
    copied = {node.name for node in definition.node}
    read = {name for node in definition.node for name in node.input}
    names = [tensor.name for tensor in wanted if tensor.op.name in copied]
    copies = tf.graph_util.import_graph_def(
        definition,
        {name: inputs[name] for name in inputs if name in read},
        return_elements=names,
        name=name,
    )
    copies = dict(zip(names, copies, strict=True))
    return [copies.get(each.name, inputs.get(each.name)) for each in wanted]


def value_of_graph(graph: tf.Graph, name: str, default):
    """Returns what a graph holds under a name, `default` from the first call on."""
    if not hasattr(graph, name):
        setattr(graph, name, default)
    return getattr(graph, name)


def outermost_graph() -> tf.Graph:
    """Returns the graph in which the default graph is a branch's or a function's."""
    with tf.init_scope():
        return tf.compat.v1.get_default_graph()


def is_in_branch() -> bool:
    """Returns whether operations are made in a function, or in a branch or loop."""
    graph = tf.compat.v1.get_default_graph()
    return graph.building_function or graph._get_control_flow_context() is not None


def is_in_loop(operation: tf.Operation) -> bool:
    """Returns whether the outputs are inside a loop or branch of TensorFlow 1."""
    return control_flow_util.GetOutputContext(operation) is not None


def library_of_functions() -> dict:
    """Returns the definitions of the graph's functions by their names."""
    definition = tf.compat.v1.get_default_graph().as_graph_def()
    return {f.signature.name: f for f in definition.library.function}


def functions_of(node) -> list[str]:
    """Returns names of the functions that an operation or node calls, e.g. branches."""
    attributes = node.node_def.attr if isinstance(node, tf.Operation) else node.attr
    names = []
    for value in attributes.values():
        names += [value.func.name] if value.HasField("func") else []
        names += [function.name for function in value.list.func]
    return names


def producer_of(tensor: str) -> str:
    """Returns the name of the node that has a tensor, which is named as in a node."""
    return tensor.split(":")[0]


def nodes_of(names: Iterable[str], library: dict) -> Iterator:
    """Yields the nodes of functions, and of the functions that these call.

    Args:
        names: Names of functions; those that are not in `library` have no nodes.
        library: Definitions by name, as `library_of_functions` returns them.
    """
    seen, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        if name in seen or name not in library:
            continue
        seen.add(name)
        for node in library[name].node_def:
            # A function of TensorFlow 1 is called by its name.
            waiting += [*functions_of(node), node.op]
            yield node


def operations_with_own_gradients(operations: Iterable) -> list[tf.Operation]:
    """Returns the operations with a gradient that a user wrote, or with one inside."""
    library = library_of_functions()
    return [
        operation
        for operation in operations
        if _has_own_gradient(operation.node_def)
        or any(map(_has_own_gradient, nodes_of(functions_of(operation), library)))
    ]


def _has_own_gradient(node) -> bool:
    name = node.attr[_OWN_GRADIENT].s if _OWN_GRADIENT in node.attr else b""
    return bool(name) and b"PartitionedCall" not in name  # of a tf.function


def fetched_operations(graph: tf.Graph, fetches) -> list[tf.Operation]:
    """Returns the operations that `session.run(fetches)` fetches.

    Args:
        graph: The session's graph.
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

    Every tensor that the branches of a `tf.cond` read becomes an input of it: a
    placeholder in each of two functions, and a Switch that runs at every step. Here, in
    a graph, a branch is the operations with a control dependency on the predicate,
    built in place.

    Args:
        predicate: Scalar bool.
        if_true: Returns a list of tensors. It must make all its operations under the
            current control dependencies.
        if_false: Likewise, with the same dtypes. Within functions and in eager
            execution the rules of `tf.cond` apply to both.

    Returns:
        The tensors of the branch that ran.
    """
    # A tf.function adds control dependencies, and what waits for a dead one is dead.
    if is_in_function():
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


def is_in_function() -> bool:
    """Returns whether operations are made in a function, or run eagerly."""
    return tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function


def run_either(
    predicate: tf.Tensor, if_true: Callable, if_false: Callable
) -> tf.Operation | None:
    """`either` for functions that return lists of operations.

    Returns:
        An operation that runs after those of the chosen branch; None in eager
        execution, where they have already run.
    """
    is_eager = tf.executing_eagerly()

    def run(make) -> list[tf.Tensor]:
        operations = make()
        with tf.control_dependencies([] if is_eager else operations):
            return [tf.constant(True)]

    done = either(predicate, lambda: run(if_true), lambda: run(if_false))[0]
    return None if is_eager else done.op


def nan(dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Returns NaN, which reports that a value is unknown."""
    return tf.constant(float("nan"), dtype)


def first_of(strategy, values):
    """Returns one replica's value of `values`, which are equal in all replicas."""
    return strategy.experimental_local_results(values)[0]


def flatten(strategy, values) -> list:
    """Returns every replica's values in one list, from any structure."""
    per_value = tf.nest.map_structure(strategy.experimental_local_results, values)
    return tf.nest.flatten(per_value)


def create_shared_scalar(
    name: str, dtype: tf.DType = tf.int64, collections: list[str] | None = None
) -> tf.Variable:
    """Creates a scalar 0 with the same value in every replica.

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
        **options: Further arguments of tf.compat.v1.Variable.
    """
    # Not by get_variable: partitioners and init_from_checkpoint, set by users for all
    # variables of a scope, must not change these.
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
