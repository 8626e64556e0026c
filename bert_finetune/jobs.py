"""Job of a run: check all inputs, then train, evaluate, predict and export."""

import dataclasses
import functools
import logging
import pathlib

import tensorflow as tf

from bert_finetune import hf_export, input_pipeline, report, results, training
from bert_finetune.bert_config import BertConfig
from bert_finetune.checkpoint import check_checkpoint
from bert_finetune.evaluations import (
    BEST,
    EVALUATIONS,
    Evaluations,
    best_checkpoint,
    check_evaluations,
)
from bert_finetune.model_fn import WEIGHT_UNIT, serving_input_receiver_fn
from bert_finetune.output_dir import (
    check_output_dir,
    check_same_cut,
    check_same_model,
    check_same_run,
    describe_run,
    describe_training,
)
from bert_finetune.own_task import find_task
from bert_finetune.recomputing import choose
from bert_finetune.settings import HUGGING_FACE, Settings
from bert_finetune.tasks import Task, read_examples
from bert_finetune.token_cache import cached_examples
from bert_finetune.tokenization import (
    WordPieceTokenizer,
    check_case_matches_checkpoint,
    check_max_seq_length,
    check_vocabulary,
)
from bert_finetune.training import Run
from bert_finetune.windows import make_windows
from estimator_accum.programs.bars import BatchBar
from estimator_accum.programs.batches import AUTO
from estimator_accum.programs.cluster import Cluster, enter
from estimator_accum.programs.folder import (
    EVAL_RESULTS,
    SETTINGS_FILE,
    write_results,
)
from estimator_accum.programs.progress import latest_checkpoint
from estimator_accum.programs.strategies import count_replicas
from estimator_accum.reports import CsvReport

_logger = logging.getLogger("tensorflow.bert_finetune")

_EXPORT = "export"
_ALONE = Cluster()


