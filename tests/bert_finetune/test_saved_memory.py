"""The sentence about the memory that accumulation saved."""

import dataclasses
import re

import pytest

from bert_finetune.saved_memory import saving_text
from estimator_accum.programs.batches import Batches
from tests.helpers.models import tiny_bert

pytestmark = pytest.mark.once
_CONFIG = dataclasses.replace(
    tiny_bert.CONFIG, hidden_size=128, intermediate_size=512, num_hidden_layers=4
)


def _text(steps, memory=None, batch=256):
    batches = Batches(batch, steps, 1)
    options = {"is_recomputed": False, "optimizer": "adamw"}
    return saving_text(_CONFIG, batches, 64, memory, **options)


def test_one_micro_batch_saves_nothing():
    assert _text(1) is None


def test_saved_memory_and_time_are_those_of_the_plan():
    # (K - 1) * 40 tokens on top of 256 * 64
    words = (
        r"K = 4 saved (\S+) MB of memory \((\S+) MB, unsplit (\S+) MB\) and cost 1% "
    )
    saved, ours, at_once = map(float, re.search(words, _text(4)).groups())
    assert saved == pytest.approx(at_once - ours, abs=0.11) and ours < 0.5 * at_once


def test_accumulators_can_cost_more_than_activations_save():
    assert " K = 2 cost " in _text(2, batch=2)


@pytest.mark.parametrize(("memory", "fits"), [(10**10, True), (10**8, False)])
def test_batch_that_fits_at_once_is_named(memory, fits):
    assert ("\nK = 1 fits in the 10,000.0 MB" in _text(4, memory)) == fits
