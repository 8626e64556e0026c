"""A spot check: a look at the numbers of a batch that is split, before its update.

    F(a, b) + F(a', b')    = F(a', b) + F(a, b')    gradients of four micro-batches
    rows of a in F(a, b)   = those in F(a, b')
    F(a, b)                = the sum of smaller groups' gradients, their rows joined

with random gradients of the rows, and the same random numbers in all, and the same
moments if each micro-batch is normalized by its own (fed_moments.py). Entries of examples,
of which there may be any number, are compared like rows; their gradients are a function
of them. a, b, a' and b' are examples from all parts of the batch; a' and b' have noise on
dense features that are no integers. It guards the rules of the analysis, and finds
gradients of their own (tf.custom_gradient) that combine examples, which no analysis of the
forward pass can.

The four micro-batches have the same size, so the same code multiplies in all of them: an
example's own numbers are the same in any precision (TF32, bfloat16), and only sums over
examples are rounded in different ways. The bound is the rounding of such a sum. Where
such sums are multiplied (late_products.py), they are judged by it, and products of them
by that of bfloat16; so are lists of entries, and all gradients beside these, on a GPU:
lists have other lengths, for which it may multiply by other code. Groups have other sizes,
for which code of other precision may multiply; a number near a step (ReLU, quantization,
argmax) may fall to its other side. Their bound is a share of the numbers themselves: a
dependence on the number of examples, or on places in the batch, is larger.

Fingerprints are compared, so no gradient leaves the session. It changes no variable.
Training is refused if two looks fail, at different examples.
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
from estimator_accum.microbatch.own_optimizer.fed_moments import (
    feed_moments,
    tensors_of_moments,
)
from estimator_accum.microbatch.own_optimizer.fingerprints import (
    Fingerprint,
    multiplies_by_fewer_digits,
    of_gradient,
    of_rows,
    ratio_to_rounding,
    rounding_of,
)
from estimator_accum.microbatch.own_optimizer.head import View, axis_of_rows
from estimator_accum.microbatch.own_optimizer.late_products import (
    factors_of_late_products,
)
from estimator_accum.microbatch.own_optimizer.without_draws import (
    drawing_inside,
    without_draws,
)
from estimator_accum.rows.rules.blocks import blocks_of

_BATCHES = (1, 2, 10, 100, 1000)  # those that are looked at
_EXAMPLES = 4  # of a look, beside as many others in their place
_LOOKS, _FAILURES = 3, 2  # at one batch at most, and those of them that refuse it
_GROUPS = (1, 1)  # and the rest
_SHARE = 0.25  # of rows; those of groups that differ by more are refused
# The same of sums. Where rows change by c, so do c of the ReLUs: gradients by its root.
_SHARE_OF_SUMS, _PER_ROOT = 1e-2, 16
_SHARE_OF_NOTHING = 0.6  # of sums if nothing arrives; at most, whatever the change
_ALL_OTHERS = 3  # place of (a', b')
_FACTOR = 4  # of gradients of the other examples
_SMALLEST = 4e-2  # size of a gradient, relative to the largest one, that rounding has
_SMALLEST_ROWS = 1e-2  # the same for rows, relative to 1 if they are smaller
_SCALES = (1.0, 1e-6, 1e6)  # of arriving gradients; shows where they are clipped
_NOTHING = 0.0  # another one; shows what each micro-batch would add again
_NO_SUM = (
    "The gradients of the micro-batches must add up to the batch's, for any gradient of "
    "each example's results. Received: {}, which differs {}. Look for a "
    "tf.custom_gradient that combines examples, or train without micro-batches."
)
_NO_ROWS = (
    "The results of micro-batches must be the rows that the unsplit batch computes. "
    "Received: {}, whose rows {} of the examples. Declare no Python function per_example "
    "that is not, or train without micro-batches."
)
_logger = logging.getLogger("tensorflow.estimator_accum")


class _Look(NamedTuple):
    """One comparison.

    Attributes:
        session: The session itself, without hooks.
        feeds: Feeds of all runs: the examples, and the caller's.
        number: Number of examples in each of the four micro-batches.
        is_noisy: Whether there is noise, with which the model may fail.
        scale: Size of the gradients that arrive.
    """

    session: tf.compat.v1.Session
    feeds: dict
    number: int
    is_noisy: bool
    scale: float

    @property
    def is_of_b(self) -> np.ndarray:
        """Returns which examples of a micro-batch are b; the others are a."""
        return np.arange(self.number) >= self.number // 2


class _Difference(ValueError):
    """A failed look."""


class _NotFinite(Exception):
    """Noise makes numbers that are not finite, which say nothing."""


class SpotCheck:
    """Compares micro-batches of one replica with the batch that they are parts of.

    Args:
        batch: The batch.
        derivations: The gradients of which rows arrive at micro-batches.
        collected: Further tensors whose rows are collected, and the axis of these; None
            of entries.
        guards: Operations that fail where the analysis took a wrong fact.
    """

    def __init__(
        self,
        batch: WholeBatch,
        derivations: list[Derivation],
        collected: list[tuple[tf.Tensor, int | None]],
        guards: list[tf.Operation],
    ):
        self._batch, self._guards = batch, guards
        gradients, rows, arriving = _results_of(derivations, collected)
        factors, self._late = _late_gradients(gradients)
        gradients += factors
        parts = _parts(gradients)
        needed = data_ancestors([t.op for t in (*parts, *(t for t, _ in rows))])
        draws = _draws_with_rows(batch, needed)
        gradients, rows = _of_known_draws(gradients, rows, needed)
        named = [*parts, *(t for t, _ in rows), *(t for t, *_ in draws)]
        named += [t for t, _, _ in arriving] + [g for _, g, _ in arriving]
        named += [part.whole for part in batch.parts]
        uniques = [op.outputs[0] for op in needed if op.type in ("Unique", "UniqueV2")]
        named += uniques
        moments = tensors_of_moments(needed)
        with tf.control_dependencies(None), tf.name_scope("spot_check"):
            copies = without_draws(needed, [*named, *moments], always=bool(moments))
            self._moments = [(t, None) for t in feed_moments(moments, copies)]

            def copy(tensor: tf.Tensor) -> tf.Tensor:
                return copies.get(tensor.ref(), tensor)

            self._rows = {
                tensor.name: of_rows(copy(tensor), axis or 0)
                for tensor, axis in rows
                if copy(tensor).graph.is_fetchable(copy(tensor))
            }
            lists = [tensor.name for tensor, axis in rows if axis is None]
            self._lists = {
                name: self._rows[name] for name in lists if name in self._rows
            }
            self._gradients = {
                f"{i} {_parts(g)[0].name}": of_gradient(
                    tf.nest.map_structure(copy, g, expand_composites=True)
                )
                for i, g in enumerate(gradients)
            }
            # Fetched, since TensorFlow's graph optimizer would have lookups of sparse
            # tensors read the rows of unique ids by the ids themselves.
            copied = [copy(tensor).op for tensor in uniques]
            self._uniques = [op for op in copied if op.graph.is_fetchable(op)]
            self._draws = [(copy(draw), axis) for draw, axis, _ in draws]
            self._blocks = {copy(draw).name: n for draw, _, n in draws if n > 1}
            self._entries = [
                (copy(t), copy(g)) for t, g, axis in arriving if axis is None
            ]
            arriving = [row for row in arriving if row[2] is not None]
            self._shapes = [tf.shape(copy(t)) for t, _, _ in arriving]
            self._arriving = [(copy(g), axis) for _, g, axis in arriving]
            self._indices = tf.compat.v1.placeholder(tf.int64, [None], "examples")
            self._examples, self._takes_noise = {}, []
            for whole, example, is_dense in _examples(batch, self._indices):
                self._examples[copy(whole).name] = example
                if is_dense and whole.dtype.is_floating:
                    self._takes_noise.append(copy(whole).name)
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
        self, session, rows: int, size: int, last: int, feeds: dict, is_low: bool
    ) -> None:
        """Looks at examples of the batch that is staged.

        Args:
            session: The session itself, without hooks.
            rows: Number of examples in the batch, at least 2.
            size: Number of examples in a micro-batch.
            last: Number of the batch that was looked at last; 0 for none.
            feeds: Further feeds of a micro-batch.
            is_low: Whether the session multiplies in low precision.

        Raises:
            ValueError: If the micro-batches are not parts of the batch.
        """
        if is_low:
            self._tolerance = max(self._tolerance, rounding_of(tf.bfloat16))
        most = min(_EXAMPLES, rows)
        # Beside the numbers that were drawn, half a micro-batch takes no more memory.
        number = min(most, max(2, size // 2 if self._draws else size))
        done = 0
        while done < most:
            number = min(number, max(2, most - done))
            try:
                self._look(session, rows, number, (last, done), feeds)
                done += number
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if number == 2:
                    _logger.warning(
                        "micro-batches: two examples do not fit in memory together, so "
                        "their gradients were not compared with each example's alone"
                    )
                    return
                number = max(2, number // 2)

    def _look(
        self, session, rows: int, number: int, turn: tuple[int, int], feeds: dict
    ) -> None:
        """Compares examples, and others if they fail: one look may fail by rounding.

        Args:
            session: The session.
            rows: Number of examples in the batch.
            number: Number of examples to look at.
            turn: Number of the batch that was looked at last, and of the examples of
                this one; they decide which examples are looked at.
            feeds: Further feeds of a micro-batch.
        """
        failures = 0
        for attempt in range(_LOOKS):
            random = np.random.default_rng([*turn, attempt])
            try:
                self._look_once(session, rows, number, turn == (0, 0), feeds, random)
                if not failures:
                    return
            except _Difference as error:
                failures += 1
                if failures == _FAILURES:
                    raise ValueError(str(error)) from None
                _logger.debug("micro-batches: a look at other examples: %s", error)

    def _look_once(
        self, session, rows: int, number: int, is_first: bool, feeds: dict, random
    ) -> None:
        # One of each part of the batch: every n-th example may be alike.
        within = (np.arange(number) + random.uniform(size=number)) * rows / number
        taken = within.astype(np.int64)
        others = (taken + random.integers(1, rows)) % rows
        feeds = {**feeds, self._batch.rows.name: 4 * number}
        feeds[self._batch.num_micro_batches.name] = 1
        look = _Look(session, feeds, number, is_noisy=False, scale=_SCALES[0])
        are_others = _are_others(look.is_of_b)
        indices = np.where(are_others, others, taken).reshape(-1)
        examples = session.run(self._examples, {self._indices.name: indices})
        dense = _numbers({name: examples[name] for name in self._takes_noise})
        noisy = {
            name: value + _noise(value, are_others, random)
            for name, value in dense.items()
            if value.size
        }
        looks = [look._replace(feeds=feeds | examples)]
        if noisy:
            looks.insert(0, looks[0]._replace(feeds=feeds | examples | noisy))
            looks[0] = looks[0]._replace(is_noisy=True)
        for look in looks:
            try:
                self._compare(look, is_first and self._has_own_gradients, random)
                return
            except (tf.errors.OpError, _NotFinite) as error:
                if is_out_of_memory(error) or not look.is_noisy:
                    raise
                _logger.debug("micro-batches: no look at noise, which fails: %s", error)

    def _compare(self, look: _Look, is_scaled: bool, random) -> None:
        """Raises _Difference if numbers fail."""
        for scale in _SCALES if is_scaled else _SCALES[:1]:
            scaled = look._replace(scale=scale)
            values = self._random(scaled, random)
            self._compare_groups(scaled, values, self._exchange(scaled, values))
        if is_scaled and self._has_arriving:
            scaled = look._replace(scale=_NOTHING)
            values |= self._random(scaled, random)
            self._compare_groups(scaled, values, self._run(scaled, _ALL_OTHERS, values))

    @property
    def _has_arriving(self) -> bool:
        return bool(self._arriving or self._entries)

    def _exchange(self, look: _Look, values: dict) -> tuple[dict, dict]:
        """Compares micro-batches of one size, in which examples are exchanged.

        Returns:
            Fingerprints of the rows and gradients of (a', b').
        """
        self._draw(look, values)
        lengths = [self._lengths(look, i, values) for i in (0, 1)]
        results = [self._run(look, place, values) for place in (0, 1, 2, _ALL_OTHERS)]
        coarse = max(self._tolerance, rounding_of(tf.bfloat16))
        are_coarse = self._lists and multiplies_by_fewer_digits()
        usual = coarse if are_coarse else self._tolerance
        for name in results[0][0]:
            fingerprints = [rows[name] for rows, _ in results]
            tolerance, of_a = self._tolerance, _lengths_of_a(fingerprints, look.is_of_b)
            if name in self._lists:
                tolerance, of_a = usual, [lengths[i % 2][name] for i in range(4)]
            ratio = _ratio_of_same_rows(fingerprints, of_a, tolerance)
            _judge(ratio, _NO_ROWS, name, f"change with {look.number - 1} others")
        least = look.scale if self._has_arriving else 0.0
        gradients = [gradients for _, gradients in results]
        tolerances = {
            name: coarse if _tensor_of(name) in self._late else usual
            for name in gradients[0]
        }
        _judge_exchanged_sums(gradients, least, tolerances)
        return results[-1]

    def _compare_groups(self, look: _Look, values: dict, together: tuple) -> None:
        """Compares (a', b') with groups of its examples.

        Args:
            look: The comparison.
            values: Values for the examples.
            together: Fingerprints of the rows and gradients of (a', b').
        """
        number = look.number
        groups = [size for size in _GROUPS if size < number][: number - 1]
        groups.append(number - sum(groups))
        begins = np.cumsum([0, *groups])
        spans = [slice(*pair) for pair in itertools.pairwise(begins)]
        apart = [self._run(look, _ALL_OTHERS, values, span=span) for span in spans]
        rows, gradients = together
        change = 0.0
        for name, whole in rows.items():
            fingerprints = [group[name] for group, _ in apart]
            parts = len(whole.products) if name in self._lists else number
            ratio, change_of_rows = _joined_rows(whole, fingerprints, parts)
            difference = f"for {number} are others than for {_listed(groups)}"
            _judge(ratio, _NO_ROWS, name, difference)
            change = max(change, change_of_rows)
        if self._has_own_gradients:  # of rows, TensorFlow derives sums
            least = look.scale if self._has_arriving else 0.0
            share = max(_SHARE_OF_SUMS, _PER_ROOT * np.sqrt(change))
            if look.scale == _NOTHING:  # most gradients are exactly 0
                share = min(share, _SHARE_OF_NOTHING)
            _judge_sums(gradients, [group for _, group in apart], least, share)

    def _run(
        self,
        look: _Look,
        place: int,
        values: dict,
        span: slice | None = None,
    ) -> tuple[dict, dict]:
        """Returns the fingerprints of rows and of gradients.

        Args:
            look: The comparison.
            place: The micro-batch, one of four.
            values: Values for the examples of a micro-batch by name, their axes, which are
                None for moments, and the factor of those of other examples.
            span: The examples of the micro-batch to run; None runs all.
        """
        feeds = self._feeds(look, place, values, span)
        if self._entries:
            entries = look.session.run([tensor for tensor, _ in self._entries], feeds)
            for (_, gradient), value in zip(self._entries, entries, strict=True):
                feeds[gradient.name] = _gradient_of(np.asarray(value), look.scale)
        fetches = [self._rows, self._gradients, [*self._guards, *self._uniques]]
        rows, gradients, _ = look.session.run(fetches, feeds)
        rows, gradients = _numbers((rows, gradients))
        if look.is_noisy and not _are_finite(rows, gradients):
            raise _NotFinite("numbers that are not finite")
        return rows, gradients

    def _draw(self, look: _Look, values: dict) -> None:
        """Adds random numbers and moments of (a, b) to `values`, see `_run`."""
        draws, feeds = [*self._draws, *self._moments], self._feeds(look, 0, values)
        numbers = look.session.run([tensor for tensor, _ in draws], feeds)
        for (tensor, axis), value in zip(draws, numbers, strict=True):
            if blocks := self._blocks.get(tensor.name):  # of all examples
                value, axis = np.stack(np.split(np.asarray(value), blocks)), 1
            values[tensor.name] = value, axis, 1

    def _lengths(self, look: _Look, place: int, values: dict) -> dict[str, int]:
        """Returns the number of products of a's entries in a micro-batch, by name."""
        feeds = self._feeds(look, place, values, slice(0, int(sum(~look.is_of_b))))
        fingerprints = look.session.run(self._lists, feeds)
        return {name: len(entries.products) for name, entries in fingerprints.items()}

    def _feeds(
        self, look: _Look, place: int, values: dict, span: slice | None = None
    ) -> dict:
        """Returns the feeds of a micro-batch, see `_run`."""
        span = span or slice(0, look.number)
        begin = place * look.number
        feeds = {**look.feeds, self._batch.begin.name: begin + span.start}
        feeds[self._batch.size.name] = span.stop - span.start
        are_others = _are_others(look.is_of_b)[place]
        for name, (value, axis, factor) in values.items():
            if axis is None:
                feeds[name] = value
                continue
            width = value.shape[axis] // look.number
            rows = slice(span.start * width, span.stop * width)
            part = value[(*[slice(None)] * axis, rows)]
            if factor != 1 and place:
                shape = [1] * axis + [-1] + [1] * (value.ndim - axis - 1)
                factors = np.where(are_others[span], factor, 1).repeat(width)
                part = part * factors.reshape(shape).astype(part.dtype)
            if name in self._blocks:
                part = np.concatenate(part)
            feeds[name] = part
        return feeds

    def _random(self, look: _Look, random) -> dict:
        """Returns gradients for the rows of all examples, and their axes and factors."""
        if not self._arriving:
            return {}
        one = {**look.feeds, self._batch.begin.name: 0, self._batch.size.name: 1}
        shapes, draws = look.session.run(self._shapes, one), {}
        for (tensor, axis), shape in zip(self._arriving, shapes, strict=True):
            shape = [*shape]
            shape[axis] *= look.number
            is_double = tensor.dtype.size >= tf.float64.size
            drawn = random.standard_normal(
                shape, np.float64 if is_double else np.float32
            )
            drawn *= look.scale
            drawn = drawn.astype(tensor.dtype.as_numpy_dtype, copy=False)
            draws[tensor.name] = drawn, axis, _FACTOR
        return draws


