"""The names of TensorFlow that are not public are in the TensorFlow that is installed."""

import ast
import concurrent.futures
import functools
import importlib
import inspect
import operator
import os
import types

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.graph import internals

pytestmark = pytest.mark.core

v1 = tf.compat.v1
_FOUND = {}  # functions that use a name, and return whether it is what it should be


def _finds(function):
    _FOUND[function.__name__] = function
    return function


def _names() -> list[str]:
    """Returns the names that the module defines, but for those of its own use."""
    names = []
    for node in ast.parse(inspect.getsource(internals)).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            names.append(target.id)
    return [name for name in names if name[0] != "_" and name != "Place"]


@pytest.mark.parametrize("name", _names())
def test_a_name_is_in_this_tensorflow(name):
    with tf.Graph().as_default():
        assert _FOUND[name]()


@_finds
def reads_of_variable():
    variable = v1.get_variable("read", [], initializer=tf.ones_initializer())
    with internals.reads_of_variable(variable, lambda value: value + 1):
        values = [variable.value(), variable.read_value(), 1 * variable]
    with v1.Session() as session:
        session.run(variable.initializer)
        return session.run([*values, variable.value()]) == [2, 2, 2, 1]


@_finds
def python_function_of():
    calls = tf.py_function, tf.numpy_function
    results = [call(_loop, [], tf.int32) for call in calls]
    functions = [internals.python_function_of(tensor.op) for tensor in results]
    return [*map(inspect.unwrap, functions)] == [_loop, _loop]


@_finds
def seed_generators():
    keras = importlib.import_module("keras" if tf.__version__ < "2.16" else "tf_keras")
    keras.utils.set_random_seed(1)
    return bool(internals.seed_generators())


def _loop() -> tf.Operation:
    """Returns an operation inside a loop of TensorFlow 1."""
    inside = []

    def body(i):
        inside.append((i + 1).op)
        return inside[0].outputs[0]

    v1.disable_control_flow_v2()
    try:
        tf.while_loop(lambda i: i < 3, body, [0])
    finally:
        v1.enable_control_flow_v2()
    return inside[0]


@_finds
def session_with_own_threads():
    name = "TF_OVERRIDE_GLOBAL_THREADPOOL"
    with internals.session_with_own_threads(v1.ConfigProto()) as session:
        return session.run(tf.constant(3)) == 3 and name not in os.environ


@_finds
def context_of():
    graph = v1.get_default_graph()
    is_loop = internals.context_of(_loop()).IsWhileContext()
    return is_loop and internals.context_of(graph) is None


@_finds
def context_of_outputs():
    return internals.context_of_outputs(_loop()).IsWhileContext()


@_finds
def is_in_while_loop():
    return internals.is_in_while_loop(_loop())


@_finds
def control_outputs():
    first = tf.no_op()
    with tf.control_dependencies([first]):
        second = tf.no_op()
    return internals.control_outputs(first) == [second]


@_finds
def original_of():
    x = v1.placeholder(tf.float32)
    y = tf.sin(x)
    tf.gradients(y, x)
    operations = v1.get_default_graph().get_operations()
    return y.op in map(internals.original_of, operations)


@_finds
def set_input():
    x, y = tf.constant(1.0), tf.constant(2.0)
    negative = tf.negative(x)
    internals.set_input(negative.op, 0, y)
    return negative.op.inputs[0] is y


@_finds
def set_number():
    operation = tf.nn.leaky_relu(tf.constant(1.0), 0.5).op
    internals.set_number(operation, "alpha", 0.25)
    return operation.get_attr("alpha") == 0.25


@_finds
def add_control_inputs():
    first, second, third = tf.no_op(), tf.no_op(), tf.no_op()
    internals.add_control_inputs(third, [first])
    internals.add_control_inputs(third, [second])
    return third.control_inputs == [first, second]


@_finds
def set_control_inputs():
    first, second, third = tf.no_op(), tf.no_op(), tf.no_op()
    internals.set_control_inputs(third, [first])
    internals.set_control_inputs(third, [second])
    return third.control_inputs == [second]


