"""Gradient accumulation for training code of `tf.estimator` or `tf.compat.v1`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from estimator_accum.core.optimizer import AccumulatingOptimizer
    from estimator_accum.core.registry import get_windows
    from estimator_accum.core.train_op import make_accumulating_train_op
    from estimator_accum.core.update_step import get_or_create_update_step
    from estimator_accum.hooks import make_accumulation_hooks, watch_signals
    from estimator_accum.microbatch.collecting import batch_mean
    from estimator_accum.microbatch.model_fn import microbatch_model_fn
    from estimator_accum.microbatch.step import microbatch_step
    from estimator_accum.microbatch.whole_batch_loss import whole_batch_loss
    from estimator_accum.precision import mixed_precision_config
    from estimator_accum.programs.launchers import set_tf_config
    from estimator_accum.programs.watchdog import WatchdogHook
    from estimator_accum.recomputing.layer import recompute
    from estimator_accum.rows.declaration import per_example
    from estimator_accum.seed import micro_batch_seed

__version__ = "1.0.0"

__all__ = [
    "AccumulatingOptimizer",
    "WatchdogHook",
    "batch_mean",
    "get_or_create_update_step",
    "get_windows",
    "make_accumulating_train_op",
    "make_accumulation_hooks",
    "micro_batch_seed",
    "microbatch_model_fn",
    "microbatch_step",
    "mixed_precision_config",
    "per_example",
    "recompute",
    "set_tf_config",
    "watch_signals",
    "whole_batch_loss",
]

_MODULES = {
    "AccumulatingOptimizer": "core.optimizer",
    "WatchdogHook": "programs.watchdog",
    "batch_mean": "microbatch.collecting",
    "get_or_create_update_step": "core.update_step",
    "get_windows": "core.registry",
    "make_accumulating_train_op": "core.train_op",
    "make_accumulation_hooks": "hooks",
    "micro_batch_seed": "seed",
    "microbatch_model_fn": "microbatch.model_fn",
    "microbatch_step": "microbatch.step",
    "mixed_precision_config": "precision",
    "per_example": "rows.declaration",
    "recompute": "recomputing.layer",
    "set_tf_config": "programs.launchers",
    "watch_signals": "hooks",
    "whole_batch_loss": "microbatch.whole_batch_loss",
}


def __getattr__(name: str):
    # Imports at first use: the planner and the cluster launcher need no TensorFlow.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ImportError(
            "estimator_accum needs TensorFlow 2.8 to 2.21. Received: none. Install this "
            "package with its extra [tf], or the TensorFlow of your choice."
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
