"""Checks of the variables that a train op trains."""

import tensorflow as tf

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


def device_here() -> str:
    """Returns the device of the task that computes gradients here."""
    with tf.control_dependencies(None):
        return tf.no_op("where_gradients_are").device


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
) -> tuple[list[Gradient], list[tf.Variable], str]:
    """Returns (gradients, their variables, the device of this task).

    Variables without a gradient are left out.

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
    device = _device_of_task(variables, loss)
    for variable in variables:
        if not variable.shape.is_fully_defined():
            raise ValueError(
                "Trained variables must have a static shape. Received: "
                f"{variable.name} of shape {variable.shape}. Make it with its shape."
            )
    return gradients, variables, device


def _device_of_task(variables: list[tf.Variable], loss: tf.Tensor | None) -> str:
    """Returns the device here; if it names no task, the one of variables and loss."""
    here = device_here()
    spec = tf.DeviceSpec.from_string(here)
    if loss is None or None not in (spec.job, spec.task):
        return here
    specs = map(
        tf.DeviceSpec.from_string, [loss.device, *(v.device for v in variables)]
    )
    return loss.device if len({(s.job, s.task) for s in specs}) == 1 else here


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
