"""Decides whether the encoder's layers are recomputed in the backward pass.

none      never
layers    always
auto      with micro-batches that adapt to memory: as `microbatch_model_fn` finds
          out; with fixed ones: if the planner says that they do not fit otherwise
"""

import functools
import os
import pathlib
import subprocess
from collections.abc import Callable

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
_CONTAINER_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")


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
        config,
        examples,
        tokens,
        is_accumulating=is_accumulating,
        optimizer=optimizer,
    )
    peak = memory.peak
    way = NONE if peak <= usable else LAYERS
    return way, (
        f"a micro-batch of {examples} x {tokens} tokens takes {peak / 1e6:,.0f} MB of "
        f"{usable / 1e6:,.0f} MB usable with activations kept"
    )


def device_memory() -> int:
    """Returns the memory of the smallest GPU, or else of the machine [bytes].

    Raises:
        ValueError: If there is a GPU whose memory cannot be found out.
    """
    if tf.config.list_physical_devices("GPU"):
        return _gpu_memory()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _CONTAINER_LIMIT.exists():
        limit = _CONTAINER_LIMIT.read_text().strip()
        memory = min(memory, int(limit)) if limit.isdigit() else memory
    return memory


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
