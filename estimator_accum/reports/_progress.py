"""Progress of training, update by update."""

from estimator_accum.reports._display import Display
from estimator_accum.reports._report import Report, Update


class ProgressReport(Report):
    """Progress display of training: updates done, updates to do, remaining time.

    Args:
        total_updates: Updates of the whole run; None if unknown.
    """

    def __init__(self, total_updates: int | None):
        self._display = Display("training", "update", total_updates)

    def open(self, update_step: int) -> None:
        """Starts the display at `update_step`."""
        self._display.open(update_step)

    def write(self, update: Update) -> None:
        """Shows one update."""
        self._display.show(update.update_step, loss=f"{update.loss:#.4g}")

    def close(self) -> None:
        """Leaves the display as it stands."""
        self._display.close()
