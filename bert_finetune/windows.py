"""Order of a training run's examples.

    stream   ->   windows   ->   sort by length   ->   shares
    epoch after epoch | effective_batch_size examples each | | micro-steps x replicas

The stream is a pure function of seed and place: epoch e is the permutation of all
examples drawn from (seed, e), and epochs follow one another without a gap; where a run
that was trained on had ended, a window ends. An update
sums over its window, so neither the number of micro-steps and replicas nor the order
inside the window changes the update. Windows are sorted by length, so that examples of
similar length are padded together.

R = replicas, K = micro-steps of a window.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from estimator_accum.programs.batches import Batches

# Time of a padding token and of a micro-step, in tokens: only attention computes on
# padding, and a micro-step passes over the accumulators. The sum tells CoLA's times of an
# update, split by 320 to 2,048 tokens, to 5 %.
_PADDING_TOKEN = 0.125
_MICRO_STEP = 80
_SAMPLED_UPDATES = 50


@dataclass(frozen=True, eq=False)
class Windows:
    """All updates of a training run; see `make_windows`.

    Attributes:
        num_examples: Number of examples of an epoch.
        ends: Number of examples, over all epochs, at the end of the run, after those at
            the end of each shorter one that was trained on. A window ends there.
        batches: Size of a window and division of its examples.
        seed: Random seed of the epochs' orders, 0 <= seed < 2**64.
        lengths: Length of each example [tokens], by which windows are sorted; None
            leaves them unsorted.
        tokens: Most tokens of one replica's micro-batch, padding included; None splits by
            examples.
    """

    num_examples: int
    ends: tuple[int, ...]
    batches: Batches
    seed: int
    lengths: np.ndarray | None = None
    tokens: int | None = None

    @property
    def num_updates(self) -> int:
        """Number of windows of the run; one at an end may have fewer examples."""
        return sum(number for number, *_ in self._parts())

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Yields windows, first example and end of each part of the run."""
        start = 0
        for end in self.ends:
            yield -(-(end - start) // self.batches.effective_batch_size), start, end
            start = end

    def _range(self, update: int) -> tuple[int, int]:
        """Returns the half-open range of a window's examples in the stream."""
        size = self.batches.effective_batch_size
        for number, start, end in self._parts():
            if update < number:
                return start + update * size, min(start + (update + 1) * size, end)
            update -= number
        raise IndexError(update)

    @property
    def is_uneven(self) -> bool:
        """True if K may differ in more windows than the last one."""
        return self.tokens is not None or len(self.ends) > 1

    def num_micro_steps(self, update: int = 0, micro_step: int = 0) -> int:
        """Returns the number of micro-steps that are left of the run.

        Args:
            update: Updates that are done.
            micro_step: Micro-steps of the next update that are done.
        """
        if self.is_uneven:
            return int(self.micro_steps_by_update[update:].sum()) - micro_step
        if update >= self.num_updates:
            return 0
        whole = self.batches.gradient_accumulation_steps
        before_last = (self.num_updates - 1 - update) * whole
        return before_last + self.last_micro_steps - micro_step

    @property
    def last_micro_steps(self) -> int:
        """K of the last window, which ends with the last of its examples."""
        return len(self.shares(self.num_updates - 1))

    @functools.cached_property
    def micro_steps_by_update(self) -> np.ndarray:
        """K of every window, int32 [updates]."""
        bounds = (len(self._bounds(update)) for update in range(self.num_updates))
        return np.fromiter(bounds, np.int32, self.num_updates) + 1

    def examples(self, update: int) -> np.ndarray:
        """Returns a window's examples, int64, in the order of the stream.

        Args:
            update: Number of the window, from 0 to num_updates - 1.
        """
        first, behind = self._range(update)
        parts = []
        while first < behind:  # more than one pass where epochs meet
            epoch, offset = divmod(first, self.num_examples)
            order = epoch_order(self.num_examples, self.seed, epoch)
            parts.append(order[offset : offset + behind - first])
            first += len(parts[-1])
        return np.concatenate(parts)

    def shares(self, update: int) -> list[list[np.ndarray]]:
        """Returns a window's examples by micro-step and replica, K lists of R arrays.

        The window is split into K consecutive parts, and the replicas take turns in each:
        shares of a full window differ by at most one example, unless they are split by
        tokens. A window with fewer examples ends early; some shares of its last
        micro-step may be empty, but not all.
        """
        parts = np.split(self.sorted_examples(update), self._bounds(update))
        replicas = self.batches.num_replicas
        return [[part[r::replicas] for r in range(replicas)] for part in parts]

    def sorted_examples(self, update: int) -> np.ndarray:
        """Returns a window's examples, from the shortest to the longest."""
        examples = self.examples(update)
        if self.lengths is None:
            return examples
        return examples[np.argsort(self.lengths[examples], kind="stable")]

    def _bounds(self, update: int) -> np.ndarray:
        """Returns the start of each of the window's micro-steps except the first."""
        if self.tokens is not None:
            return bounds_by_tokens(
                self.lengths[self.sorted_examples(update)],
                self.tokens,
                self.batches.num_replicas,
            )
        whole, steps = (
            self.batches.effective_batch_size,
            self.batches.gradient_accumulation_steps,
        )
        bounds = np.arange(1, steps) * whole // steps
        first, behind = self._range(update)
        return bounds[bounds < behind - first]

    def stream(
        self,
        replicas: Iterable[int] = (0,),
        update: int = 0,
        micro_step: int = 0,
        stride: int | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields the examples of some replicas' micro-batches, each int64 [examples].

            micro-step 0: replicas[0], replicas[1], ...; micro-step 1: ...

        Args:
            replicas: Numbers of one process's replicas.
            update: Updates that are done; their windows are skipped without being made.
            micro_step: Micro-steps of the next update that are done.
            stride: Distance between two windows, from the last ones back to the first
                ones without an end; None is each window once.
        """
        numbers = range(update, self.num_updates)
        if stride is not None:
            numbers = (n % self.num_updates for n in itertools.count(update, stride))
        for number in numbers:
            for step in self.shares(number)[micro_step:]:
                for replica in replicas:
                    yield step[replica]
            micro_step = 0


def make_windows(
    num_examples: int,
    num_train_epochs: float,
    batches: Batches,
    seed: int,
    lengths: np.ndarray | None = None,
    tokens: int | None = None,
    earlier_epochs: Sequence[float] = (),
) -> Windows:
    """Returns the windows of a training run.

    Args:
        num_examples: Number of examples of an epoch, >= 1.
        num_train_epochs: Number of epochs; a fraction shortens the last epoch.
        batches: Size of a window and division of its examples.
        seed: Random seed of the epochs' orders, 0 <= seed < 2**64.
        lengths: Length of each example [tokens], by which windows are sorted; None
            leaves them unsorted.
        tokens: Most tokens of a replica's micro-batch; needs `lengths`.
        earlier_epochs: Number of epochs of each shorter run that was trained on, in
            ascending order.

    Raises:
        ValueError: If a number is out of its range.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(
            f"`seed` must be an integer, 0 <= seed < 2**64. Received: {seed}."
        )
    # Rounded first: 100 * 0.29 is 28.999999999999996.
    ends = [
        round(num_examples * epochs, 6)
        for epochs in (*earlier_epochs, num_train_epochs)
    ]
    if not 1 <= ends[-1] < math.inf:
        raise ValueError(
            "`--num_train_epochs` must be finite and reach one example. Received: "
            f"{num_train_epochs} of {num_examples} examples. "
            "Use 3.0, google-research/bert's own."
        )
    if tokens is not None and tokens < lengths.max():
        raise ValueError(
            "`--tokens_per_micro_batch` must hold the longest example. Received: "
            f"{tokens}, for examples of up to {lengths.max()} tokens. Use a larger one, "
            "or a smaller --max_seq_length."
        )
    return Windows(num_examples, tuple(map(int, ends)), batches, seed, lengths, tokens)


def bounds_by_tokens(
    lengths: np.ndarray, tokens: int, num_replicas: int = 1
) -> np.ndarray:
    """Returns the bounds of the fewest parts, filled with the shortest first.

    Args:
        lengths: Length of each example [tokens], ascending.
        tokens: Most tokens of one replica's share of a part, padding included.
        num_replicas: Replicas that share each part.
    """
    bounds, first = [], 0
    for i, length in enumerate(lengths.tolist()):
        rows = -(-(i + 1 - first) // num_replicas)
        if rows * length > tokens and i > first:
            bounds.append(i)
            first = i
    return np.array(bounds, np.int64)


def with_fastest_tokens(windows: Windows, max_seq_length: int) -> Windows:
    """Returns the windows, split by the number of tokens that is expected to be fastest.

        time = tokens + padding / 8 + 80 x micro-steps

    over the first updates. Candidates are 1, 2, 4, ... to 32 examples of
    `max_seq_length` tokens; the smallest of equals needs the least memory.

    Args:
        windows: Windows of one replica with lengths, split by examples.
        max_seq_length: Most tokens of an example.
    """
    updates = range(min(_SAMPLED_UPDATES, windows.num_updates))
    sampled = [windows.lengths[windows.sorted_examples(update)] for update in updates]

    def time(tokens: int) -> float:
        parts = [
            part
            for lengths in sampled
            for part in np.split(lengths, bounds_by_tokens(lengths, tokens))
        ]
        padded = sum(len(part) * int(part[-1]) for part in parts)
        # The tokens themselves are the same in every split.
        return _PADDING_TOKEN * padded + _MICRO_STEP * len(parts)

    tokens = min((max_seq_length << power for power in range(6)), key=time)
    return dataclasses.replace(windows, tokens=tokens)


# An epoch has many windows; where two epochs meet, a window needs both orders.
@functools.lru_cache(maxsize=2)
def epoch_order(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the permutation of one epoch, int64 [examples]."""
    # Sorted random numbers, not a shuffle: NumPy guarantees that the raw numbers never
    # change, but not the shuffle, and a run may resume under another NumPy version.
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return np.argsort(bits.random_raw(num_examples), kind="stable")
