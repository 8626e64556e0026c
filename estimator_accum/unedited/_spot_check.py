"""A spot check: a look at the numbers before the first batch that is cut.

    rows of 8 examples         = those of 1, 3 and 4 of them, joined
    gradients of 8 examples    = the sum of those of 1, 3 and 4

with random gradients of the rows, and the same random numbers in both. It guards the
rules of the analysis, and sees what no analysis of the forward pass can: a gradient of
its own (tf.custom_gradient) that combines examples. It changes no variable. Where it
fails, training is refused.
"""

import itertools
import logging

import numpy as np
import tensorflow as tf

from estimator_accum._graph import (
    data_ancestors,
    functions_of,
    library_of_functions,
    nodes_of,
    operations_with_own_gradients,
)
from estimator_accum._precision import has_low_precision
from estimator_accum._seed import DRAWS
from estimator_accum.microbatch._batch import WholeBatch
from estimator_accum.microbatch._count import is_out_of_memory
from estimator_accum.unedited._head import View

_MOST_EXAMPLES = 8
_GROUPS = (1, 3)  # and the rest
# Times the spacing of numbers of a dtype. What combines examples differs by far more.
_ROUNDING, _ROUNDING_OF_HALVES = 1000, 16
_SCALES = (1.0, 1e-6, 1e6)  # of arriving gradients; shows where they are clipped
_logger = logging.getLogger("tensorflow.estimator_accum")


class SpotCheck:
    """Compares micro-batches of one replica with what they are parts of.

    Args:
        batch: The batch.
        derived: The gradients that were derived, as `Interception.derived`.
        collected: Further tensors whose rows are collected, and the axis of these.
        view: The graph in which they are.
    """

    def __init__(
        self,
        batch: WholeBatch,
        derived: list,
        collected: list[tuple[tf.Tensor, int]],
        view: View,
    ):
        self._batch = batch
        derived = [each for each in derived if each.is_simple]
        gradients = [g for each in derived for g in each.gradients]
        rows = {tensor.ref(): tensor for tensor, _ in collected}
        axes = {tensor.ref(): axis for tensor, axis in collected}
        self._arriving_rows, self._arriving = [], []
        for each in derived:
            for tensor, arriving in zip(each.rows, each.arriving, strict=True):
                axes[tensor.ref()] = each.view.state(tensor).axis
                axes[arriving.ref()] = axes[tensor.ref()]
                rows[tensor.ref()] = tensor
                self._arriving_rows.append(tensor)
                self._arriving.append(arriving)
        parts = tf.nest.flatten(gradients, expand_composites=True)
        needed = data_ancestors([t.op for t in [*rows.values(), *parts]])
        draws = [
            operation.outputs[0]
            for operation in needed
            if operation.type in DRAWS and operation._get_control_flow_context() is None
        ]
        states = View(batch, draws)
        self._draws = [each for each in draws if states.state(each).kind == "rows"]
        axes |= {each.ref(): states.state(each).axis for each in self._draws}
        drawing = _drawing_functions(needed)
        self._rows = [
            tensor
            for tensor in rows.values()
            if tensor.graph.is_fetchable(tensor)
            and not (drawing and drawing & data_ancestors([tensor.op]).keys())
        ]
        # Numbers that cannot be fed: nothing can be compared.
        self._gradients = [] if drawing else gradients
        self._axes = axes
        dtypes = {output.dtype for each in needed for output in each.outputs}
        precisions = [_tolerance(each) for each in dtypes if each.is_floating]
        self._tolerance = max(precisions, default=0.0)
        has_own = operations_with_own_gradients(needed)
        self._scales = _SCALES if has_own else _SCALES[:1]

    def run(self, session: tf.compat.v1.Session, rows: int, feeds: dict) -> None:
        """Looks at the first examples of the batch that is staged.

        Args:
            session: The session itself, without hooks.
            rows: Number of examples in the batch, at least 2.
            feeds: Further feeds of a micro-batch.

        Raises:
            ValueError: If the micro-batches are not parts of the batch.
        """
        feeds = {**feeds, self._batch.rows: rows, self._batch.num_micro_batches: 1}
        if has_low_precision(session):
            self._tolerance = max(self._tolerance, _tolerance(tf.bfloat16))
        number = min(_MOST_EXAMPLES, rows)
        while number > 1:
            try:
                self._compare(session, number, feeds)
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                number //= 2
        _logger.warning(
            "micro-batches: two examples do not fit in memory at once, so it was not "
            "looked at whether their gradients add up"
        )

    def _compare(self, session, number: int, feeds: dict) -> None:
        groups = [size for size in _GROUPS if size < number]
        if sum(groups) >= number:
            groups = groups[:1]
        groups.append(number - sum(groups))
        begins = np.cumsum([0, *groups])
        parts = [slice(*pair) for pair in itertools.pairwise(begins)]
        whole, one = slice(0, number), slice(0, 1)
        sizes = session.run(self._arriving_rows, self._feeds(one, feeds))
        for scale in self._scales:
            arriving = self._random(sizes, number, scale)
            fetches = [self._rows, self._gradients, self._draws]
            given = self._feeds(whole, feeds, arriving, number)
            rows, gradients, draws = session.run(fetches, given)
            given = arriving | dict(zip(self._draws, draws, strict=True))
            apart = [
                session.run(fetches[:2], self._feeds(part, feeds, given, number))
                for part in parts
            ]
            self._check_rows(rows, [each for each, _ in apart], groups)
            self._check_sums(gradients, [each for _, each in apart], number)

    def _random(self, sizes: list[np.ndarray], number: int, scale: float) -> dict:
        """Returns gradients for the rows of `number` examples, from rows of one."""
        random, found = np.random.default_rng(number), {}
        for row, tensor, value in zip(
            self._arriving_rows, self._arriving, sizes, strict=True
        ):
            shape = list(value.shape)
            shape[self._axes[row.ref()]] *= number
            found[tensor] = (scale * random.normal(size=shape)).astype(value.dtype)
        return found

    def _check_rows(self, together: list, apart: list[list], groups: list[int]) -> None:
        for i, tensor in enumerate(self._rows):
            found, axis = [each[i] for each in apart], self._axes[tensor.ref()]
            if _are_joined(together[i], found, axis, self._tolerance):
                continue
            raise ValueError(
                "What micro-batches compute must be the rows that the batch at once "
                f"computes. Received: {tensor.name}, whose rows for {sum(groups)} "
                f"examples are others than for {' and '.join(map(str, groups))} of "
                "them. Declare no Python function per_example that is not, or train "
                "without micro-batches."
            )

    def _check_sums(self, together: list, apart: list[list], number: int) -> None:
        together = list(map(_dense, together))
        apart = [list(map(_dense, each)) for each in apart]
        sizes = [np.abs(each).max(initial=0) for group in apart for each in group]
        largest = max(sizes, default=0)
        for i, gradient in enumerate(self._gradients):
            total = sum(each[i] for each in apart)
            own = sum(np.abs(each[i]) for each in apart)
            bound = self._tolerance * max(own.max(initial=0), 1e-2 * largest)
            difference = np.abs(together[i] - total)
            if np.all((difference <= bound) | ~np.isfinite(total)):
                continue
            raise ValueError(
                "The gradient of a batch must be the sum of its micro-batches', for any "
                "gradient of what each example results in. Received: "
                f"{gradient.name}, which differs for {number} examples at once by "
                f"{difference.max():.1e} of {largest:.1e}. Look for a tf.custom_gradient "
                "that combines examples, or train without micro-batches."
            )

    def _feeds(self, part: slice, feeds: dict, drawn=None, number: int = 1) -> dict:
        """Returns the feeds of a micro-batch of the examples `part`."""
        found = {
            **feeds,
            self._batch.begin: part.start,
            self._batch.size: part.stop - part.start,
        }
        for tensor, value in (drawn or {}).items():
            found[tensor] = self._rows_of(tensor, value, part, number)
        return found

    def _rows_of(self, tensor, value: np.ndarray, part: slice, number: int):
        axis = self._axes[tensor.ref()]
        each = value.shape[axis] // number
        return np.take(value, range(part.start * each, part.stop * each), axis)


