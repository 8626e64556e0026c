"""Job of a run: check all inputs, then train, evaluate, predict and export."""

import logging
import pathlib

import tensorflow as tf

from bert_finetune import input_pipeline, results, training
from bert_finetune.bert_config import BertConfig
from bert_finetune.checkpoint import check_checkpoint
from bert_finetune.model_fn import WEIGHT_UNIT, serving_input_receiver_fn
from bert_finetune.output_dir import (
    check_output_dir,
    check_same_cut,
    check_same_model,
    check_same_run,
    describe_run,
    describe_training,
)
from bert_finetune.settings import Settings, batches_of
from bert_finetune.tasks import Task, get_task, read_examples
from bert_finetune.token_cache import cached_examples
from bert_finetune.tokenization import (
    WordPieceTokenizer,
    check_case_matches_checkpoint,
    check_max_seq_length,
    check_vocabulary,
)
from bert_finetune.training import Run
from bert_finetune.windows import make_windows
from estimator_accum.reports import CsvReport
from estimator_accum.runs.cluster import Cluster, enter
from estimator_accum.runs.folder import SETTINGS_FILE
from estimator_accum.runs.progress import latest_checkpoint
from estimator_accum.runs.strategies import count_replicas

_logger = logging.getLogger("tensorflow.bert_finetune")

_EXPORT = "export"
_ALONE = Cluster()


def prepare(settings: Settings, cluster: Cluster = _ALONE) -> Run:
    """Reads and checks everything that the run needs; writes only the token cache.

    Args:
        settings: The user's settings, which `check_settings` has accepted.
        cluster: Cluster of which this process is a task.

    Raises:
        ValueError: If an input does not fit; the message is one sentence.
    """
    task = get_task(settings.task_name)
    _check_output(settings, task)
    config = BertConfig.from_json_file(settings.bert_config_file)
    tokenizer = WordPieceTokenizer(settings.vocab_file, settings.do_lower_case)
    check_vocabulary(tokenizer, config.vocab_size)
    check_max_seq_length(
        settings.max_seq_length,
        is_pair=task.text_b is not None,
        max_position_embeddings=config.max_position_embeddings,
    )
    check_case_matches_checkpoint(settings.do_lower_case, settings.init_checkpoint)
    run = Run(
        settings, cluster, task, config, describe_run(settings, config, tokenizer)
    )

    def read(file: str, labelled: bool):
        rows = read_examples(task, settings.data_dir, file, labelled=labelled)
        path = pathlib.Path(settings.data_dir) / file
        length = settings.max_seq_length
        return rows, cached_examples(path, rows, tokenizer, length)

    if settings.do_train:
        _, run.train = read(task.train_file, labelled=True)
        batches = batches_of(settings, count_replicas(settings.strategy, cluster))
        run.windows = make_windows(
            len(run.train),
            settings.num_train_epochs,
            batches,
            settings.seed,
            None if settings.pad_to_max_length else run.train.lengths,
            settings.tokens_per_micro_batch,
        )
        run.description |= describe_training(settings, run.train.checksum, batches)
        check_same_run(settings.output_dir, run.description)
    _check_checkpoints(run)
    if settings.do_train:
        check_same_cut(settings.output_dir, run.description)
    if settings.do_eval:
        run.dev = {
            suffix: read(file, labelled=True)[1]
            for suffix, file in task.dev_files.items()
        }
    if settings.do_predict:
        run.test = {
            name: read(file, labelled=False) for name, file in task.test_files.items()
        }
    return run


def _check_output(settings: Settings, task: Task) -> None:
    """Raises ValueError if the run could not write its results, maybe hours later."""
    files, folders = [], []
    if settings.do_train:
        files += ["checkpoint", SETTINGS_FILE]
    if settings.do_eval:
        files += [results.EVAL_RESULTS]
        folders += [f"eval{suffix}" for suffix in task.dev_files]
    if settings.do_predict:
        for names in results.prediction_files(task).items():
            files += names
    if settings.do_export:
        folders += [_EXPORT]
    check_output_dir(settings.output_dir, files=files, folders=folders)
    if settings.do_train:
        CsvReport(settings.output_dir, WEIGHT_UNIT).check()


def _check_checkpoints(run: Run) -> None:
    """Checks what the model starts from; without training, it must be a classifier."""
    settings, num_labels = run.settings, len(run.task.labels)
    own, init = latest_checkpoint(settings.output_dir), settings.init_checkpoint
    if not settings.do_train:
        if not own and not init:
            raise ValueError(
                "Without --do_train, --output_dir or --init_checkpoint must hold a "
                f"trained classifier. Received: {settings.output_dir} without a "
                "checkpoint, and no --init_checkpoint. Add --do_train=true."
            )
        check_same_model(own or init, run.description)
    if own:
        check_checkpoint(own, run.config, num_labels)
    if init:
        is_classifier = not (own or settings.do_train)
        check_checkpoint(init, run.config, num_labels if is_classifier else None)


def execute(run: Run) -> None:
    """Trains, evaluates, predicts and exports, in this order, as the settings say.

    The tasks of a cluster train together; the chief does the rest.
    """
    if run.settings.do_train:
        training.train(run)
    if not run.cluster.is_chief:
        return
    enter(Cluster())  # the other tasks may have ended
    estimator = training.make_estimator(run)
    if run.settings.do_eval:
        _evaluate(run, estimator)
    if run.settings.do_predict:
        _predict(run, estimator)
    if run.settings.do_export:
        path = estimator.export_saved_model(
            str(pathlib.Path(run.settings.output_dir) / _EXPORT),
            serving_input_receiver_fn,
            checkpoint_path=_checkpoint(run),
        )
        _logger.info("exported %s", path.decode())


def _checkpoint(run: Run) -> str:
    """Returns the run's own latest checkpoint, else --init_checkpoint."""
    return latest_checkpoint(run.settings.output_dir) or run.settings.init_checkpoint


def _evaluate(run: Run, estimator) -> None:
    values = {}
    for suffix, examples in run.dev.items():
        found = estimator.evaluate(
            input_pipeline.eval_input_fn(
                examples,
                batch_size=run.settings.eval_batch_size,
                padded_length=run.padded_length,
            ),
            name=suffix.strip("_") or None,
        )
        global_step = found.pop("global_step")
        # Estimator's own loss is the mean over batches, the last of which may be short.
        found["loss"] = found["eval_loss"]
        values |= {f"{name}{suffix}": value for name, value in found.items()}
    values["global_step"] = global_step
    values["update_step"] = _update_step(run)
    path = results.write_eval_results(run.settings.output_dir, values)
    _logger.info("wrote %s", path)
    for name, value in sorted(values.items()):
        _logger.info("  %s = %s", name, value)


def _update_step(run: Run) -> int:
    reader = tf.train.load_checkpoint(_checkpoint(run))
    has_updates = reader.has_tensor("update_step")
    return int(reader.get_tensor("update_step")) if has_updates else 0


def _predict(run: Run, estimator) -> None:
    for name, (rows, examples) in run.test.items():
        predictions = estimator.predict(
            input_pipeline.predict_input_fn(
                examples,
                batch_size=run.settings.predict_batch_size,
                padded_length=run.padded_length,
            )
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
