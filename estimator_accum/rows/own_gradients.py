"""Gradients that somebody wrote, which must be computed for each example by itself.

The gradient of rows is sums of rows, unless somebody wrote another one. So each gradient
that somebody wrote is looked at by itself, from rows that are proved on.
"""

import tensorflow as tf

from estimator_accum.graph.functions import operations_with_own_gradients
from estimator_accum.graph.internals import (
    context_of,
    gradient_scope_of,
    is_in_while_loop,
)
from estimator_accum.graph.walks import data_ancestors, data_descendants
from estimator_accum.rows.analysis import Analysis


def results_with_own_gradients(
    analysis: Analysis, rows: list[tf.Tensor], sources: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the results with rows of operations whose gradient a user wrote.

    Args:
        analysis: The states of the forward pass.
        rows: Tensors of the forward pass.
        sources: Tensors from which results must be computed.
    """
    trained = data_descendants(sources)
    return [
        output
        for operation in _customized(rows)
        if context_of(operation) is None and operation in trained
        for output in operation.outputs
        if analysis.state(output).kind == "rows" and output.dtype.is_floating
    ]


def check_own_gradients(
    analysis: Analysis,
    pairs: list[tuple[tf.Tensor, tf.Tensor | tf.IndexedSlices | None]],
    gradients: list,
    remedy: str,
) -> None:
    """Raises ValueError if a tf.custom_gradient combines the examples.

    Args:
        analysis: The states of the forward pass.
        pairs: (Tensor of the forward pass, its gradient) where both have the same rows;
            the results with own gradients are among them.
        gradients: Gradients of variables; some may be None.
        remedy: End of the error's last sentence.
    """
    customized = _customized([tensor for tensor, _ in pairs])
    flat = tf.nest.flatten(gradients, expand_composites=True)
    parts = [part for part in flat if part is not None]
    if not customized or not parts:
        return
    for operation in customized:
        if is_in_while_loop(operation):
            raise ValueError(
                "A tf.custom_gradient in a loop of TensorFlow 1 hides whether it combines "
                f"examples. Received: {operation.name}. Write the layer without one, "
                f"enable control flow v2, or {remedy}."
            )
    scopes = [gradient_scope_of(operation) for operation in customized]

    def is_own(operation: tf.Operation) -> bool:
        return any(scope in f"/{operation.name}" for scope in scopes)

    states = {
        gradient.ref(): analysis.state(tensor)
        for tensor, gradient in pairs
        if isinstance(gradient, tf.Tensor) and not is_own(gradient.op)
    }
    backward = analysis.with_states(states)
    backward.analyze(parts)
    for operation, inner in filter(lambda pair: is_own(pair[0]), backward.combining):
        raise ValueError(
            "A tf.custom_gradient must be computed for each example by itself. "
            f"Received: {operation.name} of type {inner.type}, which combines "
            f"examples. {remedy.capitalize()}."
        )


def _customized(rows: list[tf.Tensor]) -> list[tf.Operation]:
    return operations_with_own_gradients(data_ancestors([tensor.op for tensor in rows]))
