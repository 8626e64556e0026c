"""One task alone, and what a task refuses."""

import json

import numpy as np
import pytest
import tensorflow as tf
from local_cluster import run, values

from distributed.command_line import FLAGS
from distributed.main import main


@pytest.fixture(autouse=True)
def _process_as_before(_loggers_as_before):
    """main() sets the process's flags too; other tests read theirs."""
    yield
    FLAGS.unparse_flags()
    for name in FLAGS:
        FLAGS[name].unparse()


def _refused(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(["main.py", *argv])
    assert exit_info.value.code == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("distributed: ") and sentence.count("\n") == 1
    return sentence


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--sed=1", "Received: --sed. Did you mean --seed?"),
        ("--seed=x", "`--seed` must be an integer. Received: 'x'. See --help."),
        ("seed=1", "Received: 'seed=1'. Write --flag=value."),
        ("--micro_batch_size=0", "`--micro_batch_size` must be an integer >= 1"),
        ("--data_dir=nowhere", "`--data_dir` must be a folder. Received: nowhere."),
    ],
)
def test_flag_that_does_not_fit_is_refused_in_one_sentence(capsys, flag, sentence):
    assert sentence in _refused(capsys, flag)


def test_malformed_cluster_is_refused_in_one_sentence(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"ps": ["a:1"]}}))
    assert '`TF_CONFIG["cluster"]` must be' in _refused(capsys)


def test_help_names_every_flag(capsys):
    main(["main.py", "--help"])
    text = capsys.readouterr().out
    for name in ("data_dir", "effective_batch_size", "watchdog_secs", "TF_CONFIG"):
        assert name in text


@pytest.mark.slow
def test_task_alone_learns_goes_on_and_exports(tmp_path):
    output_dir = tmp_path / "output"
    flags = [f"--output_dir={output_dir}", "--train_updates=60", "--learning_rate=0.2"]
    code, output = run("main", *flags, "--micro_batch_size=100")
    assert code == 0
    assert "effective batch 200 = 100 examples x 2 micro-steps x 1 replica; " in output
    results = dict(
        line.split(" = ")
        for line in (output_dir / "eval_results.txt").read_text().splitlines()
    )
    assert float(results["accuracy"]) > 0.8
    assert results["global_step"] == "120"
    rows = (output_dir / "train_metrics.csv").read_text().splitlines()
    assert len(rows) == 61
    assert rows[-1].startswith("60,120,12000,")
    [export] = (output_dir / "export" / "final").iterdir()
    model = tf.saved_model.load(str(export)).signatures["serving_default"]
    classes = model(image=tf.zeros([3, 28, 28], tf.uint8))["class"]
    assert classes.shape == [3]

    before = values(output_dir)
    code, output = run("main", *flags, "--micro_batch_size=100")
    assert code == 0 and "is trained already" in output
    after = values(output_dir)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


@pytest.mark.slow
@pytest.mark.once
def test_run_goes_on_with_other_micro_batches(tmp_path):
    flags = ["--train_updates=6", "--save_checkpoints_updates=3", "--noshuffle"]
    code, _ = run("main", f"--output_dir={tmp_path / 'whole'}", *flags)
    assert code == 0
    assert not list((tmp_path / "whole").glob("*.log"))
    cut = tmp_path / "cut"
    flags.append("--log_examples")
    code, _ = run("main", f"--output_dir={cut}", *flags, "--micro_batch_size=50")
    assert code == 0
    # As if it had been killed after update 3.
    (cut / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-12"\n')
    code, output = run("main", f"--output_dir={cut}", *flags, "--micro_batch_size=100")
    assert code == 0 and "going on after update 3" in output
    # What each micro-step has used; those from 13 on are there twice.
    lines = (cut / "examples-0.log").read_text().splitlines()
    assert [int(line.split()[0]) for line in lines] == [*range(1, 25), *range(13, 19)]
    numbers = [int(n) for line in lines[:12] + lines[24:] for n in line.split()[1:]]
    assert numbers == list(range(6 * 200))
    ours, theirs = values(cut), values(tmp_path / "whole")
    assert (ours["global_step"], ours["update_step"]) == (12 + 3 * 2, 6)
    np.testing.assert_allclose(
        ours["hidden/kernel"], theirs["hidden/kernel"], rtol=0, atol=1e-6
    )


@pytest.mark.slow
@pytest.mark.once
def test_gradients_that_are_not_finite_end_in_one_sentence(tmp_path):
    code, output = run(
        "main",
        f"--output_dir={tmp_path / 'output'}",
        "--learning_rate=1e9",
        "--train_updates=30",
    )
    assert code == 2
    assert output.splitlines()[-1].startswith(
        "distributed: Gradients must be finite. Received: NaN or infinity at micro-step"
    )