def _dense(gradient) -> np.ndarray:
    """Returns a gradient as float64; of slices, the sum for each row that they touch."""
    if not hasattr(gradient, "indices"):
        return np.asarray(gradient).astype(np.float64)
    values = np.asarray(gradient.values).astype(np.float64)
    rows = int(np.max(gradient.indices, initial=-1)) + 1
    if gradient.dense_shape is not None:
        rows = int(gradient.dense_shape[0])
    total = np.zeros((rows, *values.shape[1:]))
    np.add.at(total, np.asarray(gradient.indices), values)
    return total


def _tolerance(dtype: tf.DType) -> float:
    """Returns how much rounding may differ, relative to the largest number."""
    if dtype == tf.bfloat16:
        return _ROUNDING_OF_HALVES * 2.0**-8
    if dtype == tf.float16:
        return _ROUNDING_OF_HALVES * 2.0**-10
    return _ROUNDING * float(np.finfo(dtype.real_dtype.as_numpy_dtype).eps)


def _are_joined(
    together: np.ndarray, apart: list[np.ndarray], axis: int, bound: float
) -> bool:
    """Returns whether rows are those of groups, one group behind the other.

    Args:
        together: The rows.
        apart: The rows of each group.
        axis: The axis of the rows.
        bound: Largest difference by rounding, relative to the largest number.
    """
    if len({(*each.shape[:axis], *each.shape[axis + 1 :]) for each in apart}) > 1:
        return False
    joined = np.concatenate(apart, axis)
    if joined.shape != together.shape:
        return False
    kind = tf.as_dtype(together.dtype)
    if not (kind.is_floating or kind.is_complex):
        return bool(np.all(joined == together))
    wide = np.complex128 if kind.is_complex else np.float64
    joined, together = joined.astype(wide), together.astype(wide)
    finite = np.abs(np.where(np.isfinite(together), together, 0))
    return np.allclose(
        joined, together, bound, bound * finite.max(initial=0), equal_nan=True
    )


def _drawing_functions(operations) -> set[tf.Operation]:
    """Returns the operations that draw random numbers inside a function or loop."""
    library = library_of_functions()
    return {
        operation
        for operation in operations
        if operation.type in DRAWS
        and operation._get_control_flow_context() is not None
        or any(node.op in DRAWS for node in nodes_of(functions_of(operation), library))
    }
