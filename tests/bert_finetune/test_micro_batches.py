"""One model_fn for both modes: K runs of the train op, or one batch in micro-batches."""

import csv
import dataclasses

import numpy as np
import tensorflow as tf
import tiny_bert

from bert_finetune.model_fn import make_model_fn
from bert_finetune.tasks import get_task
from estimator_accum import microbatch_model_fn

_EXAMPLES = 46  # six windows of 8, the last one short
_UPDATES = 6


def _input_fn_of(batch_size):
    random = np.random.default_rng(0)
    ids = random.integers(5, 25, [_EXAMPLES, 16]).astype(np.int32)
    features = {
        "input_ids": ids,
        "input_mask": np.ones_like(ids),
        "segment_ids": np.zeros_like(ids),
    }
    labels = (ids[:, 0] > 15).astype(np.int32)
    return lambda: tf.data.Dataset.from_tensor_slices((features, labels)).batch(
        batch_size
    )


def _train(folder, steps, batch_size, wrap=lambda model_fn: model_fn):
    """Returns all weights, and the losses that the metrics file reports."""
    settings = tiny_bert.make_settings(folder, folder, folder / "run")
    settings = dataclasses.replace(settings, init_checkpoint=None)
    model_fn = make_model_fn(
        settings, tiny_bert.CONFIG, get_task("CoLA"), _UPDATES, steps
    )
    config = tf.estimator.RunConfig(settings.output_dir, tf_random_seed=1)
    estimator = tf.estimator.Estimator(wrap(model_fn), config=config)
    estimator.train(_input_fn_of(batch_size))
    with open(folder / "run" / "train_metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    values = {
        name: estimator.get_variable_value(name)
        for name in estimator.get_variable_names()
        if "accumul" not in name
    }
    return values, rows


def test_windows_of_micro_steps_and_batches_of_micro_batches_agree(tmp_path):
    by_steps, step_rows = _train(tmp_path / "steps", 4, 2)
    by_batches, batch_rows = _train(
        tmp_path / "batches", 4, 8, lambda model_fn: microbatch_model_fn(model_fn, 4)
    )
    assert by_steps.pop("global_step") == 23
    assert by_batches.pop("global_step") == by_batches["update_step"] == _UPDATES
    assert by_steps.keys() == by_batches.keys()
    for name, value in by_steps.items():
        np.testing.assert_allclose(by_batches[name], value, atol=2e-6, err_msg=name)
    for column in ("examples", "loss", "gradient_norm", "learning_rate"):
        ours, theirs = (
            [float(row[column]) for row in rows] for rows in (batch_rows, step_rows)
        )
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=column)
