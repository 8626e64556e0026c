"""Whole runs on a tiny BERT: train, evaluate, predict, export, resume."""

import dataclasses
import json
import logging
import os
import pathlib
import shutil
import signal
import types

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import evaluations, inputs, jobs, model_fn, recomputing, training
from estimator_accum import recompute
from estimator_accum.programs.folder import make_run_folder
from estimator_accum.programs.progress import read_progress
from tests.helpers.models import tiny_bert
from tests.helpers.models.tiny_bert import (
    all_variables,
    metrics,
    results,
    run,
    variables,
)
from tests.helpers.processes import running


@pytest.fixture(scope="module")
def learned(bert_dir, cola_dir, tmp_path_factory) -> pathlib.Path:
    """Folder of a run with all jobs and 20 epochs."""
    folder = tmp_path_factory.mktemp("learned") / "output"
    settings = tiny_bert.make_settings(bert_dir, cola_dir, folder)
    done = {"do_train": True, "do_eval": True, "do_predict": True, "do_export": True}
    return run(settings, **done, num_train_epochs=20.0)


def test_a_run_trains_evaluates_predicts_and_exports(learned):
    folder, metrics = learned, results(learned)
    losses = {"eval_accuracy", "eval_loss", "loss", "matthews_correlation"}
    assert set(metrics) == losses | {"global_step", "update_step"}
    assert (metrics["global_step"], metrics["update_step"]) == (250, 125)
    assert metrics["eval_accuracy"] > 0.9  # a bag of words decides
    probabilities = np.loadtxt(folder / "test_results.tsv")
    np.testing.assert_allclose(probabilities.sum(1), np.ones(10), rtol=1e-5)
    labels = [f"{i}\t{label}" for i, label in enumerate(probabilities.argmax(1))]
    submission = (folder / "CoLA.tsv").read_text().splitlines()
    assert submission == ["index\tprediction", *labels]
    (exported,) = (folder / "export").iterdir()
    served = tf.saved_model.load(str(exported)).signatures["serving_default"]
    ids = tf.constant([[2, 5, 6, 3], [2, 15, 3, 0]])
    mask = tf.constant([[1, 1, 1, 1], [1, 1, 1, 0]])
    answer = served(input_ids=ids, input_mask=mask, segment_ids=tf.zeros_like(ids))
    assert answer["probabilities"].shape == (2, 2)
    assert answer["label"].numpy().tolist() == [1, 0]
    assert answer["class"].numpy().tolist() == [b"1", b"0"]


