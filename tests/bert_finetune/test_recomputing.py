"""--recompute: the choice of "auto" for micro-batches of a fixed size."""

import os
import re

import pytest
import tensorflow as tf

from bert_finetune import recomputing
from bert_finetune.plan import USABLE_SHARE
from bert_finetune.plan_memory import memory_of
from tests.helpers.models import tiny_bert

pytestmark = pytest.mark.once


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_layers_are_recomputed_if_a_micro_batch_would_not_fit(optimizer, monkeypatch):
    options = {"is_accumulating": True, "optimizer": optimizer}
    peak = memory_of(tiny_bert.CONFIG, 8, 16, **options).peak
    for memory, expected in ((1.01, "none"), (0.99, "layers")):
        usable = memory * peak
        monkeypatch.setattr(
            recomputing, "device_memory", lambda usable=usable: usable / USABLE_SHARE
        )
        way, reason = recomputing.choose(tiny_bert.CONFIG, 8, 16, **options)
        assert way == expected
        assert reason == (
            f"a micro-batch of 8 x 16 tokens takes {peak / 1e6:,.0f} MB of "
            f"{usable / 1e6:,.0f} MB usable with activations kept"
        )


@pytest.mark.parametrize(("limit", "share"), [("max", 1), ("1000000", 0), (None, 1)])
def test_without_a_gpu_memory_is_the_machines_or_the_containers(
    limit, share, monkeypatch, tmp_path
):
    file = tmp_path / "memory.max"
    if limit is not None:
        file.write_text(f"{limit}\n")
    monkeypatch.setattr(recomputing, "_CONTAINER_LIMIT", file)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert recomputing.device_memory() == (machine if share else int(limit))


def _fake_smi(folder, monkeypatch, content):
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\n{content}\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])


def test_with_gpus_memory_is_the_smallest_ones(monkeypatch, tmp_path):
    _fake_smi(tmp_path, monkeypatch, "echo 24576; echo 16384")
    assert recomputing.device_memory() == 16384 * 2**20


@pytest.mark.parametrize("content", ["exit 9", "echo '[N/A]'"])
def test_a_gpu_of_unknown_memory_is_refused(content, monkeypatch, tmp_path):
    _fake_smi(tmp_path, monkeypatch, content)
    sentence = (
        r"With --recompute=auto and micro-batches of a fixed size, the GPU's memory "
        r"must be known\. Received: .* from nvidia-smi\. Use --micro_batch_size=auto"
    )
    with pytest.raises(ValueError, match=re.compile(sentence)):
        recomputing.device_memory()
