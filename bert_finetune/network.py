"""Network time of an update's one reduction, modelled by bandwidth alone.

    secs = 2 * (n - 1) / n * bytes * 8 / bits per second

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
