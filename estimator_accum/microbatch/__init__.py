"""Whole batches that are cut in the graph: what `microbatch_model_fn` is made of."""

from estimator_accum.microbatch._whole import batch_mean
from estimator_accum.microbatch._whole_batch_loss import whole_batch_loss

__all__ = ["batch_mean", "whole_batch_loss"]
