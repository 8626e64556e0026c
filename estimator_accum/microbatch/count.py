"""Adaptive number of micro-batches per batch, with recomputed layers or without.

out of memory    twice as many micro-batches; at one example each, recomputed layers
then, once       half as many with recompute, as long as that is faster
grow_after       half as many, which memory may allow by now
"""

import collections
import json
import logging
import statistics
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.reports import _files

_logger = logging.getLogger("tensorflow.estimator_accum")

_TIMED_UPDATES = 5  # of each plan that is compared, after one that is not timed
# On a GPU not all errors of memory are ResourceExhaustedError: libraries with their own
# allocators report their own codes, and a copy whose target could not be allocated says
# "Dst tensor is not initialized" (https://github.com/tensorflow/tensorflow/issues/7025).
_TEXTS = (
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "hipErrorOutOfMemory",
    "Dst tensor is not initialized",
    "OOM when allocating",
    "out of memory",  # CUDA's runtime
)
# gRPC's error, which a smaller batch may not fix.
_MESSAGE_TOO_LARGE = "message larger than max"


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether `error`, from a `session.run`, says that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return _MESSAGE_TOO_LARGE not in str(error)
    # Unavailable and Aborted mean a lost peer, not lack of memory.
    kinds = (tf.errors.InternalError, tf.errors.UnknownError)
    return isinstance(error, kinds) and any(text in str(error) for text in _TEXTS)


