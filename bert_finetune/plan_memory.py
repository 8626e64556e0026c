"""Memory that training a BERT encoder needs, from its configuration alone.

    kept      = parameters + slots + accumulators + graph
    backward  = activations + gradients         at the peak of the backward pass
    update    = the optimizer's temporaries     at a window boundary
    peak      = kept + max(backward, update)

Everything is float32, no token is padding, and the optimizer is BERT's Adam with two
slots. The bytes are those of tensors that are alive at the same time, with TensorFlow's
CPU kernels and graph optimizations; `scripts/benchmarks/plan_table.py` measures them. Memory that
the allocator loses to fragmentation comes on top.

B = examples of a micro-batch, T = tokens of an example, H = hidden, I = intermediate,
N = heads.
"""

import json
import numbers
import os
from typing import Any, NamedTuple

_FLOAT_BYTES = 4
_BOOL_BYTES = 1
_NUM_CLASSES = 2
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
_RATES = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_REMEDY = "Use the bert_config.json that came with the checkpoint."

# Tensors [B, T, H] of one layer that are kept for the backward pass: query, key and
# value by heads, the heads' output, and the standardized input and the output of both
# layer normalizations.
_KEPT_TOKENS = 8
# Tensors [B, T, I] that are kept: the activation function's input and output.
_KEPT_WIDE = 2
# Temporary tensors [B, T, I] of the activation function's gradient.
_TEMPORARY_WIDE = 2.7
# Temporaries of an update, in copies of the largest variable and of all the others:
# operations of one size run at the same time, and the largest is done last.
_UPDATE_COPIES_OF_LARGEST = 1.8
_UPDATE_COPIES_OF_OTHERS = 0.15

# The session's graph and its optimized copies: without the layers, and per layer.
_GRAPH_BYTES = 4_000_000
_LAYER_GRAPH_BYTES = 3_500_000


class BertSizes(NamedTuple):
    """Entries of a `bert_config.json` that determine the memory."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    hidden_dropout_prob: float
    attention_probs_dropout_prob: float

    @property
    def largest_bytes(self) -> int:
        """Bytes of the word embeddings, the largest variable."""
        return _FLOAT_BYTES * self.vocab_size * self.hidden_size

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's parameters."""
        width, wide = self.hidden_size, self.intermediate_size
        attention = 4 * (width * width + width)
        dense = 2 * width * wide + wide + width
        return _FLOAT_BYTES * (attention + dense + 4 * width)

    @property
    def head_bytes(self) -> int:
        """Bytes of the pooler's and the classifier's parameters."""
        width = self.hidden_size
        return _FLOAT_BYTES * ((width + 1) * width + (width + 1) * _NUM_CLASSES)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all trained variables."""
        tables = self.max_position_embeddings + self.type_vocab_size
        embeddings = _FLOAT_BYTES * self.hidden_size * (tables + 2)
        layers = self.num_hidden_layers * self.layer_bytes
        return self.largest_bytes + embeddings + layers + self.head_bytes


class Memory(NamedTuple):
    """Memory of training by part [bytes]; see the module's formulas."""

    parameters: int
    slots: int
    accumulators: int
    graph: int
    activations: int
    gradients: int
    update: int

    @property
    def peak(self) -> int:
        """Most bytes that are alive at the same time."""
        kept = self.parameters + self.slots + self.accumulators + self.graph
        return kept + max(self.activations + self.gradients, self.update)


def read_sizes(path: str) -> BertSizes:
    """Reads a `bert_config.json`.

    Raises:
        TypeError, ValueError: If there is no such file, no JSON object in it, or a
            number is missing or out of range.
    """
    if not os.path.isfile(path):
        raise ValueError(
            f"--bert_config_file must be a JSON file. Received: {path}, which is not a "
            f"file. {_REMEDY}"
        )
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:
        raise ValueError(
            f"{path} must hold a JSON object. Received text that is not JSON: {error}. "
            f"{_REMEDY}"
        ) from error
    if not isinstance(content, dict):
        raise TypeError(
            f"{path} must hold a JSON object. Received: a {type(content).__name__}. "
            f"{_REMEDY}"
        )
    sizes = [_size(path, name, content.get(name)) for name in _SIZES]
    rates = [_rate(path, name, content.get(name)) for name in _RATES]
    return BertSizes(*sizes, *rates)


def memory_of(
    sizes: BertSizes, examples: int, tokens: int, *, is_accumulating: bool
) -> Memory:
    """Returns the memory of training with micro-batches [examples, tokens].

    Args:
        sizes: Sizes of the encoder.
        examples: B >= 1.
        tokens: T >= 1, none of them padding.
        is_accumulating: Whether K > 1; a window of one micro-batch has no accumulators.
    """
    parameters = sizes.parameter_bytes
    rows_mask = _FLOAT_BYTES * sizes.vocab_size
    return Memory(
        parameters=parameters,
        slots=2 * parameters,
        accumulators=parameters + rows_mask if is_accumulating else 0,
        graph=_GRAPH_BYTES + _LAYER_GRAPH_BYTES * sizes.num_hidden_layers,
        activations=_activation_bytes(sizes, examples, tokens),
        gradients=_gradient_bytes(sizes),
        update=int(
            _UPDATE_COPIES_OF_LARGEST * sizes.largest_bytes
            + _UPDATE_COPIES_OF_OTHERS * (parameters - sizes.largest_bytes)
        ),
    )


def _activation_bytes(sizes: BertSizes, examples: int, tokens: int) -> int:
    """Returns the bytes at the peak: the gradient of an activation function.

    It is that of the topmost whole layer. The layer above it is done: the classifier
    reads one token only, so the rest of the last layer is never computed.
    """
    count = examples * tokens
    token = _FLOAT_BYTES * sizes.hidden_size
    wide = _FLOAT_BYTES * sizes.intermediate_size
    mask = _BOOL_BYTES * sizes.hidden_size if sizes.hidden_dropout_prob else 0
    scores = sizes.num_attention_heads * tokens
    attention = _FLOAT_BYTES * scores
    if sizes.attention_probs_dropout_prob:  # before and after dropout, and its mask
        attention = (2 * _FLOAT_BYTES + _BOOL_BYTES) * scores
    embeddings = 2 * token + mask
    layer = _KEPT_TOKENS * token + _KEPT_WIDE * wide + 2 * mask + attention
    layers = sizes.num_hidden_layers - 1
    if not layers:  # keys and values of the only layer, for all tokens
        return count * (embeddings + 2 * token)
    temporaries = _TEMPORARY_WIDE * wide - token - mask  # the output is freed by then
    return int(count * (embeddings + layers * layer + temporaries))


def _gradient_bytes(sizes: BertSizes) -> int:
    """Returns the bytes of the gradients that are computed by then."""
    return sizes.head_bytes + sizes.layer_bytes


def _size(path: str, name: str, value: Any) -> int:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < 1:
        raise ValueError(
            f"`{name}` in {path} must be an integer >= 1. Received: {value!r}. "
            f"{_REMEDY}"
        )
    return int(value)


def _rate(path: str, name: str, value: Any) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1:
        raise ValueError(
            f"`{name}` in {path} must be a number in [0, 1). Received: {value!r}. "
            f"{_REMEDY}"
        )
    return float(value)
