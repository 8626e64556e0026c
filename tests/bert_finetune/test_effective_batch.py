"""An effective batch gives the same weights, however it is cut, padded or shared."""

import dataclasses
import json
import pathlib
import shutil
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import inputs, jobs, modeling, training
from bert_finetune.settings import Settings
from estimator_accum.programs.batches import AUTO
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.watchdog import ProgressHook
from tests.helpers.models import tiny_bert
from tests.helpers.models.tiny_bert import (
    copy_at_step,
    flags_of,
    metrics,
    run,
    variables,
)
from tests.helpers.processes import running
from tests.helpers.processes.other_machine import limited

pytestmark = [pytest.mark.slow, pytest.mark.once]

_MACHINE = running.PROGRAMS / "other_machine.py"
_PLAN = "effective batch 16 = 4 examples x 2 micro-steps x 2 replicas; 13 micro-steps"
_OTHER_TASKS = {"strategy": "multi_worker", "watchdog_secs": 10**6}  # never on a clock


@pytest.fixture(scope="module")
def of_16(bert_dir, cola_dir, tmp_path_factory) -> Settings:
    """Settings of 2 x 50 examples, 16 per update: 7 updates, the last of 4 examples."""
    folder = tmp_path_factory.mktemp("of_16") / "output"
    settings = tiny_bert.make_settings(bert_dir, cola_dir, folder)
    batch = {"effective_batch_size": 16, "gradient_accumulation_steps": None}
    return dataclasses.replace(settings, do_train=True, num_train_epochs=2.0, **batch)


@pytest.fixture
def settings(of_16, tmp_path) -> Settings:
    return dataclasses.replace(of_16, output_dir=str(tmp_path / "output"))


def _run_counted(settings, name, **changes) -> tuple[pathlib.Path, int]:
    """Returns the folder of a run and its number of `session.run` calls."""
    folder = pathlib.Path(settings.output_dir).with_name(name)
    session = tf.compat.v1.Session
    noted = {"autospec": True, "side_effect": session.run}
    with mock.patch.object(session, "run", **noted) as runs:
        return run(settings, output_dir=str(folder), **changes), runs.call_count


@pytest.fixture(scope="module")
def whole(of_16) -> pathlib.Path:
    """Folder of a run on 16 examples at once, padded to the maximum length."""
    folder = pathlib.Path(of_16.output_dir).with_name("whole")
    changes = {"micro_batch_size": 16, "pad_to_max_length": True}
    return run(of_16, output_dir=str(folder), **changes)


@pytest.fixture(scope="module")
def in_threes(of_16) -> tuple[pathlib.Path, int]:
    """The run in micro-batches of 3, saved at micro-steps 10, 20, 30 and 38."""
    changes = {"micro_batch_size": 3, "save_checkpoints_steps": 10}
    return _run_counted(of_16, "in_threes", **changes)


@pytest.fixture(scope="module")
def tokens(of_16) -> tuple[pathlib.Path, int]:
    """The run in 18 micro-batches of up to 80 tokens, saved 4 times."""
    changes = {"tokens_per_micro_batch": 80, "save_checkpoints_steps": 5}
    return _run_counted(of_16, "tokens", **changes)


@pytest.fixture(scope="module")
def auto(of_16) -> pathlib.Path:
    """Folder of a run with micro-batches "auto" and memory for 5 examples."""
    folder = pathlib.Path(of_16.output_dir).with_name("auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "encode", limited(modeling.encode, 5))
        return run(of_16, output_dir=str(folder), micro_batch_size=AUTO, do_eval=True)


@pytest.fixture(scope="module")
def mirrored(of_16) -> pathlib.Path:
    """Folder of a run on two devices of a process, saved after every second update."""
    folder = pathlib.Path(of_16.output_dir).with_name("mirrored")
    changes = {"strategy": "mirrored", "save_checkpoints_steps": 3}
    flags = flags_of(of_16, output_dir=str(folder), **changes)
    done = running.run(_MACHINE, "logical_cpus=2", *flags)
    assert done.returncode == 0
    assert _PLAN in done.stderr
    return folder


def _assert_close(folder, whole):
    ours, theirs = variables(folder), variables(whole)
    assert ours.keys() == theirs.keys() and len(ours) > 30
    assert ours["update_step"] == theirs["update_step"] == 7
    for name in theirs.keys() - {"global_step"}:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5, err_msg=name)
    rows, expected = metrics(folder), metrics(whole)
    assert [int(row["examples"]) for row in rows] == [16, 32, 48, 64, 80, 96, 100]
    for column in ("loss", "gradient_norm", "learning_rate"):
        values, wanted = ([float(r[column]) for r in t] for t in (rows, expected))
        np.testing.assert_allclose(values, wanted, rtol=1e-5, err_msg=column)


def test_weights_and_metrics_do_not_depend_on_an_updates_cut(whole, in_threes):
    _assert_close(in_threes[0], whole)
    steps = [variables(path)["global_step"] for path in (whole, in_threes[0])]
    assert steps == [7, 6 * 6 + 2]