def test_metrics_have_a_row_an_update_and_count_every_example(trained):
    """50 examples in micro-batches of 4, two per update; the last window has 2."""
    rows = metrics(trained)
    assert [int(row["update_step"]) for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [int(row["global_step"]) for row in rows] == [2, 4, 6, 8, 10, 12, 13]
    assert [float(row["examples"]) for row in rows] == [8, 16, 24, 32, 40, 48, 50]
    # No warm-up in 7 updates: the rate falls linearly from 1e-3 to 0, per update.
    rates = [float(row["learning_rate"]) for row in rows]
    np.testing.assert_allclose(rates, [1e-3 * (1 - i / 7) for i in range(7)], rtol=1e-5)
    assert all(float(row["gradient_norm"]) > 0 for row in rows)


def test_a_finished_run_that_is_started_again_says_so_and_changes_nothing(
    settings, trained, caplog
):
    caplog.set_level(logging.INFO, "tensorflow.estimator_accum")
    shutil.copytree(trained, settings.output_dir)
    before = all_variables(trained)
    after = all_variables(run(settings, do_train=True))
    assert "is trained already" in caplog.text
    assert all(np.array_equal(after[name], before[name]) for name in before)


@pytest.mark.once
def test_a_run_killed_before_a_partial_window_was_applied_applies_it(settings, trained):
    """As after a kill between the last micro-step's save and the end of training."""
    prepared = jobs.prepare(inputs.read(dataclasses.replace(settings, do_train=True)))
    make_run_folder(settings.output_dir)
    with pytest.MonkeyPatch.context() as patch:
        keep = model_fn.make_accumulation_hooks
        kept = lambda **options: keep("keep", **options)
        patch.setattr(model_fn, "make_accumulation_hooks", kept)
        # K = 2 for the last window too, so that it stays partial.
        make = training.make_model_fn
        patch.setattr(training, "make_model_fn", lambda *args: make(*args[:-1], 2))
        jobs.execute(prepared)
    assert all_variables(settings.output_dir)["accumulation/micro_steps"] == 1
    ours = variables(run(settings, do_train=True))
    assert ours["update_step"] == 7
    for name, value in variables(trained).items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.once
def test_a_signal_ends_training_with_a_checkpoint(settings, monkeypatch):
    class _Signal(tf.estimator.SessionRunHook):
        has_sent = False  # a second signal would end the process

        def after_run(self, run_context, run_values):
            if not self.has_sent:
                self.has_sent = True
                running.signal_training(signal.SIGUSR1)

    make = model_fn.make_accumulation_hooks
    with_signal = lambda *args, **options: [*make(*args, **options), _Signal()]
    monkeypatch.setattr(model_fn, "make_accumulation_hooks", with_signal)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with pytest.raises(SystemExit, match="75"):
            run(settings, do_train=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert tf.train.latest_checkpoint(settings.output_dir).endswith("model.ckpt-2")


def test_a_graph_that_cannot_be_built_leaves_an_empty_folder(settings, monkeypatch):
    def broken(*_, **__):
        raise ValueError("`loss` must be a scalar.")

    monkeypatch.setattr(model_fn, "make_accumulating_train_op", broken)
    with pytest.raises(ValueError, match="`loss` must be a scalar"):
        run(settings, do_train=True)
    assert not list(pathlib.Path(settings.output_dir).iterdir())


@pytest.mark.once
def test_a_trained_folder_gives_the_same_later_padded_and_in_batches_of_any_size(
    settings, learned
):
    """20 examples in batches of 20, or of 8, 8 and 4, whose means differ."""
    shutil.copytree(learned, settings.output_dir)
    sizes = {"eval_batch_size": 20, "predict_batch_size": 10, "pad_to_max_length": True}
    folder = run(settings, do_eval=True, do_predict=True, **sizes)
    before, after = results(learned), results(folder)
    assert before["loss"] == before["eval_loss"] and before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-5, err_msg=name)
    before, after = (np.loadtxt(f / "test_results.tsv") for f in (learned, folder))
    assert np.ptp(before[:, 0]) > 0.1  # so that their order is visible
    np.testing.assert_allclose(after, before, atol=1e-5)
    assert (folder / "CoLA.tsv").read_text() == (learned / "CoLA.tsv").read_text()


def test_speed_of_an_evaluation_leaves_its_first_batches_out():
    speed = jobs._Speed()
    assert speed.examples_per_sec is None
    bar = types.SimpleNamespace(secs=2.0)
    speed.add([np.arange(9), np.arange(4), np.arange(2)], bar)
    assert speed.examples_per_sec == 3.0


@pytest.mark.once
def test_a_fine_tuned_checkpoint_predicts_from_another_folder(settings, learned):
    """As google-research/bert's README shows: --init_checkpoint is the classifier."""
    checkpoint = tf.train.latest_checkpoint(str(learned))
    done = {"do_predict": True, "do_eval": True, "do_export": True}
    other = run(settings, init_checkpoint=checkpoint, **done)
    assert results(other)["update_step"] == 125
    name = "test_results.tsv"
    assert (other / name).read_text() == (learned / name).read_text()
    assert list((other / "export").iterdir())


@pytest.mark.once
def test_a_run_that_evaluates_ends_with_the_same_weights_and_uses_the_best(
    settings, tmp_path, monkeypatch, caplog
):
    """With dropout, and resumed in the middle of an update."""
    caplog.set_level(logging.INFO, "tensorflow.bert_finetune")
    changes = {"do_train": True, "dropout": True, "save_checkpoints_steps": 3}
    plain = run(settings, **changes, output_dir=str(tmp_path / "plain"))
    folder = tiny_bert.copy_at_step(plain, pathlib.Path(settings.output_dir), 3)
    assert read_progress(str(folder)) == (3, 1, 1)
    scores, estimator = iter((0.25, 0.75, 0.5)), tf.estimator.Estimator
    evaluate = estimator.evaluate

    def evaluated(*args, **options):
        return evaluate(*args, **options) | {"matthews_correlation": next(scores, 1.0)}

    monkeypatch.setattr(estimator, "evaluate", evaluated)
    done = {"do_eval": True, "do_predict": True, "do_export": "hf"}
    parts = dataclasses.replace(settings, **changes, **done, eval_every_updates=3)
    text = jobs.execute(jobs.prepare(inputs.read(parts)))
    expected, ours = all_variables(plain), all_variables(folder)
    assert ours.keys() == expected.keys() and ours["update_step"] == 7
    for name, value in expected.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    rows = metrics(folder)
    assert [row["loss"] for row in rows] == [row["loss"] for row in metrics(plain)]

    _, *rows = (folder / "evaluations.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["3", "6", "7"]
    best = str(evaluations.best_checkpoint(folder))
    assert f"using the best checkpoint, {best}" in caplog.text
    assert results(folder)["update_step"] == 6
    loss = float(rows[1].split(",")[3])
    assert results(folder)["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert (folder / "export" / "hf" / "model.safetensors").is_file()
    lines = dict(line.rsplit(maxsplit=1) for line in text.splitlines() if line)
    assert lines["best update"] == "6" and lines["updates"] == "7"
    assert lines["matthews_correlation"] == "1.0000"
    assert lines["metrics"] == str(folder / "train_metrics.csv")
    assert lines["TensorBoard  tensorboard"] == f"--logdir={folder}"
    other = {"init_checkpoint": best, "output_dir": str(tmp_path / "other")}
    other = run(settings, do_predict=True, **other)
    name = "test_results.tsv"
    assert (other / name).read_text() == (folder / name).read_text()


def test_a_run_that_evaluates_may_have_a_tf_config_of_its_own(settings, monkeypatch):
    task = {"type": "worker", "index": 0}
    config = {"cluster": {"worker": ["a:1"]}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))

    def train(run, evaluations):
        assert "TF_CONFIG" not in os.environ
        raise InterruptedError

    monkeypatch.setattr(training, "train", train)
    settings = dataclasses.replace(settings, do_train=True, eval_every_updates=2)
    with pytest.raises(InterruptedError):
        jobs.execute(jobs.prepare(inputs.read(settings)))


def _write_mnli(folder: pathlib.Path) -> None:
    header = ["index", *"1234567", "sentence1", "sentence2", "10", "gold_label"]

    def row(number, label, text):
        cells = ["x"] * 12
        cells[0], cells[8], cells[9] = str(number), text, text[::-1]
        cells[11] = ("entailment", "neutral", "contradiction", "-")[number % 4]
        return "\t".join(cells)

    folder.mkdir()
    for seed, name in enumerate(("train", "dev_matched", "dev_mismatched")):
        tiny_bert.write_rows(folder / f"{name}.tsv", 24, seed, row)
    for seed, name in enumerate(("test_matched", "test_mismatched")):
        tiny_bert.write_rows(folder / f"{name}.tsv", 8, seed + 5, row)
    for path in folder.iterdir():
        path.write_text("\t".join(header) + "\n" + path.read_text())


@pytest.mark.once
def test_mnli_from_a_head_of_other_classes_says_so_and_has_two_dev_and_test_sets(
    settings, trained, tmp_path, caplog
):
    caplog.set_level(logging.INFO, "tensorflow.bert_finetune")
    _write_mnli(tmp_path / "MNLI")
    task = {"task_name": "mnli", "data_dir": str(tmp_path / "MNLI")}
    done = {"do_train": True, "do_eval": True, "do_predict": True}
    checkpoint = tf.train.latest_checkpoint(str(trained))
    folder = run(settings, init_checkpoint=checkpoint, **task, **done)
    assert "has other classes: a new one starts untrained" in caplog.text
    assert f"trained {folder}/model.ckpt-5" in caplog.text
    assert {"eval_accuracy", "eval_accuracy_mismatched"} <= set(results(folder))
    for name in ("MNLI-m.tsv", "MNLI-mm.tsv"):
        _, *lines = (folder / name).read_text().splitlines()
        assert len(lines) == 8
        labels = {line.split("\t")[1] for line in lines}
        assert labels <= {"entailment", "neutral", "contradiction"}


@pytest.mark.once
@pytest.mark.parametrize("way", ["layers", "auto"])
def test_recomputed_layers_train_to_the_same_weights(
    settings, trained_settings, trained, monkeypatch, way
):
    layers = []

    def noted(layer, **options):
        layers.append(layer)
        return recompute(layer, **options)

    monkeypatch.setattr(recomputing, "recompute", noted)
    monkeypatch.setattr(recomputing, "device_memory", lambda: 0)  # nothing fits
    ours = tiny_bert.run(
        dataclasses.replace(trained_settings, output_dir=settings.output_dir),
        do_predict=False,
        recompute=way,
    )
    assert layers
    expected = tiny_bert.all_variables(trained)
    values = tiny_bert.all_variables(ours)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        # The graph's optimizer may round the last bit differently.
        np.testing.assert_allclose(values[name], value, 1e-4, 1e-7, err_msg=name)


@pytest.fixture(scope="module")
def trained_on(bert_dir, cola_dir, tmp_path_factory) -> pathlib.Path:
    """Folder of a run of 1 epoch, 7 updates, trained on to 2 with dropout.

    Its last update before the end of the first epoch has 2 examples, one micro-step.
    """
    folder = tmp_path_factory.mktemp("trained_on") / "output"
    settings = tiny_bert.make_settings(bert_dir, cola_dir, folder)
    settings = dataclasses.replace(settings, do_train=True, dropout=True)
    run(settings, save_checkpoints_steps=5)
    run(settings, num_train_epochs=2.0, save_checkpoints_steps=3)
    return folder


@pytest.mark.once
def test_a_finished_run_trains_on_over_whole_epochs_at_the_new_rate(trained_on):
    rows = metrics(trained_on)
    assert [int(row["update_step"]) for row in rows] == list(range(1, 15))
    assert [int(row["examples"]) for row in rows][6::7] == [50, 100]
    assert [int(row["global_step"]) for row in rows][6::7] == [13, 26]
    rates = [float(row["learning_rate"]) for row in rows]
    expected = [1 - done / 7 for done in range(7)]
    expected += [1 - done / 14 for done in range(7, 14)]
    np.testing.assert_allclose(rates, 1e-3 * np.array(expected), rtol=1e-5)


@pytest.mark.once
def test_a_run_that_is_trained_on_resumes(settings, trained_on, caplog):
    """From micro-step 22, in the middle of an update."""
    caplog.set_level(logging.INFO, "tensorflow.bert_finetune")
    folder = tiny_bert.copy_at_step(trained_on, pathlib.Path(settings.output_dir), 22)
    assert read_progress(str(folder)) == (22, 11, 1)
    run(settings, do_train=True, dropout=True, num_train_epochs=2.0)
    assert "training on" not in caplog.text
    ours, expected = all_variables(folder), all_variables(trained_on)
    for name, value in expected.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.once
def test_at_a_constant_rate_one_epoch_and_another_are_two(settings, tmp_path, caplog):
    """48 examples are 6 whole updates; momentum is kept."""
    caplog.set_level(logging.INFO, "tensorflow.bert_finetune")
    tiny_bert.write_cola(tmp_path / "cola", 48)
    changes = {"do_train": True, "lr_schedule": "constant", "optimizer": "sgd"}
    changes |= {"warmup_proportion": 0.0, "data_dir": str(tmp_path / "cola")}
    run(settings, **changes)
    ours = all_variables(run(settings, **changes, num_train_epochs=2.0))
    sentence = "training on, from 1 epochs to 2: from update 7, the learning rate "
    assert f"{sentence}follows the schedule of a run of 12 updates" in caplog.text
    changes["output_dir"] = str(tmp_path / "at_once")
    expected = all_variables(run(settings, **changes, num_train_epochs=2.0))
    assert ours.keys() == expected.keys() and ours["update_step"] == 12
    for name, value in expected.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("step", "changes", "received"),
    [
        (10, {"num_train_epochs": 2.0}, "--num_train_epochs=1.0, not 2.0. Use"),
        (13, {"num_train_epochs": 0.5}, "--num_train_epochs=1.0, not 0.5. Use"),
        (13, {"num_train_epochs": 2.0, "seed": 1}, "--seed=0, not 1. Use the same"),
    ],
)
def test_an_unfinished_run_and_other_settings_are_refused_with_the_way_out(
    trained_settings, tmp_path, step, changes, received
):
    folder = tiny_bert.copy_at_step(trained_settings.output_dir, tmp_path / "new", step)
    changes["output_dir"] = str(folder)
    settings = dataclasses.replace(trained_settings, **changes)
    with pytest.raises(ValueError) as refused:
        jobs.prepare(inputs.read(settings))
    assert received in str(refused.value)
    assert f"--init_checkpoint={folder}/model.ckpt-{step} " in str(refused.value)
