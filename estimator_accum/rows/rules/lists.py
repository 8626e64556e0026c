"""Rules of lists of tensors: TensorList of control flow v2, TensorArray of v1."""

import tensorflow as tf

from estimator_accum.rows.rules.refusals import SIZE, without_places
from estimator_accum.rows.rules.table import RULES_OF_ANY, rule
from estimator_accum.rows.sizes import N
from estimator_accum.rows.states import (
    EMPTY_LIST,
    FIXED,
    MIXED,
    SIZES,
    Mixed,
    State,
    join,
)

# Places of the list, of the number of an element, and of elements that are put into it.
_LISTS = {
    "TensorListSetItem": (0, 1, 2),
    "TensorListPushBack": (0, None, 1),
    "TensorArrayWriteV3": (3, 1, 2),
    "TensorListFromTensor": (None, None, 0),
    "TensorArrayScatterV3": (3, 1, 2),
    "TensorListGetItem": (0, 1, None),
    "TensorArrayReadV3": (2, 1, None),
    "TensorListStack": (0, None, None),
    "TensorListGather": (0, 1, None),
    "TensorArrayGatherV3": (2, 1, None),
}


def _places(operation, states: list[State]) -> tuple[int | None, int | None]:
    """Returns the places of the list, and of elements that are put into it."""
    of, index, item = _LISTS[operation.type]
    if index is not None and states[index].kind != "fixed":
        raise Mixed("an element is chosen by a value")
    return of, item


def _element(state: State) -> State:
    """Returns the state of a list's elements."""
    if state.kind == "examples":
        raise Mixed("an element is of one example")
    if state.kind == "list" and state.axis is None:
        raise Mixed("an element of an empty list")
    return State("rows", state.axis, state.span) if state.kind == "list" else state


def _with(state: State, element: State) -> State:
    """Returns the state of a list that `element`, a list's state, joins."""
    state = join(state, element)
    if state.kind == "mixed":
        raise Mixed("a list of elements of several kinds")
    return state


def _take(analysis, state: State, of: tf.Tensor, output: tf.Tensor) -> State:
    """Returns the state of an element of the list `of`."""
    element = _element(state)
    if element.kind == "rows" and analysis.knows_dims(of):
        analysis.set_dims(output, element, analysis.dims(of))
    return element


@rule("TensorListReserve", "EmptyTensorList", "TensorArrayV3", table=RULES_OF_ANY)
def _begin(analysis, operation, states):
    # Neither the number of elements that a list may have at most is a value, nor the
    # shape of those that are not put into it.
    numbers = {"EmptyTensorList": states[2:], "TensorListReserve": states[1:]}
    numbers = numbers.get(operation.type, states)
    if operation.type == "TensorListReserve" and numbers[0].kind == "sizes":
        number = analysis.value(operation.inputs[1])
        if number is not None and number.ndim == 0 and number[()].power == 1:
            return State("examples", None, number[()] // N)  # rounds of a loop fill it
    return EMPTY_LIST if {state.kind for state in numbers} <= {"fixed"} else MIXED


@rule("TensorListSetItem", "TensorListPushBack", "TensorArrayWriteV3")
def _put(analysis, operation, states):
    of, item = _places(operation, states)
    element, tensor = states[item], operation.inputs[item]
    without_places([element])
    if element.kind == "rows":
        element = element._replace(kind="list")  # its dims are those of its elements
        analysis.set_dims(operation.outputs[0], element, analysis.dims(tensor))
    return _with(states[of], element)


@rule("TensorListFromTensor", "TensorArrayScatterV3")
def _unstack(analysis, operation, states):
    of, item = _places(operation, states)
    state, tensor = states[item], operation.inputs[item]
    if state.kind != "rows":
        return state if of is None else join(states[of], state)
    without_places([state])
    if state.axis == 0:
        if of is None:
            return State("examples", 0, state.span)
        raise Mixed("a list of examples")
    result = state._replace(kind="list", axis=state.axis - 1)
    analysis.set_dims(operation.outputs[0], result, analysis.dims(tensor)[1:])
    return result if of is None else _with(states[of], result)


@rule("TensorListGetItem", "TensorArrayReadV3")
def _get(analysis, operation, states):
    of, _ = _places(operation, states)
    return _take(analysis, states[of], operation.inputs[of], operation.outputs[0])


@rule("TensorListPopBack")
def _pop(analysis, operation, states):
    handle, (output, item) = operation.inputs[0], operation.outputs
    if analysis.knows_dims(handle):
        analysis.set_dims(output, states[0], analysis.dims(handle))
    return [states[0], _take(analysis, states[0], handle, item)]


@rule("TensorListStack", "TensorListGather", "TensorArrayGatherV3")
def _stack(analysis, operation, states):
    of, _ = _places(operation, states)
    span, is_whole = states[of].span, operation.type == "TensorListStack"
    if is_whole and states[of] == State("examples", 0, span):
        return State("rows", 0, span)
    element, tensor = _element(states[of]), operation.inputs[of]
    if element.kind != "rows":
        return element
    element = element._replace(axis=element.axis + 1)
    if analysis.knows_dims(tensor):
        analysis.set_dims(operation.outputs[0], element, [None, *analysis.dims(tensor)])
    return element


@rule("TensorListLength", "TensorArraySizeV3")
def _length(analysis, operation, states):
    if any(state.kind == "examples" for state in states):
        raise Mixed(SIZE)
    return FIXED


@rule("TensorListElementShape")
def _element_shape(analysis, operation, states):
    return SIZES
