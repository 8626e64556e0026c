"""The command line: flags, one sentence for invalid input, a killed run."""

import json
import pathlib
import re
import signal

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import run_classifier
from bert_finetune.run_classifier import PROGRAM
from bert_finetune.settings import Settings
from estimator_accum.programs.flag_values import read_settings_of
from estimator_accum.programs.lock import locked
from estimator_accum.programs.progress import read_progress
from tests.helpers.models.tiny_bert import (
    all_variables,
    command_line,
    metrics,
    write_bert,
)
from tests.helpers.processes import running

_SCRIPT = pathlib.Path(run_classifier.__file__)
_STEPS, _OLD_STEPS = "gradient_accumulation_steps", "gradient_accumulation_multiplier"
_AUTO = {"micro_batch_size": "auto"}
_MACHINE = running.PROGRAMS / "other_machine.py"


@pytest.fixture
def flags(bert_dir, cola_dir, tmp_path) -> dict:
    """A complete command line: flag -> value."""
    return command_line(bert_dir, cola_dir, tmp_path / "output")


def _arguments(flags):
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def _main(*arguments) -> None:
    run_classifier.main([str(_SCRIPT), *arguments])


def _read(*arguments) -> Settings:
    return read_settings_of(Settings, PROGRAM.flags(), [str(_SCRIPT), *arguments])


def _refused(flags, capsys) -> str:
    """Runs the program in this process; returns the one line on stderr."""
    before = set(pathlib.Path(flags["output_dir"]).parent.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        _main(*_arguments(flags))
    assert stopped.value.code == 2
    assert set(pathlib.Path(flags["output_dir"]).parent.rglob("*")) == before
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"task_name": None}, "must be given. Received: none for --task_name. See"),
        (
            {"do_train": "false"},
            "At least one of `--do_train`, `--do_eval`, `--do_predict`",
        ),
        ({"task_name": "colla"}, "must be one of CoLA, SST-2, MRPC, QQP, STS-B, MNLI"),
        ({"data_dir": "/nowhere"}, "must hold train.tsv of CoLA. Received: /nowhere"),
        ({"vocab_file": "/no.txt"}, "`--vocab_file` must be an existing file. Recei"),
        ({"bert_config_file": "/no.json"}, "/no.json"),
        ({"init_checkpoint": "/no.ckpt"}, "there is no /no.ckpt.index"),
        ({"init_checkpoint": "s3://a/b"}, "cannot be read (File system scheme 's3'"),
        ({"max_seq_length": 25}, "at most `max_position_embeddings` in `--bert_config"),
        ({"max_seq_length": 2}, "`--max_seq_length` must be >= 3"),
        ({"init_checkpoint": ""}, "`--init_checkpoint` must name a checkpoint. Recei"),
        (_AUTO, "Received: no --effective_batch_size. Use --ef"),
        (
            {"effective_batch_size": 30, "train_batch_size": 8, _STEPS: 2},
            "8 * 2 * 1 = 16. L",
        ),
        ({"tokens_per_micro_batch": 8}, "Received: 8, for examples of up to 13 tokens"),
        (
            {"tokens_per_micro_batch": 99, "pad_to_max_length": "true"},
            "cannot be combined with --pad_to_max_length. Received: both flags. L",
        ),
        (
            {"tokens_per_micro_batch": 99, **_AUTO, "effective_batch_size": 32},
            "cannot be combined with --micro_batch_size=auto. Received: both flags.",
        ),
        ({"hidden_act": "swish"}, "`--hidden_act` must be "),
        ({"warmup_proportion": 1.5}, "`--warmup_proportion` must be a number from 0"),
        ({"do_train": "false", "do_eval": "true"}, "must hold a trained classifier"),
        ({"output_dir": __file__}, "`--output_dir` must be a folder"),
        ({"do_export": "tf"}, "`--do_export` must be true, false or hf. Received: 'tf"),
        ({"early_stopping": 2}, "Received: 2, without --eval_every_updates. Add --eva"),
        (
            {"eval_every_updates": 1, "strategy": "multi_worker"},
            "must be left out in a cluster, whose tasks train to the end. Received: 1, w",
        ),
        (
            {"tokens_per_micro_batch": 99, "strategy": "parameter_server"},
            "whose updates have the same number of micro-steps. Received: 99. Use",
        ),
        (
            {"do_train": "false", "do_eval": "true", "eval_every_updates": 1},
            "where best/ names none. Leave it out to use the last one.",
        ),
    ],
)
def test_bad_flags_end_with_one_sentence(flags, capsys, changes, expected):
    assert expected in _refused(flags | changes, capsys)


def test_pairs_need_two_token_types(flags, capsys, tmp_path):
    config = json.loads(pathlib.Path(flags["bert_config_file"]).read_text())
    (tmp_path / "one.json").write_text(json.dumps(config | {"type_vocab_size": 1}))
    changes = {"task_name": "MRPC", "bert_config_file": str(tmp_path / "one.json")}
    sentence = "`type_vocab_size` in `--bert_config_file` must be >= 2 for pairs of se"
    assert sentence in _refused(flags | changes, capsys)


