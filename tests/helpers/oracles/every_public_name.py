"""Uses every public name, as mypy --strict sees it."""

from typing import Any

import tensorflow as tf  # type: ignore[import-untyped]

from estimator_accum import (
    AccumulatingOptimizer,
    WatchdogHook,
    batch_mean,
    get_or_create_update_step,
    get_windows,
    make_accumulating_train_op,
    make_accumulation_hooks,
    micro_batch_seed,
    microbatch_model_fn,
    microbatch_step,
    mixed_precision_config,
    per_example,
    recompute,
    set_tf_config,
    watch_signals,
    whole_batch_loss,
)
from estimator_accum.compat import enable_estimator
from estimator_accum.compat.v1 import enable_v1
from estimator_accum.keras import AccumulationCallback, accumulate, microbatch
from estimator_accum.reports import (
    CsvReport,
    MlflowReport,
    Report,
    TensorBoardReport,
    Update,
    WandbReport,
)

enable_estimator()
enable_v1()
watch_signals()
rank: int = set_tf_config().rank


def model_fn(features: Any, labels: Any, mode: str) -> Any:
    features = per_example(recompute(tf.exp)(features))
    features += tf.random.stateless_normal([1], micro_batch_seed("noise"))
    loss = tf.reduce_mean(features - labels)
    train_op = make_accumulating_train_op(loss, tf.compat.v1.train.AdamOptimizer(), 4)
    loss += whole_batch_loss(features, tf.reduce_sum, across_replicas=True)
    mean = batch_mean(loss)
    number: int = len(get_windows())
    optimizer = AccumulatingOptimizer(tf.compat.v1.train.AdamOptimizer(), 4)
    optimizer.minimize(loss)
    return (
        train_op,
        mean,
        number,
        get_or_create_update_step(),
        make_accumulation_hooks(),
    )


wrapped = microbatch_model_fn(model_fn, "auto")
step = microbatch_step(lambda batch: batch, 4)
config = mixed_precision_config("bfloat16", is_forced=True)
optimizer = accumulate(tf.keras.optimizers.Adam(), 4)
model = microbatch(tf.keras.Sequential(), 4)


class Loss(Report):
    def write(self, update: Update) -> None:
        values: dict[str, float] = update.known_values()
        print(update.loss, update.weight_per_sec, values)


class NoBaseClass:
    def check(self) -> None: ...
    def open(self, update_step: int) -> None: ...
    def write(self, update: Update) -> None: ...
    def close(self) -> None: ...


reports: list[Report] = [Loss(), NoBaseClass(), CsvReport("f"), TensorBoardReport("f")]
reports += [MlflowReport("f", run_name="a"), WandbReport("f", mode="offline")]
hooks = [*make_accumulation_hooks(reports=reports), WatchdogHook("f", 60.0)]
callbacks = [AccumulationCallback("apply")]
