"""Network time of an update, modelled by bandwidth alone.

    secs per update = K * secs per micro-step + secs of one reduction
    secs of one reduction = 2 * (n - 1) / n * bytes * 8 / bits per second

In a ring of n replicas, each replica sends every byte of the gradients except its own
share twice: once to sum and once to distribute. Latency, and reductions that overlap
with the backward pass, are left out.
"""

import math


def reduction_secs(num_bytes: int, replicas: int, bits_per_sec: float) -> float:
    """Returns how long one all-reduce in a ring takes [seconds]; 0 for one replica.

    Args:
        num_bytes: Size of the gradients [bytes], 4 for each float32 parameter, >= 0.
        replicas: Replicas that train in sync, each on its own link, >= 1.
        bits_per_sec: Speed of each link in each direction, > 0; 1e9 is 1 Gbit/s.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        reduction_secs(440_000_000, replicas=8, bits_per_sec=10e9)  # 0.616
    """
    if num_bytes < 0:
        raise ValueError(
            f"`num_bytes` must be >= 0. Received: {num_bytes}. Use 4 for each parameter."
        )
    if replicas < 1:
        raise ValueError(
            f"`replicas` must be >= 1. Received: {replicas}. Use 1 for one device."
        )
    if not 0 < bits_per_sec < math.inf:
        raise ValueError(
            "`bits_per_sec` must be a finite number > 0. "
            f"Received: {bits_per_sec}. Use 1e9 for 1 Gbit/s."
        )
    return 2 * (replicas - 1) / replicas * num_bytes * 8 / bits_per_sec


def update_secs(micro_step_secs: float, steps: int, reduction: float) -> float:
    """Returns how long an update takes [seconds].

    Args:
        micro_step_secs: Time of one micro-batch's forward and backward pass, > 0.
        steps: K [micro-steps per update], >= 1.
        reduction: Result of `reduction_secs` [seconds].
    """
    return steps * micro_step_secs + reduction


def steps_that_hide(
    micro_step_secs: float, reduction: float, share: float = 0.1
) -> int:
    """Returns the smallest K for which the reduction takes at most a share of the time.

        reduction / (K * micro_step_secs + reduction) <= share

    Args:
        micro_step_secs: Time of one micro-batch's forward and backward pass, > 0.
        reduction: Result of `reduction_secs` [seconds].
        share: Largest share of an update's time, 0 < share < 1.

    Raises:
        ValueError: If `micro_step_secs` or `share` is out of range.
    """
    if not micro_step_secs > 0:
        raise ValueError(
            f"`micro_step_secs` must be > 0. Received: {micro_step_secs}. Measure it."
        )
    if not 0 < share < 1:
        raise ValueError(
            "`share` must be between 0 and 1. "
            f"Received: {share}. Use 0.1 for a tenth of the time."
        )
    least = reduction * (1 - share) / share / micro_step_secs
    # A value that is an integer up to rounding errors is not rounded up.
    return max(1, math.ceil(least * (1 - 1e-12)))
