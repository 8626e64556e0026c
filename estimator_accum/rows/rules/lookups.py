"""Rules of rows that are looked up by number."""

import tensorflow as tf

from estimator_accum.graph.internals import context_of
from estimator_accum.rows.guards import OwnRows
from estimator_accum.rows.rules.refusals import (
    BY_VALUES,
    PLACE,
    SIZE,
    UNLIKE,
    without_places,
)
from estimator_accum.rows.rules.table import rule
from estimator_accum.rows.sizes import ONE, N
from estimator_accum.rows.states import Mixed, State


@rule("GatherV2", "Gather", "ResourceGather")
def _gather(analysis, operation, states):
    table, places, *_ = states
    axis, batch_dims = _axes(analysis, operation)
    if table.kind == "fixed" and places.kind == "rows" and not batch_dims:
        return _from_fixed(analysis, operation, places, axis)
    if table.kind != "rows" or table.distance is not None:
        raise Mixed(BY_VALUES)
    axis %= analysis.rank(operation.inputs[0])
    if places.kind == "fixed" and not batch_dims and axis != table.axis:
        moved = analysis.rank(operation.inputs[1]) - 1 if axis < table.axis else 0
        return table._replace(axis=table.axis + moved)
    if places.kind != "rows":
        raise Mixed(BY_VALUES)
    if batch_dims > table.axis and axis >= batch_dims:
        without_places([places])
        if (places.axis, places.span) == (table.axis, table.span):
            return table
    if not batch_dims and axis == table.axis == 0 and places.distance is not None:
        tensor, numbers = operation.inputs[:2]
        return _from_own(analysis, numbers, places, tensor, table)
    raise Mixed(BY_VALUES)


def _axes(analysis, operation: tf.Operation) -> tuple[int, int]:
    """Returns the axis along which rows are looked up, and the number of axes before."""
    axis = 0
    if operation.type == "GatherV2":
        value = analysis.value(operation.inputs[2])
        if value is None:
            raise Mixed("its axis is not known")
        axis = int(value.flat[0])
    return axis, 0 if operation.type == "Gather" else operation.get_attr("batch_dims")


def _from_fixed(analysis, operation, places: State, axis: int) -> State:
    """Returns the state of rows of a table that holds no value of the micro-batch."""
    without_places([places])
    indices, output = operation.inputs[1], operation.outputs[0]
    # The rank of a variable's handle is none of its values.
    axis = axis % analysis.rank(operation.inputs[0]) if axis else 0
    result = places._replace(axis=axis + places.axis)
    if output.shape.rank is not None:
        dims = [None] * output.shape.rank
        dims[axis : axis + analysis.rank(indices)] = analysis.dims(indices)
        analysis.set_dims(output, result, dims)
    return result


def _from_own(analysis, places, state: State, tensor, table: State) -> State:
    """Returns the state of rows that are looked up by the number of their example."""
    # With one row for each example, another number is another example's.
    if state.distance != table.span or (table.span == ONE and not state.is_number):
        raise Mixed(BY_VALUES)
    if not state.is_number:
        if context_of(places.op) is not None:  # where no micro-batch can check it
            raise Mixed("rows are looked up by number inside of a branch or loop")
        analysis.assume(OwnRows(places, state.axis, tensor))
    return state._replace(distance=None, is_number=False, is_first=False)


@rule("GatherNd", "ResourceGatherNd")
def _gather_nd(analysis, operation, states):
    table, places = states
    *_, length = analysis.dims(operation.inputs[1])
    last = analysis.rank(operation.inputs[1]) - 1
    if places.kind != "rows" or places.axis == last:
        raise Mixed(BY_VALUES)
    if table.kind == "fixed":
        without_places([places])
        return places
    # Of a place that is the number again and again only the first is an example's.
    is_number = places.is_number and length == ONE
    is_own = places.distance == table.span and (is_number or places.is_first)
    if table.kind == "rows" and table.axis == 0 and is_own:
        result = places._replace(distance=None, is_number=False, is_first=False)
        if table.distance is None:
            return result
        if not table.is_first or int(length) == analysis.rank(operation.inputs[0]):
            raise Mixed(PLACE)
        return result._replace(distance=table.distance, is_first=True)
    raise Mixed(BY_VALUES)


@rule("CropAndResize")
def _crops(analysis, operation, states):
    images, boxes, places, size = states
    without_places([images, boxes, size])
    if images.kind != "rows" or images.axis or size.kind != "fixed":
        raise Mixed(BY_VALUES)
    if places.kind != "rows" or places.distance != images.span:
        raise Mixed(BY_VALUES)
    if boxes != State("rows", 0, places.span):
        raise Mixed(UNLIKE)
    return _from_own(analysis, operation.inputs[2], places, operation.inputs[0], images)


@rule("ScatterNd")
def _scatter(analysis, operation, states):
    """Rows that are put to the places of their own example."""
    places, values, shape = states
    without_places([values])
    last = analysis.rank(operation.inputs[0]) - 1
    is_own = places.kind == "rows" and not places.axis and places.is_first and last
    if not is_own or values != State("rows", 0, places.span):
        raise Mixed(BY_VALUES)
    sizes = analysis.value(operation.inputs[2])
    if sizes is None or shape.kind != "sizes" or sizes[0] != N * places.distance:
        raise Mixed(SIZE)
    result = State("rows", 0, places.distance)
    if any(size.power for size in sizes[1:]):
        raise Mixed(SIZE)
    return analysis.set_dims(operation.outputs[0], result, [*sizes])
