"""Settings of a run: one frozen dataclass, each field of which is a flag.

    @dataclass(frozen=True, kw_only=True)
    class Settings(RunSettings):
        train_csv: str | None = flag(None, "Training examples.", is_path=True)

    program --config=old/run_settings.json --output_dir=new

A field has everything about its flag: type, default, help text, range, its group in
--help, and whether it determines the weights. `SHARED_FLAGS` has that of the flags of
several programs. Every
training run writes its flags to `run_settings.json`, and `--print_config` prints them. A
flag on the command line wins over the file of `--config`.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from absl import flags

from estimator_accum.programs.batches import AUTO, Batches, share_out
from estimator_accum.programs.cluster import STRATEGIES
from estimator_accum.programs.folder import EXAMPLES_CHECKSUM, read_settings
from estimator_accum.programs.numerals import parse_integer, parse_number

Settings = TypeVar("Settings", bound="RunSettings")
_TAB = 6 * " "  # before the lines of a help text
FLAGS = "flags"  # key of the flags in `run_settings.json`
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


class Number(flags.ArgumentParser):
    """A flag's number.

    Args:
        kind: Function of the text, such as `parse_integer`.
        rule: Description of the range, such as "an integer >= 1".
        is_valid: Function that returns whether a number is in the range.
        remedy: Sentence that ends an error message.
    """

    def __init__(
        self,
        kind: Callable[[str], Any],
        rule: str,
        is_valid: Callable[[Any], bool],
        remedy: str = "See --help.",
    ):
        self._kind, self._is_valid = kind, is_valid
        self.syntactic_help, self.remedy = rule, remedy

    def parse(self, argument):
        """Returns the number; raises ValueError if it is out of its range."""
        value = self._kind(argument)
        if not self._is_valid(value):
            raise ValueError(self.syntactic_help)
        return value


class _Trackers(flags.ArgumentParser):
    """Names of experiment trackers, separated by commas."""

    syntactic_help = "some of mlflow, wandb and tensorboard, installed, with commas"
    remedy = "For one that is missing, use `pip install mlflow` or `pip install wandb`."

    def parse(self, argument: str) -> str:
        names = argument.split(",")
        is_known = set(names) <= {"mlflow", "wandb", "tensorboard"}
        if not is_known or None in map(importlib.util.find_spec, names):
            raise ValueError(self.syntactic_help)
        return argument


def _from_1(number: int) -> bool:
    return 1 <= number < 2**31


COUNT = Number(parse_integer, "an integer >= 1 and < 2**31", _from_1)
FROM_0 = Number(parse_integer, "an integer >= 0 and < 2**31", lambda n: 0 <= n < 2**31)
_STEPS = Number(
    parse_integer, COUNT.syntactic_help, _from_1, "Use 1 to turn accumulation off."
)
_MICRO_BATCH = Number(
    lambda text: text if text == AUTO else parse_integer(text),
    f"an integer >= 1 or {AUTO}",
    lambda value: value == AUTO or _from_1(value),
    f"Use {AUTO} with --effective_batch_size.",
)
_POSITIVE = Number(parse_number, "a number > 0 and <= 1e9", lambda x: 0 < x <= 1e9)
_NORM = Number(
    parse_number,
    "a finite number >= 0",
    lambda x: x >= 0,
    "Use 0 to turn clipping off.",
)
_PARSERS = {
    bool: flags.BooleanParser(),
    int: COUNT,
    float: _POSITIVE,
    str: flags.ArgumentParser(),
}


def flag(
    default: Any = dataclasses.MISSING,
    what: str = "",
    parser: flags.ArgumentParser | None = None,
    *,
    group: str | None = None,
    decides: bool = False,
    is_path: bool = False,
) -> Any:
    """Returns a field of a settings class, which is the flag of its name.

    Args:
        default: Value if the flag is not given; none for a flag that is required.
        what: Help text; that in `SHARED_FLAGS` if empty.
        parser: Parser of the value; by default that of the field's type, with numbers
            above 0.
        group: Group in --help; that in `SHARED_FLAGS`, or `TRAINING`, if None. A flag
            that is required is in `REQUIRED`.
        decides: Whether the weights depend on it.
        is_path: Whether it names a file or folder, which `run_settings.json` has as an
            absolute path.
    """
    known = {"what": what, "parser": parser, "group": group}
    known |= {"decides": decides, "is_path": is_path}
    metadata = {name: value for name, value in known.items() if value}
    return dataclasses.field(default=default, metadata=metadata)


SHARED_FLAGS = {
    "output_dir": {
        "what": "Folder for checkpoints and results; a stopped run resumes there.",
        "group": DATA,
    },
    "effective_batch_size": {
        "what": "Examples of one update, over all micro-steps and replicas; by default "
        "micro_batch_size x gradient_accumulation_steps x replicas.",
        "group": SIZES,
    },
    "micro_batch_size": {
        "what": "Examples of one forward and backward pass of one replica; auto: each "
        "replica takes its share of --effective_batch_size at once, in twice as many "
        "micro-batches whenever memory runs out.",
        "parser": _MICRO_BATCH,
        "group": SIZES,
    },
    "gradient_accumulation_steps": {
        "what": "Micro-batches of one replica that make one update.",
        "parser": _STEPS,
        "group": SIZES,
    },
    "strategy": {
        "what": "Devices that train. none: one; mirrored: all of this machine; "
        "multi_worker: all tasks of the cluster that TF_CONFIG or Slurm describes, each "
        "started with the same flags.",
        "parser": flags.EnumParser(STRATEGIES),
        "group": DEVICES,
    },
    "learning_rate": {
        "what": "Learning rate; the highest one where it changes.",
        "decides": True,
    },
    "clip_norm": {
        "what": "Largest global norm of an update's gradient; 0 does not clip.",
        "parser": _NORM,
        "decides": True,
    },
    "train_updates": {"what": "Optimizer updates.", "decides": True},
    "shuffle": {
        "what": "Shuffle the examples in each epoch; false: the files' order.",
        "decides": True,
    },
    "seed": {
        "what": "Random seed for example order, dropout and first weights.",
        "parser": FROM_0,
        "decides": True,
    },
    "report_to": {
        "what": "Experiment trackers of the updates: mlflow, wandb or both, with a "
        "comma. train_metrics.csv and tensorboard have them in each run.",
        "parser": _Trackers(),
    },
    "precision": {
        "what": "Precision of matrix products and what lies between them; variables, "
        "optimizer slots and gradient sums are float32. bfloat16: for CPUs that have it; "
        "float16: for GPUs, with a dynamic loss scale.",
        "parser": flags.EnumParser(["float32", "bfloat16", "float16"]),
        "decides": True,
    },
    "force_precision": {
        "what": "Do not warn of a processor without instructions for --precision.",
    },
    "watchdog_secs": {
        "what": "Seconds without a micro-step after which a task of a cluster ends "
        "itself, with exit code 75. Without this end, a task that has lost another one "
        "waits for ever.",
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
            n: getattr(self, n) for n, s in _specs(self).items() if "decides" in s
        }
        return self._with_whole_paths(values)

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
        for name, spec in _specs(self).items():
            value = values.get(name)
            if value and "is_path" in spec and "://" not in value:  # no remote storage
                values[name] = os.path.abspath(value)
        return values


def _specs(settings: Any) -> dict[str, Mapping[str, Any]]:
    """Returns the entries of `flag` and `SHARED_FLAGS` for each field."""
    return {
        field.name: SHARED_FLAGS.get(field.name, {}) | dict(field.metadata)
        for field in dataclasses.fields(settings)
    }


def define_flags(settings_type: type) -> flags.FlagValues:
    """Returns the flags of a settings class."""
    values = flags.FlagValues()  # not flags.FLAGS, which other programs share
    specs = _specs(settings_type)
    for field in dataclasses.fields(settings_type):
        spec = specs[field.name]
        types = typing.get_args(field.type) or (field.type,)
        parser = spec.get("parser") or next(
            p for t, p in _PARSERS.items() if t in types
        )
        default = None if field.default is dataclasses.MISSING else field.default
        is_required = field.default is dataclasses.MISSING
        group = REQUIRED if is_required else spec.get("group", TRAINING)
        _define(values, group, field.name, spec["what"], parser, default)
        if field.name in OTHER_NAMES:
            text = f"Another name of --{field.name}."
            _define(values, group, OTHER_NAMES[field.name], text, parser, default)
    for name, parser in getattr(settings_type, "ignored", {}).items():
        _define(values, IGNORED, name, "Without effect.", parser)
    return values


def _define(values, group, name, text, parser, default=None, short_name=None) -> None:
    is_bool = isinstance(parser, flags.BooleanParser)
    each = flags.Flag(
        parser, None, name, default, text, short_name=short_name, boolean=is_bool
    )
    flags.DEFINE_flag(each, values, module_name=group)


def define_program_flags(settings_type: type) -> flags.FlagValues:
    """Returns the flags of a program: settings, --config, --print_config, --verbosity."""
    values = define_flags(settings_type)
    rows = [
        (
            "config",
            "File with values for flags that are not given: run_settings.json of a run.",
            _PARSERS[str],
        ),
        (
            "print_config",
            "Print the flags as a file for --config, and do nothing else.",
            _PARSERS[bool],
            False,
        ),
        (
            "verbosity",
            "Level of log lines; 0 and more show TensorFlow's own.",
            Number(parse_integer, "an integer", lambda _: True),
            -1,
            "v",
        ),
    ]
    for row in rows:
        _define(values, GENERAL, *row)
    return values


def help_text(values: flags.FlagValues) -> str:
    """Returns the flags' part of a --help text: groups, required flags first."""
    lines = ["Flags are written --flag=value; values below are the defaults."]
    for group in GROUPS:
        found = values.flags_by_module_dict().get(group, ())
        members = [each for each in found if each.name not in OTHER_NAMES.values()]
        if members:
            lines += ["", f"{group}:"]
        for each in members:
            lines += _help_lines(each)
    return "\n".join(lines)


