"""The names of Keras that are not public are in the Kerases that are installed."""

import ast
import importlib
import inspect

import pytest
import tensorflow as tf

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


@_finds("new")
def uncast_variable_of(kind):
    keras = kind.keras
    layer = keras.layers.Dense(1, dtype="mixed_bfloat16")
    layer.build((None, 1))
    return type(_internals.uncast_variable_of(layer.kernel)) is not type(layer.kernel)


@_finds("new")
def drawing_from(kind):
    layer, ones = kind.keras.layers.Dropout(0.5), tf.ones([1, 64])
    with _internals.drawing_from([layer], lambda: tf.constant([1, 2])):
        drawn = [layer(ones, training=True).numpy().tolist() for _ in range(2)]
    return drawn[0] == drawn[1] != layer(ones, training=True).numpy().tolist()


def _each_keras():
    return [kind.keras for kind in _KINDS.values() if not kind.is_legacy]


@_finds("new")
def MASK(kind):
    x = tf.constant([[0, 1]])
    layers = [keras.layers.Embedding(2, 1, mask_zero=True) for keras in _each_keras()]
    return all(hasattr(layer(x), _internals.MASK) for layer in layers)


@_finds("new")
def LOGITS(kind):
    layers = [keras.layers.Dense(2, "softmax") for keras in _each_keras()]
    return all(hasattr(layer(tf.ones([1, 3])), _internals.LOGITS) for layer in layers)


@_finds("new")
def layers_of(kind):
    for keras in _each_keras():
        layer = keras.layers.Dense(1)
        assert layer in _internals.layers_of(keras.Sequential([layer]))
    return True


@_finds("new")
def steps_per_execution_of(kind):
    for keras in _each_keras():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=3)
        assert _internals.steps_per_execution_of(model) == 3
        model = keras.Sequential([keras.layers.Dense(1)])
        assert _internals.steps_per_execution_of(model) == 1
    return True


def _compiled(keras):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", keras.losses.Huber(), loss_weights=[2.0])
    return model


@_finds("new")
def losses_of_2(kind):
    ((loss, weight),) = _internals.losses_of_2(_compiled(kind.keras), tf.ones([2, 1]))
    return isinstance(loss, kind.keras.losses.Huber) and float(weight) == 2


@_finds(True)
def losses_of_3(kind):
    y = tf.ones([2, 1])
    ((loss, weight),) = _internals.losses_of_3(_compiled(kind.keras), y, y)
    return isinstance(loss, kind.keras.losses.Huber) and weight == 2


@_finds("new")
def matched(kind):
    y, _, weights = _internals.matched(
        kind.keras.__name__, tf.ones([2]), tf.ones([2, 1]), tf.ones([2])
    )
    return y.shape == weights.shape == [2, 1]


@_finds("new")
def step_counters_of(kind):
    return len(_internals.step_counters_of(_compiled(kind.keras))) == 3


@_finds("new")
def is_recorded(kind):
    del kind
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        before = _internals.is_recorded([x])
        tape.watch(x)
        return _internals.is_recorded([x]) and not before


@_finds("new")
def stop_recording(kind):
    del kind
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with _internals.stop_recording():
            return not _internals.is_recorded([x])


@_finds("new")
def has_parameter_servers(kind):
    del kind
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")
    return not _internals.has_parameter_servers(strategy)


@_finds("new")
def has_added_losses(kind):
    for keras in _each_keras():
        layer = keras.layers.ActivityRegularization(1.0)
        layer(tf.ones([1, 1]))
        assert _internals.has_added_losses(layer)
    return True


@_finds(True)
def seeds_of(kind):
    kind.keras.utils.set_random_seed(0)
    layer = kind.keras.layers.Dropout(0.5)
    before = _internals.seeds_of([layer])
    _internals.create_global_seed()
    return (len(before), len(_internals.seeds_of([layer]))) == (1, 2)


@_finds(True)
def create_global_seed(kind):
    return seeds_of(kind)


@_finds(True)
def build_for(kind):
    model = kind.keras.Sequential([kind.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    _internals.build_for(model, (tf.ones([2, 3]), tf.ones([2, 1])))
    return model.built and model.optimizer.built


@_finds(True)
def symbolic_input(kind):
    model = kind.keras.Sequential([kind.keras.layers.Dense(1)])
    model(_internals.symbolic_input(tf.ones([2, 3])))
    return model.built
