"""Losses that Hypothesis composes of small steps.

A value is a tensor and its dimensions: numbers, "n" for examples, "3n" for an axis that
holds three numbers of each example, "?18" for what only the data know, at most 18. Each
kind of step lists its variants for the dimensions that it gets.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tests.helpers.models.examples import BATCH
from tests.helpers.models.losses import outputs, token_outputs, variable

Dimensions = tuple[int | str, ...]
FEATURES = ("x", "seq", "cls", "mask", "w")
_MOST_ELEMENTS = 50_000


class Batch:
    """Tensors that any step may use; a divisor is one tensor for all that use it."""

    def __init__(self, y, mask, w, cls):
        self.y, self.mask, self.w, self.cls = y, mask, w, cls
        self._divisors = {}

    def divisor(self, name: str) -> tf.Tensor:
        if name not in self._divisors:
            self._divisors[name] = _DIVISORS[name](self)
        return self._divisors[name]

    def examples(self) -> tf.Tensor:
        return tf.cast(tf.shape(self.y)[0], tf.float64)


class Step(NamedTuple):
    """A step of a loss.

    Attributes:
        text: What it does to the value `v`.
        dims: Dimensions of its result.
        apply: Function of the value and the batch.
    """

    text: str
    dims: Dimensions
    apply: Callable

    def __repr__(self):
        return f"{self.text} -> {list(self.dims)}"


class Branch(NamedTuple):
    """A value of the network, the steps that follow, and the reduction to a scalar."""

    source: str
    steps: list[Step]
    end: Step

    def __call__(self, sources: dict, batch: Batch) -> tf.Tensor:
        value = sources[self.source]
        for step in [*self.steps, self.end]:
            value = step.apply(value, batch)
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
        loss = values[0] if len(values) == 1 else _JOINS[self.join](*values)
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
_JOINS = {
    "sum": lambda a, b: a + b,
    "add_n": lambda a, b: tf.add_n([a, 0.5 * b]),
    "list": lambda a, b: tf.reduce_sum([a, b]),
    "mean": lambda a, b: tf.reduce_mean(tf.stack([a, b])),
    "product": lambda a, b: a * b,
    "ratio": lambda a, b: a / (1 + tf.square(b)),
    "stopped": lambda a, b: a * tf.stop_gradient(b) + b,
}


_DIVISORS = {
    "n": lambda b: b.examples(),
    "sqrt(n)": lambda b: tf.sqrt(b.examples()),
    "n - 1": lambda b: b.examples() - 1,
    "max(sum(mask), 1)": lambda b: tf.maximum(tf.reduce_sum(b.mask), 1),
    "sum(mask) + 1e-3": lambda b: tf.reduce_sum(b.mask) + 1e-3,
    "shape(where(mask))[0]": lambda b: tf.cast(
        tf.shape(tf.where(b.mask > 0))[0], tf.float64
    ),
    "sum(mask) / n": lambda b: tf.reduce_sum(b.mask) / b.examples(),
    "sum(w)": lambda b: tf.reduce_sum(b.w),
    "mean(w)": lambda b: tf.reduce_mean(b.w),
    "max(w)": lambda b: tf.reduce_max(b.w),
}


def _most(dims) -> int:
    """Returns the most elements that a value can have."""
    known = {"n": BATCH, "3n": 3 * BATCH}
    bounds = [known.get(d) or int(str(d).strip("?")) for d in dims]
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


def _along(dims, values):
    """Reshapes values [B] so that they are along the axis of the examples."""
    axis = dims.index("n")
    return tf.reshape(values, [-1 if i == axis else 1 for i in range(len(dims))])


def _elementwise(dims) -> Iterator[Step]:
    for text, function in {
        "tanh(v)": tf.tanh,
        "square(v)": tf.square,
        "sqrt(v ** 2 + 0.1)": lambda v: tf.sqrt(v**2 + 0.1),
        "softplus(v)": tf.math.softplus,
        "0.3 - v": lambda v: 0.3 - v,
        "v * ones_like(v) - zeros_like(v)": lambda v: (
            v * tf.ones_like(v) - tf.zeros_like(v)
        ),
        "v * stop_gradient(mean(v))": lambda v: v * tf.stop_gradient(tf.reduce_mean(v)),
        "v / (size(v) + 1)": lambda v: v / tf.cast(tf.size(v) + 1, tf.float64),
    }.items():
        yield Step(text, dims, lambda v, _, function=function: function(v))


def _with_labels(dims) -> Iterator[Step]:
    if dims == ("n", 3):
        yield Step("square(v - y)", dims, lambda v, b: tf.square(v - b.y))
        yield Step(
            "cross_entropy(cls, v)",
            ("n",),
            lambda v, b: tf.nn.sparse_softmax_cross_entropy_with_logits(b.cls, v),
        )
        yield Step(
            "gather(v, cls, batch_dims=1)",
            ("n",),
            lambda v, b: tf.gather(v, b.cls, batch_dims=1),
        )
    if dims == ("n",):
        yield Step("square(v - y[:, 0])", dims, lambda v, b: tf.square(v - b.y[:, 0]))
        # Of one rank too many: all with all.
        yield Step("v[:, None] - w", ("n", "n"), lambda v, b: v[:, None] - b.w)
        yield Step("tensordot(v, w, 1)", (), lambda v, b: tf.tensordot(v, b.w, 1))


_REDUCTIONS = {
    "sum": tf.reduce_sum,
    "mean": tf.reduce_mean,
    "max": tf.reduce_max,
    "min": tf.reduce_min,
    "logsumexp": tf.reduce_logsumexp,
    "std": lambda v, axis, keepdims: tf.sqrt(
        tf.math.reduce_variance(v, axis, keepdims) + 1e-3
    ),
}


def _reductions(dims) -> Iterator[Step]:
    axes = [[axis] for axis in _signed_axes(dims)]
    axes += [[0, -1]] if len(dims) > 1 else []
    for axis in axes:
        for keepdims in (False, True):
            reduced = {i % len(dims) for i in axis}
            rest = [
                1 if i in reduced else d
                for i, d in enumerate(dims)
                if keepdims or i not in reduced
            ]
            for name, reduce in _REDUCTIONS.items():
                yield Step(
                    f"{name}(v, {axis}{', keepdims' * keepdims})",
                    tuple(rest),
                    lambda v, _, reduce=reduce, axis=axis, keep=keepdims: reduce(
                        v, axis=axis, keepdims=keep
                    ),
                )


def _signed_axes(dims) -> list[int]:
    """Returns all axes, and the first and last by their negative numbers."""
    return [*range(len(dims)), -1, -len(dims)] if dims else []


def _normalizations(dims) -> Iterator[Step]:
    for axis in _signed_axes(dims):
        for text, function in {
            "softmax(v, {})": tf.nn.softmax,
            "log_softmax(v, {})": tf.nn.log_softmax,
            "v - mean(v, {})": lambda v, axis: (
                v - tf.reduce_mean(v, axis, keepdims=True)
            ),
            "v / (max(abs(v), {}) + 1)": lambda v, axis: (
                v / (tf.reduce_max(tf.abs(v), axis, keepdims=True) + 1)
            ),
            "l2_normalize(v, {})": lambda v, axis: tf.nn.l2_normalize(v, axis, 0.1),
        }.items():
            yield Step(
                text.format(axis),
                dims,
                lambda v, _, function=function, axis=axis: function(v, axis),
            )


def _orders(dims) -> Iterator[Step]:
    for axis in _signed_axes(dims):
        for text, function in {
            "sort(v, {})": tf.sort,
            "cumsum(v, {})": tf.cumsum,
            "roll(v, 1, {})": lambda v, axis: tf.roll(v, 1, axis),
            "reverse(v, {})": lambda v, axis: tf.reverse(v, [axis]),
            "reverse(stop_gradient(v), {}) * v": lambda v, axis: (
                tf.reverse(tf.stop_gradient(v), [axis]) * v
            ),
        }.items():
            yield Step(
                text.format(axis),
                dims,
                lambda v, _, function=function, axis=axis: function(v, axis=axis),
            )


def _divisions(dims) -> Iterator[Step]:
    for name in _DIVISORS:
        yield Step(f"v / ({name})", dims, lambda v, b, name=name: v / b.divisor(name))


def _weights(dims) -> Iterator[Step]:
    if dims.count("n") != 1:
        return
    yield Step("v * mask", dims, lambda v, b: v * _along(dims, b.mask))
    yield Step("v * w", dims, lambda v, b: v * _along(dims, b.w))
    yield Step(
        "v * w / sum(w)", dims, lambda v, b: v * _along(dims, b.w / b.divisor("sum(w)"))
    )
    yield Step(
        "where(mask, v, 0.1 * v)",
        dims,
        lambda v, b: tf.where(_along(dims, b.mask) > 0, v, 0.1 * v),
    )
    yield Step(
        "v * softmax(w)", dims, lambda v, b: v * _along(dims, tf.nn.softmax(b.w))
    )


def _selections(dims) -> Iterator[Step]:
    if "n" not in dims:
        return
    axis = dims.index("n")

    def becoming(dimension):
        return tuple(dimension if i == axis else d for i, d in enumerate(dims))

    def sliced(*limits):
        place = slice(*limits)
        return lambda v, _: v[(slice(None),) * axis + (place,)]

    yield Step(
        f"boolean_mask(v, mask, {axis})",
        becoming(_unknown(dims[axis])),
        lambda v, b: tf.boolean_mask(v, b.mask > 0, axis),
    )
    yield Step(
        f"gather(v, where(mask), {axis})",
        becoming(_unknown(dims[axis])),
        lambda v, b: tf.gather(v, tf.where(b.mask > 0)[:, 0], axis=axis),
    )
    yield Step(
        f"gather(v, [3, 0, 3], {axis})",
        becoming(3),
        lambda v, _: tf.gather(v, [3, 0, 3], axis=axis),
    )
    yield Step(
        f"gather(v, argsort(w), {axis})",
        dims,
        lambda v, b: tf.gather(v, tf.argsort(b.w), axis=axis),
    )
    yield Step(f"v[1:] (axis {axis})", becoming(_unknown(dims[axis])), sliced(1, None))
    yield Step(
        f"v[:-1] (axis {axis})", becoming(_unknown(dims[axis])), sliced(None, -1)
    )
    yield Step(
        f"v[::2] (axis {axis})", becoming(_unknown(dims[axis])), sliced(None, None, 2)
    )
    yield Step(f"v[:4] (axis {axis})", becoming(4), sliced(4))
    yield Step(f"v[2] (axis {axis})", dims[:axis] + dims[axis + 1 :], _second(axis))
    if axis == 0:
        yield Step(
            "unsorted_segment_sum(v, cls, 3)",
            becoming(3),
            lambda v, b: tf.math.unsorted_segment_sum(v, b.cls, 3),
        )
        yield Step(
            "dynamic_partition(v, mask, 2)[1]",
            becoming(_unknown(dims[axis])),
            lambda v, b: tf.dynamic_partition(v, tf.cast(b.mask, tf.int32), 2)[1],
        )


def _second(axis):
    return lambda v, _: v[(slice(None),) * axis + (2,)]


def _largest(dims) -> Iterator[Step]:
    if dims and dims[-1] != 1 and not str(dims[-1]).startswith("?"):
        yield Step(
            "top_k(v, 2)", dims[:-1] + (2,), lambda v, _: tf.nn.top_k(v, 2).values
        )


def _columns(dims) -> Iterator[Step]:
    for axis, d in enumerate(dims):
        if isinstance(d, int) and d > 1:
            rest = dims[:axis] + dims[axis + 1 :]
            yield Step(
                f"unstack(v, {axis})[1]",
                rest,
                lambda v, _, axis=axis, d=d: tf.unstack(v, d, axis)[1],
            )
            yield Step(
                f"split(v, [1, {d - 1}], {axis})[0]",
                dims[:axis] + (1,) + dims[axis + 1 :],
                lambda v, _, axis=axis, d=d: tf.split(v, [1, d - 1], axis)[0],
            )


def _reshapes(dims) -> Iterator[Step]:
    if len(dims) > 1:
        yield Step(
            "reshape(v, [-1])", (_product(dims),), lambda v, _: tf.reshape(v, [-1])
        )
    if len(dims) == 3 and isinstance(dims[2], int):
        yield Step(
            f"reshape(v, [-1, {dims[2]}])",
            (_product(dims[:2]), dims[2]),
            lambda v, _: tf.reshape(v, [-1, dims[2]]),
        )
    if dims in (("n", 3), ("3n",), (3, "n")):
        yield Step("reshape(v, [3, -1])", (3, "n"), lambda v, _: tf.reshape(v, [3, -1]))
        yield Step("reshape(v, [-1, 3])", ("n", 3), lambda v, _: tf.reshape(v, [-1, 3]))
        yield Step(
            "reshape(v, [n, 3, 1])",
            ("n", 3, 1),
            lambda v, b: tf.reshape(v, [tf.shape(b.w)[0], 3, 1]),
        )
    for axis, d in enumerate(dims):
        if d == 1:
            yield Step(
                f"squeeze(v, {axis})",
                dims[:axis] + dims[axis + 1 :],
                lambda v, _, axis=axis: tf.squeeze(v, [axis]),
            )
    if len(dims) < 3:
        for axis in range(len(dims) + 1):
            yield Step(
                f"expand_dims(v, {axis})",
                dims[:axis] + (1,) + dims[axis:],
                lambda v, _, axis=axis: tf.expand_dims(v, axis),
            )


def _transposes(dims) -> Iterator[Step]:
    orders = {2: [(1, 0)], 3: [(1, 0, 2), (0, 2, 1), (2, 1, 0)]}
    for order in orders.get(len(dims), ()):
        yield Step(
            f"transpose(v, {list(order)})",
            tuple(dims[i] for i in order),
            lambda v, _, order=order: tf.transpose(v, order),
        )


def _joins(dims) -> Iterator[Step]:
    """Concatenations and stacks, with itself and with what is fixed."""
    for axis, d in enumerate(dims):
        yield Step(
            f"concat([v, 2 * v], {axis})",
            dims[:axis]
            + (2 * d if isinstance(d, int) else _unknown(2, d),)
            + dims[axis + 1 :],
            lambda v, _, axis=axis: tf.concat([v, 2 * v], axis),
        )
        rest = [1 if i == axis else n for i, n in enumerate(dims)]
        if all(isinstance(n, int) for n in rest):
            yield Step(
                f"concat([fixed, v], {axis})",
                dims[:axis]
                + (d + 1 if isinstance(d, int) else f"?{_most([d]) + 1}",)
                + dims[axis + 1 :],
                lambda v, _, axis=axis, rest=rest: tf.concat(
                    [tf.fill(rest, tf.constant(0.7, tf.float64)), v], axis
                ),
            )
    if len(dims) < 3:
        for axis in range(len(dims) + 1):
            yield Step(
                f"stack([v, v ** 2], {axis})",
                dims[:axis] + (2,) + dims[axis:],
                lambda v, _, axis=axis: tf.stack([v, v**2], axis),
            )


def _products(dims) -> Iterator[Step]:
    if len(dims) == 1:
        yield Step("v[:, None] - v", dims * 2, lambda v, _: tf.expand_dims(v, 1) - v)
    if len(dims) == 2:
        a, b = dims
        yield Step(
            "matmul(v, v, transpose_b)",
            (a, a),
            lambda v, _: tf.matmul(v, v, transpose_b=True),
        )
        yield Step(
            "matmul(v, v, transpose_a)",
            (b, b),
            lambda v, _: tf.matmul(v, v, transpose_a=True),
        )
        if isinstance(b, int) and b <= 6:
            yield Step(
                "matmul(v, fixed)",
                (a, 2),
                lambda v, _: tf.matmul(v, np.linspace(-1, 1, 2 * b).reshape(b, 2)),
            )
    if len(dims) == 3:
        yield Step(
            "matmul(v, v, transpose_b)",
            (dims[0], dims[1], dims[1]),
            lambda v, _: tf.matmul(v, v, transpose_b=True),
        )
        yield Step(
            "einsum('abc,abd->acd', v, v)",
            (dims[0], dims[2], dims[2]),
            lambda v, _: tf.einsum("abc,abd->acd", v, v),
        )


_KINDS = [
    _elementwise,
    _with_labels,
    _reductions,
    _normalizations,
    _orders,
    _divisions,
    _weights,
    _selections,
    _largest,
    _columns,
    _reshapes,
    _transposes,
    _joins,
    _products,
]


def _ends(dims) -> list[Step]:
    ends = {
        "reduce_mean(v)": tf.reduce_mean,
        "reduce_sum(v)": tf.reduce_sum,
        "sqrt(reduce_mean(v ** 2) + 1e-3)": lambda v: tf.sqrt(
            tf.reduce_mean(v**2) + 1e-3
        ),
        "reduce_sum(reduce_mean(v, 0))": lambda v: tf.reduce_sum(tf.reduce_mean(v, 0)),
        "reduce_mean(reduce_sum(v, 0))": lambda v: tf.reduce_mean(tf.reduce_sum(v, 0)),
        "reduce_sum(v) / size(v)": lambda v: (
            tf.reduce_sum(v) / tf.cast(tf.size(v), tf.float64)
        ),
        "l2_loss(v)": tf.nn.l2_loss,
    }
    if not dims:
        ends = {"v": tf.identity, "softplus(v)": tf.math.softplus}
    return [Step(text, (), lambda v, _, end=end: end(v)) for text, end in ends.items()]


@st.composite
def _branches(draw) -> Branch:
    source = draw(st.sampled_from(sorted(_SOURCES)))
    dims, steps = _SOURCES[source], []
    for _ in range(draw(st.integers(1, 6))):
        kinds = [
            [step for step in kind(dims) if _most(step.dims) <= _MOST_ELEMENTS]
            for kind in _KINDS
        ]
        kind = draw(st.sampled_from([steps for steps in kinds if steps]))
        step = draw(st.sampled_from(kind))
        steps.append(step)
        dims = step.dims
    return Branch(source, steps, draw(st.sampled_from(_ends(dims))))


@st.composite
def composed_losses(draw) -> Composed:
    return Composed(
        draw(st.sampled_from(sorted(_NETWORKS))),
        draw(st.lists(_branches(), min_size=1, max_size=2)),
        draw(st.sampled_from(sorted(_JOINS))),
        draw(st.booleans()),
    )
