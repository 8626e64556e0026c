"""--micro_batch_size=auto: as many micro-batches as memory asks for, the same weights."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from cluster_tasks import environment
from local_cluster import DEADLINE_SECS, ROOT, run, values

from distributed.launch_local import _tf_configs

pytestmark = [pytest.mark.slow, pytest.mark.once]

_PROGRAM = pathlib.Path(__file__).with_name("short_of_memory.py")
_FLAGS = ("--train_updates=6", "--effective_batch_size=101", "--noshuffle")


@pytest.fixture(scope="module")
def plenty(tmp_path_factory) -> dict[str, np.ndarray]:
    """The weights of one process that takes the batch at once."""
    folder = tmp_path_factory.mktemp("plenty") / "output"
    code, output = run("main", f"--output_dir={folder}", *_FLAGS)
    assert code == 0
    assert "effective batch 101 = 101 examples x 1 micro-steps x 1 replica" in output
    return values(folder)


def _start(folder, rows_in_memory: int, updates=0, **variables) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable,
            _PROGRAM,
            f"--rows_in_memory={rows_in_memory}",
            f"--updates={updates}",
            f"--output_dir={folder}",
            "--micro_batch_size=auto",
            "--save_checkpoints_updates=3",
            *_FLAGS,
        ],
        cwd=ROOT,
        env=environment() | {"PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _end(process: subprocess.Popen, code: int = 0) -> str:
    try:
        output, _ = process.communicate(timeout=DEADLINE_SECS)
    finally:
        process.kill()
    assert process.returncode == code, output[-4000:]
    return output


def _assert_same_weights(folder, expected: dict[str, np.ndarray]) -> None:
    ours = values(folder)
    weights = [name for name in expected if name.endswith(("/kernel", "/bias"))]
    assert len(weights) == 8
    for name in weights:
        np.testing.assert_allclose(ours[name], expected[name], rtol=0, atol=1e-5)
    assert ours["update_step"] == expected["update_step"] == 6


def test_memory_decides_and_micro_steps_go_on_with_the_same_weights(tmp_path, plenty):
    folder = tmp_path / "output"
    output = _end(_start(folder, 26, updates=4), code=9)
    assert "101 examples in as many micro-batches as memory asks for" in output
    for change in ("1 -> 2", "2 -> 4"):
        assert f"micro-batches {change}: out of memory at update 1" in output
    assert values(folder)["update_step"] == values(folder)["global_step"] == 3
    # The folder is one run's, whatever cuts its batches.
    code, output = run(
        "main", f"--output_dir={folder}", "--micro_batch_size=30", *_FLAGS
    )
    assert code == 0 and "going on after update 3" in output
    _assert_same_weights(folder, plenty)
    # The fourth update was done twice.
    examples = [
        line.split(",")[2]
        for line in (folder / "train_metrics.csv").read_text().splitlines()[1:]
    ]
    assert examples == [str(101 * (n + 1)) for n in range(6)]


def test_each_worker_has_a_count_of_its_own(tmp_path, plenty):
    folder = tmp_path / "output"
    tasks = [
        _start(folder, rows, TF_CONFIG=json.dumps(tf_config))
        for rows, tf_config in zip(
            (1000, 13), _tf_configs(2, has_evaluator=False).values(), strict=True
        )
    ]
    try:
        chief, worker = map(_end, tasks)
    finally:
        for task in tasks:
            task.kill()
    assert "out of memory" not in chief
    assert "micro-batches 2 -> 4: out of memory at update 1" in worker
    _assert_same_weights(folder, plenty)


def test_micro_steps_with_auto_are_refused(tmp_path):
    code, output = run(
        "main",
        f"--output_dir={tmp_path / 'output'}",
        "--micro_batch_size=auto",
        "--gradient_accumulation_steps=2",
    )
    assert code == 2 and output.count("\n") == 1
    assert "must find the number of micro-batches itself" in output
