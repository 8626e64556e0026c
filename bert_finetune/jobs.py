"""Job of a run: check, train, evaluate, predict, export."""

import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_finetune import (
    diagnosis,
    hf_export,
    input_pipeline,
    report,
    results,
    training,
)
from bert_finetune.bert_config import BertConfig
from bert_finetune.checkpoint import check_checkpoint, checksum_of
from bert_finetune.encoding import EncodedExamples
from bert_finetune.evaluations import Evaluations, best_checkpoint, check_evaluations
from bert_finetune.inputs import Inputs
from bert_finetune.model_fn import WEIGHT_UNIT, serving_input_receiver_fn
from bert_finetune.recomputing import choose
from bert_finetune.results import BEST, EXPORT
from bert_finetune.settings import HUGGING_FACE, Settings
from bert_finetune.training import Run
from bert_finetune.windows import Windows, make_windows, with_fastest_tokens
from estimator_accum.programs.bars import BatchBar
from estimator_accum.programs.batches import AUTO
from estimator_accum.programs.cluster import Cluster, enter
from estimator_accum.programs.folder import (
    EVAL_RESULTS,
    METRICS,
    START_CHECKSUM,
    check_free,
    check_same,
    settings_in,
    write_results,
)
from estimator_accum.programs.job import finished_run
from estimator_accum.programs.progress import (
    latest_checkpoint,
    read_progress,
    read_values,
)
from estimator_accum.programs.strategies import count_replicas
from estimator_accum.reports import CsvReport

_EPOCHS, _EARLIER = "num_train_epochs", "earlier_epochs"

_logger = logging.getLogger("tensorflow.bert_finetune")


def prepare(inputs: Inputs) -> Run:
    """Checks the inputs against devices, checkpoints and the run in the output folder.

    Writes nothing.

    Raises:
        ValueError: If an input does not fit; the message is one sentence.
    """
    settings = inputs.settings
    if not settings.do_train:
        _check_checkpoints(settings, inputs)
        description = inputs.describe_model()
        return Run(**vars(inputs), batches=None, description=description, windows=None)
    CsvReport(settings.output_dir, WEIGHT_UNIT).check()
    if settings.evaluates_in_training:
        check_evaluations(settings.output_dir, inputs.task.main_metric)
    earlier = _earlier_epochs(inputs)
    windows = _windows(inputs, settings.num_train_epochs, earlier)
    if settings.is_cut_for_speed:
        windows = with_fastest_tokens(windows, settings.max_seq_length)
        settings = dataclasses.replace(settings, tokens_per_micro_batch=windows.tokens)
    settings = _with_recompute(settings, inputs.config, windows)
    # The model's part first: another vocabulary makes other examples, too.
    model = inputs.describe_model()
    description = model | settings.description(windows.batches, inputs.checksum) | model
    description[_EARLIER] = earlier
    # Its path may differ from start to start, as on other machines.
    start = settings.init_checkpoint
    description[START_CHECKSUM] = start and checksum_of(start)
    _check_folder(settings, description)
    _check_checkpoints(settings, inputs)
    division = settings.division(windows.batches)
    if read_progress(settings.output_dir).micro_step:
        rule = "An update that a checkpoint holds half of must continue as it began."
        remedy = "Use the same, or another --output_dir."
        check_same(settings.output_dir, division, remedy, rule)
    if earlier != settings_in(settings.output_dir).get(_EARLIER, []):
        _logger.info(
            "training on, from %g epochs to %g: from update %s, the learning rate "
            "follows the schedule of a run of %s updates",
            *(earlier[-1], settings.num_train_epochs),
            f"{_windows(inputs, earlier[-1], earlier[:-1]).num_updates + 1:,}",
            f"{windows.num_updates:,}",
        )
    parts = vars(inputs) | {"settings": settings, "batches": windows.batches}
    return Run(**parts, description=description | division, windows=windows)


def _earlier_epochs(inputs: Inputs) -> list[float]:
    """Returns the epochs of the folder's shorter runs, which this one trains on."""
    settings = inputs.settings
    earlier = settings_in(settings.output_dir).get(_EARLIER, [])
    finished = finished_run(
        settings.output_dir,
        _EPOCHS,
        settings.num_train_epochs,
        lambda run: _windows(inputs, run[_EPOCHS], earlier).num_updates,
    )
    return earlier if finished is None else [*earlier, finished[_EPOCHS]]


