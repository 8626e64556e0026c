"""The update that applies a partial window: a boundary without a micro-batch.

Whether one is applied or kept is for `_accumulation.py`.

If `is_boundary` is fed, only the branch that updates runs. But its inputs may wait for
a micro-batch, and there is none left: for example a learning rate that is made inside
`tf.control_dependencies(update_ops)`, or that depends on the batch's size. Such inputs
are fed with their values from the last micro-step of the window.
"""

import re

import tensorflow as tf

from estimator_accum.core.registry import Window
from estimator_accum.graph.names import TAKING_A_BATCH
from estimator_accum.graph.walks import ancestors, walk

# Operations that take values from outside of the graph.
_SOURCES = re.compile(f"{TAKING_A_BATCH.pattern}|Placeholder(V2)?$|.*PyFunc")


class PartialUpdate:
    """Applies a partial window.

    Args:
        window: The train op's window.
        scalars: Scalars to report, by name.

    Attributes:
        needed: Tensors that a session must fetch with every micro-step, for `remember`.
    """

    def __init__(self, window: Window, scalars: dict[str, tf.Tensor]):
        self._window = window
        self._scalars = dict(scalars)
        self.needed, needs_more = _needed_of(window, [*self._scalars.values()])
        if needs_more:  # e.g. a reported learning rate that the update does not use
            for name, scalar in scalars.items():
                if _needed_of(window, [scalar])[1]:
                    del self._scalars[name]
        self._fetched = as_vector(self._scalars)
        self._known = None

    def remember(self, values: list) -> None:
        """Stores the values that `needed` had in a micro-step."""
        self._known = values

    def run(self, session: tf.compat.v1.Session) -> dict | None:
        """Applies the window; returns the scalars' values by name.

        Returns None if it cannot: the update needs values of a micro-step, and this
        session has run no micro-step or cannot be fed with the values.
        """
        if self.needed and self._known is None or "has_updated" not in self._scalars:
            return None
        feeds = dict(zip(self.needed, self._known or (), strict=True))
        values = session.run(self._fetched, {self._window.is_boundary: True, **feeds})
        return dict(zip(self._scalars, values, strict=True))


def as_vector(scalars: dict[str, tf.Tensor]) -> tf.Tensor:
    """Returns the scalars in one tensor: each fetch costs a small model 2% of its time.

    Returns:
        float64 [scalars], exact for counters below 2**53.
    """
    return tf.stack([tf.cast(value, tf.float64) for value in scalars.values()])


def _needed_of(window: Window, fetched: list) -> tuple[list[tf.Tensor], bool]:
    """Returns (inputs of the branch to feed, whether `fetched` still waits)."""
    operations = ancestors([tensor.op for tensor in fetched])
    waiting = _waiting_for_a_micro_batch(window, operations, [])
    entering = {}
    for operation in operations:
        for tensor in _enters_the_branch(window, operation):
            if tensor.op in waiting:
                entering[tensor.name] = tensor
    graph = tf.compat.v1.get_default_graph()
    needed = [tensor for tensor in entering.values() if graph.is_feedable(tensor)]
    waiting = _waiting_for_a_micro_batch(window, operations, needed)
    return needed, any(tensor.op in waiting for tensor in fetched)


def _enters_the_branch(window: Window, operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the inputs of `operation` if it is part of the boundary's tf.cond."""
    if operation.type in ("If", "StatelessIf"):
        predicate, *taken = operation.inputs
    elif operation.type in ("Switch", "RefSwitch"):  # control flow v1
        *taken, predicate = operation.inputs
        if predicate.op.type == "Identity":
            predicate = predicate.op.inputs[0]
    else:
        return []
    if predicate is not window.is_boundary:
        return []
    return [tensor for tensor in taken if tensor is not predicate]


def _waiting_for_a_micro_batch(window: Window, operations, fed: list[tf.Tensor]) -> set:
    """Returns those operations that need a micro-batch even if `fed` is fed."""
    names = {tensor.name for tensor in (*fed, window.is_boundary)}
    users = {}
    for operation in operations:
        needed = [tensor.op for tensor in operation.inputs if tensor.name not in names]
        for other in (*needed, *operation.control_inputs):
            users.setdefault(other, []).append(operation)
    sources = [op for op in operations if _SOURCES.match(op.type)]
    return set(walk(sources, lambda operation: users.get(operation, ())))
