"""Compares the updates of an unedited model_fn: batches at once, and cut.

    difference = max |cut - whole| / max |whole - start|    for each variable

Both start with the same values. The batch at once is the plain graph that an Estimator
makes of the model_fn; no files are written.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum import microbatch_model_fn

v1 = tf.compat.v1
TRAIN = tf.estimator.ModeKeys.TRAIN
MICRO_BATCHES = 4
UPDATES = 2
# Rounding of a float64, and of a variable whose gradient cancels to nothing.
STRICT = 1e-9
_CANCELS = 1e-4


class Trained(NamedTuple):
    """What a training did.

    Attributes:
        start: First values of all variables by name.
        values: Last values of all variables by name.
        losses: `EstimatorSpec.loss` of each update.
    """

    start: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    losses: list[np.ndarray]


def train(
    model_fn: Callable,
    input_fn: Callable,
    updates: int = UPDATES,
    start: dict[str, np.ndarray] | None = None,
) -> Trained:
    """Trains as an Estimator does, without its files.

    Args:
        model_fn: Function of features, labels and mode.
        input_fn: Returns a dataset of batches.
        updates: Number of batches.
        start: First values of the variables by name; None are the model's own.

    Raises:
        ValueError: If the model_fn is refused. Its message is one line that names an
            operation of the graph, and no variable has changed.
    """
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(7)
        v1.train.get_or_create_global_step()
        features, labels = v1.data.make_one_shot_iterator(input_fn()).get_next()
        try:
            spec = model_fn(features, labels, mode=TRAIN)
            hooks = [*spec.training_hooks]
            with v1.train.SingularMonitoredSession(hooks, spec.scaffold) as session:
                variables = {v.op.name: v for v in _variables()}
                raw = session.raw_session()
                _assign(raw, variables, start or {})
                start, losses = raw.run(variables), []
                try:
                    for _ in range(updates):
                        losses.append(session.run([spec.train_op, spec.loss])[1])
                except ValueError:
                    np.testing.assert_equal(raw.run(variables), start)
                    raise
                return Trained(start, raw.run(variables), losses)
        except ValueError as refusal:
            _assert_names_an_operation(str(refusal), graph)
            raise


def assert_exact(
    model_fn: Callable,
    input_fn: Callable,
    micro_batches: int = MICRO_BATCHES,
    tolerance: float = STRICT,
    updates: int = UPDATES,
    but: tuple[str, ...] = (),
) -> None:
    """Asserts that cut batches train as the batches at once do.

    Args:
        model_fn: Function of features, labels and mode, with an optimizer of its own.
        input_fn: Returns a dataset of batches.
        micro_batches: Number of micro-batches per batch.
        tolerance: Largest permitted difference of a variable or loss.
        updates: Number of batches.
        but: Ends of the names of variables that are not compared.
    """
    whole = train(model_fn, input_fn, updates)
    changed = assert_trains(whole)
    cut = train(
        microbatch_model_fn(model_fn, micro_batches), input_fn, updates, whole.start
    )
    largest = max(changed.values())
    for name, value in whole.values.items():
        if name.endswith(but):
            continue
        received = cut.values[name]
        if name not in changed:  # counters, flags
            np.testing.assert_array_equal(received, value, name)
            continue
        scale = max(changed[name], _CANCELS * largest)
        difference = np.max(np.abs(_wide(received) - _wide(value)), initial=0) / scale
        assert difference <= tolerance, f"{name}: {difference:.1e}"
    np.testing.assert_allclose(cut.losses, whole.losses, tolerance, tolerance)


def assert_refused(
    model_fn: Callable, input_fn: Callable, micro_batches: int = MICRO_BATCHES
) -> None:
    """Asserts that a model_fn, which trains with batches at once, cannot be cut."""
    whole = train(model_fn, input_fn)
    assert_trains(whole)
    try:
        train(microbatch_model_fn(model_fn, micro_batches), input_fn)
    except ValueError:
        return
    raise AssertionError("Cut batches must be refused. Received: a training.")


def assert_exact_or_refused(model_fn: Callable, input_fn: Callable, **options) -> bool:
    """Asserts that a model_fn is refused unless cut batches train as whole ones.

    Returns:
        Whether it was trained.
    """
    assert_trains(train(model_fn, input_fn))
    try:
        assert_exact(model_fn, input_fn, **options)
    except ValueError:
        return False
    return True


def assert_trains(trained: Trained) -> dict[str, float]:
    """Returns the largest change of each floating-point variable."""
    changes = {
        name: np.max(np.abs(_wide(value) - _wide(trained.start[name])), initial=0)
        for name, value in trained.values.items()
        if _is_float(value)
    }
    assert all(np.isfinite(change) for change in changes.values()), changes
    assert max(changes.values()) > 1e-6, changes
    return changes


def _variables() -> list[tf.Variable]:
    return [*v1.global_variables(), *v1.local_variables()]


def _assign(session, variables: dict, values: dict[str, np.ndarray]) -> None:
    """Sets variables, in place of their first values."""
    known = [variables[name] for name in values if name in variables]
    feeds = {v.initializer.inputs[1]: values[v.op.name] for v in known}
    session.run([v.initializer for v in known], feeds)


def _is_float(value: np.ndarray) -> bool:
    return np.issubdtype(value.dtype, np.floating) or value.dtype == "bfloat16"


def _wide(value: np.ndarray) -> np.ndarray:
    return value.astype(np.float64)


def _assert_names_an_operation(message: str, graph: tf.Graph) -> None:
    assert "\n" not in message, message
    words = {word.strip("'\"`.,:;()[]").split(":")[0] for word in message.split()}
    assert words & {op.name for op in graph.get_operations()}, message
