"""Serialization: methods for `model.save`, `load_model`, `set_weights`."""

import importlib
import inspect
import logging

import numpy as np

_logger = logging.getLogger("tensorflow.estimator_accum")
_MAY_BE_CALLABLE = ("gradient_accumulation_steps", "weight")


class Saving:
    """Serialization part of `_optimizer.Accumulating`."""

    def get_config(self) -> dict:
        """Returns the config for `from_config`, the wrapped optimizer included."""
        keras = importlib.import_module(self._ROOT)
        config = {
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "weight": self.weight,
            "on_nonfinite": self.on_nonfinite,
            **self._CONFIG,
        }
        with self._new_format():
            config["optimizer"] = keras.saving.serialize_keras_object(self._inner)
            for name in _MAY_BE_CALLABLE:
                if callable(config[name]):
                    _check_that_it_can_be_saved(name, config[name])
                    config[name] = keras.saving.serialize_keras_object(config[name])
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Returns an optimizer from the config of `get_config`."""
        keras = importlib.import_module(cls._ROOT)
        config = {**config}
        config.pop("is_legacy_optimizer", None)
        with cls._new_format():
            inner = cls._deserialize(keras, config.pop("optimizer"), custom_objects)
            for name in _MAY_BE_CALLABLE:
                if isinstance(config[name], (dict, str)):
                    config[name] = keras.saving.deserialize_keras_object(
                        config[name], custom_objects=custom_objects
                    )
        return cls(inner, **config)

    def set_weights(self, weights) -> None:
        """Sets all variables, in the order of `variables`."""
        if not self._indices:  # not built, which Keras refuses
            return self._inner.set_weights(weights)
        variables = self._all_variables()
        if len(weights) != len(variables):
            raise ValueError(
                "`weights` must hold one array for each of the optimizer's "
                f"{len(variables)} variables, those of the window included. Received: "
                f"{len(weights)}. Set the weights of an optimizer with the same "
                "gradient_accumulation_steps, weight and on_nonfinite."
            )
        self._assign(variables, weights)

    def _assign(self, variables, values) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(np.asarray(value))  # a strategy takes no h5py.Dataset

    def save_own_variables(self, store) -> None:
        """Writes all variables, for `model.save`."""
        for i, variable in enumerate(self._all_variables()):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store) -> None:
        """Reads all variables, or the wrapped optimizer's if one of both has no window."""
        variables = self._all_variables()
        inner = self._inner_variables()
        number = len(store.keys()) - len(inner)
        if number == 0:
            variables = inner
        elif self._window is None and number == self._number_of_window():
            if np.asarray(store[str(len(inner))]) != 0:
                _logger.warning(
                    "%s: the open window of the file is left out, since this optimizer "
                    "updates at each micro-step.",
                    self.name,
                )
            return self._assign(inner, [store[str(i)] for i in range(len(inner))])
        if len(store.keys()) != len(variables):
            return super().load_own_variables(store)  # warns
        self._assign(variables, [store[str(i)] for i in range(len(variables))])

    def _number_of_window(self) -> int:
        """Returns how many variables a window of the trained variables has."""
        # `Variables.saved`: sums, and rows of those that may be sparse.
        variables = map(self._tf_variable, self._trained_variables)
        return 4 + sum(1 + bool(variable.shape.rank) for variable in variables)

    def _all_variables(self) -> list:
        state = [] if self._window is None else self._window.saved
        return [*self._inner_variables(), *state]


def _check_that_it_can_be_saved(name, value) -> None:
    if not inspect.isfunction(value) and not hasattr(value, "get_config"):
        raise TypeError(
            f"`{name}` must be a function, or an object with get_config(), to be saved "
            f"with the model. Received: {value!r}. Define a function, register it by "
            "keras.saving.register_keras_serializable(), and pass it to accumulate()."
        )
