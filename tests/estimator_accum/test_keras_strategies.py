"""Keras models under tf.distribute strategies get the weights of one replica."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from keras_kinds import KINDS

_PROGRAM = pathlib.Path(__file__).with_name("keras_strategy_program.py")
_DEADLINE_SECS = 180


def _run(folder, kind, strategy, model, *options):
    """Runs all tasks to their end; returns the first one's (report, weights)."""
    workers = 2 if strategy == "workers" else 1
    cluster = {"worker": [f"127.0.0.1:{port}" for port in _free_ports(workers)]}
    tasks = []
    try:
        for index in range(workers):
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
            environment.pop("TF_CONFIG", None)
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            if workers > 1:
                task = {"type": "worker", "index": index}
                config = {"cluster": cluster, "task": task}
                environment["TF_CONFIG"] = json.dumps(config)
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed in finally
            arguments = [*kind, strategy, model, folder / f"{index}.npz", *options]
            process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), *map(str, arguments)],
                env=environment,
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
    assert codes == [0] * workers
    with np.load(folder / "0.npz") as weights:
        return json.loads(output.splitlines()[-1]), dict(weights)


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("strategy", ["mirrored", "workers"])
@pytest.mark.parametrize("model", ["dense", "sparse"])
def test_two_replicas_train_as_one_with_the_joined_batch(
    tmp_path, kind, strategy, model
):
    (tmp_path / "one").mkdir()
    one, expected = _run(tmp_path / "one", kind, "none", model)
    two, weights = _run(tmp_path, kind, strategy, model)
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-12)
    assert two["updates"] == one["updates"] == 4
    # Each replica reduces once in a traced function, in the branch of the boundary.
    # Tensors of one dtype go together: the rows of a sparse gradient are float32.
    reductions = two["reductions"]
    assert reductions
    assert all(any("cond_true" in name for name in row[1]) for row in reductions)
    dtypes = 2 if model == "sparse" else 1
    by_trace = {}
    for replica, names, tensors in reductions:
        by_trace.setdefault((replica, names[-2] if len(names) > 1 else ""), []).append(
            tensors
        )
    assert sum(map(len, by_trace.values())) % dtypes == 0


@pytest.mark.parametrize("kind", KINDS[:1], ids="-".join)
def test_a_loss_scale_around_it_gives_the_same_weights(tmp_path, kind):
    (tmp_path / "one").mkdir()
    _, expected = _run(tmp_path / "one", kind, "none", "dense", "whole")
    _, weights = _run(tmp_path, kind, "mirrored", "dense", "nested", "whole")
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-12)