def _numbers(values):
    """Returns the values of a run, in any structure, as NumPy's arrays and numbers."""
    return tf.nest.map_structure(np.asarray, values)


def _gradient_of(entries: np.ndarray, scale: float) -> np.ndarray:
    """Returns gradients that entries of any size have beside any others, 0.25 to 2.25."""
    wide = entries.astype(np.result_type(entries.dtype, np.float64))
    wide = np.where(np.isfinite(wide), wide, 0)
    return (scale * (1.25 + np.sin(2 * np.arcsinh(wide)))).astype(entries.dtype)


def _are_others(is_of_b: np.ndarray) -> np.ndarray:
    """Returns where (a, b), (a', b), (a, b') and (a', b') have a' or b'."""
    return np.array([is_of_b & False, ~is_of_b, is_of_b, is_of_b | True])


def _results_of(derivations: list[Derivation], collected: list) -> tuple:
    """Returns the results that are compared.

    Returns:
        (Gradients of the batch; (tensor, axis of its rows) of each tensor with rows;
        (tensor, its gradient, axis) of each whose gradient arrives at micro-batches).
        The axis is None for entries.
    """
    simple = [call for call in derivations if call.is_simple]
    gradients = [g for call in simple for g in call.gradients if g is not None]
    rows = {tensor.ref(): (tensor, axis) for tensor, axis in collected}
    arriving = []
    for call in simple:
        for tensor, gradient in zip(call.rows, call.arriving, strict=True):
            axis = axis_of_rows(call.view, tensor)
            rows[tensor.ref()] = tensor, axis
            arriving.append((tensor, gradient, axis))
    return gradients, [*rows.values()], arriving


