"""Training whole batches as several micro-batches: `microbatch_model_fn`."""

from estimator_accum.microbatch._model_fn import batch_mean, microbatch_model_fn
from estimator_accum.microbatch._whole_batch_loss import whole_batch_loss

__all__ = ["batch_mean", "microbatch_model_fn", "whole_batch_loss"]
