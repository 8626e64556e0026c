"""Checks of a caller's graph, which refuse or warn."""