def _late_gradients(gradients: list) -> tuple[list, set[str]]:
    """Returns sums that are multiplied, and the names of gradients that are products.

    Those of float32 alone: of no other type is a product rounded to fewer digits.
    """
    factors, late = {}, set()
    for parts in map(_parts, gradients):
        tensors = factors_of_late_products(parts)
        if tensors is not None and parts[0].dtype == tf.float32:
            late.add(parts[0].name)
            tensors = (t for t in tensors if context_of(t.op) is None)
            factors |= {tensor.ref(): tensor for tensor in tensors}
    return [*factors.values()], late


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


def _draws_with_rows(batch: WholeBatch, operations) -> list[tuple[tf.Tensor, int, int]]:
    """Returns numbers that no feature tells and examples have their own of.

    Returns:
        (numbers, their axis, number of blocks that list all examples) of each.
    """
    others = {rows.op for rows, _ in batch.rows_of_others}
    draws = [
        operation.outputs[0]
        for operation in operations
        if operation in others
        or (operation.type in DRAWS and context_of(operation) is None)
    ]
    view = View(batch, draws)  # the graph has other draws since the last one
    states = [(draw, view.state(draw)) for draw in draws]
    return [
        (draw, state.axis, (blocks_of(state.of) or [1])[0])
        for draw, state in states
        if state.kind in ("rows", "entries")  # of blocks
    ]


