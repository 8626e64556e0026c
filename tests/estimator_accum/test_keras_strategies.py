"""Keras models under tf.distribute strategies get the weights of one replica."""

import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from cluster_tasks import environment, tf_configs
from keras_kinds import sparse_data

_PROGRAM = pathlib.Path(__file__).with_name("keras_strategy_program.py")
_DEADLINE_SECS = 180


def _run(folder, kind, strategy, *options):
    """Runs all tasks to their end; returns the first one's (report, weights)."""
    codes, output = _end(folder, kind, strategy, *options)
    assert codes == [0] * len(codes)
    with np.load(folder / "0.npz") as weights:
        return json.loads(output.splitlines()[-1]), dict(weights)


def _end(folder, kind, strategy, *options):
    """Runs all tasks to their end; returns (exit codes, the first one's output)."""
    is_cluster = strategy == "workers"
    configs = tf_configs("worker", "worker") if is_cluster else [None]
    tasks = []
    try:
        for index, config in enumerate(configs):
            variables = {
                "CUDA_VISIBLE_DEVICES": "-1",
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed in finally
            arguments = [*kind.name, strategy, folder / f"{index}.npz", *options]
            process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), *map(str, arguments)],
                env=environment(config) | variables,
                stdout=subprocess.PIPE if index == 0 else log,
                stderr=log,
                text=True,
            )
            tasks.append((process, log))
        output, _ = tasks[0][0].communicate(timeout=_DEADLINE_SECS)
        codes = [task.wait(timeout=_DEADLINE_SECS) for task, _ in tasks]
    finally:
        for task, log in tasks:
            task.kill()
            task.wait()
            log.seek(0)
            print(log.read()[-4000:])
            log.close()
    return codes, output


def _assert_like_one_replica(kind, weights):
    """Compares with batches of 24 of the plain optimizer."""
    model = kind.sparse_model("float64")
    model.compile(kind.optimizer("Adam", 0.05), "mse", jit_compile=False)
    x, y = sparse_data(88, "float64")
    for start in range(0, 88, 24):
        model.train_on_batch(x[start : start + 24], y[start : start + 24])
    for i, expected in enumerate(model.get_weights()):
        np.testing.assert_allclose(weights[f"arr_{i}"], expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "workers"])
def test_two_replicas_train_as_one_with_the_joined_batch(tmp_path, kind, strategy):
    options = ["loop"] if kind.is_3 and strategy == "workers" else []
    report, weights = _run(tmp_path, kind, strategy, *options)
    _assert_like_one_replica(kind, weights)
    assert report["updates"] == 4
    # In each trace one reduction, in the branch of the boundary. Collectives take
    # tensors of one dtype together: the rows of a sparse gradient are float32.
    traces = collections.Counter(report["reductions"])
    assert traces
    assert all("_true_" in name for name in traces)
    assert set(traces.values()) == {1 if strategy == "mirrored" else 2}


@pytest.mark.slow
def test_fit_of_keras_3_itself_fails_on_several_workers(tmp_path, kind, capfd):
    """With any optimizer: it takes the mean of a batch that is a tuple."""
    if not kind.is_3:
        pytest.skip("Keras 2: the test above")
    codes, _ = _end(tmp_path, kind, "workers", "plain")
    assert codes == [1, 1]
    assert "Attempt to convert a value (PerReplica" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.once
def test_a_loss_scale_around_it_gives_the_same_weights(tmp_path, kind):
    _, weights = _run(tmp_path, kind, "mirrored", "nested")
    _assert_like_one_replica(kind, weights)
