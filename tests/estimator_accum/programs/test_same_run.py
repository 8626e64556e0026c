"""Tasks of a cluster train one run: a task compares itself with the chief's settings."""

import socket

import pytest

from distributed import jobs
from distributed.main import PROGRAM as IMAGES
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.folder import SETTINGS_FILE, OtherRunError
from estimator_accum.programs.inputs import Inputs
from estimator_accum.programs.job import Job, SameRunHook, make_job, make_train_spec
from estimator_accum.programs.progress import Progress
from estimator_accum.programs.watchdog import LostTaskError, Watchdog

pytestmark = pytest.mark.once
_CHIEF = Cluster("a:1", ("b:1",))
_WORKER = Cluster("a:1", ("b:1",), task_type="worker")


def _job(folder, cluster, checksum="sum", **changes) -> Job:
    settings = IMAGES.settings(output_dir=str(folder), **changes)
    return make_job(Inputs(settings, cluster, None, None, checksum), 2)


def _hook(job: Job, step=0, left=12) -> SameRunHook:
    """Returns the hook of a task; the chief's has written its settings."""
    progress = Progress(step, step, 0)
    spec = make_train_spec(job, lambda: None, progress, left, 12, Watchdog(9, "a"))
    (hook,) = [hook for hook in spec.hooks if isinstance(hook, SameRunHook)]
    return hook


@pytest.mark.parametrize(
    "changes, received",
    [
        ({}, None),
        ({"watchdog_secs": 9}, None),
        ({"effective_batch_size": 200, "micro_batch_size": 100}, None),  # the default
        ({"learning_rate": 0.2}, r"--learning_rate=0\.1, not 0\.2\. Start"),
        ({"seed": 1}, r"--seed=0, not 1\. "),
        ({"train_updates": 5}, r"--train_updates=\d+, not 5\. "),
        ({"checksum": "another"}, r"different examples\. Start all tasks again with"),
        (
            {"gradient_accumulation_steps": 4},
            r"cluster\.micro_batch_size=100, not 25\.",
        ),
        (
            {"save_checkpoints_updates": 9},
            r"cluster\.save_checkpoints_updates=50, not 9\. ",
        ),
        ({"effective_batch_size": 100}, r"--effective_batch_size=200, not 100\. "),
    ],
)
@pytest.mark.parametrize("is_chief_late", [False, True])
def test_a_task_with_other_flags_or_data_is_refused_whoever_comes_first(
    tmp_path, changes, received, is_chief_late
):
    tasks = [
        lambda: _hook(_job(tmp_path, _CHIEF)),
        lambda: _hook(_job(tmp_path, _WORKER, **changes)),
    ]
    hooks = [make() for make in (reversed(tasks) if is_chief_late else tasks)]
    chief, worker = reversed(hooks) if is_chief_late else hooks
    chief.after_create_session(None, None)
    if received is None:
        worker.after_create_session(None, None)
        return
    rule = r"^All tasks of a cluster must be started with the same flags and files\. "
    with pytest.raises(OtherRunError, match=rf"{rule}.*holds a run with {received}"):
        worker.after_create_session(None, None)
    assert "worker 0: All tasks" in chief.refusal.read_text()  # and ends as well
    _hook(_job(tmp_path, _CHIEF))
    assert not chief.refusal.exists()  # in the next start


def test_a_folder_in_which_the_chief_has_written_nothing_is_not_shared(tmp_path):
    (tmp_path / "chief").mkdir()
    _hook(_job(tmp_path / "chief", _CHIEF))
    (tmp_path / "worker").mkdir()
    hook = _hook(_job(tmp_path / "worker", _WORKER))
    for _ in range(2):
        with pytest.raises(
            OtherRunError, match=r"must share `--output_dir`\..*/worker,"
        ):
            hook.after_create_session(None, None)
        _job(tmp_path / "worker", Cluster()).write_settings()  # of a run alone


def test_a_folder_that_is_not_shared_ends_the_wait_for_a_chief_that_trains(
    tmp_path, monkeypatch
):
    """A worker without the checkpoint gets no session, and so never compares itself."""
    reasons = []
    monkeypatch.setattr(
        jobs, "train", lambda job, watchdog: reasons.append(watchdog._find_reason())
    )
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        job = _job(tmp_path, Cluster(address, ("b:1",), task_type="worker"))
        jobs.execute(job)
        job.write_settings()
        jobs.execute(job)
    (tmp_path / SETTINGS_FILE).unlink()
    jobs.execute(job)  # the chief has not started yet
    assert f"must share `--output_dir`. Received: {tmp_path}, in which" in reasons[0]
    assert reasons[1:] == [None, None]


def test_a_task_beside_a_shorter_finished_run_is_refused_for_both_reasons(tmp_path):
    """The run is the chief's, with fewer updates, or one of a folder that is not shared."""
    _job(tmp_path, _CHIEF, train_updates=4).write_settings()
    worker = _hook(_job(tmp_path, _WORKER, train_updates=6))
    received = r"same flags and files\. .* --train_updates=4, not 6\. "
    reason = r"The chief has finished that run, or writes to another folder\. Start"
    with pytest.raises(OtherRunError, match=received + reason):
        worker.after_create_session(None, None)


def test_a_task_at_another_checkpoint_than_the_chief_ends_with_a_sentence(tmp_path):
    worker = _hook(_job(tmp_path, _WORKER), step=4, left=8)
    _hook(_job(tmp_path, _CHIEF), step=6, left=6)
    sentence = (
        r"Received: global_step 4 in worker 0, and 6 in the chief: .* all of them"
    )
    with pytest.raises(LostTaskError, match=sentence):
        worker.after_create_session(None, None)


def test_workers_of_servers_are_compared_without_their_steps(tmp_path):
    servers = {"servers": ("c:1",)}
    chief = Cluster("a:1", ("b:1",), **servers)
    worker = Cluster("a:1", ("b:1",), task_type="worker", **servers)
    _hook(_job(tmp_path, chief), step=6)
    _hook(_job(tmp_path, worker), step=4).after_create_session(None, None)
    with pytest.raises(OtherRunError, match=r"--seed=0, not 3\. "):
        _hook(_job(tmp_path, worker, seed=3)).after_create_session(None, None)


def test_an_evaluator_of_another_run_is_refused(tmp_path):
    _hook(_job(tmp_path, _CHIEF))
    evaluator = Cluster("a:1", ("b:1",), task_type="evaluator")
    SameRunHook(_job(tmp_path, evaluator)).after_create_session(None, None)
    with pytest.raises(OtherRunError, match=r"different examples\. "):
        other = _job(tmp_path, evaluator, checksum="another")
        SameRunHook(other).after_create_session(None, None)
