"""Rules of blocks: lists that repeat all examples, one block after the other.

    tf.concat([a, b], 0)    2 blocks, of a's rows and of b's
    SpaceToBatchND          a block for each place of a pixel, as dilated convolutions do
    tf.reshape(x, [-1, 5])  a block for each of the T words of x [T, n, 5]

A block is in the order of the examples, the list is not.
"""

import itertools
import re

from estimator_accum.rows.rules.dims import axes_of
from estimator_accum.rows.rules.refusals import ALONG
from estimator_accum.rows.rules.table import RULES_OF_ENTRIES, rule
from estimator_accum.rows.sizes import ONE, N, Size, product
from estimator_accum.rows.states import Mixed, State

_NAME = re.compile(r"(\d+) blocks of (\d+)")


def blocks_of(name: str | None) -> tuple[int, int] | None:
    """Returns the number of a list's blocks, and of rows for each example in one."""
    match = _NAME.fullmatch(name or "")
    return match and (int(match[1]), int(match[2]))


def _blocks(analysis, operation, number: int, state: State, tail: list) -> State:
    """Returns the state of blocks of rows, or of blocks of blocks.

    `tail` are the axes behind the first.
    """
    if state.kind == "rows" and not state.axis and not state.is_place:
        span = int(state.span)
    elif (blocks := _blocks_of(state)) is not None:
        number, span = number * blocks[0], blocks[1]
    else:
        raise Mixed(ALONG)
    result = State("entries", 0, of=f"{number} blocks of {span}")
    return analysis.set_dims(operation.outputs[0], result, [None, *tail])


def _block(analysis, operation, state: State, tail: list, parts: int) -> State:
    """Returns the state of blocks that are taken apart to as many parts."""
    number, span = blocks_of(state.of)
    result = State("rows", 0, Size(span))
    if number > parts:
        result = State("entries", 0, of=f"{number // parts} blocks of {span}")
    for output in operation.outputs:
        analysis.set_dims(output, result, [None, *tail])
    return result


def _number(analysis, operation) -> int:
    """Returns the number of blocks that an operation makes or takes apart."""
    if operation.type in ("SpaceToBatch", "BatchToSpace"):
        return operation.get_attr("block_size") ** 2
    value = analysis.value(operation.inputs[1])
    if value is None:
        raise Mixed("its blocks are not known")
    number = 1
    for size in value.flat:
        number *= int(size)
    return number


def _tail(analysis, operation) -> list:
    """Returns the axes behind the first, of which those of space change."""
    is_general = operation.type.endswith("ND")
    space = operation.inputs[1].shape.num_elements() if is_general else 2
    if space is None:
        raise Mixed("its axes are not known")
    dims = analysis.dims(operation.inputs[0])
    return [*[None] * space, *dims[1 + space :]]


@rule("SpaceToBatchND", "SpaceToBatch", table=RULES_OF_ENTRIES)
@rule("BatchToSpaceND", "BatchToSpace", table=RULES_OF_ENTRIES)
def _to_or_from_blocks(analysis, operation, states):
    state, *others = states
    if any(other.kind != "fixed" for other in others):
        raise Mixed(ALONG)
    number, tail = _number(analysis, operation), _tail(analysis, operation)
    if operation.type.startswith("SpaceToBatch"):
        return _blocks(analysis, operation, number, state, tail)
    if not _has_parts(state, number):
        raise Mixed(ALONG)
    return _block(analysis, operation, state, tail, number)


def _blocks_of(state: State) -> tuple[int, int] | None:
    """Returns the number of blocks of values, and of rows for each example in one."""
    is_list = state.kind == "entries" and not state.is_place
    return blocks_of(state.of) if is_list else None


def _has_parts(state: State, parts: int) -> bool:
    """Returns whether blocks can be taken apart to as many equal parts."""
    blocks = _blocks_of(state)
    return blocks is not None and blocks[0] % parts == 0


def joined_rows(analysis, operation, states) -> State | None:
    """Returns the state of blocks that are joined; None of another concatenation."""
    *states, axis = states
    tensors = operation.inputs[:-1]
    are_rows = all(state.kind == "rows" for state in states)
    are_blocks = all(map(_blocks_of, states))
    if axis.kind != "fixed" or not (are_rows or are_blocks):
        return None
    rank = analysis.rank(tensors[0])
    axes = axes_of(analysis, operation.inputs[-1], rank)
    if axes != {0} or states[0].axis or len(states) == 1 or len({*states}) > 1:
        return None
    tail = analysis.dims(tensors[0])[1:]
    return _blocks(analysis, operation, len(states), states[0], tail)


