"""Input pipeline: from IDX files to each worker's micro-batches.

All workers know the order of all examples, an endless stream: epoch after epoch, each
in file order or in an order of its own. Update u takes the places from
`u * effective_batch_size` on, divided among its micro-steps and the workers: what a
worker reads depends only on the number of updates done.

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
from estimator_accum.programs.batches import Batches

_logger = logging.getLogger("tensorflow.distributed")

NUM_CLASSES = 10
_TRAIN, _TEST = "train", "t10k"  # prefixes of the file names
_GENERATED = {_TRAIN: (2000, 0), _TEST: (500, 1)}  # (images, seed)
_PREFETCHED_BATCHES = 2

InputFn = Callable[[], tf.data.Dataset]


class Examples(NamedTuple):
    """Images and their labels.

    Attributes:
        images: uint8 [N, height, width].
        labels: int32 [N], 0 to 9.
    """

    images: np.ndarray
    labels: np.ndarray


def load_examples(data_dir: str | None) -> tuple[Examples, Examples]:
    """Returns (training examples, test examples).

    In a folder with only the t10k files, their last tenth becomes the test examples.

    Args:
        data_dir: Folder with MNIST's files, with or without .gz; None generates digits.

    Raises:
        ValueError: If a file is missing or damaged; the message names it.
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
    """Returns the SHA-256 checksum of all examples in their order."""
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
    """Reads `name` or `name`.gz; returns (path, uint8 array of that rank)."""
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
    magic = bytes([0, 0, 8, rank])  # unsigned bytes, `rank` dimensions
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
    rank: int,
    shuffle: bool,
    seed: int,
    first_update: int = 0,
) -> InputFn:
    """Returns the input_fn for training: one worker's endless micro-batches.

    Args:
        examples: All training examples, the same for each worker.
        batches: Division of each update's examples.
        rank: Rank of this worker.
        shuffle: Whether each epoch has an order of its own instead of the files' order.
        seed: Random seed of those orders.
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
