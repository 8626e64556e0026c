"""`bert_config.json`: the numbers that describe one BERT encoder."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

from estimator_accum.programs.json_text import read_json

ACTIVATIONS = ("gelu", "gelu_new", "relu", "tanh", "linear")
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_MAX_SIZE = 2**24
_MAX_LAYERS = 1000  # a graph of many more exhausts the memory before it is built
_REMEDY = "Use the file that came with the checkpoint."


@dataclasses.dataclass(frozen=True)
class BertConfig:
    """The numbers of one encoder, under their official names.

    Raises:
        TypeError, ValueError: If a number has the wrong type or is out of its range.
    """

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12  # divides hidden_size
    intermediate_size: int = 3072
    hidden_act: str = "gelu"  # one of ACTIVATIONS
    hidden_dropout_prob: float = 0.1  # 0 <= p < 1
    attention_probs_dropout_prob: float = 0.1  # 0 <= p < 1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02  # standard deviation, > 0
    layer_norm_eps: float = 1e-12  # > 0; published files leave it out

    def __post_init__(self):
        _check_values(dataclasses.asdict(self), "BertConfig", {})

    @classmethod
    def from_json_file(
        cls, path: str, keys: Mapping[str, str] | None = None
    ) -> "BertConfig":
        """Reads a `bert_config.json`; keys that the encoder does not use are ignored.

        Args:
            path: Path that `tf.io.gfile` can read.
            keys: Keys in the file, by the numbers' names; other numbers get their
                defaults. None means the names of all numbers.

        Raises:
            TypeError, ValueError: If there is no such file, no JSON object in it, a
                missing key, or a value of the wrong type or out of its range. The
                message names the file and the key.
        """
        content = read_json_object(path)
        values = {field.name: field.default for field in dataclasses.fields(cls)}
        keys = {name: name for name in values} if keys is None else keys
        for name, key in keys.items():
            if key in content:
                values[name] = content[key]
            elif name != "layer_norm_eps":
                raise ValueError(
                    f"{path} must have the key `{key}`. Received the keys: "
                    f"{', '.join(sorted(content)) or 'none'}. {_REMEDY}"
                )
        _check_values(values, path, keys)
        return cls(**values)


def read_json_object(path: str) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        TypeError, ValueError: If the file does not exist or holds no JSON object.
    """
    try:
        content = read_json(path)
    except OSError as error:
        raise ValueError(
            f"A configuration must be a JSON file. Received: {path}, which cannot be "
            f"read ({error.strerror or error}). {_REMEDY}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path} must hold a JSON object. Received text that is not JSON: "
            f"{error}. {_REMEDY}"
        ) from error
    if not isinstance(content, dict):
        raise TypeError(
            f"{path} must hold a JSON object. Received: a "
            f"{type(content).__name__}. {_REMEDY}"
        )
    return content


def _check_values(values: dict[str, Any], source: str, keys: Mapping[str, str]) -> None:
    keys = {name: keys.get(name, name) for name in values}
    for name, value in values.items():
        key = keys[name]
        if name == "hidden_act":
            _check_activation(key, value, source)
        elif name in SIZES:
            most = _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
            _check_size(key, value, source, most)
        elif name.endswith("_prob"):
            _check_number(key, value, source, "in [0, 1)", lambda v: 0 <= v < 1)
        else:
            _check_number(key, value, source, "> 0", lambda v: 0 < v < math.inf)
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if width % heads:
        raise ValueError(
            f"`{keys['hidden_size']}` in {source} must be a multiple of "
            f"`{keys['num_attention_heads']}`. Received: {width} and {heads}. {_REMEDY}"
        )


def _check_size(name: str, value: Any, source: str, most: int) -> None:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if is_integer and 1 <= value <= most:
        return
    bound = f" and <= {most:,}" if is_integer and value > most else ""
    raise (ValueError if is_integer else TypeError)(
        f"`{name}` in {source} must be an integer >= 1{bound}. "
        f"Received: {value!r}. {_REMEDY}"
    )


def _check_number(name: str, value: Any, source: str, range_: str, is_inside) -> None:
    rule = f"`{name}` in {source} must be a number {range_}. Received: {value!r}."
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{rule} {_REMEDY}")
    if not is_inside(value):
        raise ValueError(f"{rule} {_REMEDY}")


def _check_activation(name: str, value: Any, source: str) -> None:
    if value not in ACTIVATIONS:
        raise ValueError(
            f"`{name}` in {source} must be one of {', '.join(ACTIVATIONS)}. "
            f"Received: {value!r}. {_REMEDY}"
        )
