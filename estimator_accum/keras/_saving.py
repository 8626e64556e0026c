"""Serialization: methods for `model.save`, `load_model` and `set_weights`."""

import importlib


class Saving:
    """Serialization part of `_optimizer.Accumulating`."""

    def get_config(self) -> dict:
        """Returns the config for `from_config`, the wrapped optimizer included."""
        keras = importlib.import_module(self._ROOT)
        serialize = keras.saving.serialize_keras_object
        config = {
            "optimizer": serialize(self._inner),
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "weight": self.weight,
            "on_nonfinite": self.on_nonfinite,
            **self._family_config(),
        }
        for name in ("gradient_accumulation_steps", "weight"):
            if callable(config[name]):
                config[name] = serialize(config[name])
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Returns an optimizer from the config of `get_config`."""
        keras = importlib.import_module(cls._ROOT)
        config = {**config}
        config.pop("is_legacy_optimizer", None)
        if isinstance(config["optimizer"], dict):
            config["optimizer"] = cls._deserialize(
                keras, config["optimizer"], custom_objects
            )
        for name in ("gradient_accumulation_steps", "weight"):
            if isinstance(config[name], dict):
                config[name] = keras.saving.deserialize_keras_object(
                    config[name], custom_objects=custom_objects
                )
        return cls(config.pop("optimizer"), **config)

    def set_weights(self, weights) -> None:
        """Sets all variables, in the order of `get_weights`."""
        for variable, value in zip(self._all_variables(), weights, strict=True):
            variable.assign(value)

    def save_own_variables(self, store) -> None:
        """Writes all variables, for `model.save`."""
        for i, variable in enumerate(self._all_variables()):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store) -> None:
        """Reads all variables, or only the wrapped optimizer's for an empty window."""
        variables = self._all_variables()
        inner = self._inner_variables()
        if len(store.keys()) == len(inner):
            variables = inner
        if len(store.keys()) != len(variables):
            return super().load_own_variables(store)  # warns
        for i, variable in enumerate(variables):
            variable.assign(store[str(i)])

    def _all_variables(self) -> list:
        state = [] if self._window is None else self._window.state
        return [*self._inner_variables(), *state]
