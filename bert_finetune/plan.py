r"""Plans the training of a BERT before anything runs.

    estimator-accum plan --bert_config_file=bert/uncased_L-12_H-768_A-12/bert_config.json \
        --max_seq_length=128 --effective_batch_size=64 --device_memory=11GB \
        --num_replicas=4 --link_speed=10Gbit/s

    effective_batch_size = micro_batch_size x K x replicas

It prints the cheapest way to train that fits: the largest micro-batch, with layers that
are recomputed in the backward pass if that is faster, or if nothing else fits; and its
memory, the disk space of the checkpoints, the time to reduce one update's gradients over
the network, and, in the last line, the flags of `estimator-accum train` to paste. The
bytes count all tensors that are alive at the same time, within 15% of measurements on
encoders of 2 to 6 layers on a CPU; a fifth of the device's memory is reserved, because
the allocator cannot use all of it. Exit codes: 0; 2 with one sentence
when nothing fits or a flag is wrong.
"""

import argparse
import re
import sys
from typing import NamedTuple

from bert_finetune.bert_config import DROPOUTS, SIZES, BertConfig
from bert_finetune.plan_memory import KEPT_CHECKPOINTS, Memory, megabytes, memory_of
from bert_finetune.settings import OPTIMIZERS
from estimator_accum.programs.batches import Batches
from estimator_accum.programs.command_line import (
    OneSentenceParser,
    check_counts,
    exit_code_of,
)

# Time of an update with recomputed layers, relative to kept activations, and what each
# micro-step costs besides its tokens: it passes once over the accumulators.
_RECOMPUTED_TIME = 1.22
_TOKENS_OF_A_MICRO_STEP = 40
# TensorFlow's best-fit allocator needed up to 1.25 times the bytes alive together.
USABLE_SHARE = 0.8
_BYTES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY_BYTES = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_WAYS = {"none": (False,), "layers": (True,), "auto": (False, True)}
_MEMORY = re.compile(r"([0-9.]+)\s*(?=[a-z])([kmgt]i?|)b?", re.IGNORECASE)
_SPEED = re.compile(r"([0-9.]+)\s*([kKmMgGtT]?)(bits?/s|bps|B/s)")


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line and prints the plan; returns the exit code."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _print_plan(flags), parser.prog)


def _print_plan(flags: argparse.Namespace) -> None:
    keys = {name: name for name in (*SIZES, *DROPOUTS)}
    config = BertConfig.from_json_file(flags.bert_config_file, keys)
    _check(flags, config)
    for line in _plan(flags, config):
        print(line)


class Plan(NamedTuple):
    """A way to train.

    Attributes:
        batches: The division of an update.
        is_recomputed: Whether the layers' activations are recomputed.
        memory: Memory of a replica.
        time: Time of an update, relative to that of one micro-batch a replica with
            activations kept.
    """

    batches: Batches
    is_recomputed: bool
    memory: Memory
    time: float


