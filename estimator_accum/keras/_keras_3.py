"""Adapter for Keras 3."""

import contextlib
import importlib

import tensorflow as tf

import estimator_accum.keras._internals as internals


class Keras3:
    """Adapter for `optimizers.Optimizer` of Keras 3 on TensorFlow."""

    _KIND, _CONFIG = "", {}
    _has_sparse_xla = True

    @staticmethod
    def _bases(keras) -> tuple[type, type]:
        return keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer

    @staticmethod
    def _new_format():
        return contextlib.nullcontext()

    @staticmethod
    def _deserialize(keras, config, custom_objects):
        # keras.optimizers.deserialize() knows only the classes of a list.
        return keras.saving.deserialize_keras_object(config, custom_objects)

    @staticmethod
    def _tf_variable(variable) -> tf.Variable:
        return internals.tf_variable_of(variable)

    @staticmethod
    def _name_of(variable) -> str:
        return getattr(variable, "path", None) or variable.name.partition(":")[0]

    def _build_inner(self, variables) -> None:
        self.inner_optimizer.build(variables)
        # SwapEMAWeights looks for averages one level below the model's optimizer.
        for name in ("optimizers", internals.AVERAGES):
            if hasattr(self._innermost, name):
                vars(self._inner)[name] = getattr(self._innermost, name)
        if not self._is_plain:  # apply_gradients() has no argument to skip the sum
            for optimizer in self._parts or [self._innermost]:
                _check_sum(optimizer)
                internals.leave_gradients_unsummed(optimizer)

    @property
    def _parts(self) -> list:
        """The optimizers of a MultiOptimizer."""
        return getattr(self._innermost, "optimizers", [])

    def _all_variables(self) -> list:
        variables = super()._all_variables()
        for variable in variables:
            if not hasattr(variable, "path"):  # which h5 files need
                variable.path = self._name_of(variable)
        return variables

    def _inner_variables(self) -> list:
        return list(self.inner_optimizer.variables)

    def _without_empty(self, pairs):
        """Returns the pairs that have a gradient; warns of the others, as Keras does."""
        return internals.filter_gradients(self._innermost, pairs)

    def _apply_reduced(self, pairs):
        if self._parts:  # a MultiOptimizer takes all variables, also without gradient
            keys = {self._key(v) for _, v in pairs}
            others = (v for v in self._trained_variables if self._key(v) not in keys)
            pairs = [*pairs, *((None, v) for v in others)]
        self.inner_optimizer.apply_gradients(pairs)
        return []

    def _run_plain(self, pairs, is_reduced: bool):
        self.inner_optimizer.apply_gradients(pairs)

    def scale_loss(self, loss):
        """Returns the loss as the wrapped optimizer scales it."""
        self._remember_loss(loss)
        return self.inner_optimizer.scale_loss(loss)

    def apply_gradients(self, grads_and_vars, weight=None):
        """Accumulates one micro-batch; at the boundary, applies the mean.

        Args:
            grads_and_vars: (gradient, variable) pairs.
            weight: Scalar, the micro-batch's weight; None takes `accumulate`'s
                `weight`.

        Returns:
            `iterations`, the number of updates.
        """
        self._accumulate(grads_and_vars, weight, is_reduced=False)
        return self.iterations

    def apply(self, grads, trainable_variables=None):
        """Calls `apply_gradients` with gradients in the order of the variables."""
        if trainable_variables is None:
            trainable_variables = internals.trained_by(self)
        self.apply_gradients(list(zip(grads, trainable_variables, strict=True)))

    @property
    def variables(self):
        """The wrapped optimizer's variables, then those of the window."""
        return self._all_variables()

    def __reduce__(self):
        """Returns the parts from which `pickle` and `copy.deepcopy` make the same optimizer."""
        _, saved = super().__reduce__()
        return _unpickle, saved  # no module has a class of this optimizer's name


def _check_sum(optimizer) -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1 and not internals.sums_over_replicas(optimizer):
        raise RuntimeError(
            "Gradients must be summed over replicas once per window, by accumulate(). "
            f"Received: {replicas} replicas and a {type(optimizer).__name__} of Keras "
            f"{importlib.import_module('keras').__version__}, whose own sum is not where "
            "it was in Keras 3.0 to 3.15. Install one of these, or use one replica."
        )


def _unpickle(saved):
    return internals.unpickled(saved)
