"""google-research/bert's optimizer and learning-rate schedule, counted in updates.

    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g * g
    x = x - rate * (m / (sqrt(v) + epsilon) + weight_decay * x)

Source: `optimization.py` of https://github.com/google-research/bert. No bias
correction; weight decay acts on the variable, not through m and v, and leaves layer
normalization and biases out.
"""

import re

import tensorflow as tf

_NOT_DECAYED = re.compile("LayerNorm|layer_norm|bias")


def learning_rate(
    initial_rate: float,
    update_step: tf.Variable,
    num_updates: int,
    num_warmup_updates: int,
) -> tf.Tensor:
    """Linear warm-up from 0, then the line that falls from `initial_rate` to 0.

        update_step < num_warmup_updates:  initial_rate * update_step / num_warmup_updates
        afterwards:                        initial_rate * (1 - update_step / num_updates)

    Args:
        initial_rate: The rate that both lines are drawn to.
        update_step: Updates so far, int64.
        num_updates: Updates of the whole run, >= 1.
        num_warmup_updates: Updates of warm-up; 0 is none.

    Returns:
        The rate of the next update, a float32 scalar.
    """
    done = tf.cast(update_step.read_value(), tf.float32)
    decayed = initial_rate * (1.0 - tf.minimum(done, num_updates) / num_updates)
    if num_warmup_updates == 0:
        return decayed
    warming = initial_rate * done / num_warmup_updates
    return tf.where(done < num_warmup_updates, warming, decayed)


class AdamWeightDecayOptimizer(tf.compat.v1.train.Optimizer):
    """Adam with decoupled weight decay and without bias correction.

    Slots are `<variable>/adam_m` and `<variable>/adam_v`, as in checkpoints that
    google-research/bert's fine-tuning wrote.

    Args:
        rate: Learning rate, a float or a scalar Tensor.
        weight_decay: Share of a variable that an update of rate 1 takes off.
        beta_1: Decay of the gradient's mean.
        beta_2: Decay of the squared gradient's mean.
        epsilon: Added to sqrt(v).
    """

    def __init__(
        self,
        rate: float | tf.Tensor,
        weight_decay: float = 0.01,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
    ):
        super().__init__(use_locking=False, name="AdamWeightDecayOptimizer")
        self._rate = rate
        self._weight_decay = weight_decay
        self._beta_1 = beta_1
        self._beta_2 = beta_2
        self._epsilon = epsilon

    def _create_slots(self, var_list):
        for variable in var_list:
            self._zeros_slot(variable, "m", "adam_m")
            self._zeros_slot(variable, "v", "adam_v")

    def _prepare(self):
        self._rate_tensor = tf.convert_to_tensor(self._rate, name="learning_rate")

    def _resource_apply_dense(self, grad, handle):
        variable = handle
        m, v = self.get_slot(variable, "m"), self.get_slot(variable, "v")
        next_m = self._beta_1 * m + (1.0 - self._beta_1) * grad
        next_v = self._beta_2 * v + (1.0 - self._beta_2) * tf.square(grad)
        update = next_m / (tf.sqrt(next_v) + self._epsilon)
        if _is_decayed(variable.op.name):
            update += self._weight_decay * variable
        change = tf.cast(self._rate_tensor, grad.dtype) * update
        # On the handles: a mirrored variable has its own copy in every replica.
        with tf.control_dependencies([change]):  # nothing is read after it was written
            return tf.group(
                tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=change),
                tf.raw_ops.AssignVariableOp(resource=m.handle, value=next_m),
                tf.raw_ops.AssignVariableOp(resource=v.handle, value=next_v),
            )

    def _resource_apply_sparse(self, grad, handle, indices):
        # The moments of rows without a gradient decay too, and the rows move.
        rows = tf.cast(indices, tf.int64)[:, tf.newaxis]
        dense = tf.scatter_nd(rows, grad, tf.constant(handle.shape.as_list(), tf.int64))
        return self._resource_apply_dense(dense, handle)


def _is_decayed(name: str) -> bool:
    return _NOT_DECAYED.search(name) is None
