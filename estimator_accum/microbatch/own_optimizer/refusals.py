"""Gradients with respect to variables that cannot be summed over micro-batches."""

from collections.abc import Collection

import tensorflow as tf

from estimator_accum.core.gradients import Gradient
from estimator_accum.graph.functions import operations_with_own_gradients
from estimator_accum.graph.internals import (
    context_of,
    counts_vectorized,
    gradient_scope_of,
    is_in_while_loop,
)
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.head import View
from estimator_accum.rows.analysis import Analysis


def check_outside(graph: tf.Graph, ys: list[tf.Tensor]) -> None:
    """Raises ValueError if a loss is made outside of the model_fn's own graph."""
    for y in ys:
        if y.graph is not graph or context_of(y.op):
            raise ValueError(
                "A loss that is made inside of tf.cond, tf.while_loop or a function "
                "must not have its gradients with respect to variables computed "
                f"there: they are summed over micro-batches. Received: {y.name}. "
                "Make the loss outside, or train without micro-batches."
            )


def check_first_order(ys: list[tf.Tensor], reads: dict[tf.Operation, str]) -> None:
    """Raises ValueError if a loss is computed from sums, as in `Sums.reads`."""
    needed = data_ancestors([y.op for y in ys])
    read = next(filter(needed.__contains__, reads), None)
    if read is not None:
        raise ValueError(
            "Gradients must not be computed of a value that needs gradients with "
            "respect to variables: a micro-batch has only its part of them. "
            f"Received: {ys[0].name}, which needs the gradient of "
            f"{reads[read]}. Train without micro-batches."
        )


def check_not_repeated(ys: list[tf.Tensor]) -> None:
    """Raises ValueError if gradients are those of one number after another."""
    for operation in data_ancestors([y.op for y in ys]):
        if counts_vectorized(operation):
            raise ValueError(
                "Gradients with respect to variables must be those of a loss, not "
                "of one number after another, as in `GradientTape.jacobian` and "
                f"`tf.vectorized_map`. Received: {ys[0].name}, which needs "
                f"{operation.name}. Train without micro-batches."
            )


def check_shapes(batch: WholeBatch) -> None:
    """Raises ValueError if a part of the batch has a static number of examples."""
    for part in batch.parts:
        shape = part.sliced.shape
        if part.has_rows and shape.rank and shape.as_list()[0] is not None:
            raise ValueError(
                "A batch that is cut must have no static number of examples. "
                f"Received: {part.sliced.name} of shape {shape}. Call "
                "`Tensor.set_shape` with None as the number of examples."
            )


def results_with_own_gradients(view: View, rows: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the results with rows of operations whose gradient a user wrote."""
    return [
        output
        for operation in _customized(rows)
        if context_of(operation) is None
        for output in operation.outputs
        if view.state(output).kind == "rows" and output.dtype.is_floating
    ]


def check_own_gradients(
    view: View, pairs: list[tuple[tf.Tensor, Gradient | None]], gradients: list
) -> None:
    """Raises ValueError if a tf.custom_gradient combines the examples.

    The gradient of rows is sums of rows, unless somebody wrote another one. So each
    gradient that somebody wrote is looked at by itself, from rows that are proved on.

    Args:
        view: The graph of the forward pass.
        pairs: (Tensor of the forward pass, its gradient) where both have the same rows.
        gradients: As in `Derivation`.
    """
    customized = _customized([tensor for tensor, _ in pairs])
    parts = tf.nest.flatten(gradients, expand_composites=True)
    parts = [part for part in parts if part is not None]
    if not customized or not parts:
        return
    scopes = [gradient_scope_of(operation) for operation in customized]
    states = {
        gradient.ref(): view.state(tensor)
        for tensor, gradient in pairs
        if isinstance(gradient, tf.Tensor)
        # A gradient that somebody wrote is to be proved, not given.
        and not any(scope in f"/{gradient.op.name}" for scope in scopes)
    }
    analysis = View(view.batch, parts, states).analysis
    for operation in customized:
        if is_in_while_loop(operation):
            raise ValueError(
                "A tf.custom_gradient in a loop of TensorFlow 1 hides whether it combines "
                f"examples. Received: {operation.name}. Write the layer without one, "
                "enable control flow v2, or train without micro-batches."
            )
    refuse_combining(analysis, scopes, "Train without micro-batches.")


def _customized(rows: list[tf.Tensor]) -> list[tf.Operation]:
    return operations_with_own_gradients(data_ancestors([tensor.op for tensor in rows]))


def refuse_combining(analysis: Analysis, scopes: Collection[str], remedy: str) -> None:
    """Raises ValueError if a gradient in one of the scopes combines examples."""
    for operation, inner in analysis.combining:
        if any(scope in f"/{operation.name}" for scope in scopes):
            raise ValueError(
                "A tf.custom_gradient must be computed for each example by itself. "
                f"Received: {operation.name} of type {inner.type}, which combines "
                f"examples. {remedy}"
            )
