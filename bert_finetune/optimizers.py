"""The optimizers of `--optimizer`, with a share of the rate for each layer.

    adamw      `optimization.AdamWeightDecayOptimizer`
    lamb       You et al. 2020, https://arxiv.org/abs/1904.00962
    adafactor  Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235
    sgd        TensorFlow's, with momentum

t = number of the update, from 1; x = a variable; g = its gradient.
"""

import math
import re

import tensorflow as tf

from bert_finetune.active_rows import read, share_when_read
from bert_finetune.optimization import (
    BETA_1,
    BETA_2,
    EPSILON,
    WEIGHT_DECAY,
    AdamWeightDecayOptimizer,
    RateShare,
    is_decayed,
    subtract,
)
from bert_finetune.settings import Settings
from estimator_accum import get_or_create_update_step

_MOMENTUM = 0.9
_LAYER = re.compile(r"bert/encoder/layer_(\d+)/")


def make_optimizer(
    settings: Settings, rate: tf.Tensor, num_layers: int
) -> tf.compat.v1.train.Optimizer:
    """Returns the optimizer of a run.

    Args:
        settings: Settings of the run.
        rate: Learning rate of the head.
        num_layers: Layers of the encoder.
    """

    def share(name: str) -> float:
        return settings.layerwise_lr_decay ** depth(name, num_layers)

    if settings.optimizer == "adamw":
        return AdamWeightDecayOptimizer(rate, rate_share=share)
    if settings.optimizer == "sgd":
        return MomentumOptimizer(rate, share)
    number = get_or_create_update_step().read_value() + 1
    kinds = {"lamb": LambOptimizer, "adafactor": AdafactorOptimizer}
    return kinds[settings.optimizer](rate, number, rate_share=share)


def depth(name: str, num_layers: int) -> int:
    """Returns how far below the head a variable is: 0 for head and pooler.

    The last layer is at 1, the first one at `num_layers`, the embeddings below it.
    """
    if layer := _LAYER.search(name):
        return num_layers - int(layer[1])
    return num_layers + 1 if "bert/embeddings/" in name else 0


class MomentumOptimizer(tf.compat.v1.train.MomentumOptimizer):
    """Gradient descent with momentum, and a share of the rate for each variable.

        m = 0.9 * m + share * g
        x = x - rate * m

    Args:
        rate: Learning rate, a float or a scalar Tensor.
        rate_share: Function of a variable's name that returns its share of the rate.
    """

    def __init__(self, rate: float | tf.Tensor, rate_share: RateShare):
        super().__init__(rate, _MOMENTUM)
        self._rate_share = rate_share

    def _resource_apply_dense(self, grad, var):
        share = self._rate_share(var.op.name)
        return super()._resource_apply_dense(grad * share, var)

    def _resource_apply_sparse(self, grad, var, indices):
        share = self._rate_share(var.op.name)
        return super()._resource_apply_sparse(grad * share, var, indices)


