"""The outputs of a whole batch from several micro-batches, with their gradient.

    first pass     outputs_i = model(inputs_i), nothing else is kept
    the caller     loss and metrics of the outputs of all examples, and d loss / d outputs
    second pass    sum_i (d outputs_i / d variable) * (its rows of d loss / d outputs)

Nothing is assumed of the loss. If each example's part of it needs no other example, as a
proof says (`_row_loss.py`), one pass does both. B = examples in the batch, n = examples
in a micro-batch.
"""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum.core.gradients import Gradient
from estimator_accum.keras._forward import Forward


class Cut:
    """A batch, cut into micro-batches, of which the last may have fewer examples.

    Args:
        inputs: Tensors [B, ...].
        micro_batches: Number of micro-batches, at most one for each example.
        targets: Tensors [B, ...], with the weights of examples.

    Attributes:
        number: Number of micro-batches, a scalar.
    """

    def __init__(self, inputs: list[tf.Tensor], micro_batches, targets: list = ()):
        rows = tf.shape(inputs[0])[0]
        checks = [
            tf.debugging.assert_equal(
                tf.shape(tensor)[0],
                rows,
                f"All {name} of a cut batch must have a row for each example. Received: "
                f"{name} with other numbers of rows than the first input. Give each "
                "example its row along axis 0, or train with accumulate().",
            )
            for name, tensors in {
                "inputs": inputs[1:],
                "targets and weights": targets,
            }.items()
            for tensor in tensors
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            self._rows = tf.identity(rows)
        self._size = tf.maximum(-(-self._rows // micro_batches), 1)
        self.number = tf.maximum(-(-self._rows // self._size), 1)

    def part(self, i) -> tf.Tensor:
        """Returns which part of the examples micro-batch number `i` has, float64."""
        rows = tf.minimum(self._size, self._rows - i * self._size)
        return tf.cast(rows / tf.maximum(self._rows, 1), tf.float64)

    def take(self, tensors: list[tf.Tensor], i) -> list[tf.Tensor]:
        """Returns the rows of micro-batch number `i`."""
        begin = i * self._size
        return [tensor[begin : begin + self._size] for tensor in tensors]


def outputs_of(forward: Forward, cut: Cut, inputs: list, seed) -> list[tf.Tensor]:
    """Returns the outputs of all micro-batches, joined."""

    def run(i):
        return [], forward.function(*cut.take(inputs, i), _seed_of(seed, i))

    return _with_rows_of(inputs, _run_all(cut.number, run)[1])


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
    # A loss that gathers rows of the outputs sends slices.
    arriving = [tf.convert_to_tensor(arriving[i]) for i in places]
    if not places:
        return [None] * len(variables)
    # Its forward pass needs no gradient, but would keep activations while it waits.
    with tf.control_dependencies(arriving):
        inputs = [tf.identity(tensor) for tensor in inputs]

    def run(i):
        with tf.GradientTape() as tape:
            outputs = forward.function(*cut.take(inputs, i), _seed_of(seed, i))
            targets = [outputs[i] for i in places]
        gradients = cut.take(arriving, i)
        return tape.gradient(targets, variables, output_gradients=gradients), []

    return _run_all(cut.number, run)[0]


def outputs_and_gradients_of(
    forward: Forward, cut: Cut, inputs: list, seed, targets: list, loss, variables: list
) -> tuple[list[tf.Tensor], list[Gradient | None]]:
    """Returns the results of both passes from one, in a graph.

    Args:
        forward: The model's forward pass.
        cut: The batch.
        inputs: Tensors [B, ...].
        seed: Seed of the batch.
        targets: Tensors [B, ...], arguments of `loss`.
        loss: Function of a micro-batch's part of the batch, of its outputs and of its
            targets; the sum of its values is the loss.
        variables: The trained variables.
    """

    def run(i):
        outputs = forward.function(*cut.take(inputs, i), _seed_of(seed, i))
        part = loss(cut.part(i), outputs, cut.take(targets, i))
        return tf.gradients(part, variables), outputs

    gradients, outputs = _run_all(cut.number, run)
    return _with_rows_of(inputs, outputs), gradients


def _with_rows_of(inputs: list, outputs: list) -> list[tf.Tensor]:
    """Returns outputs with the static number of rows of the inputs, if there is one."""
    for output in outputs:
        output.set_shape(inputs[0].shape[:1].concatenate(output.shape[1:]))
    return outputs


def _run_all(number, run: Callable) -> tuple[list[Gradient | None], list[tf.Tensor]]:
    """Returns the sums and the joined rows of all micro-batches.

    Args:
        number: Number of micro-batches.
        run: Function of i; returns gradients, whose slices are joined, and rows.
    """
    first, rows = run(0)
    dense = [i for i, gradient in enumerate(first) if isinstance(gradient, tf.Tensor)]
    sparse = [i for i, g in enumerate(first) if isinstance(g, tf.IndexedSlices)]

    def split(gradients, rows) -> tuple[list, list]:
        slices = [gradients[i] for i in sparse]
        parts = [part for s in slices for part in (s.values, s.indices)]
        return [gradients[i] for i in dense], [*parts, *rows]

    totals, parts = split(first, rows)
    arrays = _begin(number, parts)

    def add(i, totals, arrays):
        more, parts = split(*run(i))
        # An Add of [1, n] may be fused to a product as its bias, and fail at run time.
        totals = [tf.add_n(pair) for pair in zip(totals, more, strict=True)]
        return i + 1, totals, _write(arrays, i, parts)

    # TensorFlow orders no calls that only read variables: the first micro-batch and the
    # loop would hold their activations at the same time.
    with tf.control_dependencies([*totals, *parts]):
        _, totals, arrays = tf.while_loop(
            lambda i, *_: i < number, add, [1, totals, arrays], parallel_iterations=1
        )
    gradients = [None] * len(first)
    for i, total in zip(dense, totals, strict=True):
        gradients[i] = total
    joined = [array.concat() for array in arrays]
    for k, i in enumerate(sparse):
        values, indices = joined[2 * k : 2 * k + 2]
        gradients[i] = tf.IndexedSlices(values, indices, first[i].dense_shape)
    return gradients, joined[2 * len(sparse) :]


def _seed_of(seed: tf.Tensor, i) -> tf.Tensor:
    return tf.stack([seed[0], seed[1] + i])


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
