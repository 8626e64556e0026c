"""Importing Hugging Face's BERT folders."""

import dataclasses
import json
import pathlib
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import checkpoint, hf_config, hf_tokenizer, import_hf_checkpoint
from bert_finetune.bert_config import BertConfig
from bert_finetune.checkpoint import check_checkpoint
from bert_finetune.hf_import import import_checkpoint
from tests.helpers.models import hugging_face_folder
from tests.helpers.models.hugging_face_folder import (
    CONFIG,
    random_tensors,
    write_distilbert,
    write_electra,
    write_folder,
)

_CHECKPOINT = ["bert_model.ckpt.data-00000-of-00001", "bert_model.ckpt.index"]
_MADE = ["bert_config.json", *_CHECKPOINT, "vocab.txt"]


@pytest.fixture
def import_folder(tmp_path, call):
    """Runs the script in this process, which must succeed; returns its output."""

    def run(source, destination=tmp_path / "bert"):
        flags = [f"--input_dir={source}", f"--output_dir={destination}"]
        done = call(import_hf_checkpoint.main, *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def refused(tmp_path, refusal):
    """Runs the script, which must refuse and leave nothing; returns its message."""

    def run(source):
        flags = [f"--input_dir={source}", f"--output_dir={tmp_path / 'bert'}"]
        return refusal(import_hf_checkpoint.main, *flags)

    return run


def _variables(folder):
    reader = tf.train.load_checkpoint(str(folder / "bert_model.ckpt"))
    return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


def _with_head(tensors, old_names=False):
    """Renames tensors as in a model with a head; old names are those before 2019."""
    renamed = {}
    for name, array in tensors.items():
        if old_names and "LayerNorm" in name:
            name = name.replace("weight", "gamma").replace("bias", "beta")
        renamed[f"bert.{name}"] = array
    renamed["cls.predictions.bias"] = np.zeros([40], np.float32)
    return renamed


@pytest.mark.once
def test_program_makes_the_three_parts(tmp_path, call):
    source = write_folder(tmp_path / "theirs")
    flags = [f"--input_dir={source}", f"--output_dir={tmp_path / 'new' / 'bert'}"]
    done = call(import_hf_checkpoint.main, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bert_model.ckpt (39 variables, 2 layers)" in done.stdout
    assert "pooler" not in done.stdout
    folder = tmp_path / "new" / "bert"
    assert sorted(path.name for path in folder.iterdir()) == _MADE
    assert [path.name for path in folder.parent.iterdir()] == ["bert"]
    config = BertConfig.from_json_file(str(folder / "bert_config.json"))
    assert config.hidden_size == 24
    check_checkpoint(str(folder / "bert_model.ckpt"), config)
    assert (folder / "vocab.txt").read_text().split() == hugging_face_folder.VOCABULARY


def test_kernels_are_transposed_and_the_rest_is_copied(tmp_path, import_folder):
    tensors = random_tensors()
    (tmp_path / "bert").mkdir()  # an empty one is filled
    import_folder(write_folder(tmp_path / "theirs", tensors))
    ours = _variables(tmp_path / "bert")
    copies = {
        "embeddings.word_embeddings.weight": "embeddings/word_embeddings",
        "embeddings.LayerNorm.weight": "embeddings/LayerNorm/gamma",
        "encoder.layer.1.output.dense.bias": "encoder/layer_1/output/dense/bias",
        "embeddings.LayerNorm.bias": "embeddings/LayerNorm/beta",
        "pooler.dense.bias": "pooler/dense/bias",
    }
    for theirs, name in copies.items():
        np.testing.assert_array_equal(ours[f"bert/{name}"], tensors[theirs])
    kernel = ours["bert/encoder/layer_0/intermediate/dense/kernel"]
    assert kernel.shape == (24, 32)
    theirs = tensors["encoder.layer.0.intermediate.dense.weight"]
    np.testing.assert_array_equal(kernel, theirs.T)


@pytest.mark.parametrize("old_names", [False, True])
def test_prefixes_heads_old_names_and_constants_make_no_difference(
    old_names, tmp_path, import_folder
):
    import_folder(write_folder(tmp_path / "bare"), tmp_path / "expected")
    tensors = _with_head(random_tensors(), old_names)
    tensors["bert.embeddings.position_ids"] = np.arange(20)[np.newaxis]
    source = write_folder(tmp_path / "headed", tensors)
    import_folder(source, tmp_path / "got")
    for part in _MADE:
        expected = (tmp_path / "expected" / part).read_bytes()
        assert (tmp_path / "got" / part).read_bytes() == expected


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_float_types_become_float32(dtype, tmp_path, import_folder):
    tensors = {name: array.astype(dtype) for name, array in random_tensors().items()}
    import_folder(write_folder(tmp_path / "theirs", tensors))
    words = _variables(tmp_path / "bert")["bert/embeddings/word_embeddings"]
    assert words.dtype == np.float32
    expected = tensors["embeddings.word_embeddings.weight"].astype(np.float32)
    np.testing.assert_array_equal(words, expected)


def test_model_without_a_pooler_gets_a_new_one_and_it_is_said(tmp_path, import_folder):
    tensors = {k: v for k, v in random_tensors().items() if "pooler" not in k}
    source = write_folder(tmp_path / "theirs", _with_head(tensors))
    out = import_folder(source)
    assert "The model has no pooler: bert/pooler/dense is new and untrained." in out
    ours = _variables(tmp_path / "bert")
    kernel = ours["bert/pooler/dense/kernel"]
    assert np.abs(kernel).max() <= 2 * CONFIG["initializer_range"]
    assert kernel.std() == pytest.approx(0.88 * CONFIG["initializer_range"], rel=0.1)
    np.testing.assert_array_equal(ours["bert/pooler/dense/bias"], np.zeros([24]))
    import_folder(source, tmp_path / "again")
    again = _variables(tmp_path / "again")["bert/pooler/dense/kernel"]
    np.testing.assert_array_equal(again, kernel)


@pytest.mark.parametrize(("is_lower", "is_said"), [(False, True), (True, False)])
def test_cased_vocabulary_is_said(is_lower, is_said, tmp_path, import_folder):
    source = write_folder(tmp_path / "theirs")
    content = json.dumps({"do_lower_case": is_lower})
    (source / "tokenizer_config.json").write_text(content)
    said = "fine-tune it with --do_lower_case=false" in import_folder(source)
    assert said == is_said


def test_output_folder_that_holds_something_is_left_alone(tmp_path, refused):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "notes.txt").write_text("mine")
    sentence = refused(write_folder(tmp_path / "theirs"))
    assert "`--output_dir` must be a new or an empty folder. Received: " in sentence


@pytest.mark.once
@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_output_folder_is_one_of_this_machine(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = write_folder(tmp_path / "theirs")
    with pytest.raises(ValueError, match="of this machine, .* Received: gs:/"):
        import_checkpoint(source, kind("gs://bucket/bert"))
    with pytest.raises(ValueError, match="takes for a pattern of names. Received: "):
        import_checkpoint(source, kind("bert[1]"))
    assert [*tmp_path.iterdir()] == [source]


def test_full_disk_leaves_nothing(tmp_path, refused, monkeypatch):
    def fill(arrays, path):
        pathlib.Path(f"{path}.index").write_text("half")
        raise OSError("[Errno 28] No space left on device")

    monkeypatch.setattr(checkpoint, "write_checkpoint", fill)
    assert "No space left" in refused(write_folder(tmp_path / "theirs"))


def _in_pieces(source):
    tensors = source / "model.safetensors"
    tensors.rename(source / "model-00001-of-00002.safetensors")
    (source / "model.safetensors.index.json").write_text("{}")


def _cut_off(size):
    def cut(source):
        path = source / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return cut


_LACKS = (
    "`--input_dir` must hold config.json, vocab.txt or tokenizer.json, and model.safe"
    ".* without "
)
_DAMAGED = "must be a safetensors file. Received: one that cannot"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: (f / "config.json").unlink(), f"{_LACKS}config.json."),
        (shutil.rmtree, "Received: .*theirs, without config.json."),
        (lambda f: (f / "vocab.txt").unlink(), f"{_LACKS}vocab.txt."),
        (lambda f: (f / "model.safetensors").unlink(), f"{_LACKS}model.safetensors."),
        (_in_pieces, "in several pieces. Save the model with `save_pre"),
        (lambda f: (f / "config.json").write_text("{"), "must hold a JSON object"),
        (lambda f: (f / "vocab.txt").write_text("\n"), "1 to `vocab_size` = 40"),
        *((_cut_off(size), _DAMAGED) for size in (0, 100, 10000)),
    ],
)
def test_folder_that_lacks_something_is_refused(change, sentence, tmp_path, refused):
    source = write_folder(tmp_path / "theirs")
    change(source)
    assert re.search(sentence, refused(source))


