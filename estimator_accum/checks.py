"""What `make_accumulating_train_op` refuses: a function a rule, a sentence an error."""

import inspect
import math

import tensorflow as tf


def check_optimizer(optimizer) -> None:
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            "`optimizer` must be a tf.compat.v1.train.Optimizer. Received: "
            f"{optimizer!r}. Keras optimizers have no place in a v1 train op."
        )


def check_clip_norm(clip_norm) -> None:
    if clip_norm is None:
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float):
        raise TypeError(
            "`clip_norm` must be a number > 0 or None. "
            f"Received: {clip_norm!r}. Use None to turn clipping off."
        )
    if not 0 < clip_norm < math.inf:
        raise ValueError(
            "`clip_norm` must be a finite number > 0 or None. "
            f"Received: {clip_norm}. Use None to turn clipping off."
        )


def check_scalar(argument: str, value) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    if value.shape.rank != 0:
        raise ValueError(
            f"`{argument}` must be a scalar. Received: shape {value.shape} from "
            f"{value.name}. Reduce it, e.g. with tf.reduce_mean."
        )
    return value


def check_replica_context(optimizer):
    replica = tf.distribute.get_replica_context()
    if replica is None:
        raise ValueError(
            "make_accumulating_train_op must be called in replica context. Received: "
            "cross-replica context. Call it inside a model_fn or inside strategy.run."
        )
    if tf.distribute.has_strategy():
        parameters = inspect.signature(optimizer.apply_gradients).parameters
        if "skip_gradients_aggregation" not in parameters:
            raise ValueError(
                "Under a tf.distribute strategy `optimizer.apply_gradients` must take "
                "`skip_gradients_aggregation`, so that gradients are reduced once. "
                f"Received: {type(optimizer).__name__}, which overrides it without. "
                "Implement _resource_apply_dense and _resource_apply_sparse instead."
            )
    return replica


def check_resource_variables(variables) -> None:
    if not tf.compat.v1.control_flow_v2_enabled():
        return
    for variable in variables:
        if not hasattr(variable, "handle"):
            raise ValueError(
                "Trained variables must be resource variables. Received: reference "
                f"variable {variable.name}. Make it with use_resource=True, or call "
                "tf.compat.v1.disable_v2_behavior() first."
            )
