"""Rules of slices."""

from typing import NamedTuple

import numpy as np

from estimator_accum.rows.rules.dims import keep_dims
from estimator_accum.rows.rules.refusals import BY_VALUES, SIZE, without_places
from estimator_accum.rows.rules.table import rule
from estimator_accum.rows.sizes import ONE, N, Size
from estimator_accum.rows.states import Mixed, State


class _Bounds(NamedTuple):
    """The begins, the ends or the strides of a slice.

    Attributes:
        value: An array of sizes; None if it is not known.
        state: The state of the tensor.
        mask: One bit for each entry whose bound is left out.
    """

    value: np.ndarray | None
    state: State
    mask: int

    def is_left_out(self, i: int) -> bool:
        """Returns whether the i-th entry has no such bound."""
        return bool(self.mask >> i & 1)


@rule("StridedSlice")
def _strided_slice(analysis, operation, states):
    state, *others = states
    if state.kind != "rows" or any(s.kind not in ("fixed", "sizes") for s in others):
        raise Mixed(BY_VALUES)
    dims = analysis.dims(operation.inputs[0])
    number = operation.inputs[1].shape.num_elements()
    if number is None:
        raise Mixed("its axes are not known")
    values = map(analysis.value, operation.inputs[1:])
    masks = (operation.get_attr("begin_mask"), operation.get_attr("end_mask"), 0)
    bounds = list(map(_Bounds, values, others, masks))
    source, axis, sizes = 0, None, []
    for i, kind in _entries(operation, number, len(dims)):
        if kind == "new_axis":
            sizes.append(ONE)
            continue
        is_whole = kind == "whole"
        is_whole |= kind == "bounds" and _are_whole(bounds, i, dims[source])
        if source == state.axis:
            if not is_whole:
                raise Mixed("it chooses examples")
            axis = len(sizes)
        elif kind != "whole" and _hold_number_of_examples(bounds, i):
            raise Mixed(SIZE)
        if kind != "shrink_axis":
            sizes.append(dims[source] if is_whole else None)
        source += 1
    result = state._replace(axis=axis, is_first=False)
    return analysis.set_dims(operation.outputs[0], result, sizes)


def _entries(operation, number: int, rank: int) -> list[tuple[int | None, str]]:
    """Returns the entries of a strided slice in order, its ellipsis as whole axes.

    Args:
        operation: The slice.
        number: Number of its entries.
        rank: Number of axes of the tensor that is sliced.

    Returns:
        (index of the entry's bounds, "bounds", "shrink_axis", "new_axis" or "whole").
    """
    kinds = ["bounds"] * number
    for kind in ("shrink_axis", "new_axis", "ellipsis"):
        mask = operation.get_attr(f"{kind}_mask")
        kinds = [kind if mask >> i & 1 else other for i, other in enumerate(kinds)]
    if "ellipsis" not in kinds:
        kinds.append("ellipsis")
    rest = rank - kinds.count("bounds") - kinds.count("shrink_axis")
    if rest < 0:
        raise Mixed("it has more bounds than axes")
    entries, place = list(enumerate(kinds)), kinds.index("ellipsis")
    return [*entries[:place], *[(None, "whole")] * rest, *entries[place + 1 :]]


def _are_whole(bounds: list[_Bounds], i: int, size: Size) -> bool:
    """Returns whether the i-th bounds provably take all of an axis of a size."""
    return all(
        bound.is_left_out(i) or bound.value is not None and bound.value[i] == whole
        for bound, whole in zip(bounds, (Size(0), size, ONE), strict=True)
    )


def _hold_number_of_examples(bounds: list[_Bounds], i: int) -> bool:
    """Returns whether one of the i-th bounds may depend on the number of examples."""
    return any(
        bound.state.kind == "sizes"
        and not bound.is_left_out(i)
        and (bound.value is None or bound.value[i].power)
        for bound in bounds
    )


@rule("StridedSliceGrad")
def _strided_slice_back(analysis, operation, states):
    *bounds, state = states
    shape = analysis.value(operation.inputs[0])
    strides = analysis.value(operation.inputs[3])
    is_whole = strides is not None and strides[0] == ONE
    is_whole &= all(operation.get_attr(f"{name}_mask") & 1 for name in ("begin", "end"))
    masks = ("shrink_axis_mask", "new_axis_mask", "ellipsis_mask")
    is_first = not any(operation.get_attr(name) & 1 for name in masks)
    if (
        shape is None
        or state.kind != "rows"
        or state.axis
        or not (is_whole and is_first)
    ):
        raise Mixed("it chooses examples")
    without_places([state])
    if shape[0] != N * state.span or any(size.power for size in shape[1:]):
        raise Mixed(SIZE)
    if any(s.kind != "fixed" for s in bounds[1:]):
        raise Mixed(SIZE)
    return analysis.set_dims(operation.outputs[0], state, list(shape))


@rule("Slice")
def _slice(analysis, operation, states):
    state = states[0]
    if state.kind != "rows" or any(
        s.kind not in ("fixed", "sizes") for s in states[1:]
    ):
        raise Mixed(BY_VALUES)
    without_places([state])
    begin, size = (analysis.value(tensor) for tensor in operation.inputs[1:])
    if begin is None or size is None:
        raise Mixed("it may choose examples")
    others = [i for i in range(len(begin)) if i != state.axis]
    if any(value[i].power for value in (begin, size) for i in others):
        raise Mixed(SIZE)
    whole = (Size(-1), N * state.span)
    if begin[state.axis] != Size(0) or size[state.axis] not in whole:
        raise Mixed("it chooses examples")
    keep_dims(analysis, operation, state, set(others))
    return state._replace(is_first=False)