def _tensor_of(name: str) -> str:
    """Returns the name of the tensor whose fingerprint has a name."""
    return name.split()[1]


def _parts(gradient) -> list[tf.Tensor]:
    return tf.nest.flatten(gradient, expand_composites=True)


def _examples(batch: WholeBatch, indices: tf.Tensor):
    """Yields tensors of the whole batch, that of some examples, and whether it is dense.

    Args:
        batch: The batch.
        indices: Numbers of the examples.
    """
    wholes = {part.sliced.ref(): part.whole for part in batch.parts}
    for leaf in tf.nest.flatten(batch.sliced):
        sliced = [] if leaf is None else _parts(leaf)
        whole = [wholes[tensor.ref()] for tensor in sliced if tensor.ref() in wholes]
        if not whole:
            continue  # a scalar, which all examples share
        value = tf.nest.pack_sequence_as(leaf, whole, expand_composites=True)
        for tensor, taken in zip(whole, _parts(_take(value, indices)), strict=True):
            yield tensor, taken, isinstance(value, tf.Tensor)


def _take(value, indices: tf.Tensor):
    """Returns some examples of a feature or label."""
    if not isinstance(value, tf.SparseTensor):
        return tf.gather(value, indices)
    pairs = tf.where(tf.equal(value.indices[:, 0], indices[:, None]))
    example, entry = tf.unstack(pairs, axis=1)
    places = tf.concat([example[:, None], tf.gather(value.indices, entry)[:, 1:]], 1)
    shape = tf.concat([[tf.size(indices, tf.int64)], value.dense_shape[1:]], 0)
    return tf.SparseTensor(places, tf.gather(value.values, entry), shape)


