"""The `model_fn` of the image classifier: a small CNN, gradient descent, accumulation.

Shapes: B = images of a micro-batch, H x W = pixels of an image.
"""

import os
from collections.abc import Callable

import tensorflow as tf

from distributed.inputs import NUM_CLASSES
from distributed.settings import Settings
from estimator_accum import make_accumulating_train_op, make_accumulation_hooks
from estimator_accum.programs.batches import Batches
from estimator_accum.programs.saving import make_saver_hooks
from estimator_accum.programs.strategies import scaled
from estimator_accum.programs.tracking import make_reports


def make_model_fn(settings: Settings, batches: Batches) -> Callable:
    """Returns the model_fn for `tf.estimator.Estimator`.

    Args:
        settings: Settings of the run.
        batches: Division of each update's examples.
    """

    def model_fn(features, labels, mode, config):
        logits = _logits(features["image"], settings)  # [B, 10]
        predictions = {
            "class": tf.argmax(logits, axis=-1),
            "probabilities": tf.nn.softmax(logits),
        }
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(
                mode,
                predictions,
                export_outputs={
                    "serving_default": tf.estimator.export.PredictOutput(predictions)
                },
            )
        loss = tf.compat.v1.losses.sparse_softmax_cross_entropy(labels, logits)
        if mode == tf.estimator.ModeKeys.EVAL:
            accuracy = tf.compat.v1.metrics.accuracy(labels, predictions["class"])
            return tf.estimator.EstimatorSpec(
                mode, loss=loss, eval_metric_ops={"accuracy": accuracy}
            )
        if settings.log_examples:
            loss = _logged(loss, features["number"], config)
        return _training(loss, labels, settings, batches, config)

    return model_fn


def _training(loss, labels, settings: Settings, batches: Batches, config):
    # accumulation: was optimizer.minimize(loss, global_step)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(settings.learning_rate)
    train_op = make_accumulating_train_op(
        loss,
        scaled(optimizer, settings),
        batches.gradient_accumulation_steps,
        weight=tf.shape(labels)[0],  # examples: the shares may differ by one
    )
    hooks = make_accumulation_hooks(
        metrics_dir=config.model_dir,
        reports=make_reports(settings, config.model_dir),
        weight_unit="examples",
        total_updates=settings.train_updates,
        save_on_signal="update",
    )
    return tf.estimator.EstimatorSpec(
        tf.estimator.ModeKeys.TRAIN,
        loss=loss,
        train_op=train_op,
        training_hooks=[*hooks, *make_saver_hooks(config)],  # rows, then checkpoints
    )


def _logged(loss: tf.Tensor, numbers: tf.Tensor, config) -> tf.Tensor:
    """Returns the loss, after logging a line with the micro-step and its examples.

    The line is written before anything is accumulated. A micro-step that is repeated
    after a restart has several lines, the last of which counts (one for each replica of
    the task).

    Args:
        loss: Loss of the micro-batch, a scalar.
        numbers: Numbers of the examples, int64 [B].
        config: The Estimator's `tf.estimator.RunConfig`.
    """
    path = os.path.join(config.model_dir, f"examples-{config.global_id_in_cluster}.log")
    micro_step = tf.compat.v1.train.get_global_step().read_value() + 1
    line = tf.strings.reduce_join(
        tf.strings.as_string(tf.concat([[micro_step], numbers], 0)), separator=" "
    )
    with tf.control_dependencies([tf.print(line, output_stream=f"file://{path}")]):
        return tf.identity(loss)


def _logits(images: tf.Tensor, settings: Settings) -> tf.Tensor:
    """Returns the logits, float32 [B, 10], of images, uint8 [B, H, W]."""
    seed = settings.seed
    hidden = tf.cast(images, tf.float32)[..., tf.newaxis] / 255  # [B, H, W, 1]
    # elu and average pooling: where the gradients of relu and max pooling jump, a
    # rounding error changes the weights permanently.
    for number, channels in enumerate((8, 16)):
        hidden = tf.keras.layers.Conv2D(
            channels,
            3,
            activation="elu",
            kernel_initializer=_initializer(seed + number),
            name=f"convolution_{number}",
        )(hidden)
        hidden = tf.nn.avg_pool2d(hidden, 2, 2, "VALID")
    hidden = tf.keras.layers.Flatten()(hidden)
    hidden = tf.keras.layers.Dense(
        settings.hidden_units,
        "elu",
        kernel_initializer=_initializer(seed + 2),
        name="hidden",
    )(hidden)  # [B, hidden_units]
    return tf.keras.layers.Dense(
        NUM_CLASSES, kernel_initializer=_initializer(seed + 3), name="logits"
    )(hidden)


def _initializer(seed: int):
    # An explicit seed makes the initial weights the same in every graph.
    return tf.keras.initializers.GlorotUniform(seed)
