"""Calls of session.run that train, in a script that should train by an Estimator.

Such a call writes a trainable variable, from gradients that the script has computed.
"""

import weakref
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.graph.internals import (
    INIT_OF_FETCHES,
    original_of,
    replace_function,
)
from estimator_accum.graph.walks import ancestors, descendants
from estimator_accum.graph.writers import writers_of


def watch_fetches(look: Callable[[tf.Graph, list[tf.Operation]], None]) -> None:
    """Calls `look` with the graph and the fetches, before every run from now on."""

    def looking(original: Callable) -> Callable:
        def init(self, graph, *args, **kwargs):
            original(self, graph, *args, **kwargs)
            look(graph, [*(tensor.op for tensor in self.fetches()), *self.targets()])

        return init

    replace_function(INIT_OF_FETCHES, looking)


class OwnLoops:
    """Watches all sessions of the process from now on.

    Args:
        on_training: Called before the first call of session.run that trains.
    """

    def __init__(self, on_training: Callable[[], None]):
        self._on_training = on_training
        self._seen = weakref.WeakKeyDictionary()  # names of fetches, by graph
        self._ignored = weakref.WeakSet()
        watch_fetches(self._look)

    def ignore(self, graph: tf.Graph) -> None:
        """Takes a graph for that of an Estimator."""
        self._ignored.add(graph)

    def stop(self) -> None:
        """Lets all sessions train from now on."""
        self._on_training = lambda: None

    def _look(self, graph: tf.Graph, fetched: list[tf.Operation]) -> None:
        key = tuple(operation.name for operation in fetched)
        seen = self._seen.setdefault(graph, set())
        if graph in self._ignored or key in seen:
            return
        seen.add(key)
        if _trains(graph, fetched):
            self._ignored.add(graph)
            self._on_training()


def _trains(graph: tf.Graph, fetched: list[tf.Operation]) -> bool:
    needed = ancestors(fetched)
    derived = [operation for operation in needed if original_of(operation) is not None]
    if not derived:
        return False  # without a walk over the graph
    later = descendants(derived)
    with graph.as_default():
        trained = {v.op.name for v in tf.compat.v1.trainable_variables()}
    return any(
        variable.name in trained and not later.isdisjoint(writers)
        for variable, writers in writers_of(needed).items()
    )
