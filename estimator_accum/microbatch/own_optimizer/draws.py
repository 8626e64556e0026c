"""Random numbers of each example, drawn from seeds that all micro-batches share.

    the unsplit batch    numbers of N examples from one seed
    a micro-batch        numbers of its own examples, from that seed and its place

As layers of Keras draw: seeds are variables of Keras 3, which a step moves, and of a
tf.random.Generator. The first micro-batch draws as the unsplit batch does.
"""

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from estimator_accum.graph.copies import change_input
from estimator_accum.graph.internals import context_of
from estimator_accum.graph.names import DRAWS_OF_PARAMETERS, SHAPED_DRAWS
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.head import View, of_batch
from estimator_accum.microbatch.repeatable import (
    take_state_once,
    takes_state,
    with_place,
)
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.rules.blocks import blocks_of
from estimator_accum.rows.sizes import has_examples, lists_of

_BY_SHAPE = {*SHAPED_DRAWS, *DRAWS_OF_PARAMETERS}  # their first input
_KEYS = ("StatelessRandomGetKeyCounter", "StatelessRandomGetKeyCounterAlg")


def draw_by_micro_batch(batch: WholeBatch, operations: Iterable[tf.Operation]) -> None:
    """Has draws of stateless operations depend on the place of their micro-batch.

    A tf.random.Generator moves once per batch. Draws in functions, branches and loops are
    left as they are.

    Args:
        batch: The batch.
        operations: Operations of a micro-batch.
    """
    operations = list(operations)
    _take_states_once(batch, operations)
    draws = [
        operation
        for operation in operations
        if operation.type in _BY_SHAPE and operation.type.startswith("Stateless")
        if operation.graph is batch.begin.graph and context_of(operation) is None
    ]
    analysis, seeds_before = Analysis(()), {}
    with tf.control_dependencies(None):
        for draw in draws:
            seeds = [tensor for tensor in draw.inputs[1:3] if tensor.dtype.is_integer]
            if not any(map(analysis.is_new_in_each_run, seeds)):
                seeds_before[draw] = seeds
                _draw_from(draw, batch.begin)
    # With all seeds: a layer's sizes are known if the numbers before it are of examples.
    view = View(batch, [draw.outputs[0] for draw in seeds_before])
    for draw, seeds in seeds_before.items():
        size = view.analysis.value(draw.inputs[0])
        if size is None or not _is_of_examples(size):
            for i, seed in enumerate(seeds):
                change_input(draw, i + 1, seed)


def _is_of_examples(size: np.ndarray) -> bool:
    """Returns whether a size says how many examples there are, or rows of their blocks."""
    return has_examples(size) or any(map(blocks_of, lists_of(size.flat)))


def _take_states_once(batch: WholeBatch, operations: Iterable[tf.Operation]) -> None:
    """Has all micro-batches draw from one state of each generator."""
    taking, taken = {*filter(takes_state, operations)}, []
    if not taking:
        return
    of_micro_batch = of_batch(batch)
    with batch.as_current():
        for operation in filter(
            taking.__contains__, batch.begin.graph.get_operations()
        ):
            skipped = operation.inputs[2]
            if skipped.op in of_micro_batch:
                skipped = None
            taken = [
                take_state_once(operation, is_shared=True, skipped=skipped, after=taken)
            ]


def _draw_from(draw: tf.Operation, begin: tf.Tensor) -> None:
    """Has a draw's seed depend on the first example of the micro-batch."""
    keys = draw.inputs[1].op
    is_of_key = keys.type in _KEYS
    if draw.inputs[1].shape == [1] and not is_of_key:  # a generator's own state
        change_input(draw, 2, with_place(draw.inputs[2], begin))
        return
    seed = keys.inputs[0] if is_of_key else draw.inputs[1]
    if seed.shape != [2] or (is_of_key and draw.inputs[2].op is not keys):
        return
    # A sum would be the seed of another step, or of another layer.
    mixed = tf.random.experimental.stateless_fold_in(seed, tf.cast(begin, seed.dtype))
    seed = tf.where(tf.equal(begin, 0), seed, mixed)
    if not is_of_key:
        change_input(draw, 1, seed)
        return
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    change_input(draw, 1, key)
    change_input(draw, 2, counter)