class LambOptimizer(AdamWeightDecayOptimizer):
    """LAMB: Adam's update, scaled to the norm of the variable.

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g * g
        u = m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon) + weight_decay * x
        x = x - rate * |x| / |u| * u

    Layer normalization and biases have neither decay nor |x| / |u|; nor has a variable
    the latter if one of the norms is 0. Slots are those of AdamW.

    Args:
        rate: Learning rate, a float or a scalar Tensor.
        number: t, an integer scalar Tensor.
        rate_share: As of `AdamWeightDecayOptimizer`.
    """

    def __init__(
        self,
        rate: float | tf.Tensor,
        number: tf.Tensor,
        rate_share: RateShare | None = None,
    ):
        super().__init__(rate, rate_share)
        self._number = number

    def _scalars_of(self, rate: tf.Tensor, dtype: tf.DType) -> dict[str, tf.Tensor]:
        number = tf.cast(self._number, dtype)
        # 1 - beta ** t, without the rounding of a difference.
        corrections = {
            f"correction_{i}": -tf.math.expm1(number * math.log(beta))
            for i, beta in ((1, BETA_1), (2, BETA_2))
        }
        return corrections | {"rate": tf.cast(rate, dtype)}

    def _resource_apply_dense(self, grad, handle):
        scalars = self._scalars_for(handle, grad.dtype)
        m, write_m = self._averaged(handle, "m", BETA_1, grad)
        v, write_v = self._averaged(handle, "v", BETA_2, grad * grad)
        root = tf.sqrt(v / scalars["correction_2"]) + EPSILON
        update = m / scalars["correction_1"] / root
        if is_decayed(handle.op.name):
            value = read(handle.handle, grad.dtype)
            update += WEIGHT_DECAY * value
            norms = tf.norm(value), tf.norm(update)
            ratio = tf.math.divide_no_nan(*norms)
            update *= tf.where(ratio > 0, ratio, tf.ones_like(ratio))
        return tf.group(write_m, write_v, subtract(handle, scalars["rate"] * update))

    def _resource_apply_sparse(self, grad, handle, indices):
        rows = tf.cast(indices, tf.int64)[:, tf.newaxis]
        dense = tf.scatter_nd(rows, grad, tf.constant(handle.shape.as_list(), tf.int64))
        with tf.control_dependencies(share_when_read([handle.handle])):
            return self._resource_apply_dense(dense, handle)

    def _averaged(self, variable, slot: str, decay, value: tf.Tensor):
        """Returns the slot's new moving average, and the operation that writes it."""
        handle = self.get_slot(variable, slot).handle
        old = read(handle, value.dtype)
        new = decay * old + (1.0 - decay) * value
        return new, tf.raw_ops.AssignVariableOp(resource=handle, value=new)


class AdafactorOptimizer(LambOptimizer):
    """Adafactor: the squared gradients of a matrix as row means times column means.

        beta = 1 - t^-0.8
        r = beta * r + (1 - beta) * mean(g * g + 1e-30, of each row)
        c = beta * c + (1 - beta) * mean(g * g + 1e-30, of each column)
        u = g / sqrt(r * c / mean(r))
        x = x - rate * u / max(1, rms(u))

    Vectors have one `v` in place of r, c and their product. The rate is the caller's, as
    in Hugging Face's Trainer, and not relative to the variable or to t. No weight decay.
    Slots are `<variable>/adafactor_r`, `_c` and `_v`.
    """

    def _create_slots(self, var_list):
        self._set_kinds(var_list)
        for variable in var_list:
            shape = variable.shape
            shapes = {"v": shape}
            if shape.rank >= 2:
                shapes = {"r": shape[:-1], "c": shape[:-2].concatenate(shape[-1:])}
            for slot, its_shape in shapes.items():
                self._get_or_make_slot_with_initializer(
                    variable,
                    tf.compat.v1.zeros_initializer(),
                    its_shape,
                    variable.dtype.base_dtype,
                    slot,
                    f"adafactor_{slot}",
                )

    def _scalars_of(self, rate: tf.Tensor, dtype: tf.DType) -> dict[str, tf.Tensor]:
        decay = 1.0 - tf.pow(tf.cast(self._number, dtype), -0.8)
        return {"decay": decay, "rate": tf.cast(rate, dtype)}

    def _resource_apply_dense(self, grad, handle):
        scalars = self._scalars_for(handle, grad.dtype)
        squares, decay = grad * grad + 1e-30, scalars["decay"]
        if grad.shape.rank < 2:
            v, *written = self._averaged(handle, "v", decay, squares)
            update = grad * tf.math.rsqrt(v)
        else:
            means = {"r": tf.reduce_mean(squares, -1), "c": tf.reduce_mean(squares, -2)}
            (r, write_r), (c, write_c) = (
                self._averaged(handle, slot, decay, mean)
                for slot, mean in means.items()
            )
            r /= tf.reduce_mean(r, -1, keepdims=True)
            update = grad * tf.math.rsqrt(r)[..., tf.newaxis]
            update *= tf.math.rsqrt(c)[..., tf.newaxis, :]
            written = [write_r, write_c]
        update /= tf.maximum(tf.sqrt(tf.reduce_mean(update * update)), 1.0)
        return tf.group(*written, subtract(handle, scalars["rate"] * update))
