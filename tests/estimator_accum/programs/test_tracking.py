"""--report_to: trackers of every program, with the run's name beside its flags."""

import importlib
import pathlib
import sys

import pytest

from bert_finetune.run_classifier import PROGRAM as BERT
from distributed.main import PROGRAM as DISTRIBUTED
from distributed.settings import Settings
from estimator_accum.programs import tracking
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.flag_values import read_settings_of
from estimator_accum.programs.folder import make_run_folder
from housing_example.main import PROGRAM as HOUSING
from tests.helpers.models import tiny_bert

pytestmark = pytest.mark.once


@pytest.fixture
def trackers(monkeypatch) -> list:
    """Reports that were made: (class, folder, options)."""
    calls = []

    def kind(name):
        return lambda folder, **options: calls.append((name, folder, options)) or name

    for name in ("MlflowReport", "WandbReport"):
        monkeypatch.setattr(tracking, name, kind(name))
    return calls


@pytest.mark.parametrize("report_to", [None, "tensorboard"])
def test_csv_and_tensorboard_need_no_further_report(trackers, report_to):
    assert tracking.make_reports(Settings(report_to=report_to), "out") == []


def test_trackers_get_the_folders_name_and_the_flags(trackers):
    settings = Settings(report_to="wandb,mlflow", learning_rate=0.25)
    reports = tracking.make_reports(settings, "out/run 1")
    assert reports == ["MlflowReport", "WandbReport"]
    (_, folder, mlflow), (_, _, wandb) = trackers
    assert folder == "out/run 1"
    assert mlflow.pop("run_name") == wandb.pop("name") == "run 1"
    assert mlflow["tags"]["learning_rate"] == "0.25"
    assert wandb["config"] == settings.as_flags()
    assert wandb["config"]["report_to"] == "wandb,mlflow"


def test_a_tracker_that_is_unknown_or_not_installed_is_refused_at_once(
    call, monkeypatch
):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for value in ("mlflow", "wandb;mlflow", ""):
        flags = [f"--report_to={value}"]
        done = call(lambda flags: DISTRIBUTED.run(["program", *flags]) or 0, *flags)
        assert done.returncode == 2
        assert done.stderr == (
            f"{DISTRIBUTED.name}: `--report_to` must be some of mlflow, wandb and "
            f"tensorboard, installed, with commas. Received: {value!r}. For one that is missing, use "
            "`pip install mlflow` or `pip install wandb`.\n"
        )


class _Reported(Exception):
    """Raised when a program makes its reports."""


@pytest.mark.parametrize("program", [BERT, HOUSING, DISTRIBUTED])
def test_every_program_reports_to_the_trackers(program, tmp_path, monkeypatch):
    def note(settings, model_dir):
        raise _Reported(settings.report_to, pathlib.Path(model_dir).parts)

    flags = {"output_dir": tmp_path / "output"}
    if program is BERT:
        tiny_bert.write_bert(tmp_path / "bert")
        tiny_bert.write_cola(tmp_path / "cola")
        flags = tiny_bert.command_line(tmp_path / "bert", tmp_path / "cola", "output")
        flags["output_dir"] = tmp_path / "output"
    argv = ["program", "--report_to=tensorboard"]
    argv += [f"--{name}={value}" for name, value in flags.items()]
    settings = read_settings_of(program.settings, program.flags(), argv)
    names = f"{program.room}.inputs", f"{program.room}.jobs"
    inputs, jobs = map(importlib.import_module, names)
    job = jobs.prepare(inputs.read(settings, Cluster()))
    make_run_folder(settings.output_dir)
    monkeypatch.setattr(f"{program.room}.model_fn.make_reports", note)
    with pytest.raises(_Reported) as error:
        jobs.execute(job)
    report_to, parts = error.value.args
    assert report_to == "tensorboard" and "output" in parts
