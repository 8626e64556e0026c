"""Rules of operations that make as many rows as a size says."""

import tensorflow as tf

from estimator_accum.graph.names import DRAWS_OF_PARAMETERS, SHAPED_DRAWS
from estimator_accum.rows.rules.refusals import (
    FIXED_BESIDE,
    NO_SHAPE,
    PLACE,
    SIZE,
    UNLIKE,
    without_places,
)
from estimator_accum.rows.rules.table import rule
from estimator_accum.rows.sizes import ONE, N, Size
from estimator_accum.rows.states import FIXED, Mixed, State

FROM_SIZES = {
    *("Fill", "Tile", "BroadcastTo", "Range", "RngReadAndSkip"),
    *SHAPED_DRAWS,
    *DRAWS_OF_PARAMETERS,
}


def _made(analysis, output: tf.Tensor, dims) -> State:
    """Returns the state of a tensor of shape `dims`, each element like the others."""
    if dims is None:
        raise Mixed(NO_SHAPE)
    places = [i for i, size in enumerate(dims) if size.power]
    if len(places) != 1 or dims[places[0]].power != 1:
        raise Mixed(UNLIKE)
    result = State("rows", places[0], dims[places[0]] // N)
    return analysis.set_dims(output, result, list(dims))


@rule("Fill")
def _fill(analysis, operation, states):
    if states[1].kind != "fixed" or states[0].kind not in ("fixed", "sizes"):
        raise Mixed(SIZE)
    return _made(analysis, operation.outputs[0], analysis.value(operation.inputs[0]))


@rule(*SHAPED_DRAWS)
def _random(analysis, operation, states):
    if states[0].kind != "sizes" or any(state.kind != "fixed" for state in states[1:]):
        raise Mixed(SIZE)
    check_seed(analysis, operation)
    return _made(analysis, operation.outputs[0], analysis.value(operation.inputs[0]))


@rule(*DRAWS_OF_PARAMETERS)
def _random_by_parameters(analysis, operation, states):
    shape, *others, state = states
    if shape.kind not in ("fixed", "sizes") or {*others} - {FIXED}:
        raise Mixed(SIZE)
    without_places([state])
    check_seed(analysis, operation)
    output, parameter = operation.outputs[0], operation.inputs[-1]
    dims = analysis.value(operation.inputs[0])
    if dims is None:
        raise Mixed(NO_SHAPE)
    dims, sizes = [*dims], analysis.dims(parameter)
    if not DRAWS_OF_PARAMETERS[operation.type]:  # for each number as many
        dims += sizes
    before = len(dims) - len(sizes)
    if state.kind == "rows":
        place = before + state.axis
        places = [i for i, size in enumerate(dims) if size.power]
        if places != [place] or dims[place] != N * state.span:
            raise Mixed(UNLIKE)
        state = state._replace(axis=place, is_first=False)
        return analysis.set_dims(output, state, dims)
    result = _made(analysis, output, dims)
    if result.axis >= before and sizes[result.axis - before] != ONE:
        raise Mixed(FIXED_BESIDE)
    return result


def check_seed(analysis, operation: tf.Operation) -> None:
    """Raises Mixed if an operation draws the same numbers for every micro-batch."""
    if operation.type.startswith("Stateless") and not _has_new_seed(
        analysis, operation
    ):
        raise Mixed(
            "a stateless operation draws the same numbers for every micro-batch"
        )


def _has_new_seed(analysis, operation: tf.Operation) -> bool:
    """Returns whether a seed is another one for each micro-batch or run."""
    names = [argument.name for argument in operation.op_def.input_arg]
    return any(
        analysis.is_new_in_each_run(tensor)
        for name, tensor in zip(names, operation.inputs, strict=True)
        if name in ("seed", "key", "counter")
    )


@rule("RngReadAndSkip")
def _random_state(analysis, operation, states):
    return FIXED  # of a run; a size only says how many numbers are skipped


@rule("Range")
def _range(analysis, operation, states):
    start, limit, delta = (analysis.value(tensor) for tensor in operation.inputs)
    if start is None or limit is None or delta is None or start[()] != Size(0):
        raise Mixed(PLACE)
    number = limit[()] // delta[()]
    span, is_each = number // N, number == N
    distance = delta[()] * span
    result = State("rows", 0, span, distance=distance, is_number=is_each)
    return analysis.set_dims(operation.outputs[0], result, [number])


@rule("Tile", "BroadcastTo")
def _tile(analysis, operation, states):
    state, tensor = states[0], operation.inputs[0]
    value = analysis.value(operation.inputs[1])
    if value is None or states[1].kind not in ("fixed", "sizes"):
        raise Mixed(NO_SHAPE)
    is_tile, new_axes = operation.type == "Tile", len(value) - analysis.rank(tensor)
    places = [i for i, size in enumerate(value) if size.power]
    if state.kind == "rows":
        place = state.axis + new_axes
        if is_tile and (places or value[place] != ONE):
            raise Mixed("it repeats the examples")
        if not is_tile and (places != [place] or value[place] != N * state.span):
            raise Mixed(UNLIKE)
        result = state._replace(axis=place, is_first=False)
    else:
        if state.kind != "fixed" or len(places) != 1 or value[places[0]].power != 1:
            raise Mixed(SIZE)
        (place,) = places
        source, span = place - new_axes, value[place] // N
        if is_tile:  # each example gets all of them
            span = span * analysis.dims(tensor)[source]
        elif source >= 0 and analysis.dims(tensor)[source] != ONE:
            raise Mixed(FIXED_BESIDE)
        result = State("rows", place, span)
    dims = list(value)
    if is_tile:
        dims = [a * b for a, b in zip(analysis.dims(tensor), value, strict=True)]
    return analysis.set_dims(operation.outputs[0], result, dims)
