"""Models of any Keras, as micro-batches need them."""

import contextlib
import importlib
import itertools
from collections.abc import Callable

import tensorflow as tf

import estimator_accum.keras._internals as internals


def keras_of(model):
    """Returns the module of a model's Keras, None for anything else."""
    roots = {cls.__module__.split(".")[0] for cls in type(model).__mro__}
    root = next((name for name in ("keras", "tf_keras") if name in roots), None)
    return importlib.import_module(root) if root else None


class Model2:
    """Models of Keras 2."""

    has_seed_variables = False

    @staticmethod
    def trained_variables(model) -> list[tf.Variable]:
        """Returns the trained variables, which read without a cast."""
        return list(map(internals.uncast_variable_of, model.trainable_variables))

    @staticmethod
    def seeds_of(model) -> list[tf.Variable]:
        """Returns no variables: random numbers come from `drawing_from`."""
        del model
        return []

    @staticmethod
    def counters_of(model) -> list[tf.Variable]:
        """Returns the variables that count steps, also those that fail."""
        return internals.step_counters_of(model)

    @staticmethod
    def variables_of(metric) -> list[tf.Variable]:
        """Returns the variables of a metric."""
        return list(metric.variables)

    @staticmethod
    def create_variables(model, data, is_predicted: bool) -> None:
        """Does nothing: a step that fails leaves variables with their values."""
        del model, data, is_predicted

    @staticmethod
    def step_of(model, function: Callable, spec) -> Callable:
        """Returns a function of one batch from Keras's function of an iterator."""
        del spec
        if model.run_eagerly:
            return lambda data: function(iter([data]))
        run = function.python_function
        return tf.function(lambda data: run(iter([data])), reduce_retracing=True)

    @staticmethod
    def losses_of(model, output, target) -> list:
        """Returns (loss, weight) of each output, as `compile` got them."""
        del target
        return internals.losses_of_2(model, output)

    @staticmethod
    def scales_losses(model) -> bool:
        """Returns whether the gradient of a loss may be another one than 1."""
        return hasattr(model.optimizer, "get_scaled_loss")

    @staticmethod
    def part_of_replica() -> float:
        """Returns the factor of a loss's mean, which sums over replicas follow."""
        return 1 / tf.distribute.get_strategy().num_replicas_in_sync

    @staticmethod
    def arguments_of_loss(root: str, output, target, weights=None) -> list:
        """Returns output, target and weights as Keras hands them to a loss."""
        target, output, weights = internals.matched(root, target, output, weights)
        return [output, target, weights]

    @staticmethod
    def drawing_from(model, seed: tf.Tensor):
        """Lets layers such as Dropout draw from a seed, in place of hidden states."""
        numbers = itertools.count()

        def next_seed():
            return tf.random.experimental.stateless_fold_in(seed, next(numbers))

        return internals.drawing_from(internals.layers_of(model), next_seed)


class Model3:
    """Models of Keras 3."""

    has_seed_variables = True

    @staticmethod
    def trained_variables(model) -> list[tf.Variable]:
        """Returns the trained variables, which read without a cast."""
        return list(map(internals.tf_variable_of, model.trainable_variables))

    @staticmethod
    def seeds_of(model) -> list[tf.Variable]:
        """Returns the variables of random seeds."""
        return internals.seeds_of(internals.layers_of(model))

    @staticmethod
    def counters_of(model) -> list[tf.Variable]:
        """Returns no variables: no step counts itself."""
        del model
        return []

    @staticmethod
    def variables_of(metric) -> list[tf.Variable]:
        """Returns the variables of a metric."""
        return list(map(internals.tf_variable_of, metric.variables))

    @staticmethod
    def create_variables(model, data, is_predicted: bool) -> None:
        """Creates all variables: those of a step that fails would have no value."""
        internals.create_global_seed()
        if not is_predicted:
            internals.build_for(model, data)
        elif not all(layer.built for layer in internals.layers_of(model)):
            inputs = data[0][0] if isinstance(data[0], tuple) else data[0]
            model(tf.nest.map_structure(internals.symbolic_input, inputs))

    @staticmethod
    def step_of(model, function: Callable, spec) -> Callable:
        """Returns a function of one batch from Keras's function of an iterator.

        Args:
            model: The model.
            function: Keras's function.
            spec: The iterator's `element_spec`, by whose sizes Keras weights the losses
                of outputs that it shows; None if it has none.
        """
        if spec is None or model.run_eagerly:
            return lambda data: function(iter([data]))
        return tf.function(lambda data: function(iter([data])), [spec], autograph=False)

    @staticmethod
    def losses_of(model, output, target) -> list:
        """Returns (loss, weight) of each output, as `compile` got them."""
        return internals.losses_of_3(model, output, target)

    @staticmethod
    def scales_losses(model) -> bool:
        """Returns whether the gradient of a loss may be another one than 1."""
        factor = getattr(model.optimizer, "loss_scale_factor", None)
        return factor is not None or hasattr(model.optimizer, "inner_optimizer")

    @staticmethod
    def part_of_replica() -> float:
        """Returns 1: a loss's mean has the factor already."""
        return 1.0

    @staticmethod
    def arguments_of_loss(root: str, output, target, weights=None) -> list:
        """Returns output, target and weights as Keras hands them to a loss."""
        del root
        return [output, target, weights]

    @staticmethod
    def drawing_from(model, seed: tf.Tensor):
        """Does nothing: the seeds are variables."""
        del model, seed
        return contextlib.nullcontext()
