"""Disk space for checkpoints."""

import errno
import logging
import os
import pathlib
import re
import shutil

import tensorflow as tf

from estimator_accum.programs.progress import named_checkpoint
from estimator_accum.reports._memory import spoken

_logger = logging.getLogger("tensorflow.estimator_accum")

_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_UNFINISHED = (
    "model.ckpt-*_temp",
    "model.ckpt-*.meta.tmp*",
    "checkpoint.tmp*",
    "graph.pbtxt.tmp*",
    "*.partial",
)
_logged: set[pathlib.Path] = set()  # folders of this process that were logged


class DiskSpaceHook(tf.compat.v1.train.SessionRunHook):
    """Logs before training how much space checkpoints need, and refuses too little.

    A program that trains in parts logs it before the first one.

    Args:
        config: The Estimator's `tf.estimator.RunConfig`.
        num_copies: Checkpoints that the program keeps besides those of the config.
    """

    def __init__(self, config, num_copies: int = 0):
        self._model_dir, self._folder = config.model_dir, pathlib.Path(config.model_dir)
        self._kept = config.keep_checkpoint_max
        self._num_copies = num_copies

    def begin(self) -> None:
        """Compares the checkpoints of the finished graph with the free space.

        Raises:
            OSError: ENOSPC, if checkpoints do not fit.
        """
        tf.io.gfile.makedirs(self._model_dir)
        if not self._folder.is_dir():  # object storage, whose free space is unknown
            return
        sizes = [
            (variable.shape.num_elements() or 0) * variable.dtype.size
            for variable in tf.compat.v1.global_variables()
        ]
        graph = tf.compat.v1.get_default_graph().as_graph_def().ByteSize()
        # The next checkpoint is written before the oldest is deleted. None and 0 keep
        # all of them, as many as training will make: then two must fit.
        needed = (sum(sizes) + graph) * ((self._kept or 1) + 1 + self._num_copies)
        there = [path.stat().st_size for path in self._folder.glob("model.ckpt-*")]
        missing, free = needed - sum(there), shutil.disk_usage(self._folder).free
        if self._folder not in _logged:
            _logged.add(self._folder)
            _logger.info(
                "checkpoints take up to %s in %s, where %s are free",
                spoken(needed),
                self._folder,
                spoken(free),
            )
        if missing > free:
            reason = f"{spoken(missing)} needed for checkpoints, {spoken(free)} free"
            raise OSError(errno.ENOSPC, reason, str(self._folder))


def is_of_full_disk(error: BaseException) -> bool:
    """Returns whether an error, or one that caused it, reports a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _ERRORS:
            return True
        # TensorFlow's errors have a message; its event writer raises RuntimeErrors.
        message = getattr(error, "message", str(error))
        if any(os.strerror(number) in message for number in _ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False


def remove_unfinished(output_dir: str | os.PathLike) -> str | None:
    """Deletes files that a full disk has left incomplete.

    Returns:
        Name of the checkpoint from which training will resume, with its folder if a
        program trains several models; None without one.
    """
    folder = pathlib.Path(output_dir)
    for pattern in _UNFINISHED:
        for path in folder.rglob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    for path in folder.rglob("model.ckpt-*.data-*"):
        index = path.with_name(re.sub(r"\.data-.*", ".index", path.name))
        if not index.exists():
            path.unlink(missing_ok=True)
    models = [folder, *(path for path in sorted(folder.glob("*")) if path.is_dir())]
    checkpoints = filter(None, map(named_checkpoint, models))
    latest = next(checkpoints, None)
    return latest and str(pathlib.Path(latest).relative_to(folder))
