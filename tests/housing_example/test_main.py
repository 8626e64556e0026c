"""The command line: flags, one sentence for invalid input, a killed run."""

import os
import pathlib
import re
import shutil
import types

import numpy as np
import pandas as pd
import pytest
from matplotlib import image

from housing_example import main
from tests.helpers.models.short_run import values
from tests.helpers.processes import running

_SCRIPT = pathlib.Path(main.__file__)
_PROGRAM = running.PROGRAMS / "housing_program.py"


def _flags(csv, folder) -> dict:
    """Returns a complete command line, flag -> value, of a very short training."""
    return {
        "train_csv": shutil.copy(csv, folder / "houses.csv"),
        "output_dir": folder / "new" / "output",
        "train_batch_size": 4,
        "train_updates": 6,
    }


@pytest.fixture
def flags(csv, tmp_path) -> dict:
    return _flags(csv, tmp_path)


@pytest.fixture(scope="module")
def trained(csv, tmp_path_factory) -> tuple[dict, running.Done]:
    """(flags, output) of a run."""
    flags = _flags(csv, tmp_path_factory.mktemp("trained"))
    done = running.run("-m", "housing_example.main", *_arguments(flags))
    assert done.returncode == 0
    return flags, done


def _arguments(flags):
    return [f"--{name}={value}" for name, value in flags.items()]


def _refused(run_main, flags, folder) -> str:
    """Runs the program, which must refuse; returns the one line on stderr."""
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    done = run_main(flags)
    assert done.returncode == 2
    after = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    assert after == before
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("python -m housing_example.main: ")
    return lines[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_csv": "/no.csv"}, "must be files that can be read. Received: /no.csv"),
        ({"test_csv": "/no.csv"}, "must be files that can be read. Received: /no.csv"),
        ({"train_csv": None, "test_csv": "/t.csv"}, "must come with `--train_csv`. R"),
        ({"effective_batch_size": 9, "gradient_accumulation_steps": 2}, ", not 4 * 2 "),
        ({"output_dir": _SCRIPT}, "must be a folder that a run can write to"),
        ({"output_dir": _SCRIPT / "a"}, "where one can be made. Received: "),
        ({"output_dir": _SCRIPT.parent}, "and no run_settings.json. Use another one."),
    ],
)
def test_bad_flags_end_with_one_sentence(flags, run_main, tmp_path, changes, expected):
    assert expected in _refused(run_main, flags | changes, tmp_path)


def test_a_full_disk_ends_with_one_sentence(flags, run_main, monkeypatch):
    full = types.SimpleNamespace(free=999)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    done = run_main(flags)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "1 kB free. Free some, and the same command begins anew: no c" in done.stderr
    assert "checkpoints take up to" in done.stderr


@pytest.mark.parametrize("flag", ["train_csv", "test_csv"])
def test_bad_csv_ends_with_one_sentence(flags, run_main, tmp_path, flag):
    path = tmp_path / "bad.csv"
    lines = flags["train_csv"].read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2].replace(",", ",x", 1)]) + "\n")
    sentence = _refused(run_main, flags | {flag: path}, tmp_path)
    assert f"{path} line 3 must have a number for ZN. Received: 'x" in sentence


def test_run_prints_metrics_and_five_predictions_and_leaves_a_plot(trained):
    flags, output = trained
    # A slow machine also prints its progress.
    unknown = ("training: ", "evaluation: ", "prediction: ", "checkpoints take up to ")
    said = [line for line in output.stderr.splitlines() if not line.startswith(unknown)]
    sizes = "4 examples x 3 micro-steps x 1 replica; 18 micro-steps"
    at_once = "12 examples x 1 micro-step x 1 replica; 6 micro-steps"
    assert said == [
        line
        for text in (sizes, at_once)
        for line in (f"effective batch 12 = {text} = 6 updates", "building the graph")
    ]
    folder = flags["output_dir"]
    lines = output.stdout.splitlines()
    assert lines[0] == "test examples (6) [$1,000]"
    assert lines[1].split() == ["MAE", "RMSE"]
    assert lines[2].startswith("with accumulation (4 x 3)  ")
    assert lines[3].startswith("without (12)  ")
    assert lines[6].split("  ")[-2:] == ["with accumulation (4 x 3)", "without (12)"]
    truth = pd.read_csv(folder / "test.csv")["MEDV"]
    rows = [re.split(" {2,}", line) for line in lines[7:12]]
    assert [row[0] for row in rows] == [f"example {n}" for n in range(1, 6)]
    assert [float(row[1]) for row in rows] == truth[:5].tolist()
    assert all(float(row[2]) == pytest.approx(float(row[3]), abs=0.02) for row in rows)
    assert lines[13].startswith("largest difference of any weight: ")
    speed = r"K = 3 trained [\d,]+ examples per second, [\d,]+\.\d\d of those of K = 1 \([\d,]+\)\."
    assert re.match(speed, lines[15])
    assert lines[-1] == f"plot: {folder / 'housing.png'}"
    assert output.stdout.startswith((folder / "results.txt").read_text())
    assert image.imread(folder / "housing.png").shape[1] == 1800
    files = ".run.lock housing.png results.txt run_settings.json test.csv train.csv"
    folders = ["with_accumulation", "without_accumulation"]
    assert sorted(os.listdir(folder)) == [*files.split(), *folders]


