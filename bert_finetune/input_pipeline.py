"""Input pipeline: batches of encoded examples for `input_fn`s.

In training, `Windows` determines the order and the micro-batches. Evaluation and
prediction go from the shortest example to the longest, so that examples of similar
length share a batch; `cut_by_tokens` returns these batches.

Shapes: B = examples of a micro-batch, T = its longest example [tokens], or the length
that all batches are padded to.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from bert_finetune.encoding import EncodedExamples
from bert_finetune.windows import Windows, bounds_by_tokens

_PREFETCHED_BATCHES = 2

InputFn = Callable[[], tf.data.Dataset]


def train_input_fn(
    examples: EncodedExamples,
    windows: Windows,
    *,
    replicas: Iterable[int] = (0,),
    update: int = 0,
    micro_step: int = 0,
    stride: int | None = None,
    padded_length: int | None = None,
) -> InputFn:
    """Returns the input_fn for one process's part of a run, or for the rest of it.

    A replica that has no example in a micro-step gets a placeholder example of weight
    0, so that all replicas make the same number of micro-steps.

    Args:
        examples: Training examples, with labels.
        windows: Windows of the run.
        replicas: Numbers of this process's replicas, which get their micro-batches from
            this pipeline in turn.
        update: Updates that are done, 0 for a new run.
        micro_step: Micro-steps of the next update that are done.
        stride: Distance between two updates of this process, whose pipeline never
            ends; None reads all updates, once.
        padded_length: T [tokens]; None pads to each micro-batch's longest example.

    Returns:
        An input_fn whose dataset yields `({"input_ids", "input_mask", "segment_ids",
        "is_real_example"}, labels)`, int32 [B, T], the last two [B] (labels of a
        regression float32), and without `stride` ends after the last micro-batch.

    Raises:
        ValueError: If labels are missing, or examples are longer than T.
    """

    def micro_batches() -> Iterator[tuple[np.ndarray, bool]]:
        for rows in windows.stream(replicas, update, micro_step, stride):
            yield (rows, True) if len(rows) else (np.zeros(1, np.int64), False)

    return _input_fn(examples, micro_batches, padded_length, is_training=True)


def eval_input_fn(
    examples: EncodedExamples,
    batches: Sequence[np.ndarray],
    padded_length: int | None = None,
    *,
    is_labelled: bool = True,
) -> InputFn:
    """Returns the input_fn for an evaluation of the `batches` of `cut_by_tokens`.

    They are padded as in `train_input_fn`, without placeholders.
    """

    def in_order() -> Iterator[tuple[np.ndarray, bool]]:
        return ((numbers, True) for numbers in batches)

    return _input_fn(examples, in_order, padded_length, is_labelled=is_labelled)


# The input_fn for a prediction, which has features only.
predict_input_fn = functools.partial(eval_input_fn, is_labelled=False)


def cut_by_tokens(
    examples: EncodedExamples, tokens: int, padded_length: int | None = None
) -> list[np.ndarray]:
    """Returns the numbers of each batch's examples, int64: each example once.

    From the shortest example to the longest, or in the order of the file if all are
    padded to one length.

    Args:
        examples: Examples of an evaluation or a prediction.
        tokens: Most tokens of a batch, padding included; one example may have more.
        padded_length: T [tokens]; None pads to each batch's longest example.
    """
    lengths = examples.lengths
    if padded_length is not None:
        lengths = np.full_like(lengths, padded_length)
    numbers = np.argsort(lengths, kind="stable")
    return np.split(numbers, bounds_by_tokens(lengths[numbers], tokens))


def _input_fn(
    examples: EncodedExamples,
    batches: Callable[[], Iterator[tuple[np.ndarray, bool]]],
    padded_length: int | None,
    is_labelled: bool = True,
    is_training: bool = False,
) -> InputFn:
    if padded_length is not None:
        _check_lengths(examples, padded_length)
    if is_labelled:
        _check_labels(examples)
    lengths = examples.lengths

    def generate():
        for rows, are_real in batches():
            features = examples.features(rows, padded_length or lengths[rows].max())
            if is_training:
                features["is_real_example"] = np.full(len(rows), are_real, np.int32)
            yield (features, examples.labels[rows]) if is_labelled else features

    signature = {
        name: tf.TensorSpec([None, padded_length], tf.int32)
        for name in ("input_ids", "input_mask", "segment_ids")
    }
    if is_training:
        signature["is_real_example"] = tf.TensorSpec([None], tf.int32)
    if is_labelled:
        signature = (signature, _spec_of(examples.labels))

    def input_fn() -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
        return dataset.prefetch(_PREFETCHED_BATCHES)

    return input_fn


def _spec_of(labels: np.ndarray) -> tf.TensorSpec:
    return tf.TensorSpec([None, *labels.shape[1:]], labels.dtype)


def _check_lengths(examples: EncodedExamples, padded_length: int) -> None:
    longest = int(examples.lengths.max())
    if longest > padded_length:
        raise ValueError(
            "`padded_length` must be that of the longest example at least. Received: "
            f"{padded_length} for examples of up to {longest} tokens."
        )


def _check_labels(examples: EncodedExamples) -> None:
    if examples.labels is None:
        raise ValueError(
            "Training and evaluation must have labelled examples. Received: examples "
            "without labels. Use `predict_input_fn` for them."
        )
