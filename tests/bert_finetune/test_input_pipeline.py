"""The batches that come out of the input pipelines."""

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import input_pipeline
from bert_finetune.encoding import encode_examples
from bert_finetune.input_pipeline import (
    cut_by_tokens,
    eval_input_fn,
    predict_input_fn,
)
from bert_finetune.tasks import Example
from bert_finetune.tokenization import WordPieceTokenizer
from bert_finetune.windows import epoch_order, make_windows
from estimator_accum.programs.batches import Batches

_LETTERS = "abcdefghij"
_MAX_SEQ_LENGTH = 9


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "vocab.txt"
    # [PAD] is not 0, so that padding with zeros would be noticed.
    tokens = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *_LETTERS]
    tokens += [f"n{i}" for i in range(99)]
    path.write_text("\n".join(tokens))
    return WordPieceTokenizer(path, do_lower_case=True)


def _examples(count, label=True, pair=False):
    """Example i is `n<i>` and as many letters as i's last digit, with label i % 3."""
    return [
        Example(
            guid=str(i),
            text_a=f"n{i} {' '.join(_LETTERS[: i % 10])}",
            text_b=f"n{i}" if pair else None,
            label=i % 3 if label else None,
        )
        for i in range(count)
    ]


@pytest.fixture
def encoded(tokenizer):
    return encode_examples(_examples(23), tokenizer, _MAX_SEQ_LENGTH)


