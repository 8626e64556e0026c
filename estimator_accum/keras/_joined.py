"""The outputs of a whole batch from several micro-batches, with their gradient.

    first pass     outputs_i = model(inputs_i), nothing else is kept
    the caller     loss and metrics of the outputs of all examples, and d loss / d outputs
    second pass    sum_i (d outputs_i / d variable) * (its rows of d loss / d outputs)

Nothing is assumed of the loss. B = examples in the batch, n = examples in a micro-batch.
"""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum.core.gradients import Gradient
from estimator_accum.keras._forward import Forward


class Cut:
    """A batch, cut into micro-batches, of which the last may have fewer examples.

    Args:
        tensors: Tensors [B, ...].
        micro_batches: Number of micro-batches, at most one for each example.

    Attributes:
        number: Number of micro-batches, a scalar.
    """

    def __init__(self, tensors: list[tf.Tensor], micro_batches):
        rows = [tf.shape(tensor)[0] for tensor in tensors]
        words = (
            "All inputs of a cut model must have a row for each example. Received: "
            "inputs with other numbers of rows. Give each its examples along axis 0, "
            "or train with accumulate()."
        )
        checks = [
            tf.debugging.assert_equal(other, rows[0], words) for other in rows[1:]
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            self._rows = tf.identity(rows[0])
        self._size = tf.maximum(-(-self._rows // micro_batches), 1)
        self.number = tf.maximum(-(-self._rows // self._size), 1)

    def take(self, tensors: list[tf.Tensor], i) -> list[tf.Tensor]:
        """Returns the rows of micro-batch number `i`."""
        begin = i * self._size
        return [tensor[begin : begin + self._size] for tensor in tensors]


def outputs_of(forward: Forward, cut: Cut, inputs: list, seed) -> list[tf.Tensor]:
    """Returns the outputs of all micro-batches, joined."""

    def run(i):
        return forward.function(*cut.take(inputs, i), _seed_of(seed, i))

    return _join(cut.number, run(0), run)


def gradients_of(
    forward: Forward, cut: Cut, inputs: list, seed, arriving: list, variables: list
) -> list[Gradient | None]:
    """Returns the gradients of variables, summed over all micro-batches.

    Args:
        forward: The model's forward pass.
        cut: The batch.
        inputs: Tensors [B, ...].
        seed: Seed of the batch.
        arriving: d loss / d output for each output; None where there is none.
        variables: The trained variables.

    Returns:
        A Tensor for each variable, `IndexedSlices` with the rows of all micro-batches in
        their order, or None.
    """
    places = [i for i, gradient in enumerate(arriving) if gradient is not None]
    arriving = [arriving[i] for i in places]
    if not places:
        return [None] * len(variables)
    # Its forward pass needs no gradient, but would keep activations while it waits.
    with tf.control_dependencies(arriving):
        inputs = [tf.identity(tensor) for tensor in inputs]

    def run(i):
        with tf.GradientTape() as tape:
            outputs = forward.function(*cut.take(inputs, i), _seed_of(seed, i))
            targets = [outputs[i] for i in places]
        return tape.gradient(targets, variables, output_gradients=cut.take(arriving, i))

    return sum_gradients(cut.number, run)


def sum_gradients(number, run: Callable) -> list[Gradient | None]:
    """Returns the sums of `run(i)`, gradients of micro-batch i; slices are joined."""
    first = run(0)
    dense = [i for i, gradient in enumerate(first) if isinstance(gradient, tf.Tensor)]
    sparse = [i for i, g in enumerate(first) if isinstance(g, tf.IndexedSlices)]

    def split(gradients) -> tuple[list, list]:
        slices = [gradients[i] for i in sparse]
        parts = [part for rows in slices for part in (rows.values, rows.indices)]
        return [gradients[i] for i in dense], parts

    totals, parts = split(first)
    arrays = _begin(number, parts)

    def add(i, totals, arrays):
        more, parts = split(run(i))
        totals = [total + value for total, value in zip(totals, more, strict=True)]
        return i + 1, totals, _write(arrays, i, parts)

    _, totals, arrays = tf.while_loop(
        lambda i, *_: i < number, add, [1, totals, arrays], parallel_iterations=1
    )
    result = [None] * len(first)
    for i, total in zip(dense, totals, strict=True):
        result[i] = total
    joined = iter([array.concat() for array in arrays])
    for i in sparse:
        result[i] = tf.IndexedSlices(next(joined), next(joined), first[i].dense_shape)
    return result


def _seed_of(seed: tf.Tensor, i) -> tf.Tensor:
    return tf.stack([seed[0], seed[1] + i])


def _join(number, first: list[tf.Tensor], run: Callable) -> list[tf.Tensor]:
    """Returns the rows of `first`, then those of run(1), run(2), ..."""
    _, arrays = tf.while_loop(
        lambda i, _: i < number,
        lambda i, arrays: (i + 1, _write(arrays, i, run(i))),
        [1, _begin(number, first)],
        parallel_iterations=1,
    )
    return [array.concat() for array in arrays]


def _begin(number, values: list[tf.Tensor]) -> list[tf.TensorArray]:
    arrays = [
        tf.TensorArray(
            value.dtype,
            number,
            infer_shape=False,
            element_shape=[None, *value.shape[1:]],
        )
        for value in values
    ]
    return _write(arrays, 0, values)


def _write(arrays: list[tf.TensorArray], i, values: list) -> list[tf.TensorArray]:
    return [array.write(i, value) for array, value in zip(arrays, values, strict=True)]
