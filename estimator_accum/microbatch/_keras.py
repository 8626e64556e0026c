"""Keras optimizers inside `microbatch_model_fn`, as TensorFlow 2's canned estimators
have them.

`tf.estimator.DNNClassifier` and its like ask `tf.keras.optimizers.legacy.Optimizer`
for `get_updates(loss, variables)`. Where the batch is the window, that is

    optimizer.get_updates(mean over the batch)

by the one rule of this library; elsewhere it is Keras's own.
"""

import contextlib

import tensorflow as tf

from estimator_accum._kinds import current_batch
from estimator_accum._optimizer import AccumulatingOptimizer


class _AsVersion1(tf.compat.v1.train.Optimizer):
    """A Keras optimizer behind the interface that the rule knows.

    It counts its updates in `iterations`, which the canned estimators make the global
    step. Its own clipping acts on the mean over the batch.
    """

    def __init__(self, optimizer):
        super().__init__(use_locking=False, name=optimizer._name)
        self._optimizer = optimizer

    def _create_slots(self, var_list):
        with tf.name_scope(self._optimizer._name):
            self._optimizer._create_all_weights(var_list)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """Updates the variables, and `iterations`."""
        del global_step, name
        return self._optimizer.apply_gradients(grads_and_vars)


@contextlib.contextmanager
def keras_optimizers_accumulate():
    """Makes `get_updates` of Keras's optimizers take the batch as their window."""
    kind = tf.keras.optimizers.legacy.Optimizer
    own = kind.get_updates

    def get_updates(optimizer, loss, params):
        if current_batch() is None:  # another thread's
            return own(optimizer, loss, params)
        _check_alone(optimizer)
        accumulating = AccumulatingOptimizer(_AsVersion1(optimizer), 1)
        return [accumulating.minimize(loss, var_list=params)]

    kind.get_updates = get_updates
    try:
        yield
    finally:
        kind.get_updates = own


def _check_alone(optimizer) -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise ValueError(
            "Inside `microbatch_model_fn` a Keras optimizer must train on one replica. "
            f"Received: {type(optimizer).__name__} on {replicas} replicas. Use "
            "AccumulatingOptimizer in an estimator of tf.compat.v1.estimator, or a "
            "model_fn of your own with make_accumulating_train_op."
        )
