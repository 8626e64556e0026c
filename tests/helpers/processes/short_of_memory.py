"""`distributed.main` on a machine with memory for `--rows_in_memory` images at once.

It dies after `--micro_steps` micro-steps; 0 is never, and -n sends a SIGTERM in the
micro-step after n. When it dies it leaves a file `died` in its folder; after that the
clock of other tasks' watchdogs runs fast. A Python MemoryError in the graph is
TensorFlow's out-of-memory error.
"""

import itertools
import os
import pathlib
import signal
import sys
import types

import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from distributed import model_fn
from distributed.main import main
from estimator_accum.programs import watchdog
from tests.helpers.processes import running

_training = model_fn._training


def _training_in_memory(loss, labels, *arguments):
    def allocate(labels, step):
        if 0 < micro_steps <= step:
            died.touch()
            os._exit(9)
        if micro_steps < 0 and step == -micro_steps:
            running.signal_training(signal.SIGTERM)
        if len(labels) > rows_in_memory:
            raise MemoryError(f"{len(labels)} images")
        return labels

    step = tf.compat.v1.train.get_global_step()
    allocated = tf.numpy_function(allocate, [labels, step], tf.int32)
    with tf.control_dependencies([allocated]):
        loss = tf.identity(loss)
    return _training(loss, labels, *arguments)


def _clock() -> float:
    return next(_ticks) if died.exists() else 0.0


_ticks = itertools.count(0, 1e9)

if __name__ == "__main__":
    died = pathlib.Path("died").absolute()
    watchdog.time = types.SimpleNamespace(monotonic=_clock)
    rows_in_memory = int(sys.argv.pop(1).removeprefix("--rows_in_memory="))
    micro_steps = int(sys.argv.pop(1).removeprefix("--micro_steps="))
    model_fn._training = _training_in_memory
    main(sys.argv)