def _check_folder(settings: Settings, description: Mapping[str, Any]) -> None:
    """Raises ValueError unless the folder is free or holds the beginning of this run.

    Args:
        settings: Settings of this run.
        description: Content of `run_settings.json`, without the division of an update.
    """
    folder = settings.output_dir
    if start := latest_checkpoint(folder):  # of any name
        check_free(
            folder,
            f"{pathlib.Path(start).name}*",
            "Use another --output_dir, and this one's checkpoint as --init_checkpoint to "
            "start from it.",
        )
    before = settings_in(folder)
    changing = {_EARLIER}
    if before.get(_EARLIER, []) != description[_EARLIER]:
        changing.add(_EPOCHS)
    if START_CHECKSUM not in before:  # an older run
        changing.add(START_CHECKSUM)
    check_same(
        folder,
        {name: value for name, value in description.items() if name not in changing},
        "Use the same settings and files (a finished run trains on with more "
        "--num_train_epochs), or another --output_dir, and --init_checkpoint="
        f"{start or f'{folder}/model.ckpt-*'} there to start from this run's weights.",
    )


def _windows(inputs: Inputs, epochs: float, earlier: Sequence[float]) -> Windows:
    """Returns the windows of a run of this length."""
    settings, train = inputs.settings, inputs.train
    return make_windows(
        len(train),
        epochs,
        settings.batches(count_replicas(settings.strategy, inputs.cluster)),
        settings.seed,
        None if settings.pad_to_max_length else train.lengths,
        settings.tokens_per_micro_batch,
        earlier,
    )


