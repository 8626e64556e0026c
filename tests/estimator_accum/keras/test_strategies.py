"""Keras models under tf.distribute strategies get the weights of one replica."""

import collections
import json

import numpy as np
import pytest

from tests.helpers.models.keras_kinds import sparse_data
from tests.helpers.processes import running, strategy_program

pytestmark = pytest.mark.slow


def _end(folder, kind, strategy, *options) -> list[running.Done]:
    """Runs all tasks to their end."""
    root, kind_name = kind.name
    kinds = f"root={root}", f"kind={kind_name}"
    return strategy_program.end("keras", strategy, folder, *kinds, *options)


def _run(folder, kind, strategy, *options):
    """Runs all tasks to their end; returns the first one's (report, weights)."""
    tasks = _end(folder, kind, strategy, *options)
    assert [task.returncode for task in tasks] == [0] * len(tasks)
    with np.load(folder / "weights-0.npz") as weights:
        return json.loads(tasks[0].stdout.splitlines()[-1]), dict(weights)


def _assert_like_one_replica(kind, weights) -> float:
    """Compares with the plain optimizer on batches of 24; returns its last loss."""
    model = kind.sparse_model("float64")
    model.compile(kind.optimizer("Adam", 0.05), "mse", jit_compile=False)
    x, y = sparse_data(88, "float64")
    for start in range(0, 88, 24):
        loss = model.train_on_batch(x[start : start + 24], y[start : start + 24])
    for i, expected in enumerate(model.get_weights()):
        np.testing.assert_allclose(weights[f"arr_{i}"], expected, rtol=0, atol=1e-12)
    return float(loss)


@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker"])
def test_two_replicas_train_as_one_with_the_joined_batch(tmp_path, kind, strategy):
    if kind.is_legacy and strategy == "multi_worker":
        pytest.skip("the reduction over workers is that of the newer optimizers")
    options = ["loop"] if kind.is_3 and strategy == "multi_worker" else []
    is_cut = strategy == "mirrored" and not kind.is_legacy
    options += ["cut"] if is_cut else []
    report, weights = _run(tmp_path, kind, strategy, *options)
    loss = _assert_like_one_replica(kind, weights)
    assert report.get("window_loss", loss) == pytest.approx(loss, rel=1e-12)
    assert report["updates"] == 4
    # Each trace has one reduction, in the branch of the boundary. Collectives take
    # tensors of one dtype together: the rows of a sparse gradient are float32.
    traces = collections.Counter(report["reductions"])
    assert traces
    assert all("_true_" in name for name in traces)
    assert set(traces.values()) == {1 if strategy == "mirrored" else 2}
    if is_cut:
        # Replicas of Keras 3 draw the same, also with the batch at once.
        masks = 6 if kind.is_3 else 12
        number_of_masks, difference = report["dropped"]
        assert (number_of_masks, difference < 1e-12) == (masks, True)
    for difference, *reductions in report["cut"] if is_cut else []:
        assert difference < 1e-12
        # Keras makes variables in the first trace, which is repeated with them.
        assert set(reductions) == {2}


def test_a_saved_window_goes_on_with_another_number_of_replicas(tmp_path, kind):
    report, weights = _run(tmp_path, kind, "mirrored", "resume")
    _assert_like_one_replica(kind, weights)
    assert report["updates"] == 4


def test_the_parts_of_a_multi_optimizer_reduce_nothing_again(tmp_path, kind):
    if not kind.is_3:
        pytest.skip("Keras 2 has no MultiOptimizer")
    _, weights = _run(tmp_path, kind, "mirrored", "multi")
    _assert_like_one_replica(kind, weights)


def test_fit_of_keras_3_itself_fails_on_several_workers(tmp_path, kind):
    """With any optimizer, because it takes the mean of a batch that is a tuple."""
    if not kind.is_3:
        pytest.skip("Keras 2: the test above")
    for task in _end(tmp_path, kind, "multi_worker", "plain"):
        assert task.returncode == 1
        assert "Attempt to convert a value (PerReplica" in task.stderr


@pytest.mark.once
def test_a_loss_scale_around_it_gives_the_same_weights(tmp_path, kind):
    if not kind.is_legacy and not kind.is_3:
        pytest.skip("Keras 2: of its two loss scales the legacy optimizers'")
    _, weights = _run(tmp_path, kind, "mirrored", "nested")
    _assert_like_one_replica(kind, weights)