@pytest.mark.daily
def test_memory_decides_about_the_cut(whole, auto):
    _assert_close(auto, whole)
    assert variables(auto)["global_step"] == 7
    assert tiny_bert.results(auto)["update_step"] == 7
    content = json.loads((auto / "micro_batches.json").read_text())
    assert content == {"micro_batches": 4}  # 16, 8, and then 4 at once


@pytest.mark.daily
def test_evaluation_and_prediction_do_not_depend_on_their_cut(auto, settings):
    runs, folder = [], pathlib.Path(settings.output_dir)
    for rows, size in ((16, 16), (3, AUTO)):
        with pytest.MonkeyPatch.context() as patch:
            encode = limited(modeling.encode, rows, in_every_mode=True)
            patch.setattr(modeling, "encode", encode)
            shutil.copytree(auto, folder.with_name(str(size)))
            changes = {"output_dir": str(folder.with_name(str(size)))}
            changes |= {"do_train": False, "do_eval": True, "do_predict": True}
            run(settings, micro_batch_size=size, **changes)
    for size in ("16", AUTO):
        results = tiny_bert.results(folder.with_name(size))
        lines = (folder.with_name(size) / "test_results.tsv").read_text().split("\n")
        rows = [list(map(float, line.split("\t"))) for line in lines[:-1]]
        runs.append((results, rows, (folder.with_name(size) / "CoLA.tsv").read_text()))
    (theirs, wanted, labels), (ours, rows, own_labels) = runs
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert ours["eval_accuracy"] == theirs["eval_accuracy"]
    assert own_labels == labels
    np.testing.assert_allclose(rows, wanted, rtol=1e-5)
    for job in ("eval", "predict"):
        path = folder.with_name(AUTO) / f"micro_batches-{job}.json"
        assert json.loads(path.read_text()) == {"micro_batches": 4}  # 12, 6, 3 at once


def test_windows_of_so_many_tokens_have_the_same_weights(tokens, whole):
    _assert_close(tokens[0], whole)
    assert variables(tokens[0])["global_step"] == 18


def test_a_micro_step_is_one_session_run(in_threes, tokens):
    assert in_threes[1] - tokens[1] == 38 - 18  # both save equally often


@pytest.mark.daily
def test_a_run_goes_on_cut_in_another_way(settings, in_threes, whole):
    copy_at_step(in_threes[0], pathlib.Path(settings.output_dir), 30)
    folder = run(settings, micro_batch_size=AUTO)
    _assert_close(folder, whole)
    assert variables(folder)["global_step"] == 30 + 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": AUTO}, "half of must .* --micro_batch_size=3, not auto"),
        ({"micro_batch_size": 3, "effective_batch_size": 20}, "effective.*=16, not 20"),
    ],
)
def test_an_update_that_was_begun_does_not_go_on_cut_in_another_way(
    settings, in_threes, changes, message
):
    copy_at_step(in_threes[0], pathlib.Path(settings.output_dir), 10)
    with pytest.raises(ValueError, match=message):
        run(settings, **changes)


@pytest.mark.daily
def test_two_devices_of_one_process_have_the_weights_of_one(mirrored, whole):
    _assert_close(mirrored, whole)


@pytest.mark.daily
def test_two_tasks_resume_a_run_and_the_chief_does_the_rest(settings, mirrored, whole):
    folder = copy_at_step(mirrored, pathlib.Path(settings.output_dir), 8)
    flags = flags_of(settings, **_OTHER_TASKS, do_predict=True)
    with running.cluster((_MACHINE, *flags), jobs=("chief", "worker")) as tasks:
        chief, worker = (task.wait() for task in tasks)
    assert chief.returncode == worker.returncode == 0
    assert "resuming after update " in chief.stderr
    assert "resuming" not in worker.stderr
    assert _PLAN in chief.stderr and _PLAN not in worker.stderr
    _assert_close(folder, whole)
    assert len((folder / "CoLA.tsv").read_text().splitlines()) == 11


@pytest.mark.daily
def test_task_of_a_cluster_trains_under_a_watchdog(settings, mirrored, monkeypatch):
    """For a task that is really lost see tests/distributed/test_clusters.py."""
    calls = mock.Mock()
    copy_at_step(mirrored, pathlib.Path(settings.output_dir), 8)
    changed = dataclasses.replace(settings, **_OTHER_TASKS)
    cluster = Cluster(chief="a:1", workers=("b:1",), task_type="worker")
    monkeypatch.setattr(training.job, "Watchdog", calls.Watchdog)
    monkeypatch.setattr(training, "make_strategy", lambda *_: None)
    _ = tf.estimator.Estimator  # loads the module, which would undo the next line
    monkeypatch.setattr(tf.estimator, "train_and_evaluate", calls.train)
    training.train(jobs.prepare(inputs.read(changed, cluster)))
    watchdog, start, (_, (_, spec, _), _), stop = calls.mock_calls
    options = {"watched": None, "find_reason": mock.ANY}
    assert watchdog == mock.call.Watchdog(10**6, "worker 0", **options)
    assert watchdog.kwargs["find_reason"]() is None  # nobody listens
    assert (start, stop) == (mock.call.Watchdog().start(), mock.call.Watchdog().stop())
    assert spec.max_steps == 13
    (hook,) = (hook for hook in spec.hooks if isinstance(hook, ProgressHook))
    assert hook._first_global_step == 8
