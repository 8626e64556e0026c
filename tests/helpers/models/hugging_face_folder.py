"""Small random models in Hugging Face's layout, for tests that import them."""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

CONFIG = json.loads("""{
    "model_type": "bert", "vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 3, "intermediate_size": 32, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 20, "type_vocab_size": 2, "initializer_range": 0.02,
    "layer_norm_eps": 1e-12
}""")
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"word{i}" for i in range(36))]
# What turns CONFIG and the names of `random_tensors` into those of other encoders.
_DISTILBERT_KEYS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
_DISTILBERT_MODULES = {
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}


def random_tensors(**changes) -> dict[str, np.ndarray]:
    """Returns PyTorch tensors of a bare BERT of `CONFIG`, large enough to show bugs."""
    config = {**CONFIG, **changes}
    width, wide = config["hidden_size"], config["intermediate_size"]
    tables = {
        "word_embeddings": config["vocab_size"],
        "position_embeddings": config["max_position_embeddings"],
        "token_type_embeddings": config["type_vocab_size"],
    }
    shapes = {f"embeddings.{name}.weight": [n, width] for name, n in tables.items()}
    shapes |= _norm("embeddings.")
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}."
        for name in ("query", "key", "value"):
            shapes |= _dense(f"{layer}attention.self.{name}.", width, width)
        shapes |= _dense(f"{layer}attention.output.dense.", width, width)
        shapes |= _norm(f"{layer}attention.output.")
        shapes |= _dense(f"{layer}intermediate.dense.", width, wide)
        shapes |= _dense(f"{layer}output.dense.", wide, width)
        shapes |= _norm(f"{layer}output.")
    shapes |= _dense("pooler.dense.", width, width)
    generator = np.random.default_rng(0)
    return {
        name: (
            0.3 * generator.standard_normal([width if n is None else n for n in shape])
            + name.endswith("LayerNorm.weight")
        ).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_folder(
    folder: pathlib.Path, tensors: dict[str, np.ndarray] | None = None, **changes
) -> pathlib.Path:
    """Writes config.json, vocab.txt and model.safetensors; returns the folder."""
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    tensors = random_tensors() if tensors is None else tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_distilbert(folder: pathlib.Path, **changes) -> pathlib.Path:
    """Writes `random_tensors` as a DistilBERT with a head."""
    config = dict.fromkeys(("type_vocab_size", "layer_norm_eps"))
    for key, its_key in _DISTILBERT_KEYS.items():
        config |= {key: None, its_key: CONFIG[key]}
    renamed = {"vocab_projector.bias": np.zeros([40], np.float32)}
    for name, array in random_tensors().items():
        number, _, part = name.removeprefix("encoder.layer.").partition(".")
        if number.isdecimal():
            module, _, kind = part.rpartition(".")
            name = f"transformer.layer.{number}.{_DISTILBERT_MODULES[module]}.{kind}"
        if not name.startswith(("pooler", "embeddings.token_type")):
            renamed[f"distilbert.{name}"] = array
    config |= {"model_type": "distilbert", "sinusoidal_pos_embds": False}
    return write_folder(folder, renamed, **config | changes)


def write_electra(folder: pathlib.Path, **changes) -> pathlib.Path:
    """Writes `random_tensors` as the discriminator of an ELECTRA."""
    tensors = {k: v for k, v in random_tensors().items() if "pooler" not in k}
    tensors = {f"electra.{name}": array for name, array in tensors.items()}
    tensors["discriminator_predictions.dense.bias"] = np.zeros([24], np.float32)
    config = {"model_type": "electra", "embedding_size": CONFIG["hidden_size"]}
    return write_folder(folder, tensors, **config | changes)


def tokenizer_json(vocabulary=VOCABULARY, lowercase: bool = True) -> str:
    """Returns a `tokenizer.json` as transformers 5 writes it, with all its parts."""
    ids = {token: number for number, token in enumerate(vocabulary)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    single = [_piece("[CLS]", 0), _piece("A", 0), _piece("[SEP]", 0)]
    special = [token for token in vocabulary if token.startswith("[")]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ids[token], "content": token, **flags, "special": True}
            for token in special
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, _piece("B", 1), _piece("[SEP]", 1)],
            "special_tokens": {
                token: {"id": token, "ids": [ids[token]], "tokens": [token]}
                for token in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }
    return json.dumps(content)


def _piece(name: str, segment: int) -> dict[str, dict]:
    kind = "SpecialToken" if name.startswith("[") else "Sequence"
    return {kind: {"id": name, "type_id": segment}}


def _dense(module: str, inputs: int, outputs: int) -> dict[str, list]:
    return {f"{module}weight": [outputs, inputs], f"{module}bias": [outputs]}


def _norm(module: str) -> dict[str, list]:
    # None stands for the hidden size.
    return {f"{module}LayerNorm.{kind}": [None] for kind in ("weight", "bias")}
