"""Memory that training a BERT encoder needs, from its configuration alone.

    kept      = parameters + slots + accumulators + graph
    backward  = activations + gradients         at the peak of the backward pass
    update    = gradients + the optimizer's temporaries     at a window boundary
    peak      = kept + max(backward, update)
    disk      = (parameters + slots + accumulators) * 6 checkpoints

Everything is float32, and no token is padding. The bytes are those of tensors that are
alive at the same time, with TensorFlow's CPU kernels and graph optimizations. Memory
that the allocator loses to fragmentation comes on top, and on disk the graph beside each
checkpoint and what a run writes besides checkpoints.

B = examples of a micro-batch, T = tokens of an example, H = hidden, I = intermediate,
N = heads.
"""

from typing import NamedTuple

from bert_finetune.bert_config import BertConfig

KEPT_CHECKPOINTS = 5  # default of RunConfig; the next is written before one is deleted

_FLOAT_BYTES = 4
_BOOL_BYTES = 1
_NUM_CLASSES = 2

# Tensors [B, T, H] of one layer that are kept for the backward pass: query, key and
# value by heads, the heads' output, and the standardized input and the output of both
# layer normalizations.
_KEPT_TOKENS = 8
# Tensors [B, T, I] that are kept: the activation function's input and output.
_KEPT_WIDE = 2
# Temporary tensors [B, T, I] of the activation function's gradient.
_TEMPORARY_WIDE = 2.7
# Temporaries of an update by each optimizer, in copies of the word embeddings and of all
# other variables. On top come two kernels of the feed-forward part, which are averaged.
_UPDATE_COPIES = {
    "adamw": (1.0, 0.0),
    "lamb": (5.2, 2.3),
    "adafactor": (2.0, 0.3),
    "sgd": (0.0, 0.0),
}
_AVERAGED_KERNELS = 2

# With recomputed layers, what is kept are tensors [B, T, H]: the embeddings' and, of each
# layer, the inputs of its three parts. On top come the tensors of the layer that is
# recomputed: while its feed-forward part is, in copies of [B, T, I] and [B, T, H]; while
# its attention is, in copies of [B, N, T, T] and [B, T, H].
_KEPT_OF_LAYER = 3
_FEED_FORWARD_WIDE = 4
_FEED_FORWARD_TOKENS = 3
_ATTENTION_SCORES = 3
_ATTENTION_TOKENS = 4

# The session's graph and its optimized copies: without the layers, and per layer.
_GRAPH_BYTES = 4_000_000
_LAYER_GRAPH_BYTES = 3_500_000


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
        backward = self.activations + self.gradients
        return self._variables + self.graph + max(backward, self.update)

    @property
    def disk(self) -> int:
        """Most bytes that the checkpoints of a run take on disk."""
        return self._variables * (KEPT_CHECKPOINTS + 1)

    @property
    def _variables(self) -> int:
        return self.parameters + self.slots + self.accumulators


def memory_of(
    config: BertConfig,
    examples: int,
    tokens: int,
    *,
    is_accumulating: bool,
    is_recomputed: bool = False,
    optimizer: str = "adamw",
) -> Memory:
    """Returns the memory of training with micro-batches [examples, tokens].

    Args:
        config: Sizes and dropout of the encoder.
        examples: B >= 1.
        tokens: T >= 1, none of them padding.
        is_accumulating: Whether K > 1; a window of one micro-batch has no accumulators.
        is_recomputed: Whether the layers' activations are recomputed.
        optimizer: "adamw", "lamb", "adafactor" or "sgd", as in `optimizers.py`.
    """
    backward = _recomputed_bytes if is_recomputed else _kept_bytes
    activations, gradients = backward(config, examples, tokens)
    parameters = parameter_bytes(config)
    rows_mask = _FLOAT_BYTES * config.vocab_size
    return Memory(
        parameters=parameters,
        slots=_slot_bytes(config, optimizer),
        accumulators=parameters + rows_mask if is_accumulating else 0,
        graph=_GRAPH_BYTES + _LAYER_GRAPH_BYTES * config.num_hidden_layers,
        activations=activations,
        gradients=gradients,
        update=_update_bytes(config, optimizer),
    )


def _slot_bytes(config: BertConfig, optimizer: str) -> int:
    if optimizer != "adafactor":
        return (1 if optimizer == "sgd" else 2) * parameter_bytes(config)
    width, wide = config.hidden_size, config.intermediate_size
    tables = config.vocab_size + config.max_position_embeddings + config.type_vocab_size
    # Of a matrix [a, b] it keeps a + b numbers, and of a vector all.
    kernel, classifier = 2 * width, width + _NUM_CLASSES
    embeddings = tables + 3 * width + 2 * width  # three tables and a normalization
    attention = 4 * (kernel + width)
    dense = 2 * (width + wide) + wide + width
    layers = config.num_hidden_layers * (attention + dense + 4 * width)
    head = kernel + width + classifier + _NUM_CLASSES
    return _FLOAT_BYTES * (embeddings + layers + head)


