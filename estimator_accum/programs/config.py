"""Configuration files: the flags of a run, with which the same run starts again.

    program --config=old/run_settings.json --output_dir=new

Every training run writes `run_settings.json`; `--print_config` prints the same flags. A
flag on the command line wins over the file.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from absl import flags

from estimator_accum.programs.batches import AUTO
from estimator_accum.programs.folder import read_settings

FLAGS = "flags"  # key of the flags in the file
# Flags with two names: (another name, the name in the file).
_OTHER_NAMES = (
    ("micro_batch_size", "train_batch_size"),
    ("gradient_accumulation_multiplier", "gradient_accumulation_steps"),
)

flags.disclaim_key_flags()  # --help shows them as flags of the program


def define_config_flags(flag_values: flags.FlagValues) -> None:
    """Defines `--config` and `--print_config`."""
    flags.DEFINE_string(
        "config",
        None,
        "File with values for the flags that are not given: run_settings.json of a run.",
        flag_values=flag_values,
    )
    flags.DEFINE_bool(
        "print_config",
        False,
        "Print the flags as a file for --config, and do nothing else.",
        flag_values=flag_values,
    )


def read_config(flag_values: flags.FlagValues) -> None:
    """Sets the flags that are not given to the values in the file of `--config`.

    Raises:
        flags.Error: If a value has the wrong type.
        ValueError: If the file cannot be read, or has an unknown flag.
    """
    if "config" not in flag_values or flag_values["config"].value is None:
        return
    path = pathlib.Path(flag_values["config"].value)
    values = read_settings(path, flag="--config").get(FLAGS)
    if not hasattr(values, "items"):
        raise ValueError(
            "`--config` must hold the flags of a run. Received: "
            f"{path}, without {FLAGS!r}. Use what --print_config prints."
        )
    given = {name for name in flag_values if flag_values[name].present}
    for other, name in _OTHER_NAMES:
        if {other, name} & given:
            given |= {other, name}
    for name, value in values.items():
        if name not in flag_values:
            raise ValueError(
                "`--config` must hold flags of this program. Received: "
                f"{path} with {name!r}. See --help for its flags."
            )
        if name not in given:
            flag_values[name].parse(str(value))


def flags_of(settings: Any, paths: Iterable[str], **others: Any) -> dict[str, Any]:
    """Returns a run's flags by name, for the file; without the output folder.

    Args:
        settings: Dataclass whose fields are flags; None is a flag that is not given.
        paths: Fields that name files or folders; they become absolute.
        **others: Values of flags that differ from the field's value; None leaves the
            flag out.
    """
    values = dataclasses.asdict(settings) | others
    for name in paths:
        if values[name] and "://" not in values[name]:  # no remote storage
            values[name] = os.path.abspath(values[name])
    if values.get("train_batch_size") == AUTO:  # a flag of numbers
        values["micro_batch_size"] = values.pop("train_batch_size")
    values.pop("output_dir")
    return {name: value for name, value in values.items() if value is not None}


def config_text(values: Mapping[str, Any]) -> str:
    """Returns the content of a file for `--config`."""
    return json.dumps({FLAGS: dict(values)}, indent=2)
