"""Names of TensorFlow that are not public.

All other rooms reach them through this file; each entry says which feature breaks if
TensorFlow renames it. A function here then raises AttributeError, or says that it does
not; a search for the texts at the end would find nothing, in silence. A test finds every
name in the TensorFlow that is installed. `compat` and `programs` have a few more, and a
subclass overrides methods in its own file: tests/test_architecture.py lists them.
"""

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import session as sessions
from tensorflow.python.eager import imperative_grad
from tensorflow.python.framework import op_def_registry, smart_cond
from tensorflow.python.ops import (
    control_flow_util,
    control_flow_util_v2,
    gradients_util,
    handle_data_util,
    nn_ops,
    script_ops,
)
from tensorflow.python.training import monitored_session
from tensorflow.python.util import function_utils

Place = tuple[object, str]  # of a function that is replaced: its owner, its name

# Operations.


@contextlib.contextmanager
def session_with_own_threads(config) -> Iterator[tf.compat.v1.Session]:
    """Yields a session of the default graph. If renamed, later sessions share its threads.

    The first session of a process else decides the threads of operations for all others.
    """
    config.use_per_session_threads = True  # between operations; the other within them
    name = "TF_OVERRIDE_GLOBAL_THREADPOOL"  # which TensorFlow reads once
    is_set = name in os.environ
    os.environ.setdefault(name, "1")
    try:
        session = tf.compat.v1.Session(config=config)
    finally:
        if not is_set:
            os.environ.pop(name, None)
    with session:
        yield session


def context_of(place: tf.Operation | tf.Graph):
    """Returns the TensorFlow 1 branch or loop. If renamed, no batch is split."""
    return place._get_control_flow_context()


def context_of_outputs(operation: tf.Operation):
    """Returns the loop that results leave. If renamed, no batch is split."""
    return control_flow_util.GetOutputContext(operation)


def is_in_while_loop(operation: tf.Operation) -> bool:
    """Returns whether a loop runs it. If renamed, no own optimizer is split."""
    return control_flow_util.IsInWhileLoop(operation)


def control_outputs(operation: tf.Operation) -> list[tf.Operation]:
    """Returns its control successors. If renamed, hooks and whole batches fail."""
    return operation._control_outputs


def original_of(operation: tf.Operation) -> tf.Operation | None:
    """Returns the operation it derives. If renamed, changed gradients fail."""
    return operation._original_op


def set_input(operation: tf.Operation, number: int, tensor: tf.Tensor) -> None:
    """Changes one input of an operation. If renamed, no own optimizer is split."""
    operation._update_input(number, tensor)


def set_number(operation: tf.Operation, name: str, value: float) -> None:
    """Changes an attribute. If renamed, no fused batch normalization is split."""
    attribute = tf.compat.v1.AttrValue(f=value)
    operation._set_attr(name, attribute)


def add_control_inputs(operation: tf.Operation, others: Iterable[tf.Operation]) -> None:
    """Has it wait for others, too. If renamed, no own optimizer is split."""
    operation._add_control_inputs(list(others))


def set_control_inputs(operation: tf.Operation, others: Iterable[tf.Operation]) -> None:
    """Has it wait for others alone. If renamed, no own optimizer is split."""
    operation._remove_all_control_inputs()
    operation._add_control_inputs(list(others))


def is_stateful(kind: str) -> bool | None:
    """Returns whether a type has state. If renamed, recomputed batches fail."""
    definition = op_def_registry.get(kind)
    return None if definition is None else definition.is_stateful


def attribute_types(kind: str) -> set[str] | None:
    """Returns its attributes' types. If renamed, functions of operations are not seen."""
    definition = op_def_registry.get(kind)
    return None if definition is None else {a.type for a in definition.attr}


def python_function_of(operation: tf.Operation) -> Callable | None:
    """Returns the function that Python computes. If renamed, sizes stay unread."""
    function = script_ops._py_funcs.get(operation.get_attr("token").decode())
    function = getattr(function, "_func", function)
    return getattr(function, "__wrapped__", function)  # by autograph


def seed_generators() -> list:
    """Returns Keras 2's, after set_random_seed. If renamed, sizes stay unread there."""
    modules = (sys.modules.get(f"{name}.src.backend") for name in ("keras", "tf_keras"))
    holders = (getattr(module, "_SEED_GENERATOR", None) for module in modules)
    generators = (getattr(holder, "generator", None) for holder in holders)
    return [generator for generator in generators if generator is not None]


