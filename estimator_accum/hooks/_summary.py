"""Two log lines of a training: its division first, its speed last.

    effective batch 256 = 32 examples x 8 micro-steps; max_steps=30 are 3 updates and 6
        micro-steps more
    trained 3 updates, 57.2 examples per second, peak of the process 810.3 MB

What a hook cannot know is left out: the examples of a micro-batch unless the caller
gave them, and steps that no StopAtStepHook counts.
"""

import logging
import statistics
import sys

import tensorflow as tf

from estimator_accum.core.registry import Window
from estimator_accum.reports import Report, Update
from estimator_accum.reports._display import write_line
from estimator_accum.reports._memory import peak_bytes, spoken

_logger = logging.getLogger("tensorflow.estimator_accum.summary")
_warnings = logging.getLogger("tensorflow.estimator_accum")


class TrainingSummary(Report):
    """Writes the two lines as the progress display writes its own.

    Args:
        unit: Unit of the weights, such as "examples".
        micro_batch_size: Examples per replica in a micro-step; None if unknown.
        partial_window: Treatment of a partial window at the end.
    """

    def __init__(
        self,
        unit: str,
        micro_batch_size: int | None = None,
        partial_window: str = "auto",
    ):
        self._unit = unit if micro_batch_size is None else "examples"
        self._micro_batch_size = micro_batch_size
        self._partial_window = partial_window
        self._first = None

    def check(self) -> None:
        """Finds the steps that the caller asked for."""
        self._asked = _asked_steps()
        self._first, self._is_described, self._rates = None, False, []

    def open(self, update_step: int) -> None:
        """Begins to count, in the first session."""
        self._last = update_step
        if self._first is None:
            self._first = update_step

    def describe(self, window: Window, held: int, steps: int, global_step: int) -> None:
        """Writes the first line for a window that closes after K runs.

        Args:
            window: The window.
            held: Micro-steps that it holds.
            steps: K of the open window.
            global_step: Micro-steps so far.
        """
        if self._first is None:  # another task of the cluster writes it
            return
        is_fixed = not callable(window.options.gradient_accumulation_steps)
        sizes = _counted(steps, "micro-step") + " at first" * (not is_fixed)
        if window.num_replicas > 1:
            sizes += f" x {window.num_replicas} replicas"
        batch, size = f"an update is {sizes}", self._micro_batch_size
        if size is not None:
            whole = size * steps * window.num_replicas
            batch = f"effective batch {whole:,} = {size:,} examples x {sizes}"
        if held:
            left = max(steps - held, 1)
            batch += f"; the open window has {_counted(held, 'micro-step')} and closes "
            batch += f"after {left:,} more"
        # Steps that the caller counts, or nobody does, may be no micro-steps.
        is_known = is_fixed and window.global_step is not None
        self.write_batch(batch, steps if is_known else None, global_step, held)

    def write_batch(
        self, batch: str, steps: int | None, global_step: int, held: int = 0
    ) -> None:
        """Writes the first line, once.

        Args:
            batch: Description of the effective batch.
            steps: K [micro-steps per update]; None if it changes.
            global_step: Micro-steps so far.
            held: Micro-steps in the open window.
        """
        if self._is_described:  # in a session that was lost
            return
        self._is_described = True
        if self._asked is not None and steps is not None:
            batch += f"; {self._described_steps(steps, global_step, held)}"
        write_line(batch, _logger)

    def _described_steps(self, steps: int, global_step: int, held: int) -> str:
        """Returns the updates of the steps that the caller asked for."""
        name, number = self._asked
        left, begin = number, ""
        if name == "max_steps" and global_step:
            left -= global_step
            clock = "micro-step" if steps > 1 else "update"
            begin = f", from {clock} {global_step:,},"
        first = max(steps - held, 1)  # the open window may have more than K already
        updates, rest = divmod(left - first + steps, steps)
        if left < first:
            updates, rest = 0, max(left, 0)
        if rest and not updates and name == "max_steps":
            self._warn_of_no_update(number, steps)
        described = f"{name}={number:,}{begin} are {_counted(updates, 'update')}"
        if rest:
            described += f" and {_counted(rest, 'micro-step')} more"
        return described

    def _warn_of_no_update(self, number: int, steps: int) -> None:
        if self._partial_window != "apply":
            _warnings.warning(
                "max_steps=%d counts micro-steps and ends before the next update, of %d: "
                "nothing is trained, unless the data ends before. Multiply it by %d.",
                number,
                steps,
                steps,
            )

    def write(self, update: Update) -> None:
        """Counts one update."""
        self._last = update.update_step
        amount = update.weight
        if self._micro_batch_size is not None:
            amount = self._micro_batch_size * update.micro_batches
        if update.secs > 0:
            self._rates.append(amount / update.secs)

    def close(self) -> None:
        """Writes the last line."""
        parts = [f"trained {_counted(self._last - self._first, 'update')}"]
        if self._rates:  # the median, since the first update waits for the graph
            rate, unit = statistics.median(self._rates), self._unit.replace("_", "-")
            parts.append(f"{rate:,.1f} {unit} per second")
        parts += [f"peak of {of} {spoken(size)}" for of, size in peak_bytes().items()]
        write_line(", ".join(parts), _logger)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _asked_steps() -> tuple[str, int] | None:
    """Returns the caller's ("max_steps", 30) or ("steps", 30); None if unknown.

    Hooks do not know one another, but the session that calls `begin` has all of them.
    """
    frame = sys._getframe()
    while frame is not None:
        hooks = getattr(frame.f_locals.get("self"), "_hooks", ())
        for hook in hooks if isinstance(hooks, list | tuple) else ():
            if isinstance(hook, tf.compat.v1.train.StopAtStepHook):
                if hook._num_steps is not None:
                    return "steps", hook._num_steps
                return "max_steps", hook._last_step
        frame = frame.f_back
    return None
