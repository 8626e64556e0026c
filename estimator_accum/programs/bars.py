"""Progress of an evaluation or a prediction, batch by batch."""

import time

import tensorflow as tf

from estimator_accum.reports._display import Display


class BatchBar(tf.compat.v1.train.SessionRunHook):
    """Shows the batches done of `Estimator.evaluate` or `Estimator.predict`.

    A bar in a terminal or a notebook, which goes when it is full if it is below the
    bar of training; elsewhere a line every 30 seconds, so a short evaluation prints
    nothing. One hook may be used for one evaluation after the other.

    Args:
        description: First word of the display: "evaluation" or "prediction".
        total_batches: Batches of one evaluation or prediction; None if unknown.

    Attributes:
        secs: Time after the first batch, which also waits for the graph [seconds].
    """

    def __init__(self, description: str, total_batches: int | None):
        self._display = Display(description, "batch", total_batches)

    def after_create_session(self, session, coord) -> None:
        self._batches = 0
        self._display.open()

    def after_run(self, run_context, run_values) -> None:
        self._batches += 1
        if self._batches == 1:
            self._since = time.perf_counter()
        self._display.show(self._batches)

    def end(self, session) -> None:
        self.secs = time.perf_counter() - self._since if self._batches else 0.0
        self._display.close()