def test_pytorch_file_alone_is_answered_with_the_conversion(tmp_path, refused):
    source = write_folder(tmp_path / "theirs")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    sentence = refused(source)
    assert "with pytorch_model.bin alone. To convert it" in sentence
    assert f'BertModel.from_pretrained("{source}").save_pretrained(' in sentence


def test_distilbert_and_electra_become_the_bert_with_their_weights(
    tmp_path, import_folder
):
    tensors = {k: v for k, v in random_tensors().items() if "pooler" not in k}
    source = write_folder(tmp_path / "theirs", tensors)
    assert "no token types" not in import_folder(source, tmp_path / "electra_expected")
    name = "embeddings.token_type_embeddings.weight"
    tensors[name] = np.zeros_like(tensors[name])
    import_folder(write_folder(source, tensors), tmp_path / "distilbert_expected")
    for name, write in (("distilbert", write_distilbert), ("electra", write_electra)):
        out = import_folder(write(source), tmp_path / name)
        assert "no pooler: bert/pooler/dense is new and untrained.\n" in out
        said = "no token types: bert/embeddings/token_type_embeddings is new and zero."
        assert (said in out) == (name == "distilbert")
        for part in _MADE:
            expected = (tmp_path / f"{name}_expected" / part).read_bytes()
            assert (tmp_path / name / part).read_bytes() == expected, (name, part)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dim": None}, "must have the key `dim`. Received the keys"),
        ({"n_layers": 0}, "`n_layers` in .* must be an integer >= 1"),
        (
            {"n_heads": 7},
            "`dim` in .* must be a multiple of `n_heads`. Received: 24 and 7",
        ),
        ({"activation": "silu"}, "`activation` in .* must be one of gelu, "),
        ({"attention_dropout": 1}, "`attention_dropout` in .* must be a number"),
        ({"n_layers": 1}, "16 more tensors, such as distilbert.transformer.layer.1"),
        (
            {"n_layers": 3},
            "tensor distilbert.transformer.layer.2.attention.q_lin.weight",
        ),
        ({"layer_norm_eps": 1e-12}, "known one. Received: `layer_norm_eps`"),
        ({"tokenizer_class": "XTokenizer"}, "`tokenizer_class` in .*config.json must"),
    ],
)
def test_distilbert_that_does_not_fit_is_refused(changes, sentence, tmp_path, refused):
    assert re.search(
        sentence, refused(write_distilbert(tmp_path / "theirs", **changes))
    )


