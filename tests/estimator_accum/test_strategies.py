"""Under tf.distribute strategies the weights are those of one device."""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from cluster_tasks import environment, tf_configs

_PROGRAM = pathlib.Path(__file__).with_name("strategy_program.py")
_DEADLINE_SECS = 180
_TRAINED = ("dense", "dense/Momentum", "table", "table/Momentum")


def _run(folder, kind, batch, steps, micro_steps, *more):
    """Runs the program's tasks to their end; returns the variables of the first."""
    arguments = [kind, batch, steps, micro_steps, folder, *more]
    command = [sys.executable, str(_PROGRAM), *map(str, arguments)]
    is_cluster = kind == "multi_worker"
    configs = tf_configs("worker", "worker") if is_cluster else [None]
    tasks = []
    try:
        for index, config in enumerate(configs):
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed in finally
            tasks.append(
                (
                    subprocess.Popen(
                        command,
                        env=environment(config),
                        stdout=subprocess.PIPE if index == 0 else log,
                        stderr=log,
                        text=True,
                    ),
                    log,
                )
            )
        output, _ = tasks[0][0].communicate(timeout=_DEADLINE_SECS)
        codes = [task.wait(timeout=_DEADLINE_SECS) for task, _ in tasks]
    finally:
        for task, log in tasks:
            task.kill()
            task.wait()
            log.seek(0)
            print(log.read()[-4000:])
            log.close()
    assert codes == [0] * len(configs)
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """12 updates of 16 examples in one batch."""
    return _run(tmp_path_factory.mktemp("one_device"), "none", 16, 1, 12)


def _assert_close(ours, theirs):
    for name in _TRAINED:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-7)
    assert ours["update_step"] == theirs["update_step"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
def test_two_replicas_train_as_one_device(tmp_path, one_device, kind):
    _assert_close(_run(tmp_path / "ours", kind, 2, 4, 48), one_device)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "more"),
    [
        (1, ["no_hooks"]),
        (1, [2]),  # in micro-batches of what fits
        (4, ["two_devices"]),
    ],
)
def test_cpus_whose_collectives_would_wait_for_ever_train_as_one_device(
    tmp_path, one_device, steps, more
):
    # The Session has one CPU unless it is told: two_devices.
    folder = tmp_path / "ours"
    ours = _run(folder, "collectives", 8 // steps, steps, 12 * steps, *more)
    _assert_close(ours, one_device)


@pytest.mark.once
@pytest.mark.slow
def test_loss_scaling_whose_collectives_would_wait_for_ever_is_refused(
    tmp_path, one_device, capsys
):
    with pytest.raises(AssertionError):
        _run(tmp_path / "none", "collectives", 2, 4, 4, "loss_scaling")
    output = capsys.readouterr().out
    assert "must not reduce by collectives, which wait for ever" in output
    assert "Pass it cross_device_ops=tf.distribute.ReductionToOneDevice()." in output
    more = ["loss_scaling", "one_device"]
    ours = _run(tmp_path / "ours", "collectives", 2, 4, 48, *more)
    _assert_close(ours, one_device)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fits", "counts"),
    [
        ("none", [3], {"": 8}),
        ("mirrored", [2], {"": 4}),
        ("multi_worker", [4, 1], {"-worker-0": 2, "-worker-1": 8}),
    ],
)
def test_each_replica_may_cut_its_batch_as_its_memory_asks_for(
    tmp_path, one_device, kind, fits, counts
):
    folder = tmp_path / "ours"
    ours = _run(folder, kind, 16 if kind == "none" else 8, 1, 12, *fits)
    _assert_close(ours, one_device)
    for task, count in counts.items():
        file = folder / f"micro_batches{task}.json"
        assert json.loads(file.read_text()) == {"micro_batches": count}


@pytest.fixture(scope="module")
def partial_window(tmp_path_factory):
    """Of one device: two updates of 4 micro-batches, and one of 3."""
    return _run(tmp_path_factory.mktemp("partial"), "none", 4, 4, 11)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
def test_two_replicas_apply_a_partial_window_as_one_device(
    tmp_path, partial_window, kind
):
    ours = _run(tmp_path / "two", kind, 2, 4, 11)
    _assert_close(ours, partial_window)
    assert ours["update_step"] == 3


@pytest.mark.once
@pytest.mark.slow
def test_cluster_that_would_save_nothing_is_refused(tmp_path, capsys):
    # TensorFlow makes no CheckpointSaverHook where it makes no SummarySaverHook.
    with pytest.raises(AssertionError):
        _run(tmp_path / "none", "multi_worker", 2, 4, 4, "save_summary_steps=0")
    sentence = (
        "must write checkpoints. Received: none when it began, as with a RunConfig"
    )
    assert sentence in capsys.readouterr().out
