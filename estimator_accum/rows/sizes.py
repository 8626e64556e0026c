"""Arithmetic of sizes that depend on the number of examples n.

    32 * n * T        T is a size that is not known before there are numbers
    3 * #L            #L is the number of entries of the list L, another one in each
                      micro-batch
    1 and 3 n         n * 3 + 1, the number of row splits of as many rows

The value of an integer tensor such as `tf.shape(x)[0] * 4` is a NumPy array of sizes
here. So the arithmetic is NumPy's own.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf


class Unknown(Exception):
    """A size that is no product."""


@dataclasses.dataclass(frozen=True)
class Size:
    """The product factor * n ** power * symbols.

    Attributes:
        factor: An integer.
        power: Exponent of n, the number of examples in the micro-batch.
        symbols: Names of sizes that are not known yet, sorted.
    """

    factor: int = 1
    power: int = 0
    symbols: tuple[str, ...] = ()

    @property
    def counted(self) -> set[str]:
        """Names of the lists whose entries it counts."""
        return {name[1:] for name in self.symbols if name.startswith(_COUNT)}

    @property
    def rows(self) -> "Size | None":
        """Number of rows, of which it is that of the splits; None of another size."""
        match = _SPLITS.fullmatch(self.symbols[0] if len(self.symbols) == 1 else "")
        if match is None or (self.factor, self.power) != (1, 0):
            return None
        return Size(int(match[1]), 1) if match[1] else count(match[2])

    def renamed(self, names: Mapping[str, str]) -> "Size":
        """Returns the size with other names of lists."""
        symbols = [
            _COUNT + names.get(name[1:], name[1:]) if name.startswith(_COUNT) else name
            for name in self.symbols
        ]
        return dataclasses.replace(self, symbols=tuple(sorted(symbols)))

    def __mul__(self, other: "Size") -> "Size":
        symbols = tuple(sorted((*self.symbols, *other.symbols)))
        return Size(self.factor * other.factor, self.power + other.power, symbols)

    def __floordiv__(self, other: "Size") -> "Size":
        symbols = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in symbols:
                raise Unknown
            symbols.remove(symbol)
        if other.power > self.power:
            raise Unknown  # 100 // n
        if other.factor == 0 or self.factor % other.factor:
            return self._number(other, int.__floordiv__)
        factor = self.factor // other.factor
        return Size(factor, self.power - other.power, tuple(symbols))

    def __add__(self, other: "Size") -> "Size":
        if not self.factor or not other.factor:
            return self if not other.factor else other
        if other == ONE and self != ONE:
            return _splits_of(self)
        if other == Size(-1) and self.rows is not None:
            return self.rows
        if self == ONE and other != ONE:
            return _splits_of(other)
        if (self.power, self.symbols) != (other.power, other.symbols):
            raise Unknown
        return dataclasses.replace(self, factor=self.factor + other.factor)

    def __sub__(self, other: "Size") -> "Size":
        return self + Size(-1) * other

    def __mod__(self, other: "Size") -> "Size":
        return self._number(other, int.__mod__)

    def maximum(self, other: "Size") -> "Size":
        """Returns the larger one; a product of sizes without counts is at least 1."""
        for one, size in ((self, other), (other, self)):
            if one == ONE and size.factor > 0 and not size.counted:
                return size
        return self._number(other, max)

    def minimum(self, other: "Size") -> "Size":
        """Returns the smaller one of two numbers."""
        return self._number(other, min)

    def __int__(self) -> int:
        if self.power or self.symbols:
            raise Unknown
        return self.factor

    def _number(self, other: "Size", function) -> "Size":
        try:
            return Size(function(int(self), int(other)))
        except ZeroDivisionError as error:
            raise Unknown from error


_COUNT = "#"
_SPLITS = re.compile(r"#1 and (?:(\d+) n|#(.*))")
ONE, N = Size(), Size(power=1)


def count(name: str) -> Size:
    """Returns the number of entries of a list."""
    return Size(symbols=(f"{_COUNT}{name}",))


def _splits_of(rows: Size) -> Size:
    """Returns the number of row splits, one more than rows."""
    if rows.power == 1 and rows.factor > 0 and not rows.symbols:
        return count(f"1 and {rows.factor} n")
    if not rows.power and not rows.symbols:
        return Size(rows.factor + 1)
    if rows.power or rows.factor != 1 or len(rows.symbols) != 1 or not rows.counted:
        raise Unknown
    if rows.rows is not None:
        raise Unknown
    return count(f"1 and {rows.symbols[0]}")


def sizes(value) -> np.ndarray:
    """Returns integers, of any shape, as an array of sizes."""
    value = np.asarray(value, object)
    flat = [size if isinstance(size, Size) else Size(int(size)) for size in value.flat]
    return _array(flat, value.shape)


def product(factors) -> Size:
    """Returns the product of sizes."""
    result = ONE
    for factor in factors:
        result = result * factor
    return result


def has_examples(value: np.ndarray) -> bool:
    """Returns whether a size depends on the number of examples."""
    return any(size.power for size in value.flat)


def lists_of(value: Iterable[Size]) -> set[str]:
    """Returns the names of the lists whose entries sizes count."""
    return {name for size in value for name in size.counted}


def compute(operation: tf.Operation, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the values of an operation's outputs, from those of its inputs.

    Raises:
        Unknown: If they are no products.
    """
    try:
        results = ARITHMETIC[operation.type](operation, *inputs)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise Unknown from error
    return [sizes(result) for result in results]


