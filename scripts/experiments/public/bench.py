"""The process in which a public script is trained.

    driver.py --output_dir=DIR --first_weights=FILE --last_weights=FILE [--errors=N]

A driver calls `begin`, makes data in the returned folder, and runs a public script. The
first run writes the weights that training begins with, every later one begins with
them; each writes its last weights. Nothing in the script's text changes.
"""

import argparse
import functools
import inspect
import logging
import pathlib
import random
import runpy
import sys
import types

import numpy as np
import tensorflow as tf
from tensorflow.python.util import function_utils

from estimator_accum import microbatch_model_fn

v1 = tf.compat.v1

UPDATES = 20
BATCH = 32
_PLACES = ("begin", "end")  # of a micro-batch


def read_flags() -> argparse.Namespace:
    """Reads the driver's flags, makes its output folder, and has all be logged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=pathlib.Path, required=True)
    parser.add_argument("--first_weights", type=pathlib.Path, required=True)
    parser.add_argument("--last_weights", type=pathlib.Path, required=True)
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--errors", type=int)
    parser.add_argument("--without_errors", action="store_true")
    parser.add_argument("--in_reverse", action="store_true")
    flags = parser.parse_args()
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("tensorflow.estimator_accum")
    logger.setLevel(logging.DEBUG)  # with the share that is computed on the whole batch
    logger.addHandler(logging.StreamHandler())
    return flags


def begin() -> pathlib.Path:
    """Reads the driver's flags, and makes Estimators do as they say.

    Returns:
        The output folder, which exists.
    """
    flags = read_flags()
    memory = None
    if flags.errors is not None:
        memory = Memory(flags.errors, not flags.without_errors)
        # Where "auto" takes its count from, and where micro-batches run.
        module = sys.modules[microbatch_model_fn.__module__]
        module.MicroBatchCount = lambda *arguments: memory
        memory.limit(sys.modules["estimator_accum.microbatch.runner"].BatchRunner)
    kind = v1.estimator.Estimator
    plain_train = kind.train

    def train(estimator, input_fn, hooks=None, *arguments, **options):
        if estimator._config.tf_random_seed is None:  # examples are shuffled alike
            estimator._config._tf_random_seed = 1
        if flags.in_reverse:
            estimator._model_fn = in_reverse(estimator._model_fn)
        weights = Weights(flags.first_weights, flags.last_weights)
        hooks = [*(hooks or []), weights]
        plain_train(estimator, input_fn, hooks, *arguments, **options)
        if memory is not None:
            print(f"errors: {memory.failed}", flush=True)
        return estimator

    kind.train = train
    return flags.output_dir


def without_dropout() -> None:
    """Makes `tf.nn.dropout` the identity, where a script hard-codes its rate."""
    v1.nn.dropout = lambda x, *arguments, **options: x


def run_module(name: str, *flags: str) -> None:
    """Runs a public script as `python -m name --its --flags` does, as TensorFlow 1."""
    sys.argv = ["compat", "--v1", "-m", name, *flags]
    runpy.run_module("estimator_accum.compat", run_name="__main__")


class Weights(v1.train.SessionRunHook):
    """Sets all variables to those of the first run, and saves the trained ones.

    Args:
        first: File of the first run's variables; written if it does not exist.
        last: File of the trained variables, by name, when training ends.
    """

    def __init__(self, first: pathlib.Path, last: pathlib.Path):
        self._first, self._last = first, last

    def begin(self) -> None:
        self._step = v1.train.get_global_step()
        self._variables = {v.op.name: v for v in v1.global_variables()}
        self._trained = {v.op.name: v for v in v1.trainable_variables()}

    def after_create_session(self, session, coord) -> None:
        del coord
        if not self._first.exists():
            np.savez(self._first, **session.run(self._variables))
            return
        for name, value in np.load(self._first).items():
            self._variables[name].load(value, session)

    def end(self, session) -> None:
        values = session.run({"": self._step, **self._trained})
        np.savez(self._last, **{name or "steps": v for name, v in values.items()})


class Memory:
    """A memory that runs out a number of times, in the count's place.

    Each error doubles the number of micro-batches, as "auto" does. A run without errors
    of the same seed has the same numbers of micro-batches when its updates succeed.

    Args:
        errors: Number of errors of a run, >= 0.
        has_errors: Whether they happen.
    """

    is_fixed = can_recompute = recompute = False
    outcome = None

    def __init__(self, errors: int, has_errors: bool):
        chance = random.Random(errors)
        self._plan = []
        for update in range(UPDATES):
            tries = errors * (update + 1) // UPDATES - errors * update // UPDATES
            final = 2 ** (tries + chance.randrange(2))
            counts = [final >> i for i in range(tries, 0, -1)]
            places = [(chance.randrange(n), chance.choice(_PLACES)) for n in counts]
            self._plan.append((final, places if has_errors else []))
        self.failed = 0
        self._begin_update()

    def _begin_update(self) -> None:
        final, self._pending = self._plan.pop(0) if self._plan else (1, [])
        self.value = final >> len(self._pending)
        self._index = 0

    def is_last(self, rows: int) -> bool:
        """Returns False: there is always room for one example."""
        del rows
        return False

    def time_batch(self, secs_per_example: float) -> None:
        """Does nothing."""

    def increase(self, rows: int, place: str) -> None:
        """Doubles the number of micro-batches."""
        del rows, place
        self._pending.pop(0)
        self.value *= 2
        self._index = 0
        self.failed += 1

    def count_update(self, update: int) -> bool:
        """Takes the next update's numbers."""
        del update
        self._begin_update()
        return False

    def run(self, session, *arguments):
        """Runs a micro-batch, with the error that is planned for its begin or end."""
        self._may_fail("begin")
        values = session.run(*arguments)
        self._may_fail("end")
        self._index += 1
        return values

    def _may_fail(self, where: str) -> None:
        if self._pending and self._pending[0] == (self._index, where):
            raise MemoryError(f"{where} of micro-batch {self._index}")

    def limit(self, runner: type) -> None:
        """Has a class of runners run its micro-batches in this memory."""
        plain = runner._run_micro_batches

        def run_micro_batches(self_, session, *arguments):
            limited = types.SimpleNamespace(run=functools.partial(self.run, session))
            return plain(self_, limited, *arguments)

        runner._run_micro_batches = run_micro_batches


def in_reverse(model_fn):
    """Returns `model_fn` with the examples of each batch in reverse order."""
    names = function_utils.fn_args(model_fn)

    def reversed_fn(features, labels, mode, **others):
        values = {"features": features, "labels": labels, "mode": mode, **others}
        if mode == v1.estimator.ModeKeys.TRAIN:
            for name in ("features", "labels"):
                values[name] = _mapped(lambda x: tf.reverse(x, [0]), values[name])
        return model_fn(**{name: values[name] for name in names})

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    all_names = dict.fromkeys(["features", "labels", "mode", *names])
    reversed_fn.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind) for name in all_names]
    )
    return reversed_fn


def _mapped(function, tensors):
    """Returns `tensors` after `function`, which is not called for None."""
    return tf.nest.map_structure(
        lambda x: None if x is None else function(x), tensors, expand_composites=True
    )