def static_value(tensor: tf.Tensor):
    """Returns a value that no feed changes. If renamed, static sizes are not read."""
    return smart_cond.smart_constant_value(tensor)


def has_own_seed(kind: str) -> bool:
    """Returns whether it draws from its own state. If renamed, some draws are refused."""
    definition = op_def_registry.get(kind)
    if definition is None or not definition.is_stateful:
        return False
    dtypes = {argument.type for argument in definition.output_arg}
    is_object = any(argument.is_ref for argument in definition.output_arg)
    is_object |= tf.resource.as_datatype_enum in dtypes  # such as a queue
    names = {attribute.name for attribute in definition.attr}
    is_layer = kind.startswith("Cudnn")
    return not (is_object or is_layer) and {"seed", "seed2"} <= names


def dtype_of_handle(handle) -> tf.DType | None:
    """Returns its variable's dtype. If renamed, None: sums keep their own dtype."""
    data = getattr(handle, "_handle_data", None)
    if data is None and hasattr(handle, "op"):  # captured by a function
        data = handle_data_util.get_resource_handle_data(handle)
    is_set = data is not None and data.is_set
    return tf.as_dtype(data.shape_and_type[0].dtype) if is_set else None


def is_composite(value) -> bool:
    """Returns whether it has components. If renamed, no own optimizer is split."""
    return isinstance(value, tf.__internal__.CompositeTensor)


# Their code computes alike with and without static sizes, but for functions that return
# a shape to their caller, and modules through which others are called.
_LIBRARIES = {
    *("tensorflow", "tensorflow_estimator", "keras", "tf_keras", "estimator_accum"),
}
_READERS = {
    *("shape", "get_shape", "_shape_as_list", "_shape_tuple", "int_shape"),
    *("constant_value", "_ConstantValue", "constant_value_as_shape", "from_tensor"),
    *("from_value", "type_spec_from_value", "len_", "_tf_tensor_len", "__len__"),
}
_PASSING_ON = {
    "estimator_accum.graph.internals",
    "estimator_accum.microbatch.static_sizes",
    "tensorflow.python.autograph.impl.api",
    "tensorflow.python.util.dispatch",
    "tensorflow.python.util.traceback_utils",
}


class _UnknownSize:
    """A size that may be unpacked from a shape, but raises an error where it is used."""

    def __init__(self, error: Exception):
        self._error = error

    def __repr__(self) -> str:
        return "None"

    def refuse(self, *others):
        """Raises the error."""
        raise self._error


for _name in (
    *("index", "int", "float", "bool", "hash", "eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow"),
):
    setattr(_UnknownSize, f"__{_name}__", _UnknownSize.refuse)


class _LazyShape(tf.TensorShape):
    def __init__(self, shape: tf.TensorShape, infer: Callable[[], tf.TensorShape]):
        self._partial, self._infer = tuple(shape.as_list()), infer
        super().__init__(shape)

    @property
    def _dims(self) -> tuple:
        try:
            return tuple(self._infer().as_list())
        except ValueError as error:  # perhaps another size is wanted
            unknown = _UnknownSize(error)
            return tuple(unknown if n is None else n for n in self._partial)

    @_dims.setter
    def _dims(self, dims) -> None:
        pass

    @property
    def rank(self) -> int:
        return len(self._partial)

    def is_fully_defined(self) -> bool:
        return self._infer().is_fully_defined()

    def __len__(self) -> int:
        return self.rank

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key):
        dims = self._partial[key]
        if isinstance(key, slice):
            return super().__getitem__(key) if None in dims else tf.TensorShape(dims)
        # A Dimension in code of TensorFlow 1, which reads its `value`.
        return tf.TensorShape([self._infer()[key] if dims is None else dims])[0]


def lazy_shape(shape: tf.TensorShape, infer: Callable) -> tf.TensorShape:
    """Returns a shape that infers None, when read. If renamed, steps read None."""
    return _LazyShape(shape, infer)


def is_shape_read_outside() -> bool:
    """Returns whether other code reads a shape. If renamed, steps read None."""
    frame = sys._getframe(1)
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.partition(".")[0] not in _LIBRARIES:
            return True
        if name not in _READERS and module not in _PASSING_ON:
            return False
        frame = frame.f_back
    return False


# Graphs and sessions.


def current_control_dependencies(graph: tf.Graph) -> Iterable:
    """Returns those of new operations. If renamed, no own optimizer is split."""
    return graph._current_control_dependencies()


