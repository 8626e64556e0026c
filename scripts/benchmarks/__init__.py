"""Measures seconds and bytes: the parts of `scripts/benchmark.py`, and more scripts."""
