"""Measures seconds or bytes: the parts of `scripts/benchmark.py`."""
