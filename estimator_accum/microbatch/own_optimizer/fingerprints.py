"""Fingerprints of tensors: products with random numbers, a few for many numbers.

    gradient     each block of 1,024 numbers * random numbers    [blocks, 4]
    slices       each slice * random numbers * that of its row   [1024, 4], by row
    rows         each row of an example * random numbers         [rows, 4]

They are linear: the sum of two gradients has the sum of their fingerprints. If tensors
differ in one number by d, each product differs by 0.5 |d| to 1.5 |d|; if rounding makes
all m numbers of a product differ by e, by about sqrt(m) e. A tensor is read where it is,
and no second one of its size is made.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.outermost import value_of_graph

_PRODUCTS = 4  # of the same numbers
_BLOCK = 1024  # numbers of a gradient in one product
_PLACES = 1024  # sums of slices
# Times the spacing of numbers of a dtype. What combines examples differs by far more.
_ROUNDING, _ROUNDING_OF_HALVES = 250, 8
_SEED = (20_011, 20_021)
_NUMBERS_ATTRIBUTE = "_estimator_accum_random_numbers"


class Fingerprint(NamedTuple):
    """Products of a tensor, as tensors or as their values.

    Attributes:
        products: [any number, products].
        numbers: Numbers of the tensor in each product, a scalar or [any number, 1].
        highest: Scalar, the largest number of the tensor.
        lowest: Scalar, the smallest one.
        is_finite: Scalar, whether all numbers of rows are finite; () for a gradient.
        others: The shape of rows without the axis of the examples; () for a gradient.
    """

    products: tf.Tensor
    numbers: tf.Tensor
    highest: tf.Tensor
    lowest: tf.Tensor
    is_finite: tf.Tensor | tuple = ()
    others: tf.Tensor | tuple = ()

    @property
    def size(self) -> float:
        """The largest absolute value; NaN if not all are finite, 0 if there is none."""
        if self.highest < self.lowest:
            return 0.0
        size = float(max(abs(self.highest), abs(self.lowest)))
        return size if np.isfinite(size) else np.nan


def of_gradient(gradient: tf.Tensor | tf.IndexedSlices) -> Fingerprint:
    """Returns the fingerprint of a gradient; NaN where the gradient is not finite.

    That of slices is the same in any order of the slices, and if slices of one row are
    added up.
    """
    with tf.name_scope("fingerprint"):
        if isinstance(gradient, tf.IndexedSlices):
            return _of_slices(gradient)
        return _of_dense(gradient)


def of_rows(tensor: tf.Tensor, axis: int) -> Fingerprint:
    """Returns a fingerprint whose products are in the order of the rows.

    Numbers that are not finite count as 1.

    Args:
        tensor: A tensor with rows, of any dtype.
        axis: Their axis.
    """
    with tf.name_scope("fingerprint"):
        value = _as_floats(tensor)
        is_finite = tf.constant(True)
        if tensor.dtype.is_floating or tensor.dtype.is_complex:
            are_finite = tf.math.is_finite(value)
            is_finite = tf.reduce_all(are_finite)
            value = tf.where(are_finite, value, tf.ones_like(value))
        ends, shape = _ends(value), tf.shape(value)
        if axis:
            before, behind = (
                tf.reduce_prod(s) for s in (shape[:axis], shape[axis + 1 :])
            )
            numbers, rows = before * behind, shape[axis]
            value = tf.reshape(value, [before, rows * behind])
            value = tf.matmul(_random(before, value.dtype), value, transpose_a=True)
            value = tf.reshape(value, [_PRODUCTS, rows, behind])
            value *= tf.transpose(_random(behind, value.dtype))[:, None]
            products = tf.transpose(tf.reduce_sum(value, 2))
        else:
            # A slice of an empty shape is no number for TensorFlow's graph optimizer.
            numbers = tf.concat([[1], shape[1:]], 0)[-1]
            value = tf.reshape(value, [-1, numbers])
            products = tf.matmul(value, _random(numbers, value.dtype))
        others = tf.concat([shape[:axis], shape[axis + 1 :]], 0)
        return Fingerprint(products, numbers, *ends, is_finite, others)


def _of_dense(gradient: tf.Tensor) -> Fingerprint:
    value = tf.reshape(_as_floats(gradient), [-1])
    number = value.shape.num_elements()
    number = tf.size(value) if number is None else number
    full = number // _BLOCK * _BLOCK
    blocks, rest = value[:full], value[full:]
    parts = [(blocks, -1, _BLOCK), (rest, 1, number - full)]
    if isinstance(number, int) and full in (0, number):
        parts = [(value, -1, _BLOCK) if full else (value, 1, number)]
    products = [
        tf.matmul(tf.reshape(part, [count, width]), _random(width, value.dtype))
        for part, count, width in parts
    ]
    products = products[0] if len(products) == 1 else tf.concat(products, 0)
    return Fingerprint(products, tf.minimum(number, _BLOCK), *_ends(value))


def _of_slices(gradient: tf.IndexedSlices) -> Fingerprint:
    values = _as_floats(gradient.values)
    width = values.shape[1:].num_elements()
    if width is None:
        width = tf.reduce_prod(tf.shape(values)[1:])
    values = tf.reshape(values, [tf.shape(gradient.indices)[0], width])
    products = tf.matmul(values, _random(width, values.dtype))
    # Rows of one place have numbers of their own.
    rows = tf.cast(gradient.indices, tf.int64)
    of_places = _random(_BLOCK, values.dtype)[:, :1]
    products *= tf.gather(of_places, rows // _PLACES % _BLOCK)
    numbers = tf.fill([tf.shape(rows)[0], 1], width)
    products, numbers = (
        tf.math.unsorted_segment_sum(tensor, rows % _PLACES, _PLACES)
        for tensor in (products, numbers)
    )
    return Fingerprint(products, numbers, *_ends(values))


def _as_floats(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the values as float32 or float64; halves of complex ones side by side."""
    if tensor.dtype == tf.string:
        tensor = tf.strings.to_hash_bucket_fast(tensor, 2**31)
    if tensor.dtype.is_complex:
        tensor = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    if not tensor.dtype.is_floating:
        return tf.cast(tensor, tf.float64)
    if tensor.dtype == tf.float64 or multiplies_by_fewer_digits():
        return tf.cast(tensor, tf.float64)
    return tf.cast(tensor, tf.float32)


