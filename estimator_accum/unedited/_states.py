"""States of tensors in the analysis of rows."""

from typing import NamedTuple

from estimator_accum.unedited._sizes import ONE, Size


class State(NamedTuple):
    """State of a tensor.

    Attributes:
        kind: "fixed", "rows", "sizes", "list" or "mixed".
        axis: Axis of the examples, of rows; for a list, that of its elements, and None
            while it is empty.
        each: Number of rows for each example.
        distance: For places in a tensor with rows: a row holds the number of its example
            times this, and a value of its own example. Else None.
        is_number: Whether that value of its own is 0.
        is_on_probation: Whether the keys must confirm it.
    """

    kind: str
    axis: int | None = None
    each: Size = ONE
    distance: Size | None = None
    is_number: bool = False
    is_on_probation: bool = False


FIXED, SIZES, MIXED = State("fixed"), State("sizes"), State("mixed")
EMPTY_LIST = State("list")


class Mixed(Exception):
    """A result combines examples; the message says how."""


class Undecided(Exception):
    """Shapes without numbers cannot decide; `guess` is what the keys are to confirm."""

    def __init__(self, guess: State):
        super().__init__()
        self.guess = guess


def join(one: State, other: State) -> State:
    """Returns the state of a tensor that is one of two."""
    if EMPTY_LIST in (one, other) and {one.kind, other.kind} <= {"list", "fixed"}:
        return one if other == EMPTY_LIST else other
    is_on_probation = one.is_on_probation or other.is_on_probation
    sure = one._replace(is_on_probation=False), other._replace(is_on_probation=False)
    if sure[0] != sure[1]:
        return MIXED
    return one._replace(is_on_probation=is_on_probation)