@_finds
def is_stateful():
    kinds = "RandomUniform", "AddV2", "Unknown"
    return [*map(internals.is_stateful, kinds)] == [True, False, None]


@_finds
def attribute_types():
    kinds = "AddV2", "If", "Unknown"
    addition, branch, unknown = map(internals.attribute_types, kinds)
    return addition == {"type"} and "func" in branch and unknown is None


@_finds
def dtype_of_handle():
    variable = v1.Variable(tf.zeros([], tf.bfloat16), use_resource=True)
    return internals.dtype_of_handle(variable.handle) == tf.bfloat16


@_finds
def is_composite():
    slices = tf.IndexedSlices(tf.zeros([1]), tf.constant([0]))
    return internals.is_composite(slices) and not internals.is_composite(slices.values)


@_finds
def current_control_dependencies():
    first = tf.no_op()
    with tf.control_dependencies([first]):
        needed = internals.current_control_dependencies(v1.get_default_graph())
    return list(needed) == [first]


def _call() -> tuple[tf.Operation, str]:
    """Returns an operation that calls a function, and that function's name."""
    function = tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([2]))
    call = function(tf.zeros([2])).op
    calls = [call] if "f" in call.node_def.attr else [call.inputs[0].op]
    return calls[0], calls[0].get_attr("f").name


def _in_branch(take):
    """Returns the result of `take` for a branch's graph that reads a tensor outside."""
    x, results = tf.constant(1.0), []

    def branch():
        y = -x
        results.append(take(v1.get_default_graph(), x, y.op.inputs[0]))
        return y

    tf.cond(v1.placeholder(tf.bool, []), branch, lambda: x)
    return results[0]


@_finds
def outer_graph_of():
    outer = v1.get_default_graph()
    is_found = _in_branch(lambda graph, *_: internals.outer_graph_of(graph) is outer)
    return is_found and internals.outer_graph_of(outer) is None


@_finds
def captures_of():
    def captures(graph, *tensors):
        (pair,) = internals.captures_of(graph)
        return all(map(operator.is_, pair, tensors))

    return _in_branch(captures) and not internals.captures_of(v1.get_default_graph())


@_finds
def is_function():
    call, name = _call()
    graph = call.graph
    return internals.is_function(graph, name) and not internals.is_function(graph, "No")


@_finds
def calls_end():
    calls = []

    class Hook(v1.train.SessionRunHook):
        def after_create_session(self, session, coord):
            calls.append(internals.calls_end())

        def end(self, session):
            calls.append(internals.calls_end())

    with v1.train.SingularMonitoredSession([Hook()]):
        pass
    return calls == [False, True]


