"""The traced forward pass of a micro-batch, proved to compute each row alone."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

import estimator_accum.keras._internals as internals
from estimator_accum.graph.functions import (
    all_nodes,
    functions_of,
    library_of_functions,
    nodes_of,
    numbers_of,
    operations_with_own_gradients,
)
from estimator_accum.graph.internals import captures_of, is_composite
from estimator_accum.graph.names import (
    CALLERS,
    LOOPS,
    SHOWING,
    WRITERS,
    draws_from_seed,
)
from estimator_accum.graph.writers import written_handles
from estimator_accum.microbatch.repeatable import is_repeatable
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.own_gradients import (
    changed_by_own_gradients,
    check_own_gradients,
    results_with_own_gradients,
)
from estimator_accum.rows.own_sums import DERIVATIVES
from estimator_accum.rows.states import State

PASS = "forward"  # name of the graph of a pass
_ROWS = State("rows", 0)
# In a graph, Keras's crossentropies take the inputs of these operations for logits.
_ACTIVATIONS = {"Softmax": tf.nn.softmax, "Sigmoid": tf.nn.sigmoid}


class Forward(NamedTuple):
    """A model's forward pass.

    Attributes:
        function: Function of a micro-batch's inputs, flat, and of a seed (int32 [2]);
            returns the outputs, flat, and then their companions.
        structure: The outputs' structure.
        companions: For each companion the number of its output and its name: an attribute
            that Keras sets, or the type of operation that makes the output from it.
        seeds: Variables from which random numbers come, and which a pass moves.
        draws: Whether random numbers come from the function's seed.
        has_own_gradients: Whether somebody wrote the gradient of an operation.
        inline: `function` before it was traced, for graphs that need its operations.
        looks_up: Whether gradients may be slices.
        jit_compile: Whether XLA compiles the pass, True or None.
    """

    function: Callable[..., list[tf.Tensor]]
    structure: Any
    companions: list[tuple[int, str]]
    seeds: list[tf.Variable]
    draws: bool
    has_own_gradients: bool
    inline: Callable[..., list[tf.Tensor]] | None = None
    looks_up: bool = False
    jit_compile: bool | None = None

    def handles_of_seeds(self, graph: tf.Graph) -> list[tf.Tensor]:
        """Returns a graph's handles of `seeds`."""
        return [handle for handle, _ in _captures(graph, self.seeds)]

    def dressed(self, flat: list[tf.Tensor]) -> Any:
        """Returns outputs as the model returns them, with all that losses look for.

        Args:
            flat: Outputs and companions, as from `function`.
        """
        number = len(tf.nest.flatten(self.structure))
        outputs = list(flat[:number])
        for (i, name), companion in zip(self.companions, flat[number:], strict=True):
            if name in _ACTIVATIONS:
                outputs[i] = _ACTIVATIONS[name](companion)
            else:
                setattr(outputs[i], name, companion)
        return tf.nest.pack_sequence_as(self.structure, outputs)


def trace_forward(keras_model, model, call: Callable, inputs, should_compile: bool):
    """Traces `call(inputs)` for any number of examples, and proves its rows.

    Args:
        keras_model: The family's functions, such as `Model3`.
        model: The model.
        call: Function of the inputs.
        inputs: The batch's inputs.
        should_compile: Whether XLA compiles the pass.

    Returns:
        A `Forward`.

    Raises:
        TypeError: If an input or output is not a tensor with a row for each example.
        ValueError: If a row depends on other examples, or the pass writes a variable or
            adds a loss.
    """
    structure, companions = [], []
    is_eager = tf.executing_eagerly()

    def forward(*flat):
        *values, seed = flat
        with keras_model.drawing_from(model, seed):
            outputs = call(tf.nest.pack_sequence_as(inputs, values))
        structure[:] = [outputs]
        flat = tf.nest.flatten(outputs)
        _check_tensors("outputs", flat)
        pairs = [
            (i, *pair) for i, o in enumerate(flat) for pair in _beside(o, is_eager)
        ]
        companions[:] = [(i, name) for i, name, _ in pairs]
        return [*map(tf.identity, flat), *(companion for *_, companion in pairs)]

    flat = tf.nest.flatten(inputs)
    _check_tensors("inputs", flat)
    specs = [tf.TensorSpec([None, *value.shape[1:]], value.dtype) for value in flat]
    specs.append(tf.TensorSpec([2], tf.int32))
    jit_compile = True if should_compile else None
    forward.__name__ = PASS
    function = tf.function(forward, jit_compile=jit_compile).get_concrete_function(
        *specs
    )
    if any(map(internals.has_added_losses, internals.layers_of(model))):
        raise ValueError(
            "The loss of a cut batch must be a function of the model's outputs. Received: "
            "a layer's loss, from add_loss() or an activity_regularizer. Compute it in "
            "the loss that compile() gets."
        )
    _check_draws(function.graph, keras_model.has_seed_variables)
    moved = _moved_seeds(function.graph, keras_model.seeds_of(model))
    seed = function.graph.inputs[len(flat)]
    _check_rows(function.graph, len(flat), [seed, *(handle for handle, _ in moved)])
    seeds = [variable for _, variable in moved]
    variables = keras_model.trained_variables(model)
    with function.graph.as_default():
        operations = function.graph.get_operations()
        has_own_gradients = bool(operations_with_own_gradients(operations))
        kinds = {node.op for node in all_nodes(operations)}
    if has_own_gradients:
        _check_own_gradients(forward, function, specs, variables, seeds)
    return Forward(
        function,
        structure[0],
        companions,
        seeds,
        draws=bool(seed.consumers()),
        has_own_gradients=has_own_gradients,
        inline=forward,
        looks_up=has_own_gradients or any("Gather" in kind for kind in kinds),
        jit_compile=jit_compile,
    )


