"""The parts of scripts/mutation/mutants.py."""
