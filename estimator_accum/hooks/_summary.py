"""Two log lines of a training: its division first, its speed last.

    effective batch 256 = 32 examples x 8 micro-steps; max_steps and steps count
        micro-steps
    trained 3 updates, 57.2 examples per second, peak of the process 810.3 MB, peak of
        the model 98.1 MB, sums of gradients 12.4 MB; the open window has 6 of 8
        micro-steps

A hook does not know the number of the steps. The examples of a micro-batch are the
caller's number, or in the first line that of `Dataset.batch`. The memory of the model is
missing if an earlier training of the process needed more.
"""

import logging
import statistics

from estimator_accum.core.accumulators import variables_of
from estimator_accum.core.registry import Window
from estimator_accum.graph.data_sets import batch_size_of
from estimator_accum.graph.names import BATCHES
from estimator_accum.graph.walks import ancestors
from estimator_accum.reports import Report, Update
from estimator_accum.reports._display import write_line
from estimator_accum.reports._memory import MODEL, peak_bytes, spoken

_logger = logging.getLogger("tensorflow.estimator_accum.summary")
_warnings = logging.getLogger("tensorflow.estimator_accum")


class TrainingSummary(Report):
    """Writes the two lines as the progress display writes its own.

    Args:
        unit: Unit of the weights, such as "examples".
        micro_batch_size: Examples per replica in a micro-step; None if unknown.
    """

    def __init__(self, unit: str, micro_batch_size: int | None = None):
        self._unit = unit if micro_batch_size is None else "examples"
        self._micro_batch_size = micro_batch_size
        self._first = None

    def check(self) -> None:
        """Begins a training."""
        self._first, self._is_described, self._rates = None, False, []
        self._held = self._steps = self._updates = 0
        self._is_shared, self._sum_bytes = False, None

    def open(self, update_step: int) -> None:
        """Begins to count, in the first session."""
        self._last = update_step
        if self._first is None:
            self._first = update_step
            # Only now, since the session has to choose the options of the devices.
            self._memory_before = peak_bytes().get(MODEL)

    def describe(self, window: Window, held: int, steps: int) -> None:
        """Writes the first line for a window that closes after K runs.

        Args:
            window: The window.
            held: Micro-steps that it holds.
            steps: K of the open window.
        """
        if self._first is None:  # another task of the cluster writes it
            return
        is_fixed = not callable(window.options.gradient_accumulation_steps)
        sums = variables_of(window.accumulators)
        # A list of slices, as on parameter servers, has no size of its own.
        if sums and all(v.shape.is_fully_defined() for v in sums):
            self._sum_bytes = sum(
                v.shape.num_elements() * v.dtype.base_dtype.size for v in sums
            )
        sizes = _counted(steps, "micro-step") + " at first" * (not is_fixed)
        if window.num_replicas > 1:
            sizes += f" x {window.num_replicas} replicas"
        batch, size = f"an update is {sizes}", self._micro_batch_size
        if size is None and window.num_replicas == 1:
            size = _examples_of(window)
        if size is not None:
            whole = size * steps * window.num_replicas
            batch = f"effective batch {whole:,} = {size:,} examples x {sizes}"
        self._is_shared = window.place.is_on_worker
        if self._is_shared:
            batch += " of one worker"
        if held:
            left = max(steps - held, 1)
            batch += f"; the open window has {_counted(held, 'micro-step')} and closes "
            batch += f"after {left:,} more"
        # Steps that the caller counts, or nobody does, may be no micro-steps.
        if window.global_step is not None and not (is_fixed and steps == 1):
            batch += "; max_steps and steps count micro-steps"
        self.write_batch(batch)

    def write_batch(self, batch: str) -> None:
        """Writes the first line, a description of the effective batch, once."""
        if not self._is_described:  # in a session that was lost
            self._is_described = True
            write_line(batch, _logger)

    def write(self, update: Update) -> None:
        """Counts one update."""
        self._last, self._updates = update.update_step, self._updates + 1
        amount = update.weight
        if self._micro_batch_size is not None:
            amount = self._micro_batch_size * update.micro_batches
        if update.secs > 0:
            self._rates.append(amount / update.secs)

    def note_last(self, update_step: int) -> None:
        """Counts updates for which `write` was not called, up to `update_step`."""
        self._last = update_step

    def keep(self, held: int, steps: int) -> None:
        """Notes how many micro-steps the open window has at the end, and its K."""
        self._held, self._steps = held, steps

    def close(self, division: str | None = None) -> None:
        """Writes the last line, and warns where no update was ever made.

        Args:
            division: Description of the batches' micro-batches; None for micro-steps.
        """
        parts = [f"trained {_counted(self._last - self._first, 'update')}"]
        if self._is_shared:
            updates = _counted(self._updates, "update")
            parts = [
                f"trained {updates} of this worker, the last of which was {self._last:,}"
            ]
        if self._rates:  # the median, since the first update waits for the graph
            rate, unit = statistics.median(self._rates), self._unit.replace("_", "-")
            parts.append(f"{rate:,.1f} {unit} per second")
        peaks = peak_bytes()
        if peaks.get(MODEL) == self._memory_before:  # reached before this training
            peaks.pop(MODEL, None)
        parts += [f"peak of {of} {spoken(size)}" for of, size in peaks.items()]
        if self._sum_bytes is not None:
            parts.append(f"sums of gradients {spoken(self._sum_bytes)}")
        line = ", ".join(parts)
        if division is not None:
            line += f"; {division}"
        if self._held:
            open_window = f"{self._held:,} of {self._steps:,} micro-steps"
            line += f"; the open window has {open_window}"
            line += ", which no checkpoint holds" * self._is_shared
        write_line(line, _logger)
        if self._held and (self._updates if self._is_shared else self._last) == 0:
            self._warn_of_no_update()

    def _warn_of_no_update(self) -> None:
        unchanged, train_on = ", so no weight has changed yet", True
        if self._is_shared:  # other workers may have changed them
            unchanged, train_on = ", so this worker has changed no weight", False
        _warnings.warning(
            "The first update needs %d micro-steps. Received: %d%s. max_steps and steps "
            "count micro-steps: multiply them by %d%s.",
            self._steps,
            self._held,
            unchanged,
            self._steps,
            ", or train on from this checkpoint" * train_on,
        )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _examples_of(window: Window) -> int | None:
    """Returns the examples of a micro-batch, if its data set has one size of batches."""
    needed = ancestors([window.mean_loss.op, window.update_step_after.op])
    sizes = {batch_size_of(source) for source in needed if source.type in BATCHES}
    return sizes.pop() or None if len(sizes) == 1 else None
