"""The end of the data that trains, as the runs of a session show it.

A run of the train op that does not finish has found no batch. In a loop that feeds, a run
that reads does not finish. It ends the training data if the train op was fed with an
array, or a view of one, of the last run before it that read the same. The data goes on if
the train op is fed with what a later run has read.

If no such array was fed, but copies or nothing, the data may have trained or not. It has
trained if it alone was read before each run of the train op. Else it has ended if its
OutOfRangeError ends the session, or a warning says so. The error may also come from a run
that hooks do not see, as in `run_step_fn`.
"""

import collections
import logging
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator

import numpy as np
import tensorflow as tf

_logger = logging.getLogger("tensorflow.estimator_accum")
_UNKNOWN = (
    '`partial_window` must be "apply" or "keep" if the train op is not fed with the arrays '
    'that a run reads. Received: "auto", and the data of %s has ended, whose last arrays '
    'were not fed. The partial window is kept; pass "apply" if this data trains.'
)
# Kinds of runs; those that read are known by what they fetch.
_TRAIN_OP, _OF_TRAINING = "train op", "read, and fed to the train op"
_REMEMBERED = 16  # reads of a kind: a loop may read some batches ahead


class EndOfData:
    """The end of the data in one session.

    Attributes:
        is_training: Whether the present run is of a train op; None between runs.
    """

    def __init__(self):
        self.is_training = None
        self._running, self._number = None, 0  # kind of the present run; runs so far
        self._ended = {}  # numbers of runs that did not finish, by kind
        self._reads = {}  # (number, references) of the last runs that read, by kind
        self._fed = {}  # numbers of the last reads that the train op was fed with
        self._trained = 0  # number of the last run of the train op
        self._unproven = set()  # kinds that were read for a train op, perhaps
        self._before_each = None  # kinds that were read before each train op
        self._is_asked_to_stop = False
        self._error = sys.exc_info()[1]

    def start(self, kind: Hashable | None, has_reader: bool, feeds: list) -> None:
        """Notes that a run begins.

        Args:
            kind: None for a run of the train op; else the names of what is fetched.
            has_reader: Whether the run itself reads a batch.
            feeds: Values that the run is fed with.
        """
        self.is_training, self._number = kind is None, self._number + 1
        self._running = _TRAIN_OP if kind is None else kind
        self._has_reader, self._feeds = has_reader, feeds

    def finish(self, values) -> None:
        """Notes that the run has finished, with `values` if it has read a batch."""
        kind, is_training = self._running, self.is_training
        self._running = self.is_training = None
        if is_training:
            self._ended.pop(_TRAIN_OP, None)
            self._train()
        elif self._has_reader:
            if kind in self._ended:
                is_of_training = self._was_fed(kind)
                number = self._ended.pop(kind)
                if is_of_training:
                    self._ended[_OF_TRAINING] = number
            reads = self._reads.setdefault(kind, collections.deque(maxlen=_REMEMBERED))
            reads.append((self._number, [*map(_reference_to, _arrays_of(values))]))

    def _train(self) -> None:
        """Notes which data the train op was fed with."""
        feeds, self._feeds = self._feeds if self._reads else (), None
        fed, reads = {id(array) for array in _arrays_of(feeds)}, {}
        for kind, results in self._reads.items():
            for number, references in results:
                if any(id(reference()) in fed for reference in references):
                    reads[kind] = number
        for kind, number in reads.items():
            self._fed[kind] = max(number, self._fed.get(kind, 0))
        numbers = {kind: results[-1][0] for kind, results in self._reads.items()}
        new = {kind: n for kind, n in numbers.items() if n > self._trained}
        before = self._before_each
        if not self._ended:  # else a loop that reads ahead trains its last batch
            self._before_each = set(new) if before is None else before.intersection(new)
        if not reads and not self._has_reader:
            reads = new
            self._unproven |= set(reads)
        of_reader = self._number if self._has_reader else 0
        last = max(reads.values(), default=of_reader)
        self._ended = {kind: n for kind, n in self._ended.items() if n > last}
        self._trained = self._number

    def _was_fed(self, kind: Hashable) -> bool:
        """Returns whether the train op was fed with the last arrays of a kind of runs."""
        return kind in self._fed and self._fed[kind] == self._reads[kind][-1][0]

    def note(self, is_asked_to_stop: bool) -> None:
        """Notes the run before, if it did not finish."""
        self._is_asked_to_stop |= is_asked_to_stop
        if self._running is not None and (self.is_training or self._has_reader):
            self._ended[self._running] = self._number

    def has_ended(self) -> bool:
        """Returns whether the data that trains has ended.

        If a hook has asked to stop, it is no end of the data that a loop feeds.
        """
        if _TRAIN_OP in self._ended:
            return True
        if self._is_asked_to_stop:
            return False
        if _OF_TRAINING in self._ended or any(map(self._was_fed, self._ended)):
            return True
        alone = self._before_each or set()
        if not self._fed and len(alone) == 1 and not alone.isdisjoint(self._ended):
            return True
        error = sys.exc_info()[1]
        if not isinstance(error, tf.errors.OutOfRangeError) or error is self._error:
            return False
        return self._running is None or self._running in self._open_kinds()

    def _open_kinds(self) -> set:
        """Returns the kinds of runs whose data has ended, and may have trained."""
        return (self._unproven | set(self._fed)).intersection(self._ended)

    def warn_of_unknown(self) -> None:
        """Logs which data has ended that may have trained."""
        names = sorted({name for kind in self._open_kinds() for name in kind})
        if names and not self._is_asked_to_stop:
            _logger.warning(_UNKNOWN, ", ".join(names))


def _reference_to(array) -> Callable:
    """Returns a function that returns an array if it still exists; it may be large."""
    return weakref.ref(array) if isinstance(array, np.ndarray) else lambda: array


def _arrays_of(values) -> Iterator:
    """Yields the arrays and scalars in `values`, and the arrays they are views of.

    Not the owner of a session's memory, which knows no weak references.
    """
    for value in tf.nest.flatten(values):
        if isinstance(value, np.ndarray | np.generic | bytes):
            yield value
        while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
            value = value.base
            yield value
