"""Errors of memory in the micro-batches of a batch."""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator

import pytest
import tensorflow as tf

from estimator_accum.microbatch.count import MicroBatchCount, Plan
from estimator_accum.microbatch.runner import BatchRunner


class MemoryErrors:
    """Errors of memory after the work of some micro-batches.

    Attributes:
        after: Numbers of these micro-batches, among those of all passes.
        done: Number of micro-batches so far.
        count: The last `MicroBatchCount` that was made.
        batches: Number of batches that `each_number` has split.
    """

    def __init__(self):
        self.after, self.done, self.count, self.batches = set(), 0, None, 0

    def begin(self, number: int, after=()) -> None:
        """Splits the next batch in `number`, with errors after some micro-batches."""
        self.after, self.done = {*after}, 0
        self.count._plan = Plan(number)

    def each_number(self) -> Iterator[None]:
        """Splits batches in 3, 4 and 1; then in 2, with an error wherever one can be.

        Each of these has its error after one micro-batch more of all passes, and is
        retried in 4. The last one has no error.
        """
        whole = [(number, ()) for number in (3, 4, 1)]
        failing = ((2, {place}) for place in itertools.count())
        for number, after in itertools.chain(whole, failing):
            self.begin(number, after)
            self.batches += 1
            yield
            has_failed = self.done > max(after, default=math.inf)
            assert self.count.value == (2 * number if has_failed else number)
            if after and not has_failed:
                return


class _Executor:
    """An executor that runs out of memory after some micro-batches."""

    def __init__(self, executor, errors: MemoryErrors):
        self._executor, self._errors = executor, errors

    def run(self, fetches, feeds):
        results = self._executor.run(fetches, feeds)
        self._errors.done += 1
        if self._errors.done - 1 in self._errors.after:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating")
        return results


@contextlib.contextmanager
def memory_errors() -> Iterator[MemoryErrors]:
    """Errors of memory in this process, of which there are none at first."""
    errors = MemoryErrors()
    run, make = BatchRunner._run_micro_batches, MicroBatchCount.__init__

    def run_and_fail(runner, executor, *args):
        return run(runner, _Executor(executor, errors), *args)

    @functools.wraps(make)
    def make_and_note(count, *args, **kwargs):
        make(count, *args, **kwargs)
        errors.count = count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchRunner, "_run_micro_batches", run_and_fail)
        patch.setattr(MicroBatchCount, "__init__", make_and_note)
        yield errors


@pytest.fixture
def memory() -> Iterator[MemoryErrors]:
    """Errors of memory, of which there are none at first."""
    with memory_errors() as errors:
        yield errors
