"""Division of each update's examples.

    effective_batch_size = micro_batch_size * gradient_accumulation_steps * replicas

The weights depend on the left side only; the right side follows from the available
memory and the number of replicas.
"""

from dataclasses import dataclass

AUTO = "auto"  # a micro-batch as large as memory allows


@dataclass(frozen=True)
class Batches:
    """Division of each update's examples into micro-steps and replicas.

    Attributes:
        effective_batch_size: Examples of one update, over all replicas.
        gradient_accumulation_steps: K [micro-steps per update].
        num_replicas: Replicas that train in sync.
        is_auto: Whether a replica takes its whole share of the update in one
            micro-step, split into as many micro-batches as memory requires.
    """

    effective_batch_size: int
    gradient_accumulation_steps: int
    num_replicas: int
    is_auto: bool = False

    @property
    def _num_shares(self) -> int:
        return self.gradient_accumulation_steps * self.num_replicas

    @property
    def largest_share(self) -> int:
        """Most examples that a replica takes in a micro-step."""
        return -(-self.effective_batch_size // self._num_shares)

    def share(self, micro_step: int, replica: int) -> tuple[int, int]:
        """Returns the half-open range [start, stop) of one share in an update.

        Shares differ by at most one example; together they cover the update.

        Args:
            micro_step: Number of the micro-step in the window, from 0.
            replica: Number of the replica, from 0.
        """
        number = micro_step * self.num_replicas + replica
        first, behind = (
            self.effective_batch_size * n // self._num_shares
            for n in (number, number + 1)
        )
        return first, behind

    @property
    def is_even(self) -> bool:
        """True if all shares have the same number of examples."""
        return self.effective_batch_size % self._num_shares == 0

    @property
    def replicas(self) -> str:
        """Number of replicas as text, such as "2 replicas"."""
        return f"{self.num_replicas} replica{'s' * (self.num_replicas > 1)}"

    def __str__(self) -> str:
        share, steps = self.largest_share, self.gradient_accumulation_steps
        share = f"{share} example{'s' * (share > 1)}"
        how = f" x {steps} micro-step{'s' * (steps > 1)}"
        if self.is_auto:
            how = " with the number of micro-batches chosen by memory"
        return (
            f"effective batch {self.effective_batch_size} = "
            f"{'' if self.is_even else 'at most '}{share}{how}"
            f" x {self.replicas}"
        )


def share_out(
    effective_batch_size: int | None,
    micro_batch_size: int | str | None,
    gradient_accumulation_steps: int | None,
    num_replicas: int,
    *,
    default_effective_batch_size: int | None = None,
    default_micro_batch_size: int | None = None,
    default_gradient_accumulation_steps: int = 1,
    may_be_empty: bool = False,
) -> Batches:
    """Returns the division of each update's examples into micro-steps and replicas.

    Without an effective batch size, it is the product of the other sizes. With one, the
    micro-batch size determines the number of micro-steps, and the number of micro-steps
    determines the micro-batch size.

    Args:
        effective_batch_size: Examples of one update, over all replicas; None if not
            given.
        micro_batch_size: Most examples of one pass of a replica; `AUTO`: as many as
            memory allows; None if not given.
        gradient_accumulation_steps: K [micro-steps per update]; None if not given.
        num_replicas: Replicas that train in sync.
        default_effective_batch_size: Used unless both other sizes are given.
        default_micro_batch_size: Used if the other sizes do not determine the
            micro-batch; None is a replica's whole share.
        default_gradient_accumulation_steps: Used if the other sizes do not determine K.
        may_be_empty: Whether some replicas may have no example in a micro-step.

    Raises:
        ValueError: If the sizes disagree, or there are not enough examples.
    """
    effective, steps = effective_batch_size, gradient_accumulation_steps
    micro = micro_batch_size
    if effective is None and (micro in (None, AUTO) or steps is None):
        effective = default_effective_batch_size
    if micro == AUTO:
        _check_auto(effective, steps)
        steps = 1
    elif effective is None:
        micro = micro or default_micro_batch_size
        steps = steps or default_gradient_accumulation_steps
        effective = micro * steps * num_replicas
    elif steps is None:
        micro = micro or default_micro_batch_size
        steps = -(-effective // (micro * num_replicas)) if micro else 1
    elif micro and steps != -(-effective // (micro * num_replicas)):
        raise ValueError(
            "`--effective_batch_size` must be micro_batch_size * "
            "gradient_accumulation_steps * replicas. Received: "
            f"{effective}, not {micro} * {steps} * {num_replicas} = "
            f"{micro * steps * num_replicas}. Leave one of the three out."
        )
    batches = Batches(effective, steps, num_replicas, micro == AUTO)
    _check_enough(batches, may_be_empty)
    return batches


def _check_enough(batches: Batches, may_be_empty: bool) -> None:
    effective, replicas = batches.effective_batch_size, batches.num_replicas
    steps = batches.gradient_accumulation_steps
    is_enough = steps * replicas <= effective
    if may_be_empty:
        is_enough = replicas <= effective and steps <= -(-effective // replicas)
    if not is_enough:
        raise ValueError(
            "`--effective_batch_size` must have an example for each micro-step of each "
            f"replica. Received: {effective} for {steps} micro-steps of {replicas} "
            "replicas. Use a larger one, or fewer of them."
        )


def _check_auto(effective: int | None, steps: int | None) -> None:
    if effective is None:
        raise ValueError(
            f"`--micro_batch_size={AUTO}` must be given the examples of an update. "
            "Received: no --effective_batch_size. Use --effective_batch_size=32."
        )
    if steps is not None:
        raise ValueError(
            f"`--micro_batch_size={AUTO}` must find the number of micro-batches itself. "
            f"Received: --gradient_accumulation_steps={steps}. Leave that out."
        )
