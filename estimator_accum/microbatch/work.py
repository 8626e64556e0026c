"""Work with a batch beside the train op: the sum of all that functions add."""

import enum
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.microbatch.gather import make_exchange
from estimator_accum.microbatch.staging import Slot, task_of

# Attribute of an operation that checks a micro-batch for this library, not for a step.
OWN_CHECK = "_estimator_accum_own_check"


class Turn(enum.IntEnum):
    """A pass through the micro-batches of a batch, in their order.

    JOINT collects rows of all replicas, which operations after it read. COLLECT
    collects rows of its replica alone, and may need the former. LAST has gradients.
    """

    JOINT = 0
    COLLECT = 1
    LAST = 2


class Work(NamedTuple):
    """Operations, by when they run.

    Attributes:
        before: Once, before the first micro-batch of all passes; not before a retry.
        micro_ops: With every micro-batch.
        empty: In their place, on a replica without examples.
        once: Once, after the last micro-batch of every replica that has examples. Those
            of `Turn.JOINT` run on replicas without examples, too.
        done: Bool placeholders, fed with True from `once` on. They stay unfed only if
            one micro-batch is the whole batch; the last pass then does this one's work.
        initialize: Once in a new session, because the variables are in no collection.
        roll_back: Before a retry, to undo the micro-batches so far.
        release: After the batch, and before a retry, to free the memory of its sums.
        handles: Handles of variables that micro-batches write, and no retry restores.
        twice: Tensors of a micro-batch that the last pass computes as well: outputs of
            whole_batch_loss.
    """

    before: Sequence[tf.Operation] = ()
    micro_ops: Sequence[tf.Operation] = ()
    empty: Sequence[tf.Operation] = ()
    once: Sequence[tf.Operation] = ()
    done: Sequence[tf.Tensor] = ()
    initialize: Sequence[tf.Operation] = ()
    roll_back: Sequence[tf.Operation] = ()
    release: Sequence[tf.Operation] = ()
    handles: Sequence[tf.Tensor] = ()
    twice: Sequence[tf.Tensor] = ()


class Works:
    """All work of a batch; functions add to it while the model_fn is called.

    Args:
        rows: Scalar int64, the number of this replica's examples in the batch.

    Attributes:
        slots: Handles of the slots that micro-batches write.
        exchange: Exchange of rows among processes before `once` of `Turn.JOINT`; None
            within a process.
        is_closed: Whether nothing may be added any more.
    """

    def __init__(self, rows: tf.Tensor):
        self._rows, self._parts = rows, {Turn.LAST: []}
        self.slots, self.exchange, self.is_closed = [], None, False

    @property
    def passes(self) -> dict[Turn, Work]:
        """The work of each pass so far, in their order."""
        return {turn: sum_of(works) for turn, works in sorted(self._parts.items())}

    @property
    def total(self) -> Work:
        """The work of all passes so far, in their order."""
        return sum_of(self.passes.values())

    @property
    def micro_ops(self) -> Sequence[tf.Operation]:
        """The operations of the last pass that run with every micro-batch."""
        return self.passes[Turn.LAST].micro_ops

    @property
    def handles(self) -> set[tf.Operation]:
        """Operations whose results are handles that no retry has to restore."""
        return {handle.op for handle in (*self.slots, *self.total.handles)}

    def first_turn(self, is_joint: bool = False) -> Turn:
        """Returns the pass that collects rows, of this replica or of all."""
        turn = Turn.JOINT if is_joint else Turn.COLLECT
        if turn not in self._parts:
            self._parts[turn] = []
            if is_joint:
                self.exchange = make_exchange(self._rows)
        return turn

    def slot(self, name: str, dtype: tf.DType, shape=()) -> Slot:
        """Returns a new slot, which micro-batches may write and no retry restores."""
        task = task_of(self._rows.device)
        slot = Slot(name, dtype, tf.TensorShape(shape), task)
        self.slots.append(slot.handle)
        return slot

    def add(self, turn: Turn = Turn.LAST, **operations: Sequence) -> None:
        """Adds operations to a pass, by the names of `Work`.

        Raises:
            ValueError: If nothing may be added any more.
        """
        if self.is_closed:
            raise ValueError(
                "An operation that runs with every batch must be made in the model_fn. "
                "Received: a gradient of whole_batch_loss, first taken after the model_fn has "
                "returned. Take it in the model_fn."
            )
        self._parts[turn].append(Work(**operations))


def sum_of(works: Iterable[Work]) -> Work:
    """Returns all work, in its order."""
    columns = zip(Work(), *works, strict=True)
    return Work(*(tuple(x for column in field for x in column) for field in columns))
