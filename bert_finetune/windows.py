"""The order of a training run: which example comes when, and to which replica.

    stream   ->   windows   ->   shares
    epoch after epoch | effective_batch_size examples each | micro-steps x replicas

The stream is a pure function of seed and place: epoch e is the permutation of all
examples that (seed, e) draws, and epochs follow one another without a gap. A window is
what one update sums over, so any cut of it gives the same update: how many micro-steps
and replicas share it changes no weight.

R = replicas, K = micro-steps of a window.
"""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from bert_finetune.batches import Batches


@dataclass(frozen=True)
class Windows:
    """All updates of a training run; see `make_windows`.

    Attributes:
        num_examples: Of an epoch.
        total: Examples of the run [examples].
        batches: How many examples a window has, and who shares them.
        seed: Of the epochs' orders, 0 <= seed < 2**64.
    """

    num_examples: int
    total: int
    batches: Batches
    seed: int

    @property
    def num_updates(self) -> int:
        """Windows of the run, of which the last may have fewer examples."""
        return -(-self.total // self.batches.effective_batch_size)

    def num_micro_steps(self, update: int = 0, micro_step: int = 0) -> int:
        """Returns what is left of the run [micro-steps].

        Args:
            update: Updates that are done.
            micro_step: Micro-steps of the next one that are done.
        """
        if update >= self.num_updates:
            return 0
        whole = self.batches.gradient_accumulation_steps
        before_last = (self.num_updates - 1 - update) * whole
        return before_last + self.last_micro_steps - micro_step

    @property
    def last_micro_steps(self) -> int:
        """K of the last window, which ends where its examples do."""
        return len(self.shares(self.num_updates - 1))

    def examples(self, update: int) -> np.ndarray:
        """Returns a window's examples, int64, in the order of the stream.

        Args:
            update: Of the window, from 0 to num_updates - 1.
        """
        first = update * self.batches.effective_batch_size
        behind = min(first + self.batches.effective_batch_size, self.total)
        parts = []
        while first < behind:  # more than one turn where epochs meet
            epoch, offset = divmod(first, self.num_examples)
            order = _remembered_order(self.num_examples, self.seed, epoch)
            parts.append(order[offset : offset + behind - first])
            first += len(parts[-1])
        return np.concatenate(parts)

    def shares(self, update: int) -> list[list[np.ndarray]]:
        """Returns a window's examples by micro-step and replica, K lists of R arrays.

        Share number micro_step * R + replica of a whole window begins at example
        number * effective_batch_size // (K * R): shares differ by one example at most.
        The last window is the beginning of one: its last shares may be empty, but for
        no micro-step are all of them.
        """
        examples, replicas = self.examples(update), self.batches.num_replicas
        number = self.batches.gradient_accumulation_steps * replicas
        bounds = np.arange(1, number) * self.batches.effective_batch_size // number
        shares = np.split(examples, np.minimum(bounds, len(examples)))
        steps = [shares[i : i + replicas] for i in range(0, number, replicas)]
        return [step for step in steps if any(map(len, step))]

    def stream(
        self, replicas: Iterable[int] = (0,), update: int = 0, micro_step: int = 0
    ) -> Iterator[np.ndarray]:
        """Yields what some replicas take, int64 [examples], one after the other.

            micro-step 0: replicas[0], replicas[1], ...; micro-step 1: ...

        Args:
            replicas: Those of one process, by number.
            update: Updates that are done: their windows are skipped unmade.
            micro_step: Micro-steps of the next one that are done.
        """
        for number in range(update, self.num_updates):
            for step in self.shares(number)[micro_step:]:
                for replica in replicas:
                    yield step[replica]
            micro_step = 0


def make_windows(
    num_examples: int, num_train_epochs: float, batches: Batches, seed: int
) -> Windows:
    """Returns the order of a run.

    Args:
        num_examples: Of an epoch, >= 1.
        num_train_epochs: May have a fraction: the last epoch is then cut short.
        batches: How many examples a window has, and who shares them.
        seed: Of the epochs' orders.

    Raises:
        ValueError: If a number is out of its range.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(
            f"`seed` must be an integer, 0 <= seed < 2**64. Received: {seed}."
        )
    # Rounded first: 100 * 0.29 is 28.999999999999996.
    total = round(num_examples * num_train_epochs, 6)
    if not 1 <= total < math.inf:
        raise ValueError(
            "`--num_train_epochs` must be finite and reach one example. Received: "
            f"{num_train_epochs} of {num_examples} examples. "
            "Use 3.0, google-research/bert's own."
        )
    return Windows(num_examples, int(total), batches, seed)


def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the permutation of one epoch, int64 [examples]."""
    # Sorted random numbers, not a shuffle: NumPy promises the same raw numbers for ever,
    # but not the same shuffle, and a run may go on under another NumPy.
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return np.argsort(bits.random_raw(num_examples), kind="stable")


# An epoch has many windows; where two epochs meet, one has both.
_remembered_order = functools.lru_cache(maxsize=2)(epoch_order)
