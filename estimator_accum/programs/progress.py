"""Progress of a run, read from the last checkpoint in its folder."""

import contextlib
import logging
import os
import pathlib
import re
from typing import NamedTuple

import tensorflow as tf


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
    """Returns the progress at the folder's last checkpoint; all 0 without one."""
    path = latest_checkpoint(output_dir)
    if path is None:
        return Progress(0, 0, 0)
    reader = tf.train.load_checkpoint(path)
    names = ("global_step", "update_step", "accumulation/micro_steps")
    return Progress(
        *(int(reader.get_tensor(n)) if reader.has_tensor(n) else 0 for n in names)
    )


def ends_at(output_dir: str | os.PathLike, update: int) -> bool:
    """Returns whether the folder's last checkpoint is behind this update.

    With parameter servers, workers may end with some updates more.
    """
    try:
        progress = read_progress(str(output_dir))
    except tf.errors.OpError:  # damaged
        return False
    return progress.update >= update and progress.micro_step == 0


def latest_checkpoint(output_dir: str) -> str | None:
    """Returns the latest checkpoint of the folder's run; None for a new run.

    Raises:
        ValueError: If there are checkpoints, but the folder's `checkpoint` file, which
            names the latest one, is missing or damaged: training must not start again
            and overwrite them.
    """
    path = None
    with _silent_tensorflow(), contextlib.suppress(ValueError):  # not a text file
        path = tf.train.latest_checkpoint(output_dir)
    # A run that is killed while it saves its very first checkpoint has no such file.
    checkpoints = [
        file.stem
        for file in sorted(pathlib.Path(output_dir).glob("model.ckpt-*"))
        if re.match(r"model\.ckpt-[1-9]\d*\.", file.name)
    ]
    if path is None and checkpoints:
        raise ValueError(
            "`--output_dir` must be new or hold a whole run. Received: "
            f"{output_dir}, with {checkpoints[-1]}, but its file `checkpoint` names no "
            "checkpoint that is there. Use another --output_dir, or correct that "
            "file."
        )
    return path


@contextlib.contextmanager
def _silent_tensorflow():
    """Silences TensorFlow's log lines where our own error message replaces them."""
    logger = logging.getLogger("tensorflow")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled
