"""TensorFlow 2.15 and the newest: one curve, and each other's checkpoints."""

import csv
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def _stack(python) -> tuple[str, ...]:
    """Returns TensorFlow's version; empty where the interpreter has none."""
    code = "import importlib.metadata as m; print(m.version('tensorflow'))"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False
    )
    return tuple(done.stdout.strip().split(".")[:2])


@pytest.fixture(scope="module")
def other_python() -> str:
    """The interpreter of the other stack: named, or in .ci/run's environments."""
    named = os.environ.get("ESTIMATOR_ACCUM_OTHER_PYTHON")
    folders = [_REPOSITORY / f".venv-{version}" for version in ("3.11", "3.12")]
    candidates = [named] if named else [str(f / "bin" / "python") for f in folders]
    for python in candidates:
        if os.path.exists(python) and _stack(python) not in (
            (),
            _stack(sys.executable),
        ):
            return python
    pytest.skip(
        "only one TensorFlow is installed: set ESTIMATOR_ACCUM_OTHER_PYTHON to an "
        "interpreter with the project on another one, or run .ci/run twice"
    )


def _train(python, bert_dir, cola_dir, folder):
    flags = {
        "task_name": "CoLA",
        "do_train": "true",
        "do_eval": "true",
        "data_dir": cola_dir,
        "vocab_file": bert_dir / "vocab.txt",
        "bert_config_file": bert_dir / "bert_config.json",
        "init_checkpoint": bert_dir / "bert_model.ckpt",
        "output_dir": folder,
        "max_seq_length": 16,
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "num_train_epochs": 4,
        "save_checkpoints_steps": 15,
        "dropout": "false",
    }
    program = _REPOSITORY / "bert_finetune" / "run_classifier.py"
    command = [python, program, *(f"--{name}={v}" for name, v in flags.items())]
    environment = dict(os.environ) | {"PYTHONPATH": str(_REPOSITORY)}
    environment.pop("TF_USE_LEGACY_KERAS", None)
    done = subprocess.run(
        list(map(str, command)),
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def runs(tmp_path_factory, bert_dir, cola_dir, other_python):
    """The folders of the same run on this stack and on the other one."""
    folder = tmp_path_factory.mktemp("stacks")
    for name, python in (("this", sys.executable), ("other", other_python)):
        _train(python, bert_dir, cola_dir, folder / name)
    return folder


def _losses(folder) -> np.ndarray:
    with (folder / "train_metrics.csv").open() as file:
        return np.array([float(row["loss"]) for row in csv.DictReader(file)])


def _variables(folder) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(folder))
    return {
        name: reader.get_tensor(name)
        for name in reader.get_variable_to_shape_map()
        if "accumul" not in name
    }


@pytest.mark.slow
def test_same_seed_gives_the_same_losses_on_both_stacks(runs):
    ours, theirs = _losses(runs / "this"), _losses(runs / "other")
    assert len(ours) == len(theirs) >= 20
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("beginning", ["this", "other"])
def test_run_of_one_stack_goes_on_on_the_other(
    runs, bert_dir, cola_dir, other_python, tmp_path, beginning
):
    ending, python = {
        "this": ("other", other_python),
        "other": ("this", sys.executable),
    }[beginning]
    folder = tmp_path / "moved"
    shutil.copytree(runs / beginning, folder)
    for file in folder.glob("model.ckpt-*"):  # back to the middle of a window
        if not file.name.startswith("model.ckpt-15."):
            file.unlink()
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-15"\n')
    done = _train(python, bert_dir, cola_dir, folder)
    assert "going on after micro-step 15" in done.stderr
    moved, whole = _variables(folder), _variables(runs / ending)
    assert moved.keys() == whole.keys()
    assert moved["update_step"] == whole["update_step"] >= 20
    for name, value in whole.items():
        scale = np.max(np.abs(value), initial=1e-3)
        np.testing.assert_allclose(
            moved[name] / scale, value / scale, rtol=0, atol=1e-3, err_msg=name
        )
