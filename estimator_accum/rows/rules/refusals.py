"""Refusals that several rules share."""

from estimator_accum.rows.sizes import ONE, Size
from estimator_accum.rows.states import Mixed, State

ALONG = "it combines the examples"
UNLIKE = "examples stand beside other examples"
FIXED_BESIDE = "a value of no example stands beside examples"
PLACE = "the place of an example as a value"
SIZE = "the number of examples as a value"
BY_VALUES = "rows are chosen by values"
NO_SHAPE = "a shape that is not known before there are numbers"


def without_places(states: list[State]) -> None:
    """Raises Mixed unless all inputs hold values of their own examples."""
    if any(state.distance is not None for state in states):
        raise Mixed(PLACE)
    if any(state.kind == "sizes" for state in states):
        raise Mixed(SIZE)
    if any(state.kind in ("list", "examples") for state in states):
        raise Mixed("a list as a value")


def only_first(states: list[State]) -> State:
    """Returns the state of the first input, beside which all others are fixed."""
    without_places(states)
    first, *others = states
    if first.kind != "rows" or any(state.kind != "fixed" for state in others):
        raise Mixed(UNLIKE)
    return first


def check_length_1(size: Size) -> None:
    """Raises Mixed unless a fixed tensor is broadcast over the examples.

    A length that only numbers tell may be that of the batch.
    """
    if size != ONE:
        raise Mixed(FIXED_BESIDE)
