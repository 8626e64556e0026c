"""Runs training scripts with gradient accumulation, without editing them.

    python -m estimator_accum.run --micro_batches=auto script.py --its --flags

Files: `__main__.py` reads the command line, `_estimators.py` cuts the batches of
Estimators, `_optimizers.py` accumulates over the `session.run` calls of other loops.
"""
