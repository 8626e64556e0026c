"""From encoded examples to `input_fn`s: ordered by position, cut, padded.

    order  ->  cut  ->  pad
    which example comes at position p of the run | micro-batches | one dense batch

The training order is a pure function of seed and position: epoch e is the permutation
of all examples that (seed, e) draws, epochs follow one another without a gap, and the
stream is cut into micro-batches. So a run that starts again at micro-step s reads what
it would have read, and 4 micro-batches of 8 are the batch of 32 in other pieces.

Shapes: B = examples of a micro-batch, T = `max_seq_length`.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from bert_finetune.encoding import EncodedExamples

_PREFETCHED_BATCHES = 2

InputFn = Callable[[], tf.data.Dataset]


def num_micro_steps(
    num_examples: int, num_train_epochs: float, micro_batch_size: int
) -> int:
    """Returns how many micro-batches a training run consumes.

        ceil(num_train_examples / micro_batch_size)

    The last one may be short; no example is dropped.
    """
    _check_batch_size("--train_batch_size", micro_batch_size)
    total = _num_train_examples(num_examples, num_train_epochs)
    return -(-total // micro_batch_size)


def _num_train_examples(num_examples: int, num_train_epochs: float) -> int:
    # Rounded first: 100 * 0.29 is 28.999999999999996.
    total = round(num_examples * num_train_epochs, 6)
    if not 1 <= total < math.inf:
        raise ValueError(
            "`--num_train_epochs` must be finite and reach one example. Received: "
            f"{num_train_epochs} of {num_examples} examples. Use 3.0, google-research/bert's own."
        )
    return int(total)


def train_input_fn(
    examples: EncodedExamples,
    *,
    micro_batch_size: int,
    num_train_epochs: float,
    seed: int,
    first_micro_step: int,
    max_seq_length: int,
) -> InputFn:
    """Returns the input_fn of a training run, or of what is left of one.

    Args:
        examples: With labels.
        micro_batch_size: B [examples].
        num_train_epochs: May have a fraction: the last epoch is then cut short.
        seed: Of the order, 0 <= seed < 2**64.
        first_micro_step: Micro-batches that earlier parts of the run have consumed,
            0 for a new one; they are skipped without being made.
        max_seq_length: T.

    Returns:
        An input_fn whose dataset yields `({"input_ids", "input_mask", "segment_ids"},
        labels)`, int32 [B, T] and [B], and ends after the last micro-batch.

    Raises:
        ValueError: If a number is out of its range, or labels are missing.
    """
    _check_seed(seed)
    _check_first_micro_step(
        first_micro_step,
        num_micro_steps(len(examples), num_train_epochs, micro_batch_size),
    )

    def micro_batches() -> Iterator[np.ndarray]:
        return train_micro_batches(
            len(examples), num_train_epochs, micro_batch_size, seed, first_micro_step
        )

    return _input_fn(examples, micro_batches, max_seq_length, is_labelled=True)


def eval_input_fn(
    examples: EncodedExamples, *, batch_size: int, max_seq_length: int
) -> InputFn:
    """Returns the input_fn of an evaluation: file order, each example once.

    Batches are as in `train_input_fn`; the last one may be short.
    """
    _check_batch_size("--eval_batch_size", batch_size)
    return _in_file_order(examples, batch_size, max_seq_length, is_labelled=True)


def predict_input_fn(
    examples: EncodedExamples, *, batch_size: int, max_seq_length: int
) -> InputFn:
    """Returns the input_fn of a prediction: as `eval_input_fn`, features only."""
    _check_batch_size("--predict_batch_size", batch_size)
    return _in_file_order(examples, batch_size, max_seq_length, is_labelled=False)


def _in_file_order(
    examples: EncodedExamples, batch_size: int, max_seq_length: int, is_labelled: bool
) -> InputFn:
    def batches() -> Iterator[np.ndarray]:
        for start in range(0, len(examples), batch_size):
            yield np.arange(start, min(start + batch_size, len(examples)))

    return _input_fn(examples, batches, max_seq_length, is_labelled)


def train_micro_batches(
    num_examples: int,
    num_train_epochs: float,
    micro_batch_size: int,
    seed: int,
    first_micro_step: int = 0,
) -> Iterator[np.ndarray]:
    """Yields the examples' numbers of each micro-batch, int64 [B]."""
    total = _num_train_examples(num_examples, num_train_epochs)
    epoch, order = -1, None
    for start in range(first_micro_step * micro_batch_size, total, micro_batch_size):
        rows = []
        position, end = start, min(start + micro_batch_size, total)
        while position < end:  # more than one turn where epochs meet
            if position // num_examples != epoch:
                epoch = position // num_examples
                order = epoch_order(num_examples, seed, epoch)
            offset = position % num_examples
            rows.append(order[offset : offset + end - position])
            position += len(rows[-1])
        yield np.concatenate(rows)


def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the permutation of one epoch, int64 [examples]."""
    # Sorted random numbers, not a shuffle: NumPy promises the same raw numbers for ever,
    # but not the same shuffle, and a run may go on under another NumPy.
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return np.argsort(bits.random_raw(num_examples), kind="stable")


def _input_fn(
    examples: EncodedExamples,
    batches: Callable[[], Iterator[np.ndarray]],
    max_seq_length: int,
    is_labelled: bool,
) -> InputFn:
    _check_lengths(examples, max_seq_length)
    if is_labelled:
        _check_labels(examples)

    def generate():
        for rows in batches():
            features = examples.features(rows, max_seq_length)
            yield (features, examples.labels[rows]) if is_labelled else features

    signature = {
        name: tf.TensorSpec([None, max_seq_length], tf.int32)
        for name in ("input_ids", "input_mask", "segment_ids")
    }
    if is_labelled:
        signature = (signature, tf.TensorSpec([None], tf.int32))

    def input_fn() -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
        return dataset.prefetch(_PREFETCHED_BATCHES)

    return input_fn


def _check_batch_size(flag: str, batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(
            f"`{flag}` must be an integer >= 1. Received: {batch_size}. "
            "Use the largest batch that fits in memory."
        )


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise ValueError(
            f"`seed` must be an integer, 0 <= seed < 2**64. Received: {seed}."
        )


def _check_first_micro_step(first_micro_step: int, last: int) -> None:
    if not 0 <= first_micro_step <= last:
        raise ValueError(
            f"`first_micro_step` must be from 0 to the run's {last} micro-steps. "
            f"Received: {first_micro_step}. Use the settings that the run began with."
        )


def _check_lengths(examples: EncodedExamples, max_seq_length: int) -> None:
    longest = int(examples.lengths.max())
    if longest > max_seq_length:
        raise ValueError(
            "`max_seq_length` must be at least that of `encode_examples`. Received: "
            f"{max_seq_length} for examples of up to {longest} tokens."
        )


def _check_labels(examples: EncodedExamples) -> None:
    if examples.labels is None:
        raise ValueError(
            "Training and evaluation must have labelled examples. Received: examples "
            "without labels. Use `predict_input_fn` for them."
        )
