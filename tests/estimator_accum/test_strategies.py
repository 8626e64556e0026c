"""Under tf.distribute strategies the weights are those of one device."""

import json

import numpy as np
import pytest

from tests.helpers.processes import strategy_program

pytestmark = pytest.mark.slow

_TRAINED = ("dense", "dense/Momentum", "table", "table/Momentum")


def _run(folder, kind, batch, steps, micro_steps, *more) -> dict:
    """Returns the variables after a run."""
    sizes = f"batch={batch}", f"K={steps}", f"micro_steps={micro_steps}"
    return strategy_program.result("estimator", kind, folder, *sizes, *more)


def _refusal(folder, *more) -> str:
    """Returns the output of the first process, which must end with an error."""
    sizes = "batch=2", "K=4", "micro_steps=4"
    first, *_ = strategy_program.end("estimator", more[0], folder, *sizes, *more[1:])
    assert first.returncode == 1
    return first.stderr


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Variables after 3 updates on batches of 16, without accumulation."""
    return _run(tmp_path_factory.mktemp("one_device"), "none", 16, 1, 3)


@pytest.fixture(scope="module")
def partial_window(tmp_path_factory):
    """Variables after two updates of 4 micro-batches and one of 3, on one device."""
    return _run(tmp_path_factory.mktemp("partial"), "none", 4, 4, 11)


def _assert_close(ours, theirs):
    for name in _TRAINED:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-7)
    assert ours["update_step"] == theirs["update_step"]


@pytest.mark.parametrize("kind", ["mirrored", "multi_worker"])
def test_two_replicas_train_and_apply_a_partial_window_as_one_device(
    tmp_path, partial_window, kind
):
    ours = _run(tmp_path / "two", kind, 2, 4, 11)
    _assert_close(ours, partial_window)
    assert ours["update_step"] == 3


@pytest.mark.once
def test_two_replicas_with_recomputed_layers_train_as_one_device(
    tmp_path, partial_window
):
    ours = _run(tmp_path / "two", "mirrored", 2, 4, 11, "recompute")
    _assert_close(ours, partial_window)


@pytest.mark.once
@pytest.mark.parametrize(
    ("steps", "more"),
    [
        (1, ["fits=2", "no_hooks"]),  # in micro-batches of 2 examples
        (4, ["two_devices"]),
    ],
)
def test_cpus_whose_collectives_would_wait_for_ever_train_as_one_device(
    tmp_path, one_device, steps, more
):
    # By default the Session has one CPU device; two_devices gives it two.
    folder = tmp_path / "ours"
    ours = _run(folder, "collectives", 8 // steps, steps, 3 * steps, *more)
    _assert_close(ours, one_device)
    if steps == 1:
        kept = (folder / "micro_batches.json").read_text()
        assert json.loads(kept) == {"micro_batches": 4}


@pytest.mark.once
def test_loss_scaling_whose_collectives_would_hang_is_refused(tmp_path, one_device):
    said = _refusal(tmp_path / "none", "collectives", "loss_scaling")
    assert "must not reduce by collectives, which wait for ever" in said
    assert "Pass it cross_device_ops=tf.distribute.ReductionToOneDevice()." in said
    more = ["loss_scaling", "one_device"]
    ours = _run(tmp_path / "ours", "collectives", 2, 4, 12, *more)
    _assert_close(ours, one_device)


@pytest.mark.once
def test_each_worker_may_cut_its_batch_as_its_memory_asks_for(tmp_path, one_device):
    folder = tmp_path / "ours"
    ours = _run(folder, "multi_worker", 8, 1, 3, "fits=4,1")
    _assert_close(ours, one_device)
    for worker, count in enumerate([2, 8]):
        file = folder / f"micro_batches-worker-{worker}.json"
        assert json.loads(file.read_text()) == {"micro_batches": count}


@pytest.mark.once
def test_cluster_that_would_save_nothing_is_refused(tmp_path):
    # Without a SummarySaverHook TensorFlow creates no CheckpointSaverHook.
    said = _refusal(tmp_path / "none", "multi_worker", "save_summary_steps=0")
    assert "must write checkpoints. Received: none when it began, as with" in said
