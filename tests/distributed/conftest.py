"""Fixtures of these tests: a task in the same process, the run of one worker."""

import os
import pathlib
import sys
from collections.abc import Callable

import pytest

from distributed import command_line, jobs, launch_local, main
from estimator_accum.programs.cluster import Cluster
from tests.helpers.models import short_run


@pytest.fixture
def _flags_as_before():
    """Resets the process's flags, which main() sets and other tests read."""
    yield
    for flags in (command_line.FLAGS, launch_local.FLAGS):
        flags.unparse_flags()
        for name in flags:
            flags[name].unparse()


@pytest.fixture
def run_main(
    _flags_as_before, _loggers_as_before, monkeypatch, capsys
) -> Callable[..., tuple[int, str]]:
    """Runs a task in this process; returns (exit code, output)."""

    def run(*flags: str) -> tuple[int, str]:
        code = 0
        try:
            main.main(["main.py", *flags])
        except SystemExit as stopped:
            code = stopped.code
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    monkeypatch.setattr(os, "_exit", sys.exit)
    return run


@pytest.fixture(scope="session")
def one_worker(tmp_path_factory) -> pathlib.Path:
    """Output folder of a run in one process, without accumulation."""
    folder = tmp_path_factory.mktemp("alone") / "output"
    jobs.execute(jobs.prepare(short_run.short_settings(folder), Cluster()))
    return folder