def test_electra_that_projects_its_embeddings_is_refused(tmp_path, refused):
    sentence = refused(write_electra(tmp_path / "theirs", embedding_size=12))
    assert "`embedding_size` in " in sentence
    assert (
        "must be `hidden_size`, 24. Received: 12. A projection of the emb" in sentence
    )


def test_parts_that_an_electra_does_not_have_are_refused(tmp_path, refused):
    tensors = random_tensors() | {"embeddings_project.bias": np.zeros([24], np.float32)}
    source = write_folder(tmp_path / "theirs", tensors, model_type="electra")
    # The other two are a pooler's.
    assert "3 more tensors, such as embeddings_project.bias." in refused(source)


def test_other_models_are_converted_by_their_own_class(tmp_path, refused):
    changes = {"model_type": None, "architectures": ["DistilBertForMaskedLM"]}
    source = write_distilbert(tmp_path / "theirs", **changes)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert f'DistilBertModel.from_pretrained("{source}").save_pre' in refused(source)


@pytest.mark.parametrize("model_type", ["roberta", "albert"])
def test_model_that_is_not_a_bert_is_refused(model_type, tmp_path, refused):
    source = write_folder(tmp_path / "theirs", model_type=model_type)
    (source / "vocab.txt").unlink()  # as in other models
    types = "'bert' or 'distilbert' or 'electra'"
    sentence = (
        rf"`model_type` in \S+config.json must be {types}. Rec.*: {model_type!r}."
    )
    assert re.search(sentence, refused(source))


