"""scripts/experiments/optimizer_table.py: its measurements, and that it detects a broken rule."""

import csv
import inspect

import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op
from scripts.experiments import optimizer_table

v1 = tf.compat.v1


def _run(*arguments: str) -> int:
    return optimizer_table.main(["--updates=3", *arguments])


@pytest.fixture
def one_k(monkeypatch):
    """Makes the table as small as possible to detect a broken rule."""
    monkeypatch.setattr(optimizer_table, "_STEPS", (2,))
    monkeypatch.setattr(optimizer_table, "_CLIP_NORMS", (3.0,))


def test_the_table_has_every_optimizer_of_v1_train():
    classes = filter(inspect.isclass, vars(v1.train).values())
    public = {each for each in classes if issubclass(each, v1.train.Optimizer)}
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        rate = tf.constant(0.1)
        made = {type(make(rate, step)) for make in optimizer_table._OPTIMIZERS.values()}
    assert made == public - {v1.train.Optimizer, v1.train.SyncReplicasOptimizer}


@pytest.mark.once
def test_csv_has_every_run_and_the_table_the_largest(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(optimizer_table, "_STEPS", (1, 3))
    output = tmp_path / "new" / "table.csv"
    assert _run("--optimizers=Momentum", f"--output={output}") == 0
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert len(rows) == 2 * 2 * 2 * 2 * 2  # K, clipping, rate, dtype, variable
    assert len({tuple(row.values())[:-1] for row in rows}) == len(rows)
    header, _, line = capsys.readouterr().out.splitlines()
    columns = ["float32, dense", "float32, sparse", "float64, dense", "float64, sparse"]
    assert header.strip("| ").split(" | ") == columns
    name, *cells = line.strip("| ").split(" | ")
    assert name == "Momentum"
    for column, cell in zip(columns, cells, strict=True):
        dtype, variable = column.split(", ")
        of_it = [r for r in rows if (r["dtype"], r["variable"]) == (dtype, variable)]
        largest = max(float(row["relative_difference"]) for row in of_it)
        assert cell == f"{largest:.1e}"
        assert largest < (2e-5 if dtype == "float32" else 1e-12)
    for row in rows:  # the plain optimizer, bit for bit
        is_plain = row["gradient_accumulation_steps"] == "1" and not row["clip_norm"]
        assert not is_plain or float(row["relative_difference"]) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.once
def test_a_bound_that_is_broken_gives_exit_code_1(dtype, one_k):
    assert _run("--optimizers=GradientDescent", f"--{dtype}_bound=0") == 1


def _sums(loss, optimizer, steps, clip_norm):
    return make_accumulating_train_op(loss * steps, optimizer, steps, clip_norm)


def _clips_every_micro_batch(loss, optimizer, steps, clip_norm):
    class Clipping(type(optimizer)):
        def compute_gradients(self, *args, **kwargs):
            pairs = super().compute_gradients(*args, **kwargs)
            if clip_norm is None:
                return pairs
            gradients, variables = zip(*pairs, strict=True)
            clipped, _ = tf.clip_by_global_norm(gradients, clip_norm)
            return list(zip(clipped, variables, strict=True))

    optimizer.__class__ = Clipping
    return make_accumulating_train_op(loss, optimizer, steps)


def _makes_embeddings_dense(loss, optimizer, steps, clip_norm):
    class Dense(type(optimizer)):
        def compute_gradients(self, *args, **kwargs):
            pairs = super().compute_gradients(*args, **kwargs)
            return [(tf.convert_to_tensor(g), v) for g, v in pairs]

    optimizer.__class__ = Dense
    return make_accumulating_train_op(loss, optimizer, steps, clip_norm)


@pytest.mark.parametrize(
    ("broken_rule", "clip_norm"),
    [(_sums, None), (_clips_every_micro_batch, 3.0), (_makes_embeddings_dense, 3.0)],
)
@pytest.mark.once
def test_a_broken_rule_gives_exit_code_1(broken_rule, clip_norm, monkeypatch, one_k):
    monkeypatch.setattr(optimizer_table, "_CLIP_NORMS", (clip_norm,))
    monkeypatch.setattr(optimizer_table, "make_accumulating_train_op", broken_rule)
    assert _run("--optimizers=Momentum") == 1


@pytest.mark.once
def test_a_rate_that_counts_micro_steps_gives_exit_code_1(monkeypatch, one_k):
    wrong_clock = v1.train.get_or_create_global_step
    monkeypatch.setattr(optimizer_table, "get_or_create_update_step", wrong_clock)
    assert _run("--optimizers=GradientDescent") == 1
