"""A spot check: a look at the numbers of a batch that is cut, before its update.

    rows of some examples         = those of one, of three and of the rest, joined
    gradients of some examples    = the sum of those of one, of three and of the rest

with random gradients of the rows, and the same random numbers in both. It guards the
rules of the analysis, and finds gradients of their own (tf.custom_gradient) that combine
examples, which no analysis of the forward pass can. The examples are spread over the
batch, and looked at again with noise on all features that are no integers. Fingerprints
are compared, so no gradient leaves the session. It changes no variable. Where it fails,
training is refused.
"""

import itertools
import logging
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.functions import operations_with_own_gradients
from estimator_accum.graph.internals import context_of
from estimator_accum.graph.names import DRAWS, SHAPED_DRAWS
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.count import is_out_of_memory
from estimator_accum.microbatch.own_optimizer.derivation import Derivation
from estimator_accum.microbatch.own_optimizer.fingerprints import (
    Fingerprint,
    are_equal,
    of_gradient,
    of_rows,
    rounding_of,
)
from estimator_accum.microbatch.own_optimizer.head import View
from estimator_accum.microbatch.own_optimizer.without_draws import (
    drawing_inside,
    without_draws,
)
from estimator_accum.precision import has_low_precision

_BATCHES = (1, 2, 10, 100, 1000)  # those that are looked at
_MOST_EXAMPLES, _MOST_LATER = 8, 4  # of the first of them, and of the others
_GROUPS = (1, 3)  # and the rest
_SMALLEST = 4e-2  # size of a gradient, relative to the largest one, that rounding has
_SCALES = (1.0, 1e-6, 1e6)  # of arriving gradients; shows where they are clipped
_logger = logging.getLogger("tensorflow.estimator_accum")


class _Look(NamedTuple):
    """One comparison.

    Attributes:
        session: The session itself, without hooks.
        feeds: Feeds of all runs: the examples, and the caller's.
        number: Number of examples.
        is_noisy: Whether there is noise, with which the model may fail.
    """

    session: tf.compat.v1.Session
    feeds: dict
    number: int
    is_noisy: bool


