"""Hooks of an accumulating run: partial windows, reports, checkpoints, signals."""

from estimator_accum.hooks._accumulation import make_accumulation_hooks
from estimator_accum.hooks._signals import exits_between_trainings, watch_signals

__all__ = ["exits_between_trainings", "make_accumulation_hooks", "watch_signals"]