def _update_bytes(config: BertConfig, optimizer: str) -> int:
    """Returns the bytes of the gradients, which an update holds, and its temporaries.

    The word embeddings' gradient is that of the rows that were read, and takes little.
    """
    largest = _largest_bytes(config)
    others = parameter_bytes(config) - largest
    of_largest, of_others = _UPDATE_COPIES[optimizer]
    kernel = _FLOAT_BYTES * config.hidden_size * config.intermediate_size
    temporaries = of_largest * largest + of_others * others
    return int(others + temporaries + _AVERAGED_KERNELS * kernel)


def _kept_bytes(config: BertConfig, examples: int, tokens: int) -> tuple[int, int]:
    """Returns (activations, gradients) at the peak: an activation function's gradient.

    It is that of the topmost whole layer. The layer above it is done: the classifier
    reads one token only, so the rest of the last layer is never computed.
    """
    count = examples * tokens
    token = _FLOAT_BYTES * config.hidden_size
    wide = _FLOAT_BYTES * config.intermediate_size
    mask = _BOOL_BYTES * config.hidden_size if config.hidden_dropout_prob else 0
    scores = config.num_attention_heads * tokens
    attention = _FLOAT_BYTES * scores
    if config.attention_probs_dropout_prob:  # before and after dropout, and its mask
        attention = (2 * _FLOAT_BYTES + _BOOL_BYTES) * scores
    embeddings = 2 * token + mask
    layer = _KEPT_TOKENS * token + _KEPT_WIDE * wide + 2 * mask + attention
    layers = config.num_hidden_layers - 1
    gradients = _head_bytes(config) + _layer_bytes(config)
    if not layers:  # keys and values of the only layer, for all tokens
        return count * (embeddings + 2 * token), gradients
    temporaries = _TEMPORARY_WIDE * wide - token - mask  # the output is freed by then
    return int(count * (embeddings + layers * layer + temporaries)), gradients


def _recomputed_bytes(
    config: BertConfig, examples: int, tokens: int
) -> tuple[int, int]:
    """Returns (activations, gradients) at the peak with recomputed layers.

    It is in the larger part of the topmost whole layer, or of the lowest: by then what
    is kept is freed, and there are the gradients of all layers above, which are added
    to the accumulators together.
    """
    count = examples * tokens
    token = _FLOAT_BYTES * config.hidden_size
    wide = _FLOAT_BYTES * config.intermediate_size
    scores = config.num_attention_heads * tokens
    layers = config.num_hidden_layers - 1
    if not layers:  # only the first tokens go on from the only layer
        return _kept_bytes(config, examples, tokens)
    feed_forward = _FEED_FORWARD_WIDE * wide + _FEED_FORWARD_TOKENS * token
    if config.hidden_dropout_prob:
        feed_forward += token
    attention = _ATTENTION_SCORES * _FLOAT_BYTES * scores + _ATTENTION_TOKENS * token
    if config.attention_probs_dropout_prob:
        attention += _BOOL_BYTES * scores
    largest = max(feed_forward, attention)

    def at(below: int) -> tuple[int, int]:
        """Returns the bytes while the layer above `below` others is recomputed."""
        kept = (2 + _KEPT_OF_LAYER * below) * token
        above = config.num_hidden_layers - 1 - below
        gradients = _head_bytes(config) + above * _layer_bytes(config)
        return count * (kept + largest), gradients

    return max(at(layers - 1), at(0), key=sum)


def parameter_bytes(config: BertConfig) -> int:
    """Returns the bytes of all trained variables."""
    tables = config.max_position_embeddings + config.type_vocab_size
    embeddings = _FLOAT_BYTES * config.hidden_size * (tables + 2)
    layers = config.num_hidden_layers * _layer_bytes(config)
    return _largest_bytes(config) + embeddings + layers + _head_bytes(config)


def _largest_bytes(config: BertConfig) -> int:
    """Returns the bytes of the word embeddings, the largest variable."""
    return _FLOAT_BYTES * config.vocab_size * config.hidden_size


def _layer_bytes(config: BertConfig) -> int:
    """Returns the bytes of one layer's parameters."""
    width, wide = config.hidden_size, config.intermediate_size
    attention = 4 * (width * width + width)
    dense = 2 * width * wide + wide + width
    return _FLOAT_BYTES * (attention + dense + 4 * width)


def _head_bytes(config: BertConfig) -> int:
    """Returns the bytes of the pooler's and the classifier's parameters."""
    width = config.hidden_size
    return _FLOAT_BYTES * ((width + 1) * width + (width + 1) * _NUM_CLASSES)


def megabytes(num_bytes: float) -> str:
    """Returns a number of bytes as text."""
    return f"{num_bytes / 1e6:,.1f} MB"