class SpotCheck:
    """Compares micro-batches of one replica with the batch that they are parts of.

    Args:
        batch: The batch.
        derivations: The gradients of which rows arrive at micro-batches.
        collected: Further tensors whose rows are collected, and the axis of these.
        guards: Operations that fail where rows are looked up in other examples.
    """

    def __init__(
        self,
        batch: WholeBatch,
        derivations: list[Derivation],
        collected: list[tuple[tf.Tensor, int]],
        guards: list[tf.Operation],
    ):
        self._batch, self._guards = batch, guards
        gradients, rows, arriving = _results_of(derivations, collected)
        parts = _parts(gradients)
        needed = data_ancestors([t.op for t in (*parts, *(t for t, _ in rows))])
        draws = _draws_with_rows(batch, needed)
        gradients, rows = _of_known_draws(gradients, rows, needed)
        named = [*parts, *(t for t, _ in (*rows, *draws))]
        named += [t for t, _, _ in arriving] + [g for _, g, _ in arriving]
        named += [part.whole for part in batch.parts]
        with tf.control_dependencies(None), tf.name_scope("spot_check"):
            copies = without_draws(needed, named)

            def copy(tensor: tf.Tensor) -> tf.Tensor:
                return copies.get(tensor.ref(), tensor)

            self._rows = {
                tensor.name: of_rows(copy(tensor), axis)
                for tensor, axis in rows
                if copy(tensor).graph.is_fetchable(copy(tensor))
            }
            self._gradients = {
                f"{i} {_parts(g)[0].name}": of_gradient(
                    tf.nest.map_structure(copy, g, expand_composites=True)
                )
                for i, g in enumerate(gradients)
            }
            self._draws = {copy(draw): axis for draw, axis in draws}
            self._shapes = [tf.shape(copy(t)) for t, _, _ in arriving]
            self._arriving = {copy(g): axis for _, g, axis in arriving}
            self._indices = tf.compat.v1.placeholder(tf.int64, [None], "examples")
            self._examples = {
                copy(whole): example
                for whole, example in _examples(batch, self._indices).items()
            }
        self._tolerance = _rounding_in(needed)
        self._has_own_gradients = bool(operations_with_own_gradients(needed))

    def is_due(self, last: int, batch: int) -> bool:
        """Returns whether a batch is to be looked at.

        Args:
            last: Number of the batch of this run that was looked at last; 0 for none.
            batch: The batch's own number.
        """
        return any(last < number <= batch for number in _BATCHES)

    def run(
        self, session: tf.compat.v1.Session, rows: int, size: int, last: int, feeds
    ) -> None:
        """Looks at examples of the batch that is staged.

        Args:
            session: The session itself, without hooks.
            rows: Number of examples in the batch, at least 2.
            size: Number of examples in a micro-batch.
            last: Number of the batch that was looked at last; 0 for none.
            feeds: Further feeds of a micro-batch.

        Raises:
            ValueError: If the micro-batches are not parts of the batch.
        """
        if has_low_precision(session):
            self._tolerance = max(self._tolerance, rounding_of(tf.bfloat16))
        most = _MOST_LATER if last else _MOST_EXAMPLES
        # Beside the numbers that were drawn, half a micro-batch takes no more memory.
        number = min(most, rows, max(2, size // 2 if self._draws else size))
        done = 0
        while done < min(most, rows):
            try:
                number = min(number, max(2, most - done))
                self._look(session, rows, number, last + done / most, feeds)
                done += number
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if number == 2:
                    _logger.warning(
                        "micro-batches: two examples do not fit in memory at once, so "
                        "their gradients were not compared with each example's alone"
                    )
                    return
                number = max(2, number // 2)

    def _look(self, session, rows: int, number: int, turn: float, feeds: dict) -> None:
        """Compares examples as they are, and with noise.

        Args:
            session: The session.
            rows: Number of examples in the batch.
            number: Number of examples to look at.
            turn: Number of the look, which decides which examples are looked at.
            feeds: Further feeds of a micro-batch.
        """
        feeds = {**feeds, self._batch.rows: number, self._batch.num_micro_batches: 1}
        # One of each part of the batch: every n-th example may be alike.
        random = np.random.default_rng(int(turn * _MOST_EXAMPLES))
        within = (np.arange(number) + random.uniform(size=number)) * rows / number
        indices = {self._indices: within.astype(np.int64)}
        examples = session.run(self._examples, indices)
        noisy = {
            whole: value + _noise(value, random)
            for whole, value in examples.items()
            if whole.dtype.is_floating and value.size
        }
        look = _Look(session, feeds | examples, number, is_noisy=False)
        is_first = turn < 1
        for scale in _SCALES if self._has_own_gradients and is_first else _SCALES[:1]:
            self._compare(look, scale, random)
        if not noisy:
            return
        look = look._replace(feeds=feeds | examples | noisy, is_noisy=True)
        try:
            self._compare(look, _SCALES[0], random)
        except tf.errors.OpError as error:
            if is_out_of_memory(error):
                raise
            _logger.debug("micro-batches: no look at noise, which fails: %s", error)

    def _compare(self, look: _Look, scale: float, random) -> None:
        number = look.number
        groups = [size for size in _GROUPS if size < number]
        if sum(groups) >= number:
            groups = groups[:1]
        groups.append(number - sum(groups))
        begins = np.cumsum([0, *groups])
        parts = [slice(*pair) for pair in itertools.pairwise(begins)]
        run = look.session.run
        values_of_all = self._random(look, scale, random)
        fetches = [self._rows, self._gradients, self._guards]
        rows, gradients, _, draws = run(
            [*fetches, list(self._draws)],
            self._feeds(slice(0, number), look, values_of_all),
        )
        values_of_all |= {
            tensor: (value, axis)
            for (tensor, axis), value in zip(self._draws.items(), draws, strict=True)
        }
        apart = [run(fetches, self._feeds(part, look, values_of_all)) for part in parts]
        for name, together in rows.items():
            fingerprints = [group[name] for group, _, _ in apart]
            if not _are_joined(together, fingerprints, self._tolerance, look.is_noisy):
                raise ValueError(
                    "The results of micro-batches must be the rows that the batch at once "
                    f"computes. Received: {name}, whose rows for {number} examples are "
                    f"others than for {' and '.join(map(str, groups))} of them. Declare "
                    "no Python function per_example that is not, or train without "
                    "micro-batches."
                )
        least = scale if self._arriving else 0.0
        gradients_apart = [group for _, group, _ in apart]
        _check_sums(gradients, gradients_apart, number, least, self._tolerance)

    def _random(self, look: _Look, scale: float, random) -> dict:
        """Returns gradients for the rows of all examples, and their axes."""
        if not self._arriving:
            return {}
        one = self._feeds(slice(0, 1), look, {})
        shapes, draws = look.session.run(self._shapes, one), {}
        for (tensor, axis), shape in zip(self._arriving.items(), shapes, strict=True):
            shape = [*shape]
            shape[axis] *= look.number
            is_double = tensor.dtype.size >= tf.float64.size
            drawn = random.standard_normal(
                shape, np.float64 if is_double else np.float32
            )
            drawn *= scale
            draws[tensor] = drawn.astype(tensor.dtype.as_numpy_dtype, copy=False), axis
        return draws

    def _feeds(self, part: slice, look: _Look, values: dict) -> dict:
        """Returns the feeds of a micro-batch of the examples `part`.

        Args:
            part: The examples.
            look: The comparison.
            values: Values for all examples, and the axes of their rows.
        """
        feeds = {
            **look.feeds,
            self._batch.begin: part.start,
            self._batch.size: part.stop - part.start,
        }
        for tensor, (value, axis) in values.items():
            span = value.shape[axis] // look.number
            rows = slice(part.start * span, part.stop * span)
            feeds[tensor] = value[(*[slice(None)] * axis, rows)]
        return feeds


def _results_of(derivations: list[Derivation], collected: list) -> tuple:
    """Returns the results that are compared.

    Returns:
        (Gradients of the batch; (tensor, axis of its rows) of each tensor with rows;
        (tensor, its gradient, axis) of each whose gradient arrives at micro-batches).
    """
    simple = [call for call in derivations if call.is_simple]
    gradients = [g for call in simple for g in call.gradients if g is not None]
    rows = {tensor.ref(): (tensor, axis) for tensor, axis in collected}
    arriving = []
    for call in simple:
        for tensor, gradient in zip(call.rows, call.arriving, strict=True):
            axis = call.view.state(tensor).axis
            rows[tensor.ref()] = tensor, axis
            arriving.append((tensor, gradient, axis))
    return gradients, [*rows.values()], arriving


def _of_known_draws(gradients: list, rows: list, operations) -> tuple[list, list]:
    """Returns the gradients and rows whose random numbers can be drawn again."""
    unknown = drawing_inside(operations, DRAWS - SHAPED_DRAWS)

    def is_known(tensor: tf.Tensor) -> bool:
        return not unknown or unknown.isdisjoint(data_ancestors([tensor.op]))

    return (
        [gradient for gradient in gradients if all(map(is_known, _parts(gradient)))],
        [pair for pair in rows if is_known(pair[0])],
    )


def _rounding_in(operations) -> float:
    """Returns the coarsest rounding of the operations' results."""
    dtypes = {output.dtype for op in operations for output in op.outputs}
    roundings = [rounding_of(dtype) for dtype in dtypes if dtype.is_floating]
    return max(roundings, default=0.0)


def _draws_with_rows(batch: WholeBatch, operations) -> list[tuple[tf.Tensor, int]]:
    """Returns the random numbers that each example has its own of, with their axes."""
    draws = [
        operation.outputs[0]
        for operation in operations
        if operation.type in DRAWS and context_of(operation) is None
    ]
    view = View(batch, draws)  # the graph has other draws since the last one
    states = [(draw, view.state(draw)) for draw in draws]
    return [(draw, state.axis) for draw, state in states if state.kind == "rows"]


def _parts(gradient) -> list[tf.Tensor]:
    return tf.nest.flatten(gradient, expand_composites=True)


def _examples(batch: WholeBatch, indices: tf.Tensor) -> dict[tf.Tensor, tf.Tensor]:
    """Returns examples, by the tensors that hold those of the whole batch.

    Args:
        batch: The batch.
        indices: Numbers of the examples, sorted.
    """
    wholes = {part.sliced.ref(): part.whole for part in batch.parts}
    examples = {}
    for leaf in tf.nest.flatten(batch.sliced):
        sliced = [] if leaf is None else _parts(leaf)
        whole = [wholes[tensor.ref()] for tensor in sliced if tensor.ref() in wholes]
        if not whole:
            continue  # a scalar, which all examples share
        value = tf.nest.pack_sequence_as(leaf, whole, expand_composites=True)
        taken = _take(value, indices)
        examples |= dict(zip(whole, _parts(taken), strict=True))
    return examples


def _take(value, indices: tf.Tensor):
    """Returns some examples of a feature or label."""
    if not isinstance(value, tf.SparseTensor):
        return tf.gather(value, indices)
    is_taken = tf.equal(value.indices[:, :1], indices[None])  # [entries, examples]
    rows = tf.argmax(tf.cast(is_taken, tf.int32), 1)
    places = tf.concat([rows[:, None], value.indices[:, 1:]], 1)
    shape = tf.concat([[tf.size(indices, tf.int64)], value.dense_shape[1:]], 0)
    every = tf.SparseTensor(places, value.values, shape)
    return tf.sparse.retain(every, tf.reduce_any(is_taken, 1))


def _noise(value: np.ndarray, random) -> np.ndarray:
    """Returns noise as large as the differences of the numbers of a feature."""
    wide = value.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    sizes = [np.std(finite), np.max(np.abs(finite))] if finite.size else []
    size = next((size for size in sizes if size), 1.0)
    return (size * random.normal(size=value.shape)).astype(value.dtype)


def _check_sums(
    together: dict, apart: list[dict], number: int, least: float, tolerance: float
) -> None:
    """Raises ValueError if gradients are not the sums of the groups' gradients.

    Args:
        together: Fingerprints of the gradients of all examples, by name.
        apart: Those of each group.
        number: Number of examples.
        least: Size of the gradients that arrive. A model that fits its examples makes
            the others small by subtracting numbers of this size, which leaves their
            rounding.
        tolerance: Largest difference by rounding, relative to the largest number.
    """
    sizes = [fingerprint.size for group in apart for fingerprint in group.values()]
    largest = np.nanmax([least, *sizes])
    for name, whole in together.items():
        groups = [group[name] for group in apart]
        size = sum(group.size for group in groups)
        bound = tolerance * max(size, _SMALLEST * largest)
        if np.isnan(size) or are_equal(
            whole, sum(group.products.astype(np.float64) for group in groups), bound
        ):
            continue
        raise ValueError(
            "The gradient of a batch must be the sum of its micro-batches', for any "
            "gradient of each example's results. Received: "
            f"{name.split()[1]}, which is another one for {number} examples at once. "
            "Look for a tf.custom_gradient that combines examples, or train without "
            "micro-batches."
        )


def _are_joined(
    together: Fingerprint, apart: list[Fingerprint], tolerance: float, is_noisy: bool
) -> bool:
    """Returns whether rows are those of groups, one group behind the other.

    Args:
        together: Fingerprint of the rows.
        apart: Those of each group.
        tolerance: Largest difference by rounding, relative to the largest number.
        is_noisy: Whether numbers that are not finite say nothing.
    """
    every = [together, *apart]
    if is_noisy and not all(fingerprint.is_finite for fingerprint in every):
        return True
    if len({tuple(fingerprint.others) for fingerprint in every}) > 1:
        return False
    joined = np.concatenate([group.products for group in apart]).astype(np.float64)
    if joined.shape != together.products.shape:
        return False
    # A small loss is the difference of larger numbers, whose rounding it has.
    return are_equal(together, joined, tolerance * max(together.size, 1.0))
