"""Attacks on the rules of the analysis of rows: operations with random inputs.

    an operation, its attributes and inputs, by chance
    -> the rule says which rows are of which example
    -> the numbers of one example change: no other example's row changes a bit
    -> some of the examples alone: their rows are what they were

Sizes coincide on purpose: most axes are as long as there are examples, or 1.
"""

import collections
import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.names import DRAWS
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.rules.blocks import blocks_of
from estimator_accum.rows.rules.partitions import part_of
from estimator_accum.rows.sizes import Size, count
from estimator_accum.rows.states import OF_SPLITS, State

v1, raw = tf.compat.v1, tf.raw_ops
_ONE_THREAD = v1.ConfigProto(
    intra_op_parallelism_threads=1, inter_op_parallelism_threads=1
)
_TOLERANCE = 1e-4  # of other kernels for other numbers of examples
_SPLITS_FIRST = {"UnicodeDecode", "UnicodeDecodeWithOffsets"}
_SPLITS_FIRST |= {"RaggedRange", "RaggedGather"}
_IMPOSSIBLE = (ValueError, TypeError, IndexError, tf.errors.OpError)


class _Part(NamedTuple):
    """A placeholder with rows: `values` is [examples, rows for each, ...]."""

    tensor: tf.Tensor
    axis: int
    values: np.ndarray
    others: np.ndarray  # values after a change
    plus: Callable

    def array(self, values: np.ndarray) -> np.ndarray:
        rows = values.reshape(-1, *values.shape[2:])
        rows = np.moveaxis(rows, 0, self.axis)
        return self.plus(rows) if rows.dtype.kind in "fc" else rows