@pytest.mark.parametrize(
    "argument, expected",
    [
        ("--do_export", True),
        ("--do_export=true", True),
        ("--nodo_export", False),
        ("--do_export=hf", "hf"),
        ("--seed=0", False),
    ],
)
def test_an_export_is_of_either_kind(flags, argument, expected):
    assert _read(*_arguments(flags), argument).do_export == expected


def test_an_unfit_cluster_ends_with_one_sentence(flags, capsys, monkeypatch):
    task = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}'
    monkeypatch.setenv("TF_CONFIG", task)
    sentence = '`TF_CONFIG["task"]["index"]` must be an integer from 0 to 1'
    assert sentence in _refused(flags, capsys)


def test_a_vocabulary_of_another_model_is_refused(flags, capsys, tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text(flags["vocab_file"].read_text() + "one_more\n")
    assert "26 tokens in" in _refused(flags | {"vocab_file": path}, capsys)


def test_an_output_folder_of_other_settings_or_examples_is_refused(
    trained_settings, capsys, tmp_path
):
    trained = vars(trained_settings)
    sentence = _refused(trained | {"learning_rate": 1.0}, capsys)
    assert re.search(
        r"which holds a run with --learning_rate=\S+, not 1\.0\. Use", sentence
    )
    text = pathlib.Path(trained["data_dir"], "train.tsv").read_text()
    first, second, rest = text.split("\n", 2)
    (tmp_path / "train.tsv").write_text(f"{second}\n{first}\n{rest}")
    sentence = _refused(trained | {"data_dir": tmp_path}, capsys)
    assert "which holds a run with different examples" in sentence


def test_a_folder_with_checkpoints_of_another_program_is_refused(flags, capsys):
    folder = flags["output_dir"]
    write_bert(folder)
    tf.compat.v1.train.update_checkpoint_state(folder, str(folder / "bert_model.ckpt"))
    assert "bert_model.ckpt.data-00000-of-00001 and no run_settings.json" in _refused(
        flags, capsys
    )


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize(
    "dies_after, saved",
    [
        (9, "update 2, micro-step 1"),
        pytest.param(10, "update 5", marks=pytest.mark.daily),
    ],
)
def test_a_killed_run_that_is_started_again_ends_bit_for_bit_like_an_undisturbed_one(
    dies_after, saved, trained_settings, tmp_path, capsys
):
    """Killed in mid-window, after updates without a checkpoint, or during a save."""
    flags = vars(trained_settings) | {"output_dir": tmp_path / "output"}
    killed = running.run(_MACHINE, f"dies_after={dies_after}", *_arguments(flags))
    assert killed.returncode == -9
    _main(*_arguments(flags))
    assert f"resuming after {saved}\n" in capsys.readouterr().err
    folders = trained_settings.output_dir, flags["output_dir"]
    expected, ours = map(all_variables, folders)
    assert expected["global_step"] == 13 and expected["update_step"] == 7
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    rows = metrics(flags["output_dir"])
    assert [row["update_step"] for row in rows] == [str(n) for n in range(1, 8)]


@pytest.mark.slow
@pytest.mark.once
def test_a_configuration_starts_the_same_run_elsewhere(trained, tmp_path):
    config, again = trained / "run_settings.json", tmp_path / "again"
    _main(f"--config={config}", f"--output_dir={again}", "--do_predict=false")
    first, second = all_variables(trained), all_variables(again)
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_training_that_diverges_ends_with_one_sentence(flags, capsys):
    changed = {"learning_rate": 1e9, "train_batch_size": 4, "num_train_epochs": 5}
    changed["init_checkpoint"] = None
    with pytest.raises(SystemExit) as stopped:
        _main(*_arguments(flags | changed))
    assert stopped.value.code == 2
    *said, last = capsys.readouterr().err.splitlines()
    assert "no --init_checkpoint: training starts from random weights" in said
    assert re.search(r"finite\. Received: NaN or inf.* in \S.*\. Use a lower --", last)


def test_a_folder_in_use_is_refused_to_those_who_train(flags, capsys):
    flags["output_dir"].mkdir()
    (flags["output_dir"] / ".run.lock").touch()
    with locked(flags["output_dir"]):
        assert "must be of one run at a time" in _refused(flags, capsys)


@pytest.mark.once
@pytest.mark.usefixtures("real_starts")
def test_ctrl_c_saves(flags):
    flags |= {"train_batch_size": 1, "num_train_epochs": 1000, _STEPS: 2}
    with running.start(_SCRIPT, *_arguments(flags)) as program:
        running.wait_until((flags["output_dir"] / "train_metrics.csv").exists, program)
        program.process.send_signal(signal.SIGINT)
        done = program.wait()
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    progress = read_progress(flags["output_dir"])
    place = f"update {progress.update:,}"
    if progress.micro_step:
        place += f", micro-step {progress.micro_step} of 2"
    assert done.stderr.endswith(f"\nsaved at {place}; the same command resumes.\n")
