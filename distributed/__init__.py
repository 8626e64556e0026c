"""An image classifier on many workers, with one reduction a window."""
