"""scripts/quickstart_demo.py: its refusals, and that its model really learns."""

import os
import re
import subprocess

import numpy as np
import pandas as pd
import pytest

from bert_finetune import demo_grammar
from scripts import make_demo_data, quickstart_demo
from tests.helpers import running


def test_folder_that_another_demo_writes_to_is_refused(refusal, tmp_path):
    (tmp_path / "data").mkdir()
    with quickstart_demo._locked(tmp_path):
        message = refusal(quickstart_demo.main, f"--output_dir={tmp_path}")
    assert "`--output_dir` must not be in use. Received: " in message


def test_part_that_fails_ends_the_demo_with_its_code(tmp_path, monkeypatch):
    (tmp_path / "loss.png").write_text("of a demo before")
    (tmp_path / ".data.123.part").mkdir()
    called = []

    def fail(*arguments, **options):
        called.append(arguments[:2])
        raise subprocess.CalledProcessError(7, arguments)

    monkeypatch.setattr(quickstart_demo, "_call", fail)
    assert quickstart_demo.main(["--output_dir", str(tmp_path)]) == 7
    assert called == [("-m", "scripts.make_demo_data")]
    assert os.listdir(tmp_path) == []  # a failed demo leaves no result


def test_table_has_a_row_for_each_run(tmp_path):
    for run, accuracy in zip(quickstart_demo.RUNS, (0.94321, 0.9), strict=True):
        (tmp_path / run.folder).mkdir()
        (tmp_path / run.folder / "eval_results.txt").write_text(
            f"eval_accuracy = {accuracy}\nmatthews_correlation = 0.87654\n"
            "update_step = 500\nglobal_step = 2000\n"
        )
    assert quickstart_demo.results_table(tmp_path).splitlines() == [
        "run                        effective batch  updates  eval accuracy    MCC",
        "with accumulation (8 x 4)               32      500          0.943  0.877",
        "without (32)                            32      500          0.900  0.877",
    ]


@pytest.mark.once
@pytest.mark.slow
def test_demo_learns_and_accumulation_changes_nothing(tmp_path, monkeypatch, capsys):
    call = quickstart_demo._call

    def call_shorter(*arguments, **options):
        if "scripts.make_demo_data" in arguments:
            call(*arguments[:2], "--help", stdout=subprocess.DEVNULL)
            assert make_demo_data.main(list(arguments[2:])) == 0
        else:
            epochs = "--num_train_epochs="
            shorter = [each.replace(f"{epochs}5", f"{epochs}3") for each in arguments]
            call(*shorter, **options)

    # Both sentences of a pair have the same words, so only their order can be learned.
    order = {"order": demo_grammar.PHENOMENA["order"]}
    monkeypatch.setattr(demo_grammar, "PHENOMENA", order)
    monkeypatch.setattr(quickstart_demo, "_call", call_shorter)
    sizes = {"num_train": 800, "num_unlabelled": 5000}
    monkeypatch.setattr(make_demo_data, "SIZES", make_demo_data.SIZES | sizes)
    monkeypatch.setitem(make_demo_data.PRETRAINING, "num_updates", 150)
    monkeypatch.setenv("PYTHONPATH", str(running.ROOT))
    demo = tmp_path / "a demo, once"
    assert quickstart_demo.main(["--output_dir", str(demo)]) == 0
    stdout = capsys.readouterr().out
    *_, table_with, table_without, _, plot = stdout.splitlines()
    assert plot == f"plot: {demo / 'loss.png'}"
    assert (demo / "loss.png").stat().st_size > 10_000
    for line in (table_with, table_without):
        batch, updates, accuracy, correlation = re.split(r"  +", line)[1:]
        assert (batch, updates) == ("32", "75")
        assert float(accuracy) > 0.85
        assert float(correlation) > 0.6
    folders = [demo / run.folder for run in quickstart_demo.RUNS]
    ours, theirs = (pd.read_csv(each / "train_metrics.csv") for each in folders)
    np.testing.assert_array_equal(ours["examples"], theirs["examples"])
    # After that the loss falls, and rounding grows about fivefold in ten updates.
    np.testing.assert_allclose(ours["loss"][:40], theirs["loss"][:40], atol=1e-5)
