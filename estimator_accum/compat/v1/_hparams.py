"""Hyperparameters as TensorFlow 1's `tf.contrib.training.HParams` holds them."""

import json
import numbers
import re

# name=value or name=[value, value], up to a comma
_ASSIGNMENT = re.compile(
    r"(?P<name>[a-zA-Z][\w.]*)\s*=\s*(\[(?P<list>[^\]]*)\]|(?P<value>[^,\[\]]*))"
    r"\s*(,\s*|$)"
)


class HParams:
    """Named values with the kinds that they were created with.

        hparams = HParams(learning_rate=0.1, units=[8, 4])
        hparams.parse("learning_rate=0.3,units=[16]")
        assert hparams.learning_rate == 0.3

    Each value is an attribute. `set_hparam`, `parse`, `parse_json` and
    `override_from_dict` keep the kind of a value; an assignment to an attribute may
    change it.
    """

    def __init__(self, **values):
        self._kinds = {}  # name -> (type of the value or of its elements, is a list)
        for name, value in values.items():
            self.add_hparam(name, value)

    def add_hparam(self, name: str, value) -> None:
        """Adds a value.

        Args:
            name: Its name; not one that the object has.
            value: Number, bool, string, None, or a list or tuple of at least one.

        Raises:
            ValueError: If the name is taken or the list is empty.
        """
        if getattr(self, name, None) is not None:
            raise ValueError(
                f"A name of an HParams must be new. Received: {name}. Use set_hparam, "
                "or another name."
            )
        is_list = isinstance(value, (list, tuple))
        if is_list and not value:
            raise ValueError(
                "A list in an HParams must have an element, which has the kind. "
                f"Received: {name} = {value}. Add one element."
            )
        self._kinds[name] = type(value[0] if is_list else value), is_list
        setattr(self, name, value)

    def set_hparam(self, name: str, value) -> None:
        """Replaces a value by one of the same kind.

        Args:
            name: Name of an existing value.
            value: New value; an integer for a float becomes a float.

        Raises:
            KeyError: If the name is unknown.
            ValueError: If the kind differs.
        """
        kind, is_list = self._kinds[name]
        if isinstance(value, list) != is_list:
            received = f"{name} = {value!r}"
            raise ValueError(
                f"`{name}` must be {'a list' if is_list else 'a single value'}. "
                f"Received: {received}. Add or remove square brackets."
            )
        cast = [_cast(name, kind, v) for v in value] if is_list else None
        setattr(self, name, cast if is_list else _cast(name, kind, value))

    def del_hparam(self, name: str) -> None:
        """Removes a value, if it exists."""
        if self._kinds.pop(name, None) is not None:
            delattr(self, name)

    def parse(self, values: str) -> "HParams":
        """Replaces values by those of a text like `rate=0.1,units=[8,4],name=x`.

        Returns:
            The object itself.

        Raises:
            ValueError: If the text cannot be parsed, or a name is unknown or twice
                there.
        """
        overrides, position = {}, 0
        while position < len(values):
            match = _ASSIGNMENT.match(values, position)
            if match is None:
                _refuse(values, f"`{values[position:]}` is no assignment")
            name, position = match["name"], match.end()
            if name not in self._kinds:
                _refuse(values, f"{name} is not one of {', '.join(self._kinds)}")
            if name in overrides:
                _refuse(values, f"{name} is there twice")
            kind, _ = self._kinds[name]
            try:
                if match["list"] is None:
                    overrides[name] = _parsed(kind, match["value"])
                else:
                    items = re.split("[ ,]+", match["list"].strip(" ,"))
                    overrides[name] = [_parsed(kind, item) for item in items if item]
            except (TypeError, ValueError):
                _refuse(values, f"{name} is of kind {kind.__name__}")
        return self.override_from_dict(overrides)

    def parse_json(self, values_json: str) -> "HParams":
        """Replaces values by those of a JSON object; see `override_from_dict`."""
        return self.override_from_dict(json.loads(values_json))

    def override_from_dict(self, values_dict: dict) -> "HParams":
        """Replaces values as `set_hparam` does; returns the object itself."""
        for name, value in values_dict.items():
            self.set_hparam(name, value)
        return self

    def values(self) -> dict:
        """Returns all names with their values."""
        return {name: getattr(self, name) for name in self._kinds}

    def get(self, key: str, default=None):
        """Returns a value, or the default if the name is unknown."""
        return getattr(self, key) if key in self._kinds else default

    def to_json(self, indent=None, separators=None, sort_keys: bool = False) -> str:
        """Returns the values as JSON, without callables."""
        return json.dumps(
            _without_callables(self.values()),
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def __contains__(self, key):
        return key in self._kinds

    def __str__(self):
        return str(sorted(self.values().items()))

    def __repr__(self):
        return f"HParams({self})"


def _parsed(kind: type, text: str):
    if kind is not bool:
        return kind(text)
    truths = {"true": True, "True": True, "false": False, "False": False}
    return truths[text] if text in truths else bool(int(text))


def _cast(name: str, kind: type, value):
    if kind is type(None):
        return value
    text = (str, bytes)
    fits = isinstance(value, kind)
    if issubclass(kind, text):
        fits = isinstance(value, text)
    elif issubclass(kind, bool) or isinstance(value, bool):
        fits = issubclass(kind, bool) and isinstance(value, bool)
    elif issubclass(kind, numbers.Integral):
        fits = isinstance(value, numbers.Integral)
    elif issubclass(kind, numbers.Number):
        fits = isinstance(value, numbers.Number)
    if not fits:
        raise ValueError(
            f"`{name}` must be of kind {kind.__name__}. Received: {value!r}. Pass one, "
            "or assign to the attribute."
        )
    return kind(value) if issubclass(kind, (*text, numbers.Number)) else value


def _without_callables(value):
    if isinstance(value, dict):
        return {k: _without_callables(v) for k, v in value.items() if not callable(v)}
    if isinstance(value, list):
        return [_without_callables(item) for item in value if not callable(item)]
    return value


def _refuse(values: str, reason: str):
    raise ValueError(
        "Hyperparameters must be known names with values of their kinds, like "
        f"rate=0.1,units=[8,4]. Received: {values!r}, where {reason}. Correct it."
    ) from None
