"""The process in which a public model of TensorFlow 2 is trained.

    driver.py --output_dir=DIR --first_weights=FILE --last_weights=FILE
        [--micro_batches=N]

The first run writes the weights that training begins with, every later one begins with
them; each writes its last weights.
"""

from collections.abc import Callable, Sequence
from typing import Any

import bench
import numpy as np
import tensorflow as tf


def normal(*shape: int) -> np.ndarray:
    """Returns a number of normal distribution for each element of all examples."""
    rows = bench.UPDATES * bench.BATCH
    return np.random.default_rng(sum(shape)).normal(size=[rows, *shape]).astype("f")


def train(
    variables: Sequence[tf.Variable],
    optimizer: Any,
    data: Any,
    fit: Callable[[tf.data.Dataset, int], Any],
) -> None:
    """Trains by the driver's flags.

    Args:
        variables: Trainable variables, which exist.
        optimizer: The optimizer, with `iterations`.
        data: Arrays of all examples, in the structure that the training takes.
        fit: Function of batches and a number of micro-batches that trains one epoch.
    """
    flags = bench.read_flags()
    names = [f"{index}/{v.name}" for index, v in enumerate(variables)]
    if flags.first_weights.exists():
        first = np.load(flags.first_weights)
        for name, variable in zip(names, variables, strict=True):
            variable.assign(first[name])
    else:
        np.savez(flags.first_weights, **_values(names, variables))

    def batches(array: np.ndarray) -> np.ndarray:
        array = array.reshape([bench.UPDATES, bench.BATCH, *array.shape[1:]])
        return array[:, ::-1] if flags.in_reverse else array

    data = tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(batches, data))
    fit(data, flags.micro_batches)
    steps = optimizer.iterations.numpy()
    np.savez(flags.last_weights, steps=steps, **_values(names, variables))


def _values(names: list[str], variables: Sequence[tf.Variable]) -> dict:
    return {name: v.numpy() for name, v in zip(names, variables, strict=True)}
