"""Rules of matrix products."""

from estimator_accum.rows.rules.broadcasting import broadcast_dims
from estimator_accum.rows.rules.refusals import UNLIKE, check_length_1, without_places
from estimator_accum.rows.rules.table import rule
from estimator_accum.rows.states import Mixed, State


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matrix_product(analysis, operation, states):
    without_places(states)
    prefix = "transpose" if operation.type == "MatMul" else "adj"
    names = ("_a", "_b") if prefix == "transpose" else ("_x", "_y")
    ranks = [analysis.rank(tensor) for tensor in operation.inputs]
    pairs = []
    for i, (state, rank) in enumerate(zip(states, ranks, strict=True)):
        if state.kind != "rows":
            continue
        place = rank - state.axis  # from the right
        if place <= 2:
            place = 3 - place if operation.get_attr(prefix + names[i]) else place
            if place != 2 - i:
                raise Mixed("it sums over the examples")
        pairs.append((place, state.span))
    if len(pairs) == 2 and (pairs[0][0] != pairs[1][0] or pairs[0][0] <= 2):
        raise Mixed("it multiplies examples by examples")
    place, span = max(pairs, key=lambda pair: len(pair[1].symbols))
    if len(pairs) == 1 and place > 2:
        i = [state.kind for state in states].index("fixed")
        if ranks[i] >= place:
            check_length_1(analysis.dims(operation.inputs[i])[ranks[i] - place])
    state = State("rows", max(ranks) - place, span)
    dims = broadcast_dims(analysis, list(operation.inputs), max(ranks))
    return analysis.set_dims(operation.outputs[0], state, [*dims[:-2], None, None])


@rule("Einsum")
def _einsum(analysis, operation, states):
    without_places(states)
    left, right = operation.get_attr("equation").decode().replace(" ", "").split("->")
    terms = left.split(",")
    rows = [
        (_label(analysis, tensor, term, state.axis), state.span)
        for tensor, term, state in zip(operation.inputs, terms, states, strict=True)
        if state.kind == "rows"
    ]
    if all(label is None for label, _ in rows):
        return _einsum_with_dots(analysis, operation, states, terms, right)
    fixed = [term for term, s in zip(terms, states) if s.kind == "fixed"]
    label, span = rows[0]
    if len(set(rows)) > 1 or any(term.count(label) > 1 for term in terms):
        raise Mixed("it multiplies examples by examples")
    if label not in right or any(label in term for term in fixed):
        raise Mixed("it sums over the examples")
    before, _, after = right.partition("...")
    if label in before:
        return State("rows", before.index(label), span)
    from_right = len(after) - after.index(label)
    return State("rows", analysis.rank(operation.outputs[0]) - from_right, span)


def _label(analysis, tensor, term: str, axis: int) -> str | None:
    """Returns the letter of an axis; None if it is among those of three dots."""
    before, dots, after = term.partition("...")
    if axis < len(before):
        return before[axis]
    from_right = analysis.rank(tensor) - axis
    return after[-from_right] if dots and from_right <= len(after) else None


def _einsum_with_dots(
    analysis, operation, states, terms: list[str], right: str
) -> State:
    """The examples are among the axes of three dots in front."""
    pairs = set()
    for tensor, state, term in zip(operation.inputs, states, terms, strict=True):
        dots = analysis.rank(tensor) - len(term.replace("...", ""))
        if state.kind == "rows":
            if not term.startswith("...") or state.axis >= dots:
                raise Mixed("an equation with three dots")
            pairs.add((dots - state.axis, state.span))
        elif dots:
            raise Mixed("an equation with three dots")
    ((place, span),) = pairs if len(pairs) == 1 else [(None, None)]
    if place is None or not right.startswith("..."):
        raise Mixed(UNLIKE)
    dots = analysis.rank(operation.outputs[0]) - len(right) + 3
    return State("rows", dots - place, span)