def test_a_bert_need_not_say_that_it_is_one(tmp_path, import_folder, refused):
    source = write_folder(tmp_path / "theirs", model_type=None, architectures=None)
    import_folder(source)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    shutil.rmtree(tmp_path / "bert")
    assert "with pytorch_model.bin alone. To convert it" in refused(source)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model_type": None, "architectures": ["RobertaModel"]},
            "`model_type` in .* must be 'bert' or .* Received: None",
        ),
        ({"is_decoder": True}, "`is_decoder` in .* must be False. Received: True"),
        ({"hidden_act": "silu"}, "`hidden_act` in .* must be one of gelu, gelu_new"),
        ({"position_embedding_type": "relative_key"}, "'absolute'. Received: 'rel"),
        ({"hidden_size": None}, "must have the key `hidden_size`"),
        ({"vocab_size": "40"}, "`vocab_size` in .* must be an integer >= 1"),
        ({"vocab_size": 39}, r"must hold 1 to `vocab_size` = 39 .* Received: 40\."),
        ({"intermediate_size": 33}, r"have the shape \[33, 24\] .*\[32, 24\], F32"),
        ({"num_hidden_layers": 3}, r"hold the tensor encoder\.layer\.2\.attention"),
        ({"num_hidden_layers": 1}, r"ived: 16 more tensors, such as encoder\.layer"),
        (
            {"pruned_heads": {"0": [1]}},
            "`pruned_heads` in .* must be {}. Received: {'0",
        ),
        ({"auto_map": {"AutoModel": "x.X"}}, "`auto_map` in .* must be {}. Received: "),
        (
            {"scale_embeddings": True},
            "config.json must .* Received: `scale_embeddings`",
        ),
        ({"tokenizer_class": "XTokenizer"}, "`tokenizer_class` in .*config.json must"),
    ],
)
def test_config_that_does_not_fit_is_refused(changes, sentence, tmp_path, refused):
    source = write_folder(tmp_path / "theirs", **changes)
    assert re.search(sentence, refused(source))


def test_half_a_pooler_and_quantized_tensors_are_refused(tmp_path, refused):
    tensors, name = random_tensors(), "encoder.layer.0.output.dense.weight"
    quantized = tensors | {name: tensors[name].astype(np.int8)}
    sentence = refused(write_folder(tmp_path / "quantized", quantized))
    assert re.search(rf"{name} in .* types F32, F16, BF16, F64\..*, I8\.", sentence)
    del tensors["pooler.dense.bias"]
    sentence = refused(write_folder(tmp_path / "half", tensors))
    assert "must hold the tensor pooler.dense.bias." in sentence


@pytest.mark.once
def test_an_adapter_beside_the_model_is_refused(tmp_path, refused):
    source = write_folder(tmp_path / "theirs")
    (source / "adapter_config.json").write_text("{}")
    assert "peft's `merge_and_unload`" in refused(source)


def test_a_missing_flag_is_refused(refusal):
    said = refusal(import_hf_checkpoint.main, "--input_dir=x")
    assert "`--output_dir` must be given" in said


