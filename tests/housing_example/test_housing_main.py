"""The command line: flags, one sentence for bad input, a run that is killed."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from matplotlib import image

from housing_example import demo_data, input_pipeline, main

_SCRIPT = pathlib.Path(main.__file__)


@pytest.fixture(autouse=True)
def _process_as_before(_loggers_as_before):
    """main() sets the process's flags too; other tests read theirs."""
    yield
    main.FLAGS.unparse_flags()
    for name in main.FLAGS:
        main.FLAGS[name].unparse()


@pytest.fixture
def flags(csv, tmp_path) -> dict:
    """A complete command line, by flag; it trains for a moment."""
    return {
        "train_csv": shutil.copy(csv, tmp_path / "houses.csv"),
        "output_dir": tmp_path / "new" / "output",
        "train_batch_size": 4,
        "train_updates": 3,
    }


def _arguments(flags):
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def _run(flags):
    main.FLAGS.unparse_flags()
    for name in main.FLAGS:
        main.FLAGS[name].unparse()
    main.main([str(_SCRIPT), *_arguments(flags)])


def _refused(flags, capsys, folder) -> str:
    """Runs in this process; returns the one line on stderr."""
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        _run(flags)
    assert stopped.value.code == 2
    after = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    assert after == before
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("housing_example: ")
    return lines[0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_cvs": "a"}, "Received: --train_cvs. Did you mean --train_csv?"),
        ({"qqqqqq": "1"}, "Flags must be those of --help. Received: --qqqqqq. See"),
        ({"shuffle": "perhaps"}, "`--shuffle` must be true or false. Received: 'perh"),
        ({"train_csv": "/no.csv"}, "must be files that can be read. Received: /no.csv"),
        ({"test_csv": "/no.csv"}, "must be files that can be read. Received: /no.csv"),
        ({"train_csv": None, "test_csv": "/t.csv"}, "must come with `--train_csv`. R"),
        ({"gradient_accumulation_steps": 0}, "Received: 0. Use 1 to turn accumulatio"),
        ({"gradient_accumulation_multiplier": -2}, "integer >= 1 and < 2**31. Receiv"),
        ({"gradient_accumulation_multiplier": 1.5}, "an integer. Received: '1.5'"),
        ({"train_batch_size": 0}, "`--train_batch_size` must be an integer >= 1 and "),
        ({"micro_batch_size": "many"}, "must be an integer >= 1 or auto. Received: 'm"),
        ({"micro_batch_size": 5}, "and its other name `--micro_batch_size` must be eq"),
        ({"train_batch_size": None, "micro_batch_size": "auto"}, "no --effective_batc"),
        ({"effective_batch_size": 9, "gradient_accumulation_steps": 2}, ", not 4 * 2 "),
        ({"strategy": "all"}, "one of none, mirrored, multi_worker. Received: 'all'"),
        ({"watchdog_secs": 0}, "`--watchdog_secs` must be an integer >= 1 and < 2**31"),
        ({"train_updates": 0}, "`--train_updates` must be an integer >= 1 and < 2**31"),
        ({"train_updates": 2**31}, "Received: 2147483648. See --help for the usual v"),
        ({"learning_rate": 0}, "`--learning_rate` must be a number > 0 and <= 1e9. R"),
        ({"learning_rate": "nan"}, "must be a number > 0 and <= 1e9. Received: nan"),
        ({"clip_norm": -1}, "`--clip_norm` must be a finite number >= 0. Received: -"),
        ({"clip_norm": "inf"}, "must be a finite number >= 0. Received: inf. Use 0"),
        ({"seed": -1}, "`--seed` must be an integer >= 0 and < 2**31. Received: -1."),
        ({"output_dir": _SCRIPT}, "must be a folder. Received: "),
        ({"output_dir": _SCRIPT / "a"}, "where one can be made. Received: "),
        ({"output_dir": _SCRIPT.parent}, "and no run_settings.json. Use another one."),
    ],
)
def test_bad_flags_end_with_one_sentence(flags, capsys, tmp_path, changes, expected):
    assert expected in _refused(flags | changes, capsys, tmp_path)


def test_argument_that_is_no_flag_is_refused(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        main.main([str(_SCRIPT), *_arguments(flags), "houses.csv"])
    assert stopped.value.code == 2
    assert "given as a flag. Received: 'houses.csv'. Write" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["train_csv", "test_csv"])
def test_bad_csv_ends_with_one_sentence(flags, capsys, tmp_path, flag):
    path = tmp_path / "bad.csv"
    lines = flags["train_csv"].read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2].replace(",", ",x", 1)]) + "\n")
    sentence = _refused(flags | {flag: path}, capsys, tmp_path)
    assert f"{path} line 3 must have a number for ZN. Received: 'x" in sentence


