"""How many examples an update has, and how many of them a replica takes at once.

    effective_batch_size = train_batch_size * gradient_accumulation_steps * replicas

The weights depend on the left side alone: what the right side makes of it is a question
of memory and of the number of replicas.
"""

from dataclasses import dataclass

from bert_finetune.settings import AUTO, Settings

_DEFAULT_TRAIN_BATCH_SIZE = 32


@dataclass(frozen=True)
class Batches:
    """How the examples of each update are shared out.

    Attributes:
        effective_batch_size: Examples of one update, over all replicas.
        gradient_accumulation_steps: [micro-steps per update].
        num_replicas: That train in sync.
        is_auto: Whether a replica takes its share of the update at once, cut into as
            many micro-batches as memory asks for.
    """

    effective_batch_size: int
    gradient_accumulation_steps: int
    num_replicas: int
    is_auto: bool = False

    @property
    def largest_share(self) -> int:
        """Examples that a replica takes in a micro-step, at most."""
        shares = self.gradient_accumulation_steps * self.num_replicas
        return -(-self.effective_batch_size // shares)

    @property
    def replicas(self) -> str:
        """Such as "2 replicas"."""
        return f"{self.num_replicas} replica{'s' * (self.num_replicas > 1)}"

    def __str__(self) -> str:
        steps = f" x {self.gradient_accumulation_steps} micro-steps"
        shares = self.gradient_accumulation_steps * self.num_replicas
        is_even = self.effective_batch_size % shares == 0
        return (
            f"effective batch {self.effective_batch_size} = "
            f"{'' if is_even else 'at most '}{self.largest_share} examples"
            f"{' in as many micro-batches as memory asks for' if self.is_auto else steps}"
            f" x {self.replicas}"
        )


def batches_of(settings: Settings, num_replicas: int) -> Batches:
    """Returns how the examples of each update are shared out.

    The effective batch is what --effective_batch_size says, or else the product of the
    other two. With it, a micro-batch says how many micro-steps it takes, and micro-steps
    say how large the micro-batches are.

    Args:
        settings: Of the run.
        num_replicas: That train in sync.

    Raises:
        ValueError: If the sizes disagree, or there are not enough examples.
    """
    effective = settings.effective_batch_size
    micro, steps = settings.train_batch_size, settings.gradient_accumulation_steps
    if micro == AUTO:
        _check_auto(effective, steps)
        steps = 1
    elif effective is None:
        micro, steps = micro or _DEFAULT_TRAIN_BATCH_SIZE, steps or 1
        effective = micro * steps * num_replicas
    elif steps is None:
        steps = -(-effective // ((micro or _DEFAULT_TRAIN_BATCH_SIZE) * num_replicas))
    elif micro and steps != -(-effective // (micro * num_replicas)):
        raise ValueError(
            "`--effective_batch_size` must be train_batch_size * "
            "gradient_accumulation_steps * replicas. Received: "
            f"{effective}, not {micro} * {steps} * {num_replicas} = "
            f"{micro * steps * num_replicas}. Leave one of the three out."
        )
    if steps > -(-effective // num_replicas) or effective < num_replicas:
        raise ValueError(
            "`--effective_batch_size` must have an example for each micro-step of each "
            f"replica. Received: {effective} for {steps} micro-steps of {num_replicas} "
            "replicas. Use a larger one, or fewer of them."
        )
    return Batches(effective, steps, num_replicas, micro == AUTO)


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
