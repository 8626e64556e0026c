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


_V2, _V1 = "0::{}", "9:pids:/x\n4:cpu,memory:{}\n0::/"
_MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_V1_FILE = "memory/{}memory.limit_in_bytes"


@pytest.mark.parametrize(
    "groups, limits, expected",
    [
        (None, {}, _MACHINE),
        (_V2.format("/"), {"memory.max": "max"}, _MACHINE),
        (_V2.format("/"), {"memory.max": "1000000"}, 1000000),
        (_V2.format("/job/step"), {"job/step/memory.max": "1000000"}, 1000000),
        (
            _V2.format("/job/step"),
            {"job/step/memory.max": "max", "job/memory.max": "1000000"},
            1000000,
        ),
        (
            _V2.format("/job/step"),
            {"job/step/memory.max": "2000000", "job/memory.max": "1000000"},
            1000000,
        ),
        (_V2.format("/job"), {"other/memory.max": "1000000"}, _MACHINE),
        (_V2.format("/kubepods/pod:1"), {"memory.max": "1000000"}, 1000000),
        (_V1.format("/"), {_V1_FILE.format(""): "1000000"}, 1000000),
        (_V1.format("/"), {_V1_FILE.format(""): "9223372036854771712"}, _MACHINE),
        (_V1.format("/docker/1"), {_V1_FILE.format(""): "1000000"}, 1000000),
        (_V1.format("/slurm/job"), {_V1_FILE.format("slurm/"): "1000000"}, 1000000),
        (_V1.format("/docker/1/job"), {_V1_FILE.format("job/"): "1000000"}, 1000000),
        (
            _V1.format("/docker/1/job/step"),
            {_V1_FILE.format("job/"): "1000000"},
            1000000,
        ),
        ("0::/job", {"unified/job/memory.max": "1000000"}, 1000000),
        ("", {"memory.max": "1000000"}, 1000000),
    ],
)
def test_without_a_gpu_memory_is_the_machines_or_the_containers(
    groups, limits, expected, monkeypatch, tmp_path
):
    for name, limit in limits.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{limit}\n")
    if groups is not None:
        (tmp_path / "own").write_text(f"{groups}\n")
    monkeypatch.setattr(recomputing, "_CGROUPS", tmp_path)
    monkeypatch.setattr(recomputing, "_OWN_CGROUPS", tmp_path / "own")
    assert recomputing.device_memory() == expected


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
