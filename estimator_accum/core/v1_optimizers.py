"""Facts about optimizers of `tf.compat.v1.train`."""

import inspect

import tensorflow as tf

from estimator_accum.graph.internals import loss_scale_of, wrapped_by


def is_loss_scaling(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether `optimizer` scales the loss and unscales the gradients."""
    return isinstance(
        optimizer, tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    )


def changes_gradients(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether `compute_gradients` is not one of TensorFlow's, which only scale."""
    kinds = (
        tf.compat.v1.train.Optimizer,
        tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer,
    )
    usual = [kind.compute_gradients for kind in kinds]
    return any(
        getattr(one.compute_gradients, "__func__", None) not in usual
        for one in (optimizer, innermost(optimizer))
    )


def overrides_minimize(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether `minimize` is not TensorFlow's, which calls two other methods."""
    usual = tf.compat.v1.train.Optimizer.minimize
    return any(
        getattr(one.minimize, "__func__", None) is not usual
        for one in (optimizer, innermost(optimizer))
    )


def may_read_slices(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether an update may need each slice: TensorFlow's own only sum a row's."""
    kind = type(innermost(optimizer))
    names = (
        *("apply_gradients", "_apply_sparse_duplicate_indices"),
        "_resource_apply_sparse_duplicate_indices",
    )
    modules = [getattr(kind, name).__module__ for name in names]
    return not all(module.startswith("tensorflow.") for module in modules)


def always_reduces(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether `apply_gradients` sums over replicas, whatever it is told."""
    usual = inspect.signature(tf.compat.v1.train.Optimizer.apply_gradients).parameters
    return is_loss_scaling(optimizer) or "skip_gradients_aggregation" not in usual


def is_dynamic(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether `optimizer` handles gradients that are not finite by itself."""
    return is_loss_scaling(optimizer) and isinstance(
        loss_scale_of(optimizer), tf.compat.v1.mixed_precision.DynamicLossScale
    )


def takes(optimizer: tf.compat.v1.train.Optimizer, name: str) -> bool:
    """Returns whether `compute_gradients` names such an argument.

    One that hands on `**kwargs` may call another that does not take it.
    """
    return all(
        name in inspect.signature(one.compute_gradients).parameters
        for one in (optimizer, innermost(optimizer))
    )


def innermost(optimizer: tf.compat.v1.train.Optimizer) -> tf.compat.v1.train.Optimizer:
    """Returns the optimizer that has the slots."""
    return innermost(wrapped_by(optimizer)) if is_loss_scaling(optimizer) else optimizer
