"""Settings of a run: one frozen dataclass, each field of which is a flag.

    @dataclass(frozen=True, kw_only=True)
    class Settings(RunSettings):
        train_csv: str | None = flag(None, "Training examples.", is_path=True)

    program --config=old/run_settings.json --output_dir=new

A field has everything about its flag: type, default, help text, range, its group in
--help, and whether it determines the weights. `SHARED_FLAGS` has that of the flags of
several programs. Every training run writes its flags to `run_settings.json`, and
`--print_config` prints them. A flag on the command line wins over the file of `--config`.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from absl import flags

from estimator_accum.programs.batches import Batches, share_out
from estimator_accum.programs.cluster import STRATEGIES
from estimator_accum.programs.folder import EXAMPLES_CHECKSUM, FLAGS
from estimator_accum.programs.parsers import (
    FROM_0,
    MICRO_BATCH,
    NORM,
    STEPS,
    Place,
    Trackers,
)

OTHER_NAMES = {
    "micro_batch_size": "train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_multiplier",
}
# Groups of flags, in the order of --help.
REQUIRED, JOBS, DATA = "required", "what to do", "data and model"
SIZES, TRAINING, DEVICES = "batches", "training", "devices"
EVALUATION, GENERAL = "evaluation and prediction", "general"
IGNORED = "taken from google-research/bert's command lines"
GROUPS = (REQUIRED, JOBS, DATA, SIZES, TRAINING, DEVICES, EVALUATION, GENERAL, IGNORED)


def flag(
    default: Any = dataclasses.MISSING,
    what: str = "",
    parser: flags.ArgumentParser | None = None,
    *,
    group: str | None = None,
    decides: bool = False,
    is_collective: bool = False,
    is_path: bool = False,
) -> Any:
    """Returns a field of a settings class, which is the flag of its name.

    Args:
        default: Value if the flag is not given; none for a flag that is required.
        what: Help text; that in `SHARED_FLAGS` if empty.
        parser: Parser of the value; by default that of the field's type, with numbers
            above 0, or a `Place` if it is a path.
        group: Group in --help; that in `SHARED_FLAGS`, or `TRAINING`, if None. A flag
            that is required is in `REQUIRED`.
        decides: Whether the weights depend on it.
        is_collective: Whether all tasks of a cluster must agree on it, and a resumed run
            may change it.
        is_path: Whether it names a file or folder, which `run_settings.json` has as an
            absolute path.
    """
    parser = parser or (Place() if is_path else None)
    facts = {"what": what, "parser": parser, "group": group}
    facts |= {"decides": decides, "is_collective": is_collective, "is_path": is_path}
    metadata = {name: value for name, value in facts.items() if value}
    return dataclasses.field(default=default, metadata=metadata)


SHARED_FLAGS = {
    "output_dir": {
        "what": "Folder for checkpoints and results; a stopped run resumes there.",
        "parser": Place(),
        "group": DATA,
    },
    "effective_batch_size": {
        "what": "Examples of one update, over all micro-steps and replicas; by default "
        "micro_batch_size x gradient_accumulation_steps x replicas.",
        "group": SIZES,
    },
    "micro_batch_size": {
        "what": "Examples of one forward and backward pass of one replica; auto: each "
        "replica takes its share of --effective_batch_size unsplit, and in twice as many "
        "micro-batches after each out-of-memory error.",
        "parser": MICRO_BATCH,
        "group": SIZES,
    },
    "gradient_accumulation_steps": {
        "what": "Micro-batches of one replica that make one update.",
        "parser": STEPS,
        "group": SIZES,
    },
    "strategy": {
        "what": "Devices that train. none: one; mirrored: all of this machine; "
        "multi_worker: all tasks of the cluster that TF_CONFIG or a launcher describes, "
        "each started with the same flags; parameter_server: its workers, each for "
        "itself, with the weights on its ps.",
        "parser": flags.EnumParser(STRATEGIES),
        "group": DEVICES,
    },
    "learning_rate": {
        "what": "Learning rate; the highest value if it changes.",
        "decides": True,
    },
    "clip_norm": {
        "what": "Largest global norm of an update's gradient; 0 does not clip.",
        "parser": NORM,
        "decides": True,
    },
    "train_updates": {"what": "Optimizer updates.", "decides": True},
    "shuffle": {
        "what": "Shuffle the examples in each epoch; false: the files' order.",
        "decides": True,
    },
    "seed": {
        "what": "Random seed for example order, dropout and initial weights.",
        "parser": FROM_0,
        "decides": True,
    },
    "report_to": {
        "what": "Experiment trackers of the updates: mlflow, wandb or both, with a "
        "comma. train_metrics.csv and TensorBoard contain the updates of each run.",
        "parser": Trackers(),
    },
    "precision": {
        "what": "Precision of matrix products and of the operations between them; "
        "variables, optimizer slots and gradient sums are float32. bfloat16: for CPUs "
        "with instructions for it; float16: for GPUs, with a dynamic loss scale.",
        "parser": flags.EnumParser(["float32", "bfloat16", "float16"]),
        "decides": True,
    },
    "force_precision": {
        "what": "Do not warn about a processor without instructions for --precision.",
    },
    "watchdog_secs": {
        "what": "Seconds without a micro-step after which a task of a cluster ends "
        "itself, with exit code 75. Otherwise a task whose peer has died waits forever.",
        "group": DEVICES,
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Flags of every program that trains.

    The micro-batch may be `AUTO`. A size of None follows from the others and from
    `usual_sizes`; see `share_out`.
    """

    usual_sizes: ClassVar[dict[str, Any]] = {}  # arguments of `share_out`
    ignored: ClassVar[dict[str, flags.ArgumentParser]] = {}  # flags without effect

    output_dir: str = flag()
    effective_batch_size: int | None = flag(None)
    micro_batch_size: int | str | None = flag(None)
    gradient_accumulation_steps: int | None = flag(None)
    learning_rate: float = flag()
    seed: int = flag(0)
    report_to: str | None = flag(None)
    strategy: str = flag("none")
    precision: str = flag("float32")
    force_precision: bool = flag(False)
    watchdog_secs: int = flag(300)

    @property
    def is_training(self) -> bool:
        """True if the run writes checkpoints, and needs its folder for itself."""
        return True

    def check(self) -> None:
        """Raises ValueError with one sentence if flags exclude one another.

        Files are checked later, by the functions that read them.
        """

    def batches(self, num_replicas: int) -> Batches:
        """Returns how the examples of each update are divided; see `share_out`."""
        return share_out(
            self.effective_batch_size,
            self.micro_batch_size,
            self.gradient_accumulation_steps,
            num_replicas,
            **self.usual_sizes,
        )

    def decisive(self) -> dict[str, Any]:
        """Returns the flags that determine the weights; sizes of shares do not."""
        values = {
            n: getattr(self, n) for n, s in specs_of(self).items() if "decides" in s
        }
        return self._with_whole_paths(values)

    def collective(self) -> dict[str, Any]:
        """Returns the flags on which all tasks of a cluster must agree at a start."""
        return {
            name: getattr(self, name)
            for name, spec in specs_of(self).items()
            if "is_collective" in spec
        }

    def description(self, batches: Batches, checksum: str) -> dict[str, Any]:
        """Returns the content of `run_settings.json`.

        Args:
            batches: Division of each update's examples.
            checksum: Checksum of the run's examples.
        """
        return self.decisive() | {
            "effective_batch_size": batches.effective_batch_size,
            EXAMPLES_CHECKSUM: checksum,
            FLAGS: self.as_flags(),
        }

    def as_flags(self) -> dict[str, Any]:
        """Returns the given flags by name, for `--config`; without the output folder."""
        values = self._with_whole_paths(dataclasses.asdict(self))
        values.pop("output_dir")
        return {name: value for name, value in values.items() if value is not None}

    def _with_whole_paths(self, values: dict[str, Any]) -> dict[str, Any]:
        for name, spec in specs_of(self).items():
            value = values.get(name)
            if value and "is_path" in spec and "://" not in value:  # no remote storage
                values[name] = os.path.abspath(value)
        return values


def specs_of(settings: Any) -> dict[str, Mapping[str, Any]]:
    """Returns the entries of `flag` and `SHARED_FLAGS` for each field."""
    return {
        field.name: SHARED_FLAGS.get(field.name, {}) | dict(field.metadata)
        for field in dataclasses.fields(settings)
    }


def config_text(settings: RunSettings) -> str:
    """Returns the content of a file for `--config`."""
    return json.dumps({FLAGS: settings.as_flags()}, indent=2)
