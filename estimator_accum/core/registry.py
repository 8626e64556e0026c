"""Windows of a graph, as hooks see them."""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.plan import Plan
from estimator_accum.core.step import Step
from estimator_accum.graph.outermost import outermost_graph

_WINDOWS_ATTRIBUTE = "_estimator_accum_windows"


class Window(NamedTuple):
    """One accumulating train op, which `get_windows` returns.

    Its attributes are those of `Plan`, of its `State`, of the `Step` and of the step's
    `Result`; all tensors are scalars. `name` is the scope of its variables. `state`,
    for hooks of a caller, is another name of `saved`.

    Attributes:
        plan: All that the micro-steps share.
        step: The tensors of a micro-step.
    """

    plan: Plan
    step: Step

    @property
    def name(self) -> str:
        return self.plan.options.name

    @property
    def state(self) -> list[tf.Variable]:
        return self.plan.state.saved

    def __getattr__(self, name: str):
        for record in (self.plan, self.plan.state, self.step, self.step.result):
            if hasattr(record, name):
                return getattr(record, name)
        raise AttributeError(f"A window has no attribute {name}.")


def get_windows() -> list[Window]:
    """Returns the accumulating train ops of the default graph, in order of creation."""
    return list(getattr(outermost_graph(), _WINDOWS_ATTRIBUTE, []))


def register(window: Window) -> None:
    """Makes `window` known to `get_windows`."""
    # An attribute, not a collection: MetaGraphs could not serialize it.
    setattr(outermost_graph(), _WINDOWS_ATTRIBUTE, [*get_windows(), window])
