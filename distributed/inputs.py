"""Inputs of a run: MNIST's files, or images that are drawn; needs no TensorFlow.

Shapes: N = images of a file.
"""

import gzip
import hashlib
import itertools
import logging
import pathlib
import zlib
from typing import NamedTuple

import numpy as np

from distributed import digits
from distributed.settings import Settings
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.folder import check_free, check_output_dir
from estimator_accum.programs.inputs import Inputs

_logger = logging.getLogger("tensorflow.distributed")

NUM_CLASSES = 10
_TRAIN, _TEST = "train", "t10k"  # prefixes of the file names
_GENERATED = {_TRAIN: (2000, 0), _TEST: (500, 1)}  # (images, seed)


def read(settings: Settings, cluster: Cluster) -> Inputs:
    """Reads and checks all examples and the output folder; writes nothing.

    Args:
        settings: Settings of the run, which `check` has accepted.
        cluster: Cluster of which this process is a task.

    Raises:
        ValueError: If an input does not fit; the message is one sentence.
    """
    check_output_dir(settings.output_dir)
    # A worker may get here before the chief has written the settings.
    check_free(settings.output_dir, "*.ckpt*")
    train, test = load_examples(settings.data_dir)
    if cluster.is_chief and settings.data_dir and not _has_train(settings.data_dir):
        _logger.info(
            "%s has no train files: the first %s t10k images train, %s test",
            settings.data_dir,
            f"{len(train.labels):,}",
            f"{len(test.labels):,}",
        )
    return Inputs(settings, cluster, train, test, checksum(train, test))


def _has_train(data_dir: str | pathlib.Path) -> bool:
    return any(pathlib.Path(data_dir).glob(f"{_TRAIN}-*"))


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
    if _has_train(folder):
        train = _read_pair(folder, _TRAIN)
    else:
        kept = -(-9 * len(test.labels) // 10)
        train = Examples(*(part[:kept] for part in test))
        test = Examples(*(part[kept:] for part in test))
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
