"""Memory that a run's accumulation saved, computed by the planner."""

from bert_finetune.bert_config import BertConfig
from bert_finetune.plan import USABLE_SHARE, relative_time
from bert_finetune.plan_memory import Memory, megabytes, memory_of
from estimator_accum.programs.batches import Batches


def saving_text(
    config: BertConfig,
    batches: Batches,
    tokens: int,
    device_memory: int | None,
    *,
    is_recomputed: bool,
    optimizer: str,
) -> str | None:
    """Returns the effect of K micro-batches against one; None for K = 1.

    Args:
        config: Sizes and dropout of the encoder.
        batches: Division of an update.
        tokens: Tokens of the longest example.
        device_memory: Memory of one replica's device [bytes]; None if unknown.
        is_recomputed: Whether the layers' activations are recomputed.
        optimizer: Optimizer, as in `memory_of`.
    """
    steps = batches.gradient_accumulation_steps
    if steps == 1:
        return None

    def memory(examples: int, is_accumulating: bool) -> Memory:
        return memory_of(
            config,
            examples,
            tokens,
            is_accumulating=is_accumulating,
            is_recomputed=is_recomputed,
            optimizer=optimizer,
        )

    whole = Batches(batches.effective_batch_size, 1, batches.num_replicas)
    ours = memory(batches.largest_share, True).peak
    unsplit = memory(whole.largest_share, False).peak
    time = relative_time(batches, tokens, is_recomputed)
    cost = time / relative_time(whole, tokens, is_recomputed) - 1
    change = "saved" if ours <= unsplit else "cost"
    text = (
        f"By estimator-accum plan, K = {steps} {change} "
        f"{megabytes(abs(unsplit - ours))} of memory ({megabytes(ours)}, unsplit "
        f"{megabytes(unsplit)}) and cost {cost:.0%} of time."
    )
    if device_memory is not None and unsplit <= USABLE_SHARE * device_memory:
        text += f"\nK = 1 fits in the {megabytes(device_memory)} of this device, and is faster."
    return text
