"""Makes every Estimator of the process train each batch in micro-batches."""

import functools
import logging
import sys
from collections.abc import Callable

import tensorflow as tf

from estimator_accum import microbatch_model_fn
from estimator_accum.core.current_batch import current_batch
from estimator_accum.graph.internals import (
    call_of_model_fn,
    call_of_train,
    model_fn_of,
    replace_function,
)
from estimator_accum.microbatch.model_fn import SharedWeightsError
from estimator_accum.unedited.own_loops import OwnLoops

NO_STEP_LEFT = "the Estimator is trained already, up to its last step"
_logger = logging.getLogger("tensorflow.estimator_accum")


def cut_batches(micro_batches: int | str) -> Callable[[], int]:
    """Changes `tf.estimator.Estimator` for the rest of the process.

    All ways to a model_fn lead through `Estimator._call_model_fn`: subclasses, canned
    estimators, TPUEstimator, strategies and `train_and_evaluate`.

    Args:
        micro_batches: As for `microbatch_model_fn`.

    Returns:
        A function to call when the script has ended, that returns the exit code.
    """
    _logger.setLevel(logging.INFO)  # tells what it does
    modes = set()
    say_once = functools.cache(_say_that_nothing_was_cut)
    trained = note_trainings()

    def refuse_own_loop() -> None:
        if not modes and not trained:
            say_once()
            raise SystemExit(1)
        _logger.warning(
            "micro-batches: the script also trains by session.run, without an Estimator; "
            "these batches are not split"
        )

    loops = OwnLoops(refuse_own_loop)

    def note(mode: str) -> None:
        modes.add(mode)
        loops.ignore(tf.compat.v1.get_default_graph())

    replace_function(
        call_of_model_fn(),
        lambda original: _in_micro_batches(original, micro_batches, note),
    )

    def exit_code() -> int:
        if trained and tf.estimator.ModeKeys.TRAIN not in modes:
            _logger.info(
                "micro-batches: %s, so no batch of a training was split", NO_STEP_LEFT
            )
            return 0
        if not modes:
            say_once()
        elif tf.estimator.ModeKeys.TRAIN not in modes:
            _logger.warning(
                "micro-batches: the script trained no Estimator, so no batch of a training was "
                "split"
            )
        return int(not modes)

    return exit_code


def note_trainings() -> list[bool]:
    """Returns a list to which each later `Estimator.train` that ends adds True."""
    trained = []

    def noting(original: Callable) -> Callable:
        def train(estimator, *args, **kwargs):
            result = original(estimator, *args, **kwargs)
            trained.append(True)
            return result

        return train

    replace_function(call_of_train(), noting)
    return trained


def _in_micro_batches(
    original: Callable, micro_batches: int | str, note: Callable[[str], None]
) -> Callable:
    """Returns the stand-in for `Estimator._call_model_fn`.

    Args:
        original: That function.
        micro_batches: As for `microbatch_model_fn`.
        note: Called with the mode of each call.
    """

    # AutoGraph has nothing to convert here, nor in the library.
    @tf.autograph.experimental.do_not_convert
    def call_model_fn(estimator, features, labels, mode, config):
        def model_fn(features, labels, mode, config):
            return original(estimator, features, labels, mode, config)

        note(mode)
        # An Estimator made of another one calls that one's model_fn with a micro-batch.
        is_outermost = current_batch() is None
        if mode == tf.estimator.ModeKeys.TRAIN and is_outermost:
            _logger.info(
                "micro-batches: %s trains each batch in %s, then updates once",
                _name(model_fn_of(estimator)),
                _described(micro_batches),
            )
        cut = microbatch_model_fn(model_fn, micro_batches)
        try:
            return cut(features, labels=labels, mode=mode, config=config)
        except SharedWeightsError as refusal:  # a restart of the task does not help
            print(f"estimator-accum run: {refusal}", file=sys.stderr)
            sys.exit(2)

    return call_model_fn


def _say_that_nothing_was_cut() -> None:
    print(
        "estimator-accum run: the script trained no Estimator, so no batch was split. A "
        "loop of session.run calls takes --gradient_accumulation_steps=K.",
        file=sys.stderr,
        flush=True,
    )


def _described(micro_batches: int | str) -> str:
    if micro_batches == "auto":
        return "1, 2, 4, ... micro-batches, the first number that fits in memory"
    return f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"


def _name(model_fn) -> str:
    """Returns the name of an Estimator's model_fn, which may be TensorFlow's own."""
    model_fn = getattr(model_fn, "func", model_fn)  # of functools.partial
    module = getattr(model_fn, "__module__", "")
    name = getattr(model_fn, "__qualname__", type(model_fn).__name__)
    return f"{module}.{name}".replace("<locals>.", "")
