"""One task of a cluster: its `TF_CONFIG`, its signals, its exit codes."""

import os
import signal
import subprocess
import sys

import pytest

from estimator_accum.programs import task

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("real_starts")]

_ADDRESSES = "digits-{}.digits:2222"


@pytest.mark.parametrize(
    ("addresses", "index", "message"),
    [
        ("digits:2222", "0", r"^`--addresses` must contain {} .*Received: digits:2222"),
        (
            _ADDRESSES,
            "4",
            "^`JOB_COMPLETION_INDEX` must be .* below --workers=4. .*: 4",
        ),
        (_ADDRESSES, None, "Received: none. Kubernetes sets it for jobs with"),
    ],
)
def test_a_task_without_a_place_is_refused(addresses, index, message):
    environment = {} if index is None else {"JOB_COMPLETION_INDEX": index}
    with pytest.raises(ValueError, match=message):
        task.tf_config(addresses, 4, environment)


@pytest.mark.parametrize("command", [[], ["no-such-program"]])
def test_a_program_must_follow(command, capsys):
    assert task.main(command) == 2
    assert "A program that can be started must follow" in capsys.readouterr().err


def test_the_exit_code_is_the_command_s(monkeypatch):
    for code, flags, expected in (
        ("exit 0", [], 0),
        ("exit 1", [], 1),
        ("exit 75", [], 75),
        ("exit 75", ["--lost_task_code=138"], 138),
        ("kill -9 $$", [], 137),
        ('[ "$TF_CONFIG" = there ]', [], 0),
    ):
        monkeypatch.setenv("TF_CONFIG", "there")
        assert task.main([*flags, "bash", "-c", code]) == expected


@pytest.mark.parametrize("wrapper", [[], ["bash", "-c", '"$0" "$@"; echo lost']])
def test_a_signal_lets_the_command_save(wrapper):
    saves = "trap 'echo saved; exit 143' TERM; echo ready; "
    saves += "for _ in {1..3000}; do sleep 0.01; done"
    command = [sys.executable, "-m", "estimator_accum", "task", *wrapper]
    command += ["bash", "-c", saves]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(command, **options) as done:
        assert done.stdout.readline() == "ready\n"
        done.send_signal(signal.SIGTERM)
        assert done.wait() == 143 and done.stdout.read() == "saved\n"


def test_a_script_that_passes_a_signal_on_is_left_alone(tmp_path):
    """It ends while its program still saves."""
    file = tmp_path / "saving"
    saves = f"trap 'echo saved; touch {file}; i=3000' TERM; echo ready; "
    saves += "for ((i = 0; i < 3010; i++)); do sleep 0.05; done"
    ends = rf"kill \$!; until [ -e {file} ]; do sleep 0.01; done; exit 143"
    script = f'trap "{ends}" TERM; bash -c "$0" & wait $!'
    command = [sys.executable, "-m", "estimator_accum", "task"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    options = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([*command, "bash", "-c", script, saves], **options) as done:
        assert done.stdout.readline() == "ready\n"
        done.send_signal(signal.SIGTERM)
        assert done.wait() == 143 and done.stdout.read() == "saved\n"
