"""Rules of control flow, whose bodies are looked into."""

import functools

from estimator_accum.graph.functions import graph_called
from estimator_accum.graph.internals import context_of
from estimator_accum.graph.names import BRANCHES, CALLS, LOOPS
from estimator_accum.rows.rules.rounds import Rounds
from estimator_accum.rows.rules.table import RULES_OF_ANY, rule
from estimator_accum.rows.states import FIXED, Mixed, join

MOST_ROUNDS = 8  # through a loop, until nothing changes any more
UNSETTLED = "a loop whose variables never settle"
_BRANCH = "the batch decides which branch is taken"
_END = "the batch decides when a loop ends"


@rule(*CALLS, table=RULES_OF_ANY)
def _call(analysis, operation, states):
    name, tensors = operation.get_attr("f").name, operation.inputs
    graph = graph_called(operation, name, tensors, len(operation.outputs))
    return analysis.of_function(operation, graph, tensors, states)


@rule(*BRANCHES, table=RULES_OF_ANY)
def _branch(analysis, operation, states):
    if states[0].kind != "fixed":
        raise Mixed(_BRANCH)
    if "branches" in operation.node_def.attr:
        branches = operation.get_attr("branches")
    else:
        branches = [operation.get_attr(f"{name}_branch") for name in ("then", "else")]
    tensors, ways = operation.inputs[1:], []
    for branch in branches:
        graph = graph_called(operation, branch.name, tensors, len(operation.outputs))
        ways.append(analysis.of_function(operation, graph, tensors, states[1:]))
    return [functools.reduce(join, results) for results in zip(*ways, strict=True)]


@rule(*LOOPS, table=RULES_OF_ANY)
def _loop(analysis, operation, states):
    tensors, name = list(operation.inputs), operation.get_attr("body").name
    condition = operation.get_attr("cond").name
    if any(state.kind == "examples" for state in states):
        graph = graph_called(operation, name, tensors, len(tensors))
        end = graph_called(operation, condition, tensors, 1)
        if results := Rounds(analysis, tensors, states, graph, end).states():
            return results
    has_own_value = [False] * len(states)
    for _ in range(MOST_ROUNDS):
        graph = graph_called(operation, name, tensors, len(tensors))
        after = analysis.of_function(operation, graph, tensors, states, has_own_value)
        pairs = zip(graph.inputs, graph.outputs, strict=True)
        has_own_value = [before is result for before, result in pairs]
        joined = [join(*pair) for pair in zip(states, after, strict=True)]
        if joined == states:
            break
        states = joined
    else:
        raise Mixed(UNSETTLED)
    graph = graph_called(operation, condition, tensors, 1)
    (predicate,) = analysis.of_function(
        operation, graph, tensors, states, has_own_value
    )
    analysis.note_bounds(operation)
    if predicate.kind != "fixed":
        raise Mixed(_END)
    return states


@rule("Switch", table=RULES_OF_ANY)
def _switch(analysis, operation, states):
    context = context_of(operation)
    is_loop = context is not None and context.IsWhileContext()
    if not is_loop and states[1].kind != "fixed":
        raise Mixed(_BRANCH)
    return states[0]


@rule("Exit", table=RULES_OF_ANY)
def _exit(analysis, operation, states):
    switch = operation.inputs[0].op
    if switch.type != "Switch":
        raise Mixed("a loop of another kind")
    if analysis.state(switch.inputs[1]).kind != "fixed":
        raise Mixed(_END)
    return states[0]


@rule("Merge", table=RULES_OF_ANY)
def _merge(analysis, operation, states):
    second = operation.inputs[1].op
    if second.type == "NextIteration":
        first = states[0]
        if analysis.has_seen(second.inputs[0].op):  # else it is the first round
            first = join(first, analysis.state(second.inputs[0]))
        return [first, FIXED]
    for tensor in operation.inputs:
        inner = context_of(tensor.op)
        predicate = getattr(inner, "pred", None)
        if tensor.op.type == "Switch":
            predicate = tensor.op.inputs[1]
        if predicate is None or analysis.state(predicate).kind != "fixed":
            raise Mixed(_BRANCH)
    return [functools.reduce(join, states), FIXED]
