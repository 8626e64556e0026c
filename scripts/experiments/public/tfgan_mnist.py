"""tensorflow/gan, its MNIST networks in a GANEstimator: two losses, two Adams.

The generator is built with its stored statistics for batch normalization, because a
micro-batch has statistics of its own.
"""

import bench
import made_data
import removed
import tensorflow as tf

v1 = tf.compat.v1
output_dir = bench.begin()
removed.add_module("tensorflow_hub")  # for evaluation only

import tensorflow_gan as tfgan
from tensorflow_gan.examples.mnist import networks


def generator(noise, mode):
    """Returns images."""
    del mode
    return networks.unconditional_generator(noise, is_training=False)


estimator = tfgan.estimator.GANEstimator(
    str(output_dir),
    generator_fn=generator,
    discriminator_fn=networks.unconditional_discriminator,
    generator_loss_fn=tfgan.losses.wasserstein_generator_loss,
    discriminator_loss_fn=tfgan.losses.wasserstein_discriminator_loss,
    generator_optimizer=v1.train.AdamOptimizer(0.001, 0.5),
    discriminator_optimizer=v1.train.AdamOptimizer(0.0001, 0.5),
)
estimator.train(made_data.images, max_steps=bench.UPDATES)
