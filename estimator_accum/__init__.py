"""Gradient accumulation for `tf.estimator` and `tf.compat.v1` training code."""

from estimator_accum.hooks import make_accumulation_hooks
from estimator_accum.microbatch import batch_mean, microbatch_model_fn
from estimator_accum.optimizer import AccumulatingOptimizer
from estimator_accum.train_op import make_accumulating_train_op
from estimator_accum.window import get_or_create_update_step, get_windows

__all__ = [
    "AccumulatingOptimizer",
    "batch_mean",
    "get_or_create_update_step",
    "get_windows",
    "make_accumulating_train_op",
    "make_accumulation_hooks",
    "microbatch_model_fn",
]
