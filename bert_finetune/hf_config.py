"""The file `config.json` of a Hugging Face folder.

Each of its keys is used, is known to mean nothing for the encoder, or is refused.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from bert_finetune.bert_config import BertConfig, read_json_object
from bert_finetune.hf_names import ARCHITECTURES, Architecture
from bert_finetune.hf_tokenizer_json import is_allowed

USED = {"architectures", "model_type", "embedding_size"}  # besides an architecture's

# Other values would change the encoder. None, like an absent key, is the first one.
ONLY = {
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
    "auto_map": ({},),  # code of the folder in place of BERT's
    "quantization_config": ({},),
    "prefix": ("",),  # before each text
}

# Heads, names, types of tensors in memory, results and text generation.
MEANINGLESS = {
    *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version"),
    *("tokenizer_class", "name", "language", "finetuning_task", "task_specific_params"),
    *("torch_dtype", "dtype", "use_bfloat16", "torchscript", "xla_device"),
    *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset"),
    *("gradient_checkpointing", "chunk_size_feed_forward", "use_cache", "output_past"),
    *("output_attentions", "output_hidden_states", "output_scores", "return_dict"),
    *("id2label", "label2id", "num_labels", "_num_labels", "problem_type"),
    *("classifier_dropout", "num_choices", "tf_legacy_loss", "tie_word_embeddings"),
    *("summary_activation", "summary_last_dropout", "summary_type"),
    *("summary_use_proj", "summary_first_dropout", "summary_proj_to_labels"),
    *("qa_dropout", "seq_classif_dropout", "tie_weights_"),
    "sinusoidal_pos_embds",  # the table of positions contains them
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type", "directionality"),
    *("sbert_ce_default_activation_function", "sentence_transformers"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"),
    *("eos_token_ids", "mask_token_id", "unk_token_id", "decoder_start_token_id"),
    *("cross_attention_hidden_size", "max_length", "min_length", "do_sample"),
    *("early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "num_return_sequences", "return_dict_in_generate"),
    *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
}


def read_config(path: pathlib.Path) -> tuple[BertConfig, Architecture]:
    """Returns the sizes in a `config.json`, and the names in its folder.

    Raises:
        TypeError, ValueError: If its encoder is not equal to a BERT, or a key is
            unknown. The message names the key.
    """
    content = read_json_object(str(path))
    architecture = _architecture(path, content)
    for key, allowed in ONLY.items():
        value = content.get(key)
        if value is not None and not is_allowed(value, allowed):
            _refuse(path, key, allowed[:1], value)
    names = USED | set(architecture.keys.values()) | ONLY.keys() | MEANINGLESS
    for key in sorted(content.keys() - names):
        if content[key] is not None:
            raise ValueError(
                f"Each key in {path} must be a known one. Received: `{key}`, which may "
                "change the encoder's results. Use a BERT without it, or remove it if "
                "the encoder does not depend on it."
            )
    config = BertConfig.from_json_file(str(path), architecture.keys)
    width = content.get("embedding_size")
    if width not in (None, config.hidden_size):
        raise ValueError(
            f"`embedding_size` in {path} must be `hidden_size`, {config.hidden_size}. "
            f"Received: {width!r}. A projection of the embeddings has no place in a BERT "
            "checkpoint: use a BERT, or ELECTRA's base or large discriminator."
        )
    return config, architecture


def _architecture(path: pathlib.Path, content: Mapping[str, Any]) -> Architecture:
    name = content.get("model_type")
    # Folders of 2019 leave out model_type: then the class decides, BERT's if unnamed.
    its_class = str(content.get("architectures") or "Bert")
    for architecture in ARCHITECTURES:
        is_class = re.match(rf"\W*{architecture.class_name}", its_class)
        if name == architecture.model_type or (name is None and is_class):
            return architecture
    names = tuple(architecture.model_type for architecture in ARCHITECTURES)
    return _refuse(path, "model_type", names, name)


def _refuse(path: pathlib.Path, key: str, allowed: tuple, value: Any) -> NoReturn:
    raise ValueError(
        f"`{key}` in {path} must be {' or '.join(map(repr, allowed))}. Received: "
        f"{value!r}. Another architecture than BERT's has no place in a BERT checkpoint: "
        "use a BERT, such as bert-base-uncased."
    )
