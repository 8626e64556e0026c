"""Decides whether the encoder's layers are recomputed in the backward pass.

none      never
layers    always
auto      with micro-batches that adapt to memory: as `microbatch_model_fn` finds
          out; with fixed ones: if the planner says that they do not fit otherwise
"""

import functools
import itertools
import math
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator

import tensorflow as tf

from bert_finetune.bert_config import BertConfig
from bert_finetune.plan import USABLE_SHARE
from bert_finetune.plan_memory import memory_of
from bert_finetune.settings import LAYERS, NONE
from estimator_accum import recompute
from estimator_accum.programs.batches import AUTO

_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=memory.total",
    "--format=csv,noheader,nounits",
)
_CGROUPS, _OWN_CGROUPS = (
    pathlib.Path("/sys/fs/cgroup"),
    pathlib.Path("/proc/self/cgroup"),
)
_MACHINE = "SC_PHYS_PAGES", "SC_PAGE_SIZE"


def wrapper_of(way: str) -> Callable | None:
    """Returns the wrapper of each part of a layer; None leaves it as it is."""
    wrappers = {LAYERS: functools.partial(recompute, always=True), AUTO: recompute}
    return wrappers.get(way)


def choose(
    config: BertConfig,
    examples: int,
    tokens: int,
    *,
    is_accumulating: bool,
    optimizer: str,
) -> tuple[str, str]:
    """Chooses for micro-batches of a fixed size, by the planner's bytes.

    Args:
        config: Sizes and dropout of the encoder.
        examples: Examples of a micro-batch.
        tokens: Tokens of an example.
        is_accumulating: Whether K > 1.
        optimizer: Optimizer, as in `memory_of`.

    Returns:
        "none" or "layers", and the reason in words.

    Raises:
        ValueError: If the size of the device's memory cannot be found out.
    """
    usable = USABLE_SHARE * device_memory()
    memory = memory_of(
        config, examples, tokens, is_accumulating=is_accumulating, optimizer=optimizer
    )
    peak = memory.peak
    way = NONE if peak <= usable else LAYERS
    return way, (
        f"a micro-batch of {examples} x {tokens} tokens takes {peak / 1e6:,.0f} MB of "
        f"{usable / 1e6:,.0f} MB usable with activations kept"
    )


def device_memory() -> int:
    """Returns the memory of the smallest GPU, or else of the machine [bytes].

    A container or a job may have less than its machine.

    Raises:
        ValueError: If there is a GPU whose memory cannot be found out.
    """
    if tf.config.list_physical_devices("GPU"):
        return _gpu_memory()
    return min([math.prod(map(os.sysconf, _MACHINE)), *_container_limits()])


def _container_limits() -> Iterator[int]:
    """Yields the limits of this process's control groups and those around them [bytes].

    The lines of /proc/self/cgroup are `number:controllers:path`, those of version 2
    without controllers. In a container, the path may be the host's, and only its last
    parts, or none, are below /sys/fs/cgroup.
    """
    groups = [
        line.split(":", 2) for line in _lines(_OWN_CGROUPS) if line.count(":") > 1
    ]
    for root, file, controller in (
        (_CGROUPS, "memory.max", ""),
        (_CGROUPS / "unified", "memory.max", ""),
        (_CGROUPS / "memory", "memory.limit_in_bytes", "memory"),
    ):
        paths = [p for _, names, p in groups if controller in names.split(",")] or ["/"]
        for path in paths:
            parts = pathlib.PurePosixPath(path.lstrip("/")).parts
            ends = itertools.combinations_with_replacement(range(len(parts) + 1), 2)
            for folder in {root.joinpath(*parts[begin:end]) for begin, end in ends}:
                for line in _lines(folder / file):
                    if line.isdigit():  # not "max"
                        yield int(line)


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []


def _gpu_memory() -> int:
    try:
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, check=True)
        return min(int(line) for line in done.stdout.splitlines()) * 2**20
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise ValueError(
            "With --recompute=auto and micro-batches of a fixed size, the GPU's memory "
            f"must be known. Received: {error!r} from nvidia-smi. Use "
            "--micro_batch_size=auto, or --recompute=layers."
        ) from error