def prepare(settings: Settings, cluster: Cluster = _ALONE) -> Run:
    """Reads and checks everything that the run needs; writes only the token cache.

    Args:
        settings: The user's settings, which `check` has accepted.
        cluster: Cluster of which this process is a task.

    Raises:
        ValueError: If an input does not fit; the message is one sentence.
    """
    task = find_task(settings.task_name)
    _check_files(settings, task)
    _check_output(settings, task)
    config = BertConfig.from_json_file(settings.bert_config_file)
    if settings.hidden_act is not None:
        config = dataclasses.replace(config, hidden_act=settings.hidden_act)
    tokenizer = WordPieceTokenizer(settings.vocab_file, settings.do_lower_case)
    check_vocabulary(tokenizer, config.vocab_size)
    check_max_seq_length(
        settings.max_seq_length,
        is_pair=task.text_b is not None,
        max_position_embeddings=config.max_position_embeddings,
    )
    check_case_matches_checkpoint(settings.do_lower_case, settings.init_checkpoint)
    description = describe_run(settings, task, config, tokenizer)

    def read(file: str, labelled: bool):
        rows = read_examples(task, settings.data_dir, file, labelled=labelled)
        path = pathlib.Path(settings.data_dir) / file
        length = settings.max_seq_length
        return rows, cached_examples(path, rows, tokenizer, length)

    train = windows = None
    if settings.do_train:
        _, train = read(task.train_file, labelled=True)
        windows = make_windows(
            len(train),
            settings.num_train_epochs,
            settings.batches(count_replicas(settings.strategy, cluster)),
            settings.seed,
            None if settings.pad_to_max_length else train.lengths,
            settings.tokens_per_micro_batch,
        )
        settings = _with_recompute(settings, config, windows)
        description |= describe_training(settings, train.checksum, windows.batches)
        check_same_run(settings.output_dir, description)
    _check_checkpoints(settings, task, config, description)
    if settings.do_train:
        check_same_cut(settings.output_dir, description)
    has_dev = settings.do_eval or settings.evaluates_in_training
    dev_files = task.dev_files if has_dev else {}
    test_files = task.test_files if settings.do_predict else {}
    return Run(
        settings,
        cluster,
        task,
        config,
        description,
        train,
        windows,
        {suffix: read(file, labelled=True)[1] for suffix, file in dev_files.items()},
        {name: read(file, labelled=False) for name, file in test_files.items()},
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
    way, reason = choose(config, examples, length, is_accumulating=is_accumulating)
    _logger.info("recompute %s: %s", way, reason)
    return dataclasses.replace(settings, recompute=way)


def _check_files(settings: Settings, task: Task) -> None:
    """Raises ValueError if a task of one's own lacks a file that the run needs."""
    needed = {
        "train_file": (settings.do_train, task.train_file),
        "dev_file": (
            settings.do_eval or settings.evaluates_in_training,
            task.dev_files,
        ),
        "test_file": (settings.do_predict, task.test_files),
    }
    for key, (is_needed, file) in needed.items():
        if is_needed and not file:
            raise ValueError(
                f"`--task_name` {task.source} must name the {key} that this run needs. "
                "Received: none. Add it, or leave out what needs it."
            )


def _check_output(settings: Settings, task: Task) -> None:
    """Raises ValueError if the run could not write its results, maybe hours later."""
    files, folders = [], []
    if settings.do_train:
        files += ["checkpoint", SETTINGS_FILE]
    if settings.do_eval:
        files += [EVAL_RESULTS]
    if settings.evaluates_in_training:
        files += [EVALUATIONS, f"{BEST}/checkpoint", f"{BEST}/{SETTINGS_FILE}"]
        folders += [BEST]
    if settings.do_eval or settings.evaluates_in_training:
        folders += [f"eval{suffix}" for suffix in task.dev_files]
    if settings.do_predict:
        for names in results.prediction_files(task).items():
            files += names
    if settings.do_export:
        folders += [_EXPORT]
    check_output_dir(settings.output_dir, files=files, folders=folders)
    if settings.do_train:
        CsvReport(settings.output_dir, WEIGHT_UNIT).check()
    if settings.evaluates_in_training:
        check_evaluations(settings.output_dir, task.main_metric)


def _check_checkpoints(
    settings: Settings, task: Task, config: BertConfig, description: dict
) -> None:
    """Checks what the model starts from; without training, it must be a classifier."""
    num_labels = task.num_outputs
    own, init = latest_checkpoint(settings.output_dir), settings.init_checkpoint
    best = best_checkpoint(settings.output_dir)
    if settings.eval_every_updates is not None and best is not None:
        check_checkpoint(str(best), config, num_labels)
    elif settings.eval_every_updates is not None and not settings.do_train:
        raise ValueError(
            "Without --do_train, `--eval_every_updates` must find the best checkpoint "
            f"of a run. Received: {settings.output_dir}, where {BEST}/ names none. "
            "Leave it out to use the last one."
        )
    if not settings.do_train:
        if not own and not init:
            raise ValueError(
                "Without --do_train, --output_dir or --init_checkpoint must hold a "
                f"trained classifier. Received: {settings.output_dir} without a "
                "checkpoint, and no --init_checkpoint. Add --do_train=true."
            )
        check_same_model(own or init, description)
    if own:
        check_checkpoint(own, config, num_labels)
    if init:
        is_classifier = not (own or settings.do_train)
        check_checkpoint(init, config, num_labels if is_classifier else None)


def execute(run: Run) -> str | None:
    """Trains, evaluates, predicts and exports, in this order, as the settings say.

    The tasks of a cluster train together; the chief does the rest.

    Returns:
        The results, to be printed; None for the other tasks.
    """
    settings = run.settings
    has_trained = False
    if settings.do_train:
        has_trained = training.train(run, _evaluations(run))
    if not run.cluster.is_chief:
        return None
    enter(Cluster())  # the other tasks may have ended
    estimator = training.make_estimator(run)
    checkpoint = _checkpoint(run)
    # A model_fn that starts from --init_checkpoint needs nothing else of that.
    own = checkpoint if latest_checkpoint(settings.output_dir) else None
    update = _step(checkpoint, "update_step")
    values = {}
    if settings.do_eval:
        values = _evaluate(run, estimator, own, update)
    if settings.do_predict:
        _predict(run, estimator, own)
    if settings.do_export:
        _export(run, estimator, checkpoint)
    return report.end_of_run(run, values, update, has_trained)


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


def _measure(run: Run, estimator, checkpoint: str | None) -> dict[str, float]:
    """Returns a checkpoint's metrics on all dev sets by name, suffixes included."""
    values = {}
    batch_size = run.settings.eval_batch_size
    for suffix, examples in run.dev.items():
        found = estimator.evaluate(
            input_pipeline.eval_input_fn(
                examples, batch_size=batch_size, padded_length=run.padded_length
            ),
            checkpoint_path=checkpoint,
            name=suffix.strip("_") or None,
            hooks=[BatchBar("evaluation", -(-len(examples) // batch_size))],
        )
        # Estimator's own loss is the mean over batches, the last of which may be short.
        del found["loss"], found["global_step"]
        values |= {f"{name}{suffix}": value for name, value in found.items()}
    return values


def _evaluate(
    run: Run, estimator, checkpoint: str | None, update: int
) -> dict[str, float]:
    """Writes `eval_results.txt`; returns the metrics."""
    metrics = _measure(run, estimator, checkpoint)
    values = dict(metrics)
    for suffix in run.dev:
        values[f"loss{suffix}"] = metrics[f"eval_loss{suffix}"]
    values["global_step"] = _step(checkpoint, "global_step") if checkpoint else 0
    values["update_step"] = update
    write_results(run.settings.output_dir, values)
    _logger.info("wrote %s/%s", run.settings.output_dir, EVAL_RESULTS)
    return metrics


def _step(checkpoint: str, name: str) -> int:
    """Returns a counter of a checkpoint; 0 if it has none."""
    reader = tf.train.load_checkpoint(checkpoint)
    return int(reader.get_tensor(name)) if reader.has_tensor(name) else 0


def _export(run: Run, estimator, checkpoint: str) -> None:
    folder = pathlib.Path(run.settings.output_dir) / _EXPORT
    if run.settings.do_export == HUGGING_FACE:
        path = hf_export.export_classifier(
            checkpoint,
            run.config,
            run.task,
            WordPieceTokenizer(run.settings.vocab_file, run.settings.do_lower_case),
            folder / HUGGING_FACE,
        )
    else:
        path = estimator.export_saved_model(
            str(folder), serving_input_receiver_fn, checkpoint_path=checkpoint
        ).decode()
    _logger.info("exported %s", path)


def _predict(run: Run, estimator, checkpoint: str | None) -> None:
    batch_size = run.settings.predict_batch_size
    for name, (rows, examples) in run.test.items():
        predictions = estimator.predict(
            input_pipeline.predict_input_fn(
                examples, batch_size=batch_size, padded_length=run.padded_length
            ),
            checkpoint_path=checkpoint,
            hooks=[BatchBar("prediction", -(-len(examples) // batch_size))],
        )
        order = input_pipeline.order(examples, run.padded_length)
        in_file_order = dict(zip(order.tolist(), predictions, strict=True))
        paths = results.write_predictions(
            run.settings.output_dir,
            run.task,
            name,
            results.prediction_files(run.task)[name],
            rows,
            (in_file_order[number] for number in range(len(rows))),
        )
        _logger.info("wrote %s", " and ".join(map(str, paths)))
