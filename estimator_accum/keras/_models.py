"""Models of Keras 2 and Keras 3, as micro-batches need them."""

import contextlib
import itertools

import tensorflow as tf

import estimator_accum.keras._internals as internals


class Model2:
    """Models of Keras 2."""

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
    def drawing_from(model, seed: tf.Tensor):
        """Lets layers such as Dropout draw from a seed, in place of hidden states."""
        numbers = itertools.count()

        def next_seed():
            return tf.random.experimental.stateless_fold_in(seed, next(numbers))

        return internals.drawing_from(internals.layers_of(model), next_seed)


class Model3:
    """Models of Keras 3."""

    @staticmethod
    def trained_variables(model) -> list[tf.Variable]:
        """Returns the trained variables, which read without a cast."""
        return list(map(internals.tf_variable_of, model.trainable_variables))

    @staticmethod
    def seeds_of(model) -> list[tf.Variable]:
        """Returns the variables of random seeds."""
        return internals.seeds_of(internals.layers_of(model))

    @staticmethod
    def drawing_from(model, seed: tf.Tensor):
        """Does nothing: the seeds are variables."""
        del model, seed
        return contextlib.nullcontext()
