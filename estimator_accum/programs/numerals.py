"""Numbers in text, read strictly.

    8   -3   5e-5   .5

Python's `int` and `float` also read `1_000`, digits of every script, `nan` and `inf`.
"""

import math
import re

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MOST_DIGITS = 4000  # Python refuses longer integers by a sentence of its own


def parse_integer(text: object) -> int:
    """Returns an integer; raises ValueError for other text. Spaces around are ignored."""
    numeral = str(text).strip(" ")
    if not _INTEGER.fullmatch(numeral) or len(numeral) > _MOST_DIGITS:
        raise ValueError(f"{text!r} is not an integer")
    return int(numeral)


def parse_number(text: object) -> float:
    """Returns a finite number; raises ValueError for other text, like `parse_integer`."""
    numeral = str(text).strip(" ")
    value = float(numeral) if _NUMBER.fullmatch(numeral) else math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value
