"""The command line of a settings class."""

import dataclasses
import json
import pathlib
import textwrap
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from absl import flags

from estimator_accum.programs.folder import read_settings
from estimator_accum.programs.numerals import parse_integer
from estimator_accum.programs.parsers import (
    COUNT,
    PARSERS,
    POSITIVE,
    Number,
    Place,
    allowed_values,
)
from estimator_accum.programs.settings import (
    FLAGS,
    GENERAL,
    GROUPS,
    IGNORED,
    OTHER_NAMES,
    REQUIRED,
    TRAINING,
    RunSettings,
    specs_of,
)

Settings = TypeVar("Settings", bound="RunSettings")
_TAB = 6 * " "  # before the lines of a help text


def define_flags(settings_type: type) -> flags.FlagValues:
    """Returns the flags of a settings class."""
    values = flags.FlagValues()  # not flags.FLAGS, which other programs share
    specs = specs_of(settings_type)
    for field in dataclasses.fields(settings_type):
        spec = specs[field.name]
        types = typing.get_args(field.type) or (field.type,)
        parser = spec.get("parser") or next(p for t, p in PARSERS.items() if t in types)
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
    flag = flags.Flag(
        parser, None, name, default, text, short_name=short_name, boolean=is_bool
    )
    flags.DEFINE_flag(flag, values, module_name=group)


def define_program_flags(settings_type: type) -> flags.FlagValues:
    """Returns the flags of a program: settings, --config, --print_config, --verbosity."""
    values = define_flags(settings_type)
    rows = [
        (
            "config",
            "File with values for flags that are not given: run_settings.json of a run.",
            Place(),
        ),
        (
            "print_config",
            "Print the flags as a file for --config, and do nothing else.",
            PARSERS[bool],
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
    lines = [
        "Flags are written --flag=value; values below are the defaults.",
        "A number without a range is above 0.",
    ]
    for group in GROUPS:
        group_flags = values.flags_by_module_dict().get(group, ())
        members = [
            flag for flag in group_flags if flag.name not in OTHER_NAMES.values()
        ]
        if members:
            lines += ["", f"{group}:"]
        for flag in members:
            lines += _help_lines(flag)
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
    kind = allowed_values(flag_.parser)
    if kind and flag_.parser not in (COUNT, POSITIVE):
        text += f" ({kind})"
    return [name, *textwrap.wrap(text, 88, initial_indent=_TAB, subsequent_indent=_TAB)]


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
            `sentences.sentence`.
        ValueError: If an argument is not a flag, a required flag is missing, two names
            of a flag disagree, flags exclude one another, or the file does not fit.
    """
    lines = values.read_flags_from_files(argv, force_gnu=False)
    rest = values([line.removeprefix("\ufeff") for line in lines])[1:]
    if rest:
        raise ValueError(
            "Everything must be given as a flag. "
            f"Received: {rest[0]!r}. Write --flag=value."
        )
    _read_config(values)
    fields = {}
    for field in dataclasses.fields(settings_type):
        fields[field.name] = values[field.name].value
        if field.name in OTHER_NAMES:
            fields[field.name] = _either(values, field.name, OTHER_NAMES[field.name])
    required = [
        field.name
        for field in dataclasses.fields(settings_type)
        if field.default is dataclasses.MISSING
    ]
    if missing := [f"--{name}" for name in required if not fields[name]]:
        raise ValueError(
            f"The flags {', '.join(f'`--{name}`' for name in required)} must be given. "
            f"Received: none for {', '.join(missing)}. See --help."
        )
    settings = settings_type(**fields)
    settings.check()
    return settings


def _read_config(values: flags.FlagValues) -> None:
    """Sets the flags that are not given to the values in the file of `--config`."""
    if values["config"].value is None:
        return
    path = pathlib.Path(values["config"].value)
    content = read_settings(path, flag="--config").get(FLAGS)
    if not hasattr(content, "items"):
        raise ValueError(
            "`--config` must hold the flags of a run. Received: "
            f"{path}, without {FLAGS!r}. Use the output of --print_config."
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
        if not any(values[flag_name].present for flag_name in names):
            values[name].parse(str(value))


def _either(values: flags.FlagValues, name: str, other: str) -> Any:
    value, other_value = values[name].value, values[other].value
    if None not in (value, other_value) and value != other_value:
        raise ValueError(
            f"`--{name}` and its other name `--{other}` must be equal. "
            f"Received: {value} and {other_value}. Give one of them."
        )
    return value if other_value is None else other_value
