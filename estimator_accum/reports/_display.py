"""Progress display on stderr."""

import logging
import sys
import time
import warnings

import tqdm.std

with warnings.catch_warnings():
    # Where a notebook has no ipywidgets, the bar is one of text.
    warnings.simplefilter("ignore", tqdm.std.TqdmWarning)
    import tqdm.auto

_logger = logging.getLogger("tensorflow.estimator_accum")

_SECS_BETWEEN_LINES = 30


class Display:
    """Progress display with the remaining time.

    A bar in a terminal or a notebook; elsewhere a line at most every 30 seconds, the
    first one after 30 seconds. The line goes to the logger `tensorflow.estimator_accum`
    if that shows INFO, to stderr if it shows warnings, as TensorFlow's default is, and
    nowhere if it shows only errors.

    Args:
        description: First word of the display, such as "training".
        unit: Unit of progress, in the singular, such as "update".
        total: Units of the whole run; None if unknown.
    """

    def __init__(self, description: str, unit: str, total: int | None):
        self._description = description
        self._unit = unit
        self._total = total
        self._bar = None

    def open(self, done: int = 0) -> None:
        """Starts the display, and its clock, at `done` units."""
        self.close()
        self._bar = tqdm.auto.tqdm(
            total=self._total,
            initial=done,
            unit=f" {self._unit}",
            desc=self._description,
            leave=None,  # a bar below another one goes when it is full
            # None disables the bar if stderr is not a terminal.
            disable=False if _is_notebook() else None,
        )
        self._start = (done, time.perf_counter())
        self._next_line = self._start[1] + _SECS_BETWEEN_LINES

    def show(self, done: int, **values: str) -> None:
        """Shows that `done` units are done, with some values by name."""
        if not self._bar.disable:
            self._bar.set_postfix(values, refresh=False)
            self._bar.update(done - self._bar.n)
        elif time.perf_counter() >= self._next_line:
            self._write_line(done, values)

    def _write_line(self, done: int, values: dict[str, str]) -> None:
        now = time.perf_counter()
        self._next_line = now + _SECS_BETWEEN_LINES
        place = f"{self._unit} {done:,}"
        parts = [f"{name} {value}" for name, value in values.items()]
        if self._total is not None:
            first, since = self._start
            secs = (now - since) / max(done - first, 1) * (self._total - done)
            place += f" of {self._total:,}"
            parts.append(f"{tqdm.std.tqdm.format_interval(max(secs, 0))} left")
        line = f"{self._description}: {', '.join([place, *parts])}"
        write_line(line, _logger)

    def close(self) -> None:
        """Leaves the display as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def write_line(line: str, logger: logging.Logger) -> None:
    """Writes a line to a logger that shows INFO, to stderr for one that shows warnings."""
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", line)
    elif logger.isEnabledFor(logging.WARNING) and sys.stderr is not None:
        tqdm.std.tqdm.write(line, file=sys.stderr)


def _is_notebook() -> bool:
    """Returns whether stderr is a notebook's, which is no terminal but shows bars."""
    return type(sys.stderr).__module__.partition(".")[0] == "ipykernel"
