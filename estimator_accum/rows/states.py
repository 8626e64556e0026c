"""States of tensors in the analysis of rows."""

from typing import NamedTuple

from estimator_accum.rows.sizes import ONE, N, Size, count


class State(NamedTuple):
    """State of a tensor.

    Attributes:
        kind: "fixed", "rows", "entries", "sizes", "counts", "list", "examples",
            "unpadded", "mixed" or one of `OF_SPLITS`.
        axis: Axis of the examples, of rows; that of the entries, which is 0; for a list,
            that of its elements, and None while it is empty; for a list of examples 0,
            and None until a loop has filled it.
        span: Number of rows for each example.
        distance: For places in a tensor with rows: a row or entry holds the number of
            its example times this, and a smaller value of its own example. Else None.
        is_number: Whether that value of its own is 0.
        is_first: Whether only the first number of each place, along the last axis, is
            that of its example, as `tf.gather_nd` reads it. Along the first axis if the
            last one has the examples, as before `tf.transpose`.
        of: Name of the list, of entries and row splits.
        places: Name of a list in which entries are places; of row splits: that of the
            list whose entries are the rows, None if the rows are those of examples.
    """

    kind: str
    axis: int | None = None
    span: Size = ONE
    distance: Size | None = None
    is_number: bool = False
    is_first: bool = False
    of: str | None = None
    places: str | None = None

    @property
    def length(self) -> Size:
        """Length of the axis."""
        if self.kind == "entries":
            return count(self.of)
        rows = N * self.span
        if self.kind in OF_SPLITS and self.places is not None:
            rows = count(self.places)
        return rows + ONE if self.kind == "splits" else rows

    @property
    def is_place(self) -> bool:
        """Whether a value is the number of an example or of an entry, or holds it."""
        return self.distance is not None or self.places is not None


# Row splits of a list, as of a RaggedTensor: 0, and where the entries of each row end.
# Without the first or last: where rows end or begin, or numbers that are not before the
# begin, not behind the end, or neither.
OF_SPLITS = {"splits", "ends", "begins", "from_begin", "to_end", "between"}
FIXED, SIZES, MIXED = State("fixed"), State("sizes"), State("mixed")
COUNTS, UNPADDED = State("counts"), State("unpadded")
EMPTY_LIST = State("list")
NO_RULE = "no rule of this library covers it"  # why the analysis does not know a state


class Mixed(Exception):
    """A result combines examples; the message says how."""


def join(one: State, other: State) -> State:
    """Returns the state of a tensor that is one of two."""
    if EMPTY_LIST in (one, other) and {one.kind, other.kind} <= {"list", "fixed"}:
        return one if other == EMPTY_LIST else other
    return one if one == other else MIXED
