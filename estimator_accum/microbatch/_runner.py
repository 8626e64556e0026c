"""Runs the micro-batches of a batch, and again when memory runs out.

    stage     take the next batch of input_fn (at the end of the data, its error passes)
    run       each pass, which is all micro-batches one after the other;
              out of memory: roll back what they wrote, cut finer, retry

A run that fails may have executed in part, so a run that may be retried contains only
operations that can be rolled back.
"""

import re
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.microbatch._batch import Exchange, Pass, WholeBatch
from estimator_accum.microbatch._count import FixedCount, MicroBatchCount
from estimator_accum.microbatch._graph import Snapshot
from estimator_accum.microbatch._memory import is_out_of_memory
from estimator_accum.microbatch._staging import StagedBatch, describe_example, rows_of

# What a micro-batch says if a row is looked up in another example.
OWN_EXAMPLE = "A row must be looked up in its own example, for its batch to be cut."
OF_ANOTHER_EXAMPLE = re.compile(re.escape(OWN_EXAMPLE) + r"[^\]\n]*")


class ReplicaBatch(NamedTuple):
    """One replica's part of the graph.

    Attributes:
        window: Placeholders to feed and operations to run.
        staged: The staged batch.
        snapshot: Copies of the variables that micro-batches write; None if they are
            never retried.
    """

    window: WholeBatch
    staged: StagedBatch
    snapshot: Snapshot | None


