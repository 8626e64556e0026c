"""The `model_fn` of a fine-tuning run: encoder, classifier, loss, accumulation.

Shapes: B = examples of a micro-batch, T = tokens, C = classes, 1 in a regression.
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from bert_finetune import metrics, modeling, optimization
from bert_finetune.checkpoint import init_from_checkpoint
from bert_finetune.optimizers import make_optimizer
from bert_finetune.recomputing import wrapper_of
from bert_finetune.settings import Settings
from bert_finetune.tasks import Task
from estimator_accum import (
    get_or_create_update_step,
    get_windows,
    make_accumulating_train_op,
    make_accumulation_hooks,
)
from estimator_accum.programs.batches import AUTO
from estimator_accum.programs.saving import make_saver_hooks
from estimator_accum.programs.strategies import scaled
from estimator_accum.programs.tracking import make_reports

# K, or a function of `update_step` where windows differ in K.
AccumulationSteps = int | Callable[[tf.Variable], tf.Tensor]
WEIGHT_UNIT = "examples"  # unit of a micro-batch's weight in its window's mean


def make_model_fn(
    settings: Settings,
    bert_config: modeling.BertConfig,
    task: Task,
    num_updates: int = 1,
    gradient_accumulation_steps: AccumulationSteps = 1,
) -> Callable:
    """Returns the model_fn for `tf.estimator.Estimator`.

    Args:
        settings: Settings of the run.
        bert_config: Configuration of the encoder.
        task: The task, which determines the outputs, the loss and the metrics.
        num_updates: Updates of the whole training run, the length of the schedule.
        gradient_accumulation_steps: K [micro-steps per update].
    """
    if not settings.dropout:
        bert_config = dataclasses.replace(
            bert_config, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )

    def model_fn(features, labels, mode, config):
        is_training = mode == tf.estimator.ModeKeys.TRAIN
        is_auto = settings.micro_batch_size == AUTO
        if is_training and is_auto and not settings.pad_to_max_length:
            features = _trimmed(features)
        logits = _logits(settings, bert_config, task, features, is_training)
        if settings.init_checkpoint:
            init_from_checkpoint(settings.init_checkpoint)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return _prediction(mode, logits, task)
        per_example_loss = _per_example_loss(labels, logits, task)  # [B]
        loss = tf.reduce_mean(per_example_loss)
        if is_training:
            return _training(
                settings,
                loss,
                _num_examples(features, labels),
                num_updates,
                gradient_accumulation_steps,
                config,
                bert_config.num_hidden_layers,
            )
        ops = metrics.eval_metric_ops(task.metrics, labels, logits, per_example_loss)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=ops)

    return model_fn


def _logits(
    settings: Settings,
    bert_config: modeling.BertConfig,
    task: Task,
    features: dict[str, tf.Tensor],
    is_training: bool,
) -> tf.Tensor:
    """Returns the classifier's outputs [B, C]."""
    output = modeling.encode(
        bert_config,
        features["input_ids"],
        features["input_mask"],
        features["segment_ids"],
        is_training=is_training,
        is_packed=not settings.pad_to_max_length,
        recomputed=wrapper_of(settings.recompute) if is_training else None,
    )
    return modeling.classifier_logits(
        output.pooled,
        task.num_outputs,
        is_training=is_training,
        dropout_prob=0.1 if settings.dropout else 0.0,
    )


def _per_example_loss(labels: tf.Tensor, logits: tf.Tensor, task: Task) -> tf.Tensor:
    if task.is_regression:
        return tf.math.squared_difference(logits[:, 0], labels)
    if task.is_multi_label:
        losses = tf.nn.sigmoid_cross_entropy_with_logits(
            tf.cast(labels, logits.dtype), logits
        )
        return tf.reduce_mean(losses, axis=1)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def _trimmed(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Trims a micro-batch, padded with its larger batch, to its own longest example."""
    longest = tf.reduce_max(tf.reduce_sum(features["input_mask"], axis=1))
    names = ("input_ids", "input_mask", "segment_ids")
    return features | {name: features[name][:, :longest] for name in names}


def _num_examples(features, labels) -> tf.Tensor:
    """Returns how many examples count; placeholders of an empty share do not."""
    if "is_real_example" in features:
        return tf.reduce_sum(features["is_real_example"])
    return tf.shape(labels)[0]


def _training(
    settings: Settings,
    loss: tf.Tensor,
    num_examples: tf.Tensor,
    num_updates: int,
    gradient_accumulation_steps: AccumulationSteps,
    config,
    num_layers: int,
):
    rate = optimization.learning_rate(
        settings.learning_rate,
        get_or_create_update_step(),
        num_updates,
        int(num_updates * settings.warmup_proportion),
        settings.lr_schedule,
    )
    # accumulation: the train op, whose weight makes a short last micro-batch count less
    train_op = make_accumulating_train_op(
        loss,
        scaled(make_optimizer(settings, rate, num_layers), settings),
        gradient_accumulation_steps,
        clip_norm=settings.clip_norm or None,
        weight=num_examples,
    )
    num_copies = int(settings.eval_every_updates is not None)  # of the best checkpoint
    # accumulation: a window that stays partial at the end of the data is applied
    hooks = make_accumulation_hooks(
        metrics_dir=config.model_dir,
        reports=make_reports(settings, config.model_dir),
        learning_rate=rate,
        weight_unit=WEIGHT_UNIT,
        total_updates=num_updates,
        save_on_signal=True,
    )
    hooks += make_saver_hooks(config, num_copies)  # rows, then checkpoints
    return tf.estimator.EstimatorSpec(
        tf.estimator.ModeKeys.TRAIN,
        loss=get_windows()[-1].mean_loss,  # of the window, not of its last micro-batch
        train_op=train_op,
        training_hooks=hooks,
    )


def _prediction(mode, logits: tf.Tensor, task: Task):
    if task.is_regression:
        predictions = {"score": logits[:, 0]}  # [B]
    elif task.is_multi_label:
        probabilities = tf.sigmoid(logits)  # [B, C]
        predictions = {
            "probabilities": probabilities,
            "labels": tf.cast(probabilities > 0.5, tf.int32),
        }
    else:
        label = tf.argmax(logits, axis=-1, output_type=tf.int32)
        predictions = {
            "probabilities": tf.nn.softmax(logits, axis=-1),  # [B, C]
            "label": label,  # [B]
            "class": tf.gather(tf.constant(task.class_names), label),  # [B], its name
        }
    return tf.estimator.EstimatorSpec(
        mode,
        predictions=predictions,
        export_outputs={
            "serving_default": tf.estimator.export.PredictOutput(predictions)
        },
    )


def serving_input_receiver_fn():
    """Returns a receiver of `input_ids`, `input_mask`, `segment_ids`, int32 [B, T]."""
    features = {
        name: tf.compat.v1.placeholder(tf.int32, [None, None], name=name)
        for name in ("input_ids", "input_mask", "segment_ids")
    }
    return tf.estimator.export.ServingInputReceiver(features, features)
