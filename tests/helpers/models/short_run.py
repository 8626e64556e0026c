"""A short run in the files' order, with comparisons of its weights."""

import pathlib

import numpy as np
import tensorflow as tf

from distributed.settings import Settings

_SETTINGS = {"train_updates": 6, "effective_batch_size": 203, "shuffle": False}
# No test depends on the clock: a task that waits for a lost one ends by the deadline.
FLAGS = [f"--{k}={v}" for k, v in _SETTINGS.items()] + ["--watchdog_secs=1000000"]


def short_settings(output_dir: pathlib.Path) -> Settings:
    return Settings(**_SETTINGS, output_dir=str(output_dir))


def values(output_dir: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns all variables of the last checkpoint by name."""
    reader = tf.train.load_checkpoint(str(output_dir))
    return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


def assert_same_weights(output_dir: pathlib.Path, other_dir: pathlib.Path) -> None:
    """Compares weights up to rounding, after the same number of updates."""
    ours, theirs = values(output_dir), values(other_dir)
    weights = [name for name in theirs if name.endswith(("/kernel", "/bias"))]
    assert len(weights) == 8
    for name in weights:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-5)
    assert ours["update_step"] == theirs["update_step"] == 6


def examples_seen(output_dir: pathlib.Path) -> list[int]:
    """Returns the column `examples` of train_metrics.csv, a number per update."""
    rows = (output_dir / "train_metrics.csv").read_text().splitlines()[1:]
    return [int(row.split(",")[2]) for row in rows]