def broadcast_gradient_axes(x: np.ndarray, y: np.ndarray) -> list[list[int]]:
    """Returns the axes over which the gradients of `x` and `y` are summed.

    Args:
        x: Shape of one operand, sizes.
        y: Shape of the other.
    """
    rank, reduced = max(len(x), len(y)), ([], [])
    for axis in range(rank):
        a, b = (
            shape[axis - rank + len(shape)] if axis >= rank - len(shape) else ONE
            for shape in (x, y)
        )
        if a != b and ONE not in (a, b):
            raise Unknown
        for size, other, axes, shape in ((a, b, reduced[0], x), (b, a, reduced[1], y)):
            if axis < rank - len(shape) or size == ONE and other != ONE:
                axes.append(axis)
        if a == b == ONE:
            for axes in reduced:
                axes += [] if axis in axes else [axis]
    return list(reduced)


def _array(flat: list, shape) -> np.ndarray:
    array = np.empty(len(flat), object)
    array[:] = flat
    return array.reshape(shape)


def _ints(value: np.ndarray) -> np.ndarray:
    return np.vectorize(int, otypes=[int])(value)


def _elementwise(function):
    return lambda operation, x, y: [np.frompyfunc(function, 2, 1)(x, y)]


def _strided_slice(operation, x, begin, end, strides):
    masks = ("ellipsis_mask", "new_axis_mask")
    if x.ndim != 1 or len(begin) != 1 or any(map(operation.get_attr, masks)):
        raise Unknown
    first = None if operation.get_attr("begin_mask") else int(begin[0])
    last = None if operation.get_attr("end_mask") else int(end[0])
    if operation.get_attr("shrink_axis_mask"):
        return [x[int(begin[0])]]
    return [x[first : last : int(strides[0])]]


def _slice(operation, x, begin, size):
    pairs = zip(_ints(begin), _ints(size), strict=True)
    return [x[tuple(slice(i, None if n == -1 else i + n) for i, n in pairs)]]


def _prod(operation, x, axes):
    if x.ndim != 1 or list(_ints(axes).flat) not in ([0], [-1]):
        raise Unknown
    result = product(x)
    return [[result] if operation.get_attr("keep_dims") else result]


def _of_one(operation, x, axes):
    """The largest, or smallest, of equal sizes."""
    if x.ndim != 1 or len({*x.flat}) != 1 or list(_ints(axes).flat) not in ([0], [-1]):
        raise Unknown
    return [x[:1] if operation.get_attr("keep_dims") else x[0]]


def _split_v(operation, x, lengths, axis):
    lengths = _ints(lengths)
    lengths[lengths == -1] = x.shape[int(axis)] - lengths.sum() - 1
    return np.split(x, np.cumsum(lengths)[:-1], int(axis))


def _stitch(operation, *inputs):
    half = len(inputs) // 2
    merged = {}
    for places, values in zip(inputs[:half], inputs[half:], strict=True):
        pairs = zip(_ints(places).flat, np.reshape(values, -1), strict=True)
        merged |= dict(pairs)
    return [_array([merged[i] for i in range(len(merged))], -1)]


def _cast(operation, x):
    if operation.outputs[0].dtype.size < 4:
        raise Unknown  # it may overflow
    return [x]


def _gather(operation, x, places, axis):
    if operation.get_attr("batch_dims"):
        raise Unknown
    return [np.take(x, _ints(places), int(axis))]


def _squeeze(operation, x):
    return [np.squeeze(x, tuple(operation.get_attr("squeeze_dims")) or None)]


ARITHMETIC = {
    "Add": _elementwise(Size.__add__),
    "AddV2": _elementwise(Size.__add__),
    "Cast": _cast,
    "ConcatV2": lambda op, *xs: [np.concatenate(xs[:-1], int(xs[-1]))],
    "DynamicStitch": _stitch,
    "ExpandDims": lambda op, x, axis: [
        np.expand_dims(x, int(np.reshape(axis, ())[()]))
    ],
    "Fill": lambda op, shape, x: [np.full(_ints(shape), x[()], object)],
    "FloorDiv": _elementwise(Size.__floordiv__),
    "FloorMod": _elementwise(Size.__mod__),
    "GatherV2": _gather,
    "GreaterEqual": lambda op, x, y: [_ints(x) >= _ints(y)],
    "Identity": lambda operation, x: [x],
    "InvertPermutation": lambda operation, x: [np.argsort(_ints(x))],
    "Less": lambda op, x, y: [_ints(x) < _ints(y)],
    "Max": _of_one,
    "Maximum": _elementwise(Size.maximum),
    "Min": _of_one,
    "Minimum": _elementwise(Size.minimum),
    "Mul": _elementwise(Size.__mul__),
    "Pack": lambda op, *xs: [np.stack(xs, op.get_attr("axis"))],
    "Prod": _prod,
    "Range": lambda op, *xs: [np.arange(*map(int, xs))],
    "Reshape": lambda op, x, shape: [np.reshape(x, _ints(shape))],
    "Select": lambda op, c, x, y: [np.where(_ints(c) > 0, x, y)],
    "SelectV2": lambda op, c, x, y: [np.where(_ints(c) > 0, x, y)],
    "Slice": _slice,
    "Split": lambda op, axis, x: np.split(x, op.get_attr("num_split"), int(axis)),
    "SplitV": _split_v,
    "Squeeze": _squeeze,
    "StopGradient": lambda operation, x: [x],
    "StridedSlice": _strided_slice,
    "Sub": _elementwise(Size.__sub__),
    "Unpack": lambda op, x: list(np.moveaxis(x, op.get_attr("axis"), 0)),
}