def _help_lines(flag_: flags.Flag) -> list[str]:
    default = flag_.default
    if isinstance(default, bool):
        default = str(default).lower()
    name = f"  --{flag_.name}" + (f"={default}" if default is not None else "")
    if flag_.name in OTHER_NAMES:
        name += f", --{OTHER_NAMES[flag_.name]}"
    if flag_.short_name:
        name += f", -{flag_.short_name}"
    text = flag_.help
    if kind := allowed_values(flag_.parser):
        text += f" ({kind})"
    return [name, *textwrap.wrap(text, 88, initial_indent=_TAB, subsequent_indent=_TAB)]


def allowed_values(parser: flags.ArgumentParser) -> str:
    """Returns the values that a parser takes, such as "an integer >= 1", or ""."""
    if names := getattr(parser, "enum_values", None):
        return f"one of {', '.join(names)}"
    return parser.syntactic_help


def _read_config(values: flags.FlagValues) -> None:
    """Sets the flags that are not given to the values in the file of `--config`."""
    if values["config"].value is None:
        return
    path = pathlib.Path(values["config"].value)
    content = read_settings(path, flag="--config").get(FLAGS)
    if not hasattr(content, "items"):
        raise ValueError(
            "`--config` must hold the flags of a run. Received: "
            f"{path}, without {FLAGS!r}. Use what --print_config prints."
        )
    for name, value in content.items():
        if name not in values:
            raise ValueError(
                "`--config` must hold flags of this program. Received: "
                f"{path} with {name!r}. See --help for its flags."
            )
        is_scalar = isinstance(value, str | int | float)
        if not is_scalar:
            raise ValueError(
                "`--config` must hold a string, a number, true or false for each flag. "
                f"Received: {path} with {json.dumps(value)[:60]} for {name!r}. Correct "
                "it, or leave it out."
            )
        names = {name, OTHER_NAMES.get(name, name)}
        if not any(values[each].present for each in names):
            values[name].parse(str(value))


