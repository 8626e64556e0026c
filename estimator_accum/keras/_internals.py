"""Names of Keras that are not public.

The adapters reach them through this file, and each one says what breaks if Keras renames
it. A function here then raises AttributeError or ImportError, or says that it does not. A
test finds every name in the Kerases that are installed.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable

import tensorflow as tf

try:
    from tensorflow.python.eager import record
except ImportError:  # before TensorFlow 2.13, with which no function here is called
    record = None

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


def uncast_variable_of(variable) -> tf.Variable:
    """Returns a variable that reads uncast. If renamed, itself: gradients lose digits."""
    return getattr(variable, "_variable", variable)


@contextlib.contextmanager
def drawing_from(layers: list, next_seed: Callable):
    """Has random layers draw from seeds. If renamed, dropout in a cut model fails."""
    generators = [getattr(layer, "_random_generator", None) for layer in layers]
    generators = [generator for generator in generators if generator is not None]
    kinds = [generator._rng_type for generator in generators]
    try:
        for generator in generators:
            generator._maybe_init()
            generator._rng_type = generator.RNG_STATELESS
            generator.make_seed_for_stateless_op = next_seed
        yield
    finally:
        for generator, kind in zip(generators, kinds, strict=True):
            generator._rng_type = kind
            vars(generator).pop("make_seed_for_stateless_op", None)


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

# Attribute of a tensor with its mask. If renamed, a loss gets no mask of a cut model.
MASK = "_keras_mask"

# Attribute of a tensor with the logits from which an activation made it. If renamed, a
# crossentropy takes the probabilities of a cut model, and its logits where it is whole.
LOGITS = "_keras_logits"


def layers_of(model) -> list:
    """Returns the model and all layers in it. If renamed, `microbatch` fails."""
    return list(model._flatten_layers())


def steps_per_execution_of(model) -> int | str:
    """Returns the steps of one call. If renamed, `microbatch` with "auto" fails."""
    if getattr(model, "autotune_steps_per_execution", False):  # of Keras 2
        return "auto"
    steps = getattr(model, "steps_per_execution", None)  # of Keras 3
    steps = model._steps_per_execution if steps is None else steps
    # None: Keras 2, not compiled. A strategy's variable is no number.
    return 1 if steps is None else int(tf.convert_to_tensor(steps))


def step_counters_of(model) -> list[tf.Variable]:
    """Returns the counters of Keras 2. If renamed, `microbatch` with "auto" fails."""
    return [model._train_counter, model._test_counter, model._predict_counter]


def has_added_losses(layer) -> bool:
    """Returns whether it added losses in its last call. If renamed, a cut model fails."""
    return bool(layer._losses or getattr(layer, "_eager_losses", None))


def losses_of_2(model, output) -> list:
    """Returns (loss, weight) pairs. If renamed, a cut model of Keras 2 fails."""
    losses = model.compiled_loss
    if not losses.built:
        losses.build(output)
    return list(zip(losses._losses, losses._loss_weights, strict=True))


def matched(root: str, *tensors) -> tuple:
    """Returns target, output, weights as a loss gets them. If renamed, training fails."""
    module = sys.modules[f"{root}.src.engine.compile_utils"]
    return module.match_dtype_and_rank(*tensors)


def losses_of_3(model, output, target) -> list:
    """Returns (loss, weight) pairs. If renamed, a cut model of Keras 3 fails."""
    losses = model._compile_loss
    if losses is None:
        return []
    if not losses.built:
        losses.build(target, output)
    return [(loss.loss, loss.loss_weights) for loss in losses._flat_losses]


# TensorFlow, as micro-batches need it.


def is_recorded(tensors: list[tf.Tensor]) -> bool:
    """Returns whether a tape watches any. If renamed, a cut model fails."""
    return record.should_record_backprop(tensors)


def stop_recording():
    """Returns a context in which no tape records. If renamed, a cut model fails."""
    return record.stop_recording()


def has_parameter_servers(strategy) -> bool:
    """Returns whether it has some. If renamed, cut models and `accumulate` fail."""
    return strategy._should_use_with_coordinator


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


def seeds_of(layers: list) -> list[tf.Variable]:
    """Returns the variables of random seeds. If renamed, a cut model fails."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    # Each thread has its own, and so has each replica; one that has none drew nothing.
    generator = state.get_global_attribute("global_seed_generator")
    generators = [] if generator is None else [generator]
    for layer in layers:
        generators += layer._seed_generators
    return [tf_variable_of(generator.state) for generator in generators]


def create_global_seed() -> None:
    """Creates the seed of this thread. If renamed, `microbatch` with "auto" fails."""
    importlib.import_module("keras.src.random.seed_generator").global_seed_generator()


def build_for(model, data) -> None:
    """Creates all variables of steps. If renamed, `microbatch` with "auto" fails."""
    model._symbolic_build(data_batch=data)


def symbolic_input(value: tf.Tensor):
    """Returns Keras 3's tensor without numbers, which is public there alone."""
    keras = importlib.import_module("keras")
    return keras.KerasTensor(value.shape, value.dtype.name)
