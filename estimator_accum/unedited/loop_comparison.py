"""Compares K calls of session.run with one call on their joined examples.

    calls      N * K of the script's own, with accumulation
    unsplit    from the same values, N * K calls, of which K get the examples of all K:
               the mean of K equal gradients is that of the K-fold batch

Joined examples are fed, also in place of those of an input pipeline.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum import get_windows
from estimator_accum.graph.internals import RUN, replace_function
from estimator_accum.graph.names import BATCH_QUEUES, BATCHES, FED
from estimator_accum.graph.walks import ancestors, fetched_operations
from estimator_accum.unedited.comparison import (
    Values,
    random_operations,
    report,
    without_dropout,
)
from estimator_accum.unedited.session_loops import Runs

_INPUTS = {*BATCHES, "IteratorGetNextSync", "QueueDequeueV2"}


def check_instead_of_training(steps: int, updates: int) -> Callable[[], int]:
    """Makes the script's first updates by session.run print a comparison, and exit.

    Exit codes: 0 if they are equal up to rounding, 1 if not, 2 if the script is refused.

    Args:
        steps: K > 1 [session.run calls per update].
        updates: Number of updates to compare, >= 1.

    Returns:
        A function to call when the script has ended, that returns the exit code.
    """
    runs = Runs(steps)
    runs.install()
    check = _LoopCheck(runs, steps, updates)
    replace_function(RUN, check.running)
    return check.exit_code


class _Before(NamedTuple):
    """State of a script at its first call of session.run that trains.

    Attributes:
        fetches: The fetches of that call.
        inputs: Tensors of the input pipeline that it needs.
        variables: All variables by name.
        values: Their values before the call.
        added: Names of the variables that accumulation has added.
    """

    fetches: object
    inputs: list[tf.Tensor]
    variables: dict[str, tf.Variable]
    values: Values
    added: set[str]


class _LoopCheck:
    """The calls of session.run so far that train."""

    def __init__(self, runs: Runs, steps: int, updates: int):
        self._runs, self._steps, self._wanted = runs, steps, steps * updates
        self._dropout = contextlib.ExitStack()
        self._dropout.enter_context(without_dropout())
        self._before, self._fed, self._code = None, [], None

    def running(self, original: Callable) -> Callable:
        """Returns the stand-in for `BaseSession.run`."""

        def run(session, fetches, feed_dict=None, *args, **kwargs):
            graph = session.graph
            is_over = self._code is not None
            operations = () if is_over else fetched_operations(graph, fetches)
            if not self._runs.trains(operations):
                return original(session, fetches, feed_dict, *args, **kwargs)
            run_own = functools.partial(original, session)
            if self._before is None:
                self._before = _look(graph, operations, fetches, run_own)
            inputs = self._before.inputs
            wanted = [fetches, inputs]
            result, inputs_taken = run_own(wanted, feed_dict, *args, **kwargs)
            fed = {
                graph.as_graph_element(key): np.asarray(value)
                for key, value in (feed_dict or {}).items()
            }
            self._fed.append(fed | dict(zip(inputs, inputs_taken, strict=True)))
            if len(self._fed) == self._wanted:
                self._code = 1  # calls of the comparison are not looked at
                self._code = self._compare(session, run_own)
                raise SystemExit(self._code)
            return result

        return run

    def exit_code(self) -> int:
        """Returns the exit code of a script that has ended by itself."""
        self._dropout.close()
        if self._code is not None:
            return self._code
        if code := self._runs.refusal_code():
            return code
        print(
            f"no verdict: {self._wanted} calls of session.run that train were to be "
            f"compared, and the script made {len(self._fed)}"
        )
        return 1

    def _compare(self, session, run: Callable) -> int:
        """Prints the table and the verdict; returns the exit code."""
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
        before = self._before
        calls = run(before.variables)
        operations = fetched_operations(session.graph, before.fetches)
        inputs = {tensor.op for tensor in before.inputs}
        needed = ancestors(operations, lambda op: op not in inputs)
        drawn = random_operations(needed)
        try:
            windows = [
                join_calls(self._fed[i : i + self._steps])
                for i in range(0, self._wanted, self._steps)
            ]
        except ValueError as refusal:
            print(f"verdict: refused. {refusal}")
            return 2
        whole, order = (
            self._train(session, run, [window[way] for window in windows])
            for way in ("whole", "reversed")
        )
        values = [
            {
                name: value
                for name, value in variables.items()
                if name not in before.added
            }
            for variables in (before.values, whole, order, calls)
        ]
        start, whole, order, calls = values
        way = f"{self._steps} calls"
        return report(start, whole, {"order": order, way: calls}, drawn)

    def _train(self, session, run: Callable, feeds: list[dict]) -> Values:
        """Returns the values after updates with `feeds`, from those before."""
        for name, variable in self._before.variables.items():
            variable.load(self._before.values[name], session)
        for feed in feeds:
            for _ in range(self._steps):
                run(self._before.fetches, feed)
        return run(self._before.variables)


def _look(graph: tf.Graph, operations, fetches, run: Callable) -> _Before:
    inputs = [
        tensor
        for operation in ancestors(operations)
        if operation.type in _INPUTS
        for tensor in operation.outputs
    ]
    with graph.as_default():
        variables = {v.op.name: v for v in tf.compat.v1.global_variables()}
        names = {
            variable.op.name
            for window in get_windows()
            for variable in window.variables
        }
    return _Before(fetches, inputs, variables, run(variables), names)


def join_calls(calls: list[dict]) -> dict[str, dict]:
    """Returns feeds with the examples of all calls, in their order and reversed.

    Raises:
        ValueError: If they cannot be joined.
    """
    feeds = {"whole": {}, "reversed": {}}
    for tensor in calls[0]:
        values = [call[tensor] for call in calls]
        shape = tensor.shape
        can_grow = shape.rank is None or (shape.rank > 0 and shape[:1] == [None])
        is_same = all(np.array_equal(values[0], value) for value in values)
        has_rows = can_grow and all(
            np.ndim(value) and value.shape[1:] == values[0].shape[1:]
            for value in values
        )
        if not has_rows and not is_same:
            raise ValueError(
                "A tensor that a call of session.run gets must have rows, in no fixed "
                "number and of one shape, or be the same in all calls that make an "
                f"update. Received: {tensor.name} of shape {shape}. "
                f"{_remedy(tensor.op.type)}"
            )
        joined = np.concatenate(values) if has_rows else values[0]
        feeds["whole"][tensor] = joined
        feeds["reversed"][tensor] = joined[::-1] if has_rows else joined
    return feeds


def _remedy(kind: str) -> str:
    """Returns how examples from a type of operation get rows in no fixed number."""
    if kind in FED:
        return "Give its placeholder None as number of examples."
    if kind in BATCH_QUEUES:
        return (
            "Pass allow_smaller_final_batch=True to tf.train.batch, or to the function "
            "that made this queue in its place."
        )
    return "Batch with drop_remainder=False, or pad to one length."
