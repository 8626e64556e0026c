"""`housing_example.main` on a fake machine: `--cpus=2 --dies_after=5` (0: never).

--cpus is the number of CPU devices. The program dies after --dies_after updates, and
leaves a file `died` in its folder; after that the clock of other tasks' watchdogs runs
fast. Checkpoints are 4 updates apart.
"""

import itertools
import os
import pathlib
import sys
import types

import tensorflow as tf

from estimator_accum.programs import watchdog
from housing_example import jobs, model_fn
from housing_example.main import main

_training = model_fn._training


def _training_that_dies(head, features, labels, prices, settings, steps, config):
    def die(step):
        if dies_after and step >= dies_after * steps:
            died.touch()
            os._exit(9)
        return step

    step = tf.compat.v1.train.get_global_step()
    lived = tf.numpy_function(die, [step], step.dtype)
    with tf.control_dependencies([lived]):
        prices = tf.identity(prices)
    return _training(head, features, labels, prices, settings, steps, config)


def _clock() -> float:
    return next(_ticks) if died.exists() else 0.0


_ticks = itertools.count(0, 1e9)

if __name__ == "__main__":
    died = pathlib.Path("died").absolute()
    watchdog.time = types.SimpleNamespace(monotonic=_clock)
    cpus = int(sys.argv.pop(1).removeprefix("--cpus="))
    dies_after = int(sys.argv.pop(1).removeprefix("--dies_after="))
    model_fn._training = _training_that_dies
    jobs._UPDATES_BETWEEN_CHECKPOINTS = 4
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * cpus,
    )
    main(sys.argv)
