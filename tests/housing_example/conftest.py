"""Fixtures of these tests."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import per_example
from housing_example import demo_data, main, model_fn
from housing_example.settings import Settings
from housing_example.table import csv_text
from tests.helpers.processes import running


@pytest.fixture(scope="session")
def csv(tmp_path_factory) -> pathlib.Path:
    """A CSV file of 20 generated examples with a header; tests must not change it."""
    path = tmp_path_factory.mktemp("csv") / "houses.csv"
    path.write_text(csv_text(demo_data.generate(20)))
    return path


@pytest.fixture(scope="session")
def settings_in() -> Callable[[pathlib.Path], Settings]:
    """Makes settings from an output folder: 59 x 3, file order, generated data."""
    return lambda folder: Settings(output_dir=str(folder), shuffle=False)


@pytest.fixture
def settings(settings_in, tmp_path) -> Settings:
    return settings_in(tmp_path / "output")


@pytest.fixture
def run_main(monkeypatch, capsys, call) -> Callable[..., running.Done]:
    """Runs the program in this process with flags (name -> value; None: left out)."""

    def run(flags: dict, *more: str) -> running.Done:
        argv = [f"--{k}={v}" for k, v in flags.items() if v is not None]
        capsys.readouterr()  # of programs that the test started
        return call(lambda argv: main.main(["main.py", *argv]) or 0, *argv, *more)

    monkeypatch.setattr(os, "_exit", sys.exit)
    return run


@pytest.fixture(scope="session")
def limited_memory() -> Callable[[int], contextlib.AbstractContextManager]:
    """Makes the program run out of memory above a number of rows at once.

    A Python MemoryError in the graph is TensorFlow's out-of-memory error.
    """
    prices = model_fn._prices

    def limit(most_rows: int):
        def check(rows):
            if rows > most_rows:
                raise MemoryError(f"{rows} examples")
            return np.float32(0)

        def limited(*args):
            predicted = prices(*args)
            zero = tf.numpy_function(check, [tf.shape(predicted)[0]], tf.float32)
            zero.set_shape([])
            return per_example(predicted + zero)

        return mock.patch.object(model_fn, "_prices", limited)

    return limit
