"""What a run does: check all inputs, train with accumulation and without, compare."""

import logging
import pathlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import tensorflow as tf

from housing_example import demo_data, input_pipeline
from housing_example.features import TARGET, measure
from housing_example.model_fn import make_model_fn
from housing_example.plots import write_plot
from housing_example.settings import (
    Settings,
    check_output_dir,
    check_settings,
    write_text,
)

_logger = logging.getLogger("tensorflow.housing_example")

_UPDATES_BETWEEN_CHECKPOINTS = 250
_EVAL_BATCH_SIZE = 512
_NUM_SHOWN = 5
_PLOT = "housing.png"
_RESULTS = "results.txt"


@dataclass(frozen=True)
class Job:
    """A checked run: nothing that it needs is missing.

    Attributes:
        settings: What the user asked for.
        train: Training examples.
        test: Test examples.
        checksum: Of both.
    """

    settings: Settings
    train: pd.DataFrame
    test: pd.DataFrame
    checksum: str


class Result(NamedTuple):
    """Of one trained model.

    Attributes:
        metrics: Of the test examples: mae, rmse [unit of MEDV], update_step and more.
        prices: Predicted for the test examples [unit of MEDV].
        losses: The rows of `train_metrics.csv`.
        weights: Trained variables by name.
    """

    metrics: dict[str, float]
    prices: np.ndarray
    losses: pd.DataFrame
    weights: dict[str, np.ndarray]


def prepare(settings: Settings) -> Job:
    """Reads, splits and checks everything that the run needs; writes nothing.

    Raises:
        ValueError: One sentence for whatever does not fit.
    """
    check_settings(settings)
    if settings.train_csv:
        train = input_pipeline.read_table(settings.train_csv)
    else:
        train = demo_data.generate()
    if settings.test_csv:
        test = input_pipeline.read_table(settings.test_csv)
    else:
        train, test = input_pipeline.split(train, settings.train_csv or "the data")
    checksum = input_pipeline.checksum(train, test)
    check_output_dir(settings, checksum)
    return Job(settings, train, test, checksum)


def execute(job: Job) -> str:
    """Trains with accumulation and without; returns the results as lines of text.

    With `gradient_accumulation_steps` 1 there is nothing to compare, and one model.
    """
    settings = job.settings
    folder = pathlib.Path(settings.output_dir)
    for name, table in (("train.csv", job.train), ("test.csv", job.test)):
        write_text(folder / name, input_pipeline.csv_text(table))
    without = settings.without_accumulation()
    runs = {f"without ({without.train_batch_size})": ("without_accumulation", without)}
    if settings.gradient_accumulation_steps > 1:
        sizes = f"{settings.train_batch_size} x {settings.gradient_accumulation_steps}"
        runs = {f"with accumulation ({sizes})": ("with_accumulation", settings)} | runs
    results = {
        label: train_and_test(job, folder / name, its_settings)
        for label, (name, its_settings) in runs.items()
    }
    truth = job.test[TARGET].to_numpy()
    text = results_text(results, truth)
    write_text(folder / _RESULTS, text)
    write_plot(
        folder / _PLOT,
        {label: result.losses for label, result in results.items()},
        {label: result.prices for label, result in results.items()},
        truth,
    )
    return f"{text}\nplot: {folder / _PLOT}"


def train_and_test(job: Job, model_dir: pathlib.Path, settings: Settings) -> Result:
    """Trains one model, from its last checkpoint if it has one, and tests it.

    Args:
        job: Gives the examples, whose CSV files are in the folder above `model_dir`.
        model_dir: Of this model.
        settings: Of this model.
    """
    estimator = tf.estimator.Estimator(
        make_model_fn(settings, measure(job.train)),
        config=tf.estimator.RunConfig(
            model_dir=str(model_dir),
            tf_random_seed=settings.seed,
            save_checkpoints_steps=_UPDATES_BETWEEN_CHECKPOINTS
            * settings.gradient_accumulation_steps,
        ),
    )
    test_input_fn = input_pipeline.eval_input_fn(
        model_dir.parent / "test.csv", _EVAL_BATCH_SIZE
    )
    metrics = _train(job, model_dir, settings, estimator, test_input_fn)
    names = estimator.get_variable_names()
    trained = [name for name in names if name.endswith(("/kernel", "/bias"))]
    return Result(
        metrics,
        np.array([each["predictions"][0] for each in estimator.predict(test_input_fn)]),
        pd.read_csv(model_dir / "train_metrics.csv"),
        {name: estimator.get_variable_value(name) for name in trained},
    )


def _train(job, model_dir, settings: Settings, estimator, test_input_fn) -> dict:
    """Returns the metrics of the test examples when all updates are done."""
    done = _micro_steps_done(model_dir)
    _logger.info(
        "effective batch %d = %d examples x %d micro-steps x 1 replica; "
        "%s micro-steps = %s updates",
        settings.effective_batch_size,
        settings.train_batch_size,
        settings.gradient_accumulation_steps,
        f"{settings.num_micro_steps:,}",
        f"{settings.train_updates:,}",
    )
    if done == settings.num_micro_steps:
        _logger.info("%s is trained already", model_dir)
        return estimator.evaluate(test_input_fn)
    if done:
        _logger.info("going on after micro-step %s", f"{done:,}")
    metrics, _ = tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(
            input_pipeline.train_input_fn(
                model_dir.parent / "train.csv",
                micro_batch_size=settings.train_batch_size,
                shuffle_buffer=len(job.train) if settings.shuffle else 0,
                seed=settings.seed,
                first_micro_step=done,
            ),
            max_steps=settings.num_micro_steps,
        ),
        tf.estimator.EvalSpec(test_input_fn, steps=None, throttle_secs=0),
    )
    return metrics


def _micro_steps_done(model_dir: pathlib.Path) -> int:
    path = tf.train.latest_checkpoint(str(model_dir))
    if path is None:
        return 0
    return int(tf.train.load_checkpoint(path).get_tensor("global_step"))


def largest_difference(
    weights: dict[str, np.ndarray], others: dict[str, np.ndarray]
) -> float:
    """Returns the largest difference of any weight, over its variable's largest."""
    return max(
        float(np.abs(weights[name] - value).max() / np.abs(value).max())
        for name, value in others.items()
    )


def results_text(results: dict[str, Result], truth: np.ndarray) -> str:
    """Returns the metrics, how far the weights are apart, and five predictions.

    Args:
        results: Of one or two models, by label.
        truth: True prices of the test examples [unit of MEDV].
    """
    metrics = [("", "MAE", "RMSE")]
    for label, result in results.items():
        values = (f"{result.metrics[name]:.4f}" for name in ("mae", "rmse"))
        metrics.append((label, *values))
    shown = [("", "true", *results)]
    for row, price in enumerate(truth[:_NUM_SHOWN]):
        values = [price, *(result.prices[row] for result in results.values())]
        shown.append((f"example {row + 1}", *(f"{value:.2f}" for value in values)))
    lines = [
        f"test examples ({len(truth)}) [unit of MEDV]",
        *_aligned(metrics),
        "",
        "predicted prices [unit of MEDV]",
        *_aligned(shown),
    ]
    if len(results) == 2:
        apart = largest_difference(*(result.weights for result in results.values()))
        lines += ["", f"largest difference of any weight: {apart:.1e}"]
        lines[-1] += " of its variable's largest"
    return "\n".join(lines) + "\n"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if number == 0 else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
