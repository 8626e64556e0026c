"""Parsers of flags' values."""

import importlib.util
from collections.abc import Callable
from typing import Any

from absl import flags

from estimator_accum.programs.batches import AUTO
from estimator_accum.programs.folder import OTHER_PLACE, PLACE, fault_of_place
from estimator_accum.programs.numerals import parse_integer, parse_number


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


class Trackers(flags.ArgumentParser):
    """Names of experiment trackers, separated by commas."""

    syntactic_help = "some of mlflow, wandb and tensorboard, installed, with commas"
    remedy = "For one that is missing, use `pip install mlflow` or `pip install wandb`."

    def parse(self, argument: str) -> str:
        names = argument.split(",")
        is_known = set(names) <= {"mlflow", "wandb", "tensorboard"}
        if not is_known or None in map(importlib.util.find_spec, names):
            raise ValueError(self.syntactic_help)
        return argument


class Place(flags.ArgumentParser):
    """A file or folder that Python reads or writes, so that it is on this machine."""

    rule, remedy = PLACE, OTHER_PLACE

    def parse(self, argument: str) -> str:
        if fault_of_place(argument):
            raise ValueError(self.rule)
        return argument


def _from_1(number: int) -> bool:
    return 1 <= number < 2**31


COUNT = Number(parse_integer, "an integer >= 1 and < 2**31", _from_1)
FROM_0 = Number(parse_integer, "an integer >= 0 and < 2**31", lambda n: 0 <= n < 2**31)
STEPS = Number(
    parse_integer, COUNT.syntactic_help, _from_1, "Use 1 to turn accumulation off."
)
MICRO_BATCH = Number(
    lambda text: text if text == AUTO else parse_integer(text),
    f"an integer >= 1 or {AUTO}",
    lambda value: value == AUTO or _from_1(value),
    f"Use {AUTO} with --effective_batch_size.",
)
POSITIVE = Number(parse_number, "a number > 0 and <= 1e9", lambda x: 0 < x <= 1e9)
NORM = Number(
    parse_number,
    "a finite number >= 0",
    lambda x: x >= 0,
    "Use 0 to turn clipping off.",
)
PARSERS = {
    bool: flags.BooleanParser(),
    int: COUNT,
    float: POSITIVE,
    str: flags.ArgumentParser(),
}


def allowed_values(parser: flags.ArgumentParser) -> str:
    """Returns the values that a parser takes, such as "an integer >= 1", or ""."""
    if names := getattr(parser, "enum_values", None):
        return f"one of {', '.join(names)}"
    return parser.syntactic_help
