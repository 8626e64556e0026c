"""Windows of a graph, as hooks see them."""

import operator
from typing import NamedTuple

from estimator_accum.core.plan import Plan
from estimator_accum.core.step import Step
from estimator_accum.graph.outermost import outermost_graph

_WINDOWS_ATTRIBUTE = "_estimator_accum_windows"


def _of(path: str) -> property:
    return property(operator.attrgetter(path))


class Window(NamedTuple):
    """One accumulating train op, which `get_windows` returns.

    Its attributes are those of `Plan`, of its `State`, of the `Step` and of the step's
    `Result`; all tensors are scalars.

    Attributes:
        plan: All that the micro-steps share.
        step: The tensors of a micro-step.
    """

    plan: Plan
    step: Step

    options = _of("plan.options")
    name = _of("plan.options.name")
    clock = _of("plan.clock")
    names = _of("plan.names")
    num_replicas = _of("plan.num_replicas")
    divisor = _of("plan.divisor")
    stop_request = _of("plan.stop_request")
    has_several_micro_steps = _of("plan.has_several_micro_steps")

    accumulators = _of("plan.state.accumulators")
    sums = _of("plan.state.sums")
    all_accumulators = _of("plan.state.all_accumulators")
    micro_steps = _of("plan.state.micro_steps")
    update_step = _of("plan.state.update_step")
    global_step = _of("plan.state.global_step")
    clipped_updates = _of("plan.state.clipped_updates")
    noise = _of("plan.state.noise")
    state = _of("plan.state.saved")
    statistics = _of("plan.state.statistics")

    is_boundary = _of("step.is_boundary")
    mean_loss = _of("step.mean_loss")
    micro_steps_after = _of("step.micro_steps_after")
    gradient_accumulation_steps = _of("step.gradient_accumulation_steps")
    clipped_share = _of("step.clipped_share")
    update_step_after = _of("step.update_step_after")
    of_partial = _of("step.of_partial")
    global_step_after = _of("step.global_step_after")
    result = _of("step.result")
    has_updated = _of("step.result.has_updated")
    loss = _of("step.result.loss")
    gradient_norm = _of("step.result.gradient_norm")
    weight = _of("step.result.weight")
    noise_scale = _of("step.result.noise_scale")
    stop_requests = _of("step.result.stop_requests")


def get_windows() -> list[Window]:
    """Returns the accumulating train ops of the default graph, in order of creation."""
    return list(getattr(outermost_graph(), _WINDOWS_ATTRIBUTE, []))


def register(window: Window) -> None:
    """Makes `window` known to `get_windows`."""
    # An attribute, not a collection: MetaGraphs could not serialize it.
    setattr(outermost_graph(), _WINDOWS_ATTRIBUTE, [*get_windows(), window])
