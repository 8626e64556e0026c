"""Losses that Hypothesis composes of small steps.

A step is a line of Python: its text is what runs, with the value `v` and the batch `b`.
A value has dimensions: numbers, "n" for examples, "3n" for an axis that holds three
numbers of each example, "?18" for what only the data know, at most 18. Each kind of step
lists (text, dimensions of its result) for the dimensions that it gets.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tests.helpers.models.examples import BATCH
from tests.helpers.models.losses import outputs, token_outputs, variable

Dimensions = tuple[int | str, ...]
Steps = Iterator[tuple[str, Dimensions]]
FEATURES = ("x", "seq", "cls", "mask", "w")
_MOST_ELEMENTS = 50_000


class Batch:
    """Tensors that any step may use."""

    def __init__(self, y, mask, w, cls):
        self.y, self.mask, self.w, self.cls = y, mask, w, cls
        self.n = tf.cast(tf.shape(y)[0], tf.float64)
        self._shared = {}

    def run(self, text: str, **values) -> tf.Tensor:
        return eval(text, {"tf": tf, "np": np, "b": self, **values})

    def shared(self, text: str) -> tf.Tensor:
        """Returns the tensor of `text`: one for all that use it."""
        if text not in self._shared:
            self._shared[text] = self.run(text)
        return self._shared[text]

    def along(self, dims: Dimensions, values: tf.Tensor) -> tf.Tensor:
        """Reshapes values [B] so that they are along the axis of the examples."""
        axis = dims.index("n")
        return tf.reshape(values, [-1 if i == axis else 1 for i in range(len(dims))])


class Branch(NamedTuple):
    """A value of the network, and the steps that reduce it to a scalar."""

    source: str
    steps: list[tuple[str, Dimensions]]

    def __call__(self, sources: dict, batch: Batch) -> tf.Tensor:
        value = sources[self.source]
        for text, _ in self.steps:
            value = batch.run(text, v=value)
        return value


class Composed(NamedTuple):
    """A loss: one branch, or two that are joined, and perhaps a penalty."""

    network: str
    branches: list[Branch]
    join: str
    has_penalty: bool

    def __call__(self, y, **features) -> tf.Tensor:
        z = _NETWORKS[self.network](features)
        sources = {"z": z, "score": z[:, 0], "tokens": token_outputs(features["seq"])}
        batch = Batch(y, features["mask"], features["w"], features["cls"])
        values = [branch(sources, batch) for branch in self.branches]
        loss = values[0]
        if len(values) > 1:
            loss = batch.run(self.join, first=values[0], second=values[1])
        if self.has_penalty:
            loss += 0.1 * tf.nn.l2_loss(variable("out", 5, 3))
        return loss


def _layer_normed(features):
    hidden = tf.matmul(features["x"], variable("in", 4, 5))
    mean, variance = tf.nn.moments(hidden, [1], keepdims=True)
    hidden = tf.nn.relu((hidden - mean) * tf.math.rsqrt(variance + 1e-3))
    return tf.matmul(hidden, variable("out", 5, 3))


def _embedded(features):
    rows = tf.gather(variable("table", 3, 4), features["cls"])
    return outputs(features["x"] * rows)


def _attending(features):
    scores = tf.einsum(
        "ni,ij,ntj->nt", features["x"], variable("a", 4, 4), features["seq"]
    )
    read = tf.einsum("nt,ntj->nj", tf.nn.softmax(scores), features["seq"])
    return outputs(read)


_NETWORKS = {
    "dense": lambda features: outputs(features["x"]),
    "linear": lambda features: tf.matmul(features["x"], variable("linear", 4, 3)),
    "layer_normed": _layer_normed,
    "embedded": _embedded,
    "attending": _attending,
}
_SOURCES = {"z": ("n", 3), "score": ("n",), "tokens": ("n", 7, 3)}
_JOINS = [
    "tf.add_n([first, 0.5 * second])",
    "tf.reduce_sum([first, second])",
    "tf.reduce_mean(tf.stack([first, second]))",
    "first * second",
    "first / (1 + tf.square(second))",
    "first * tf.stop_gradient(second) + second",
    "first + second",
]
_DIVISORS = [
    "b.n",
    "tf.sqrt(b.n)",
    "b.n - 1",
    "tf.maximum(tf.reduce_sum(b.mask), 1)",
    "tf.reduce_sum(b.mask) + 1e-3",
    "tf.cast(tf.shape(tf.where(b.mask > 0))[0], tf.float64)",
    "tf.reduce_sum(b.mask) / b.n",
    "tf.reduce_sum(b.w)",
    "tf.reduce_mean(b.w)",
    "tf.reduce_max(b.w)",
]


def _most(dims) -> int:
    """Returns the most elements that a value can have."""
    sizes = {"n": BATCH, "3n": 3 * BATCH}
    bounds = [sizes.get(d) or int(str(d).strip("?")) for d in dims]
    return int(np.prod(bounds, dtype=int))


def _unknown(*dims) -> str:
    return f"?{_most(dims)}"


def _product(dims) -> int | str:
    names = [d for d in dims if isinstance(d, str)]
    if not names:
        return _most(dims)
    if names == ["n"]:
        return {BATCH: "n", 3 * BATCH: "3n"}.get(_most(dims), _unknown(*dims))
    return _unknown(*dims)


def _with(dims, axis, *dimensions) -> Dimensions:
    """Returns the dimensions with others in the place of one."""
    return dims[:axis] + dimensions + dims[axis + 1 :]


def _signed_axes(dims) -> list[int]:
    """Returns all axes, and the first and last by their negative numbers."""
    return [*range(len(dims)), -1, -len(dims)] if dims else []


def _elementwise(dims) -> Steps:
    for text in (
        "tf.tanh(v)",
        "tf.square(v)",
        "tf.sqrt(v**2 + 0.1)",
        "tf.math.softplus(v)",
        "0.3 - v",
        "v * tf.ones_like(v) - tf.zeros_like(v)",
        "v * tf.stop_gradient(tf.reduce_mean(v))",
        "v / tf.cast(tf.size(v) + 1, tf.float64)",
    ):
        yield text, dims


def _with_labels(dims) -> Steps:
    if dims == ("n", 3):
        yield "tf.square(v - b.y)", dims
        yield "tf.nn.sparse_softmax_cross_entropy_with_logits(b.cls, v)", ("n",)
        yield "tf.gather(v, b.cls, batch_dims=1)", ("n",)
    if dims == ("n",):
        yield "tf.square(v - b.y[:, 0])", dims
        yield "v[:, None] - b.w", ("n", "n")  # of one rank too many: all with all
        yield "tf.tensordot(v, b.w, 1)", ()


def _reductions(dims) -> Steps:
    axes = [[axis] for axis in _signed_axes(dims)]
    axes += [[0, -1]] if len(dims) > 1 else []
    for axis in axes:
        reduced = {i % len(dims) for i in axis}
        for keepdims in (False, True):
            rest = tuple(
                1 if i in reduced else d
                for i, d in enumerate(dims)
                if keepdims or i not in reduced
            )
            for name in ("sum", "mean", "max", "min", "logsumexp"):
                yield f"tf.reduce_{name}(v, {axis}, {keepdims})", rest
            variance = f"tf.math.reduce_variance(v, {axis}, {keepdims})"
            yield f"tf.sqrt({variance} + 1e-3)", rest


def _normalizations(dims) -> Steps:
    for axis in _signed_axes(dims):
        yield f"tf.nn.softmax(v, {axis})", dims
        yield f"tf.nn.log_softmax(v, {axis})", dims
        yield f"v - tf.reduce_mean(v, {axis}, True)", dims
        yield f"v / (tf.reduce_max(tf.abs(v), {axis}, True) + 1)", dims
        yield f"tf.nn.l2_normalize(v, {axis}, 0.1)", dims


def _orders(dims) -> Steps:
    for axis in _signed_axes(dims):
        yield f"tf.sort(v, {axis})", dims
        yield f"tf.cumsum(v, {axis})", dims
        yield f"tf.roll(v, 1, {axis})", dims
        yield f"tf.reverse(v, [{axis}])", dims
        yield f"tf.reverse(tf.stop_gradient(v), [{axis}]) * v", dims


def _divisions(dims) -> Steps:
    for divisor in _DIVISORS:
        yield f"v / b.shared({divisor!r})", dims


def _weights(dims) -> Steps:
    if dims.count("n") == 1:
        yield f"v * b.along({dims}, b.mask)", dims
        yield f"v * b.along({dims}, b.w)", dims
        yield f"v * b.along({dims}, b.w / b.shared('tf.reduce_sum(b.w)'))", dims
        yield f"tf.where(b.along({dims}, b.mask) > 0, v, 0.1 * v)", dims
        yield f"v * b.along({dims}, tf.nn.softmax(b.w))", dims


def _selections(dims) -> Steps:
    if "n" not in dims:
        return
    axis = dims.index("n")
    some, before = _with(dims, axis, _unknown(dims[axis])), ":, " * axis
    yield f"tf.boolean_mask(v, b.mask > 0, {axis})", some
    yield f"tf.gather(v, tf.where(b.mask > 0)[:, 0], axis={axis})", some
    yield f"tf.gather(v, [3, 0, 3], axis={axis})", _with(dims, axis, 3)
    yield f"tf.gather(v, tf.argsort(b.w), axis={axis})", dims
    yield f"v[{before}1:]", some
    yield f"v[{before}:-1]", some
    yield f"v[{before}::2]", some
    yield f"v[{before}:4]", _with(dims, axis, 4)
    yield f"v[{before}2]", _with(dims, axis)
    if axis == 0:
        yield "tf.math.unsorted_segment_sum(v, b.cls, 3)", _with(dims, axis, 3)
        yield "tf.dynamic_partition(v, tf.cast(b.mask, tf.int32), 2)[1]", some


def _largest(dims) -> Steps:
    if dims and dims[-1] != 1 and not str(dims[-1]).startswith("?"):
        yield "tf.nn.top_k(v, 2).values", (*dims[:-1], 2)


def _columns(dims) -> Steps:
    for axis, d in enumerate(dims):
        if isinstance(d, int) and d > 1:
            yield f"tf.unstack(v, {d}, {axis})[1]", _with(dims, axis)
            yield f"tf.split(v, [1, {d - 1}], {axis})[0]", _with(dims, axis, 1)


def _reshapes(dims) -> Steps:
    if len(dims) > 1:
        yield "tf.reshape(v, [-1])", (_product(dims),)
    if len(dims) == 3 and isinstance(dims[2], int):
        yield f"tf.reshape(v, [-1, {dims[2]}])", (_product(dims[:2]), dims[2])
    if dims in (("n", 3), ("3n",), (3, "n")):
        yield "tf.reshape(v, [3, -1])", (3, "n")
        yield "tf.reshape(v, [-1, 3])", ("n", 3)
        yield "tf.reshape(v, [tf.shape(b.w)[0], 3, 1])", ("n", 3, 1)
    for axis, d in enumerate(dims):
        if d == 1:
            yield f"tf.squeeze(v, [{axis}])", _with(dims, axis)
    if len(dims) < 3:
        for axis in range(len(dims) + 1):
            yield f"tf.expand_dims(v, {axis})", (*dims[:axis], 1, *dims[axis:])


def _transposes(dims) -> Steps:
    orders = {2: [(1, 0)], 3: [(1, 0, 2), (0, 2, 1), (2, 1, 0)]}
    for order in orders.get(len(dims), ()):
        yield f"tf.transpose(v, {order})", tuple(dims[i] for i in order)


def _joins(dims) -> Steps:
    """Concatenations and stacks, with itself and with fixed tensors."""
    for axis, d in enumerate(dims):
        twice = 2 * d if isinstance(d, int) else _unknown(2, d)
        yield f"tf.concat([v, 2 * v], {axis})", _with(dims, axis, twice)
        rest = _with(dims, axis, 1)
        if all(isinstance(n, int) for n in rest):
            fixed = f"tf.fill({rest}, tf.constant(0.7, tf.float64))"
            more = d + 1 if isinstance(d, int) else f"?{_most([d]) + 1}"
            yield f"tf.concat([{fixed}, v], {axis})", _with(dims, axis, more)
    if len(dims) < 3:
        for axis in range(len(dims) + 1):
            yield f"tf.stack([v, v**2], {axis})", (*dims[:axis], 2, *dims[axis:])


def _products(dims) -> Steps:
    if len(dims) == 1:
        yield "tf.expand_dims(v, 1) - v", dims * 2
    if len(dims) == 2:
        first, second = dims
        yield "tf.matmul(v, v, transpose_b=True)", (first, first)
        yield "tf.matmul(v, v, transpose_a=True)", (second, second)
        if isinstance(second, int) and second <= 6:
            fixed = f"np.linspace(-1, 1, {2 * second}).reshape({second}, 2)"
            yield f"tf.matmul(v, {fixed})", (first, 2)
    if len(dims) == 3:
        yield "tf.matmul(v, v, transpose_b=True)", (dims[0], dims[1], dims[1])
        yield "tf.einsum('abc,abd->acd', v, v)", (dims[0], dims[2], dims[2])


_KINDS = [
    *(_elementwise, _with_labels, _reductions, _normalizations, _orders, _divisions),
    *(_weights, _selections, _largest, _columns, _reshapes, _transposes, _joins),
    _products,
]
_ENDS = [
    "tf.reduce_mean(v)",
    "tf.reduce_sum(v)",
    "tf.sqrt(tf.reduce_mean(v**2) + 1e-3)",
    "tf.reduce_sum(tf.reduce_mean(v, 0))",
    "tf.reduce_mean(tf.reduce_sum(v, 0))",
    "tf.reduce_sum(v) / tf.cast(tf.size(v), tf.float64)",
    "tf.nn.l2_loss(v)",
]
_ENDS_OF_SCALARS = ["tf.identity(v)", "tf.math.softplus(v)"]


@st.composite
def _branches(draw) -> Branch:
    source = draw(st.sampled_from(sorted(_SOURCES)))
    dims, steps = _SOURCES[source], []
    for _ in range(draw(st.integers(1, 6))):
        kinds = [
            [step for step in kind(dims) if _most(step[1]) <= _MOST_ELEMENTS]
            for kind in _KINDS
        ]
        kind = draw(st.sampled_from([steps for steps in kinds if steps]))
        steps.append(draw(st.sampled_from(kind)))
        dims = steps[-1][1]
    end = draw(st.sampled_from(_ENDS if dims else _ENDS_OF_SCALARS))
    return Branch(source, [*steps, (end, ())])


@st.composite
def composed_losses(draw) -> Composed:
    return Composed(
        draw(st.sampled_from(sorted(_NETWORKS))),
        draw(st.lists(_branches(), min_size=1, max_size=2)),
        draw(st.sampled_from(_JOINS)),
        draw(st.booleans()),
    )
