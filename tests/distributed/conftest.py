"""Fixtures of these tests: a task in the same process, the run of one worker."""

import os
import pathlib
import sys
from collections.abc import Callable

import pytest

from distributed import inputs, jobs, main
from estimator_accum.programs.cluster import Cluster
from tests.helpers.models import short_run


@pytest.fixture
def run_main(monkeypatch, call) -> Callable[..., tuple[int, str]]:
    """Runs a task in this process; returns (exit code, output)."""

    def run(*flags: str) -> tuple[int, str]:
        done = call(lambda arguments: main.main(["main.py", *arguments]) or 0, *flags)
        return done.returncode, done.output

    monkeypatch.setattr(os, "_exit", sys.exit)
    return run


@pytest.fixture(scope="session")
def one_worker(tmp_path_factory) -> pathlib.Path:
    """Output folder of a run in one process, without accumulation."""
    folder = tmp_path_factory.mktemp("alone")
    jobs.execute(jobs.prepare(inputs.read(short_run.short_settings(folder), Cluster())))
    return folder