def cheapest_plan(
    config: BertConfig,
    tokens: int,
    effective_batch_size: int,
    num_replicas: int,
    usable_bytes: float,
    ways: tuple[bool, ...] = (False, True),
    optimizer: str = "adamw",
) -> Plan:
    """Returns the fastest way to train that fits in memory.

    Args:
        config: Sizes and dropout of the encoder.
        tokens: Tokens of an example.
        effective_batch_size: Examples of an update, over all replicas.
        num_replicas: Devices that train together.
        usable_bytes: Memory that tensors may take [bytes].
        ways: Whether layers are recomputed, in each way that may be chosen.
        optimizer: Optimizer, as in `memory_of`.

    Returns:
        The plan, in the largest micro-batches that fit.

    Raises:
        ValueError: If not even one example fits.
    """
    plans = []
    for is_recomputed in ways:
        for steps in range(1, -(-effective_batch_size // num_replicas) + 1):
            batches = Batches(effective_batch_size, steps, num_replicas)
            memory = memory_of(
                config,
                batches.largest_share,
                tokens,
                is_accumulating=steps > 1,
                is_recomputed=is_recomputed,
                optimizer=optimizer,
            )
            if memory.peak <= usable_bytes:
                time = relative_time(batches, tokens, is_recomputed)
                plans.append(Plan(batches, is_recomputed, memory, time))
                break
    if plans:
        return min(plans, key=lambda plan: plan.time)
    raise ValueError(
        f"A micro-batch of 1 example must fit in `--device_memory`. Received: "
        f"{megabytes(usable_bytes / USABLE_SHARE)}, and 1 example of {tokens} tokens "
        f"takes {megabytes(memory.peak / USABLE_SHARE)} with the allocator's share. Use "
        "shorter examples, a smaller encoder, or a device with more memory."
    )


def relative_time(batches: Batches, tokens: int, is_recomputed: bool) -> float:
    """Returns the time of an update, relative to one micro-batch a replica."""
    steps = batches.gradient_accumulation_steps
    passed = batches.effective_batch_size * tokens / batches.num_replicas
    overhead = (steps - 1) * _TOKENS_OF_A_MICRO_STEP
    return (1 + overhead / passed) * (_RECOMPUTED_TIME if is_recomputed else 1)


def _plan(flags: argparse.Namespace, config: BertConfig) -> list[str]:
    plan = cheapest_plan(
        config,
        flags.max_seq_length,
        flags.effective_batch_size,
        flags.num_replicas,
        flags.device_memory * USABLE_SHARE,
        _WAYS[flags.recompute],
        flags.optimizer,
    )
    batches = plan.batches
    return [
        *(
            f"{name:<18}{megabytes(value):>12}  {note}".rstrip()
            for name, value, note in _memory_rows(plan, flags)
        ),
        f"micro_batch_size {batches.largest_share}",
        f"gradient_accumulation_steps {batches.gradient_accumulation_steps}",
        str(batches),
        f"time {plan.time:.2f} of one micro-batch with activations kept",
        *_reduction(plan.memory, batches, flags.link_speed),
        _flags_to_paste(plan, flags.max_seq_length, flags.optimizer),
    ]


def _memory_rows(plan: Plan, flags: argparse.Namespace) -> list[tuple]:
    """Returns (name, bytes, note) of each part of the memory."""
    memory, size = plan.memory, plan.batches.largest_share
    layers = ", recomputed layers" if plan.is_recomputed else ""
    return [
        ("parameters", memory.parameters, ""),
        ("optimizer slots", memory.slots, f"of {flags.optimizer}"),
        ("accumulators", memory.accumulators, "none where K is 1"),
        ("graph", memory.graph, "of the session"),
        (
            "activations",
            memory.activations,
            f"{size} x {flags.max_seq_length} tokens{layers}",
        ),
        ("gradients", memory.gradients, "beside the activations"),
        ("update", memory.update, "not while activations exist"),
        (
            "peak of the model",
            memory.peak,
            f"of {megabytes(flags.device_memory * USABLE_SHARE)} usable",
        ),
        ("disk", memory.disk, f"{KEPT_CHECKPOINTS} checkpoints and the next one"),
    ]


def _reduction(memory: Memory, batches: Batches, bits_per_sec: float) -> list[str]:
    if batches.num_replicas == 1:
        return []
    reduced = memory.accumulators or memory.parameters
    # In a ring, a replica sends all bytes but its own share twice: to sum, to distribute.
    sent = 2 * (batches.num_replicas - 1) / batches.num_replicas * reduced
    secs = 8 * sent / bits_per_sec
    over = f"{megabytes(reduced)} over {batches.replicas}"
    return [f"reduction {1e3 * secs:,.1f} ms an update, of {over}"]


def _flags_to_paste(plan: Plan, tokens: int, optimizer: str) -> str:
    """Returns flags of `estimator-accum train` that make this plan."""
    batches = plan.batches
    examples = f"--train_batch_size={batches.largest_share}"
    if not batches.is_even:  # micro-batches differ by one example
        examples = f"--effective_batch_size={batches.effective_batch_size}"
    steps = f"--gradient_accumulation_steps={batches.gradient_accumulation_steps}"
    layers = " --recompute=layers" if plan.is_recomputed else ""
    optimizer = "" if optimizer == OPTIMIZERS[0] else f" --optimizer={optimizer}"
    return f"{examples} {steps} --max_seq_length={tokens}{layers}{optimizer}"


def _check(flags: argparse.Namespace, config: BertConfig) -> None:
    check_counts(flags)
    if flags.max_seq_length > config.max_position_embeddings:
        raise ValueError(
            "`--max_seq_length` must be at most `max_position_embeddings` of the "
            f"encoder, {config.max_position_embeddings}. Received: "
            f"{flags.max_seq_length}. Use shorter examples."
        )
    if flags.effective_batch_size < flags.num_replicas:
        raise ValueError(
            "`--effective_batch_size` must have an example for each replica. Received: "
            f"{flags.effective_batch_size} for {flags.num_replicas}. Use a larger one."
        )


def _parser() -> OneSentenceParser:
    parser = OneSentenceParser(__doc__, prog="estimator-accum plan")
    parser.add_argument(
        "--bert_config_file", required=True, metavar="FILE", help="the encoder's JSON"
    )
    parser.add_numbers(
        ("max_seq_length", 128, "tokens of an example"),
        ("num_replicas", 1, "devices that train together"),
    )
    parser.add_argument(
        "--effective_batch_size",
        type=int,
        required=True,
        metavar="N",
        help="examples of an update, over all replicas",
    )
    parser.add_argument(
        "--device_memory",
        type=_memory,
        required=True,
        metavar="SIZE",
        help="memory of one replica's device, such as 11GB, 16GiB or 900MB",
    )
    parser.add_argument(
        "--link_speed",
        type=_speed,
        default="10Gbit/s",
        metavar="SPEED",
        help="speed of the slowest link, such as 10Gbit/s or 1.2GB/s (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        help="optimizer (default: %(default)s)",
    )
    parser.add_argument(
        "--recompute",
        choices=_WAYS,
        default="auto",
        help="recomputation of activations; auto: if it saves time or memory "
        "(default: %(default)s)",
    )
    return parser


def _memory(text: str) -> float:
    """Returns the bytes that a text such as "11GB" means."""
    match = _MEMORY.fullmatch(text.strip())
    value = _positive(match and match[1])
    if not value:
        raise argparse.ArgumentTypeError(
            f"must be a size like 11GB, 16GiB or 900MB. Received: {text!r}"
        )
    return value * {**_BYTES, **_BINARY_BYTES}[match[2].lower()]


def _speed(text: str) -> float:
    """Returns the bits per second that a text such as "10Gbit/s" means."""
    match = _SPEED.fullmatch(text.strip())
    value = _positive(match and match[1])
    if not value:
        raise argparse.ArgumentTypeError(
            f"must be a speed like 10Gbit/s, 100Mbit/s or 1.2GB/s. Received: {text!r}"
        )
    return value * _BYTES[match[2].lower()] * (8 if match[3] == "B/s" else 1)


def _positive(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:  # such as 1.2.3
        return None


if __name__ == "__main__":
    sys.exit(main())
