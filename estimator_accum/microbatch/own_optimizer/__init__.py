"""Gradients of a model_fn that has an optimizer of its own."""
