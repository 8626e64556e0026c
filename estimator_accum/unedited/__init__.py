"""Scripts and model_fns that know nothing of this library."""

from estimator_accum.unedited._rows import per_example

__all__ = ["per_example"]
