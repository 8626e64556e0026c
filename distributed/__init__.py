"""Image classifier trained on many workers, with one reduction per window."""
