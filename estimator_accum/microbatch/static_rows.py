"""Whether a model_fn computes the same for batches without a static size.

    loss / x.shape[0]            another number for None, so Python gets the batch's size
    tf.reshape(x, [n, -1])       the same, if n is tf.shape(x)[0] where x.shape[0] is None

A tensor that is made with the batch's size belongs to the batch: all layers behind it
are computed on the whole batch, and an evaluation has no such part. Google's BERT makes
every layer so, unless it reads None. So a model_fn that reads sizes is also called in
two graphs of its own, and reads None if both compute the same expressions.
"""

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from estimator_accum.graph.internals import seed_generators
from estimator_accum.graph.walks import ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.expressions import Expressions, Numbers
from estimator_accum.microbatch.staging import named_tensors
from estimator_accum.microbatch.static_sizes import (
    StaticSizeError,
    StaticSizes,
    sizes_of_graph,
)


def sizes_of_model_fn(
    batch: WholeBatch, whole: dict, make_batch: Callable, build: Callable
) -> StaticSizes | None:
    """Returns the static sizes that a model_fn must read; None if None is the same.

    Args:
        batch: Its batch.
        whole: "features" and "labels" from input_fn.
        make_batch: Returns the `WholeBatch` of such data.
        build: Calls the model_fn on the `sliced` of a batch; returns its EstimatorSpec.
    """
    sizes = _sizes_of(batch, whole)
    if sizes.has_rows:
        call = functools.partial(_call, whole, make_batch, build, Numbers())
        results, are_read = call(is_static=False)
        if not are_read and results is not None:
            return None
        if results is not None and results == call(is_static=True)[0]:
            return None
    return sizes


def _sizes_of(batch: WholeBatch, whole: dict) -> StaticSizes:
    """Returns the static sizes of the default graph, with those of a batch."""
    sizes = sizes_of_graph(tf.compat.v1.get_default_graph())
    slices = [leaf for leaf in tf.nest.flatten(batch.sliced) if leaf is not None]
    sizes.add(slices, [value for _, value in named_tensors(whole)])
    return sizes


def check_no_sizes(sizes: StaticSizes | None, whole: dict) -> None:
    """Raises ValueError if a model_fn has read a size where all is computed in parts.

    Args:
        sizes: The static sizes that it must read.
        whole: "features" and "labels" from input_fn.
    """
    if sizes is not None and sizes.are_read and sizes.has_rows:
        shapes = [(name, value.shape) for name, value in named_tensors(whole)]
        rows = next(
            f"{s[0]} examples of {name}" for name, s in shapes if s.rank and s[0]
        )
        raise ValueError(
            "The number of examples must be read from tf.shape in an evaluation, a "
            "prediction, and a model_fn that trains by this library: they compute with "
            f"micro-batches alone, which have another one. Received: {rows}, and a "
            "model_fn that computes with other numbers for None. Write "
            "tf.shape(tensor)[0] in place of tensor.shape[0]."
        )


def check_error_is_of_sizes(
    error: StaticSizeError, whole: dict, build: Callable
) -> None:
    """Raises the error that caused another one if the unsplit batch has it, too."""

    def text(error: Exception) -> str:
        return re.sub(r"\d+|None", "", f"{type(error)} {error}")

    with tf.Graph().as_default():
        tf.compat.v1.train.get_or_create_global_step()
        try:
            build(tf.nest.map_structure(_placeholder, whole))
        except Exception as other:  # noqa: BLE001, a user's code raises any
            if text(other) == text(error.__cause__):
                raise error.__cause__ from None


def _call(
    whole: dict,
    make_batch: Callable,
    build: Callable,
    numbers: Numbers,
    is_static: bool,
) -> tuple[list[int] | None, bool]:
    """Calls a model_fn in a graph of its own, whose code reads static sizes or None.

    Returns:
        (numbers of its expressions for the unsplit batch, none if it has read no sizes,
        None if it fails; whether it has read sizes).
    """
    outer = tf.compat.v1.get_default_graph()
    with _same_random_numbers(), tf.Graph().as_default() as graph:
        graph.seed = outer.seed
        tf.compat.v1.train.get_or_create_global_step()
        sizes = sizes_of_graph(graph)  # without any: it notes what is read
        batch = make_batch(tf.nest.map_structure(_placeholder, whole))
        if is_static:
            _sizes_of(batch, whole).may_refuse = False
        try:
            with batch.as_current(), sizes.shown():
                results = _results_of(build(batch.sliced), batch)
        except Exception:  # noqa: BLE001, a user's code raises any; so will the next call
            return None, sizes.are_read
        if not sizes.are_read:
            return [], False
        flatten = functools.partial(tf.nest.flatten, expand_composites=True)
        wholes = flatten([value for _, value in named_tensors(whole)])
        parts = [part for part in flatten(batch.sliced) if part is not None]
        pairs = zip(parts, (value.shape for value in wholes), strict=True)
        try:
            return Expressions(numbers, pairs).numbers_of(*results), True
        except (RecursionError, TypeError, ValueError, tf.errors.OpError):
            return None, True  # such as shapes that do not fit


def _results_of(spec, batch: WholeBatch) -> tuple[list, list]:
    """Returns (tensors, operations) of a model_fn that may depend on its examples."""
    keys = tf.compat.v1.GraphKeys
    results = [spec.loss, spec.predictions, batch.weight, *batch.losses]
    results += [spec.eval_metric_ops]
    results += tf.compat.v1.get_collection(keys.SUMMARIES)
    results = tf.nest.flatten(results, expand_composites=True)
    # Some metrics wait for a change whose value they do not take.
    updates = tf.nest.flatten([spec.eval_metric_ops, spec.train_op])
    variables = tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
    updates += [variable.initializer for variable in variables]
    updates += tf.compat.v1.get_collection(keys.TABLE_INITIALIZERS)
    updates = [getattr(u, "op", u) for u in updates if u is not None]
    tensors = [tensor for tensor in results if isinstance(tensor, tf.Tensor)]
    return tensors, list(ancestors([*updates, *(tensor.op for tensor in tensors)]))


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leaves the random numbers of Python, NumPy and Keras as they were."""
    of_keras = [(generator, generator.getstate()) for generator in seed_generators()]
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for generator, state in of_keras:
            generator.setstate(state)


def _placeholder(value):
    """Returns a tensor for a feature, of the same static shape; None for None."""
    if value is None:
        return None
    if not isinstance(value, tf.SparseTensor | tf.RaggedTensor | tf.Tensor):
        value = tf.constant(value)
    return tf.nest.map_structure(
        lambda part: tf.compat.v1.placeholder(part.dtype, part.shape),
        value,
        expand_composites=True,
    )
