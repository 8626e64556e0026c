"""What differs between Kerases: three families of optimizers, one adapter each.

    keras 3                        `Keras3`
    tf.keras 2.15 and tf_keras     `Keras2`, and `Keras2Legacy` for
                                   `optimizers.legacy`, that tf.estimator works with

The adapters are the family's half of `optimizer.Accumulating`; the other half, with the
rule, is the same for all of them.
"""

import importlib

import tensorflow as tf

_OPTIMIZER_NAMES = {
    "OptimizerV2": "Keras2Legacy",
    "_BaseOptimizer": "Keras2",
    "BaseOptimizer": "Keras3",
}


def find_family(optimizer) -> tuple[str, str] | None:
    """Returns ("keras" or "tf_keras", name of the adapter); None for other objects."""
    for cls in type(optimizer).__mro__:
        root = cls.__module__.split(".")[0]
        if root in ("keras", "tf_keras") and cls.__name__ in _OPTIMIZER_NAMES:
            return root, _OPTIMIZER_NAMES[cls.__name__]
    return None


class Keras2:
    """Adapter of `optimizers.Optimizer` of Keras 2."""

    # XLA's tf.unique, by which it sums a row's slices, counts padding as row 0.
    _has_sparse_xla = False

    @staticmethod
    def _bases(keras) -> tuple[type, type]:
        optimizer = keras.optimizers.Optimizer
        return optimizer, keras.mixed_precision.LossScaleOptimizer

    @staticmethod
    def _deserialize(keras, config, custom_objects):
        # h5 files have a format of their own.
        return keras.optimizers.deserialize(
            config, custom_objects, use_legacy_format="module" not in config
        )

    @staticmethod
    def _tf_variable(variable) -> tf.Variable:
        return variable

    @staticmethod
    def _name_of(variable) -> str:
        return variable.name.partition(":")[0]

    def _build_inner(self, variables) -> None:
        inner = self.inner_optimizer
        with tf.name_scope(inner.name or "optimizer"), tf.init_scope():
            inner.build(variables)

    def _inner_variables(self) -> list:
        return list(self.inner_optimizer.variables)

    def _apply_reduced(self, pairs):
        self.inner_optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
        return []

    def _run_plain(self, pairs, is_reduced: bool):
        self.inner_optimizer.apply_gradients(
            pairs, skip_gradients_aggregation=is_reduced
        )

    def compute_gradients(self, loss, var_list, tape=None):
        """Returns the (gradient, variable) pairs of the wrapped optimizer."""
        pairs = self.inner_optimizer.compute_gradients(loss, var_list, tape)
        self._remember_loss(loss)
        return pairs

    def get_scaled_loss(self, loss):
        """Of a wrapped LossScaleOptimizer."""
        return self.inner_optimizer.get_scaled_loss(loss)

    def get_unscaled_gradients(self, grads):
        """Of a wrapped LossScaleOptimizer."""
        return self.inner_optimizer.get_unscaled_gradients(grads)

    def apply_gradients(
        self,
        grads_and_vars,
        name=None,
        skip_gradients_aggregation=False,
        weight=None,
        *,
        experimental_aggregate_gradients=True,
    ):
        """Accumulates one micro-batch; at the boundary, applies the mean.

        Args:
            grads_and_vars: (gradient, variable) pairs.
            name: Ignored.
            skip_gradients_aggregation: Whether the caller has summed over replicas.
            weight: Scalar, what the micro-batch counts for; None is what `accumulate`
                was told.
            experimental_aggregate_gradients: The same from another version.

        Returns:
            `iterations`, the number of updates.
        """
        del name
        is_reduced = skip_gradients_aggregation or not experimental_aggregate_gradients
        self._accumulate(grads_and_vars, weight, is_reduced)
        return self.iterations

    @property
    def variables(self):
        """The wrapped optimizer's variables, then those of the window."""
        return type(self.inner_optimizer.variables)(self._all_variables())

    @property
    def lr(self):
        """The wrapped optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @lr.setter
    def lr(self, value):
        self.inner_optimizer.learning_rate = value

    def _family_config(self) -> dict:
        return {"is_legacy_optimizer": False}


class Keras2Legacy(Keras2):
    """Adapter of `optimizers.legacy.Optimizer`, in graphs too."""

    _HAS_AGGREGATE_GRAD = True

    @staticmethod
    def _bases(keras) -> tuple[type, type]:
        optimizer = keras.optimizers.legacy.Optimizer
        return optimizer, keras.mixed_precision.LossScaleOptimizer

    def _build_inner(self, variables) -> None:
        with tf.name_scope(self._innermost._name), tf.init_scope():
            self.inner_optimizer._create_all_weights(variables)

    def _inner_variables(self) -> list:
        return list(self.inner_optimizer.variables())

    def _apply_reduced(self, pairs):
        return [
            self.inner_optimizer.apply_gradients(
                pairs, experimental_aggregate_gradients=False
            )
        ]

    def _run_plain(self, pairs, is_reduced: bool):
        done = self.inner_optimizer.apply_gradients(
            pairs, experimental_aggregate_gradients=not is_reduced
        )
        with tf.control_dependencies([] if done is None else [done]):
            return tf.constant(True)

    def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
        pairs = self.inner_optimizer._compute_gradients(
            loss, var_list, grad_loss, tape=tape
        )
        self._remember_loss(loss)
        return pairs

    def get_gradients(self, loss, params):
        """Returns the gradients of the wrapped optimizer, in a graph."""
        gradients = self.inner_optimizer.get_gradients(loss, params)
        self._remember_loss(loss)
        return gradients

    def apply_gradients(
        self,
        grads_and_vars,
        name=None,
        experimental_aggregate_gradients=True,
        weight=None,
    ):
        """Accumulates one micro-batch; at the boundary, applies the mean.

        Args:
            grads_and_vars: (gradient, variable) pairs.
            name: Ignored.
            experimental_aggregate_gradients: False where the caller has summed over
                replicas.
            weight: Scalar, what the micro-batch counts for; None is what `accumulate`
                was told.

        Returns:
            The operation, in graphs; it moves what was assigned to `iterations`, an
            Estimator's global step, by one.
        """
        del name
        is_reduced = not experimental_aggregate_gradients
        done = self._accumulate(grads_and_vars, weight, is_reduced)
        if self._clock is None:
            return done.op if _is_in_a_session() else done
        with tf.control_dependencies([done]):
            return self._clock.assign_add(1, read_value=False)

    @property
    def iterations(self):
        """The number of updates."""
        return self.inner_optimizer.iterations

    @iterations.setter
    def iterations(self, variable):
        self._clock = variable  # tf.estimator's global step, which counts micro-steps

    def variables(self):
        """Returns the wrapped optimizer's variables, then those of the window."""
        return self._all_variables()

    @property
    def weights(self):
        """The same as `variables()`."""
        return self._all_variables()

    def get_slot(self, var, slot_name):
        """Returns the wrapped optimizer's slot."""
        return self.inner_optimizer.get_slot(var, slot_name)

    def get_slot_names(self):
        """Returns the names of the wrapped optimizer's slots."""
        return self.inner_optimizer.get_slot_names()

    def _create_all_weights(self, var_list):
        self.build(list(var_list))

    def _restore_slot_variable(self, *args, **kwargs):
        return self.inner_optimizer._restore_slot_variable(*args, **kwargs)

    def _create_or_restore_slot_variable(self, *args, **kwargs):
        return self.inner_optimizer._create_or_restore_slot_variable(*args, **kwargs)

    def get_weights(self):
        """Returns the values of `weights`."""
        return tf.compat.v1.keras.backend.batch_get_value(self.weights)

    def _family_config(self) -> dict:
        return {"is_legacy_optimizer": True}


