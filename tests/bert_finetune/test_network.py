"""The bandwidth model: bytes of a ring reduction, and the K that hides them."""

import pytest

from bert_finetune.network import reduction_secs, steps_that_hide, update_secs


@pytest.mark.parametrize(
    ("num_bytes", "replicas", "bits_per_sec", "secs"),
    [(125e6, 1, 1e9, 0.0), (125e6, 2, 1e9, 1.0), (125e6, 4, 1e9, 1.5), (0, 8, 10e9, 0)]
    + [(125e6, 1000, 1e9, 1.998), (440e6, 8, 10e9, 0.616)],  # the docstring's example
)
def test_ring_sends_each_byte_twice_but_for_its_own_share(
    num_bytes, replicas, bits_per_sec, secs
):
    assert reduction_secs(num_bytes, replicas, bits_per_sec) == pytest.approx(secs)


def test_update_is_k_micro_steps_and_one_reduction():
    assert update_secs(0.5, 4, 3.0) == 5.0


@pytest.mark.parametrize(
    ("reduction", "share", "steps"),
    [(0.0, 0.1, 1), (1.0, 0.5, 1), (1.0, 0.1, 9), (1.0, 0.25, 3), (0.7, 0.1, 7)],
)
def test_k_that_hides_the_network_is_the_least(reduction, share, steps):
    assert steps_that_hide(1.0, reduction, share) == steps

    def part(k):
        return reduction / update_secs(1.0, k, reduction)

    assert part(steps) <= share * (1 + 1e-9)
    assert steps == 1 or part(steps - 1) > share


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: reduction_secs(-1, 2, 1e9), r"`num_bytes` must be >= 0\..*-1\."),
        (lambda: reduction_secs(1, 0, 1e9), r"`replicas` must be >= 1\..*: 0\."),
        (lambda: reduction_secs(1, 2, 0), r"`bits_per_sec` must be a finite.*: 0\."),
        (lambda: steps_that_hide(0.0, 1.0), r"`micro_step_secs` must be > 0\..*0\.0"),
        (lambda: steps_that_hide(1.0, 1.0, 1), r"`share` must be between.*: 1\."),
    ],
)
def test_what_is_out_of_range_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
