"""tensorflow/models, Orbit: StandardTrainer under a Controller, update in `step`."""

import keras_bench
import orbit
import tensorflow as tf

from estimator_accum import microbatch_step

tf.keras.utils.set_random_seed(1)
layers = tf.keras.layers
model = tf.keras.Sequential(
    [layers.Input([12]), layers.Dense(16, "tanh"), layers.Dense(8)]
)
optimizer = tf.keras.optimizers.Adam(0.01)


class Trainer(orbit.StandardTrainer):
    """Trains by a loss over all pairs of a batch."""

    def __init__(self, batches, count):
        options = orbit.StandardTrainerOptions(
            use_tf_while_loop=False, use_tf_function=False
        )
        super().__init__(batches, options)
        self._step = microbatch_step(self.step, count)

    def step(self, batch):
        with tf.GradientTape() as tape:
            rows = tf.math.l2_normalize(model(batch, training=True), axis=1)
            logits = rows @ tf.transpose(rows) / 0.5
            labels = tf.range(tf.shape(batch)[0])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        steps.assign_add(1)

    def train_step(self, iterator):
        self._step(next(iterator))


steps = orbit.utils.create_global_step()


def fit(batches, count):
    controller = orbit.Controller(
        trainer=Trainer(batches, count), global_step=steps, steps_per_loop=5
    )
    controller.train(batches.cardinality().numpy())


keras_bench.train(model.trainable_variables, optimizer, keras_bench.normal(12), fit)