def _noise(value: np.ndarray, are_others: np.ndarray, random) -> np.ndarray:
    """Returns noise as large as the differences of the numbers of a feature.

    Args:
        value: The feature of the examples of four micro-batches.
        are_others: Which of them have noise, the same in each of these.
        random: A generator of random numbers.
    """
    wide = value.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    sizes = [np.std(finite), np.max(np.abs(finite))] if finite.size else []
    size = next((size for size in sizes if size), 1.0)
    shape = value.shape[1:]
    noise = size * random.normal(size=[are_others.shape[1], *shape])
    factors = are_others.reshape(*are_others.shape, *[1] * len(shape))
    return (noise * factors).reshape(value.shape).astype(value.dtype)


def _are_finite(rows: dict, gradients: dict) -> bool:
    are_finite = [fingerprint.is_finite for fingerprint in rows.values()]
    are_finite += [np.isfinite(gradient.size) for gradient in gradients.values()]
    return all(are_finite)


def _judge(ratio: float, sentence: str, name: str, difference: str) -> None:
    """Raises _Difference if a difference is larger than its bound.

    Args:
        ratio: The difference, in units of its bound.
        sentence: The error's message, with a place for `name` and `difference`.
        name: Name of a tensor.
        difference: How its numbers differ.
    """
    if ratio > 1:
        raise _Difference(sentence.format(name, difference))


