"""optimizer_table.py detects a broken rule."""

import importlib.util
import inspect
import re

import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op
from scripts.experiments import optimizer_table

pytestmark = pytest.mark.once

v1 = tf.compat.v1


def test_the_table_has_every_optimizer_of_v1_train():
    classes = filter(inspect.isclass, vars(v1.train).values())
    public = {kind for kind in classes if issubclass(kind, v1.train.Optimizer)}
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        rate = tf.constant(0.1)
        makers = optimizer_table.V1_OPTIMIZERS.values()
        kinds = {type(make(rate, step)) for make in makers}
    assert kinds >= public - {v1.train.Optimizer, v1.train.SyncReplicasOptimizer}


@pytest.mark.parametrize("factor, code", [(1, 0), (2, 1)])
def test_the_table_of_v1_holds_its_bounds_unless_the_rule_is_broken(
    factor, code, monkeypatch, capsys
):
    def train_op(loss, *arguments):
        return make_accumulating_train_op(factor * loss, *arguments)

    monkeypatch.setattr(optimizer_table, "make_accumulating_train_op", train_op)
    monkeypatch.setattr(optimizer_table, "_STEPS", (2,))
    monkeypatch.setattr(optimizer_table, "_V1_UPDATES", 3)
    assert optimizer_table.main(["--optimizers=Momentum"]) == code
    *_, header, _, line = capsys.readouterr().out.splitlines()
    assert header == (
        "|  | float32, dense | float32, sparse | float64, dense | float64, sparse |"
    )
    assert re.fullmatch(r"\| Momentum( \| \d\.\de[-+]\d\d){4} \|", line)


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_the_table_of_keras_holds_its_bounds_and_shows_the_others(
    keras, capsys, monkeypatch
):
    if importlib.util.find_spec(keras) is None:
        pytest.skip(f"{keras} is not installed")
    for feature in ("weight decay", "clipnorm"):  # like EMA and global_clipnorm
        monkeypatch.delitem(optimizer_table._FEATURES, feature)
    monkeypatch.setattr(optimizer_table, "_KERAS_UPDATES", 4)
    flags = [f"--interface={keras}", "--optimizers=Adam"]
    assert optimizer_table.main(flags) == 0
    printed = capsys.readouterr().out
    ours, *others = re.findall(r"^\| Adam \| (.*) \|$", printed, re.MULTILINE)
    assert len(ours.split(" | ")) == 2 * 5
    for row in others:  # Keras 3 moves averages and schedules per micro-step
        plain, average, schedule, *_ = map(float, row.split(" | "))
        assert plain < 1e-6
        assert min(average, schedule) > 1e-3
