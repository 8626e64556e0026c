"""Settings of a run: the flags of `main.py`."""

import dataclasses
from typing import Any, ClassVar

from absl import flags

from estimator_accum.programs.batches import AUTO
from estimator_accum.programs.cluster import STRATEGIES
from estimator_accum.programs.settings import DATA, RunSettings, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Flags of `main.py`.

    The effective batch does not depend on the number of workers, unless it is left out
    and both the micro-batch and the micro-steps of an update are given.
    """

    usual_sizes: ClassVar[dict[str, Any]] = {"default_effective_batch_size": 200}

    data_dir: str | None = flag(
        None,
        "Folder with MNIST's files; generated digits if not given.",
        is_path=True,
        group=DATA,
    )
    output_dir: str = flag("distributed_output")
    strategy: str = flag(
        "multi_worker",
        "Training of the cluster of TF_CONFIG or a launcher. multi_worker: all tasks "
        "update together; parameter_server: each worker for itself, with the weights on "
        "the ps.",
        flags.EnumParser(STRATEGIES[2:]),
    )
    train_updates: int = flag(200)
    learning_rate: float = flag(0.1)
    hidden_units: int = flag(
        64,
        "Number of units of the hidden layer, which holds most of the parameters.",
        decides=True,
    )
    shuffle: bool = flag(True)
    save_checkpoints_updates: int = flag(
        50,
        "Updates between checkpoints; a cluster that loses a task repeats no more of them.",
        is_collective=True,
    )
    log_examples: bool = flag(
        False,
        "Append the numbers of each micro-step's examples to examples-<rank>.log in "
        "--output_dir, on each worker.",
    )

    def check(self) -> None:
        """Raises ValueError with one sentence if flags exclude one another."""
        if self.log_examples and self.micro_batch_size == AUTO:
            raise ValueError(
                "`--log_examples` must have micro-batches that are never run again. "
                f"Received: --micro_batch_size={AUTO}. Use a number."
            )
