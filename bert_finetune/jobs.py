"""What a run does: check all inputs, then train, evaluate, predict and export."""

import logging
import pathlib
from dataclasses import dataclass, field

import tensorflow as tf

from bert_finetune import input_pipeline, results
from bert_finetune.bert_config import BertConfig
from bert_finetune.checkpoint import check_checkpoint
from bert_finetune.encoding import EncodedExamples, encode_examples
from bert_finetune.model_fn import (
    WEIGHT_UNIT,
    make_model_fn,
    serving_input_receiver_fn,
)
from bert_finetune.output_dir import (
    SETTINGS_FILE,
    RememberingHook,
    check_output_dir,
    check_same_model,
    check_same_run,
    describe_run,
    latest_checkpoint,
)
from bert_finetune.settings import Settings, check_settings
from bert_finetune.tasks import Example, Task, get_task, read_examples
from bert_finetune.tokenization import (
    WordPieceTokenizer,
    check_case_matches_checkpoint,
    check_max_seq_length,
    check_vocabulary,
)
from estimator_accum.reporting import MetricsFile

_logger = logging.getLogger("tensorflow.bert_finetune")

_EXPORT = "export"


@dataclass
class Run:
    """A checked run: nothing that it needs is missing.

    Attributes:
        settings: What the user asked for.
        task: The GLUE task.
        config: The encoder's architecture.
        description: What `run_settings.json` says of it.
        train: Training examples; None without --do_train.
        dev: Dev examples by suffix of their results.
        test: Test rows and examples by name of their submission file.
        num_micro_steps: Of the whole training run.
    """

    settings: Settings
    task: Task
    config: BertConfig
    description: dict
    train: EncodedExamples | None = None
    dev: dict[str, EncodedExamples] = field(default_factory=dict)
    test: dict[str, tuple[list[Example], EncodedExamples]] = field(default_factory=dict)
    num_micro_steps: int = 1

    @property
    def num_updates(self) -> int:
        """Updates of the whole training run, a last partial window included."""
        return -(-self.num_micro_steps // self.settings.gradient_accumulation_steps)


def prepare(settings: Settings) -> Run:
    """Reads and checks everything that the run needs; writes nothing.

    Raises:
        ValueError: One sentence for whatever does not fit.
    """
    check_settings(settings)
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
    run = Run(settings, task, config, describe_run(settings, config, tokenizer))

    def read(file: str, labelled: bool):
        rows = read_examples(task, settings.data_dir, file, labelled=labelled)
        return rows, encode_examples(rows, tokenizer, settings.max_seq_length)

    if settings.do_train:
        _, run.train = read(task.train_file, labelled=True)
        run.description["training_examples_checksum"] = run.train.checksum
        check_same_run(settings.output_dir, run.description)
        run.num_micro_steps = input_pipeline.num_micro_steps(
            len(run.train), settings.num_train_epochs, settings.train_batch_size
        )
    _check_checkpoints(run)
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
    """Nothing may stand where the run writes later, maybe hours later."""
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
        MetricsFile(settings.output_dir, WEIGHT_UNIT).check()


def _check_checkpoints(run: Run) -> None:
    """What the model starts from fits; without training it is a classifier."""
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
    """Does what the settings ask for, in order: train, evaluate, predict, export."""
    settings = run.settings
    estimator = tf.estimator.Estimator(
        make_model_fn(settings, run.config, run.task, run.num_updates),
        config=tf.estimator.RunConfig(
            model_dir=settings.output_dir,
            tf_random_seed=settings.seed,
            save_checkpoints_steps=settings.save_checkpoints_steps,
        ),
    )
    if settings.do_train:
        _train(run, estimator)
    if settings.do_eval:
        _evaluate(run, estimator)
    if settings.do_predict:
        _predict(run, estimator)
    if settings.do_export:
        path = estimator.export_saved_model(
            str(pathlib.Path(settings.output_dir) / _EXPORT),
            serving_input_receiver_fn,
            checkpoint_path=_checkpoint(run),
        )
        _logger.info("exported %s", path.decode())


def _train(run: Run, estimator) -> None:
    settings = run.settings
    done, is_partial = _progress(settings.output_dir)
    _logger.info(
        "effective batch %d = %d examples x %d micro-steps x 1 replica; "
        "%s micro-steps = %s updates",
        settings.effective_batch_size,
        settings.train_batch_size,
        settings.gradient_accumulation_steps,
        f"{run.num_micro_steps:,}",
        f"{run.num_updates:,}",
    )
    if done == run.num_micro_steps and not is_partial:
        _logger.info("%s is trained already", settings.output_dir)
        return
    if done:
        _logger.info("going on after micro-step %s", f"{done:,}")
    elif not settings.init_checkpoint:
        _logger.info("no --init_checkpoint: training starts from random weights")
    # The data ends with the run, so that a restart finds where it stands by itself.
    estimator.train(
        input_pipeline.train_input_fn(
            run.train,
            micro_batch_size=settings.train_batch_size,
            num_train_epochs=settings.num_train_epochs,
            seed=settings.seed,
            first_micro_step=done,
            max_seq_length=settings.max_seq_length,
        ),
        hooks=[RememberingHook(settings.output_dir, run.description)],
    )
    _logger.info("trained %s", latest_checkpoint(settings.output_dir))


def _progress(output_dir: str) -> tuple[int, bool]:
    """Returns (micro-steps so far, whether a window is open) of the last checkpoint."""
    path = latest_checkpoint(output_dir)
    if path is None:
        return 0, False
    reader = tf.train.load_checkpoint(path)
    name = "accumulation/micro_steps"
    is_partial = reader.has_tensor(name) and reader.get_tensor(name) > 0
    return int(reader.get_tensor("global_step")), bool(is_partial)


def _checkpoint(run: Run) -> str:
    """The checkpoint to use; without own ones the model is that of --init_checkpoint."""
    return latest_checkpoint(run.settings.output_dir) or run.settings.init_checkpoint


def _evaluate(run: Run, estimator) -> None:
    values = {}
    for suffix, examples in run.dev.items():
        found = estimator.evaluate(
            input_pipeline.eval_input_fn(
                examples,
                batch_size=run.settings.eval_batch_size,
                max_seq_length=run.settings.max_seq_length,
            ),
            name=suffix.strip("_") or None,
        )
        global_step = found.pop("global_step")
        # Estimator's own is the mean over batches, of which the last may be short.
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
                max_seq_length=run.settings.max_seq_length,
            )
        )
        paths = results.write_predictions(
            run.settings.output_dir,
            run.task,
            name,
            results.prediction_files(run.task)[name],
            rows,
            predictions,
        )
        _logger.info("wrote %s", " and ".join(map(str, paths)))
