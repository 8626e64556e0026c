"""scripts/quickstart_demo.py: its refusals; memory really runs out."""

import functools
import os
import re
import sys

import pytest

from bert_finetune.run_classifier import PROGRAM
from estimator_accum.programs import report
from estimator_accum.programs.lock import locked
from estimator_accum.reports._memory import MODEL
from scripts import quickstart_demo
from tests.helpers.processes import running

pytestmark = pytest.mark.once


def test_folder_that_another_demo_writes_to_is_refused(refusal, tmp_path):
    with locked(tmp_path):
        message = refusal(quickstart_demo.main, f"--output_dir={tmp_path}")
    assert "A folder must be of one run at a time. Received: " in message


def test_part_that_fails_ends_the_demo_with_its_code(tmp_path, monkeypatch):
    (tmp_path / "loss.png").write_text("of a demo before")
    (tmp_path / "with_accumulation").mkdir()

    fails = ["sh", "-c", "exit 7"]
    monkeypatch.setattr(quickstart_demo, "command", lambda *_: fails)
    assert quickstart_demo.main(["--output_dir", str(tmp_path)]) == 7
    left = [name for name in os.listdir(tmp_path) if name[0] != "."]
    assert left == ["data"]  # a failed demo leaves no result


def test_a_batch_that_fits_under_the_limit_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quickstart_demo, "command", lambda *_: ["true"])
    assert quickstart_demo.main(["--output_dir", str(tmp_path)]) == 2
    assert "1,024 unsplit must not fit in 60 MB. Received: " in capsys.readouterr().err


@pytest.mark.parametrize("folder", quickstart_demo.RUNS)
def test_flags_of_a_run_are_those_of_the_program(tmp_path, folder):
    _, _, *line = quickstart_demo.command(tmp_path, folder)
    settings, _ = PROGRAM.read(PROGRAM.flags(), line[1:])
    assert settings.effective_batch_size == 1024


def test_three_runs_give_a_table_and_a_picture(tmp_path, monkeypatch, capfd):
    def table(peak):
        monkeypatch.setattr(report, "peak_bytes", lambda: {MODEL: peak})
        return report.end_of_run(tmp_path, [], None, has_metrics=False)

    prints = {
        "out_of_memory": "echo OOM when allocating >&2; exit 1",
        "with_accumulation": f"echo '{table(50e6)}'",
        "without_accumulation": f"echo '{table(150e6)}'",
    }

    def stands_in(folder, name):
        metrics = folder / name / "train_metrics.csv"
        metrics.parent.mkdir()
        metrics.write_text("loss,examples_per_sec\n0.7,2048\n0.6875,1024\n0.5,4096\n")
        return ["sh", "-c", prints[name]]

    monkeypatch.setattr(quickstart_demo, "command", stands_in)
    assert quickstart_demo.main(["--output_dir", str(tmp_path)]) == 0
    _assert_reported(tmp_path, capfd.readouterr().out)


def test_a_run_has_the_memory_of_its_limit(tmp_path, monkeypatch):
    code = (
        "import tensorflow as tf; [tf.zeros([n, 10**6]) for n in (12, 18)]"  # 48, 72 MB
    )
    program = [sys.executable, "-c", code]
    monkeypatch.setattr(quickstart_demo, "command", lambda *_: program)
    with quickstart_demo._running(tmp_path, "out_of_memory", stderr=-1) as process:
        _, err = process.communicate()
    assert "OOM when allocating tensor with shape[18,1000000]" in err


@pytest.mark.daily
@pytest.mark.slow
def test_demo_trains_under_a_limit_that_the_batch_exceeds(tmp_path, monkeypatch, capfd):
    shorter = functools.partial(quickstart_demo.write_demo_data, train=1600, dev=200)
    monkeypatch.setattr(quickstart_demo, "write_demo_data", shorter)
    monkeypatch.setattr(quickstart_demo, "EPOCHS", 2)
    monkeypatch.setenv("PYTHONPATH", str(running.ROOT))
    demo = tmp_path / "a demo, once"
    assert quickstart_demo.main(["--output_dir", str(demo)]) == 0
    out, err = capfd.readouterr()
    assert "must fit in memory. Received: OOM when allocating tensor" in err
    _assert_reported(demo, out)


def _assert_reported(demo, out) -> None:
    _, failed, ours, theirs, _, saved, rounding, _, plot = out.splitlines()[1:]
    assert re.split("  +", failed) == ["1,024 unsplit", "60 MB", "out of memory"]
    ours, theirs = (re.split("  +", row)[1:] for row in (ours, theirs))
    assert [ours[0], theirs[0]] == ["60 MB", "none"]
    megabytes = [float(row[1].removesuffix(" MB")) for row in (ours, theirs)]
    assert megabytes[0] < 60 < megabytes[1]
    share = 1 - megabytes[0] / megabytes[1]
    assert saved.startswith(f"K = 4 saved {share:.0%} of the model's memory and ")
    assert float(re.search("at most (.*), by", rounding)[1]) < 1e-5
    assert plot == f"plot: {demo / 'loss.png'}"
    assert (demo / "loss.png").stat().st_size > 10_000
