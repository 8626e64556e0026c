"""The sizes of an update, derived or refused."""

import pytest

from estimator_accum.programs.batches import AUTO, Batches, share_out

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    "effective, micro, steps, replicas, expected",
    [
        (None, 8, 4, 1, Batches(32, 4, 1)),
        (None, 8, 4, 3, Batches(96, 4, 3)),
        (None, None, None, 2, Batches(60, 3, 2)),  # the defaults, 10 and 3
        (32, 8, None, 1, Batches(32, 4, 1)),
        (32, 8, None, 2, Batches(32, 2, 2)),
        (32, None, 4, 2, Batches(32, 4, 2)),
        (32, None, None, 1, Batches(32, 4, 1)),
        (30, 8, None, 1, Batches(30, 4, 1)),
        (30, 8, 4, 1, Batches(30, 4, 1)),
        (8, 1, None, 2, Batches(8, 4, 2)),
        (32, AUTO, None, 2, Batches(32, 1, 2, is_auto=True)),
    ],
)
def test_sizes_follow_from_each_other(effective, micro, steps, replicas, expected):
    defaults = {"default_micro_batch_size": 10}
    defaults["default_gradient_accumulation_steps"] = 3
    assert share_out(effective, micro, steps, replicas, **defaults) == expected


@pytest.mark.parametrize(
    "sizes, sentence",
    [
        ((32, 8, 3, 1), r"Received: 32, not 8 \* 3 \* 1 = 24\. Leave one"),
        ((3, None, 2, 2), r"Received: 3 for 2 micro-steps of 2 replicas\. Use"),
        ((None, AUTO, None, 1), r"Received: no --effective_batch_size\. Use"),
        ((32, AUTO, 2, 1), r"Received: --gradient_accumulation_steps=2\. Leave"),
    ],
)
def test_sizes_that_disagree_are_refused(sizes, sentence):
    with pytest.raises(ValueError, match=sentence):
        share_out(*sizes)


def test_replicas_without_an_example_are_refused_unless_they_may_be():
    with pytest.raises(ValueError, match="Received: 5 for 3 micro-steps of 2 replicas"):
        share_out(5, 1, None, 2)
    assert share_out(5, 1, None, 2, may_be_empty=True) == Batches(5, 3, 2)
    assert share_out(2, 1, None, 2, may_be_empty=True) == Batches(2, 1, 2)
    with pytest.raises(ValueError, match="Received: 1 for 1 micro-steps of 2 replicas"):
        share_out(1, 1, None, 2, may_be_empty=True)


@pytest.mark.parametrize("size, steps, replicas", [(200, 2, 3), (7, 3, 2), (6, 3, 2)])
def test_shares_are_the_whole_once_and_differ_by_one_at_most(size, steps, replicas):
    batches = Batches(size, steps, replicas)
    shares = [batches.share(m, r) for m in range(steps) for r in range(replicas)]
    assert [place for share in shares for place in range(*share)] == list(range(size))
    sizes = [behind - first for first, behind in shares]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == batches.largest_share


def test_batches_describe_themselves():
    whole, uneven, auto = Batches(32, 2, 2), Batches(7, 2, 1), Batches(32, 1, 4, True)
    assert str(whole) == "effective batch 32 = 8 examples x 2 micro-steps x 2 replicas"
    sizes = "at most 4 examples x 2 micro-steps x 1 replica"
    assert str(uneven) == f"effective batch 7 = {sizes}"
    said = "8 examples with the number of micro-batches chosen by memory x 4"
    assert said in str(auto)
