"""Reports of a run: what shows or records its progress."""
