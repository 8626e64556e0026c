"""Values that are computed from `global_step` where it counts micro-steps.

Whatever is computed from it moves K times per update: a KL weight as a learning rate. The
search follows values from their results to the variable: into branches, loops and
functions, and past operations that show a number or draw random numbers from it.
"""

import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import tensorflow as tf

from estimator_accum.graph.functions import (
    functions_of,
    library_of_functions,
    operations_with_own_gradients,
    producer_of,
)
from estimator_accum.graph.internals import original_of
from estimator_accum.graph.names import (
    BRANCHES,
    PASSING,
    READERS_OF_NO_VALUE,
    SHAPES,
    WRITERS,
)
from estimator_accum.graph.outermost import has_mark, mark_graph
from estimator_accum.graph.walks import (
    ancestors,
    data_ancestors,
    data_descendants,
    origin_of,
)
from estimator_accum.graph.writers import deciding_inputs, writing

_WARNED = "_estimator_accum_warned_of_global_step"  # a graph's attribute
# Operations whose results do not depend on the values that they get.
_UNDECIDED = {
    *("ZerosLike", "OnesLike"),
    "StatelessRandomGetKeyCounter",  # a seed may differ between micro-batches
}
# Operations that may get a seed, and their inputs that hold it.
_SEEDS = {"seed", "key", "counter"}
_SEEDED = re.compile(
    "Stateless(Random|Truncated|Multinomial|Parameterized|SampleDistorted)"
)
_TRIVIAL = {*PASSING, "Cast", "ReadVariableOp", "Placeholder"}
_ITERATORS = {"Iterator", "IteratorV2"}
_SENTENCE = (
    "%s reads global_step%s, which counts micro-steps and not updates: it moves K times "
    "too fast. Read get_or_create_update_step() in its place. %s microbatch_model_fn, "
    "where global_step counts updates."
)
_SENTENCE_IF_DIVIDED = (
    "%s reads global_step%s, divided by K: this counts updates as long as no partial "
    "window is applied and no micro-batch is skipped. Read get_or_create_update_step() "
    "in its place. %s microbatch_model_fn, where global_step counts updates."
)
_logger = logging.getLogger("tensorflow.estimator_accum")


def warn_of_global_step(
    counter: tf.Variable,
    loss: tf.Tensor | None,
    gradients: list[tf.Tensor],
    weight: tf.Tensor,
    steps: tf.Tensor,
    optimizer: str,
    updates: dict[str, list[tf.Operation]],
    update_ops: list,
) -> None:
    """Warns of values that are computed from global_step, which counts micro-steps.

    Args:
        counter: The variable `global_step`.
        loss: This replica's loss of a micro-batch; None if it is not known.
        gradients: Its gradients, of a sparse one the values.
        weight: The micro-batch's weight.
        steps: K [micro-steps per update].
        optimizer: Name of the optimizer's class.
        updates: Operations of the update, by the names of their makers.
        update_ops: Operations that run with every micro-step.
    """
    parts = tf.distribute.get_strategy().experimental_local_results(counter)
    clocks = {getattr(part, "handle", part).op for part in parts}
    optimizer_ops = updates[optimizer]
    if _writes_any(clocks, optimizer_ops):  # then it counts updates
        return
    registered = [getattr(update, "op", update) for update in update_ops]
    uses = {
        "the weight is computed": [weight.op],
        "the loss is computed": [gradient.op for gradient in gradients],
        "a variable is written before the loss": writing(
            {} if loss is None else ancestors([loss.op])
        ),
        "gradient_accumulation_steps is computed": [steps.op],
        **{f"{name} computes": writing(ops) for name, ops in updates.items()},
        "UPDATE_OPS computes": writing(ancestors(registered)),
    }
    _warn_of_readers(clocks, uses, loss, set(optimizer_ops), tf.get_static_value(steps))


def _warn_of_readers(
    clocks: set[tf.Operation],
    uses: Mapping[str, list[tf.Operation]],
    loss: tf.Tensor | None,
    optimizer_ops: set[tf.Operation],
    number: int | None,
) -> None:
    """Warns, once for a graph, of the first operation that reads `global_step`.

    Args:
        clocks: The variables `global_step`, one for each replica.
        uses: Operations that decide an update, by their purpose: "the loss is
            computed".
        loss: The loss, whose operations are named before those of its gradients.
        optimizer_ops: Operations of the optimizer, which are not named.
        number: K [micro-steps per update]; None if it changes.
    """
    graph = next(iter(clocks)).graph
    for name, operations in uses.items():
        needed = _ancestors(operations, clocks)
        if not needed or has_mark(graph, _WARNED):
            continue
        if name.startswith("the loss") and loss is not None:
            of_loss = _ancestors([loss.op], clocks)
            if not of_loss and _is_of_shown_branch(clocks, needed, loss):
                continue
            needed = of_loss or needed
        mark_graph(graph, _WARNED)
        reader, line = _reader(clocks, needed, optimizer_ops)
        if reader is None:
            reader, remedy = name.split()[0], "If it cannot, use"
        else:
            reader, remedy = f"{reader}, from which {name},", "Or use"
        is_divided = _is_divided(clocks, needed, number)
        sentence = _SENTENCE_IF_DIVIDED if is_divided else _SENTENCE
        _logger.warning(sentence, reader, line, remedy)


