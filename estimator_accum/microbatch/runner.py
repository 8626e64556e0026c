"""Runs the micro-batches of a batch, in more of them when memory runs out.

    stage     take the next batch of input_fn (at the end of the data, its error passes)
    run       each pass, which is all micro-batches one after the other;
              out of memory: roll back their writes, split finer, retry

A run that fails may have executed in part, so a run that may be retried contains only
operations that can be rolled back. After another error the next batch rolls them back.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.internals import has_failed
from estimator_accum.microbatch.count import MicroBatchCount, is_out_of_memory
from estimator_accum.microbatch.gather import Exchange
from estimator_accum.microbatch.replica import ReplicaBatch
from estimator_accum.microbatch.staging import check_rows, describe_example, rows_of
from estimator_accum.microbatch.work import Turn, Work
from estimator_accum.precision import has_low_precision

_logger = logging.getLogger("tensorflow.estimator_accum")
_LATE = (
    "It was seen at {}: updates since the last one that passed this check may be wrong "
    "as well."
)


class _Cut(NamedTuple):
    """One replica's batch, split into micro-batches.

    Attributes:
        rows: Number of examples in the batch.
        size: Number of examples in a micro-batch; the last one may have fewer.
        begins: First example of each micro-batch. Without examples it is [0], for what
            runs in place of a micro-batch.
    """

    rows: int
    size: int
    begins: range


class BatchRunner:
    """Runs one batch after the other in micro-batches, on all replicas of a process.

    Args:
        replicas: The replicas; the list is complete when `begin` is called.
        count: The number of micro-batches.
        on_change: Called when `count` has changed.
        is_zero: Whether the batch's values are zeros on a replica without examples. If
            not, they are computed from none, as in a step: its metrics stay as they are.

    Attributes:
        rows: Examples of the last batch, for each replica.
        shapes: Shapes of its features and labels, for each replica.
        numbers: How many numbers the features and labels of the last batch have.
        is_open: Whether a batch has begun whose own run has not succeeded.
    """

    def __init__(
        self,
        replicas: list[ReplicaBatch],
        count: MicroBatchCount,
        on_change: Callable[[], None],
        *,
        is_zero: bool = True,
    ):
        self._replicas = replicas
        self._count = count
        self._on_change, self._is_zero = on_change, is_zero
        self._exchanges = []  # those that this batch has begun
        self._capacity = None  # of an exchange
        self.rows, self.numbers, self.is_open = [], 0, False
        self.shapes = []

    def begin(self) -> None:
        """Gathers all passes of the batch, before the session is made."""
        replicas = self._replicas
        switches = [replica.batch.should_recompute for replica in replicas]
        self._count.can_recompute = any(switch is not None for switch in switches)
        self._roll_back = [replica.total.roll_back for replica in replicas]
        self._passes = {
            turn: [replica.passes[turn] for replica in replicas]
            for turn in replicas[0].passes
        }
        self._batches, self._looks = 0, [0] * len(replicas)  # of the spot checks

    @contextlib.contextmanager
    def undoing(self, session) -> Iterator[None]:
        """Undoes the micro-batches of a batch that ends with an error."""
        try:
            yield
        except BaseException:
            if self.is_open:
                session.run(self._roll_back)
                self.is_open = False
            raise

    def initialize(self, session, config: tf.compat.v1.ConfigProto) -> None:
        """Initializes, in a new session, the variables that are in no collection.

        Args:
            session: The session itself, without hooks.
            config: Its config.
        """
        self._is_low = has_low_precision(config)
        session.run([replica.total.initialize for replica in self._replicas])
        self.is_open = False

    def run(
        self,
        session: tf.compat.v1.Session,
        place: str,
        taken: Iterable[tf.Tensor],
        fetches: list[list[tf.Tensor]],
    ) -> tuple[dict, list]:
        """Runs the next batch.

        Args:
            session: The session itself, without hooks.
            place: Name of the batch in messages, such as "update 7".
            taken: Tensors of the input pipeline.
            fetches: For each replica, tensors to fetch with every micro-batch.

        Returns:
            The feeds of the batch's own run by names: the position of a micro-batch that
            is all of the batch, the values of `taken` and of `ReplicaBatch.reported`;
            and for each replica the values of `fetches`, one list for each micro-batch.

        Raises:
            ValueError: If the batch has no examples, one example does not fit in
                memory, or the batch cannot be split.
            tf.errors.OutOfRangeError: At the end of the data.
        """
        taken = list(taken)
        self.shapes, values = self._stage(session, taken)
        shapes = self.shapes
        names = [replica.batch.names for replica in self._replicas]
        self.rows = rows = list(map(rows_of, names, shapes))
        if not any(rows):
            raise ValueError(
                "A batch must have at least one example. Received: none at "
                f"{place}. Leave empty batches out of the data set."
            )
        self._batches += 1
        self.numbers = sum(math.prod(shape) for parts in shapes for shape in parts)
        if self._batches == 1 and not self._count.is_fixed:
            self._warn_before_retries(shapes, rows, place)
        while True:
            begin = time.monotonic()
            self._exchanges = []
            if self._count.value > 1:
                self._check_rows(shapes, rows)
            try:
                feeds, fetched = self._run_passes(session, rows, place, fetches)
            except Exception as error:
                if not is_out_of_memory(error):
                    self._check_refusals(error)
                    raise
                if self._count.is_fixed:
                    raise
                self._has_failed_anywhere(session, True)  # tells the others
                self._check_can_retry(place, error)
                self._cut_finer(session, rows, shapes, place, error)
                continue
            secs = time.monotonic() - begin
            if self._has_failed_anywhere(session, False):
                self._check_can_retry(place)
                session.run(self._roll_back)
                continue
            self._count.time_batch(secs / max(rows))
            taken_values = zip(names_of(taken), values, strict=True)
            return feeds | dict(taken_values), fetched

    def run_again(self, session, place: str, fetches: list) -> tuple[dict, list]:
        """Computes tensors of the last batch with the present weights.

        Args and results are those of `run`. Changes nothing: the last pass does without
        its operations, and the others may run twice. The other processes may not run it,
        so nothing is exchanged: a loss of all processes is the last update's.
        """
        return self._run_passes(session, self.rows, place, fetches, is_read=True)

    def _stage(self, session, taken: list[tf.Tensor]) -> tuple[list, list]:
        """Takes the next batch; returns the shapes of its parts, and `taken`."""
        if self.is_open:  # the caller goes on after an error
            session.run(self._roll_back)
            self.is_open = False
        replicas = self._replicas
        before = [(r.total.release, r.total.before, r.snapshot) for r in replicas]
        staged, _, values = session.run(
            [[replica.batch.stage for replica in replicas], before, taken]
        )
        self.is_open = True
        shapes = [[np.asarray(shape) for shape in parts] for parts, _ in staged]
        return shapes, values

    def _check_rows(self, shapes: list, rows: list[int]) -> None:
        """Raises ValueError if a batch may have features of no example."""
        for replica, parts, n in zip(self._replicas, shapes, rows, strict=True):
            if n > 1:
                check_rows(replica.batch.names, parts, replica.constants)

    def _warn_before_retries(self, shapes: list, rows: list[int], place: str) -> None:
        """Warns of refusals that an error of memory will bring, perhaps much later."""
        checks = [lambda: self._check_can_retry(place)]
        if self._count.value == 1:  # else the first batch is refused
            checks.append(lambda: self._check_rows(shapes, rows))
        for check in checks:
            try:
                check()
            except ValueError as refusal:
                _logger.warning(
                    "micro-batches: a batch that runs out of memory will not be retried, "
                    "and ends the run with an error: %s",
                    refusal,
                )

    def _check_refusals(self, error: Exception) -> None:
        """Raises ValueError if an operation failed that says that nothing can be split."""
        is_split = self._count.value > 1 and max(self.rows) > 1
        for replica in self._replicas:
            for operation, (guard, is_of_model) in replica.refusals.items():
                may_refuse = is_split or not is_of_model
                if may_refuse and has_failed(operation, error):
                    raise ValueError(guard.sentence) from error

    def _check_can_retry(self, place: str, error: Exception | None = None) -> None:
        """Raises ValueError if no roll back undoes a change by micro-batches."""
        for operation in (op for r in self._replicas for op in r.lasting):
            raise ValueError(
                "A batch that ran out of memory must change variables and tables alone, "
                f"to be retried. Received: {operation.name} of type {operation.type} at "
                f"{place}. Pass a fixed number of micro-batches, larger than "
                f"{self._count.value}, or leave the operation out of the model."
            ) from error

    def _has_failed_anywhere(self, session, has_failed: bool) -> bool:
        """Returns whether a process that this one has waited for ran out of memory.

        Only then all of them run the batch again, since none can do so alone.
        """
        if not self._exchanges:
            return has_failed
        flags = {e.has_failed.name: float(has_failed) for e in self._exchanges}
        return any(session.run([e.failures for e in self._exchanges], flags))

    def _run_passes(
        self, session, rows: list[int], place: str, fetches: list, is_read: bool = False
    ) -> tuple[dict, list]:
        cuts = []
        for n in rows:
            size = -(-n // self._count.value)  # ceil
            cuts.append(_Cut(n, size, range(0, n, size) if n else range(1)))
        is_whole = max(len(cut.begins) for cut in cuts) == 1
        if not self._is_zero:
            is_whole = is_whole and all(rows)  # else what follows reads empty slots
        if not is_read:
            self._spot_check(session, cuts, place)
        last, done, later, fetched = {}, {}, {}, []
        for turn, works in self._passes.items():
            if is_read and turn is Turn.LAST:
                works = [Work()] * len(works)
            marks = dict.fromkeys(
                names_of(p for work in works for p in work.done), True
            )
            exchanges = (replica.batch.works.exchange for replica in self._replicas)
            if is_read and turn is Turn.JOINT and any(exchanges):
                done |= marks  # the slots hold the last update's
                continue
            if is_whole and marks:
                later |= marks  # the last pass does the work of this one
                continue
            is_last = turn is Turn.LAST
            wanted = [[] for _ in works]
            if is_last:
                has_reported = is_whole and not is_read
                reported = [r.reported if has_reported else () for r in self._replicas]
                pairs = zip(fetches, reported, strict=True)
                wanted = [[*one, *(t for t, _ in others)] for one, others in pairs]
            if is_last or any(work.micro_ops for work in works):
                feeds, fetched = self._run_micro_batches(
                    session, works, wanted, cuts, done
                )
                last |= feeds
            done |= marks
            once = [
                work.once if n or not self._is_zero or turn is Turn.JOINT else []
                for work, n in zip(works, rows, strict=True)
            ]
            last = last or self._feeds(0, cuts)
            self._run_once(session, turn, once, rows, last | done, place)
        feeds = last | done | later
        if not is_read:
            feeds |= self._reported(session, rows, fetched, fetches, feeds, place)
        for replica, (n, _, begins) in zip(self._replicas, cuts, strict=True):
            feeds |= replica.batch.feeds(0, n, n, len(begins), self._count.recompute)
        return feeds, fetched

    def _feeds(self, i: int, cuts: list[_Cut]) -> dict:
        """Returns the feeds of micro-batch number `i` of each replica that has one."""
        feeds, recompute = {}, self._count.recompute
        for replica, (rows, size, begins) in zip(self._replicas, cuts, strict=True):
            if i < len(begins):
                length = min(size, rows - begins[i])
                number = len(begins)
                feeds |= replica.batch.feeds(begins[i], length, rows, number, recompute)
        return feeds

    def _spot_check(self, session, cuts: list[_Cut], place: str) -> None:
        """Has some batches looked at, if they are split: the numbers of each replica."""
        if self._count.value == 1:
            return
        for i, (replica, cut) in enumerate(zip(self._replicas, cuts, strict=True)):
            check, looks = replica.spot_check, self._looks[i]
            if check is None or cut.rows < 2 or not check.is_due(looks, self._batches):
                continue
            switch = replica.batch.should_recompute
            feeds = {} if switch is None else {switch.name: self._count.recompute}
            try:
                check.run(session, cut.rows, cut.size, looks, feeds, self._is_low)
            except ValueError as error:
                if looks:
                    raise ValueError(f"{error} {_LATE.format(place)}") from error
                raise
            session.run(self._roll_back)
            self._looks[i] = self._batches

    def _reported(
        self, session, rows, fetched, fetches: list, feeds: dict, place: str
    ) -> dict:
        """Returns the batch's values of the tensors with which the train op is fed.

        Args:
            session: The session.
            rows: Number of examples of each replica.
            fetched: Values that each replica has fetched.
            fetches: For each replica, the first of these tensors, not reported.
            feeds: Feeds.
            place: Name of the batch in messages.
        """
        result, waiting = {}, []
        everything = zip(self._replicas, rows, fetched, map(len, fetches), strict=True)
        for replica, n, values, number in everything:
            tensors = [tensor for tensor, _ in replica.reported]
            names = names_of(tensors)
            if not n and self._is_zero:
                result |= dict(zip(names, map(_zeros, tensors), strict=True))
            elif values and len(values[0]) > number:  # one micro-batch was the batch
                result |= dict(zip(names, values[0][number:], strict=True))
            else:
                waiting.append((names, [value for _, value in replica.reported]))
        wanted = [reported for _, reported in waiting]
        values = self._run_once(session, (), wanted, rows, feeds, place)
        for (names, _), numbers in zip(waiting, values, strict=True):
            result |= dict(zip(names, numbers, strict=True))
        return result

    def _run_once(self, session, turn: Turn, once: list, rows, feeds, place) -> list:
        """Runs the operations on the whole batch; returns their results."""
        if not any(once):
            return [[] for _ in once]
        exchanges = [replica.batch.works.exchange for replica in self._replicas]
        exchanges = [e for e in exchanges if e and turn is Turn.JOINT]
        if not self._count.is_fixed:
            self._exchanges += exchanges
        try:
            if exchanges:
                self._exchange(session, exchanges, feeds)
            return session.run(once, feeds)
        except Exception as error:
            if self._count.is_fixed or not is_out_of_memory(error):
                raise
            raise ValueError(
                "Results that are computed once for the whole batch, such as its loss, "
                f"must fit in memory. Received: {max(rows)} examples at {place}, for which "
                "it ran out. Use smaller batches."
            ) from error

    def _exchange(self, session, exchanges: list[Exchange], feeds: dict) -> None:
        counts = session.run([exchange.counted for exchange in exchanges], feeds)[0]
        most = int(counts[:, 1].max())
        if self._capacity is None:  # the first batch decides, in all processes alike
            self._capacity = most
        for begin in range(0, most, self._capacity):
            for exchange in exchanges:
                feeds |= {exchange.counts.name: counts, exchange.begin.name: begin}
                feeds[exchange.capacity.name] = self._capacity
            session.run([exchange.operations for exchange in exchanges], feeds)

    def _run_micro_batches(
        self, session, works: list[Work], wanted: list, cuts: list, done: dict
    ) -> tuple[dict, list]:
        """Runs one micro-batch after the other, each on all replicas that have one.

        Args:
            session: The session.
            works: The work of the pass, one for each replica.
            wanted: Fetches of each replica.
            cuts: The split batch of each replica.
            done: Feeds that tell which passes have run.

        Returns:
            (feeds of the last micro-batch of each replica; values of `wanted`, for each
            replica one list for each micro-batch).
        """
        last, fetched = {}, [[] for _ in cuts]
        for i in range(max(len(cut.begins) for cut in cuts)):
            feeds = self._feeds(i, cuts)
            # A replica may have fewer examples than the others.
            running = [k for k, cut in enumerate(cuts) if i < len(cut.begins)]
            operations = [
                (works[k].micro_ops, wanted[k])
                if cuts[k].rows
                else (works[k].empty, [])
                for k in running
            ]
            results = session.run(operations, feeds | done)
            for k, (_, values) in zip(running, results, strict=True):
                if values:
                    fetched[k].append(values)
            last |= feeds
        return last, fetched

    def _cut_finer(self, session, rows, shapes, place: str, error: Exception) -> None:
        if self._count.is_last(max(rows)):
            names = self._replicas[0].batch.names
            raise ValueError(
                "One example must fit in memory. Received: an example of "
                f"{describe_example(names, shapes[0])} at {place}, which "
                "alone ran out of memory. Use shorter examples, a smaller model, or a "
                "device with more memory."
            ) from error
        self._count.increase(max(rows), place)
        session.run(self._roll_back)
        self._on_change()


def names_of(tensors: Iterable[tf.Tensor]) -> list[str]:
    """Returns the names of tensors, by which they are fed."""
    return [tensor.name for tensor in tensors]


def _zeros(tensor: tf.Tensor) -> np.ndarray:
    shape = [0 if size is None else size for size in tensor.shape.as_list()]
    return np.zeros(shape, tensor.dtype.as_numpy_dtype)
