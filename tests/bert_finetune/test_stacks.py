"""TensorFlow 2.15 exchanges checkpoints with the newest, with the same losses."""

import dataclasses
import json
import os
import sys

import numpy as np
import pytest

from tests.helpers.models import tiny_bert
from tests.helpers.models.tiny_bert import (
    copy_at_step,
    flags_of,
    metrics,
    run,
    variables,
)
from tests.helpers.processes import running

pytestmark = [pytest.mark.daily, pytest.mark.slow, pytest.mark.once]


def _stack(python) -> tuple[str, ...]:
    """Returns TensorFlow's version; ("",) if the interpreter has none."""
    code = "import importlib.metadata as m; print(m.version('tensorflow'))"
    return tuple(running.run("-c", code, python=python).stdout.strip().split(".")[:2])


@pytest.fixture(scope="module")
def other_python() -> str:
    """Path of the other stack's Python: given, or in .ci/run's environments."""
    named = os.environ.get("ESTIMATOR_ACCUM_OTHER_PYTHON")
    folders = [running.ROOT / f".venv-{version}" for version in ("3.11", "3.12")]
    candidates = [named] if named else [str(f / "bin" / "python") for f in folders]
    for python in candidates:
        unfit = (("",), _stack(sys.executable))
        if os.path.exists(python) and _stack(python) not in unfit:
            return python
    pytest.skip(
        "only one TensorFlow is installed: set ESTIMATOR_ACCUM_OTHER_PYTHON to an "
        "interpreter with the project on another one, or run .ci/run twice"
    )


_TRAIN_EACH = """
import json, sys
from bert_finetune import run_classifier
for arguments in json.loads(sys.argv[1]):
    run_classifier.main(["run_classifier.py", *arguments])
"""


@pytest.fixture(scope="module")
def settings(bert_dir, cola_dir):
    """Settings of a run that saves after micro-step 15, in the middle of a window."""
    settings = tiny_bert.make_settings(bert_dir, cola_dir, bert_dir)
    changes = {"num_train_epochs": 4.0, "save_checkpoints_steps": 15}
    return dataclasses.replace(settings, do_train=True, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, settings, other_python):
    """Folder with the run on this stack, on the other, and moved from each."""
    folder = tmp_path_factory.mktemp("stacks")
    run(settings, output_dir=str(folder / "this"))
    copy_at_step(folder / "this", folder / "moved_from_this", 15)
    folders = [str(folder / name) for name in ("other", "moved_from_this")]
    commands = [flags_of(settings, output_dir=folder) for folder in folders]
    script = ("-c", _TRAIN_EACH, json.dumps(commands))
    done = running.run(*script, python=other_python, PYTHONPATH=str(running.ROOT))
    assert done.returncode == 0
    assert done.stderr.count("resuming after update ") == 1
    copy_at_step(folder / "other", folder / "moved_from_other", 15)
    run(settings, output_dir=str(folder / "moved_from_other"))
    return folder


def test_same_seed_gives_the_same_losses_on_both_stacks(runs):
    rows = [metrics(runs / name) for name in ("this", "other")]
    ours, theirs = (np.array([float(row["loss"]) for row in table]) for table in rows)
    assert len(ours) == len(theirs) >= 20
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("beginning, ending", [("this", "other"), ("other", "this")])
def test_run_of_one_stack_goes_on_on_the_other(runs, beginning, ending):
    moved, whole = variables(runs / f"moved_from_{beginning}"), variables(runs / ending)
    assert moved.keys() == whole.keys()
    assert moved["update_step"] == whole["update_step"] >= 20
    for name, value in whole.items():
        scale = np.max(np.abs(value), initial=1e-3)
        ours, theirs = moved[name] / scale, value / scale
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3, err_msg=name)
