"""Whole batches that are trained in micro-batches: `microbatch_model_fn`."""