@_finds
def static_value():
    size = tf.shape(v1.placeholder(tf.float32, [8, 2]))[0]
    return internals.static_value(size // 3) == 2


@_finds
def has_own_seed():
    kinds = "RandomUniform", "RandomShuffle", "RandomShuffleQueueV2", "MatMul"
    return list(map(internals.has_own_seed, kinds)) == [True, True, False, False]


@_finds
def functions_in():
    call, _ = _call()
    library = call.graph.as_graph_def().library
    functions = internals.functions_in(call.graph)
    return functions == {f.signature.name: f for f in library.function}


@_finds
def function_of():
    call, name = _call()
    return internals.function_of(call.graph, name) is not None


@_finds
def graph_of_function():
    call, name = _call()
    graph = internals.graph_of_function(call, [tf.TensorShape([2])], name)
    return [output.shape for output in graph.outputs] == [[2]]


def _eagerly(function):
    """Returns the result of a function in eager execution, as in each new thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def _computed():
    """Returns a function with a value of each call, and that value's tensor."""
    tensors = []

    def function():
        graph = v1.get_default_graph()
        tensors.append(internals.compute_in_call(graph, lambda: [5], tf.constant(1)))
        return tensors[0] + 1

    return tf.function(function).get_concrete_function(), tensors[0]


@_finds
def compute_in_call():
    return _eagerly(lambda: _computed()[0]().numpy()) == 6


@_finds
def computed_captures_of():
    function, tensor = _eagerly(_computed)
    ((compute, inner),) = internals.computed_captures_of(function.graph)
    return inner is tensor and _eagerly(compute) is not None


def _changed_in_a_branch() -> float:
    variable = tf.Variable(1.0)

    def change():
        variable.assign(2.0)
        return tf.constant(1)

    def trace(is_true):
        internals.run_all_in_branches(v1.get_default_graph())
        return tf.cond(is_true, change, lambda: tf.constant(0))

    v1.wrap_function(trace, [tf.TensorSpec([], tf.bool)])(tf.constant(True))
    return variable.numpy()


@_finds
def run_all_in_branches():
    return _eagerly(_changed_in_a_branch) == 2


@_finds
def lazy_shape():
    partial, whole = tf.TensorShape([None, 6]), tf.TensorShape([23, 6])
    shape, same = (internals.lazy_shape(partial, lambda s=s: s) for s in (whole, whole))
    failing = internals.lazy_shape(partial, lambda: 1 / 0)
    number, width = internals.lazy_shape(partial, lambda: int("unknown"))
    with pytest.raises(ValueError, match="unknown"):
        range(number)
    parts = failing[1], failing[-1:], failing.rank, len(failing), bool(failing)
    reads = shape[0], shape[:1], [*shape], shape.as_list(), shape.num_elements()
    shapes = tf.zeros(shape).shape, tf.TensorShape(shape), shape.is_fully_defined()
    return (
        parts == (6, [6], 2, 2, True)
        and (repr(number), width) == ("None", 6)
        and reads == (23, [23], [23, 6], [23, 6], 138)
        and shapes == (whole, whole, True)
        and shape == same
    )


def _read() -> bool:
    return internals.is_shape_read_outside()


def _read_in(function: str, module: str) -> bool:
    code = _read.__code__.replace(co_name=function)
    return types.FunctionType(code, {"__name__": module, "internals": internals})()


@_finds
def is_shape_read_outside():
    functions = {tf.Tensor.get_shape, tf.get_static_value, tf.TensorSpec.from_tensor}
    names = {inspect.unwrap(function).__name__ for function in functions}
    reads = [_read_in(name, "tensorflow.python.framework.tensor") for name in names]
    return all(reads) and not _read_in("reshape", "tensorflow.python.ops.array_ops")


@_finds
def graph_of_new_function():
    graph, variable = (
        internals.graph_of_new_function("step"),
        _eagerly(lambda: tf.Variable(1)),
    )
    with graph.as_default():
        is_inside = (variable + 1).graph is graph
    return is_inside and graph.building_function


@_finds
def create_like():
    total, graph = tf.constant(1) + 2, tf.Graph()
    with graph.as_default():
        inputs = [tf.constant(3), tf.constant(4)]
    (copy,) = internals.create_like(total.op, graph, inputs).outputs
    return copy.graph is graph and internals.static_value(copy) == 7


@_finds
def change_inputs():
    graph = internals.graph_of_new_function("step")
    with graph.as_default():
        x, y = (
            tf.compat.v1.placeholder(tf.float32),
            tf.compat.v1.placeholder(tf.float32),
        )
        with internals.change_inputs(graph, lambda kind, tensors: [*tensors[:-1], y]):
            changed = tf.raw_ops.Mul(x=x, y=x)
        kept = tf.raw_ops.Mul(x=x, y=x)
    pairs = zip([*changed.op.inputs, *kept.op.inputs], [x, y, x, x], strict=True)
    return all(one is other for one, other in pairs)


def _absolute(x):
    if x > 0:
        return x
    return -x


@_finds
def convert_by_autograph():
    converted = internals.convert_by_autograph(functools.partial(_absolute))
    call = tf.function(lambda x: converted(x), autograph=False)
    return _eagerly(lambda: call(tf.constant(-2)).numpy()) == 2


@_finds
def is_converted_by_autograph():
    functions = [tf.function(abs, autograph=value) for value in (True, False)]
    return [*map(internals.is_converted_by_autograph, functions)] == [True, False]


@_finds
def is_compiled_by_xla():
    functions = [tf.function(abs, jit_compile=value) for value in (True, None)]
    return [*map(internals.is_compiled_by_xla, functions)] == [True, False]


@_finds
def reduces_retracing():
    functions = [tf.function(abs, reduce_retracing=value) for value in (True, False)]
    return [*map(internals.reduces_retracing, functions)] == [True, False]


@_finds
def call_before_runs():
    looks = []
    internals.call_before_runs(v1.get_default_graph(), lambda: looks.append(1))
    with v1.Session() as session:
        session.run(tf.no_op())
    return looks == [1]


@_finds
def config_of():
    config = v1.ConfigProto(allow_soft_placement=True)
    with v1.Session(config=config) as session:
        return internals.config_of(session).allow_soft_placement


@_finds
def mark_as_closed():
    session = v1.Session.__new__(v1.Session)
    internals.mark_as_closed(session)
    session.__del__()  # raises AttributeError for one that is not made
    return True


def _mirrored() -> tf.distribute.Strategy:
    reduction = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"], reduction)


@_finds
def is_in_cluster():
    return not internals.is_in_cluster(_mirrored())


@_finds
def kind_of_reduction():
    return internals.kind_of_reduction(_mirrored()) == "ReductionToOneDevice"


@_finds
def create_slots():
    optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
    variable = v1.get_variable("v", [])
    internals.create_slots(optimizer, [variable])
    return optimizer.get_slot(variable, "momentum") is not None


@_finds
def change_non_slots():
    optimizer = v1.train.AdamOptimizer(0.1)
    internals.create_slots(optimizer, [v1.get_variable("v", [])])
    dicts = []
    internals.change_non_slots(optimizer, lambda slots: dicts.append(slots) or slots)
    return {name for name, _ in dicts[0]} == {"beta1_power", "beta2_power"}


def _loss_scaling():
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    scaling = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, "dynamic")
    return optimizer, scaling