@pytest.mark.once
def test_trained_run_tells_its_results_again(trained, run_main, every_line):
    flags, first = trained
    again = run_main(flags)
    assert again.stdout == first.stdout
    assert again.stderr.count("is trained already") == 2
    for work in ("evaluation", "prediction"):
        assert again.stderr.count(f"{work}: batch 1 of 1, ") == 2


@pytest.mark.once
def test_trained_run_without_its_metrics_tells_the_rest(trained, run_main, tmp_path):
    flags, first = trained
    folder = pathlib.Path(shutil.copytree(flags["output_dir"], tmp_path / "output"))
    (folder / "with_accumulation" / "train_metrics.csv").unlink()
    again = run_main(flags | {"output_dir": folder})
    assert again.returncode == 0
    assert "with_accumulation/train_metrics.csv, which does not exist" in again.stderr
    results = (folder / "results.txt").read_text()
    assert again.stdout == f"{results}\nplot: none\n"
    assert first.stdout.startswith(results)


@pytest.mark.once
def test_output_folder_of_other_settings_is_refused(trained, run_main, tmp_path):
    flags = trained[0]
    folder = pathlib.Path(shutil.copytree(flags["output_dir"], tmp_path / "output"))
    flags = flags | {"output_dir": folder}
    sentence = _refused(run_main, flags | {"seed": 1}, tmp_path)
    assert (
        "which holds a run with --seed=0, not 1. Use another --output_dir" in sentence
    )
    lines = flags["train_csv"].read_text().splitlines()
    fewer = tmp_path / "fewer.csv"
    fewer.write_text("\n".join(lines[:-1]) + "\n")
    sentence = _refused(run_main, flags | {"train_csv": fewer}, tmp_path)
    assert (
        "which holds a run with different examples. Use another --output_dir"
        in sentence
    )


@pytest.mark.once
def test_a_run_trains_on_when_both_models_are_finished(trained, run_main, tmp_path):
    flags = trained[0]
    folder = pathlib.Path(shutil.copytree(flags["output_dir"], tmp_path / "output"))
    flags = flags | {"output_dir": folder, "train_updates": 7}
    done = run_main(flags)
    assert done.returncode == 0
    assert done.stderr.startswith("training on after update 6: the run, and a schedule")
    assert "largest difference of any weight: " in done.stdout
    for name, step in (("with", 21), ("without", 7)):
        model = folder / f"{name}_accumulation"
        assert values(model)["global_step"] == step
        assert len((model / "train_metrics.csv").read_text().splitlines()) == 8
    (model / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-6"\n')
    sentence = _refused(run_main, flags | {"train_updates": 8}, tmp_path)
    assert "with --train_updates=7, not 8. Use another --output_dir, or" in sentence


def test_gradient_that_is_not_finite_ends_with_one_sentence(flags, run_main):
    done = run_main(flags | {"learning_rate": 1e9, "train_updates": 50})
    assert done.returncode == 2
    sentence = (
        r"Received: NaN or infinity at micro-step \d+ in \S.*\. Use a lower --learn"
    )
    assert re.search(sentence, done.stderr.splitlines()[-1])


def test_the_readme_names_every_flag():
    readme = (_SCRIPT.parent / "README.md").read_text()
    assert set(re.findall(r"`--(\w+)`", readme)) == set(main.PROGRAM.flags()) - {"v"}


def test_defaults_of_the_readme_are_those_of_the_flags():
    readme = (_SCRIPT.parent / "README.md").read_text()
    rows = dict(re.findall(r"^\| `--(\w+)` \| `?(\S+?)`? \|", readme, re.MULTILINE))
    flags = main.PROGRAM.flags()
    assert len(rows) == 12  # sizes that are derived from each other have no default
    for name, default in rows.items():
        shown = str(flags[name].default).lower()
        assert shown in (default, f"{default}.0"), name


@pytest.mark.once
def test_a_killed_run_that_is_started_again_ends_bit_for_bit_like_an_undisturbed_one(
    trained, flags, run_main, tmp_path
):
    whole, done = trained
    command = (_PROGRAM, "--cpus=1", "--dies_after=5", *_arguments(flags))
    killed = running.run(*command, cwd=tmp_path, PYTHONPATH=str(running.ROOT))
    assert killed.returncode == 9
    again = run_main(flags)
    assert "resuming after update 4" in again.stderr
    begin = slice(14)  # before the measured speed, and the path
    assert again.stdout.splitlines()[begin] == done.stdout.splitlines()[begin]
    for name in ("with_accumulation", "without_accumulation"):
        expected = values(whole["output_dir"] / name)
        ours = values(flags["output_dir"] / name)
        assert expected["update_step"] == 6 and ours.keys() == expected.keys()
        for variable, value in expected.items():
            np.testing.assert_array_equal(ours[variable], value, err_msg=variable)
