"""The number of examples that Python reads from a static shape.

A batch of N examples may have N as its first static size, where a micro-batch has None:

    loss / (x.shape[0] or 1)      N in the plain model_fn, 1 in micro-batches

So the model_fn is also called in a graph of its own, on a batch of static size, where it
must compute with the same numbers.
"""

import collections
import contextlib
import logging
import random
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from estimator_accum.graph.functions import functions_of, numbers_of
from estimator_accum.graph.names import WRITERS
from estimator_accum.graph.walks import ancestors, data_ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.patches import Request, intercepting
from estimator_accum.microbatch.staging import named_components

# Operations that make floating-point numbers, or copies of them, from integers.
_FROM_INTEGERS = {"BroadcastTo", "Cast", "Fill", "LinSpace", "OneHot", "Tile"}
_logger = logging.getLogger("tensorflow.estimator_accum")


class StaticRows:
    """Comparison of a model_fn on a micro-batch and on a batch of static size.

    Args:
        whole: "features" and "labels" from input_fn.
        make_batch: Returns the `WholeBatch` of such data.
        build: Calls the model_fn on the `sliced` of a batch; returns its EstimatorSpec.
    """

    def __init__(self, whole: dict, make_batch: Callable, build: Callable):
        self._whole, self._make_batch, self._build = whole, make_batch, build
        self._numbers, self._of_whole = Numbers(), None
        self._names = [
            f"{first.shape[0]} examples of {name}"
            for name, (first, *more) in named_components(whole)
            if not more and first.shape.rank and first.shape[0] is not None
        ]
        if self._names:
            self._of_whole = self._call_again(is_static=True)

    def taking(self, gradients: Callable) -> Callable:
        """Returns a function of a `Request`, whose numbers are noted."""
        return gradients if self._of_whole is None else self._numbers.taking(gradients)

    def check(self, spec, batch: WholeBatch) -> None:
        """Raises ValueError if a model_fn computes with the static number of examples.

        Args:
            spec: Its EstimatorSpec on a micro-batch.
            batch: The batch.
        """
        if self._of_whole is None:
            return
        self._numbers.add(_results_of(spec, batch))
        numbers = self._numbers.differences(self._of_whole)
        if not numbers:
            return
        again = self._call_again(is_static=False)
        if again is not None and not self._numbers.differences(again):
            numbers = ", ".join(numbers[:4])
            raise ValueError(
                self._sentence(f"other numbers than for these ({numbers})")
            )
        _logger.warning(
            "micro-batches: the model_fn computes with other numbers in each call (%s), "
            "so whether it reads the static number of examples is not known",
            ", ".join(numbers[:4]),
        )

    def check_error(self, error: Exception) -> None:
        """Raises ValueError if a model_fn failed where a plain one has a static size."""
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_own = frame.f_globals.get("__name__", "").startswith("estimator_accum.")
        if not is_own and re.search("None|not fully defined", str(error)):
            received = f"{type(error).__name__}: {str(error).rstrip('. ')}"
            if self._names:
                raise ValueError(self._sentence(received)) from error

    def _sentence(self, received: str) -> str:
        return (
            "The number of examples must be read from tf.shape: micro-batches have "
            "another one than their batch, so the first static size is None. "
            f"Received: {self._names[0]}, and the model_fn's {received}. Write "
            "tf.shape(tensor)[0] in place of tensor.shape[0]."
        )

    def _call_again(self, is_static: bool) -> "Numbers | None":
        """Returns the numbers of another call, in a graph of its own; None if it fails."""
        numbers, outer = Numbers(), tf.compat.v1.get_default_graph()
        with _same_random_numbers(), tf.Graph().as_default() as graph:
            graph.seed = outer.seed
            tf.compat.v1.train.get_or_create_global_step()
            try:
                batch = self._make_batch(_mapped(_placeholder, self._whole))
                if is_static:
                    batch.sliced = _mapped(_with_rows, batch.sliced, self._whole)
                taking = numbers.taking(lambda request: request.plain())
                with batch.as_current(), intercepting(taking):
                    numbers.add(_results_of(self._build(batch.sliced), batch))
            except Exception as error:  # noqa: BLE001, a user's code raises any
                _logger.warning(
                    "micro-batches: the model_fn cannot be called for a batch of static "
                    "size, so whether it reads this size is not known: %s",
                    error,
                )
                return None
        return numbers


