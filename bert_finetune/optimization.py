"""AdamW of google-research/bert, with its schedule counted in updates.

    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g * g
    x = x - rate * (m / (sqrt(v) + epsilon) + weight_decay * x)

Source: `optimization.py` of https://github.com/google-research/bert. No bias
correction; weight decay acts on the variable, not through m and v, and leaves layer
normalization and biases out.
"""

import math
import re
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from bert_finetune import active_rows

RateShare = Callable[[str], float]  # of a variable's name

BETA_1, BETA_2 = 0.9, 0.999
EPSILON = 1e-6
WEIGHT_DECAY = 0.01
_NOT_DECAYED = re.compile("LayerNorm|layer_norm|bias")


def learning_rate(
    initial_rate: float,
    update_step: tf.Variable,
    num_updates: int,
    num_warmup_updates: int,
    schedule: str = "linear",
) -> tf.Tensor:
    """Returns the learning rate: linear warm-up from 0, then the schedule.

        update_step < num_warmup_updates:  initial_rate * update_step / num_warmup_updates
        afterwards, linear:     initial_rate * (1 - update_step / num_updates)
                    cosine:     initial_rate * (1 + cos(pi * done)) / 2
                    constant:   initial_rate

    where `done` is the share of the updates after warm-up that are done.

    Args:
        initial_rate: End of the warm-up line, and start at update 0 of the linear decay.
        update_step: Updates so far, int64.
        num_updates: Updates of the whole run, >= 1.
        num_warmup_updates: Updates of warm-up; 0 turns it off.
        schedule: "linear", "cosine" or "constant".

    Returns:
        The rate of the next update, a float32 scalar.
    """
    done = tf.cast(update_step.read_value(), tf.float32)
    if schedule == "linear":
        decayed = initial_rate * (1.0 - tf.minimum(done, num_updates) / num_updates)
    elif schedule == "cosine":
        decays = max(1, num_updates - num_warmup_updates)
        share = tf.minimum(done - num_warmup_updates, decays) / decays
        decayed = initial_rate * (1.0 + tf.cos(math.pi * share)) / 2.0
    else:
        decayed = tf.constant(initial_rate)
    if num_warmup_updates == 0:
        return decayed
    warming = initial_rate * done / num_warmup_updates
    return tf.where(done < num_warmup_updates, warming, decayed)


class AdamWeightDecayOptimizer(tf.compat.v1.train.Optimizer):
    """Adam with decoupled weight decay and without bias correction.

    Slots are `<variable>/adam_m` and `<variable>/adam_v`, as in checkpoints that
    google-research/bert's fine-tuning wrote. Variables are float32 or float64.

    Args:
        rate: Learning rate, a float or a scalar Tensor.
        rate_share: Function of a variable's name that returns its share of the rate;
            None gives each the whole.
    """

    def __init__(self, rate: float | tf.Tensor, rate_share: RateShare | None = None):
        super().__init__(use_locking=False, name="AdamWeightDecayOptimizer")
        self._rate = rate
        self._rate_share = rate_share or (lambda name: 1.0)

    def _valid_dtypes(self):
        return {tf.float32, tf.float64}

    def _create_slots(self, var_list):
        self._set_kinds(var_list)
        for variable in var_list:
            for slot in ("m", "v"):
                self._get_or_make_slot_with_initializer(
                    variable,
                    _zeros,
                    variable.shape,
                    variable.dtype.base_dtype,
                    slot,
                    f"adam_{slot}",
                )

    def _set_kinds(self, var_list) -> None:
        self._kinds = {self._kind_of(v, v.dtype.base_dtype) for v in var_list}

    def _kind_of(self, variable, dtype: tf.DType) -> tuple[tf.DType, float]:
        return dtype, self._rate_share(variable.op.name)

    def _prepare(self):
        rate = tf.convert_to_tensor(self._rate, name="learning_rate")
        self._scalars = {
            (dtype, share): self._scalars_of(rate * share, dtype)
            for dtype, share in self._kinds
        }

    def _scalars_for(self, variable, dtype: tf.DType) -> dict[str, tf.Tensor]:
        return dict(self._scalars[self._kind_of(variable, dtype)])

    def _scalars_of(self, rate: tf.Tensor, dtype: tf.DType) -> dict[str, tf.Tensor]:
        """Returns the kernel's scalars, made once for all variables of a kind."""
        rate, factor = tf.cast(rate, dtype), _root_of_v(dtype)
        scalars = {
            "beta1_power": 0.0,  # no bias correction
            "beta2_power": 0.0,
            "lr": rate * factor,
            "beta1": BETA_1,
            "beta2": BETA_2,
            "epsilon": EPSILON * factor,
            "decay": rate * WEIGHT_DECAY,
        }
        return {name: tf.convert_to_tensor(v, dtype) for name, v in scalars.items()}

    def _resource_apply_dense(self, grad, handle):
        scalars = self._scalars_for(handle, grad.dtype)
        share, (var, m, v) = scalars.pop("decay"), self._resources(handle)
        with tf.control_dependencies(self._decayed(handle, share, grad)):
            # One pass over variable, moments and gradient; single ops would make ten.
            return tf.raw_ops.ResourceApplyAdam(var=var, m=m, v=v, grad=grad, **scalars)

    def _resource_apply_sparse(self, grad, handle, indices):
        # The moments of rows without a gradient decay too, and the rows move.
        scalars = self._scalars_for(handle, grad.dtype)
        share, resources = scalars.pop("decay"), self._resources(handle)
        with tf.control_dependencies([grad]):
            shared = active_rows.share_when_read(resources[:1])
        with tf.control_dependencies(shared):
            decayed = self._decayed(handle, share, grad)
        with tf.control_dependencies(decayed):
            return active_rows.apply_adam(
                f"{handle.op.name}_{handle.shape[0]}",
                resources,
                grad,
                tf.cast(indices, tf.int64),
                scalars,
            )

    def _resources(self, variable) -> list[tf.Tensor]:
        # By `.handle`: a mirrored variable has its own copy in every replica.
        slots = (self.get_slot(variable, slot) for slot in ("m", "v"))
        return [resource.handle for resource in (variable, *slots)]

    def _decayed(self, variable, share: tf.Tensor, grad) -> list[tf.Operation]:
        """Returns the operations that subtract a share of a variable, if it has decay."""
        if not is_decayed(variable.op.name):
            return []
        with tf.control_dependencies([grad]):  # computed from the old value
            value = active_rows.read(variable.handle, grad.dtype)
        return [subtract(variable, share * value)]


def subtract(variable, value: tf.Tensor) -> tf.Operation:
    """Subtracts a value from a replica's own copy of a variable."""
    return tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=value)


def _zeros(shape, dtype: tf.DType, **_) -> tf.Tensor:
    # The session would fold tf.zeros into a constant, which takes the slot's bytes again.
    return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)


def _root_of_v(dtype: tf.DType) -> float:
    """Returns the ratio of the kernel's sqrt(v) to the exact one.

    The kernel computes 1 - beta_2 in the gradient's dtype: for 0.999 in float32 this
    value, and so v, is too small by a relative 1.3e-5. With rate and epsilon scaled by
    the same ratio as sqrt(v), the variable follows the formula.
    """
    rounded = np.asarray(BETA_2, dtype.as_numpy_dtype)
    return math.sqrt(float(1 - rounded) / (1.0 - BETA_2))


def is_decayed(name: str) -> bool:
    """Returns whether a variable of this name has weight decay."""
    return _NOT_DECAYED.search(name) is None
