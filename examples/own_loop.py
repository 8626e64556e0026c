"""Trains by a loop of its own on batches of 256, whole or in micro-batches of 32."""

import numpy as np
import tensorflow as tf

from estimator_accum import microbatch_step

x = np.random.default_rng(0).normal(size=[2048, 8])


def train(micro_batches):
    random = np.random.default_rng(1)
    hidden = tf.Variable(random.normal(size=[8, 512]) / 8)
    out = tf.Variable(random.normal(size=[512, 4]) / 8)
    temperature = tf.Variable(np.float64(0.5))

    def encode(x):
        return tf.math.l2_normalize(tf.tanh(x @ hidden) @ out, axis=1)

    def step(batch):
        variables = [hidden, out, temperature]
        with tf.GradientTape() as tape:
            logits = encode(batch) @ tf.transpose(encode(batch - 0.1)) / temperature
            labels = tf.range(tf.shape(batch)[0])  # of all examples in the batch
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            )
        gradients = tape.gradient(loss, variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    step = microbatch_step(step, micro_batches)  # the one line; 1 leaves batches whole
    for batch in tf.data.Dataset.from_tensor_slices(x).batch(256):
        loss = step(batch)
    return hidden.numpy(), loss.numpy()


whole, loss = train(micro_batches=1)
ours, our_loss = train(micro_batches=8)
print(f"loss {loss:.3f} unsplit, {our_loss:.3f} in 8 micro-batches")
print(f"largest difference of a weight: {np.abs(ours - whole).max():.1e}")
