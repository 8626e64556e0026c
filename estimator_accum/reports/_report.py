"""Reports of updates, as an interface."""

import math
from typing import NamedTuple, Protocol, runtime_checkable


class Update(NamedTuple):
    """One optimizer update, as reported.

    Attributes:
        update_step: Updates so far, this one included.
        global_step: Micro-steps so far.
        loss: Mean loss of the window, over all its micro-batches and replicas.
        gradient_norm: Global norm of the window's mean gradient, before clipping.
        weight: Sum of the window's weights over all replicas.
        micro_batches: Micro-batches in the window, over all replicas. They are counted
            by the present number of replicas, also in a window that another number of
            replicas has begun.
        clipped_share: Share of the updates so far that were clipped, 0 to 1. Updates
            before clipping was switched on count as not clipped.
        noise_scale: Gradient noise scale [unit of the weights]; NaN if unknown.
        learning_rate: Learning rate of this update; NaN if unknown.
        secs: Time since the update before, or since the start [seconds]; NaN if unknown.
    """

    update_step: int
    global_step: int
    loss: float
    gradient_norm: float
    weight: float
    micro_batches: int = 1
    clipped_share: float = 0.0
    noise_scale: float = math.nan
    learning_rate: float = math.nan
    secs: float = math.nan

    @property
    def weight_per_sec(self) -> float:
        """Weight per second, such as examples per second; NaN if unknown."""
        return self.weight / self.secs if self.secs else math.nan

    def known_values(self) -> dict[str, float]:
        """Returns all that is known, by name, with `weight_per_sec` and no NaN."""
        values = self._asdict() | {"weight_per_sec": self.weight_per_sec}
        return {name: value for name, value in values.items() if not math.isnan(value)}


@runtime_checkable
class Report(Protocol):
    """Report of the updates of a run: an object with these four methods.

    A subclass needs only the methods that have something to do; the others do nothing.
    An error that a method raises ends training.
    """

    # Type checkers call a protocol's method abstract if it has not even a `return`.

    def check(self) -> None:
        """Raises an error if the report cannot be opened; changes nothing.

        Called first, before a session exists.
        """
        return

    def open(self, update_step: int) -> None:
        """Opens the report in a new session, or again after one that was lost.

        Args:
            update_step: Updates so far. If later ones were reported, they are lost,
                and are reported again when they are done again.
        """
        return

    def write(self, update: Update) -> None:
        """Reports one update."""
        return

    def close(self) -> None:
        """Closes the report at the end of training; not called if it ends by an error."""
        return
