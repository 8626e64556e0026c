"""Names of Keras that are not public.

The adapters reach them through this file, and each one says what breaks if Keras renames
it. A function here then raises AttributeError or ImportError, or says that it does not. A
test finds every name in the Kerases that are installed.
"""

import contextlib
import importlib
import sys

import tensorflow as tf

# The base classes by which `accumulate` knows an optimizer. If renamed, it refuses all.
LEGACY, KERAS_2, KERAS_3 = "OptimizerV2", "_BaseOptimizer", "BaseOptimizer"

# Keras 2: `root` is "keras" up to TensorFlow 2.15, or "tf_keras".


def new_format(root: str):
    """Returns the context of configs in the new format. If renamed, saving fails."""
    module = importlib.import_module(f"{root}.src.saving.legacy.saved_model.utils")
    return module.keras_option_scope(save_traces=False, in_tf_saved_model_scope=False)


def with_gradients(root: str, pairs: list) -> list:
    """Returns pairs with a gradient, and warns. If renamed, training fails."""
    # AutoGraph would convert an import.
    return sys.modules[f"{root}.src.optimizers.utils"].filter_empty_gradients(pairs)


def track_variable(root: str, variable: tf.Variable) -> None:
    """Has a session initialize a variable. If renamed, legacy ones fail in a session."""
    importlib.import_module(root).__internal__.backend.track_variable(variable)


# Legacy optimizers of Keras 2, which also call the last four of an adapter.


def scope_of(optimizer) -> str:
    """Returns the scope of its variables. If renamed, legacy ones are not built."""
    return optimizer._name


def create_weights(optimizer, variables: list) -> None:
    """Creates its variables. If renamed, legacy ones are not built."""
    optimizer._create_all_weights(variables)


def compute_gradients(optimizer, *args, **kwargs) -> list:
    """Returns (gradient, variable) pairs. If renamed, `minimize` fails."""
    return optimizer._compute_gradients(*args, **kwargs)


def restore_slot(optimizer, *args, **kwargs):
    """Restores a slot of a checkpoint. If renamed, slots are restored late."""
    return optimizer._restore_slot_variable(*args, **kwargs)


def create_or_restore_slot(optimizer, *args, **kwargs):
    """Restores a slot, or makes it. If renamed, reading a checkpoint fails."""
    return optimizer._create_or_restore_slot_variable(*args, **kwargs)


# Models of Keras 2 and 3.


def steps_per_execution_of(model) -> int:
    """Returns the steps of one call. If renamed, `microbatch` fails."""
    steps = getattr(model, "steps_per_execution", None)  # of Keras 3
    steps = model._steps_per_execution if steps is None else steps
    # None: Keras 2, not compiled. A strategy's variable is no number.
    return 1 if steps is None else int(tf.convert_to_tensor(steps))


@contextlib.contextmanager
def one_eager_step(model):
    """Has Keras make functions of one step without tf.function, in which a step is split.

    If renamed, a step is within a function, which is refused.
    """
    names = ("_run_eagerly", "_steps_per_execution", "_autotune_steps_per_execution")
    before = {name: getattr(model, name) for name in names if hasattr(model, name)}
    try:
        for name, value in zip(names, (True, None, False), strict=True):
            if name in before:
                object.__setattr__(model, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(model, name, value)


def specs_of(batches) -> tuple | None:
    """Returns the types of a batch, as a step sees them; None if the batches have none.

    If renamed, the batches of several replicas are refused.
    """

    def spec_of(spec):
        if isinstance(spec, tf.OptionalSpec):  # see without_optionals
            return None
        return getattr(spec, "_value_specs", [spec])[0]  # of the first replica

    spec = getattr(batches, "element_spec", None)
    return None if spec is None else (tf.nest.map_structure(spec_of, spec),)


def without_optionals(data):
    """Returns a batch with None for each Optional. If renamed, Keras 3 fails."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )


# Keras 3.

# Attribute with the averages of weights. If renamed, SwapEMAWeights finds none.
AVERAGES = "_model_variables_moving_average"


def tf_variable_of(variable) -> tf.Variable:
    """Returns a variable's tf.Variable. If renamed, itself, with which training fails."""
    return getattr(variable, "_value", variable)


def filter_gradients(optimizer, pairs: list) -> list:
    """Returns pairs with a gradient, and warns. If renamed, training fails."""
    return list(zip(*optimizer._filter_empty_gradients(*zip(*pairs))))


def trained_by(optimizer) -> list:
    """Returns the variables of a built one. If renamed, `apply` without them fails."""
    return optimizer._trainable_variables


def sums_over_replicas(optimizer) -> bool:
    """Returns whether its own sum is known. If renamed, several replicas are refused."""
    return hasattr(optimizer, "_all_reduce_sum_gradients")


def leave_gradients_unsummed(optimizer) -> None:
    """Turns its own sum over replicas off; see `sums_over_replicas`."""
    optimizer._all_reduce_sum_gradients = list


def unpickled(saved):
    """Returns the optimizer of a pickle. If renamed, pickles cannot be read."""
    return importlib.import_module("keras").Optimizer._unpickle_model(saved)