def outer_graph_of(graph: tf.Graph) -> tf.Graph | None:
    """Returns the graph around a branch's. If renamed, None: Adam fails in a branch."""
    return getattr(graph, "outer_graph", None)


def captures_of(graph: tf.Graph) -> list[tuple]:
    """Returns (outer, inner) tensors. If renamed, none: branches seem to need nothing."""
    return list(getattr(graph, "captures", ()))


def computed_captures_of(graph: tf.Graph) -> list[tuple]:
    """Returns (function, tensor) of values of each call. If renamed, replicas fail."""
    computed = getattr(graph, "deferred_external_captures", ())
    return list(zip(computed, getattr(graph, "deferred_internal_captures", ())))


def compute_in_call(graph: tf.Graph, function: Callable, tensor: tf.Tensor):
    """Returns a function's value in each call. If renamed, steps of replicas fail."""
    spec = tf.TensorSpec(tensor.shape, tensor.dtype)
    return graph.capture_call_time_value(lambda: function()[0], spec)


def is_function(graph: tf.Graph, kind: str) -> bool:
    """Returns whether a type is a function. If renamed, no gradient tape is split."""
    return graph._is_function(kind)


def functions_in(graph: tf.Graph) -> dict:
    """Returns definitions of functions by name. If renamed, no train op is made."""
    functions = graph._functions.items()
    cached = "cached_definition"  # until TensorFlow 2.10 `definition` was
    return {name: getattr(f, cached, None) or f.definition for name, f in functions}


def function_of(graph: tf.Graph, name: str):
    """Returns a function. If renamed, the analysis of a tf.function or branch fails."""
    return graph._get_function(name)


def graph_of_function(call: tf.Operation, shapes: list, name: str) -> tf.Graph:
    """Returns a function's graph for shapes. If renamed, its analysis fails."""
    return control_flow_util_v2.get_func_graph(call, shapes, name)


def run_all_in_branches(graph: tf.Graph) -> None:
    """Has branches and loops make their changes. If renamed, those of steps do not."""
    graph._add_control_dependencies = True


def graph_of_new_function(name: str) -> tf.Graph:
    """Returns a graph that captures outer tensors. If renamed, no step is split."""
    return tf.__internal__.FuncGraph(name)


@contextlib.contextmanager
def change_inputs(graph: tf.Graph, change: Callable) -> Iterator[None]:
    """Gives operations `change(type, inputs)` as inputs. If renamed, no step is split."""
    create = graph._create_op_internal

    def create_changed(kind: str, inputs: list, *args, **options):
        return create(kind, change(kind, inputs), *args, **options)

    graph._create_op_internal = create_changed
    try:
        yield
    finally:
        del graph._create_op_internal


def create_like(operation: tf.Operation, graph: tf.Graph, inputs: list) -> tf.Operation:
    """Creates an operation of its type and attributes. If renamed, sizes stay unread."""
    attributes = operation.node_def.attr
    return graph._create_op_internal(  # create_op costs twice as much
        operation.type,
        inputs,
        [output.dtype for output in operation.outputs],
        attrs={k: v for k, v in attributes.items() if not k.startswith("_")},
        op_def=operation.op_def,
    )


def convert_by_autograph(function: Callable) -> Callable:
    """Returns a function as tf.function converts it. If renamed, no step is split."""
    context = tf.__internal__.autograph.control_status_ctx()
    convert = tf.__internal__.autograph.tf_convert
    return convert(function, context, user_requested=True)


def is_converted_by_autograph(function) -> bool:
    """Returns whether a tf.function is. If renamed, steps are converted in any case."""
    return getattr(function, "_autograph", True)


def is_compiled_by_xla(function) -> bool:
    """Returns whether a tf.function is. If renamed, steps do not say that they are not."""
    return bool(getattr(function, "_jit_compile", False))


def reduces_retracing(function) -> bool:
    """Returns whether a tf.function does. If renamed, steps trace each shape."""
    return bool(getattr(function, "_reduce_retracing", False))


def call_before_runs(graph: tf.Graph, look: Callable[[], None]) -> None:
    """Calls `look` before each run of a graph. If renamed, no train op is made."""
    take_lock = graph._session_run_lock

    def look_and_take_lock():
        look()
        return take_lock()

    graph._session_run_lock = look_and_take_lock


