"""The bandwidth model: bytes of a ring reduction."""

import pytest

from bert_finetune.network import reduction_secs


@pytest.mark.parametrize(
    ("num_bytes", "replicas", "bits_per_sec", "secs"),
    [(125e6, 1, 1e9, 0.0), (125e6, 2, 1e9, 1.0), (125e6, 4, 1e9, 1.5), (0, 8, 10e9, 0)]
    + [(125e6, 1000, 1e9, 1.998), (440e6, 8, 10e9, 0.616)],  # the docstring's example
)
def test_ring_sends_each_byte_twice_but_for_its_own_share(
    num_bytes, replicas, bits_per_sec, secs
):
    assert reduction_secs(num_bytes, replicas, bits_per_sec) == pytest.approx(secs)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: reduction_secs(-1, 2, 1e9), r"`num_bytes` must be >= 0\..*-1\."),
        (lambda: reduction_secs(1, 0, 1e9), r"`replicas` must be >= 1\..*: 0\."),
        (lambda: reduction_secs(1, 2, 0), r"`bits_per_sec` must be a finite.*: 0\."),
    ],
)
def test_what_is_out_of_range_is_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
