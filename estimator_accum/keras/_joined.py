"""The outputs of a whole batch from several micro-batches, with their gradient.

    first pass     outputs_i = model(inputs_i), nothing else is kept
    the caller     loss and metrics of the outputs of all examples, and d loss / d outputs
    second pass    sum_i (d outputs_i / d variable) * (its rows of d loss / d outputs)

Nothing is assumed of the loss. If each example's part of it needs no other example, as a
proof says (`_row_loss.py`), one pass does both. B = examples in the batch, n = examples
in a micro-batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.gradients import Gradient
from estimator_accum.graph.lookups import joined_tensors
from estimator_accum.keras._forward import Forward
from estimator_accum.rows.analysis import Analysis


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

    number = len(inputs)

    def derive(rows, seed, part):
        del part
        outputs = forward.inline(*rows[:number], seed)
        targets = [outputs[i] for i in places]
        return tf.gradients(targets, variables, grad_ys=rows[number:]), []

    def run(i):
        if derived:
            rows = cut.take([*inputs, *arriving], i)
            return derived(rows, _seed_of(seed, i), cut.part(i))
        with tf.GradientTape() as tape:
            outputs = forward.function(*cut.take(inputs, i), _seed_of(seed, i))
            targets = [outputs[i] for i in places]
        gradients = cut.take(arriving, i)
        return tape.gradient(targets, variables, output_gradients=gradients), []

    derived = _with_parts(forward, derive, [*inputs, *arriving])
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

    number = len(inputs)

    def derive(rows, seed, part):
        forward_pass = forward.inline if forward.looks_up else forward.function
        outputs = forward_pass(*rows[:number], seed)
        value = loss(part, outputs, rows[number:])
        return tf.gradients(value, variables), outputs

    def run(i):
        rows = cut.take([*inputs, *targets], i)
        return (derived or derive)(rows, _seed_of(seed, i), cut.part(i))

    derived = _with_parts(forward, derive, [*inputs, *targets])
    gradients, outputs = _run_all(cut.number, run)
    return _with_rows_of(inputs, outputs), gradients


def _with_rows_of(inputs: list, outputs: list) -> list[tf.Tensor]:
    """Returns outputs with the static number of rows of the inputs, if there is one."""
    for output in outputs:
        output.set_shape(inputs[0].shape[:1].concatenate(output.shape[1:]))
    return outputs


class _Part(NamedTuple):
    """Slices of a gradient.

    Attributes:
        values: The slices.
        indices: Their places.
        shape: The variable's shape.
        is_fixed: Whether no example decides the places.
    """

    values: tf.Tensor
    indices: tf.Tensor
    shape: tf.Tensor
    is_fixed: bool


def _with_parts(forward: Forward, derive: Callable, rows: list) -> Callable | None:
    """Returns a traced function whose gradients have their slices apart.

    Args:
        forward: The model's forward pass.
        derive: Function of a micro-batch's rows, seed and part of the batch that returns
            gradients and outputs.
        rows: Tensors [B, ...].

    Returns:
        Such a function, with a list of `_Part` in the place of `IndexedSlices`. None if
        the model looks nothing up, and so has no slices.
    """
    if not forward.looks_up:
        return None
    are_fixed = []

    def trace(*tensors):
        *rows, seed, part = tensors
        gradients, outputs = derive(rows, seed, part)
        graph = tf.compat.v1.get_default_graph()
        slices = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
        analysis = Analysis(rows, new_seeds=[seed, *forward.handles_of_seeds(graph)])
        analysis.analyze([s.indices for s in slices])
        parts = [_parts_of(s, analysis) for s in slices]
        are_fixed[:] = [[part.is_fixed for part in lookups] for lookups in parts]
        parts = iter([[part[:-1] for part in lookups] for lookups in parts])
        gradients = [
            next(parts) if isinstance(g, tf.IndexedSlices) else g for g in gradients
        ]
        return gradients, outputs

    specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in rows]
    specs += [tf.TensorSpec([2], tf.int32), tf.TensorSpec([], tf.float64)]
    run = tf.function(trace, jit_compile=forward.jit_compile, autograph=False)
    run = run.get_concrete_function(*specs)

    def derived(rows, seed, part):
        gradients, outputs = run(*rows, seed, part)
        flags = iter(are_fixed)
        gradients = [
            [_Part(*p, flag) for p, flag in zip(g, next(flags), strict=True)]
            if isinstance(g, list | tuple)
            else g
            for g in gradients
        ]
        return gradients, outputs

    return derived


def _parts_of(slices: tf.IndexedSlices, analysis: Analysis) -> list[_Part]:
    """Returns the slices of each lookup, as many places as it has by itself."""
    indices = joined_tensors(slices.indices)
    for places in indices:
        if analysis.state(places).kind not in ("fixed", "rows"):
            raise ValueError(
                "Places that a cut model looks up must be those of each example, or "
                f"the same for all. Received: those of {places.op.name}, of which it is "
                "not known. Look up outside of tf.function, tf.cond and loops, or train "
                "with accumulate()."
            )
    sizes = [tf.size(places) for places in indices]
    values = tf.split(slices.values, sizes) if len(sizes) > 1 else [slices.values]
    return [
        _Part(value, places, slices.dense_shape, analysis.state(places).kind == "fixed")
        for value, places in zip(values, indices, strict=True)
    ]


def _run_all(number, run: Callable) -> tuple[list[Gradient | None], list[tf.Tensor]]:
    """Returns the sums and the joined rows of all micro-batches.

    Slices whose places are the same in all micro-batches are summed, as those of the
    batch at once are one slice a place; others are joined.

    Args:
        number: Number of micro-batches.
        run: Function of i; returns gradients, whose slices may be in parts, and rows.
    """

    def split(gradients, rows) -> tuple[list, list]:
        totals, joined = [], []
        for gradient in gradients:
            for part in _parts(gradient):
                if isinstance(part, tf.Tensor):
                    totals.append(part)
                elif part.is_fixed:
                    totals.append(part.values)
                else:
                    joined += [part.values, part.indices]
        return totals, [*joined, *rows]

    first, rows = run(0)
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
    totals, joined = iter(totals), iter([array.concat() for array in arrays])

    def whole(gradient) -> Gradient | None:
        if gradient is None or isinstance(gradient, tf.Tensor):
            return None if gradient is None else next(totals)
        slices = [
            (next(totals), part.indices)
            if part.is_fixed
            else (next(joined), next(joined))
            for part in _parts(gradient)
        ]
        values, indices = (tf.concat(column, 0) for column in zip(*slices, strict=True))
        return tf.IndexedSlices(values, indices, _parts(gradient)[0].shape)

    return [whole(gradient) for gradient in first], list(joined)


def _parts(gradient) -> list:
    if gradient is None or isinstance(gradient, list):
        return gradient or []
    if isinstance(gradient, tf.IndexedSlices):
        return [_Part(gradient.values, gradient.indices, gradient.dense_shape, False)]
    return [gradient]


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