@rule("Tile", table=RULES_OF_ENTRIES)
def _repeat(analysis, operation, states):
    state, value = states[0], analysis.value(operation.inputs[1])
    is_along = state.kind == "rows" or _blocks_of(state) is not None
    is_along &= not state.axis and states[1].kind == "fixed"
    if not is_along or value is None or value[0] == ONE:
        return None
    tail = [
        size * times
        for size, times in zip(analysis.dims(operation.inputs[0]), value, strict=True)
    ][1:]
    return _blocks(analysis, operation, int(value[0]), state, tail)


@rule("Split", "SplitV", table=RULES_OF_ENTRIES)
def _take_apart(analysis, operation, states):
    tensors, parts = [*operation.inputs], len(operation.outputs)
    if operation.type == "SplitV":
        (tensor, lengths, axis), state = tensors, states[0]
        if not _are_equal(analysis.value(lengths), state, parts):
            return None
    else:
        (axis, tensor), state = tensors, states[1]
    if analysis.state(axis).kind != "fixed" or not _has_parts(state, parts):
        return None
    if axes_of(analysis, axis, analysis.rank(tensor)) != {0}:
        return None
    return _block(analysis, operation, state, analysis.dims(tensor)[1:], parts)


def _are_equal(lengths, state: State, parts: int) -> bool:
    """Returns whether lengths are those of as many equal parts; -1 is the rest."""
    if lengths is None or not _has_parts(state, parts):
        return False
    number, span = blocks_of(state.of)
    length = N * Size(number // parts * span)
    rest = [size for size in lengths if size != length]
    return rest in ([], [Size(-1)])


def one_block(analysis, operation, state: State) -> State | None:
    """Returns the state of a slice that is one block; None if it may be another."""
    blocks, tensor = blocks_of(state.of), operation.inputs[0]
    begin, end, strides = map(analysis.value, operation.inputs[1:])
    if any(bound is None for bound in (blocks, begin, end, strides)):
        return None
    if [*strides] != [ONE]:
        return None
    masks = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    if state.is_place or any(map(operation.get_attr, masks)):
        return None
    number, span = blocks
    block = N * Size(span)
    first = Size(0) if operation.get_attr("begin_mask") else begin[0]
    last = block * Size(number) if operation.get_attr("end_mask") else end[0]
    bounds = [Size(0), *(block * Size(place + 1) for place in range(number))]
    if (first, last) not in itertools.pairwise(bounds):
        return None
    return _block(analysis, operation, state, analysis.dims(tensor)[1:], number)


def blocks_apart(analysis, operation, state: State) -> State | None:
    """Returns the state of blocks that get an axis of their own; None without one."""
    blocks, target = blocks_of(state.of), analysis.value(operation.inputs[1])
    if blocks is None or target is None or state.is_place:
        return None
    (number, span), tail = blocks, analysis.dims(operation.inputs[0])[1:]
    first, length, *rest = [*target, None, None][: max(len(target), 2)]
    inner, rest = rest[: len(rest) - len(tail)], rest[len(rest) - len(tail) :]
    if first != Size(number) or length is None or rest != tail:
        return None
    if any(size.power or size.symbols or size.factor < 1 for size in inner):
        return None
    parts = int(product(inner))  # of the rows of an example in a block
    lengths = (N * Size(span // parts), Size(-1))
    if span % parts or length not in lengths:
        return None
    result = State("rows", 1, Size(span // parts))
    return analysis.set_dims(operation.outputs[0], result, [first, None, *inner, *tail])


def flat_blocks(analysis, operation, state: State) -> State | None:
    """Returns the state of rows whose axis is joined with the one before it."""
    target, tensor = analysis.value(operation.inputs[1]), operation.inputs[0]
    if state.kind != "rows" or state.axis != 1 or state.is_place or target is None:
        return None
    source = analysis.dims(tensor)
    inner = len(source) - len(target) + 1  # axes that are joined
    if inner < 2 or [*target[1:]] != source[inner:] or source[0] == ONE:
        return None
    if target[0] not in (product(source[:inner]), Size(-1)):
        return None
    number, span = int(source[0]), int(state.span * product(source[2:inner]))
    result = State("entries", 0, of=f"{number} blocks of {span}")
    return analysis.set_dims(operation.outputs[0], result, [None, *target[1:]])
