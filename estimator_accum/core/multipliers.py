"""Variables by which gradients of other origin were multiplied."""

import tensorflow as tf

from estimator_accum.core.gradients import Gradient, values_of
from estimator_accum.core.linear import parts_of, products_of
from estimator_accum.graph.internals import original_of
from estimator_accum.graph.names import VARIABLES
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.graph.writers import micro_step_writers

REMEDY = (
    "Pass `clip_norm` if it clips, or leave the optimizer as it is, without "
    "AccumulatingOptimizer, and split whole batches by microbatch_model_fn."
)


class Multipliers:
    """Variables by which gradients of other origin were multiplied.

    A factor that the gradient is computed from too, such as a loss scale, does not count.

    Args:
        gradients: Gradients that `apply_gradients` gets.
    """

    def __init__(self, gradients: list[Gradient]):
        self._graph = values_of(gradients[0]).graph
        self._variables = {}
        for part in (part for gradient in gradients for part in parts_of(gradient)):
            terms = products_of(part, lambda tensor: original_of(tensor.op) is not None)
            computed, factors = terms or ([], [])
            needed = data_ancestors([factor.op for factor in factors])
            variables = [op for op in needed if op.type in VARIABLES]
            if variables:  # only then: it walks through the whole model
                ancestry = data_ancestors([tensor.op for tensor in computed])
                others = [op for op in variables if op not in ancestry]
                self._variables |= dict.fromkeys(others)

    def check_variables(self, windows: list) -> None:
        """Refuses a variable that may be written with every micro-batch."""
        if not self._variables:
            return
        writers = micro_step_writers(self._graph, windows)
        for variable in self._variables:
            for writer in writers.of(variable):
                refuse_writer(variable, writer, windows, ())


def refuse_writer(
    variable: tf.Operation, writer: tf.Operation, windows: list, needs_batch
) -> None:
    """Refuses a variable that decides a change, for its writer."""
    raise ValueError(
        "Gradients must not be changed by a variable that is written with every "
        f"micro-batch. Received: {variable.name}, written by {writer.name}. "
        f"{_remedy_for(variable, windows, needs_batch)}"
    )


def _remedy_for(variable: tf.Operation, windows: list, needs_batch) -> str:
    steps = [window.global_step for window in windows if window.global_step is not None]
    if any(variable.name == step.op.name for step in steps):
        return "Read get_or_create_update_step() in its place."
    if needs_batch:
        return REMEDY
    return "Pass the write as `after_update_ops`, to write it once per update."
