"""Fixtures of the room's tests: a small CSV file, the settings of a run."""

import pathlib
from collections.abc import Callable

import pytest

from housing_example import demo_data, input_pipeline
from housing_example.settings import Settings


@pytest.fixture(scope="session")
def csv(tmp_path_factory) -> pathlib.Path:
    """20 generated examples, below a line with the columns' names; not to be changed."""
    path = tmp_path_factory.mktemp("csv") / "houses.csv"
    path.write_text(input_pipeline.csv_text(demo_data.generate(20)))
    return path


@pytest.fixture(scope="session")
def settings_in() -> Callable[[pathlib.Path], Settings]:
    """Makes a run's, from its output folder: 59 x 3 in the file's order, made-up data."""
    return lambda output_dir: Settings(
        train_csv=None,
        test_csv=None,
        output_dir=str(output_dir),
        strategy="none",
        effective_batch_size=None,
        train_batch_size=59,
        gradient_accumulation_steps=3,
        train_updates=500,
        learning_rate=5e-3,
        clip_norm=None,
        shuffle=False,
        seed=0,
        watchdog_secs=300,
    )


@pytest.fixture
def settings(settings_in, tmp_path) -> Settings:
    return settings_in(tmp_path / "output")
