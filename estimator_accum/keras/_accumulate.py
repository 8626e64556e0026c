"""`accumulate`: one call from a Keras optimizer to one that accumulates.

    keras 3                        `Keras3`
    tf.keras 2.15 and tf_keras     `Keras2`, and `Keras2Legacy` for
                                   `optimizers.legacy`, which tf.estimator uses

An adapter is the family's part of `_optimizer.Accumulating`; the other part, with the
rule, is the same for all families.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import wrapt

import estimator_accum.keras._internals as internals
from estimator_accum.core.options import (
    AccumulationSteps,
    check_accumulation_steps,
    check_on_nonfinite,
)
from estimator_accum.keras._keras_2 import Keras2, Keras2Legacy
from estimator_accum.keras._keras_3 import Keras3
from estimator_accum.keras._optimizer import Accumulating

_ADAPTERS = {
    internals.LEGACY: Keras2Legacy,
    internals.KERAS_2: Keras2,
    internals.KERAS_3: Keras3,
}
# Packages with a `minimize` that only calls compute_gradients() and apply_gradients().
_CALL_OTHERS = ("keras", "tf_keras", "tensorflow_addons")


def accumulate(
    optimizer: Any,
    gradient_accumulation_steps: AccumulationSteps = 4,
    *,
    weight: Callable[[], tf.Tensor] | None = None,
    on_nonfinite: str | None = None,
) -> Any:
    """Wraps a Keras optimizer so that K micro-batches make one update.

        update = optimizer( sum_i w_i * g_i / sum_i w_i )

    over all micro-batches i of the window and all replicas. With a loss that is a mean,
    Keras's default, an update gives the weights of training on one batch that joins the
    window's micro-batches; with `reduction="sum"` its gradient is 1 / K of that batch's.
    `iterations`, learning rate schedules, weight decay, EMA and clipping act once per
    update. A sparse gradient reaches the optimizer with the rows that the window
    touched, each once: there clipping differs from that of an unsplit batch, which has a
    slice for each lookup, and a warning says so. Under a `tf.distribute` strategy only the
    window's sums are reduced.

    Args:
        optimizer: A `keras.optimizers.Optimizer` (also of `tf.keras` 2.15, `tf_keras`,
            Keras 2's `optimizers.legacy`) or a LossScaleOptimizer of one, which is
            called once per window and keeps its scale throughout the window. If the
            global policy is "mixed_float16", `optimizer` is wrapped in a
            LossScaleOptimizer first, as `compile` does.
        gradient_accumulation_steps: K >= 1 [micro-steps per update], or a callable
            that maps `iterations`, the number of updates, to an int scalar Tensor. 1
            is the plain optimizer.
        weight: Callable without arguments that returns the micro-batch's weight, a
            scalar Tensor; None means 1. In a `train_step` of your own, pass
            `apply_gradients(pairs, weight=...)` instead.
        on_nonfinite: Policy for NaN and infinite gradients: "raise",
            "skip_micro_batch" or "skip_window", as in `make_accumulating_train_op`.
            None passes them to the optimizer, as Keras does; a LossScaleOptimizer then
            skips their window.

    Creates:
        An accumulator for each trained variable and a few scalars, when the optimizer's
        own variables are built. `model.save` and checkpoints hold all of them: training
        that stops in mid-window resumes exactly.

    Returns:
        An optimizer of the same Keras, for `model.compile`, `model_to_estimator`
        (`optimizers.legacy` only) and training loops of your own.

    Raises:
        TypeError: If `optimizer` or K has the wrong type, or `optimizer` already
            accumulates.
        ValueError: If K < 1, or `on_nonfinite` is not a policy that the optimizer
            allows.
    """
    family = _find_family(optimizer)
    _check_optimizer(optimizer, family)
    check_accumulation_steps(gradient_accumulation_steps)
    _check_weight(weight)
    root, adapter = family
    keras = importlib.import_module(root)
    _, loss_scaling = adapter._bases(keras)
    if keras.mixed_precision.global_policy().name == "mixed_float16" and not isinstance(
        optimizer, loss_scaling
    ):
        optimizer = loss_scaling(optimizer)
    is_loss_scaling = isinstance(optimizer, loss_scaling)
    if on_nonfinite is not None:
        check_on_nonfinite(on_nonfinite, is_loss_scaling)
    cls = _wrapper_class(root, adapter, is_loss_scaling)
    return cls(optimizer, gradient_accumulation_steps, weight, on_nonfinite)


def _find_family(optimizer) -> tuple[str, type] | None:
    """Returns ("keras" or "tf_keras", adapter), or None for other objects."""
    for cls in type(optimizer).__mro__:
        root = cls.__module__.split(".")[0]
        if root in ("keras", "tf_keras") and cls.__name__ in _ADAPTERS:
            return root, _ADAPTERS[cls.__name__]
    return None


@functools.cache
def _wrapper_class(root: str, adapter: type, is_loss_scaling: bool) -> type:
    """Makes the class for one kind of optimizer, and registers it for `load_model`."""
    keras = importlib.import_module(root)
    optimizer, loss_scaling = adapter._bases(keras)
    bases = (optimizer,)
    if is_loss_scaling:  # `compile` leaves its instances alone
        is_enough = issubclass(loss_scaling, optimizer)
        bases = (loss_scaling,) if is_enough else (optimizer, loss_scaling)
    kind = adapter._KIND + ("LossScale" if is_loss_scaling else "")
    contents = {"__module__": __name__, "__doc__": Accumulating.__doc__, "_ROOT": root}
    cls = type(
        f"Accumulating{kind}Optimizer", (adapter, Accumulating, *bases), contents
    )
    # A LossScaleOptimizer around it looks for the bare name in h5 files.
    keras.saving.get_custom_objects()[cls.__name__] = cls
    return keras.saving.register_keras_serializable("estimator_accum")(cls)


def is_supported(keras) -> bool:
    """Returns whether a Keras has the saving and the optimizers that adapters need."""
    major, minor = keras.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 15)


def check_keras(keras, argument: str) -> None:
    """Raises TypeError unless the Keras of an argument is supported, on TensorFlow."""
    if not is_supported(keras):
        raise TypeError(
            f"`{argument}` must be of Keras 2.15 or later. Received: one of Keras "
            f"{keras.__version__}. Install TensorFlow 2.15 or later, or train a "
            "tf.estimator by estimator_accum.make_accumulating_train_op."
        )
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise TypeError(
            f"`{argument}` must run on TensorFlow. Received: Keras 3 with the backend "
            f"{backend}. Set KERAS_BACKEND=tensorflow."
        )


def _register_classes(keras) -> None:
    """Registers all classes for `load_model` of this Keras."""
    if not is_supported(keras):
        return
    adapters = [Keras3] if hasattr(keras, "ops") else [Keras2, Keras2Legacy]
    for adapter in adapters:
        for is_loss_scaling in (False, True):
            _wrapper_class(keras.__name__, adapter, is_loss_scaling)


# Runs now if Keras is imported already, else when it is.
wrapt.register_post_import_hook(_register_classes, "keras")
wrapt.register_post_import_hook(_register_classes, "tf_keras")


def _check_optimizer(optimizer, family) -> None:
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            "`optimizer` must be a Keras optimizer. Received: "
            f"{type(optimizer).__name__} of tf.compat.v1.train. Use "
            "estimator_accum.AccumulatingOptimizer."
        )
    if family is None:
        raise TypeError(
            "`optimizer` must be a Keras optimizer. Received: "
            f"{optimizer!r}. Make one, such as keras.optimizers.Adam(1e-3)."
        )
    check_keras(importlib.import_module(family[0]), "optimizer")
    innermost = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(optimizer, Accumulating) or isinstance(innermost, Accumulating):
        raise TypeError(
            "`optimizer` must not accumulate already. Received: an optimizer of "
            "accumulate(). Call accumulate() once."
        )
    steps = getattr(innermost, "gradient_accumulation_steps", None)
    if steps is not None:
        raise TypeError(
            "`optimizer` must not accumulate already. Received: "
            f"{type(innermost).__name__} with gradient_accumulation_steps={steps}. "
            "Leave it out there."
        )
    for part in (optimizer, innermost):
        method = getattr(type(part), "minimize", None)  # Keras 3 has none
        if method is not None and method.__module__.split(".")[0] not in _CALL_OTHERS:
            raise TypeError(
                "`optimizer` must not override minimize(), which would not be called. "
                f"Received: {type(part).__name__}. Override apply_gradients()."
            )


def _check_weight(weight) -> None:
    if weight is not None and not callable(weight):
        raise TypeError(
            "`weight` must be a callable without arguments that returns a scalar. "
            f"Received: {weight!r}. Pass apply_gradients(..., weight=...) a Tensor."
        )
