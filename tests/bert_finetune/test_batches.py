"""The sizes of a run's batches: what follows from what, and what disagrees."""

import dataclasses

import pytest

from bert_finetune.batches import Batches, batches_of


@pytest.mark.parametrize(
    ("effective", "micro", "steps", "replicas", "expected"),
    [
        (None, None, None, 1, (32, 1)),
        (None, 8, 4, 1, (32, 4)),
        (None, 8, 4, 3, (96, 4)),
        (32, 8, None, 1, (32, 4)),
        (32, 8, None, 2, (32, 2)),
        (32, 5, None, 2, (32, 4)),
        (100, None, None, 1, (100, 4)),
        (32, None, 4, 2, (32, 4)),
        (32, 8, 2, 2, (32, 2)),
        (3, 8, None, 2, (3, 1)),
        (32, "auto", None, 2, (32, 1)),
    ],
)
def test_sizes_follow_from_one_another(
    settings, effective, micro, steps, replicas, expected
):
    batches = batches_of(_sizes(settings, effective, micro, steps), replicas)
    found = batches.effective_batch_size, batches.gradient_accumulation_steps
    assert found == expected
    assert batches.num_replicas == replicas
    assert batches.is_auto == (micro == "auto")


def _sizes(settings, effective, micro, steps):
    return dataclasses.replace(
        settings,
        effective_batch_size=effective,
        train_batch_size=micro,
        gradient_accumulation_steps=steps,
    )


@pytest.mark.parametrize(
    ("effective", "micro", "steps", "replicas", "message"),
    [
        (32, 8, 3, 1, r"Received: 32, not 8 \* 3 \* 1 = 24\. Leave one of the three"),
        (3, None, None, 4, "Received: 3 for 1 micro-steps of 4 replicas. Use a larger"),
        (8, None, 5, 2, "Received: 8 for 5 micro-steps of 2 replicas. Use a larger"),
        (
            None,
            "auto",
            None,
            1,
            "must be given the examples of an update. Received: no",
        ),
        (8, "auto", 2, 1, "Received: --gradient_accumulation_steps=2. Leave that out"),
    ],
)
def test_sizes_that_disagree_are_refused(
    settings, effective, micro, steps, replicas, message
):
    with pytest.raises(ValueError, match=message):
        batches_of(_sizes(settings, effective, micro, steps), replicas)


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        (
            Batches(32, 4, 1),
            "effective batch 32 = 8 examples x 4 micro-steps x 1 replica",
        ),
        (
            Batches(96, 4, 3),
            "effective batch 96 = 8 examples x 4 micro-steps x 3 replicas",
        ),
        (
            Batches(10, 3, 1),
            "effective batch 10 = at most 4 examples x 3 micro-steps x 1",
        ),
        (
            Batches(32, 1, 2, is_auto=True),
            "effective batch 32 = 16 examples in as many micro-batches as memory asks",
        ),
    ],
)
def test_batches_say_what_they_are(batches, text):
    assert str(batches).startswith(text)
