"""Input pipeline: from all examples to each worker's micro-batches.

All tasks know the order of all examples, an endless stream: epoch after epoch, each
in file order or in an order of its own. Update u takes the places from
`u * effective_batch_size` on, divided among its micro-steps and the replicas: what a
task reads depends only on the number of updates done.

Shapes: B = examples of a micro-batch.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import tensorflow as tf

from distributed.inputs import Examples
from estimator_accum.programs.batches import Batches

_PREFETCHED_BATCHES = 2

InputFn = Callable[[], tf.data.Dataset]


def places(
    first: int, behind: int, num_examples: int, shuffle: bool, seed: int
) -> np.ndarray:
    """Returns the example numbers at stream places [first, behind), int64 [B].

    Args:
        first: First place in the stream.
        behind: Place after the last one, > first.
        num_examples: Examples of an epoch.
        shuffle: Whether each epoch has an order of its own.
        seed: Random seed of those orders.
    """
    stream = np.arange(first, behind)
    numbers = stream % num_examples
    if shuffle:
        for epoch in range(first // num_examples, (behind - 1) // num_examples + 1):
            is_in_it = stream // num_examples == epoch
            order = _order(num_examples, seed, epoch)
            numbers[is_in_it] = order[numbers[is_in_it]]
    return numbers


@functools.lru_cache(maxsize=2)  # drawing one takes longer than a micro-batch
def _order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.RandomState([seed, epoch]).permutation(num_examples)


def train_input_fn(
    examples: Examples,
    batches: Batches,
    *,
    replicas: Iterable[int],
    shuffle: bool,
    seed: int,
    first_update: int = 0,
    stride: int = 1,
) -> InputFn:
    """Returns the input_fn for training: one task's endless micro-batches.

    Args:
        examples: All training examples, the same for each worker.
        batches: Division of each update's examples.
        replicas: Numbers of this task's replicas, which take turns in each micro-step.
        shuffle: Whether each epoch has an order of its own instead of the files' order.
        seed: Random seed of those orders.
        first_update: Number of the first update to read.
        stride: Distance between two updates to read, >= 1.
    """

    def micro_batches() -> Iterator[tuple]:
        for update in itertools.count(first_update, stride):
            begin = update * batches.effective_batch_size
            for micro_step in range(batches.gradient_accumulation_steps):
                for replica in replicas:
                    first, behind = (
                        begin + place for place in batches.share(micro_step, replica)
                    )
                    numbers = places(first, behind, len(examples.labels), shuffle, seed)
                    features = {"image": examples.images[numbers], "number": numbers}
                    yield features, examples.labels[numbers]

    return lambda: _dataset(micro_batches, examples)


def eval_input_fn(examples: Examples, batch_size: int) -> InputFn:
    """Returns the input_fn for evaluation: each example once."""

    def batches() -> Iterator[tuple]:
        for first in range(0, len(examples.labels), batch_size):
            part = slice(first, first + batch_size)
            numbers = np.arange(len(examples.labels))[part]
            features = {"image": examples.images[part], "number": numbers}
            yield features, examples.labels[part]

    return lambda: _dataset(batches, examples)


def _dataset(micro_batches: Callable, examples: Examples) -> tf.data.Dataset:
    height, width = examples.images.shape[1:]
    dataset = tf.data.Dataset.from_generator(
        micro_batches,
        output_signature=(
            {
                "image": tf.TensorSpec([None, height, width], tf.uint8),
                "number": tf.TensorSpec([None], tf.int64),  # index among all examples
            },
            tf.TensorSpec([None], tf.int32),
        ),
    )
    return dataset.prefetch(_PREFETCHED_BATCHES)
