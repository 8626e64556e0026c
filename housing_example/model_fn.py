"""The `model_fn` of the regression: feature columns, network, head, accumulation.

Shapes: B = examples of a micro-batch, F = the network's inputs per example.
"""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum import (
    get_or_create_update_step,
    make_accumulating_train_op,
    make_accumulation_hooks,
)
from estimator_accum.programs.saving import make_saver_hooks
from estimator_accum.programs.strategies import scaled
from estimator_accum.programs.tracking import make_reports
from housing_example.features import Moments, feature_columns
from housing_example.settings import Settings
from housing_example.table import TARGET

_UNITS = (16, 8, 4)


def make_model_fn(
    settings: Settings, moments: dict[str, Moments], accumulation_steps: int
) -> Callable:
    """Returns the model_fn for `tf.estimator.Estimator`.

    Args:
        settings: Settings of the run.
        moments: Moments of the training examples' columns.
        accumulation_steps: K [micro-steps per update].
    """
    head = tf.estimator.RegressionHead()  # its loss is the mean over the micro-batch

    def model_fn(features, labels, mode, config):
        prices = _prices(features, moments, settings.seed)  # [B, 1]
        if mode == tf.estimator.ModeKeys.TRAIN:
            return _training(
                head, features, labels, prices, settings, accumulation_steps, config
            )
        spec = head.create_estimator_spec(features, mode, prices, labels=labels)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return spec
        metrics = {
            "mae": tf.compat.v1.metrics.mean_absolute_error(labels, prices),
            "rmse": tf.compat.v1.metrics.root_mean_squared_error(labels, prices),
        }
        return spec._replace(eval_metric_ops=spec.eval_metric_ops | metrics)

    return model_fn


def _training(
    head, features, labels, prices, settings: Settings, accumulation_steps: int, config
):
    # accumulation: the rate's clock counts updates
    update_step = get_or_create_update_step()
    rate = tf.compat.v1.train.cosine_decay(
        settings.learning_rate, update_step, settings.train_updates
    )

    def train_op_fn(loss):
        # accumulation: was optimizer.minimize(loss, global_step)
        return make_accumulating_train_op(
            loss,
            scaled(tf.compat.v1.train.AdamOptimizer(rate), settings),
            accumulation_steps,
            clip_norm=settings.clip_norm or None,
            weight=tf.shape(labels)[0],  # examples: a short micro-batch counts less
        )

    spec = head.create_estimator_spec(
        features,
        tf.estimator.ModeKeys.TRAIN,
        prices,
        labels=labels,
        train_op_fn=train_op_fn,
    )
    # accumulation: a row of train_metrics.csv an update
    hooks = make_accumulation_hooks(
        metrics_dir=config.model_dir,
        reports=make_reports(settings, config.model_dir),
        learning_rate=rate,
        weight_unit="examples",
        total_updates=settings.train_updates,
        save_on_signal="update",
    )
    # A checkpoint is saved after the row of its update.
    return spec._replace(training_hooks=[*hooks, *make_saver_hooks(config)])


def _prices(features, moments: dict[str, Moments], seed: int) -> tf.Tensor:
    """Returns the predicted prices [$1,000], float32 [B, 1]."""
    hidden = tf.compat.v1.feature_column.input_layer(
        features, feature_columns(moments)
    )  # [B, F]
    for number, units in enumerate(_UNITS):
        # elu: where relu's gradient jumps, a rounding error would change the weights
        # permanently.
        hidden = _dense(f"hidden_{number}", units, seed + number, "elu")(hidden)
    scaled = _dense("price", 1, seed + len(_UNITS))(hidden)  # [B, 1]
    return moments[TARGET].mean + moments[TARGET].deviation * scaled


def _dense(name: str, units: int, seed: int, activation: str | None = None):
    # An explicit seed makes the initial weights the same in every graph.
    initializer = tf.keras.initializers.GlorotUniform(seed)
    return tf.keras.layers.Dense(
        units, activation, kernel_initializer=initializer, name=name
    )