class Plan(NamedTuple):
    """A way to train a batch.

    Attributes:
        micro_batches: Number of micro-batches, >= 1.
        recompute: Whether the layers that can be are recomputed.
    """

    micro_batches: int
    recompute: bool = False

    def __str__(self) -> str:
        layers = " with recompute" if self.recompute else ""
        return f"{self.micro_batches}{layers}"

    def halved(self) -> "Plan":
        return self._replace(micro_batches=-(-self.micro_batches // 2))


class MicroBatchCount:
    """Number of micro-batches, adapted to memory and kept in the output folder.

    Args:
        fixed: Number that the user has chosen, which never changes; None for one that
            is adapted.
        grow_after: Batches without an out-of-memory error after which half as many
            micro-batches are tried; None never tries.
        path: JSON file that keeps the plan; None keeps it in memory only.

    Attributes:
        is_fixed: Whether the number never changes.
        can_recompute: Whether the model has layers to recompute.
    """

    def __init__(
        self,
        fixed: int | None = None,
        grow_after: int | None = None,
        path: str | None = None,
    ):
        self.is_fixed = fixed is not None
        self._grow_after, self._path = grow_after, path
        self.can_recompute = False
        self._plan = _read(path) if path is not None else Plan(fixed or 1)
        self._too_large = None  # the plan that ran out of memory last
        self._before = None  # the plan before this one, which is on trial
        self._is_comparing = False  # whether recomputed layers may save time
        self._updates = 0
        self._times = _last_times()
        self._time_before = None

    @property
    def value(self) -> int:
        """The number of micro-batches."""
        return self._plan.micro_batches

    @property
    def recompute(self) -> bool:
        """Returns whether layers are recomputed."""
        return self._plan.recompute

    @property
    def outcome(self) -> str | None:
        """The plan at the end of a training, with its reason; None for a fixed number."""
        if self.is_fixed:
            return None
        if self._plan == Plan(1):
            return "batches fit in memory unsplit"
        why = f", since {self._too_large} ran out of memory" if self._too_large else ""
        return f"micro-batches per batch: {self._plan}{why}"

    def is_last(self, rows: int) -> bool:
        """Returns whether nothing takes less memory for a batch of `rows` examples."""
        can_recompute = self.can_recompute and not self.recompute
        return self.value >= rows and not can_recompute

    def describe(self, rows: list[int]) -> str:
        """Returns how a batch is split.

        Args:
            rows: Its examples, for each replica.
        """
        sizes = [-(-number // self.value) for number in rows]
        pairs = zip(rows, sizes, strict=True)
        # The largest replica's number is not always the largest: 10 in 8 are 5 of 2.
        size, count = max(sizes), max(-(-n // size) for n, size in pairs if n)
        most = "" if {size * count} == {*rows} else "at most "
        return (
            f"{sum(rows):,} = {most}{size:,} example{'s' * (size > 1)} x {count:,} "
            f"micro-batch{'es' * (count > 1)}{f' x {len(rows)} replicas' * (len(rows) > 1)}"
        )

    def increase(self, rows: int, place: str) -> None:
        """Doubles the number, or recomputes, after memory ran out; or ends a trial.

        Args:
            rows: Number of examples in the batch, the upper limit of micro-batches.
            place: Name of the batch in messages, such as "update 7".
        """
        reason = f"out of memory at {place}; the batch is retried"
        self._too_large = self._plan
        if self._before is not None:
            if not self._is_comparing:  # wait longer for the next trial
                self._grow_after *= 2
            self._is_comparing = False
            self._change(self._before, reason, logging.WARNING)
            return
        more = min(2 * self.value, rows)
        if more > self.value:
            plan = self._plan._replace(micro_batches=more)
        else:
            plan = self._plan._replace(recompute=True)
        self._is_comparing = self.can_recompute
        self._change(plan, reason, logging.WARNING)

    def time_batch(self, secs_per_example: float) -> None:
        """Records how long the micro-batches of an update took [secs]."""
        self._times.append(secs_per_example)

    def count_update(self, place: str) -> bool:
        """Counts a batch that fitted in memory; returns whether the plan changed.

        Args:
            place: Name of the batch in messages, such as "update 7".
        """
        self._updates += 1
        if self._is_comparing:
            return self._compare()
        if self._before is not None:
            self._keep()
        if (
            self._grow_after is None
            or self._updates < self._grow_after
            or self.value == 1
        ):
            return False
        reason = f"fitted in memory {self._updates} times, until {place}"
        self._try(self._plan.halved(), reason)
        return True

    def _compare(self) -> bool:
        """Tries recomputed layers, and keeps the faster plan."""
        if self._updates <= _TIMED_UPDATES:
            return False
        time = statistics.median(self._times)
        if self._before is not None:
            ratio = time / self._time_before
            if ratio >= 1:
                self._is_comparing = False
                reason = f"the trial took {ratio:.2f} times as long"
                self._change(self._before, reason, logging.INFO)
                return True
            _logger.info(
                "micro-batches %s: took %.2f times as long as %s",
                self._plan,
                ratio,
                self._before,
            )
            self._keep()
        plan = self._plan.halved()._replace(recompute=True)
        if plan == self._plan:
            self._is_comparing = False
            return False
        self._time_before = time
        self._try(plan, "trying recomputed layers")
        return True

    def _try(self, plan: Plan, reason: str) -> None:
        before = self._plan
        self._change(plan, reason, logging.INFO, is_trial=True)
        self._before = before

    def _change(self, plan: Plan, reason: str, level: int, is_trial=False) -> None:
        _logger.log(level, "micro-batches %s -> %s: %s", self._plan, plan, reason)
        self._plan, self._updates, self._times = plan, 0, _last_times()
        if not is_trial:
            self._keep()

    def _keep(self) -> None:
        """Ends the trial, if there is one, and writes the plan to the file."""
        self._before = None
        if self._too_large == self._plan:  # fits by now
            self._too_large = None
        if self._path is None:
            return
        content = {"micro_batches": self.value}
        if self.can_recompute:
            content["recompute"] = self.recompute
        _files.write(self._path, json.dumps(content) + "\n")


def _last_times() -> collections.deque:
    """Returns where the times of a plan's last updates are kept [secs per example]."""
    return collections.deque(maxlen=_TIMED_UPDATES)


def _read(path: str) -> Plan:
    try:
        content = json.loads(_files.read(path))
        value, recompute = content["micro_batches"], content.get("recompute", False)
        if type(value) is int and value >= 1 and isinstance(recompute, bool):
            return Plan(value, recompute)
        received = repr(content)
    except FileNotFoundError:
        return Plan(1)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        received = repr(error)
    raise ValueError(
        f'{path} must hold {{"micro_batches": n}} with n >= 1, as an earlier run left '
        f"it. Received: {received}. Remove the file to begin anew."
    )
