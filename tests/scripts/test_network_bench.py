"""Two workers with a slow link between them, and what the model says of it."""

import csv
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from scripts import network_bench

_SCRIPT = pathlib.Path(network_bench.__file__)


@pytest.fixture
def networks():
    """Skips where no networks can be made."""
    missing = [tool for tool in network_bench.TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not on PATH: {', '.join(missing)}")
    if (
        os.geteuid()
        or subprocess.run(["unshare", "--net", "true"], check=False).returncode
    ):
        pytest.skip("networks of their own are made by root with CAP_SYS_ADMIN only")


def _running(pids: list[int]) -> list[int]:
    """Returns those of the processes that run, zombies left out."""
    running = []
    for pid in pids:
        try:
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] != "Z":
            running.append(pid)
    return running


def _descendants(pid: int) -> list[int]:
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        if parent == pid:
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.once
def test_slow_link_costs_what_the_model_predicts(
    networks, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(network_bench, "_STEPS", (1, 8))
    monkeypatch.setattr(network_bench, "_TURNS", 1)
    flags = [f"--output_dir={tmp_path}", "--updates=10"]
    assert network_bench.main(flags) == 0
    print(capsys.readouterr())
    with (tmp_path / "network.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["series"], row["steps"]) for row in rows] == [
        ("effective batch", "1"),
        ("effective batch", "8"),
        ("micro-batch", "1"),
        ("micro-batch", "8"),
    ]
    for row in rows:
        # The machine is shared: a tenth, where nobody else computes.
        assert 0.5 < float(row["slow"]) / float(row["predicted"]) < 2
        assert float(row["slow"]) < float(row["fast"])
    # The network's share falls, so more examples are seen.
    assert float(rows[3]["slow"]) > 2 * float(rows[2]["slow"])
    assert (tmp_path / "network.png").stat().st_size > 10_000
    assert not _descendants(os.getpid())


@pytest.mark.slow
@pytest.mark.once
def test_nothing_is_left_of_a_measurement_that_is_killed(networks, tmp_path):
    process = subprocess.Popen([sys.executable, str(_SCRIPT)], cwd=tmp_path)
    try:
        end = time.monotonic() + 60
        while len(children := _descendants(process.pid)) < 4:  # two networks, two tasks
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    while left := _running(children):
        assert time.monotonic() < end, left
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--updates=0", "`--updates` must be an integer >= 1. Received: 0."),
        ("--effective_batch_size=100", "must be a multiple of 16. Received: 100."),
    ],
)
def test_flag_that_does_not_fit_is_refused(capsys, flag, sentence):
    assert network_bench.main([flag]) == 2
    assert sentence in capsys.readouterr().err


def test_who_may_not_make_networks_is_told_so(capsys, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert network_bench.main([]) == 2
    assert "Slow links must be made by root on Linux." in capsys.readouterr().err


def test_a_tool_that_is_missing_is_named(capsys, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert network_bench.main([]) == 2
    assert "Received: no tc on PATH. Install iproute2" in capsys.readouterr().err