def _with_recompute(settings: Settings, config: BertConfig, windows) -> Settings:
    """Returns the settings of a run whose `--recompute` is no longer open."""
    if settings.recompute != AUTO or windows.batches.is_auto:
        return settings
    length, examples = settings.max_seq_length, windows.batches.largest_share
    if windows.tokens is not None:
        examples = max(1, windows.tokens // length)
    steps = windows.batches.gradient_accumulation_steps
    is_accumulating = windows.tokens is not None or steps > 1
    way, reason = choose(
        config,
        examples,
        length,
        is_accumulating=is_accumulating,
        optimizer=settings.optimizer,
    )
    _logger.info("recompute %s: %s", way, reason)
    return dataclasses.replace(settings, recompute=way)


def _check_checkpoints(settings: Settings, inputs: Inputs) -> None:
    """Checks the first checkpoint; without training, it must be a classifier."""
    config, num_labels = inputs.config, inputs.task.num_outputs
    latest, init = latest_checkpoint(settings.output_dir), settings.init_checkpoint
    best = best_checkpoint(settings.output_dir)
    if settings.eval_every_updates is not None and best is not None:
        check_checkpoint(str(best), config, num_labels)
    elif settings.eval_every_updates is not None and not settings.do_train:
        raise ValueError(
            "Without `--do_train`, `--eval_every_updates` must find the best checkpoint "
            f"of a run. Received: {settings.output_dir}, where {BEST}/ names none. "
            "Leave it out to use the last one."
        )
    if not settings.do_train:
        if not latest and not init:
            raise ValueError(
                "Without `--do_train`, `--output_dir` or `--init_checkpoint` must hold "
                f"a trained classifier. Received: {settings.output_dir} without a "
                "checkpoint, and no --init_checkpoint. Add --do_train=true."
            )
        check_same(
            os.path.dirname(latest or init) or ".",
            inputs.describe_model(),
            "Use the same settings and files, or another classifier.",
            "A trained classifier must be used for the task of its training.",
        )
    if latest:
        check_checkpoint(latest, config, num_labels)
    if init:
        is_classifier = not (latest or settings.do_train)
        check_checkpoint(init, config, num_labels if is_classifier else None)


def execute(run: Run) -> str | None:
    """Trains, evaluates, predicts and exports, in this order, as the settings say.

    The tasks of a cluster train together; the chief does the rest.

    Returns:
        The results, to be printed; None for the other tasks.
    """
    settings = run.settings
    enter(run.cluster)  # which removes a TF_CONFIG that lists only this task
    has_trained = False
    if settings.do_train:
        has_trained = training.train(run, _evaluations(run))
    if not run.cluster.is_chief:
        return None
    enter(Cluster())  # the other tasks may have ended
    estimator = training.make_estimator(run)
    checkpoint = _checkpoint(run)
    # A model_fn that starts from --init_checkpoint needs nothing else of that.
    latest = checkpoint if latest_checkpoint(settings.output_dir) else None
    update = _step(checkpoint, "update_step")
    values, speeds = {}, {}
    if settings.do_eval:
        values, speeds["evaluation"] = _evaluate(run, estimator, latest, update)
    if settings.do_predict:
        speeds["prediction"] = _predict(run, estimator, latest)
    if settings.do_export:
        _export(run, estimator, checkpoint)
    if has_trained:
        path = pathlib.Path(settings.output_dir) / METRICS
        _warn(diagnosis.of_training(path, run.train.labels))
    return report.end_of_run(run, values, speeds, update, has_trained)


def _evaluations(run: Run) -> Evaluations | None:
    settings = run.settings
    if settings.eval_every_updates is None:
        return None
    return Evaluations(
        settings.output_dir,
        run.task.main_metric,
        functools.partial(_measure, run, training.make_estimator(run)),
        every=settings.eval_every_updates,
        num_updates=run.windows.num_updates,
        patience=settings.early_stopping,
    )


def _checkpoint(run: Run) -> str:
    """Returns the checkpoint to use: the run's best or last one, or the first one.

    The best one with --eval_every_updates; the first one is --init_checkpoint, of a run
    that has none of its own.
    """
    settings = run.settings
    if settings.eval_every_updates is None:
        return latest_checkpoint(settings.output_dir) or settings.init_checkpoint
    best = str(best_checkpoint(settings.output_dir))
    _logger.info("using the best checkpoint, %s", best)
    return best


def _cut(run: Run, examples: EncodedExamples, batch_size: int) -> list[np.ndarray]:
    """Returns batches with as many tokens as `batch_size` of the longest examples."""
    tokens = batch_size * run.settings.max_seq_length
    return input_pipeline.cut_by_tokens(examples, tokens, run.padded_length)


class _Speed:
    """Examples and seconds of evaluations or predictions, after their first batches."""

    def __init__(self):
        self.examples, self.secs = 0, 0.0

    def add(self, batches: list[np.ndarray], bar: BatchBar) -> None:
        self.examples += sum(map(len, batches[1:]))
        self.secs += bar.secs

    @property
    def examples_per_sec(self) -> float | None:
        return self.examples / self.secs if self.examples else None


def _measure(
    run: Run, estimator, checkpoint: str | None, speed: _Speed | None = None
) -> dict[str, float]:
    """Returns a checkpoint's metrics on all dev sets by name, suffixes included."""
    values = {}
    for suffix, examples in run.dev.items():
        batches = _cut(run, examples, run.settings.eval_batch_size)
        bar = BatchBar("evaluation", len(batches))
        metrics = estimator.evaluate(
            input_pipeline.eval_input_fn(examples, batches, run.padded_length),
            checkpoint_path=checkpoint,
            name=suffix.strip("_") or None,
            hooks=[bar],
        )
        if speed is not None:
            speed.add(batches, bar)
        # Estimator's own loss is the mean over batches, the last of which may be short.
        del metrics["loss"], metrics["global_step"]
        file = pathlib.Path(run.task.dev_files[suffix]).stem
        _warn(diagnosis.of_evaluation(run.task, file, examples.labels, metrics))
        metrics.pop(diagnosis.ONLY_CLASS, None)
        values |= {f"{name}{suffix}": value for name, value in metrics.items()}
    return values


def _warn(sentence: str | None) -> None:
    if sentence is not None:
        _logger.warning("%s", sentence)


def _evaluate(
    run: Run, estimator, checkpoint: str | None, update: int
) -> tuple[dict[str, float], float | None]:
    """Writes `eval_results.txt`; returns metrics and examples per second."""
    speed = _Speed()
    metrics = _measure(run, estimator, checkpoint, speed)
    values = dict(metrics)
    for suffix in run.dev:
        values[f"loss{suffix}"] = metrics[f"eval_loss{suffix}"]
    values["global_step"] = _step(checkpoint, "global_step") if checkpoint else 0
    values["update_step"] = update
    write_results(run.settings.output_dir, values)
    _logger.info("wrote %s/%s", run.settings.output_dir, EVAL_RESULTS)
    return metrics, speed.examples_per_sec


def _step(checkpoint: str, name: str) -> int:
    """Returns a counter of a checkpoint; 0 if it has none."""
    return int(read_values(checkpoint, [name]).get(name, 0))


def _export(run: Run, estimator, checkpoint: str) -> None:
    folder = pathlib.Path(run.settings.output_dir) / EXPORT
    if run.settings.do_export == HUGGING_FACE:
        path = hf_export.export_classifier(
            checkpoint, run.config, run.task, run.tokenizer, folder / HUGGING_FACE
        )
    else:
        path = estimator.export_saved_model(
            str(folder), serving_input_receiver_fn, checkpoint_path=checkpoint
        ).decode()
    _logger.info("exported %s", path)


def _predict(run: Run, estimator, checkpoint: str | None) -> float | None:
    """Writes predictions in the order of the files; returns examples per second."""
    speed = _Speed()
    for name, (rows, examples) in run.test.items():
        batches = _cut(run, examples, run.settings.predict_batch_size)
        bar = BatchBar("prediction", len(batches))
        predictions = estimator.predict(
            input_pipeline.predict_input_fn(examples, batches, run.padded_length),
            checkpoint_path=checkpoint,
            hooks=[bar],
        )
        numbers = np.concatenate(batches).tolist()
        in_file_order = dict(zip(numbers, predictions, strict=True))
        speed.add(batches, bar)
        paths = results.write_predictions(
            run.settings.output_dir,
            run.task,
            name,
            results.prediction_files(run.task)[name],
            rows,
            (in_file_order[number] for number in range(len(rows))),
        )
        _logger.info("wrote %s", " and ".join(map(str, paths)))
    return speed.examples_per_sec