def config_of(session: tf.compat.v1.Session) -> tf.compat.v1.ConfigProto:
    """Returns the config of a session. If renamed, whole batches are not checked."""
    return session._config or tf.compat.v1.ConfigProto()


def mark_as_closed(session: tf.compat.v1.Session) -> None:
    """Lets __del__ find no session. If renamed, it prints an error in vain."""
    session._session = None


def calls_end() -> bool:
    """Returns whether a session calls `end` of its hooks. If renamed, runs are refused.

    They are the runs of a hook's `end` that need a batch.
    """
    code = monitored_session._MonitoredSession._close_internal.__code__
    frame = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


# Strategies.


def is_in_cluster(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether processes train together. If renamed, no train op is made."""
    return strategy.extended._in_multi_worker_mode()


def kind_of_reduction(strategy: tf.distribute.Strategy) -> str:
    """Returns the class that reduces. If renamed, a hang on CPUs is not refused."""
    return type(getattr(strategy.extended, "_cross_device_ops", None)).__name__


# Optimizers.


def create_slots(optimizer: tf.compat.v1.train.Optimizer, variables: list) -> None:
    """Creates the slots. If renamed, no train op is made.

    `apply_gradients` would make them inside the branch of the boundary, which the
    session's initialization of variables does not reach.
    """
    optimizer._create_slots(variables)


def change_non_slots(
    optimizer: tf.compat.v1.train.Optimizer, change: Callable[[dict], dict]
) -> None:
    """Changes variables that are no slots. If renamed, no train op is made."""
    optimizer._non_slot_dict = change(optimizer._non_slot_dict)


def wrapped_by(loss_scaling: tf.compat.v1.train.Optimizer):
    """Returns the optimizer in a loss-scaling one. If renamed, these fail."""
    return loss_scaling._optimizer


def loss_scale_of(loss_scaling: tf.compat.v1.train.Optimizer):
    """Returns a loss-scaling optimizer's scale. If renamed, these fail."""
    return loss_scaling._loss_scale


def loss_division():
    """Returns the division by replicas. If renamed, no train op has replicas."""
    return getattr(tf.compat.v1.train.Optimizer, "_scale_loss", None)


def trackable_children(
    optimizer: tf.compat.v1.train.Optimizer, *args, **kwargs
) -> dict:
    """Returns children for tf.train.Checkpoint. If renamed, writing one fails."""
    return optimizer._trackable_children(*args, **kwargs)


# Variables and checkpoints.


def set_initializer(variable: tf.Variable, initializer: tf.Operation) -> None:
    """Undoes a warm start. If renamed, it does nothing: `".*"` then fills windows."""
    if hasattr(variable, "_initializer_op"):
        variable._initializer_op = initializer


def saveables_of(saver: tf.compat.v1.train.Saver) -> list | dict | None:
    """Returns variables of a Saver. If renamed, make_accumulation_hooks fails."""
    return saver._var_list


# Base of an object that is saved as another one. If renamed, no Keras can accumulate.
DelegatingTrackable = tf.__internal__.tracking.DelegatingTrackableMixin


def track(owner, part, name: str) -> None:
    """Adds a part to an object's checkpoints. If renamed, no Keras can accumulate."""
    owner._track_trackable(part, name, overwrite=True)


def key_of(variable: tf.Variable) -> str:
    """Returns a variable's key, in every replica. If renamed, no Keras can accumulate."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        for holder in (variable, variable.handle):  # one replica's
            if hasattr(holder, "_distributed_container"):
                variable = holder._distributed_container()
                break
    return variable._unique_id


# Gradients. tf.gradients and optimizers compute by the first of these, a tape by the
# second. If renamed, no own optimizer is split, and `run` and `check` fail.
GRADIENTS: Place = gradients_util, "_GradientsHelper"
GRADIENTS_OF_TAPE: Place = imperative_grad, "imperative_grad"


def record_of(tape: tf.GradientTape):
    """Returns a tape's record, at first None. If renamed, no gradient tape is split."""
    return tape._tape


def is_recorded(tensor: tf.Tensor) -> bool:
    """Returns whether a tape records uses of a tensor. If renamed, no step is split."""
    return pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop([tensor])


def are_recorded(record, tensors: list[tf.Tensor]) -> list[bool]:
    """Returns which ones a record has. If renamed, no gradient tape is split.

    To be called in a thread of its own, which has no other tapes.
    """
    pywrap_tfe.TFE_Py_TapeSetAdd(record._tape)
    try:
        return [pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop([t]) for t in tensors]
    finally:
        pywrap_tfe.TFE_Py_TapeSetRemove(record._tape)


# Functions that `run` and `check` replace in a process. If renamed, they fail.
DROPOUT: Place = nn_ops, "_dropout"
INIT_OF_FETCHES: Place = sessions._FetchHandler, "__init__"  # of every kind of run
RUN: Place = sessions.BaseSession, "run"
INIT_OF_SESSION: Place = sessions.BaseSession, "__init__"


def call_of_model_fn() -> Place:
    """Returns the way to all model_fns. If renamed, `run` fails."""
    return tf.compat.v1.estimator.Estimator, "_call_model_fn"


def call_of_train() -> Place:
    """Returns the public way to all trainings, of which some have no step left."""
    return tf.compat.v1.estimator.Estimator, "train"


def train_of_estimator() -> Place:
    """Returns the way to all trainings. If renamed, `check` fails."""
    return tf.compat.v1.estimator.Estimator, "_train_model"


@contextlib.contextmanager
def reads_of_variable(
    variable: tf.Variable, change: Callable[[tf.Tensor], tf.Tensor]
) -> Iterator[None]:
    """Lets reads that are made get change(value). If renamed, it raises AttributeError."""
    variable = getattr(variable, "_v", variable)  # that of a ParameterServerStrategy
    read = variable._read_variable_op
    variable._read_variable_op = lambda *args, **options: change(read(*args, **options))
    try:
        yield
    finally:
        del variable._read_variable_op


def replace_function(place: Place, make: Callable[[Callable], Callable]) -> Callable:
    """Puts make(function) in the place of a function, and returns that function."""
    function = getattr(*place)
    setattr(*place, functools.wraps(function)(make(function)))
    return function


# Estimators, of which `check` makes sessions of its own.


def create_global_step(estimator, graph: tf.Graph) -> None:
    """Creates an Estimator's global step. If renamed, `check` fails."""
    estimator._create_and_assert_global_step(graph)


def batch_of(estimator, input_fn: Callable) -> tuple:
    """Returns features, labels and hooks for training. If renamed, `check` fails."""
    mode = tf.estimator.ModeKeys.TRAIN
    return estimator._get_features_and_labels_from_input_fn(input_fn, mode)


def device_fn_of(estimator):
    """Returns where an Estimator puts operations. If renamed, `check` fails."""
    return estimator._device_fn


def session_config_of(estimator) -> tf.compat.v1.ConfigProto:
    """Returns the config of an Estimator's sessions. If renamed, `check` fails."""
    return estimator._session_config


def warm_start_of(estimator):
    """Returns its WarmStartSettings, or None. If renamed, `check` fails."""
    return estimator._warm_start_settings


def model_fn_of(estimator) -> Callable:
    """Returns the model_fn that it was given. If renamed, `run` fails."""
    return estimator._model_fn


def argument_names(model_fn: Callable) -> tuple[str, ...]:
    """Returns the names by which an Estimator passes arguments.

    Unlike `inspect.signature`, it reads a decorator's function, not the decorated one.
    """
    return function_utils.fn_args(model_fn)


# Texts. If TensorFlow writes others:

COLOCATION = "_class"  # an attribute; copies ask for the places of originals
OWN_GRADIENT = "_gradient_op_type"  # an attribute; tf.custom_gradient is not checked
READS_OF_GLOBAL_STEP = "global_step_read_op_cache"  # a collection; hooks may read late
_COUNTER = re.compile(r"(^|/)loop_body(_\d+)?/PlaceholderWithDefault$")
_REPLICA = re.compile(r"(?:^|/)replica_(\d+)/")


def counts_vectorized(operation: tf.Operation) -> bool:
    """Returns whether tf.vectorized_map counts by it. Else jacobians are not refused."""
    return _COUNTER.search(operation.name) is not None


def replica_of(name: str) -> str | None:
    """Returns the replica whose scope a name has. Else each runs others' updates."""
    match = _REPLICA.search(name)
    return match and match[1]


def gradient_scope_of(operation: tf.Operation) -> str:
    """Returns its gradient's scope. Else tf.custom_gradient is not checked."""
    return f"/{operation.name}_grad/"


def has_failed(operation: tf.Operation, error: Exception) -> bool:
    """Returns whether an error names it. Else a refusal has TensorFlow's words."""
    return f"{{{{node {operation.name}}}}}" in str(error)