def _is_divided(clocks: set[tf.Operation], needed: dict, number: int | None) -> bool:
    """Returns whether a variable is divided by a multiple of K, and rounded down."""
    way = [op for op in _way(clocks, needed) if op.type not in _TRIVIAL]
    if not number or not way or way[0].type != "FloorDiv":
        return False
    divisor = tf.get_static_value(way[0].inputs[1])
    return divisor is not None and np.all(divisor % number == 0)


def _is_of_shown_branch(
    clocks: set[tf.Operation], needed: dict, loss: tf.Tensor
) -> bool:
    """Returns whether gradients depend on a branch on which their loss does not.

    TensorFlow 1's branches that pass on the same value, one of which shows it, have a
    gradient each. A gradient that a user wrote may depend on more than its loss.
    """
    branches = [op for op in _way(clocks, needed) if op.type == "Switch"]
    return bool(branches) and not operations_with_own_gradients(ancestors([loss.op]))


def _way(clocks: set[tf.Operation], needed: dict) -> list[tf.Operation]:
    """Returns the operations from a variable on that need each other."""
    operation, way = next(filter(needed.__contains__, clocks)), []
    while (operation := needed[operation]) is not None:
        way.append(operation)
    return way


def _writes_any(counters: set[tf.Operation], operations: list[tf.Operation]) -> bool:
    """Returns whether `operations` write one of the variables `counters`."""
    written = [op.inputs[0].op for op in operations if "Assign" in op.type]
    return any(data_ancestors([handle]).keys() & counters for handle in written)


def _ancestors(operations: list[tf.Operation], clocks: set[tf.Operation]) -> dict:
    """Returns `data_ancestors` by which a value of a counter decides another value."""
    needed = data_ancestors(operations, deciding)
    if clocks.isdisjoint(needed):
        return {}
    # Functions are looked into only where that may matter: it takes their definitions.
    needed = data_ancestors(operations, deciding_inside(next(iter(clocks)).graph))
    return {} if clocks.isdisjoint(needed) else needed


