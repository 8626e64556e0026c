"""Names of BERT's parts in a Hugging Face folder."""

import re

CONFIG, VOCABULARY, TENSORS = "config.json", "vocab.txt", "model.safetensors"
FILES = (CONFIG, VOCABULARY, TENSORS)  # of a model that can be imported
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
# Of the tokenizer; TOKENIZER contains the vocabulary, too. Each may be absent.
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
PREFIX = "bert."  # encoder's prefix in a model with a head; a bare one has none

# Variables of the classifier on top of the encoder.
HEAD = {"output_weights": "classifier.weight", "output_bias": "classifier.bias"}

_KINDS = {
    "kernel": ("weight",),
    "bias": ("bias",),
    "gamma": ("weight", "gamma"),
    "beta": ("bias", "beta"),
}


def hugging_face_names(variable: str) -> list[str]:
    """Returns an encoder variable's Hugging Face names: the current one, older ones."""
    name = re.sub(r"/layer_(\d+)/", r"/layer.\1/", variable.removeprefix("bert/"))
    module, _, kind = name.replace("/", ".").rpartition(".")
    if kind in _KINDS:
        return [f"{module}.{its_kind}" for its_kind in _KINDS[kind]]
    return [f"{module}.{kind}.weight"]  # a table of embeddings


def is_transposed(variable: str) -> bool:
    """Returns whether an encoder variable has PyTorch's [outputs, inputs] there."""
    return variable.endswith("/kernel")
