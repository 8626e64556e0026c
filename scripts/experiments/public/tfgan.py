"""tensorflow/gan, gan_model: two minimax losses, two Adams.

Its GANEstimator trains in hooks, which cannot be split, and its train ops of both networks
race with each other; so both gradients come first here.
"""

import bench
import made_data
import removed
import tensorflow as tf

v1 = tf.compat.v1
output_dir = bench.begin()
removed.add_module("tensorflow_hub")  # for evaluation only

import tensorflow_gan as tfgan


def generator(noise):
    """Returns examples."""
    hidden = v1.layers.dense(noise, 32, tf.tanh)
    return v1.layers.dense(hidden, 12, tf.tanh)


def discriminator(examples, noise):
    """Returns a logit of each example."""
    del noise
    hidden = v1.layers.dense(examples, 32, tf.tanh)
    return v1.layers.dense(hidden, 1)


def model_fn(features, labels, mode):
    """Trains both networks on the same batch."""
    gan = tfgan.gan_model(generator, discriminator, labels, features)
    loss = tfgan.gan_loss(
        gan,
        tfgan.losses.modified_generator_loss,
        tfgan.losses.modified_discriminator_loss,
    )
    adams = [v1.train.AdamOptimizer(0.01, beta1) for beta1 in (0.5, 0.9)]
    parts = [
        (loss.generator_loss, gan.generator_variables),
        (loss.discriminator_loss, gan.discriminator_variables),
    ]
    pairs = [
        adam.compute_gradients(*part) for adam, part in zip(adams, parts, strict=True)
    ]
    with tf.control_dependencies([g for part in pairs for g, _ in part]):
        step = v1.train.get_global_step()
        train_op = tf.group(
            adams[0].apply_gradients(pairs[0]),
            adams[1].apply_gradients(pairs[1], step),
        )
    return v1.estimator.EstimatorSpec(
        mode, loss=loss.discriminator_loss, train_op=train_op
    )


estimator = v1.estimator.Estimator(model_fn, str(output_dir))
estimator.train(made_data.noise_and_examples, max_steps=bench.UPDATES)
