"""States of results that are broadcast from several operands."""

import tensorflow as tf

from estimator_accum.rows.rules.refusals import UNLIKE, check_length_1
from estimator_accum.rows.sizes import ONE, Size
from estimator_accum.rows.states import Mixed, State


def broadcast(analysis, tensors: list, states: list[State], output) -> State:
    """Returns the state of an output each element of which stands behind its inputs'."""
    place, span = _aligned(analysis, tensors, states)
    rank = max(analysis.rank(tensor) for tensor in tensors)
    result = State("rows", rank - place, span)
    return analysis.set_dims(output, result, broadcast_dims(analysis, tensors, rank))


def _aligned(
    analysis, tensors: list[tf.Tensor], states: list[State]
) -> tuple[int, Size]:
    """Returns the axis of the examples from the right, and the rows of each example."""
    ranks = [analysis.rank(tensor) for tensor in tensors]
    rows = [(rank - s.axis, s) for rank, s in zip(ranks, states) if s.kind == "rows"]
    (place, state), *others = rows
    span = state.span
    for other, state in others:
        if other != place:
            raise Mixed(UNLIKE)
        if state.span != span:
            # Sizes that only numbers tell are equal, or the unsplit batch fails.
            if not (state.span.symbols or span.symbols):
                raise Mixed(UNLIKE)
            span = max(span, state.span, key=lambda size: len(size.symbols))
    for tensor, rank, state in zip(tensors, ranks, states, strict=True):
        if state.kind == "fixed" and rank >= place:
            check_length_1(analysis.dims(tensor)[rank - place])
    return place, span


def broadcast_dims(analysis, tensors: list[tf.Tensor], rank: int) -> list:
    """Returns the shape of tensors that are broadcast, where it is known.

    Of two lengths that are not known one may be 1.
    """
    shapes = [analysis.dims(tensor) for tensor in tensors]
    dims = []
    for axis in range(-rank, 0):
        sizes = {shape[axis] for shape in shapes if len(shape) >= -axis}
        sizes = sizes - {ONE} or {ONE}
        dims.append(sizes.pop() if len(sizes) == 1 else None)
    return dims
