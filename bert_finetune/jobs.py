"""What a run does: check all inputs, then train, evaluate, predict and export."""

import logging
import pathlib
from dataclasses import dataclass, field

import tensorflow as tf

from bert_finetune import input_pipeline, results
from bert_finetune.checkpoint import check_checkpoint
from bert_finetune.encoding import EncodedExamples, encode_examples
from bert_finetune.model_fn import make_model_fn, serving_input_receiver_fn
from bert_finetune.modeling import BertConfig
from bert_finetune.settings import (
    Settings,
    check_same_settings,
    check_settings,
    remember_settings,
)
from bert_finetune.tasks import Example, Task, get_task, read_examples
from bert_finetune.tokenization import (
    WordPieceTokenizer,
    check_case_matches_checkpoint,
    check_max_seq_length,
    check_vocabulary,
)

_logger = logging.getLogger("tensorflow.bert_finetune")


@dataclass
class Run:
    """A checked run: nothing that it needs is missing.

    Attributes:
        settings: What the user asked for.
        task: The GLUE task.
        config: The encoder's architecture.
        train: Training examples; None without --do_train.
        dev: Dev examples by suffix of their results.
        test: Test rows and examples by name of their submission file.
        num_micro_steps: Of the whole training run.
    """

    settings: Settings
    task: Task
    config: BertConfig
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
    config = BertConfig.from_json_file(settings.bert_config_file)
    tokenizer = WordPieceTokenizer(settings.vocab_file, settings.do_lower_case)
    check_vocabulary(tokenizer, config.vocab_size)
    check_max_seq_length(
        settings.max_seq_length,
        is_pair=task.text_b is not None,
        max_position_embeddings=config.max_position_embeddings,
    )
    check_case_matches_checkpoint(settings.do_lower_case, settings.init_checkpoint)
    if settings.init_checkpoint:
        check_checkpoint(settings.init_checkpoint, config)
    run = Run(settings, task, config)

    def read(file: str, labelled: bool):
        rows = read_examples(task, settings.data_dir, file, labelled=labelled)
        return rows, encode_examples(rows, tokenizer, settings.max_seq_length)

    if settings.do_train:
        _, run.train = read(task.train_file, labelled=True)
        check_same_settings(settings, run.train.checksum)
        run.num_micro_steps = input_pipeline.num_micro_steps(
            len(run.train), settings.num_train_epochs, settings.train_batch_size
        )
    else:
        _check_trained(settings)
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


def _check_trained(settings: Settings) -> None:
    """Without training there must be a trained classifier to use."""
    for path in (
        tf.train.latest_checkpoint(settings.output_dir),
        settings.init_checkpoint,
    ):
        if path and "output_weights" in dict(tf.train.list_variables(path)):
            return
    raise ValueError(
        "Without --do_train, --output_dir or --init_checkpoint must hold a trained "
        f"classifier. Received: --output_dir={settings.output_dir}, "
        f"--init_checkpoint={settings.init_checkpoint}. Add --do_train=true."
    )


def make_output_dir(settings: Settings) -> None:
    """Makes the output folder.

    Raises:
        ValueError: If that is impossible.
    """
    try:
        pathlib.Path(settings.output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            "`--output_dir` must be a folder, or a path where one can be made. "
            f"Received: {settings.output_dir} ({error.strerror}). Use another one."
        ) from error


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
            str(pathlib.Path(settings.output_dir) / "export"),
            serving_input_receiver_fn,
            checkpoint_path=_checkpoint(run) or settings.init_checkpoint,
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
    remember_settings(settings, run.train.checksum)
    # The data ends with the run, so that a restart finds where it stands by itself.
    estimator.train(
        input_pipeline.train_input_fn(
            run.train,
            micro_batch_size=settings.train_batch_size,
            num_train_epochs=settings.num_train_epochs,
            seed=settings.seed,
            first_micro_step=done,
            max_seq_length=settings.max_seq_length,
        )
    )


def _progress(output_dir: str) -> tuple[int, bool]:
    """Returns (micro-steps so far, whether a window is open) of the last checkpoint."""
    path = tf.train.latest_checkpoint(output_dir)
    if path is None:
        return 0, False
    reader = tf.train.load_checkpoint(path)
    name = "accumulation/micro_steps"
    is_partial = reader.has_tensor(name) and reader.get_tensor(name) > 0
    return int(reader.get_tensor("global_step")), bool(is_partial)


def _checkpoint(run: Run) -> str | None:
    """The checkpoint to use; None lets the model start from --init_checkpoint."""
    return tf.train.latest_checkpoint(run.settings.output_dir)


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
        values |= {f"{name}{suffix}": value for name, value in found.items()}
    values["global_step"] = global_step
    values["update_step"] = _update_step(run)
    path = results.write_eval_results(run.settings.output_dir, values)
    _logger.info("wrote %s", path)
    for name, value in sorted(values.items()):
        _logger.info("  %s = %s", name, value)


def _update_step(run: Run) -> int:
    path = _checkpoint(run) or run.settings.init_checkpoint
    reader = tf.train.load_checkpoint(path)
    return (
        int(reader.get_tensor("update_step")) if reader.has_tensor("update_step") else 0
    )


def _predict(run: Run, estimator) -> None:
    for name, (rows, examples) in run.test.items():
        predictions = estimator.predict(
            input_pipeline.predict_input_fn(
                examples,
                batch_size=run.settings.predict_batch_size,
                max_seq_length=run.settings.max_seq_length,
            )
        )
        is_main = name == next(iter(run.test))
        paths = results.write_predictions(
            run.settings.output_dir,
            run.task,
            name,
            "test_results.tsv" if is_main else f"test_results_{name}",
            rows,
            predictions,
        )
        _logger.info("wrote %s", " and ".join(map(str, paths)))
