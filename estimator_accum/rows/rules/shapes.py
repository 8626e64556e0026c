"""Rules of operations that move elements to other places."""

import numpy as np
import tensorflow as tf

from estimator_accum.rows.rules.dims import axes_of, keep_dims, with_axis, without_axes
from estimator_accum.rows.rules.refusals import (
    FIXED_BESIDE,
    NO_SHAPE,
    PLACE,
    UNLIKE,
    only_first,
)
from estimator_accum.rows.rules.table import rule
from estimator_accum.rows.sizes import ONE, N, Size, Unknown, product
from estimator_accum.rows.states import Mixed, State


def _reshaped(analysis, tensor: tf.Tensor, state: State, target: np.ndarray):
    """Returns the state and shape of `tensor` in the shape `target`, of sizes.

    A size of -1 is the rest.
    """
    source, target = analysis.dims(tensor), list(target)
    if Size(-1) in target:
        place = target.index(Size(-1))
        rest = product(size for size in target if size != Size(-1))
        try:
            target[place] = product(source) // rest
        except Unknown:
            target[place] = None
            return _apart(state, target)
    places = [i for i, size in enumerate(target) if size.power]
    if len(places) != 1 or target[places[0]].power != 1:
        raise Mixed("it reorders the examples")
    (place,) = places
    if state.axis != 0 or place != 0:
        before = product(source[: state.axis]), product(target[:place])
        if before[0] != before[1]:
            raise Mixed("it reorders the examples")
    return _cut_to(state, place, target), target


def _apart(state: State, target: list):
    """`_reshaped` where the product of the sizes that are left is not known."""
    places = [i for i, size in enumerate(target) if size is not None and size.power]
    if places == [0] and state.axis == 0 and target[0].power == 1:
        # Equal parts of what follows one another: the examples stay apart.
        return _cut_to(state, 0, target), target
    if places:
        raise Mixed("it reorders the examples")
    raise Mixed(NO_SHAPE)


def _cut_to(state: State, place: int, target: list) -> State:
    return state._replace(axis=place, span=target[place] // N, is_first=False)


@rule("Reshape")
def _reshape(analysis, operation, states):
    state, shape = states
    if state.kind != "rows":
        raise Mixed(FIXED_BESIDE)
    target = analysis.value(operation.inputs[1])
    if shape.kind not in ("fixed", "sizes") or target is None:
        raise Mixed(NO_SHAPE)
    result, dims = _reshaped(analysis, operation.inputs[0], state, target)
    return analysis.set_dims(operation.outputs[0], result, dims)


@rule("Transpose")
def _transpose(analysis, operation, states):
    state, order = states[0], analysis.value(operation.inputs[1])
    if order is None:
        raise Mixed("its axes are not known")
    order = [int(axis) % len(order) for axis in order]
    is_first = state.is_first and order == [1, 0]
    result = state._replace(axis=order.index(state.axis), is_first=is_first)
    dims = analysis.dims(operation.inputs[0])
    dims = [dims[axis] for axis in order]
    return analysis.set_dims(operation.outputs[0], result, dims)


@rule("ExpandDims")
def _expand(analysis, operation, states):
    state, rank = states[0], analysis.rank(operation.inputs[0])
    (axis,) = axes_of(analysis, operation.inputs[1], rank + 1)
    return with_axis(analysis, operation, state, axis, ONE)


@rule("Squeeze")
def _squeeze(analysis, operation, states):
    (state,), rank = states, analysis.rank(operation.inputs[0])
    axes = {axis % rank for axis in operation.get_attr("squeeze_dims")}
    if not axes:
        raise Mixed("it drops every axis of length 1, the examples' too")
    return without_axes(analysis, operation, state, axes)


def _all_alike(states: list[State]) -> State:
    """Returns the state that all inputs have, places and values aside."""
    if any(state.kind != "rows" for state in states):
        raise Mixed(FIXED_BESIDE)
    if len({(state.axis, state.span) for state in states}) > 1:
        raise Mixed(UNLIKE)
    return states[0]


def _with_places(states: list[State], is_last: bool) -> State:
    """Returns the first state; rows of (place, value, ...) are read by GatherNd."""
    first, *others = states
    if all(state.distance is None for state in states):
        return first
    are_values = all(state.distance is None for state in others)
    if not (is_last and first.is_number and are_values):
        raise Mixed(PLACE)
    return first._replace(is_number=False, is_first=True)


@rule("ConcatV2")
def _concat(analysis, operation, states):
    *states, axis_state = states
    state, tensors = _all_alike(states), operation.inputs[:-1]
    rank = analysis.rank(tensors[0])
    (axis,) = axes_of(analysis, operation.inputs[-1], rank)
    if axis_state.kind != "fixed" or axis == state.axis:
        raise Mixed("it joins examples with examples")
    dims = analysis.dims(tensors[0])
    result = _with_places(states, axis == rank - 1 and dims[axis] == ONE)
    dims = [None if i == axis else size for i, size in enumerate(dims)]
    return analysis.set_dims(operation.outputs[0], result, dims)


@rule("Pack")
def _pack(analysis, operation, states):
    _all_alike(states)
    rank = analysis.rank(operation.inputs[0])
    axis = operation.get_attr("axis") % (rank + 1)
    state = _with_places(states, axis == rank or rank == 1)
    result = with_axis(analysis, operation, state, axis, Size(len(states)))
    return result._replace(is_first=state.is_first)


@rule("Unpack")
def _unpack(analysis, operation, states):
    axis = operation.get_attr("axis") % analysis.rank(operation.inputs[0])
    return without_axes(analysis, operation, only_first(states), {axis})


@rule("Split", "SplitV")
def _split(analysis, operation, states):
    inputs = list(operation.inputs)
    if operation.type == "Split":
        inputs, states = [inputs[1], inputs[0]], [states[1], states[0]]
    state = only_first(states)
    if len(operation.outputs) == 1:  # for one device, say
        return analysis.set_dims(operation.outputs[0], state, analysis.dims(inputs[0]))
    axes = axes_of(analysis, inputs[-1], analysis.rank(inputs[0]))
    if state.axis in axes:
        raise Mixed("it takes examples apart")
    return keep_dims(analysis, operation, state, axes)


@rule("Pad", "PadV2", "MirrorPad")
def _pad(analysis, operation, states):
    state, paddings = only_first(states), analysis.value(operation.inputs[1])
    if paddings is None or list(paddings[state.axis]) != [Size(0), Size(0)]:
        raise Mixed("it may add examples")
    axes = {*range(len(paddings))} - {state.axis}
    return keep_dims(analysis, operation, state, axes)


@rule("OneHot")
def _one_hot(analysis, operation, states):
    state, rank = only_first(states), analysis.rank(operation.inputs[0])
    axis = operation.get_attr("axis")
    axis = rank if axis == -1 else axis
    return with_axis(analysis, operation, state, axis, None)