def _lengths_of_a(results: list[Fingerprint], is_of_b: np.ndarray) -> list[int]:
    """Returns the number of products of a's rows in each result."""
    rows = [len(result.products) // len(is_of_b) for result in results]
    return [number * int(sum(~is_of_b)) for number in rows]


def _ratio_of_same_rows(
    results: list[Fingerprint], of_a: list[int], tolerance: float
) -> float:
    """Returns the difference of each example's rows beside other examples.

    Args:
        results: Fingerprints of the rows of (a, b), (a', b), (a, b') and (a', b').
        of_a: How many of the products of each, the first ones, are of a or a'.
        tolerance: Largest difference by rounding, relative to the largest number.
    """
    if len({tuple(result.others) for result in results}) > 1:
        return np.inf
    # A small loss is the difference of larger numbers, whose rounding it has.
    bound = tolerance * max(1.0, *(result.size for result in results))
    ratios = []
    parts = [np.split(r.products, [n]) for r, n in zip(results, of_a, strict=True)]
    for half, pairs in enumerate(([(0, 2), (1, 3)], [(0, 1), (2, 3)])):
        for i, j in pairs:
            one, other = parts[i][half], parts[j][half]
            if len(one) != len(other):
                return np.inf
            difference = _difference(one, other)
            ratios.append(ratio_to_rounding(difference, results[i].numbers, bound))
    return max(ratios)


def _judge_exchanged_sums(results: list[dict], least: float, tolerances: dict) -> None:
    """Judges whether gradients are sums of a's and of b's.

    Args:
        results: Fingerprints of the gradients of (a, b), (a', b), (a, b') and (a', b'),
            by name.
        least: Size of the gradients that arrive. A model that fits its examples makes
            the others small by subtracting numbers of this size, which leaves their
            rounding.
        tolerances: Largest differences by rounding, relative to the largest number, by
            name.
    """
    sizes = [fingerprint.size for result in results for fingerprint in result.values()]
    largest = np.nanmax([least, *sizes])
    for name in results[0]:
        four = [result[name] for result in results]
        size = sum(fingerprint.size for fingerprint in four)
        if np.isnan(size):
            continue
        numbers = np.max([fingerprint.numbers for fingerprint in four], 0)
        one, two, three, both = (f.products.astype(np.float64) for f in four)
        bound = tolerances[name] * max(size, _SMALLEST * largest)
        ratio = ratio_to_rounding(one + both - two - three, numbers, bound)
        _judge(ratio, _NO_SUM, _tensor_of(name), "with other examples")


def _judge_sums(together: dict, apart: list[dict], least: float, share: float) -> None:
    """Judges whether gradients are the sums of the groups' gradients.

    Args:
        together: Fingerprints of the gradients of all examples, by name.
        apart: Those of each group.
        least: As for `_judge_exchanged_sums`.
        share: Largest difference by rounding, relative to the groups' gradients.
    """
    sizes = [_typical(whole.products, whole.numbers) for whole in together.values()]
    largest = np.nanmax([least, *sizes])
    for name, whole in together.items():
        groups = [group[name].products.astype(np.float64) for group in apart]
        number = whole.numbers
        size = np.sqrt(sum(_typical(group, number) ** 2 for group in groups))
        size = max(size, _typical(whole.products, number), _SMALLEST * largest)
        difference = _typical(_difference(whole.products, sum(groups)), number)
        ratio = _ratio(difference, share * size)
        _judge(float(ratio), _NO_SUM, _tensor_of(name), "in smaller groups")


def _joined_rows(
    together: Fingerprint, apart: list[Fingerprint], number: int
) -> tuple[float, float]:
    """Compares rows with those of groups, one behind the other.

    That of half of the examples counts: a step may change the numbers of a single one.

    Returns:
        (Difference in units of its bound; the largest change of an example's rows,
        relative to their size).

    Args:
        together: Fingerprint of the rows.
        apart: Those of each group.
        number: Number of examples; of products, if they are entries.
    """
    joined = np.concatenate([group.products for group in apart])
    shapes = {tuple(fingerprint.others) for fingerprint in [together, *apart]}
    if len(shapes) > 1 or joined.shape != together.products.shape:
        return np.inf, np.inf
    if not number:
        return 0.0, 0.0
    if len(joined) % number:
        return np.inf, np.inf

    def typical(products: np.ndarray) -> list[float]:
        """Returns the size of each example's numbers."""
        parts = np.split(products, number)
        return [_typical(part, together.numbers) for part in parts]

    least = _SMALLEST_ROWS * max(together.size, 1.0)
    size = np.maximum(typical(joined), typical(together.products))
    differences = typical(_difference(joined, together.products))
    ratios = np.sort(_ratio(differences, _SHARE * np.maximum(size, least)))
    return float(ratios[number // 2]), float(np.max(_ratio(differences, size)))


def _ratio(difference, bound):
    """Returns a difference in units of its bound; 0 of none, and of NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(np.divide(difference, bound), nan=0.0, posinf=np.inf)


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))


def _typical(products: np.ndarray, numbers: np.ndarray) -> float:
    """Returns the size of the numbers of a tensor, from products."""
    wide = np.square(products.astype(np.float64)) / np.maximum(numbers, 1)
    return float(np.sqrt(np.mean(wide))) if wide.size else 0.0


def _difference(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return one.astype(np.float64) - other.astype(np.float64)