def _batches(input_fn):
    """Returns all batches of an input_fn, read as an Estimator does."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        batch = tf.compat.v1.data.make_one_shot_iterator(input_fn()).get_next()
        batches = []
        while True:
            try:
                batches.append(session.run(batch))
            except tf.errors.OutOfRangeError:
                return batches


def _train_batches(encoded, windows=None, padded_length=_MAX_SEQ_LENGTH, **options):
    windows = windows or _windows(num_examples=len(encoded))
    options["padded_length"] = padded_length
    return _batches(input_pipeline.train_input_fn(encoded, windows, **options))


_BATCHES = Batches(8, 2, 1)


def _windows(batches=_BATCHES, num_train_epochs=3.0, num_examples=23):
    return make_windows(num_examples, num_train_epochs, batches, seed=1)


def _flat(batches):
    return [row for batch in batches for row in batch]


def _ids(features):
    """Returns the id after [CLS] of each row, which identifies the example."""
    return features["input_ids"][:, 1].tolist()


@pytest.mark.parametrize("done", [(0, 1), (4, 0), (8, 1), (9, 0)])
def test_batches_from_a_micro_step_on_are_the_tail_of_the_run(encoded, done):
    full = _train_batches(encoded)
    tail = _train_batches(encoded, update=done[0], micro_step=done[1])
    first = 2 * done[0] + done[1]
    assert len(full) == 18
    assert len(tail) == 18 - first
    for expected, received in zip(full[first:], tail, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, received, expected)


def test_replicas_of_a_process_take_turns_and_an_empty_share_is_not_real(encoded):
    """19 examples in windows of 2 x 3 x 3; the last one goes to the first replica."""
    windows = _windows(Batches(18, 2, 3), num_train_epochs=19.5 / 23)
    alone = _train_batches(encoded, windows=windows, replicas=[0])
    pair = _train_batches(encoded, windows=windows, replicas=[1, 2])
    assert (len(alone), len(pair)) == (3, 6)
    stream = epoch_order(23, 1, 0)
    ids = _flat(_ids(features) for features, _ in alone + pair[:4])
    assert sorted(ids) == sorted(14 + stream[:19])
    assert [f["is_real_example"].tolist() for f, _ in pair[3:]] == [[1] * 3, [0], [0]]
    assert _ids(pair[1][0]) == (14 + stream[2:9:3]).tolist()


def test_training_batch_holds_tokens_mask_segments_and_labels(tokenizer):
    encoded = encode_examples(_examples(12, pair=True), tokenizer, _MAX_SEQ_LENGTH)
    names = tokenizer.vocab_file.read_text().split("\n")
    seen = set()
    for features, labels in _train_batches(encoded):
        assert {f.dtype for f in features.values()} == {np.dtype(np.int32)}
        assert labels.dtype == np.int32
        assert features.pop("is_real_example").tolist() == [1] * len(labels)
        rows = zip(*(features[n] for n in sorted(features)), labels, strict=True)
        for input_ids, input_mask, segment_ids, label in rows:
            tokens = [names[i] for i in input_ids]
            number = int(tokens[1][1:])
            a = [f"n{number}", *_LETTERS[: number % 10]][: _MAX_SEQ_LENGTH - 4]
            expected = ["[CLS]", *a, "[SEP]", f"n{number}", "[SEP]"]
            padding = _MAX_SEQ_LENGTH - len(expected)
            assert tokens == expected + ["[PAD]"] * padding
            assert input_mask.tolist() == [1] * len(expected) + [0] * padding
            segments = [0] * (len(a) + 2) + [1] * 2 + [0] * padding
            assert segment_ids.tolist() == segments
            assert label == number % 3
            seen.add(number)
    assert seen == set(range(12))


@pytest.mark.parametrize("padded_length", [_MAX_SEQ_LENGTH, None])
@pytest.mark.parametrize("tokens", [1, 40, 1000])
def test_evaluation_is_cut_by_tokens_and_has_each_example_once(
    encoded, tokens, padded_length
):
    cut = cut_by_tokens(encoded, tokens, padded_length)
    batches = _batches(eval_input_fn(encoded, cut, padded_length))
    ids = _flat(_ids(features) for features, _ in batches)
    in_order = np.argsort(encoded.lengths, kind="stable")
    in_order = np.arange(23) if padded_length else in_order
    assert ids == (14 + in_order).tolist()  # 14 is the id of n0
    labels = _flat(labels.tolist() for _, labels in batches)
    assert labels == [(i - 14) % 3 for i in ids]
    sizes = [features["input_ids"].size for features, _ in batches]
    assert all(size <= tokens or len(f) == 1 for size, f in zip(sizes, cut))
    # One more example would have been too much.
    widths = [features["input_ids"].shape[1] for features, _ in batches]
    after = zip(cut, widths[1:])
    assert all((len(f) + 1) * width > tokens for f, width in after)
    lengths = [features["input_mask"].sum(axis=1) for features, _ in batches]
    assert padded_length or np.all(np.diff(_flat(lengths)) >= 0)
    widths = [features["input_ids"].shape[1] for features, _ in batches]
    assert widths == [padded_length or batch.max() for batch in lengths]


def test_prediction_yields_features_without_labels(tokenizer):
    encoded = encode_examples(_examples(23, label=False), tokenizer, _MAX_SEQ_LENGTH)
    assert encoded.labels is None
    cut = cut_by_tokens(encoded, 40)
    batches = _batches(predict_input_fn(encoded, cut))
    names = ["input_ids", "input_mask", "segment_ids"]
    assert [sorted(batch) for batch in batches] == [names] * len(cut)
    ids = _flat(_ids(batch) for batch in batches)
    assert ids == (14 + np.concatenate(cut)).tolist() != sorted(ids)


def test_static_shapes_name_the_length_and_leave_the_batch_open(encoded):
    with tf.Graph().as_default():
        dataset = input_pipeline.train_input_fn(encoded, _windows(), padded_length=16)()
        features, labels = tf.compat.v1.data.get_output_shapes(dataset)
    tokens = {key: [None, 16] for key in ("input_ids", "input_mask", "segment_ids")}
    shapes = {name: shape.as_list() for name, shape in features.items()}
    assert shapes == tokens | {"is_real_example": [None]}
    assert labels.as_list() == [None]


def test_training_pads_each_micro_batch_to_its_longest(encoded):
    padded = _train_batches(encoded)
    trimmed = _train_batches(encoded, padded_length=None)
    widths = set()
    for (wide, labels), (narrow, same_labels) in zip(padded, trimmed, strict=True):
        np.testing.assert_array_equal(labels, same_labels)
        longest = narrow["input_mask"].sum(axis=1).max()
        widths.add(longest)
        for name in ("input_ids", "input_mask", "segment_ids"):
            np.testing.assert_array_equal(narrow[name], wide[name][:, :longest])
    assert len(widths) > 1


def test_shorter_padded_length_than_that_of_encoding_is_refused(encoded):
    with pytest.raises(ValueError, match="Received: 8 for examples of up to 9 tokens"):
        eval_input_fn(encoded, cut_by_tokens(encoded, 40), padded_length=8)


def test_examples_without_labels_are_for_prediction_only(tokenizer):
    encoded = encode_examples(_examples(6, label=False), tokenizer, _MAX_SEQ_LENGTH)
    with pytest.raises(ValueError, match=r"must have labelled examples\. Received: ex"):
        eval_input_fn(encoded, cut_by_tokens(encoded, 40))
    with pytest.raises(ValueError, match="Use `predict_input_fn` for them"):
        _train_batches(encoded)