class Keras3:
    """Adapter of `optimizers.Optimizer` of Keras 3 on TensorFlow."""

    _has_sparse_xla = True

    @staticmethod
    def _bases(keras) -> tuple[type, type]:
        return keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer

    @staticmethod
    def _deserialize(keras, config, custom_objects):
        return keras.optimizers.deserialize(config, custom_objects)

    @staticmethod
    def _tf_variable(variable) -> tf.Variable:
        return getattr(variable, "_value", variable)

    @staticmethod
    def _name_of(variable) -> str:
        return getattr(variable, "path", None) or variable.name.partition(":")[0]

    def _build_inner(self, variables) -> None:
        self.inner_optimizer.build(variables)
        if not self._is_plain:  # it has no argument for this
            self._innermost._all_reduce_sum_gradients = list

    def _all_variables(self) -> list:
        variables = super()._all_variables()
        for variable in variables:
            if not hasattr(variable, "path"):  # which h5 files ask for
                variable.path = self._name_of(variable)
        return variables

    def _inner_variables(self) -> list:
        return list(self.inner_optimizer.variables)

    def _apply_reduced(self, pairs):
        self.inner_optimizer.apply_gradients(pairs)
        return []

    def _run_plain(self, pairs, is_reduced: bool):
        self.inner_optimizer.apply_gradients(pairs)

    def scale_loss(self, loss):
        """Scales as the wrapped optimizer does."""
        self._remember_loss(loss)
        return self.inner_optimizer.scale_loss(loss)

    def apply_gradients(self, grads_and_vars, weight=None):
        """Accumulates one micro-batch; at the boundary, applies the mean.

        Args:
            grads_and_vars: (gradient, variable) pairs.
            weight: Scalar, what the micro-batch counts for; None is what `accumulate`
                was told.

        Returns:
            `iterations`, the number of updates.
        """
        self._accumulate(grads_and_vars, weight, is_reduced=False)
        return self.iterations

    def apply(self, grads, trainable_variables=None):
        """The same, for gradients in the order of the variables."""
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        self.apply_gradients(list(zip(grads, trainable_variables, strict=True)))

    @property
    def variables(self):
        """The wrapped optimizer's variables, then those of the window."""
        return self._all_variables()

    def _family_config(self) -> dict:
        return {}


def _is_in_a_session() -> bool:
    return not tf.compat.v1.executing_eagerly_outside_functions()


def load(root: str):
    """Returns the module `keras` or `tf_keras`."""
    return importlib.import_module(root)