def deciding(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the inputs whose values decide those of the outputs, or of a write."""
    inputs, kind = list(operation.inputs), operation.type
    if kind in _ITERATORS:
        makers = operation.outputs[0].consumers()
        return [maker.inputs[0] for maker in makers if maker.type == "MakeIterator"]
    if kind in _UNDECIDED or kind in READERS_OF_NO_VALUE:
        return []
    if kind == "Print":
        return inputs[:1]
    if kind in SHAPES and inputs[0].shape.is_fully_defined():
        return []
    if kind == "Merge":  # of branches that show values and have the same result
        results = [origin_of(t, ("Identity", "Print", "Switch")) for t in inputs]
        origins = {origin.ref(): origin for origin in results}
        return (
            list(origins.values()) if len(origins) == 1 else deciding_inputs(operation)
        )
    if _SEEDED.match(kind):
        names = _names(operation)
        return [t for t, name in zip(inputs, names) if name not in _SEEDS]
    if kind.startswith("StackPop"):  # a loop of TensorFlow 1 keeps it for its gradient
        return _pushed(inputs[0])
    if WRITERS.match(kind) and inputs:  # "Assign...": the variable that is written
        return inputs[1:]
    return deciding_inputs(operation)


def _pushed(stack: tf.Tensor) -> list[tf.Tensor]:
    def takes_it(operation: tf.Operation) -> bool:
        return operation.type in PASSING or operation.type.startswith("StackPush")

    users = data_descendants([origin_of(stack, PASSING)], takes_it)
    return [t for op in users if op.type not in PASSING for t in op.inputs[1:]]


def _names(operation: tf.Operation) -> list[str]:
    return [argument.name for argument in operation.op_def.input_arg]


def deciding_inside(graph: tf.Graph) -> Callable[[tf.Operation], list[tf.Tensor]]:
    """Returns `deciding` that looks into the functions that a graph's operations call."""
    return _Bodies(graph).deciding


class _Bodies:
    """Functions that operations call, with the arguments that decide a result.

    Args:
        graph: The graph of the operations.
    """

    def __init__(self, graph: tf.Graph):
        self._library = functools.cache(lambda: library_of_functions(graph))
        self._decides = {}

    def deciding(self, operation: tf.Operation) -> list[tf.Tensor]:
        """Returns the inputs whose values decide those of the outputs, or of a write."""
        names = functions_of(operation)
        # A data set's function takes elements, which are no inputs of the operation.
        if not names or "Dataset" in operation.type:
            return deciding(operation)
        first = 1 if operation.type in BRANCHES else 0
        decide = self._deciding_arguments(names)
        inputs = list(operation.inputs)
        return [
            *(inputs[:first] if self._differs(names) else ()),
            *(tensor for i, tensor in enumerate(inputs[first:]) if decide(i)),
        ]

    def _deciding_arguments(self, names: list[str]) -> Callable[[int], bool]:
        functions = [self._library().get(name) for name in names]

        def decide(i: int) -> bool:
            return any(f is None or self._is_used(f, i) for f in functions)

        return decide

    def _differs(self, names: list[str]) -> bool:
        """Returns whether branches differ by more than the values that they show."""
        results = set()
        for name in names:
            function = self._library().get(name)
            if function is None or any(map(_writes, function.node_def)):
                return True
            results.add(tuple(_origins(function)))
        return len(results) > 1 or None in next(iter(results))

    def _is_used(self, function, i: int) -> bool:
        """Returns whether argument `i` decides a result of a function, or a write."""
        name, arguments = function.signature.name, function.signature.input_arg
        if i >= len(arguments):
            return True
        if (name, i) not in self._decides:
            self._decides[name, i] = self._follow(function, arguments[i])
        return self._decides[name, i]

    def _follow(self, function, argument) -> bool:
        is_handle = argument.type == tf.resource.as_datatype_enum
        handles = {argument.name} if is_handle else set()
        values, size = set() if is_handle else {argument.name}, -1
        while size != len(handles) + len(values):
            size = len(handles) + len(values)
            for node in function.node_def:
                if self._step(node, handles, values):
                    return True
        return any(producer_of(result) in values for result in function.ret.values())

    def _step(self, node, handles: set[str], values: set[str]) -> bool:
        """Adds a node to the names that depend; returns whether it writes such a value."""
        inputs = [producer_of(name) for name in node.input if not name.startswith("^")]
        reads = [i for i, name in enumerate(inputs) if name in handles]
        depends = [i for i, name in enumerate(inputs) if name in values]
        if not reads and not depends:
            return False
        names = functions_of(node)
        if names:
            first = 1 if node.op in BRANCHES else 0
            decide = self._deciding_arguments(names)
            is_chosen = first and 0 in depends and self._differs(names)
            depends = is_chosen or any(decide(i - first) for i in (*reads, *depends))
            if depends and any(_writes(inner) for inner in self._nodes(names)):
                return True
        elif reads and node.op in PASSING:
            handles.add(node.name)
        elif reads:
            depends = depends or not (node.op in READERS_OF_NO_VALUE or _writes(node))
        elif node.op in _UNDECIDED | SHAPES or (
            node.op == "Print" and 0 not in depends
        ):
            depends = False
        if depends and _writes(node):
            return True
        if depends:
            values.add(node.name)
        return False

    def _nodes(self, names: list[str]) -> list:
        functions = [self._library().get(name) for name in names]
        return [node for f in functions if f is not None for node in f.node_def]


def _writes(node) -> bool:
    return WRITERS.search(node.op) is not None


def _origins(function) -> Iterable[str | None]:
    """Yields the argument or constant that each result is; None if it is computed."""
    nodes = {node.name: node for node in function.node_def}
    places = {a.name: str(i) for i, a in enumerate(function.signature.input_arg)}
    for output in function.signature.output_arg:
        name = producer_of(function.ret[output.name])
        while name in nodes and nodes[name].op in ("Identity", "Print"):
            name = producer_of(nodes[name].input[0])
        is_constant = name in nodes and nodes[name].op == "Const"
        yield str(nodes[name].attr["value"]) if is_constant else places.get(name)


def _reader(
    clocks: set[tf.Operation], needed: dict, ends: set[tf.Operation]
) -> tuple[str | None, str]:
    """Returns the operation that computes from a variable first, and its line.

    Args:
        clocks: The variables.
        needed: The result of `_ancestors`, with one of them.
        ends: Operations that are not named, nor are those that need them.

    Returns:
        (None, "") if there is none but these.
    """
    of_caller = itertools.takewhile(lambda op: op not in ends, _way(clocks, needed))
    way = [op for op in of_caller if op.type not in _TRIVIAL]
    if not way:
        return None, ""
    first = original_of(way[0]) or way[0]  # the one that it is a gradient of
    scope = first.name.rpartition("/")[0]
    names = [op.name for op in way]
    # A function of several operations has the name of their scope.
    return scope if scope in names else first.name, _line_of(first)


def _line_of(operation: tf.Operation) -> str:
    """Returns the line of the caller's code that made an operation, if it is known."""
    libraries = [
        os.path.dirname(os.path.dirname(tf.__file__)),
        os.path.dirname(os.path.dirname(__file__)),
    ]
    for frame in reversed(operation.traceback or ()):
        if not any(frame.filename.startswith(library) for library in libraries):
            return f" ({os.path.basename(frame.filename)}, line {frame.lineno})"
    return ""
