"""Makes every optimizer of the process accumulate K `session.run` calls.

For training loops without an Estimator, which have no input_fn to cut: the script feeds
or reads micro-batches by itself, and K of them make one update.
"""

import functools
import logging
import threading

import tensorflow as tf

from estimator_accum import AccumulatingOptimizer

_logger = logging.getLogger("tensorflow.estimator_accum")


class _Local(threading.local):
    update = None  # (global_step,) while an update is being made


_local = _Local()


def accumulate_runs(gradient_accumulation_steps: int) -> None:
    """Changes `tf.compat.v1.train.Optimizer` and its subclasses for the process.

    `apply_gradients`, and so `minimize`, accumulates; the K-th call of `session.run`
    updates with the mean. The `global_step` that the script passes counts updates, and
    so do its schedule and its last step.

    Args:
        gradient_accumulation_steps: K >= 1 [session.run calls per update].
    """
    _logger.setLevel(logging.INFO)
    _logger.info(
        "accumulation: %d calls of session.run make one update; global_step, and what "
        "is computed from it, counts updates. What the script does to gradients before "
        "apply_gradients, such as clipping, it does to each call's.",
        gradient_accumulation_steps,
    )
    base = tf.compat.v1.train.Optimizer
    waiting = [base]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        _accumulate_in(kind, gradient_accumulation_steps)

    def init_subclass(cls, **options):
        super(base, cls).__init_subclass__(**options)
        _accumulate_in(cls, gradient_accumulation_steps)

    base.__init_subclass__ = classmethod(init_subclass)


def _accumulate_in(kind: type, steps: int) -> None:
    if issubclass(kind, AccumulatingOptimizer) or "apply_gradients" not in vars(kind):
        return
    own = kind.apply_gradients

    @functools.wraps(own)
    def apply_gradients(self, grads_and_vars, global_step=None, *args, **kwargs):
        if _local.update is not None:  # this is the update
            return own(self, grads_and_vars, _local.update[0], *args, **kwargs)
        _local.update = (global_step,)
        try:
            accumulating = AccumulatingOptimizer(self, steps)
            return accumulating.apply_gradients(
                _after_reads(grads_and_vars, global_step)
            )
        finally:
            _local.update = None

    kind.apply_gradients = apply_gradients


def _after_reads(grads_and_vars, global_step) -> list[tuple]:
    """Returns the pairs; an update waits for what the script reads of `global_step`."""
    handle = getattr(global_step, "handle", None)
    if handle is None:
        return list(grads_and_vars)
    reads = [each for each in handle.consumers() if each.type == "ReadVariableOp"]

    def wait(gradient):
        if gradient is None:
            return None
        with tf.control_dependencies(reads):
            if isinstance(gradient, tf.IndexedSlices):
                values = tf.identity(gradient.values)
                return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
            return tf.identity(gradient)

    return [(wait(gradient), variable) for gradient, variable in grads_and_vars]