@pytest.mark.once
def test_vocabulary_may_be_in_tokenizer_json(tmp_path, import_folder):
    source = write_folder(tmp_path / "theirs")
    (source / "vocab.txt").unlink()
    content = hugging_face_folder.tokenizer_json(lowercase=False)
    (source / "tokenizer.json").write_text(content)
    (source / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    said = import_folder(source)
    assert "Its vocabulary is cased: fine-tune it with --do_lower_case=false." in said
    assert "A word of 101 to 200 characters is split as in google-research/bert" in said
    tokens = (tmp_path / "bert" / "vocab.txt").read_text().split()
    assert tokens == hugging_face_folder.VOCABULARY


@pytest.mark.once
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strip_accents": False}, "`strip_accents` in .* must be True. Rec.*: False"),
        ({"do_lower_case": False, "strip_accents": True}, "must be False. Rec.*: True"),
        ({"do_lower_case": "false"}, "must be True or False. Received: 'false'"),
        ({"tokenize_chinese_chars": False}, "`tokenize_chinese_chars` in .* be True"),
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "`tokenizer_class` in .* 'Bert"),
        ({"word_tokenizer_type": "mecab"}, "must be 'basic'. Received: 'mecab'"),
        ({"cls_token": {"content": "<s>"}}, r"must be '\[CLS\]'. Received: '<s>'"),
        ({"additional_special_tokens": ["<e>"]}, r"must be \[\]. Received: \['<e>'\]"),
        ({"added_tokens_decoder": {"9": {"content": "<e>"}}}, "Received: '<e>'"),
        (
            {"added_tokens_decoder": {"9": {"content": "[SEP]"}}},
            r"`added_tokens_decoder` in .* give \[SEP\] its id .*, 3. Received: 9",
        ),
        ({"added_tokens_decoder": [1]}, r"must be {}. Received: \[1\]"),
        ({"truncation_side": "left"}, "`truncation_side` in .*: 'left'"),
        ({"padding_side": "left"}, "`padding_side` in .*: 'left'"),
        ({"model_input_names": ["input_ids"]}, "`model_input_names` in .*input_ids"),
        ({"tokenizer_class": "DistilBertTokenizer"}, "`tokenizer_class` in .*'Distil"),
        ({"auto_map": {"AutoTokenizer": ["x", None]}}, "`auto_map` in .* be {}"),
        ({"do_word_tokenize": False}, "known one. Received: `do_word_tokenize`"),
    ],
)
def test_options_that_make_other_tokens_are_refused(
    options, sentence, tmp_path, refused
):
    source = write_folder(tmp_path / "theirs")
    (source / "tokenizer_config.json").write_text(json.dumps(options))
    assert re.search(sentence, refused(source))


@pytest.mark.once
def test_options_are_used_or_mean_nothing_or_are_refused(tmp_path):
    def read(has_token_types=True, **options):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
        return hf_tokenizer.read_tokenizer_options(
            tmp_path, ["[PAD]"], None, has_token_types
        )

    assert hf_tokenizer.read_tokenizer_options(tmp_path, []) == (None, None)
    same = {name: values[0] for name, values in hf_tokenizer.ONLY.items()}
    nothing = dict.fromkeys(hf_tokenizer.MEANINGLESS, 1) | {"new_option": None}
    added = {"0": {"content": "[PAD]", "special": True}}
    options = same | nothing | {"do_lower_case": False, "strip_accents": False}
    options |= {"added_tokens_decoder": added, "model_max_length": 128}
    options |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    # As transformers 5 saves a tokenizer that it has loaded.
    options |= {"backend": "tokenizers", "is_local": True, "local_files_only": False}
    (tmp_path / "config.json").write_text('{"tokenizer_class": "XTokenizer"}')
    assert read(**options) == (False, 128)
    others = {k: v[0] for k, v in hf_tokenizer.WITHOUT_TOKEN_TYPES.items()}
    assert read(has_token_types=False, **options | others) == (False, 128)
    with pytest.raises(ValueError, match="Received: `new_option`, which may split"):
        read(**options | {"new_option": 1})


@pytest.mark.once
def test_keys_of_a_config_that_mean_nothing_for_the_encoder_are_accepted(tmp_path):
    content = dict.fromkeys(hf_config.MEANINGLESS, 1) | {"new_key": None}
    content |= {key: values[0] for key, values in hf_config.ONLY.items()}
    (tmp_path / "config.json").write_text(json.dumps(content | CONFIG))
    read, _ = hf_config.read_config(tmp_path / "config.json")
    assert dataclasses.asdict(read).items() <= CONFIG.items()


@pytest.mark.once
def test_shorter_texts_are_said(tmp_path, import_folder):
    source = write_folder(tmp_path / "theirs")
    options = {"model_max_length": 12, "cls_token": "[CLS]"}
    (source / "tokenizer_config.json").write_text(json.dumps(options))
    said = import_folder(source)
    assert "fine-tune it with --max_seq_length=12 or less." in said
    # The smaller number of a sentence transformer.
    options = {"max_seq_length": 11, "do_lower_case": False}
    (source / "sentence_bert_config.json").write_text(json.dumps(options))
    said = import_folder(source, tmp_path / "again")
    assert "fine-tune it with --max_seq_length=11 or less." in said
