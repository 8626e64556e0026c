"""Gradient accumulation for Keras: tf.keras 2.15, tf_keras, Keras 3.

from estimator_accum.keras import accumulate

optimizer = accumulate(keras.optimizers.AdamW(1e-3), gradient_accumulation_steps=4)
model.compile(optimizer, loss)
model.fit(data)     # every batch is a micro-batch, every fourth one updates
"""

from estimator_accum.keras._accumulate import accumulate
from estimator_accum.keras._callback import AccumulationCallback
from estimator_accum.keras._microbatch import microbatch

__all__ = ["AccumulationCallback", "accumulate", "microbatch"]
