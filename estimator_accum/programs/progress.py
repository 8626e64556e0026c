"""Progress of a run, read from the last checkpoint in its folder."""

import contextlib
import logging
import math
import os
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf


class DamagedCheckpointError(ValueError):
    """A checkpoint is not whole, or no file names it."""


class Progress(NamedTuple):
    """Progress of a run at a checkpoint.

    Attributes:
        global_step: Micro-steps done.
        update: Updates done.
        micro_step: Micro-steps done of the next update.
    """

    global_step: int
    update: int
    micro_step: int


def read_progress(output_dir: str) -> Progress:
    """Returns the progress at the folder's last checkpoint; all 0 without one.

    Raises:
        DamagedCheckpointError: If the checkpoint is damaged, shorter than its index says,
            or not named by the folder's `checkpoint` file.
    """
    path = latest_checkpoint(output_dir)
    if path is None:
        return Progress(0, 0, 0)
    try:
        return _read(path)
    except Exception as error:
        raise DamagedCheckpointError(_damage(output_dir, path, error)) from error


def _read(path: str) -> Progress:
    reader = tf.train.load_checkpoint(path)
    types, shapes = (
        reader.get_variable_to_dtype_map(),
        reader.get_variable_to_shape_map(),
    )
    num_bytes = sum(
        math.prod(shape) * types[name].size
        for name, shape in shapes.items()
        if types[name].is_numpy_compatible and types[name] != tf.string
    )
    folder, name = os.path.split(path)
    sizes = [
        tf.io.gfile.stat(os.path.join(folder, file)).length
        for file in tf.io.gfile.listdir(folder)
        if file.startswith(f"{name}.data-")
    ]
    if sum(sizes) < num_bytes:
        raise ValueError(f"{sum(sizes):,} bytes of data, not {num_bytes:,}")
    names = ("global_step", "update_step", "accumulation/micro_steps")
    values = _values(reader, names)
    return Progress(*(int(values.get(name, 0)) for name in names))


def read_values(path: str, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns those variables that a checkpoint has, by name.

    Raises:
        DamagedCheckpointError: If it cannot be read.
    """
    try:
        return _values(tf.train.load_checkpoint(path), names)
    except MemoryError:
        raise
    except Exception as error:  # TensorFlow's reader raises many kinds
        raise DamagedCheckpointError(
            f"Checkpoints must be whole. Received: {path}, whose .index or .data file is "
            f"missing, short or damaged ({_line(error)}). If it is the last one of a "
            "run, name an older one as model_checkpoint_path in its folder's file "
            "`checkpoint`, or use another --output_dir."
        ) from error


def _values(reader, names: Iterable[str]) -> dict[str, np.ndarray]:
    return {name: reader.get_tensor(name) for name in names if reader.has_tensor(name)}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _damage(output_dir: str, path: str, error: Exception) -> str:
    """Returns the sentence about a damaged checkpoint, with a whole one to resume from."""
    whole = None
    for index in pathlib.Path(output_dir).glob("model.ckpt-*.index"):
        with contextlib.suppress(Exception):
            step = _read(str(index.with_suffix(""))).global_step
            whole = max(whole or (0, ""), (step, index.stem))
    again = "Use another --output_dir."
    if whole:
        again = (
            f"To resume from {whole[1]}, write it as model_checkpoint_path in "
            f"{pathlib.Path(output_dir, 'checkpoint')}; or use another --output_dir."
        )
    return (
        "The last checkpoint in `--output_dir` must be whole. Received: "
        f"{path}, whose .index or .data file is missing, short or damaged "
        f"({_line(error)}). {again}"
    )


def ends_at(output_dir: str | os.PathLike, update: int) -> bool:
    """Returns whether the folder's last checkpoint is behind this update.

    With parameter servers, workers may end with some updates more.

    Raises:
        DamagedCheckpointError: As `read_progress` does.
    """
    progress = read_progress(str(output_dir))
    return progress.update >= update and progress.micro_step == 0


def latest_checkpoint(output_dir: str) -> str | None:
    """Returns the latest checkpoint of the folder's run; None for a new run.

    Raises:
        DamagedCheckpointError: If there are checkpoints, but the folder's `checkpoint`
            file, which names the latest one, is missing or damaged: training must not
            start again and overwrite them.
    """
    path = named_checkpoint(output_dir)
    # A run that is killed while it saves its very first checkpoint has no such file.
    checkpoints = [
        file.stem
        for file in sorted(pathlib.Path(output_dir).glob("model.ckpt-*"))
        if re.match(r"model\.ckpt-[1-9]\d*\.", file.name)
    ]
    if path is None and checkpoints:
        raise DamagedCheckpointError(
            "`--output_dir` must be new or hold a whole run. Received: "
            f"{output_dir}, with {checkpoints[-1]}, but its file `checkpoint` names no "
            "checkpoint that is there. Use another --output_dir, or correct that "
            "file."
        )
    return path


def named_checkpoint(folder: str | os.PathLike) -> str | None:
    """Returns the checkpoint that the folder's `checkpoint` file names, if it is there.

    None if that file is damaged, too.
    """
    with _silent_tensorflow(), contextlib.suppress(ValueError):  # not a text file
        return tf.train.latest_checkpoint(os.fspath(folder))
    return None


@contextlib.contextmanager
def _silent_tensorflow():
    """Silences TensorFlow's log lines where our own error message replaces them."""
    logger = logging.getLogger("tensorflow")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
