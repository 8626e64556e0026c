"""Sentences about runs that have learned nothing."""

import math
import re

import numpy as np
import pytest

from bert_finetune import diagnosis
from bert_finetune.tasks import get_task

pytestmark = pytest.mark.once
_LABELS = np.array([1] * 7 + [0] * 3, np.int32)
_LN = math.log(2)


@pytest.mark.parametrize(
    ("labels", "loss"),
    [
        (np.arange(5, dtype=np.int32), math.log(5)),
        (_LABELS, -0.7 * math.log(0.7) - 0.3 * math.log(0.3)),
        (np.array([2, 2], np.int32), 0),
        (np.array([1, 3], np.float32), 1),
    ],
)
def test_loss_of_a_constant_is_the_entropy_or_the_variance(labels, loss):
    assert diagnosis.constant_loss(labels) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("only", "accuracy", "loss", "sentence"),
    [
        (1, 0.7, 0.61, "dev: every prediction is one class, 1, which 0.7000 of the ex"),
        (0, 0.3, 0.9, "one class, 0, which 0.3000 of .*; the loss is 0.9000, and ln.2"),
        (-1, 0.6, _LN, "0.6931, and the accuracy is not above 0.7000, the share of "),
        (-1, 0.7, 0.612, "the loss is 0.6120, .* the model has not learned. If the"),
        (-1, 0.8, _LN, None),  # it knows more than it is sure of
        (-1, 0.7, 0.9, None),
        (-1, 0.9, 0.3, None),
    ],
)
def test_an_evaluation_that_shows_no_learning(only, accuracy, loss, sentence):
    metrics = {"only_class": only, "eval_accuracy": accuracy, "eval_loss": loss}
    said = diagnosis.of_evaluation(get_task("cola"), "dev", _LABELS, metrics)
    assert (said is None) if sentence is None else re.search(sentence, said)


def test_one_class_is_right_where_there_is_one():
    metrics = {"only_class": 1, "eval_accuracy": 1.0, "eval_loss": 0.01}
    labels = np.ones(5, np.int32)
    assert diagnosis.of_evaluation(get_task("cola"), "dev", labels, metrics) is None


@pytest.mark.parametrize(
    ("losses", "is_said"),
    [
        ([0.7] * 10 + [0.611] * 10, True),
        ([0.7] * 10 + [0.5] * 10, False),
        ([0.611] * 19, False),  # too short a run
        ([math.nan] * 20, False),  # which has sentences of its own
    ],
)
def test_a_training_loss_of_a_constant(tmp_path, losses, is_said):
    path = tmp_path / "train_metrics.csv"
    path.write_text("\n".join(["update_step,loss", *(f"1,{x}" for x in losses)]))
    said = diagnosis.of_training(path, _LABELS)
    expected = "training loss: 0.6110 over the last 10 updates, and 0.6109 for a pre"
    assert (expected in said) if is_said else said is None


def test_a_training_that_has_ended_does_not_need_its_losses(tmp_path):
    path = tmp_path / "train_metrics.csv"
    assert diagnosis.of_training(path, _LABELS) is None
    path.write_text("update_step,loss\n" + 20 * "1,\n" + "2,o.5\n")
    assert diagnosis.of_training(path, _LABELS) is None
