"""Keras optimizers of TensorFlow 2's canned estimators inside `microbatch_model_fn`.

`tf.estimator.DNNClassifier` and other canned estimators call `get_updates(loss,
variables)` of a `tf.keras.optimizers.legacy.Optimizer`. If the batch is the window,
that becomes

    optimizer.get_updates(mean over the batch)

by this library's rule; elsewhere it stays Keras's own method.
"""

import contextlib
import threading
from collections.abc import Callable

import tensorflow as tf

from estimator_accum._kinds import current_batch
from estimator_accum._optimizer import AccumulatingOptimizer

_lock = threading.Lock()
_users = []  # what each user of the replaced method found; the first, Keras's own


class _AsVersion1(tf.compat.v1.train.Optimizer):
    """Adapts a Keras optimizer to the interface of `tf.compat.v1.train.Optimizer`.

    It counts its updates in `iterations`, which canned estimators set to the global
    step. Its own clipping acts on the mean over the batch.
    """

    def __init__(self, optimizer):
        super().__init__(use_locking=False, name=optimizer._name)
        self._optimizer = optimizer

    def _create_slots(self, var_list):
        with tf.name_scope(self._optimizer._name):
            self._optimizer._create_all_weights(var_list)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Updates the variables and `iterations`."""
        del global_step, name
        return self._optimizer.apply_gradients(grads_and_vars)


@contextlib.contextmanager
def keras_optimizers_accumulate():
    """Makes `get_updates` of Keras optimizers use the batch as their window."""
    # Replicas build in threads of their own, which may end in any order.
    kind = tf.keras.optimizers.legacy.Optimizer
    with _lock:
        _users.append(kind.get_updates)
        if len(_users) == 1:
            kind.get_updates = _accumulating(kind.get_updates)
    try:
        yield
    finally:
        with _lock:
            own = _users[0]
            _users.pop()
            if not _users:
                kind.get_updates = own


def _accumulating(own: Callable) -> Callable:
    """Returns what stands in for `get_updates`."""

    def get_updates(optimizer, loss, params):
        if current_batch() is None:  # another thread's
            return own(optimizer, loss, params)
        _check_alone(optimizer)
        accumulating = AccumulatingOptimizer(_AsVersion1(optimizer), 1)
        return [accumulating.minimize(loss, var_list=params)]

    return get_updates


def _check_alone(optimizer) -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            "Inside `microbatch_model_fn` a Keras optimizer must train on one replica. "
            f"Received: {type(optimizer).__name__} on {replicas} replicas. Use "
            "AccumulatingOptimizer in an estimator of tf.compat.v1.estimator, or a "
            "model_fn of your own with make_accumulating_train_op."
        )
