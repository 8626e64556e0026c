"""Made-up inputs of public scripts, small models included."""

import json
import pathlib
import random

import bench
import numpy as np
import tensorflow as tf

TOKENS = 16
MASKED = 4
WORDS = [f"word{i}" for i in range(100)]
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_EXAMPLES = bench.BATCH * bench.UPDATES


def write_vocabulary(folder: pathlib.Path) -> pathlib.Path:
    """Writes vocab.txt of BERT's; returns its path."""
    path = folder / "vocab.txt"
    path.write_text("\n".join(_SPECIAL + WORDS) + "\n")
    return path


def sentences() -> list[list[str]]:
    """Returns sentences of made-up words, of different lengths."""
    chance = random.Random(0)
    return [
        [chance.choice(WORDS) for _ in range(chance.randrange(3, 12))]
        for _ in range(_EXAMPLES)
    ]


def write_cola(folder: pathlib.Path) -> None:
    """Writes train.tsv and dev.tsv of CoLA's columns, with 20 batches of sentences."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"made\t{len(sentence) % 2}\t*\t{' '.join(sentence)}\n"
        for sentence in sentences()
    ]
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("".join(lines))


def write_bert_config(folder: pathlib.Path) -> pathlib.Path:
    """Writes a BERT of 2 small layers without dropout; returns its path."""
    return _write_config(folder, {"type_vocab_size": 2})


def write_albert_config(folder: pathlib.Path) -> pathlib.Path:
    """Writes an ALBERT of 2 small layers without dropout; returns its path."""
    return _write_config(
        folder,
        {
            "embedding_size": 16,
            "inner_group_num": 1,
            "net_structure_type": 0,
            "num_hidden_groups": 1,
            "type_vocab_size": 2,
        },
    )


def _write_config(folder: pathlib.Path, others: dict) -> pathlib.Path:
    path = folder / "config.json"
    config = {
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 32,
        "initializer_range": 0.2,
        "intermediate_size": 64,
        "max_position_embeddings": TOKENS,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": len(_SPECIAL) + len(WORDS),
    }
    path.write_text(json.dumps(config | others))
    return path


def write_pretraining(folder: pathlib.Path) -> pathlib.Path:
    """Writes sentence pairs with 1 to 4 masked words as BERT reads them."""
    chance = random.Random(0)
    path = folder / "pretraining.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(_EXAMPLES):
            used = chance.randrange(8, TOKENS + 1)
            ids = [chance.randrange(5, 5 + len(WORDS)) for _ in range(used)]
            places = chance.sample(range(used), chance.randrange(1, MASKED + 1))
            features = {
                "input_ids": _padded(ids, TOKENS),
                "input_mask": _padded([1] * used, TOKENS),
                "segment_ids": _padded([0] * 4 + [1] * (used - 4), TOKENS),
                "masked_lm_positions": _padded(places, MASKED),
                "masked_lm_ids": _padded([ids[i] for i in places], MASKED),
                "masked_lm_weights": _padded([1.0] * len(places), MASKED),
                "next_sentence_labels": [chance.randrange(2)],
            }
            writer.write(_example(features).SerializeToString())
    return path


def _padded(values: list, length: int) -> list:
    return values + [type(values[0])(0)] * (length - len(values))


def _example(features: dict):
    feature = {}
    for name, values in features.items():
        if isinstance(values[0], float):
            kind = tf.train.Feature(float_list=tf.train.FloatList(value=values))
        else:
            kind = tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        feature[name] = kind
    return tf.train.Example(features=tf.train.Features(feature=feature))


def classification(params) -> tf.data.Dataset:
    """Returns batches of inputs for ELECTRA's tasks."""
    chance = np.random.default_rng(0)
    used = chance.integers(4, TOKENS + 1, [_EXAMPLES, 1])
    mask = np.arange(TOKENS) < used
    ids = chance.integers(5, 5 + len(WORDS), [_EXAMPLES, TOKENS]) * mask
    features = {
        "input_ids": ids.astype(np.int32),
        "input_mask": mask.astype(np.int32),
        "segment_ids": np.zeros([_EXAMPLES, TOKENS], np.int32),
        "task_id": np.zeros([_EXAMPLES], np.int32),
        "label": (used[:, 0] % 3 == 0).astype(np.int32),
    }
    examples = tf.data.Dataset.from_tensor_slices(features)
    return examples.batch(params["batch_size"], drop_remainder=True)


def clicks() -> tf.data.Dataset:
    """Returns batches of an identity, numbers, and whether there was a click."""
    chance = np.random.default_rng(0)
    features = {
        "id": chance.integers(0, 50, [_EXAMPLES, 1]),
        "number": chance.normal(size=[_EXAMPLES, 3]).astype(np.float32),
    }
    labels = chance.integers(0, 2, [_EXAMPLES, 1]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(bench.BATCH)


def lists() -> tf.data.Dataset:
    """Returns batches of lists of 6 items, and how relevant each of them is."""
    chance = np.random.default_rng(0)
    features = {"x": chance.normal(size=[_EXAMPLES, 6, 5]).astype(np.float32)}
    labels = chance.integers(0, 3, [_EXAMPLES, 6]).astype(np.float32)
    labels[:, 0] = 2  # one item at least is relevant
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(bench.BATCH)


def noise_and_examples() -> tf.data.Dataset:
    """Returns batches of noise, and of examples for a GAN to imitate."""
    chance = np.random.default_rng(0)
    noise = chance.normal(size=[_EXAMPLES, 16]).astype(np.float32)
    examples = chance.uniform(-1, 1, [_EXAMPLES, 12]).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((noise, examples)).batch(bench.BATCH)


def write_text(folder: pathlib.Path) -> tuple[str, str]:
    """Writes sentences and OpenNMT's vocabulary; returns the two paths."""
    text, vocabulary = folder / "text.txt", folder / "vocabulary.txt"
    text.write_text("".join(" ".join(words) + "\n" for words in sentences()))
    vocabulary.write_text("\n".join(["<blank>", "<s>", "</s>", *WORDS]) + "\n")
    return str(text), str(vocabulary)


def write_tagged(folder: pathlib.Path) -> pathlib.Path:
    """Writes sentences with a tag for each word; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    chance, lines = random.Random(0), []
    for words in sentences():
        lines += [f"{word} {chance.choice(['B-PER', 'I-PER', 'O'])}" for word in words]
        lines.append("")
    for name in ("train", "dev", "test"):
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder
