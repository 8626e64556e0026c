"""The parts of `scripts/benchmark.py`, one module a subject."""
