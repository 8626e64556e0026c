"""Flags of the launcher; tests/estimator_accum/programs/test_launch.py starts tasks."""

import json

import pytest

from distributed import launch_local
from estimator_accum.programs import launch

pytestmark = pytest.mark.once


@pytest.fixture
def launched(monkeypatch, capsys):
    """Calls the launcher; returns (exit code, the commands that it would run, output)."""
    calls = []
    monkeypatch.setattr(launch, "run", lambda call: calls.append(call) or 0)

    def call(*flags: str):
        code = launch_local.main(["launcher", "--output_dir=new", *flags])
        captured = capsys.readouterr()
        return code, calls, captured.out + captured.err

    return call


def test_flags_reach_the_tasks(launched):
    flags = ["--workers=1", "--micro_batch_size=7", "--noshuffle", "--verbosity=0"]
    code, (call,), _ = launched(*flags, "--train_updates=6", "--watchdog_secs=9")
    assert code == 0 and call.workers == 1 and not call.has_evaluator
    assert call.total_updates == 6 and call.watchdog_secs == 9
    assert str(call.output_dir) == "new"
    expected = {"--micro_batch_size=7", "--shuffle=False", "--verbosity=0"}
    assert expected <= set(call.command)
    assert "workers" not in str(call.command)
    assert "effective_batch_size" not in str(call.command)


def test_flags_of_the_launcher_itself(launched):
    flags = ("--workers=3", "--evaluator", "--max_restarts=0", "--ps=2")
    _, (call,), _ = launched(*flags)
    assert (call.workers, call.has_evaluator, call.max_restarts) == (3, True, 0)
    assert call.servers == 2


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--workers=0", "< 2**31. Received: 0. See --help."),
        ("--max_restarts=-1", "`--max_restarts` must be an integer >= 0 and"),
        ("--effective_batch_size=1", "must have an example for each micro-step"),
        ("--train_updates=0", "`--train_updates` must be an integer >= 1"),
        ("--workes=2", "Received: --workes. Did you mean --workers?"),
    ],
)
def test_flag_that_does_not_fit_starts_nothing(launched, flag, sentence):
    code, calls, output = launched(flag)
    assert code == 2 and sentence in output and output.count("\n") == 1
    assert not calls


def test_configuration_is_printed_and_read_again(launched, tmp_path):
    _, _, printed = launched("--print_config", "--seed=5", "--micro_batch_size=auto")
    assert json.loads(printed)["flags"]["micro_batch_size"] == "auto"
    (tmp_path / "config.json").write_text(printed)
    code, (call,), _ = launched(f"--config={tmp_path / 'config.json'}")
    assert code == 0
    assert {"--seed=5", "--micro_batch_size=auto"} <= set(call.command)
