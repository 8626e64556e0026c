"""Settings of a run: the flags of `main.py`."""

import dataclasses
from typing import Any, ClassVar

from estimator_accum.programs.settings import DATA, RunSettings, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Flags of `main.py`; an update is 59 x 3 examples unless they say otherwise."""

    usual_sizes: ClassVar[dict[str, Any]] = {
        "default_micro_batch_size": 59,
        "default_gradient_accumulation_steps": 3,
    }

    train_csv: str | None = flag(
        None,
        "Training examples; generated ones if not given.",
        is_path=True,
        group=DATA,
    )
    test_csv: str | None = flag(
        None,
        "Test examples; 30% of the training file if not given.",
        is_path=True,
        group=DATA,
    )
    output_dir: str = flag("housing_output")
    train_updates: int = flag(500)
    learning_rate: float = flag(5e-3)
    clip_norm: float = flag(0.0)
    shuffle: bool = flag(True)

    def check(self) -> None:
        """Raises ValueError with one sentence if flags exclude one another."""
        if self.test_csv and not self.train_csv:
            raise ValueError(
                "`--test_csv` must come with `--train_csv`. "
                f"Received: --test_csv={self.test_csv} alone. Name both, or neither "
                "for generated data."
            )