def constants_of(graph: tf.Graph) -> set[float]:
    """Returns the numbers among a graph's constants, those of shapes aside.

    They are the same for a batch of a static and of an unknown size, unless Python has
    read the size as a number.
    """
    with graph.as_default():
        return numbers_of(graph.get_operations())


def _beside(output: tf.Tensor, is_eager: bool) -> Iterator[tuple[str, tf.Tensor]]:
    """Yields name and companion of all that a loss looks for beside an output."""
    has_logits = hasattr(output, internals.LOGITS)
    kind = getattr(getattr(output, "op", None), "type", None)  # None of a constant
    if kind in _ACTIVATIONS and not has_logits and not is_eager:
        yield kind, output.op.inputs[0]  # first, since it makes the output
    for name in (internals.MASK, internals.LOGITS):
        companion = getattr(output, name, None)
        if companion is not None:
            yield name, companion


def _check_tensors(name: str, values: list) -> None:
    for value in values:
        is_tensor = tf.is_tensor(value) and not is_composite(value)
        if not is_tensor or not value.shape.rank:
            raise TypeError(
                f"The {name} of a cut model must be dense tensors with a row for each "
                f"example. Received: {value!r}. Change it, or train with accumulate()."
            )


def _captures(
    graph: tf.Graph, variables: list[tf.Variable]
) -> list[tuple[tf.Tensor, tf.Variable]]:
    """Returns (its handle in the graph, variable) of variables that a graph reads."""
    by_handle = {id(variable.handle): variable for variable in variables}
    return [
        (inner, by_handle[id(handle)])
        for handle, inner in captures_of(graph)
        if id(handle) in by_handle
    ]


def _moved_seeds(graph: tf.Graph, seeds: list[tf.Variable]) -> list[tuple]:
    """Returns (handle, seed) of those that a pass moves.

    Raises:
        ValueError: If it writes other variables.
    """
    captures = {inner.ref(): (inner, seed) for inner, seed in _captures(graph, seeds)}
    moved = {}
    for operation, tensor in written_handles(graph):
        if tensor.ref() not in captures:
            raise ValueError(
                "A cut model must write no variable while it trains: each micro-"
                f"batch would. Received: {operation.name}, which writes "
                f"{tensor.name}. Set trainable = False for batch normalization, use "
                "a normalization of each example, or train with accumulate()."
            )
        moved[tensor.ref()] = captures[tensor.ref()]
    return list(moved.values())


def _check_rows(graph: tf.Graph, number: int, new_seeds: list[tf.Tensor]) -> None:
    """Raises ValueError unless each row of the outputs comes from its own example.

    Args:
        graph: Graph of a function.
        number: Number of its inputs with a row for each example, the first ones.
        new_seeds: Tensors of the graph with which random numbers begin.
    """
    analysis, wrong = _analyze(graph, number, new_seeds)
    if not wrong and not analysis.guards:
        return
    if analysis.origins:
        operation, reason = analysis.origins[0]
    else:
        operation, reason = [*wrong, *graph.outputs][0].op, "it has other rows"
    raise ValueError(_sentence(operation, reason))


