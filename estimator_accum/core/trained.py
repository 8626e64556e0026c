"""Checks of the variables that a train op trains."""

import tensorflow as tf

from estimator_accum.core.current_batch import current_batch
from estimator_accum.core.gradients import Gradient


def check_own_copies(variables: list[tf.Variable]) -> None:
    """Raises ValueError if several replicas would update the same variable."""
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    replicas = len(strategy.extended.worker_devices)
    for variable in variables:
        copies = len(strategy.experimental_local_results(variable))
        if copies != replicas:
            raise ValueError(
                "Every replica must have a copy of its own of each trained variable. "
                f"Received: {variable.name} with {copies} for {replicas} replicas of a "
                f"{type(strategy).__name__}. Create it in the strategy's scope, and use "
                "a MirroredStrategy or one replica."
            )


def check_own_job(variables: list[tf.Variable]) -> None:
    """Raises ValueError if parameter servers hold the variables of a whole batch."""
    is_batch = current_batch() is not None
    with tf.control_dependencies(None):
        here = tf.DeviceSpec.from_string(tf.no_op("where_gradients_are").device)
    for variable in variables:
        there = tf.DeviceSpec.from_string(variable.device)
        if is_batch and there.job and here.job and there.job != here.job:
            raise ValueError(
                "Inside `microbatch_model_fn` trained variables must be of the task that "
                "trains: workers would add to the same accumulators. Received: "
                f"{variable.name} on /job:{there.job}, gradients on /job:{here.job}. "
                "Accumulate over runs of the train op instead, or train without "
                "parameter servers."
            )


def checked_var_list(var_list) -> list[tf.Variable]:
    """Returns the variables in any structure; raises TypeError for anything else."""
    variables = tf.nest.flatten(var_list)
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise TypeError(
                "`var_list` must hold variables. Received: "
                f"{variable!r}. Pass those to train, or None for all trainable ones."
            )
    return variables


def check_trained(
    pairs, loss: tf.Tensor | None
) -> tuple[list[Gradient], list[tf.Variable]]:
    """Returns (gradients, their variables), without variables that have no gradient.

    Raises:
        ValueError: If no variable has a gradient, or one cannot be updated in a
            `tf.cond`, is shared by replicas or workers, or has no static shape.
    """
    pairs = [
        (gradient, variable) for gradient, variable in pairs if gradient is not None
    ]
    if not pairs:
        raise ValueError(no_gradient_message(loss))
    gradients, variables = map(list, zip(*pairs, strict=True))
    _check_resource_variables(variables)
    check_own_copies(variables)
    check_own_job(variables)
    for variable in variables:
        if not variable.shape.is_fully_defined():
            raise ValueError(
                "Trained variables must have a static shape. Received: "
                f"{variable.name} of shape {variable.shape}. Make it with its shape."
            )
    return gradients, variables


def no_gradient_message(loss: tf.Tensor | None) -> str:
    """Returns the error message for a loss without trained variables."""
    return (
        "`loss` must depend on a trained variable. Received: "
        f"{'gradients' if loss is None else loss.name}, of which no variable has a "
        "gradient. Check `var_list` and that nothing between the variables and the "
        "loss stops gradients."
    )


def _check_resource_variables(variables: list[tf.Variable]) -> None:
    if not tf.compat.v1.control_flow_v2_enabled():
        return
    for variable in variables:
        if not hasattr(variable, "handle"):
            raise ValueError(
                "Trained variables must be resource variables. Received: reference "
                f"variable {variable.name}. Make it with use_resource=True, or call "
                "tf.compat.v1.disable_v2_behavior() first."
            )