def test_run_prints_metrics_and_five_predictions_and_leaves_a_plot(flags, capsys):
    _run(flags)
    output = capsys.readouterr()
    assert (
        "effective batch 12 = 4 examples x 3 micro-steps x 1 replica; "
        "9 micro-steps = 3 updates\n"
        "effective batch 12 = 12 examples x 1 micro-steps x 1 replica; "
        "3 micro-steps = 3 updates\n"
    ) in output.err
    folder = flags["output_dir"]
    lines = output.out.splitlines()
    assert lines[0] == "test examples (6) [unit of MEDV]"
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
    assert lines[-1] == f"plot: {folder / 'housing.png'}"
    assert output.out.startswith((folder / "results.txt").read_text())
    assert image.imread(folder / "housing.png").shape[1] == 1800
    assert sorted(os.listdir(folder)) == [
        "housing.png",
        "results.txt",
        "run_settings.json",
        "test.csv",
        "train.csv",
        "with_accumulation",
        "without_accumulation",
    ]


def test_test_csv_is_tested_on_and_all_of_the_other_trained_on(flags, capsys, tmp_path):
    path = tmp_path / "test.csv"
    path.write_text(input_pipeline.csv_text(demo_data.generate(3, seed=5)))
    _run(flags | {"test_csv": path})
    assert "test examples (3) " in capsys.readouterr().out
    for name, given in (("test.csv", path), ("train.csv", flags["train_csv"])):
        used = pd.read_csv(flags["output_dir"] / name)
        pd.testing.assert_frame_equal(used, pd.read_csv(given), check_dtype=False)


def test_one_micro_batch_an_update_trains_once(flags, capsys):
    _run(flags | {"gradient_accumulation_multiplier": 1})
    output = capsys.readouterr().out
    assert "without (4)" in output
    assert "with acc" not in output and "largest difference" not in output
    assert not (flags["output_dir"] / "with_accumulation").exists()


@pytest.mark.once
def test_trained_run_tells_its_results_again(flags, capsys):
    _run(flags)
    first = capsys.readouterr()
    _run(flags)
    again = capsys.readouterr()
    assert again.out == first.out
    assert again.err.count("is trained already") == 2


@pytest.mark.once
def test_output_folder_of_other_settings_is_refused(flags, capsys, tmp_path):
    _run(flags)
    capsys.readouterr()
    sentence = _refused(flags | {"seed": 1}, capsys, tmp_path)
    assert "whose run has --seed=0, not 1. Use another --output_dir" in sentence
    lines = flags["train_csv"].read_text().splitlines()
    flags["train_csv"].write_text("\n".join(lines[:-1]) + "\n")
    sentence = _refused(flags, capsys, tmp_path)
    assert "whose run has other examples. Use another --output_dir" in sentence
    (flags["output_dir"] / "run_settings.json").write_text("{")
    sentence = _refused(flags, capsys, tmp_path)
    assert "run_settings.json must be what a run has written. Received" in sentence


def test_gradient_that_is_not_finite_ends_with_one_sentence(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        _run(flags | {"learning_rate": 1e9, "train_updates": 50})
    assert stopped.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        r"Received: NaN or infinity at micro-step \d+ in \S.*\. Use a lower --learn",
        last,
    )


def test_help_names_every_flag_and_the_readme_too():
    command = [sys.executable, str(_SCRIPT), "--help"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60
    )
    readme = (_SCRIPT.parent / "README.md").read_text()
    named = set(re.findall(r"`--(\w+)`", readme))
    assert named == set(main.FLAGS)
    for name in named:
        assert re.search(rf"--(\[no\])?{name}:", done.stdout), name


def test_defaults_of_the_readme_are_those_of_the_flags():
    readme = (_SCRIPT.parent / "README.md").read_text()
    rows = dict(re.findall(r"^\| `--(\w+)` \| `?(\S+?)`? \|", readme, re.MULTILINE))
    assert len(rows) == 9  # and those that follow from each other
    for name, default in rows.items():
        assert str(json.loads(f'"{main.FLAGS[name].default}"')).lower() in (
            default,
            f"{default}.0",
        ), name


def _final(folder):
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(folder)))
    return {
        name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()
    }


@pytest.mark.slow
@pytest.mark.once
def test_a_killed_run_that_is_started_again_ends_bit_for_bit_like_an_undisturbed_one(
    flags, tmp_path
):
    flags |= {"train_updates": 300}
    whole = flags | {"output_dir": tmp_path / "whole"}
    command = [sys.executable, "-m", "housing_example.main"]
    options = {
        "cwd": _SCRIPT.parent.parent,
        "timeout": 180,
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run([*command, *_arguments(whole)], check=True, **options)
    # Nothing but the run's own two lines.
    assert len(done.stderr.splitlines()) == 2, done.stderr
    process = subprocess.Popen(
        [*command, *_arguments(flags)], cwd=options["cwd"], stderr=subprocess.DEVNULL
    )
    folder = str(flags["output_dir"] / "with_accumulation")
    deadline = time.monotonic() + 120
    while process.poll() is None:
        if (tf.train.latest_checkpoint(folder) or "").endswith("-750"):
            break
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -9
    again = subprocess.run([*command, *_arguments(flags)], check=True, **options)
    assert "going on after update 250" in again.stderr
    assert again.stdout.splitlines()[:-1] == done.stdout.splitlines()[:-1]
    for name in ("with_accumulation", "without_accumulation"):
        expected = _final(whole["output_dir"] / name)
        ours = _final(flags["output_dir"] / name)
        assert expected["update_step"] == 300 and ours.keys() == expected.keys()
        for variable, value in expected.items():
            np.testing.assert_array_equal(ours[variable], value, err_msg=variable)
