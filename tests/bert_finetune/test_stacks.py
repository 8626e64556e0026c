"""TensorFlow 2.15 and the newest: one curve, and each other's checkpoints."""

import dataclasses
import os
import sys

import numpy as np
import pytest
import running
from tiny_bert import copy_at_step, flags_of, make_settings, metrics, variables

pytestmark = [pytest.mark.slow, pytest.mark.once]


def _stack(python) -> tuple[str, ...]:
    """Returns TensorFlow's version; empty where the interpreter has none."""
    code = "import importlib.metadata as m; print(m.version('tensorflow'))"
    return tuple(running.run("-c", code, python=python).stdout.strip().split(".")[:2])


@pytest.fixture(scope="module")
def other_python() -> str:
    """The interpreter of the other stack: named, or in .ci/run's environments."""
    named = os.environ.get("ESTIMATOR_ACCUM_OTHER_PYTHON")
    folders = [running.ROOT / f".venv-{version}" for version in ("3.11", "3.12")]
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


def _train(python, settings, folder) -> running.Done:
    script = running.ROOT / "bert_finetune" / "run_classifier.py"
    flags = flags_of(settings, output_dir=str(folder))
    done = running.run(script, *flags, python=python, PYTHONPATH=str(running.ROOT))
    assert done.returncode == 0
    return done


@pytest.fixture(scope="module")
def settings(bert_dir, cola_dir):
    """Saved after micro-step 15, in the middle of a window."""
    return dataclasses.replace(
        make_settings(bert_dir, cola_dir, bert_dir),
        do_train=True,
        do_eval=True,
        num_train_epochs=4.0,
        save_checkpoints_steps=15,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory, settings, other_python):
    """The folders of the same run on this stack and on the other one."""
    folder = tmp_path_factory.mktemp("stacks")
    for name, python in (("this", sys.executable), ("other", other_python)):
        _train(python, settings, folder / name)
    return folder


def test_same_seed_gives_the_same_losses_on_both_stacks(runs):
    ours, theirs = (
        np.array([float(row["loss"]) for row in metrics(runs / name)])
        for name in ("this", "other")
    )
    assert len(ours) == len(theirs) >= 20
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("beginning", ["this", "other"])
def test_run_of_one_stack_goes_on_on_the_other(
    runs, settings, other_python, tmp_path, beginning
):
    ending, python = {
        "this": ("other", other_python),
        "other": ("this", sys.executable),
    }[beginning]
    folder = copy_at_step(runs / beginning, tmp_path / "moved", 15)
    done = _train(python, settings, folder)
    assert "going on after micro-step 15" in done.stderr
    moved, whole = variables(folder), variables(runs / ending)
    assert moved.keys() == whole.keys()
    assert moved["update_step"] == whole["update_step"] >= 20
    for name, value in whole.items():
        scale = np.max(np.abs(value), initial=1e-3)
        np.testing.assert_allclose(
            moved[name] / scale, value / scale, rtol=0, atol=1e-3, err_msg=name
        )