@_finds
def wrapped_by():
    optimizer, scaling = _loss_scaling()
    return internals.wrapped_by(scaling) is optimizer


@_finds
def loss_scale_of():
    kind = v1.mixed_precision.DynamicLossScale
    return isinstance(internals.loss_scale_of(_loss_scaling()[1]), kind)


@_finds
def loss_division():
    return internals.loss_division().__code__.co_filename


@_finds
def trackable_children():
    optimizer = v1.train.AdamOptimizer(0.1)
    internals.create_slots(optimizer, [v1.get_variable("v", [])])
    return "beta1_power" in internals.trackable_children(optimizer)


@_finds
def set_initializer():
    variables = [v1.get_variable(str(i), [], use_resource=i) for i in (False, True)]
    done = tf.no_op()
    for variable in variables:
        internals.set_initializer(variable, done)
    return all(variable.initializer is done for variable in variables)


@_finds
def saveables_of():
    variable = v1.get_variable("v", [])
    savers = v1.train.Saver([variable]), v1.train.Saver(defer_build=True)
    return [*map(internals.saveables_of, savers)] == [[variable], None]


@_finds
def DelegatingTrackable():
    module = tf.Module()
    return internals.trackable_children(internals.DelegatingTrackable(module)) == {}


@_finds
def track():
    owner, part = tf.Module(), tf.Module()
    internals.track(owner, part, "part")
    return internals.trackable_children(owner)["part"] is part


@_finds
def key_of():
    with (strategy := _mirrored()).scope():
        variable = tf.Variable(1.0)
    local = strategy.experimental_local_results(variable)
    keys = {internals.key_of(copy) for copy in (variable, *local)}
    return len(local) == 2 and len(keys) == 1


def _finds_functions(*names: str) -> None:
    for name in names:
        place = getattr(internals, name)
        _FOUND[name] = lambda place=place: callable(getattr(*place))


_finds_functions(
    *("GRADIENTS", "GRADIENTS_OF_TAPE", "DROPOUT", "RUN"),
    *("INIT_OF_FETCHES", "INIT_OF_SESSION"),
)


@_finds
def record_of():
    with tf.GradientTape() as tape:
        return internals.record_of(tape) and not internals.record_of(tf.GradientTape())


