"""The weights that a window reads from parameter servers, pulled once.

    first micro-step of a window:   copy = weights, over the network
    every micro-step:               gradients read the copy

Within a window the gradients then are those of one set of weights, whatever other
workers write meanwhile. Rows of embeddings are not copied: each micro-step looks up its
own.
"""

import tensorflow as tf

from estimator_accum.core.gradients import values_of
from estimator_accum.core.micro_batch import MicroBatch
from estimator_accum.core.plan import Plan
from estimator_accum.graph.branches import run_either
from estimator_accum.graph.internals import set_input
from estimator_accum.graph.variables import create_variable, read
from estimator_accum.graph.walks import ancestors


def pull_once(plan: Plan, micro_batch: MicroBatch) -> None:
    """Lets gradients and loss read this worker's copies of the trained weights.

    Creates:
        `<variable>/copy`, local, for each trained variable that they read as a whole.
    """
    place = plan.state.place
    terms = [values_of(g) for g in micro_batch.gradients]
    terms += micro_batch.sums.values()
    needed = ancestors([term.op for term in terms])
    uses = {}
    for variable in micro_batch.variables:
        places = [
            (user, number)
            for value in _values(variable)
            for user in value.consumers()
            if user in needed
            for number, tensor in enumerate(user.inputs)
            if tensor is value
        ]
        if places:
            uses[variable.op.name] = variable, places
    copies = {
        name: create_variable(
            f"{name}/copy", variable.shape, variable.dtype.base_dtype, **place.options
        )
        for name, (variable, _) in uses.items()
    }

    def pull() -> list[tf.Operation]:
        return [
            tf.raw_ops.AssignVariableOp(
                resource=copies[name].handle, value=variable.read_value()
            )
            for name, (variable, _) in uses.items()
        ]

    with tf.control_dependencies(None), tf.device(place.worker):
        is_first = plan.clock.opens_window(plan.state.micro_steps)
        with tf.control_dependencies([run_either(is_first, pull, list)]):
            values = {name: read(copy) for name, copy in copies.items()}
    for name, (_, places) in uses.items():
        for user, number in places:
            set_input(user, number, values[name])


def _values(variable: tf.Variable) -> list[tf.Tensor]:
    """Returns the tensors that hold the variable's whole value."""
    kind, source = "Identity", variable.op.outputs[0]  # of a reference variable
    if hasattr(variable, "handle"):
        kind, source = "ReadVariableOp", variable.handle
    return [user.outputs[0] for user in source.consumers() if user.type == kind]
