"""Names of an encoder's parts in a Hugging Face folder."""

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

from bert_finetune.bert_config import BertConfig

CONFIG, VOCABULARY, TENSORS = "config.json", "vocab.txt", "model.safetensors"
FILES = (CONFIG, VOCABULARY, TENSORS)  # of a model that can be imported
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
SENTENCES, ADAPTER = "sentence_bert_config.json", "adapter_config.json"
# Each may be absent. The first four are the tokenizer's; TOKENIZER contains the
# vocabulary, too.
OPTIONAL_FILES = (
    *(TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS, ADDED_TOKENS),
    *(SENTENCES, ADAPTER),
)
ONE_MODEL = "Use the files of one and the same model."

# Variables of the classifier on top of the encoder.
HEAD = {"output_weights": "classifier.weight", "output_bias": "classifier.bias"}

_KINDS = {
    "kernel": ("weight",),
    "bias": ("bias",),
    "gamma": ("weight", "gamma"),
    "beta": ("bias", "beta"),
}


# Variables of BERT that other architectures lack.
POOLER, TOKEN_TYPES = "bert/pooler/", "bert/embeddings/token_type_embeddings"


class Architecture(NamedTuple):
    """Names of an encoder that computes the same function as BERT.

    Attributes:
        model_type: Its name in `config.json`.
        class_name: First part of the names of its classes in transformers.
        keys: Keys of `config.json`, by `BertConfig`'s names of the numbers. The numbers
            without a key have `BertConfig`'s defaults.
        modules: Names of modules, by BERT's; replaced in this order.
        absent: First parts of the names of BERT's variables that it lacks.
    """

    model_type: str
    class_name: str
    keys: Mapping[str, str]
    modules: Mapping[str, str]
    absent: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """Prefix of the tensors in a model with a head; a bare encoder has none."""
        return f"{self.model_type}."

    def tensor_names(self, variable: str) -> list[str]:
        """Returns a variable's names: the current one, then older ones."""
        name = re.sub(r"/layer_(\d+)/", r"/layer.\1/", variable.removeprefix("bert/"))
        name = name.replace("/", ".")
        for module, its_module in self.modules.items():
            name = name.replace(module, its_module)
        module, _, kind = name.rpartition(".")
        if kind in _KINDS:
            return [f"{module}.{its_kind}" for its_kind in _KINDS[kind]]
        return [f"{module}.{kind}.weight"]  # a table of embeddings


_KEYS = {field.name: field.name for field in dataclasses.fields(BertConfig)}
BERT = Architecture("bert", "Bert", _KEYS, modules={}, absent=())
DISTILBERT = Architecture(
    "distilbert",
    "DistilBert",
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "max_position_embeddings": "max_position_embeddings",
        "initializer_range": "initializer_range",
    },
    modules={
        "encoder.layer": "transformer.layer",
        "attention.self.query": "attention.q_lin",
        "attention.self.key": "attention.k_lin",
        "attention.self.value": "attention.v_lin",
        "attention.output.dense": "attention.out_lin",
        "attention.output.LayerNorm": "sa_layer_norm",
        "intermediate.dense": "ffn.lin1",
        "output.dense": "ffn.lin2",
        "output.LayerNorm": "output_layer_norm",
    },
    absent=(POOLER, TOKEN_TYPES),
)
ELECTRA = Architecture("electra", "Electra", _KEYS, modules={}, absent=(POOLER,))
ARCHITECTURES = (BERT, DISTILBERT, ELECTRA)


def is_transposed(variable: str) -> bool:
    """Returns whether an encoder variable has PyTorch's [outputs, inputs] there."""
    return variable.endswith("/kernel")