class BatchRunner:
    """Runs one batch after the other in micro-batches, on all replicas of a process.

    Args:
        replicas: The replicas; the list is complete when `initialize` is called.
        count: The number of micro-batches.
        on_change: Called when `count` has changed.
    """

    def __init__(
        self,
        replicas: list[ReplicaBatch],
        count: MicroBatchCount | FixedCount,
        on_change: Callable[[], None],
    ):
        self._replicas = replicas
        self._count = count
        self._on_change = on_change
        self._exchanges = []  # those that this batch has begun
        self._capacity = None  # of an exchange

    def begin(self) -> None:
        """Gathers what there is to run, before the session is made."""
        windows = [replica.window for replica in self._replicas]
        snapshots = [r.snapshot for r in self._replicas if r.snapshot is not None]
        self._initialize = [window.initialize_ops for window in windows]
        self._stage = [
            [r.staged.stage for r in self._replicas],
            [snapshot.take for snapshot in snapshots],
        ]
        self._take_back = [
            [snapshot.restore for snapshot in snapshots],
            [window.discard_ops for window in windows],
        ]
        if isinstance(self._count, MicroBatchCount):
            switches = [window.should_recompute for window in windows]
            self._count.can_recompute = any(each is not None for each in switches)
        self._passes = list(zip(*(window.passes for window in windows), strict=True))

    def initialize(self, session: tf.compat.v1.Session) -> None:
        """Initializes, in a new session, the variables that are in no collection."""
        session.run(self._initialize)

    def run(self, session: tf.compat.v1.Session, place: str) -> tuple[dict, list]:
        """Runs the next batch.

        Args:
            session: The session itself, without hooks.
            place: Name of the batch in messages, such as "update 7".

        Returns:
            The feeds of the train op: the last micro-batch's, and the values for the
            batch of `WholeBatch.reported`; and for each replica the values of
            `WholeBatch.fetches`, one list for each micro-batch.

        Raises:
            ValueError: If the batch has no examples, or one example does not fit in
                memory.
            tf.errors.OutOfRangeError: At the end of the data.
        """
        staged, _ = session.run(self._stage)
        shapes = [shapes for shapes, _ in staged]
        rows = [
            rows_of(r.staged.names, s)
            for r, s in zip(self._replicas, shapes, strict=True)
        ]
        if not any(rows):
            raise ValueError(
                "A batch must have at least one example. Received: none at "
                f"{place}. Leave empty batches out in input_fn."
            )
        while True:
            begin = time.monotonic()
            self._exchanges = []
            try:
                result = self._run_passes(session, rows, place)
            except Exception as error:
                refusal = OF_ANOTHER_EXAMPLE.search(str(error))
                if refusal:
                    raise ValueError(refusal[0]) from error
                is_fixed = isinstance(self._count, FixedCount)
                if is_fixed or not is_out_of_memory(error):
                    raise
                self._has_failed_anywhere(session, True)  # tells the others
                self._cut_finer(session, rows, shapes, place, error)
                continue
            secs = time.monotonic() - begin
            if self._has_failed_anywhere(session, False):
                session.run(self._take_back)
                continue
            self._count.time_batch(secs / max(rows))
            return result

    def _has_failed_anywhere(self, session, has_failed: bool) -> bool:
        """Returns whether a process that this one has waited for ran out of memory.

        Only then all of them run the batch again, since none can do so alone.
        """
        if not self._exchanges:
            return has_failed
        flags = {each.has_failed: float(has_failed) for each in self._exchanges}
        return any(session.run([each.failures for each in self._exchanges], flags))

    def _run_passes(self, session, rows: list[int], place: str) -> tuple[dict, list]:
        sizes = [-(-n // self._count.value) for n in rows]  # ceil
        starts = [
            range(0, n, size) if n else range(1)
            for n, size in zip(rows, sizes, strict=True)
        ]
        cut, is_whole = (rows, sizes, starts), max(map(len, starts)) == 1
        self._look_at_keys(session, rows)
        last, done, later, fetched = {}, {}, {}, [[] for _ in rows]
        for passes in self._passes:
            own = {key: value for each in passes for key, value in each.done.items()}
            if is_whole and own:
                later |= own  # the last pass does the work of this one
                continue
            is_last = passes is self._passes[-1]
            wanted = [each.fetches for each in passes]
            if is_whole and is_last:
                windows = [replica.window for replica in self._replicas]
                wanted = [[*f, *w.reported] for f, w in zip(wanted, windows)]
            if is_last or any(each.each for each in passes):
                for i in range(max(map(len, starts))):
                    last |= self._run_micro_batch(
                        session, i, passes, wanted, cut, done, fetched
                    )
            done |= own
            after = [
                each.after if n or each.is_joint else []
                for each, n in zip(passes, rows, strict=True)
            ]
            last = last or self._feeds(0, cut)
            self._run_after(session, passes, after, rows, last | done, place)
        feeds = last | done | later
        return feeds | self._reported(session, rows, fetched, feeds, place), fetched

    def _feeds(self, i: int, cut: tuple) -> dict:
        """Returns the feeds of micro-batch number `i` of each replica that has one.

        Args:
            i: Index of the micro-batch.
            cut: Examples, examples of a micro-batch, and its begins, of each replica.
        """
        feeds = {}
        for replica, n, size, start in zip(self._replicas, *cut, strict=True):
            window = replica.window
            if i < len(start):
                feeds |= {
                    window.begin: start[i],
                    window.size: min(size, n - start[i]),
                    window.rows: n,
                    window.num_micro_batches: len(start),
                }
                if window.should_recompute is not None:
                    feeds[window.should_recompute] = self._count.recompute
        return feeds

    def _look_at_keys(self, session, rows: list[int]) -> None:
        """Has the keys of each replica looked at, once."""
        for replica, n in zip(self._replicas, rows, strict=True):
            window = replica.window
            if window.keys is not None and n > 1 and self._count.may_cut:
                switch = window.should_recompute
                feeds = {} if switch is None else {switch: self._count.recompute}
                window.keys.look(session, n, feeds)
                session.run(self._take_back)
                window.keys = None

    def _reported(self, session, rows, fetched, feeds: dict, place: str) -> dict:
        """Returns the values for the batch of what the train op is fed with."""
        result, waiting = {}, []
        for replica, n, values in zip(self._replicas, rows, fetched, strict=True):
            reported = replica.window.reported
            own = len(replica.window.fetches)
            if not n:  # a replica without examples
                result |= {tensor: _zeros(tensor) for tensor in reported}
            elif values and len(values[0]) > own:  # one micro-batch was the batch
                result |= dict(zip(reported, values[0][own:], strict=True))
            else:
                waiting.append(reported)
        wanted = [list(reported.values()) for reported in waiting]
        values = self._run_after(session, (), wanted, rows, feeds, place)
        for reported, found in zip(waiting, values or [], strict=True):
            result |= dict(zip(reported, found, strict=True))
        return result

    def _run_after(
        self, session, passes: tuple[Pass, ...], after: list, rows, feeds, place
    ) -> list | None:
        """Runs what is computed from the whole batch; returns its results."""
        if not any(after):
            return [[] for _ in after]
        exchanges = [each.exchange for each in passes if each.exchange]
        if isinstance(self._count, MicroBatchCount):
            self._exchanges += exchanges
        try:
            if exchanges:
                self._exchange(session, exchanges, feeds)
            return session.run(after, feeds)
        except Exception as error:
            if isinstance(self._count, FixedCount) or not is_out_of_memory(error):
                raise
            raise ValueError(
                "The loss of the whole batch, of which no micro-batches are made, must "
                f"fit in memory. Received: {max(rows)} examples at {place}, for which "
                "it ran out. Use smaller batches."
            ) from error

    def _exchange(self, session, exchanges: list[Exchange], feeds: dict) -> None:
        counts = session.run([each.counted for each in exchanges], feeds)[0]
        most = int(counts[:, 1].max())
        if self._capacity is None:  # the first batch decides, in all processes alike
            self._capacity = most
        for begin in range(0, most, self._capacity):
            for each in exchanges:
                feeds |= {each.counts: counts, each.begin: begin}
                feeds[each.capacity] = self._capacity
            session.run([each.operations for each in exchanges], feeds)

    def _run_micro_batch(
        self,
        session,
        i: int,
        passes: tuple[Pass, ...],
        wanted: list[list[tf.Tensor]],
        cut: tuple,
        done: dict,
        fetched: list,
    ) -> dict:
        """Runs micro-batch number `i` of each replica that has one; returns its feeds.

        Args:
            session: The session.
            i: Index of the micro-batch.
            passes: The pass, one for each replica.
            wanted: Fetches of each replica.
            cut: Examples, examples of a micro-batch, and its begins, of each replica.
            done: Feeds that tell which passes have run.
            fetched: What each replica has fetched so far; is added to.
        """
        feeds = self._feeds(i, cut)
        rows, _, starts = cut
        # A replica may have fewer examples than the others.
        running = [k for k, start in enumerate(starts) if i < len(start)]
        operations = [
            (passes[k].each, wanted[k]) if rows[k] else (passes[k].empty, [])
            for k in running
        ]
        results = session.run(operations, feeds | done)
        for k, (_, values) in zip(running, results, strict=True):
            if values:
                fetched[k].append(values)
        return feeds

    def _cut_finer(self, session, rows, shapes, place: str, error: Exception) -> None:
        if self._count.is_last(max(rows)):
            names, shape = self._replicas[0].staged.names, shapes[0]
            raise ValueError(
                "One example must fit in memory. Received: an example of "
                f"{describe_example(names, shape)} at {place}, which "
                "alone ran out of memory. Use shorter examples, a smaller model, or a "
                "device with more memory."
            ) from error
        try:
            self._count.increase(max(rows), place)
        except ValueError as refusal:
            raise refusal from error
        session.run(self._take_back)
        self._on_change()


def _zeros(tensor: tf.Tensor) -> np.ndarray:
    shape = [0 if size is None else size for size in tensor.shape.as_list()]
    return np.zeros(shape, tensor.dtype.as_numpy_dtype)
