"""Shapes of results that have axes more or less than an input."""

import tensorflow as tf

from estimator_accum.rows.rules.refusals import ALONG
from estimator_accum.rows.sizes import Size
from estimator_accum.rows.states import Mixed, State


def axes_of(analysis, tensor: tf.Tensor, rank: int) -> set[int]:
    """Returns the axes that an input names, counted from the left."""
    value = analysis.value(tensor)
    if value is None:
        raise Mixed("its axis is not known")
    return {int(axis) % rank for axis in value.flat}


def with_axis(analysis, operation, state: State, axis: int, size: Size | None) -> State:
    """Returns the state of the output, which has one axis more than the first input.

    `state` is that of the first input; the `size` of the new axis is None if unknown.
    """
    dims = list(analysis.dims(operation.inputs[0]))
    dims.insert(axis, size)
    state = state._replace(axis=state.axis + (axis <= state.axis), is_first=False)
    return analysis.set_dims(operation.outputs[0], state, dims)


def without_axes(analysis, operation, state: State, axes: set[int]) -> State:
    """Returns the state of the outputs, which lack axes of the first input."""
    if state.axis in axes:
        raise Mixed(ALONG)
    moved = sum(axis < state.axis for axis in axes)
    result = state._replace(axis=state.axis - moved, is_first=False)
    dims = analysis.dims(operation.inputs[0])
    sizes = [size for axis, size in enumerate(dims) if axis not in axes]
    for output in operation.outputs:
        analysis.set_dims(output, result, sizes)
    return result


def keep_dims(analysis, operation, state: State, changed: set[int]) -> State:
    """Returns the state of outputs with the shape of the first rows, but for some axes."""
    tensor = next(t for t in operation.inputs if analysis.state(t).kind == "rows")
    dims = list(analysis.dims(tensor))
    for axis in changed:
        dims[axis] = None
    for output in operation.outputs:
        analysis.set_dims(output, state, dims)
    return state