def read_settings_of(
    settings_type: type[Settings], values: flags.FlagValues, argv: Sequence[str]
) -> Settings:
    """Returns the settings that a command line and the file of `--config` give.

    Args:
        settings_type: Class of the settings.
        values: Its flags, which get their values.
        argv: Command line, with the program's name.

    Raises:
        flags.Error: If a flag is unknown or its value does not fit; see
            `program.sentence`.
        ValueError: If an argument is not a flag, a required flag is missing, two names
            of a flag disagree, flags exclude one another, or the file does not fit.
    """
    rest = values(argv)[1:]
    if rest:
        raise ValueError(
            "Everything must be given as a flag. "
            f"Received: {rest[0]!r}. Write --flag=value."
        )
    _read_config(values)
    found = {}
    for field in dataclasses.fields(settings_type):
        found[field.name] = values[field.name].value
        if field.name in OTHER_NAMES:
            found[field.name] = _either(values, field.name, OTHER_NAMES[field.name])
    required = [
        field.name
        for field in dataclasses.fields(settings_type)
        if field.default is dataclasses.MISSING
    ]
    if missing := [f"--{name}" for name in required if not found[name]]:
        raise ValueError(
            f"The flags {', '.join(f'`--{name}`' for name in required)} must be given. "
            f"Received: none for {', '.join(missing)}. See --help."
        )
    settings = settings_type(**found)
    settings.check()
    return settings


def _either(values: flags.FlagValues, name: str, other: str) -> Any:
    value, other_value = values[name].value, values[other].value
    if None not in (value, other_value) and value != other_value:
        raise ValueError(
            f"`--{name}` and its other name `--{other}` must be equal. "
            f"Received: {value} and {other_value}. Give one of them."
        )
    return value if other_value is None else other_value


def config_text(settings: RunSettings) -> str:
    """Returns the content of a file for `--config`."""
    return json.dumps({FLAGS: settings.as_flags()}, indent=2)
