"""Reports to MLflow or Weights & Biases, with the real packages, without a server."""

import sys

import pytest

from estimator_accum.reports import MlflowReport, Update, WandbReport

pytestmark = pytest.mark.once


def _update(step):
    options = {"gradient_norm": 2.0, "weight": 4.0, "secs": 2.0}
    return Update(step, 4 * step, loss=1.0 / step, **options)


def _report(report, first, last):
    report.check()
    report.open(first - 1)
    for step in range(first, last + 1):
        report.write(_update(step))
    report.close()


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """The package, which keeps its runs in a folder of this test."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    return pytest.importorskip("mlflow", reason="MLflow is not installed")


def _recorded(mlflow, run_id, name):
    history = mlflow.MlflowClient().get_metric_history(run_id, name)
    return [(metric.step, metric.value) for metric in history]


def test_mlflow_has_each_update_once_in_the_run_that_is_resumed(mlflow, tmp_path):
    model_dir = tmp_path / "model"
    _report(MlflowReport(model_dir, run_name="first"), 1, 3)
    (run,) = mlflow.search_runs(output_format="list")
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    _report(MlflowReport(model_dir), 3, 4)  # update 3 was lost
    assert len(mlflow.search_runs(output_format="list")) == 1
    losses = _recorded(mlflow, run.info.run_id, "loss")
    assert losses == [(step, 1.0 / step) for step in (1, 2, 3, 4)]
    assert _recorded(mlflow, run.info.run_id, "global_step")[-1] == (4, 16)
    assert _recorded(mlflow, run.info.run_id, "weight_per_sec")[0] == (1, 2.0)
    assert "noise_scale" not in mlflow.get_run(run.info.run_id).data.metrics
    _report(MlflowReport(tmp_path / "other"), 1, 1)
    assert len(mlflow.search_runs(output_format="list")) == 2


def test_mlflow_records_in_the_active_run_and_leaves_it_active(mlflow, tmp_path):
    with mlflow.start_run() as run:
        _report(MlflowReport(tmp_path), 1, 1)
        assert mlflow.active_run().info.run_id == run.info.run_id
        _report(MlflowReport(tmp_path / "other"), 1, 1)  # of another training
    assert _recorded(mlflow, run.info.run_id, "loss") == [(1, 1.0)] * 2
    assert (tmp_path / "mlflow_run_id.txt").read_text().strip() == run.info.run_id


def test_mlflow_resumes_a_run_whose_id_is_given(mlflow, tmp_path):
    with mlflow.start_run() as run:
        pass
    _report(MlflowReport(tmp_path, run_id=run.info.run_id), 1, 1)
    assert _recorded(mlflow, run.info.run_id, "loss") == [(1, 1.0)]


@pytest.fixture
def wandb(monkeypatch):
    """The package, which sends nothing."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")  # it leaves a git process behind
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    yield wandb
    wandb.teardown()


def test_wandb_has_each_update_in_the_run_that_is_resumed(wandb, tmp_path, monkeypatch):
    recorded = []
    log = wandb.Run.log

    def heard(run, values, *arguments, **options):
        log(run, values, *arguments, **options)
        assert "step" not in options
        recorded.append((run.id, values["update_step"], values["loss"]))

    monkeypatch.setattr(wandb.Run, "log", heard)
    for first, last in ((1, 2), (3, 3)):
        _report(WandbReport(tmp_path, project="p"), first, last)
    assert wandb.run is None
    run_id = (tmp_path / "wandb_run_id.txt").read_text().strip()
    assert recorded == [(run_id, step, 1.0 / step) for step in (1, 2, 3)]
    folders = list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert all((folder / f"run-{run_id}.wandb").stat().st_size for folder in folders)
    assert folders


def test_wandb_records_in_the_current_run_what_it_has_not(wandb, tmp_path, monkeypatch):
    with wandb.init(dir=str(tmp_path), project="p") as run:
        report = WandbReport(tmp_path / "model")
        _report(report, 1, 3)
        assert wandb.run is run and run.step == 3  # all three are sent
        assert run.summary["update_step"] == 3
        _report(WandbReport(tmp_path / "other"), 1, 2)  # of another training
        assert run.step == 5
        monkeypatch.setattr(wandb.Run, "log", None)  # it warns of what it ignores
        report.open(1)
        report.write(_update(2))


def test_wandb_has_each_update_beside_logs_of_the_user(wandb, tmp_path, monkeypatch):
    recorded = []
    log = wandb.Run.log

    def heard(run, values, *arguments, **options):
        log(run, values, *arguments, **options)
        recorded.append(values.get("update_step"))

    with wandb.init(dir=str(tmp_path), project="p") as run:
        for number in range(5):
            run.log({"checked": number})
        monkeypatch.setattr(wandb.Run, "log", heard)
        report = WandbReport(tmp_path / "model")
        _report(report, 1, 3)
        assert run.step == 8  # nothing is held back
    assert recorded == [1, 2, 3]


@pytest.mark.parametrize("report", [MlflowReport, WandbReport])
def test_a_tracker_that_is_not_installed_is_named(report, tmp_path, monkeypatch):
    name = report.__name__.removesuffix("Report").lower()
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as refused:
        report(tmp_path / "model").check()
    assert str(refused.value) == (
        f"A report to {name} needs its package. Received: a Python without it. "
        f"Use `pip install {name}`."
    )
    assert not (tmp_path / "model").exists()


def test_a_tracker_that_lacks_another_package_says_which(tmp_path, monkeypatch):
    (tmp_path / "mlflow.py").write_text("import not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with pytest.raises(ModuleNotFoundError, match="^No module named 'not_there'$"):
        MlflowReport(tmp_path).check()
