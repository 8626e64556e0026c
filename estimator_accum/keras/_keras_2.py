"""Adapters for Keras 2: tf.keras 2.15, tf_keras."""

import importlib

import tensorflow as tf

import estimator_accum.keras._internals as internals
from estimator_accum.keras._optimizer import WINDOW


class Keras2:
    """Adapter for `optimizers.Optimizer` of Keras 2."""

    _KIND, _CONFIG = "", {"is_legacy_optimizer": False}
    # Keras 2 sums a row's slices by tf.unique, which in XLA counts padding as row 0.
    _has_sparse_xla = False

    @staticmethod
    def _bases(keras) -> tuple[type, type]:
        optimizer = keras.optimizers.Optimizer
        return optimizer, keras.mixed_precision.LossScaleOptimizer

    @classmethod
    def _new_format(cls):
        # load_model() of h5 files and SavedModels turns all readers to the old format,
        # but nested configs have the new one.
        return internals.new_format(cls._ROOT)

    @classmethod
    def _deserialize(cls, keras, config, custom_objects):
        if config["class_name"].startswith("LossScaleOptimizer"):
            # Its from_config() calls keras.optimizers.deserialize().
            inside = {**config["config"]}
            inside["inner_optimizer"] = cls._deserialize(
                keras, inside["inner_optimizer"], custom_objects
            )
            config = {**config, "config": inside}
        if "module" in config:
            return keras.saving.deserialize_keras_object(config, custom_objects)
        # Of the old format, which TensorFlow 1's behavior writes. In the new one this
        # function knows only the classes of a list, and returns the names of others.
        return keras.optimizers.deserialize(
            config, custom_objects, use_legacy_format=True
        )

    @staticmethod
    def _tf_variable(variable) -> tf.Variable:
        return variable

    @staticmethod
    def _name_of(variable) -> str:
        return variable.name.partition(":")[0]

    def _build_inner(self, variables) -> None:
        inner = self.inner_optimizer
        with tf.name_scope(self._innermost.name or "optimizer"), tf.init_scope():
            inner.build(variables)

    def _inner_variables(self) -> list:
        return list(self.inner_optimizer.variables)

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        """Returns the parts in checkpoints, with the window.

        tf_keras keeps its first answer, which a restore may ask for before the build.
        """
        children = super()._trackable_children(save_type, **kwargs)
        if self._window is None:
            return children
        return {**children, WINDOW: self._window}

    def _without_empty(self, pairs):
        """Returns the pairs that have a gradient; warns of the others, as Keras does."""
        return internals.with_gradients(self._ROOT, pairs)

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
        """Delegates to the wrapped LossScaleOptimizer."""
        return self.inner_optimizer.get_scaled_loss(loss)

    def get_unscaled_gradients(self, grads):
        """Delegates to the wrapped LossScaleOptimizer."""
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
            skip_gradients_aggregation: Whether the caller has already summed over
                replicas.
            weight: Scalar, the micro-batch's weight; None takes `accumulate`'s
                `weight`.
            experimental_aggregate_gradients: The opposite of
                `skip_gradients_aggregation`, from older versions.

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


class Keras2Legacy(Keras2):
    """Adapter for `optimizers.legacy.Optimizer`, in graphs too."""

    _KIND, _CONFIG = "Legacy", {"is_legacy_optimizer": True}
    _TAKES_MORE_VARIABLES = True
    _HAS_AGGREGATE_GRAD = True

    @staticmethod
    def _bases(keras) -> tuple[type, type]:
        optimizer = keras.optimizers.legacy.Optimizer
        return optimizer, keras.mixed_precision.LossScaleOptimizer

    def _build_inner(self, variables) -> None:
        scope = internals.scope_of(self._innermost)
        with tf.name_scope(scope), tf.init_scope():
            internals.create_weights(self.inner_optimizer, variables)

    def build(self, variables) -> None:
        """Creates the wrapped optimizer's variables and the window's."""
        super().build(variables)
        if self._window is not None and _is_in_a_session():
            # Keras initializes only the variables that it tracks.
            for variable in self._window.saved:
                internals.track_variable(self._ROOT, variable)

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
        arguments = (loss, var_list, grad_loss, tape)
        pairs = internals.compute_gradients(self.inner_optimizer, *arguments)
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
            experimental_aggregate_gradients: False if the caller has already summed
                over replicas.
            weight: Scalar, the micro-batch's weight; None takes `accumulate`'s
                `weight`.

        Returns:
            The operation, in graphs; it adds 1 to the variable that was assigned to
            `iterations`, an Estimator's global step.
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
        """The variables that `variables()` returns."""
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
        return internals.restore_slot(self.inner_optimizer, *args, **kwargs)

    def _create_or_restore_slot_variable(self, *args, **kwargs):
        return internals.create_or_restore_slot(self.inner_optimizer, *args, **kwargs)

    def get_weights(self):
        """Returns the values of `weights`."""
        keras = importlib.import_module(self._ROOT)
        return keras.backend.batch_get_value(self.weights)

    def _assign(self, variables, values) -> None:
        # In a session, `assign` would only make operations.
        keras = importlib.import_module(self._ROOT)
        keras.backend.batch_set_value(list(zip(variables, values, strict=True)))


def _is_in_a_session() -> bool:
    return not tf.compat.v1.executing_eagerly_outside_functions()
