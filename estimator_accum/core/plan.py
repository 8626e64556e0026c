"""Plan of one accumulating train op: all that its micro-steps share."""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.clock import Clock
from estimator_accum.core.nonfinite import POLICIES, Policy
from estimator_accum.core.options import Options
from estimator_accum.core.state import State


class Plan(NamedTuple):
    """Plan of one train op, complete before its first micro-step is built.

    Attributes:
        options: The caller's options; `name` is the scope of the variables.
        clock: When the window closes.
        names: Names of the trained variables.
        state: Its variables.
        num_replicas: Number of replicas that train in sync, a Python int.
        replica_divisor: That of its micro-batches; 1 if there are sums.
        is_observed: Whether hooks read its results. Those of Keras's windows nobody
            reads, and a NaN in their loss may be an unknown one.
        stop_request: Placeholder, fed with 1.0 if this task of a cluster should stop;
            None outside clusters.
        are_slices: Whether the norm of each gradient is that of its slices.
    """

    options: Options
    clock: Clock
    names: list[str]
    state: State
    num_replicas: int
    replica_divisor: float
    is_observed: bool
    stop_request: tf.Tensor | None = None
    are_slices: list[bool] = ()

    @property
    def policy(self) -> Policy:
        """The policy for gradients that are NaN or infinite."""
        return POLICIES[self.options.policy]

    @property
    def has_several_micro_steps(self) -> bool:
        """Whether several runs of the train op may be one update."""
        is_one = self.options.gradient_accumulation_steps == 1
        return self.state.micro_steps is not None and not is_one
