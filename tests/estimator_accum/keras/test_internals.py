"""The names of Keras that are not public are in the Kerases that are installed."""

import ast
import importlib
import inspect
import types

import pytest
import tensorflow as tf
from tensorflow.python.distribute import values

from estimator_accum.keras import _internals
from tests.helpers.models.keras_kinds import KINDS, Kind

_KINDS = {Kind(*name).is_3 or name[1]: Kind(*name) for name in KINDS}
_FOUND = {}  # for each name, the kind that has it, and a function that returns whether


def _finds(kind):
    def note(function):
        _FOUND[function.__name__] = kind, function
        return function

    return note


def _names() -> list[str]:
    """Returns the names that the module defines."""
    names = []
    for node in ast.parse(inspect.getsource(_internals)).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [
                n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)
            ]
    return names


@pytest.mark.parametrize("name", _names())
def test_a_name_is_in_this_keras(name):
    key, is_there = _FOUND[name]
    if key not in _KINDS:
        pytest.skip("this Python has no Keras 3")
    assert is_there(_KINDS[key])


def _pairs(kind) -> list:
    """Returns a variable with a gradient, and one without."""
    variables = [kind.keras.Variable(1.0) if kind.is_3 else tf.Variable(1.0)] * 2
    return list(zip([tf.constant(1.0), None], variables, strict=True))


def _is_base(kind, name: str) -> bool:
    bases = type(kind.optimizer("SGD", 0.1)).__mro__
    return name in {base.__name__ for base in bases}


@_finds("legacy")
def LEGACY(kind):
    return _is_base(kind, _internals.LEGACY)


@_finds("new")
def KERAS_2(kind):
    return _is_base(kind, _internals.KERAS_2)


@_finds(True)
def KERAS_3(kind):
    return _is_base(kind, _internals.KERAS_3)


@_finds("new")
def new_format(kind):
    utils = f"{kind.name[0]}.src.saving.legacy.saved_model.utils"
    utils = importlib.import_module(utils)
    with _internals.new_format(kind.name[0]):
        return not utils.in_tf_saved_model_scope()


@_finds("new")
def with_gradients(kind):
    pairs = _pairs(kind)
    return list(_internals.with_gradients(kind.name[0], pairs)) == pairs[:1]


@_finds("legacy")
def track_variable(kind):
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", [], use_resource=True)
        _internals.track_variable(kind.name[0], variable)  # raises if it is not there
        return True


@_finds("legacy")
def scope_of(kind):
    return _internals.scope_of(kind.optimizer("SGD", 0.1)) == "SGD"


@_finds("legacy")
def create_weights(kind):
    optimizer, variable = kind.optimizer("Adam", 0.1), tf.Variable(1.0)
    _internals.create_weights(optimizer, [variable])
    return optimizer.get_slot(variable, "m") is not None


@_finds("legacy")
def compute_gradients(kind):
    variable = tf.Variable(2.0)
    arguments = (lambda: 3.0 * variable, [variable], None, None)
    optimizer = kind.optimizer("SGD", 0.1)
    ((gradient, _),) = _internals.compute_gradients(optimizer, *arguments)
    return float(gradient) == 3.0


@_finds("legacy")
def restore_slot(kind):
    return callable(kind.optimizer("SGD", 0.1)._restore_slot_variable)


@_finds("legacy")
def create_or_restore_slot(kind):
    return callable(kind.optimizer("SGD", 0.1)._create_or_restore_slot_variable)


@_finds(True)
def AVERAGES(kind):
    optimizer = kind.optimizer("SGD", 0.1, use_ema=True)
    optimizer.build([kind.keras.Variable(1.0)])
    return len(getattr(optimizer, _internals.AVERAGES)) == 1


@_finds(True)
def tf_variable_of(kind):
    variable = _internals.tf_variable_of(kind.keras.Variable(1.0))
    return isinstance(variable, tf.Variable)


@_finds(True)
def filter_gradients(kind):
    pairs = _pairs(kind)
    return _internals.filter_gradients(kind.optimizer("SGD", 0.1), pairs) == pairs[:1]


@_finds(True)
def sums_over_replicas(kind):
    return _internals.sums_over_replicas(kind.optimizer("SGD", 0.1))


@_finds(True)
def trained_by(kind):
    optimizer, variable = kind.optimizer("SGD", 0.1), kind.keras.Variable(1.0)
    optimizer.build([variable])
    return _internals.trained_by(optimizer)[0] is variable


@_finds(True)
def leave_gradients_unsummed(kind):
    optimizer, gradients = kind.optimizer("SGD", 0.1), [tf.constant(1.0)]
    _internals.leave_gradients_unsummed(optimizer)
    return optimizer._all_reduce_sum_gradients(gradients) == gradients


@_finds(True)
def unpickled(kind):
    _, (saved,) = kind.optimizer("SGD", 0.25).__reduce__()
    return float(_internals.unpickled(saved).learning_rate) == 0.25


def _each_keras():
    return [kind.keras for kind in _KINDS.values() if not kind.is_legacy]


@_finds("new")
def steps_per_execution_of(kind):
    for keras in _each_keras():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=3)
        assert _internals.steps_per_execution_of(model) == 3
        model = keras.Sequential([keras.layers.Dense(1)])
        assert _internals.steps_per_execution_of(model) == 1
    return True


@_finds("new")
def one_eager_step(kind):
    for keras in _each_keras():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=3)
        with _internals.one_eager_step(model):
            model.make_train_function(force=True)
        assert not model.run_eagerly
        assert not hasattr(model.train_function, "get_concrete_function")
        model.train_function(iter([(tf.ones([2, 3]), tf.ones([2, 1]))]))
        assert int(model.optimizer.iterations) == 1
    return True


@_finds("new")
def specs_of(kind):
    del kind
    data = tf.data.Dataset.from_tensors(tf.ones([4])).batch(2)
    spec = iter(data).element_spec
    replicas = types.SimpleNamespace(element_spec=values.PerReplicaSpec(spec, spec))
    return _internals.specs_of(iter(data)) == _internals.specs_of(replicas) == (spec,)


@_finds("new")
def without_optionals(kind):
    del kind
    data = tf.ones([2]), tf.experimental.Optional.empty(tf.TensorSpec([]))
    return _internals.without_optionals(data)[1] is None