@_finds
def is_recorded():
    one, other = tf.constant(1.0), tf.constant(2.0)
    with tf.GradientTape() as tape:
        tape.watch(one)
        return internals.is_recorded(one) and not internals.is_recorded(other)


@_finds
def are_recorded():
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        tensors = [x, tf.negative(x), tf.constant(1.0)]
        record = internals.record_of(tape)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            done = thread.submit(internals.are_recorded, record, tensors)
        return [*map(bool, done.result())] == [True, True, False]


@_finds
def replace_function():
    place = internals.replace_function, "own"
    internals.replace_function.own = lambda: 1
    try:
        plain = internals.replace_function(place, lambda plain: lambda: plain() + 1)
        return (plain(), internals.replace_function.own()) == (1, 2)
    finally:
        del internals.replace_function.own


@_finds
def call_of_model_fn():
    return callable(getattr(*internals.call_of_model_fn()))


@_finds
def call_of_train():
    return callable(getattr(*internals.call_of_train()))


@_finds
def train_of_estimator():
    return callable(getattr(*internals.train_of_estimator()))


def _model_fn(features, labels, mode):
    raise AssertionError


def _estimator() -> tf.estimator.Estimator:
    return tf.estimator.Estimator(_model_fn, "unused")


@_finds
def create_global_step():
    graph = v1.get_default_graph()
    internals.create_global_step(_estimator(), graph)
    return v1.train.get_global_step(graph) is not None


@_finds
def batch_of():
    data = tf.data.Dataset.from_tensors((np.zeros(1), np.ones(2)))
    features, labels, hooks = internals.batch_of(_estimator(), lambda: data)
    return (features.shape, labels.shape, len(hooks)) == ([1], [2], 1)


@_finds
def device_fn_of():
    return internals.device_fn_of(_estimator()) is None


@_finds
def session_config_of():
    return internals.session_config_of(_estimator()).allow_soft_placement


@_finds
def warm_start_of():
    return internals.warm_start_of(_estimator()) is None


@_finds
def model_fn_of():
    return internals.model_fn_of(_estimator()) is _model_fn


@_finds
def argument_names():
    return internals.argument_names(_model_fn) == ("features", "labels", "mode")


@_finds
def COLOCATION():
    x = tf.constant(1.0)
    with v1.colocate_with(x):
        return internals.COLOCATION in tf.negative(x).op.node_def.attr


def _with_own_gradient() -> tuple[tf.Operation, list[tf.Operation]]:
    """Returns an operation with a gradient of its own, and those of all gradients."""

    @tf.custom_gradient
    def layer(x):
        return tf.sin(x), tf.cos

    x = v1.placeholder(tf.float32)
    tf.gradients(layer(x), x)
    operations = v1.get_default_graph().get_operations()
    attribute = internals.OWN_GRADIENT
    (custom,) = [op for op in operations if attribute in op.node_def.attr]
    return custom, operations


@_finds
def OWN_GRADIENT():
    return _with_own_gradient()


@_finds
def gradient_scope_of():
    custom, operations = _with_own_gradient()
    scope = internals.gradient_scope_of(custom)
    return any(scope in f"/{op.name}" for op in operations)


@_finds
def READS_OF_GLOBAL_STEP():
    v1.train.create_global_step()
    v1.train.StepCounterHook(output_dir="unused", summary_writer=object()).begin()
    return v1.get_collection(internals.READS_OF_GLOBAL_STEP)


@_finds
def counts_vectorized():
    tf.vectorized_map(tf.sin, v1.placeholder(tf.float32, [3]))
    operations = v1.get_default_graph().get_operations()
    return any(map(internals.counts_vectorized, operations))


@_finds
def replica_of():
    names = []
    _mirrored().run(lambda: names.append(tf.no_op().name))
    return {internals.replica_of(name) for name in names} == {None, "1"}


@_finds
def has_failed():
    failing, other = tf.debugging.Assert(False, ["no"]), tf.no_op()
    with v1.Session() as session, pytest.raises(tf.errors.InvalidArgumentError) as e:
        session.run(failing)
    flags = [internals.has_failed(op, e.value) for op in (failing, other)]
    return flags == [True, False]