class Attack:
    """Inputs of one operation, in a graph of its own.

    Args:
        seed: Seed of all that is left to chance.

    Attributes:
        chance: The random generator.
        examples: Number of examples.
    """

    def __init__(self, seed: int):
        self.chance = np.random.default_rng(seed)
        self.examples = int(self.chance.integers(2, 4))
        self.parts, self.states = [], {}
        self.fed = {}
        self._lists, self._has_entries = [], self.happens(0.15)

    def one_of(self, *values):
        """Returns one of some values."""
        return values[self.chance.integers(len(values))]

    def happens(self, probability: float = 0.5) -> bool:
        """Returns True with a probability."""
        return self.chance.random() < probability

    def length(self) -> int:
        """Returns the length of an axis, often the number of examples."""
        return self.one_of(self.examples, self.examples, 1, 2, 3)

    def shape(self, rank: int) -> list[int]:
        """Returns a shape."""
        return [self.length() for _ in range(rank)]

    def numbers(self, shape, dtype, most: int = 3) -> np.ndarray:
        """Returns random numbers from 0 on."""
        if dtype == tf.string:
            texts = np.array(["1", "2.5", "-3", "aab", "b"][: most + 2], object)
            return texts[self.chance.integers(0, 3, shape)]
        if dtype == tf.bool:
            return self.chance.integers(0, 2, shape).astype(bool)
        if dtype.is_integer:
            return self.chance.integers(0, most, shape).astype(dtype.as_numpy_dtype)
        values = self.chance.uniform(0.1, 0.9, shape)
        if dtype.is_complex:
            values = values + 1j * self.chance.uniform(0.1, 0.9, shape)
        return values.astype(dtype.as_numpy_dtype)

    def rows(
        self,
        tail: list[int],
        dtype=tf.float32,
        axis: int | None = None,
        span: int = 1,
        most: int = 3,
        plus: Callable = lambda rows: rows,
    ) -> tf.Tensor:
        """Returns a tensor with rows; `tail` are the other axes."""
        axis = int(self.chance.integers(len(tail) + 1)) if axis is None else axis
        shape = [None if self.happens(0.2) else length for length in tail]
        shape.insert(axis, None)
        tensor = v1.placeholder(dtype, shape)
        size = (self.examples, span, *tail)
        values = [self.numbers(size, dtype, most) for _ in range(2)]
        self.parts.append(_Part(tensor, axis, *values, plus))
        self.states[tensor.ref()] = State("rows", axis, Size(span))
        is_list = self._has_entries and (axis, span) == (0, 1) and self.happens(0.85)
        return tf.gather(tensor, self.entries()[:, 0]) if is_list else tensor

    def entries(self, tail: list[int] | None = None, span: int = 1) -> tf.Tensor:
        """Returns numbers of examples, with places: indices of a sparse tensor.

        Args:
            tail: The other sizes of the tensor; None for one list of examples.
            span: Number of rows for each example.
        """
        if tail is not None or not self._lists or self.happens(0.1):
            kept, self._has_entries = self._has_entries, False
            self._lists.append(tf.where(self.rows(tail or [], tf.bool, 0, span)))
            self._has_entries = kept
        return self._lists[-1]

    def fixed(self, shape, dtype=tf.float32, most: int = 3, plus=lambda rows: rows):
        """Returns a tensor of no example: a constant, or one that is not known."""
        value = self.numbers(shape, dtype, most)
        value = plus(value) if value.dtype.kind in "fc" else value
        if self.happens(0.8):
            return tf.constant(value, dtype)
        tensor = v1.placeholder(dtype, [None if self.happens() else n for n in shape])
        self.fed[tensor] = value
        return tensor

    def any(self, shape, dtype=tf.float32, **options):
        """Returns a tensor of a shape, with rows if an axis is as long as needed."""
        axes = [i for i, length in enumerate(shape) if length % self.examples == 0]
        axes = [i for i in axes if shape[i]]
        if not axes or self.happens(0.3):
            return self.fixed(shape, dtype, **options)
        axis = self.one_of(*axes)
        tail, span = [*shape], shape[axis] // self.examples
        del tail[axis]
        return self.rows(tail, dtype, axis, span, **options)

    def number_of_examples(self) -> tf.Tensor:
        """Returns the number of examples as a tensor, known as a size."""
        return tf.shape(self.rows([], axis=0))[0]

    def sizes(self, shape: list[int], first: bool = False) -> tf.Tensor:
        """Returns a shape, in which lengths may be the number of examples times.

        Args:
            shape: The shape.
            first: Whether the first one is, and no other: some kernels do not look.
        """
        number = self.number_of_examples()
        return tf.stack(
            [
                number * (length // self.examples)
                if length % self.examples == 0
                and (i == 0 if first else self.happens(0.7))
                else tf.constant(length)
                for i, length in enumerate(shape)
            ]
        )

    def places(self, distance: int, shape: list[int], is_of_rows: bool) -> tf.Tensor:
        """Returns numbers of examples times a distance, with values of their own."""
        number = tf.range(self.number_of_examples()) * distance
        number = tf.reshape(number, [-1] + [1] * len(shape))
        return (
            number + self.rows(shape, tf.int32, 0, most=distance)
            if is_of_rows
            else number
        )


class Outcome(NamedTuple):
    """Kinds of outputs and findings of attacks.

    Attributes:
        kinds: How often an output was of each kind; "impossible": no such operation.
        findings: Sentences, one for each rule that was wrong.
    """

    kinds: collections.Counter
    findings: list[str]


def attack(kind: str, make: Callable, seed: int) -> Outcome:
    """Attacks a rule once.

    Args:
        kind: The operation's type.
        make: Function of an Attack that returns the outputs of such an operation.
        seed: Seed of the attack.
    """
    outcome = Outcome(collections.Counter(), [])
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(seed)
        attacked = Attack(seed)
        try:
            outputs = [t for t in tf.nest.flatten(make(attacked)) if t is not None]
        except _IMPOSSIBLE:
            outcome.kinds["impossible"] += 1
            return outcome
        analysis = Analysis((), states=attacked.states)
        analysis.analyze(outputs)
        judged = [t for t in outputs if t.dtype not in (tf.variant, tf.resource)]
        claims = {tensor.ref(): _known(attacked, analysis, tensor) for tensor in judged}
        # Nothing is claimed of others, whose kernels may end the process.
        run = [
            tensor
            for tensor in judged
            if analysis.state(tensor).kind != "mixed"
            or claims[tensor.ref()] != {"symbols": {}}
        ]
        if not run:
            outcome.kinds["mixed"] += len(judged)
            return outcome
        judge = _Judge(attacked, analysis, run, [claims[t.ref()] for t in run])
        try:
            with v1.Session(graph=graph, config=_ONE_THREAD) as session:
                if v1.global_variables():
                    session.run(v1.global_variables_initializer())
                if v1.get_collection(v1.GraphKeys.TABLE_INITIALIZERS):
                    session.run(v1.tables_initializer())
                judge.run(session)
        except _IMPOSSIBLE as error:
            if isinstance(error, ValueError) and "Cannot feed" not in str(error):
                raise
            outcome.kinds["impossible"] += 1
            return outcome
    for tensor in judged:
        outcome.kinds[analysis.state(tensor).kind] += 1
    outcome.findings.extend(
        f"{kind}, seed {seed}: {finding}" for finding in judge.findings
    )
    return outcome


def _known(attacked: Attack, analysis: Analysis, tensor: tf.Tensor) -> dict:
    """Returns the sizes that the analysis knows of a tensor, each with its origin."""
    sizes, graph = {}, tensor.graph
    state = analysis.state(tensor)
    if analysis.knows_dims(tensor) and state.kind in {"rows", "entries", *OF_SPLITS}:
        sizes["shape"] = analysis.dims(tensor)
    if tensor.dtype.is_integer and tensor.shape.rank is not None:
        value = analysis.value(tensor)
        if value is not None:
            sizes["value"] = list(value.flat)
    symbols = {
        s
        for size in functools.reduce(operator.iadd, sizes.values(), [])
        for s in size.symbols
    }
    if state.kind in OF_SPLITS:
        symbols |= {*count(state.of).symbols}
    sizes["symbols"] = {symbol: _meaning(symbol, graph, attacked) for symbol in symbols}
    return sizes


def _meaning(symbol: str, graph, attacked: Attack) -> tf.Tensor:
    """Returns the size that has a name: of an axis, or a number."""
    if rows := Size(symbols=(symbol,)).rows:
        if not rows.power:
            return _meaning(rows.symbols[0], graph, attacked) + 1
        symbol = f"#1 blocks of {rows.factor}"
        return _meaning(symbol, graph, attacked) + 1
    if blocks := blocks_of(symbol[1:]):
        part, (number, span) = attacked.parts[0], blocks
        rows = tf.shape(part.tensor)[part.axis]
        return rows // part.values.shape[1] * number * span
    if symbol.startswith("#"):
        return _number_of_entries(symbol[1:], graph)
    name, *place = symbol.removesuffix("]").split("[")
    if place:
        return graph.get_tensor_by_name(name)[int(place[0])]
    if symbol.count(":") == 1:
        return graph.get_tensor_by_name(name)
    name, _, axis = symbol.rpartition(":")
    return tf.shape(graph.get_tensor_by_name(name))[int(axis)]


def _number_of_entries(name: str, graph) -> tf.Tensor:
    """Returns the number of entries of a list, or a length of its sparse tensor."""
    if name.startswith("true in "):
        mask = graph.get_tensor_by_name(name.removeprefix("true in "))
        return tf.math.count_nonzero(mask, dtype=tf.int32)
    if part := part_of(name):
        numbers = graph.get_operation_by_name(part[2]).inputs[1]
        return tf.reduce_sum(tf.cast(tf.equal(numbers, part[0]), tf.int32))
    name, *parts = name.split(":")
    operation, place = graph.get_operation_by_name(name), 0
    if parts and parts[0].isdigit():  # of several results
        place = int(parts.pop(0))
    if operation.type in _SPLITS_FIRST:
        place += 1
    if not parts:
        return tf.shape(operation.outputs[place])[0]
    axis = 1 if parts[0] == "width" else int(parts[0].removeprefix("axis"))
    number = len(operation.outputs) // 3
    if operation.type == "ParseExampleV2":
        number = operation.get_attr("num_sparse")
    return operation.outputs[2 * number + place][axis]


class _Judge:
    """Runs an operation for all examples, for changed ones and for some."""

    def __init__(self, attacked: Attack, analysis: Analysis, tensors, sizes):
        self._attacked, self._analysis = attacked, analysis
        self._tensors, self._known = tensors, sizes
        self.findings = []

    def run(self, session) -> None:
        n = self._attacked.examples
        one = int(self._attacked.chance.integers(n))
        together = self._values(session, [*range(n)])
        changed = self._values(session, [*range(n)], one)
        first = self._attacked.happens()
        few = [0] if first else [*range(1, n)]
        apart = self._values(session, few)
        if together is None or changed is None or apart is None:
            return
        self._judge_entries(session, together, n)
        for values, number in ((together, n), (apart, len(few))):
            self._judge_sizes(values, number)
        for i, tensor in enumerate(self._tensors):
            state = self._analysis.state(tensor)
            if state.kind not in ("rows", "fixed") or _is_drawn(tensor):
                continue
            every, other, some = (run[i][0] for run in (together, changed, apart))
            axis = state.axis
            if state.is_first:
                is_turned = axis == every.ndim - 1
                place, axis = (0, axis - 1) if is_turned else ((..., 0), axis)
                every, other, some = (value[place] for value in (every, other, some))
            if state.kind == "rows":
                every, other = (_by_example(value, axis, n) for value in (every, other))
                some = _by_example(some, axis, len(few))
                if any(value is None for value in (every, other, some)):
                    self._say(tensor, "has no rows for each example")
                    continue
                if state.distance is not None and state.distance.symbols:
                    continue  # not known here
                if state.distance is not None:  # of the first of some, for all
                    every, other = (
                        value - _numbers(state, value) for value in (every, other)
                    )
                    some = some - _numbers(state, some)
                rest = [j for j in range(n) if j != one]
                self._compare(tensor, every[rest], other[rest], 0, "another example")
                self._compare(tensor, every[few], some, _TOLERANCE, "the number")
            else:
                self._compare(tensor, every, other, 0, "an example")
                self._compare(tensor, every, some, 0, "the number")

    def _values(self, session, examples: list[int], changed: int | None = None):
        feeds = dict(self._attacked.fed)
        for part in self._attacked.parts:
            values = part.values.copy()
            if changed is not None:
                values[changed] = part.others[changed]
            feeds[part.tensor] = part.array(values[examples])
        guards = [
            g.holds(tf.constant(len(examples), tf.int64)) for g in self._analysis.guards
        ]
        fetches = [
            [tensor, sizes["symbols"]]
            for tensor, sizes in zip(self._tensors, self._known, strict=True)
        ]
        results, guarded = session.run([fetches, guards], feeds)
        results = [(np.asarray(value), symbols) for value, symbols in results]
        if not all(guarded):
            return None  # such a run is refused
        return results

    def _judge_entries(self, session, together: list, number: int) -> None:
        """Compares entries with those of each example alone, one after the other."""
        states = [self._analysis.state(tensor) for tensor in self._tensors]
        kinds = {state.kind for state in states}
        if not kinds & {"entries", *OF_SPLITS}:
            return
        alone = [self._values(session, [example]) for example in range(number)]
        if any(values is None for values in alone):
            return
        for i, (tensor, state) in enumerate(zip(self._tensors, states, strict=True)):
            if state.kind in OF_SPLITS:
                every, parts = together[i][0], [values[i] for values in alone]
                self._compare(tensor, every, _joined(state, parts), 0, "the others")
                continue
            # Values that are looked up once, and their places, are of no example.
            if state.kind != "entries" or state.places:
                continue
            blocks = blocks_of(state.of)
            if blocks is None and not self._analysis.is_in_order(tensor):
                continue
            parts = [values[i][0] for values in alone]
            if state.distance is not None:
                if state.distance.symbols:
                    continue  # not known here
                parts = [
                    _with_number(state, part, example)
                    for example, part in enumerate(parts)
                ]
            # A convolution of no image has another shape.
            parts = [part for part in parts if len(part)] or parts
            if blocks is not None:
                parts = [part.reshape(blocks[0], -1, *part.shape[1:]) for part in parts]
                joined = np.concatenate(parts, 1).reshape(together[i][0].shape)
                self._compare(tensor, together[i][0], joined, _TOLERANCE, "the others")
                continue
            if len({part.shape[1:] for part in (*parts, together[i][0])}) > 1:
                self._say(tensor, "depends in its shape on the others")
                continue
            joined = np.concatenate(parts)
            self._compare(tensor, together[i][0], joined, _TOLERANCE, "the others")

    def _judge_sizes(self, values: list, number: int) -> None:
        for tensor, claims, (value, symbols) in zip(
            self._tensors, self._known, values, strict=True
        ):
            for what, received in (("shape", np.shape(value)), ("value", value)):
                if what not in claims:
                    continue
                sizes = [
                    size.factor
                    * number**size.power
                    * int(np.prod([symbols[s] for s in size.symbols], dtype=int))
                    for size in claims[what]
                ]
                if sizes != [*np.ravel(received)]:
                    self._say(tensor, f"has the {what} {received}, not {sizes}")

    def _compare(self, tensor, one, other, tolerance: float, of: str) -> None:
        if one.shape != other.shape:
            self._say(tensor, f"depends in its shape on {of}")
        elif one.dtype.kind in "fc":
            if tolerance:
                is_same = np.allclose(one, other, tolerance, tolerance, equal_nan=True)
            else:
                is_same = np.array_equal(one, other, equal_nan=True)
            if not is_same:
                self._say(tensor, f"depends on {of}")
        elif not np.array_equal(one, other):
            self._say(tensor, f"depends on {of}")

    def _say(self, tensor: tf.Tensor, what: str) -> None:
        inputs = [(t.op.type, t.shape.as_list()) for t in tensor.op.inputs]
        state = self._analysis.state(tensor)
        self.findings.append(
            f"{tensor.name} {what}; inputs {inputs}, attributes "
            f"{dict(tensor.op.node_def.attr)}, state {state}".replace("\n", " ")
        )


def _joined(state: State, parts: list) -> np.ndarray:
    """Returns the row splits of all examples, from those of each alone."""
    is_whole = state.kind == "splits"
    before, joined = 0, [np.zeros([int(is_whole)], int)]
    for splits, symbols in parts:
        joined.append(splits[int(is_whole) :] + before)
        before += int(symbols[count(state.of).symbols[0]])
    return np.concatenate(joined).astype(parts[0][0].dtype)


def _is_drawn(tensor: tf.Tensor) -> bool:
    return any(operation.type in DRAWS for operation in data_ancestors([tensor.op]))


def _numbers(state: State, rows: np.ndarray) -> np.ndarray:
    """Returns the number of each example times the distance of places."""
    numbers = np.arange(len(rows)) * int(state.distance)
    return numbers.reshape(-1, *[1] * (rows.ndim - 1)).astype(rows.dtype)


def _with_number(state: State, entries: np.ndarray, example: int) -> np.ndarray:
    """Returns an example's entries with its number in the batch."""
    entries, added = entries.copy(), example * int(state.distance)
    if state.is_first:
        entries[..., 0] += added
        return entries
    return entries + added


def _by_example(value: np.ndarray, axis: int, examples: int) -> np.ndarray | None:
    """Returns rows as [examples, ...]; None if there are not as many for each."""
    if value.ndim <= axis or value.shape[axis] % examples:
        return None
    rows = np.moveaxis(value, axis, 0)
    return rows.reshape(examples, rows.shape[0] // examples, *rows.shape[1:])
