"""The order of training examples, resuming in it, and the batches that come out."""

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune.encoding import encode_examples
from bert_finetune.input_pipeline import (
    epoch_order,
    eval_input_fn,
    num_micro_steps,
    predict_input_fn,
    train_input_fn,
    train_micro_batches,
)
from bert_finetune.tasks import Example
from bert_finetune.tokenization import WordPieceTokenizer

_LETTERS = "abcdefghij"
_MAX_SEQ_LENGTH = 9


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "vocab.txt"
    # [PAD] away from 0, so that a padding of zeros would be seen.
    tokens = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[PAD]",
        *_LETTERS,
        *(f"n{i}" for i in range(99)),
    ]
    path.write_text("\n".join(tokens))
    return WordPieceTokenizer(path, do_lower_case=True)


def _examples(count, label=True, pair=False):
    """Example i is `n<i>` and as many letters as the last digit of i, label i % 3."""
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
    """All that an input_fn yields, as an Estimator would read it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        batch = tf.compat.v1.data.make_one_shot_iterator(input_fn()).get_next()
        batches = []
        while True:
            try:
                batches.append(session.run(batch))
            except tf.errors.OutOfRangeError:
                return batches


def _train_batches(encoded, **overrides):
    settings = {
        "micro_batch_size": 4,
        "num_train_epochs": 3.0,
        "seed": 1,
        "first_micro_step": 0,
        "max_seq_length": _MAX_SEQ_LENGTH,
        **overrides,
    }
    return _batches(train_input_fn(encoded, **settings))


def _rows(**overrides):
    settings = {
        "num_examples": 23,
        "num_train_epochs": 3.0,
        "micro_batch_size": 4,
        "seed": 1,
        **overrides,
    }
    return [rows.tolist() for rows in train_micro_batches(**settings)]


def _flat(batches):
    return [row for batch in batches for row in batch]


def _ids(features):
    """What example each row of a batch is: the id after [CLS]."""
    return features["input_ids"][:, 1].tolist()


def test_each_epoch_uses_every_example_exactly_once():
    stream = _flat(_rows(num_train_epochs=3.0))
    epochs = [stream[start : start + 23] for start in (0, 23, 46)]
    assert len(stream) == 69
    assert [sorted(epoch) for epoch in epochs] == [list(range(23))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != sorted(epochs[0])


def test_order_is_a_function_of_seed_and_epoch():
    assert epoch_order(50, seed=7, epoch=2).tolist() == (
        epoch_order(50, seed=7, epoch=2).tolist()
    )
    assert _rows(seed=1) == _rows(seed=1)
    assert _rows(seed=1) != _rows(seed=2)
    # Not the same orders one epoch later, which seed + epoch would give.
    assert epoch_order(50, 8, 1).tolist() != epoch_order(50, 7, 2).tolist()


def test_order_is_the_same_under_every_version_of_numpy():
    first = epoch_order(10, seed=3, epoch=1)
    assert first.tolist() == [9, 7, 8, 3, 5, 6, 4, 0, 2, 1]
    largest = epoch_order(10, seed=2**64 - 1, epoch=0)
    assert largest.tolist() == [8, 9, 0, 7, 4, 2, 6, 3, 1, 5]


def test_fraction_of_an_epoch_is_cut_from_its_order():
    assert _flat(_rows(num_train_epochs=1.5)) == _flat(_rows(num_train_epochs=3.0))[:34]
    assert len(_flat(_rows(num_train_epochs=0.1))) == 2


def test_micro_batches_cross_epochs_and_only_the_last_is_short():
    sizes = [len(rows) for rows in _rows(num_train_epochs=3.0)]
    assert sizes == [4] * 17 + [1]
    assert len(sizes) == num_micro_steps(23, 3.0, 4)


def test_micro_batch_may_be_larger_than_the_data():
    assert [len(rows) for rows in _rows(micro_batch_size=50)] == [50, 19]
    assert sorted(_rows(micro_batch_size=50)[0][:23]) == list(range(23))


@pytest.mark.parametrize("num_train_epochs", [1.0, 2.7, 3.0])
def test_windows_of_4_micro_batches_of_8_hold_the_batches_of_32(num_train_epochs):
    settings = {"num_examples": 301, "num_train_epochs": num_train_epochs}
    small = _rows(micro_batch_size=8, **settings)
    large = _rows(micro_batch_size=32, **settings)
    assert [_flat(small[i : i + 4]) for i in range(0, len(small), 4)] == large
    assert len(large[-1]) == int(301 * num_train_epochs) % 32 > 0


@pytest.mark.parametrize("first_micro_step", [0, 1, 5, 6, 11, 16, 17, 18])
def test_batches_from_a_micro_step_on_are_the_tail_of_the_run(
    encoded, first_micro_step
):
    full = _train_batches(encoded)
    tail = _train_batches(encoded, first_micro_step=first_micro_step)
    assert len(full) == 18
    assert len(tail) == 18 - first_micro_step
    for expected, received in zip(full[first_micro_step:], tail, strict=True):
        tf.nest.map_structure(np.testing.assert_array_equal, received, expected)


def test_skipped_micro_batches_are_not_made(monkeypatch):
    drawn = []

    def counting(num_examples, seed, epoch):
        drawn.append(epoch)
        return epoch_order(num_examples, seed, epoch)

    monkeypatch.setattr("bert_finetune.input_pipeline.epoch_order", counting)
    last = num_micro_steps(1000, 1_000_000, 8) - 1
    (rows,) = train_micro_batches(1000, 1_000_000, 8, seed=0, first_micro_step=last)
    assert drawn == [999_999]
    assert rows.tolist() == epoch_order(1000, 0, 999_999)[-8:].tolist()


@pytest.mark.parametrize(
    ("num_examples", "epochs", "micro_batch_size", "expected"),
    [
        (8, 1, 4, 2),
        (9, 1, 4, 3),
        (7250, 3.0, 8, 2719),
        (10, 0.25, 1, 2),
        (100, 0.29, 1, 29),  # 28.999999999999996 in floating point
        (3, 1, 100, 1),
    ],
)
def test_number_of_micro_steps_drops_nothing(
    num_examples, epochs, micro_batch_size, expected
):
    assert num_micro_steps(num_examples, epochs, micro_batch_size) == expected


def test_training_batch_holds_tokens_mask_segments_and_labels(tokenizer):
    encoded = encode_examples(_examples(12, pair=True), tokenizer, _MAX_SEQ_LENGTH)
    names = tokenizer.vocab_file.read_text().split("\n")
    seen = set()
    for features, labels in _train_batches(encoded, num_train_epochs=1):
        assert {f.dtype for f in features.values()} == {np.dtype(np.int32)}
        assert labels.dtype == np.int32
        rows = zip(*(features[n] for n in sorted(features)), labels, strict=True)
        for input_ids, input_mask, segment_ids, label in rows:
            tokens = [names[i] for i in input_ids]
            number = int(tokens[1][1:])
            a = [f"n{number}", *_LETTERS[: number % 10]][: _MAX_SEQ_LENGTH - 4]
            expected = ["[CLS]", *a, "[SEP]", f"n{number}", "[SEP]"]
            padding = _MAX_SEQ_LENGTH - len(expected)
            assert tokens == expected + ["[PAD]"] * padding
            assert input_mask.tolist() == [1] * len(expected) + [0] * padding
            assert segment_ids.tolist() == (
                [0] * (len(a) + 2) + [1] * 2 + [0] * padding
            )
            assert label == number % 3
            seen.add(number)
    assert seen == set(range(12))


@pytest.mark.parametrize("batch_size", [1, 4, 23, 100])
def test_evaluation_keeps_file_order_and_adds_no_examples(encoded, batch_size):
    input_fn = eval_input_fn(
        encoded, batch_size=batch_size, max_seq_length=_MAX_SEQ_LENGTH
    )
    batches = _batches(input_fn)
    first = 14  # the id of n0
    assert _flat([_ids(features) for features, _ in batches]) == [
        first + i for i in range(23)
    ]
    assert _flat([labels.tolist() for _, labels in batches]) == [
        i % 3 for i in range(23)
    ]
    assert {len(labels) for _, labels in batches[:-1]} <= {batch_size}
    assert len(batches[-1][1]) == 23 - batch_size * (len(batches) - 1) > 0


def test_prediction_yields_features_without_labels(tokenizer):
    encoded = encode_examples(_examples(6, label=False), tokenizer, _MAX_SEQ_LENGTH)
    assert encoded.labels is None
    batches = _batches(
        predict_input_fn(encoded, batch_size=4, max_seq_length=_MAX_SEQ_LENGTH)
    )
    assert [sorted(batch) for batch in batches] == [
        ["input_ids", "input_mask", "segment_ids"]
    ] * 2
    assert _flat(_ids(batch) for batch in batches) == [14 + i for i in range(6)]


def test_static_shapes_name_the_length_and_leave_the_batch_open(encoded):
    with tf.Graph().as_default():
        dataset = train_input_fn(
            encoded,
            micro_batch_size=4,
            num_train_epochs=1,
            seed=0,
            first_micro_step=0,
            max_seq_length=16,
        )()
        features, labels = tf.compat.v1.data.get_output_shapes(dataset)
    assert {name: shape.as_list() for name, shape in features.items()} == {
        "input_ids": [None, 16],
        "input_mask": [None, 16],
        "segment_ids": [None, 16],
    }
    assert labels.as_list() == [None]


def test_estimator_trains_evaluates_and_predicts_on_the_input_fns(encoded, tmp_path):
    def model_fn(features, labels, mode):
        rows = tf.shape(features["input_ids"])[0]
        first = features["input_ids"][:, 1]
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions={"first": first})
        seen = tf.compat.v1.get_variable("seen", [], tf.int32, trainable=False)
        with tf.control_dependencies([rows]):  # no step without a batch
            step_op = tf.compat.v1.train.get_or_create_global_step().assign_add(1)
        return tf.estimator.EstimatorSpec(
            mode,
            loss=tf.reduce_mean(tf.cast(labels, tf.float32)),
            train_op=tf.group(seen.assign_add(rows), step_op),
            eval_metric_ops={"label": tf.compat.v1.metrics.mean(labels)},
        )

    estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
    estimator.train(
        train_input_fn(
            encoded,
            micro_batch_size=4,
            num_train_epochs=3,
            seed=0,
            first_micro_step=0,
            max_seq_length=_MAX_SEQ_LENGTH,
        )
    )
    assert estimator.get_variable_value("global_step") == 18
    assert estimator.get_variable_value("seen") == 69
    settings = {"batch_size": 4, "max_seq_length": _MAX_SEQ_LENGTH}
    metrics = estimator.evaluate(eval_input_fn(encoded, **settings))
    assert metrics["label"] == pytest.approx(np.mean([i % 3 for i in range(23)]))
    predictions = estimator.predict(predict_input_fn(encoded, **settings))
    assert [p["first"] for p in predictions] == [14 + i for i in range(23)]


@pytest.mark.parametrize("micro_batch_size", [0, -1])
def test_batch_sizes_below_one_are_refused(encoded, micro_batch_size):
    for flag, make in (
        ("--train_batch_size", lambda: num_micro_steps(9, 1.0, micro_batch_size)),
        (
            "--eval_batch_size",
            lambda: eval_input_fn(
                encoded, batch_size=micro_batch_size, max_seq_length=9
            ),
        ),
        (
            "--predict_batch_size",
            lambda: predict_input_fn(
                encoded, batch_size=micro_batch_size, max_seq_length=9
            ),
        ),
    ):
        with pytest.raises(
            ValueError,
            match=rf"`{flag}` must be an integer >= 1\. Received: {micro_batch_size}\.",
        ):
            make()


@pytest.mark.parametrize(
    "num_train_epochs", [0, -1.0, 0.01, float("nan"), float("inf")]
)
def test_epochs_that_reach_no_example_are_refused(num_train_epochs):
    with pytest.raises(
        ValueError,
        match=r"`--num_train_epochs` must be finite and reach one example\. Received: "
        rf"{num_train_epochs} of 23 examples\. Use 3\.0",
    ):
        num_micro_steps(23, num_train_epochs, 4)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_outside_their_range_are_refused(encoded, seed):
    with pytest.raises(
        ValueError, match=rf"`seed` must be an integer, 0 <= .* Received: {seed}\."
    ):
        _train_batches(encoded, seed=seed)


@pytest.mark.parametrize("first_micro_step", [-1, 19])
def test_first_micro_step_outside_the_run_is_refused(encoded, first_micro_step):
    with pytest.raises(
        ValueError,
        match=r"`first_micro_step` must be from 0 to the run's 18 micro-steps\. "
        rf"Received: {first_micro_step}\.",
    ):
        _train_batches(encoded, first_micro_step=first_micro_step)


def test_shorter_max_seq_length_than_that_of_encoding_is_refused(encoded):
    with pytest.raises(
        ValueError,
        match=r"`max_seq_length` must be at least that of `encode_examples`\. Received: "
        r"8 for examples of up to 9 tokens",
    ):
        eval_input_fn(encoded, batch_size=4, max_seq_length=8)


def test_examples_without_labels_are_for_prediction_only(tokenizer):
    encoded = encode_examples(_examples(6, label=False), tokenizer, _MAX_SEQ_LENGTH)
    with pytest.raises(ValueError, match=r"must have labelled examples\. Received: ex"):
        eval_input_fn(encoded, batch_size=4, max_seq_length=_MAX_SEQ_LENGTH)
    with pytest.raises(ValueError, match="Use `predict_input_fn` for them"):
        _train_batches(encoded)