def multiplies_by_fewer_digits() -> bool:
    """Returns whether matrices of float32 may be multiplied with fewer digits: by a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def _ends(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.reduce_max(value), tf.reduce_min(value)


def _random(size: int | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the same numbers again, [size, products]: 0.5 to 1.5, of either sign."""

    def draw():
        drawn = tf.random.stateless_uniform([size, _PRODUCTS], _SEED, -1, 1, dtype)
        return drawn + tf.sign(drawn) / 2

    if not isinstance(size, int):
        return draw()
    numbers = value_of_graph(tf.compat.v1.get_default_graph(), _NUMBERS_ATTRIBUTE, {})
    if (size, dtype) not in numbers:
        numbers[size, dtype] = draw()
    return numbers[size, dtype]


def rounding_of(dtype: tf.DType) -> float:
    """Returns how much rounding may differ, relative to the largest number."""
    if dtype == tf.bfloat16:
        return _ROUNDING_OF_HALVES * 2.0**-8
    if dtype == tf.float16:
        return _ROUNDING_OF_HALVES * 2.0**-10
    return _ROUNDING * float(np.finfo(dtype.real_dtype.as_numpy_dtype).eps)


def ratio_to_rounding(
    difference: np.ndarray, numbers: np.ndarray, bound: float
) -> float:
    """Returns the largest difference of products, in units of its bound.

    Differences that are not finite do not count.

    Args:
        difference: Difference of the products of two tensors.
        numbers: Numbers of the tensors in each product.
        bound: Largest difference of a number of the tensors by rounding.
    """
    bounds = np.broadcast_to(bound * np.sqrt(np.maximum(numbers, 1)), difference.shape)
    counts = np.isfinite(difference) & (difference != 0)
    with np.errstate(divide="ignore"):
        return float(np.max(np.abs(difference[counts]) / bounds[counts], initial=0))
