"""From IDX files to each worker's micro-batches.

All workers know the order of all examples, as a stream without end: epoch after epoch,
each in the order of the files or in one of its own. Update u takes the places
`u * effective_batch_size` and on, shared out over its micro-steps and the workers: what
a worker reads follows from how many updates are done, and nothing else.

Shapes: N = images of a file, B = examples of a micro-batch.
"""

import functools
import gzip
import hashlib
import itertools
import logging
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from distributed import digits
from estimator_accum.runs.batches import Batches

_logger = logging.getLogger("tensorflow.distributed")

NUM_CLASSES = 10
_TRAIN, _TEST = "train", "t10k"  # what the names of the files begin with
_GENERATED = {_TRAIN: (2000, 0), _TEST: (500, 1)}  # (images, seed)
_PREFETCHED_BATCHES = 2

InputFn = Callable[[], tf.data.Dataset]


class Examples(NamedTuple):
    """Images and what they show.

    Attributes:
        images: uint8 [N, height, width].
        labels: int32 [N], of 0 to 9.
    """

    images: np.ndarray
    labels: np.ndarray


def load_examples(data_dir: str | None) -> tuple[Examples, Examples]:
    """Returns (training examples, test examples).

    Of a folder with the t10k files only, their last tenth is the test examples.

    Args:
        data_dir: Folder with MNIST's files, with or without .gz; None generates some.

    Raises:
        ValueError: If a file is missing or damaged, naming it.
    """
    if data_dir is None:
        train, test = (Examples(*digits.generate(*_GENERATED[k])) for k in _GENERATED)
        return train, test
    folder = pathlib.Path(data_dir)
    if not folder.is_dir():
        raise ValueError(
            f"`--data_dir` must be a folder. Received: {data_dir}. "
            "Check the path, or leave it out for generated data."
        )
    test = _read_pair(folder, _TEST)
    if any(folder.glob(f"{_TRAIN}-*")):
        train = _read_pair(folder, _TRAIN)
    else:
        kept = -(-9 * len(test.labels) // 10)
        train = Examples(*(part[:kept] for part in test))
        test = Examples(*(part[kept:] for part in test))
        _logger.info(
            "%s has no train files: the first %s t10k images train, %s test",
            folder,
            f"{len(train.labels):,}",
            f"{len(test.labels):,}",
        )
    if not len(test.labels) or train.images.shape[1:] != test.images.shape[1:]:
        raise ValueError(
            f"{folder} must hold test images of the size of the training images. "
            f"Received: {len(test.labels)} of {test.images.shape[1:]} and "
            f"{train.images.shape[1:]}. Take both from one source."
        )
    return train, test


def checksum(*parts: Examples) -> str:
    """Returns what differs where any example does, or their order."""
    digest = hashlib.sha256()
    for array in itertools.chain(*parts):
        digest.update(f"{array.shape}".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _read_pair(folder: pathlib.Path, kind: str) -> Examples:
    images_path, images = _read_idx(folder, f"{kind}-images-idx3-ubyte", 3)
    labels_path, labels = _read_idx(folder, f"{kind}-labels-idx1-ubyte", 1)
    if len(images) != len(labels) or not images.size:
        raise ValueError(
            f"{images_path} must hold an image for each label of {labels_path.name}. "
            f"Received: {len(images)} images and {len(labels)} labels. Take both "
            "from one source."
        )
    if labels.max() >= NUM_CLASSES:
        place = int(np.argmax(labels >= NUM_CLASSES))
        raise ValueError(
            f"{labels_path} must hold labels of 0 to {NUM_CLASSES - 1}. Received: "
            f"{labels[place]}, the label {place + 1}. Take another file."
        )
    return Examples(images, labels.astype(np.int32))


def _read_idx(
    folder: pathlib.Path, name: str, rank: int
) -> tuple[pathlib.Path, np.ndarray]:
    """Returns (path, bytes as uint8 of that rank); `name` or `name`.gz is read."""
    path = folder / name
    if not path.is_file():
        path = folder / f"{name}.gz"
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"`--data_dir` must hold {name} or {name}.gz, undamaged. Received: {path} "
            f"({reason}). Use scripts/fetch_mnist.py."
        ) from error
    begin = 4 + 4 * rank
    magic = bytes([0, 0, 8, rank])  # unsigned bytes in that many dimensions
    shape = [
        int(n)
        for n in np.frombuffer(content[4:begin], ">u4", len(content[4:begin]) // 4)
    ]
    if content[:4] != magic or len(shape) < rank:
        raise ValueError(
            f"{path} must be an IDX file of unsigned bytes in {rank} dimensions. "
            f"Received: one that begins with {content[:4].hex() or 'nothing'}, not "
            f"{magic.hex()}. Take the file that is published."
        )
    wanted = begin + int(np.prod(shape, dtype=object))
    if len(content) != wanted:
        raise ValueError(
            f"{path} must have the {wanted} bytes that its head speaks of. "
            f"Received: {len(content)}. Download it again."
        )
    return path, np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def places(
    first: int, behind: int, num_examples: int, shuffle: bool, seed: int
) -> np.ndarray:
    """Returns the numbers of the examples at places of the stream, int64 [B].

    Args:
        first: Place in the stream.
        behind: The place behind the last, > first.
        num_examples: Of an epoch.
        shuffle: Whether each epoch has an order of its own.
        seed: Of those orders.
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
    rank: int,
    shuffle: bool,
    seed: int,
    first_update: int = 0,
) -> InputFn:
    """Returns the input_fn of training: one worker's micro-batches without end.

    Args:
        examples: All of them, the same for each worker.
        batches: How they are shared out.
        rank: Of this worker.
        shuffle: Whether each epoch has an order of its own, not the files'.
        seed: Of those orders.
        first_update: Updates that are done already.
    """

    def micro_batches() -> Iterator[tuple]:
        for update in itertools.count(first_update):
            begin = update * batches.effective_batch_size
            for micro_step in range(batches.gradient_accumulation_steps):
                first, behind = batches.share(micro_step, rank)
                numbers = places(
                    begin + first, begin + behind, len(examples.labels), shuffle, seed
                )
                features = {"image": examples.images[numbers], "number": numbers}
                yield features, examples.labels[numbers]

    return lambda: _dataset(micro_batches, examples)


def eval_input_fn(examples: Examples, batch_size: int) -> InputFn:
    """Returns the input_fn of evaluation: each example once."""

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
                "number": tf.TensorSpec([None], tf.int64),  # among all examples
            },
            tf.TensorSpec([None], tf.int32),
        ),
    )
    return dataset.prefetch(_PREFETCHED_BATCHES)