class Numbers:
    """The constants that a model_fn computes with.

    Attributes:
        floats: How often each floating-point number but 0 and 1 occurs.
        integers: Constants from which floating-point numbers are made. Those of
            micro-batches are known of a batch of static size, too.
    """

    def __init__(self):
        self.floats, self.integers = collections.Counter(), set()
        self._gradients = set()  # their operations compute with static sizes themselves

    def taking(self, gradients: Callable) -> Callable:
        """Returns a function of a `Request`, whose numbers are added."""

        def take(request: Request) -> list:
            self.add(request.tops)
            results = gradients(request)
            parts = tf.nest.flatten(results, expand_composites=True)
            self._gradients |= {part.op for part in parts if part is not None}
            return results

        return take

    def add(self, tensors: Iterable[tf.Tensor]) -> None:
        """Adds the constants from which tensors are computed."""
        operations = data_ancestors(
            [tensor.op for tensor in tensors],
            lambda op: () if op in self._gradients else op.inputs,
        )
        counts = collections.Counter()
        for operation in operations:
            tensor = next(iter(operation.outputs), None)
            if operation.type in _FROM_INTEGERS:
                self.integers |= set(_integers_of(operation))
            if operation.type == "Const" and tensor.dtype.is_floating:
                counts.update(numbers_of([operation]))
                if tensor.shape.rank:
                    self.integers.add(("Const", tuple(tensor.shape)))
        callers = [operation for operation in operations if functions_of(operation)]
        counts |= collections.Counter(numbers_of(callers))
        # tf.zeros_like and tf.ones_like make these of a static size alone.
        self.floats += {
            n: k for n, k in counts.items() if n not in (0, 1) and not np.isnan(n)
        }

    def differences(self, whole: "Numbers") -> list[str]:
        """Returns the numbers that one call has, and that of the whole batch has not."""
        floats = {*(whole.floats - self.floats), *(self.floats.keys() - whole.floats)}
        integers = sorted(self.integers - whole.integers, key=str)
        return [*map(str, sorted(floats)), *(f"{n} for {kind}" for kind, n in integers)]


def _integers_of(operation: tf.Operation) -> Iterator[tuple]:
    """Yields the integer constants among an operation's inputs."""
    for i, tensor in enumerate(operation.inputs):
        value = tf.get_static_value(tensor) if tensor.dtype.is_integer else None
        if value is not None:
            yield f"input {i} of {operation.type}", (*value.ravel().tolist(),)


def _results_of(spec, batch: WholeBatch) -> list[tf.Tensor]:
    """Returns the results of a model_fn that depend on its examples."""
    results = [spec.loss, spec.predictions, batch.weight, *batch.losses]
    results = tf.nest.flatten(results, expand_composites=True)
    # Some metrics wait for a change whose value they do not take.
    metrics = tf.nest.flatten(spec.eval_metric_ops)
    updates = ancestors([getattr(metric, "op", metric) for metric in metrics])
    written = [op.inputs[-1] for op in updates if WRITERS.search(op.type)]
    return [t for t in [*results, *written] if isinstance(t, tf.Tensor)]


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leaves the random numbers of Python and NumPy as they were."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _mapped(function: Callable, *structures) -> Any:
    """Returns a structure with a function's results, and with None where it has None."""
    return tf.nest.map_structure(
        lambda *values: None if values[0] is None else function(*values), *structures
    )


def _placeholder(value):
    """Returns a tensor for a feature, of the same static shape."""
    if not isinstance(value, tf.SparseTensor | tf.RaggedTensor | tf.Tensor):
        value = tf.constant(value)
    return tf.nest.map_structure(
        lambda part: tf.compat.v1.placeholder(part.dtype, part.shape),
        value,
        expand_composites=True,
    )


def _with_rows(sliced, value):
    """Returns a feature of a micro-batch with the static size of the batch's."""
    shape = getattr(value, "shape", None)
    rows = shape[0] if shape is not None and len(shape) else None
    if rows is None:
        return sliced
    if isinstance(sliced, tf.SparseTensor):
        shape = tf.concat([[tf.constant(rows, tf.int64)], sliced.dense_shape[1:]], 0)
        return tf.SparseTensor(sliced.indices, sliced.values, shape)
    if isinstance(sliced, tf.RaggedTensor):
        sliced.row_splits.set_shape([rows + 1])
    else:
        sliced.set_shape([rows, *shape[1:]])
    return sliced