def are_rows(graph: tf.Graph, number: int) -> bool:
    """Returns whether each row of the outputs comes from its own example.

    Args:
        graph: Graph of a function.
        number: Number of its inputs with a row for each example, the first ones.
    """
    analysis, wrong = _analyze(graph, number, ())
    return not wrong and not analysis.guards


def _analyze(graph: tf.Graph, number: int, new_seeds) -> tuple[Analysis, list]:
    """Returns the analysis, and the outputs without a row of each example."""
    with graph.as_default():
        analysis = Analysis(graph.inputs[:number], new_seeds=new_seeds)
        analysis.analyze(graph.outputs)
    return analysis, [o for o in graph.outputs if analysis.state(o) != _ROWS]


def _check_draws(graph: tf.Graph, has_seed_variables: bool) -> None:
    """Raises ValueError if the second pass would draw other random numbers."""
    with graph.as_default():
        library = library_of_functions()
    for operation in graph.get_operations():
        inner = nodes_of(functions_of(operation), library)
        for node in (operation.node_def, *inner):
            if _is_new_in_each_pass(node, library):
                raise ValueError(
                    "A cut model may run twice, so a layer must give the same both times. "
                    f"Received: {operation.name}, which runs {node.op}. Draw random "
                    "numbers by a layer such as Dropout or GaussianNoise, in Keras 3 "
                    "also by keras.random with a SeedGenerator."
                )
            nodes = nodes_of(functions_of(node) if node.op in LOOPS else [], library)
            draws = any(draws_from_seed(other.op) for other in nodes)
            if draws and not has_seed_variables:
                raise ValueError(
                    "A cut model of Keras 2 must draw no random numbers in a loop, "
                    "whose steps would all draw the same. Received: "
                    f"{operation.name}. Draw before the loop, or use Keras 3."
                )


def _is_new_in_each_pass(node, library: dict) -> bool:
    if node.op in CALLERS | SHOWING or WRITERS.search(node.op):
        return False  # of writes, only those of seeds are left: see _moved_seeds
    return not is_repeatable(node, library)


def _check_own_gradients(
    forward: Callable, traced, specs: list, variables: list, seeds: list
) -> None:
    """Raises ValueError if a tf.custom_gradient combines the examples.

    Args:
        forward: Function of flat inputs and a seed that returns flat outputs.
        traced: The same, traced.
        specs: Specifications of its arguments.
        variables: The trained variables.
        seeds: Variables that the pass moves.
    """
    arriving = [
        tf.TensorSpec(output.shape, output.dtype)
        for output in traced.outputs
        if output.dtype.is_floating
    ]
    if not (variables and arriving):
        return
    arguments = []

    @tf.autograph.experimental.do_not_convert
    def derive(flat, outputs, arriving):
        outputs = [output for output in outputs if output.dtype.is_floating]
        graph = outputs[0].graph
        new_seeds = [handle for handle, _ in _captures(graph, seeds)]
        analysis = Analysis(flat[:-1], new_seeds=[flat[-1], *new_seeds])
        analysis.analyze(outputs)
        sources = [handle for handle, _ in _captures(graph, variables)]
        results = results_with_own_gradients(analysis, outputs, sources)
        changed = changed_by_own_gradients(outputs, sources)
        gradients = tf.gradients(
            outputs,
            [*variables, *results, *changed],
            grad_ys=arriving,
            name=DERIVATIVES,
        )
        number, end = len(variables), len(variables) + len(results)
        pairs = zip(
            [*outputs, *results], [*arriving, *gradients[number:end]], strict=True
        )
        returned = [*zip(changed, gradients[end:], strict=True)]
        remedy = "train with accumulate()"
        arguments[:] = analysis, [*pairs], gradients[:number], remedy, returned

    def backward(flat, arriving):
        derive(flat, forward(*flat), arriving)

    graph = tf.function(backward).get_concrete_function(specs, arriving).graph
    with graph.as_default():
        check_own_gradients(*arguments)


def _sentence(operation: tf.Operation, reason: str) -> str:
    return (
        "Each row of a cut model's outputs must be computed from its own example. "
        f"Received: {operation.name} of type {operation.type}: {reason}. Move it into "
        "the loss, set trainable = False for batch normalization, or train with "
        "accumulate()."
    )
