"""Adaptive number of micro-batches per batch."""

import json
import logging

import tensorflow as tf

_logger = logging.getLogger("tensorflow.estimator_accum")


class MicroBatchCount:
    """Number of micro-batches, adapted to memory and kept in the output folder.

    Args:
        initial: First number, >= 1, if there is no file at `path`.
        maximum: Largest number; None sets no limit.
        grow_after: Updates without an out-of-memory error after which half as many
            micro-batches are tried; None never tries.
        path: JSON file that keeps the number; None keeps it in memory only.
    """

    def __init__(
        self,
        initial: int,
        maximum: int | None,
        grow_after: int | None,
        path: str | None,
    ):
        self._maximum, self._grow_after, self._path = maximum, grow_after, path
        self._updates = 0
        self._is_trial = False  # whether memory has yet to allow this number
        self.value = initial if path is None else _read(path, initial)
        if maximum is not None:
            self.value = min(self.value, maximum)

    def increase(self, rows: int, place: str) -> None:
        """Doubles the number, after memory ran out.

        Args:
            rows: Number of examples in the batch, the upper limit of micro-batches.
            place: Name of the batch in messages, such as "update 7".

        Raises:
            ValueError: If `maximum` allows no more.
        """
        more = min(2 * self.value, rows, self._maximum or rows)
        if more <= self.value:
            raise ValueError(
                "`max_micro_batches` must allow micro-batches that fit in memory. "
                f"Received: {self._maximum}, and memory ran out at {place} "
                f"with {-(-rows // self.value)} of {rows} examples at once. Allow more, "
                "or use smaller batches."
            )
        if self._is_trial:  # the trial failed: wait longer for the next one
            self._grow_after *= 2
        self._change(more)
        _logger.warning(
            "micro-batches %d -> %d: out of memory at %s; the batch is retried",
            *self._changed,
            place,
        )

    def count_update(self, update: int) -> bool:
        """Counts an update that fitted in memory; returns whether `value` changed."""
        self._updates += 1
        self._is_trial = False
        if (
            self._grow_after is None
            or self._updates < self._grow_after
            or self.value == 1
        ):
            return False
        waited = self._updates
        self._change(-(-self.value // 2))
        self._is_trial = True
        _logger.info(
            "micro-batches %d -> %d: %d updates until update %d fitted in memory",
            *self._changed,
            waited,
            update,
        )
        return True

    def _change(self, value: int) -> None:
        self._changed = self.value, value
        self.value, self._updates = value, 0
        if self._path is not None:
            _write(self._path, value)


class FixedCount:
    """Fixed number of micro-batches, chosen by the user."""

    def __init__(self, value: int):
        self.value = value

    def count_update(self, update: int) -> bool:
        """Returns False: the number never changes."""
        del update
        return False


def _read(path: str, initial: int) -> int:
    if not tf.io.gfile.exists(path):
        return initial
    try:
        with tf.io.gfile.GFile(path) as file:
            value = json.loads(file.read())["micro_batches"]
        if isinstance(value, int) and value >= 1:
            return value
        received = repr(value)
    except (ValueError, KeyError, TypeError) as error:
        received = repr(error)
    raise ValueError(
        f'{path} must hold {{"micro_batches": n}} with n >= 1, as an earlier run left '
        f"it. Received: {received}. Remove the file to begin anew."
    )


def _write(path: str, value: int) -> None:
    partial = f"{path}.partial"
    with tf.io.gfile.GFile(partial, "w") as file:
        file.write(json.dumps({"micro_batches": value}) + "\n")
    tf.io.gfile.rename(partial, path, overwrite=True)
