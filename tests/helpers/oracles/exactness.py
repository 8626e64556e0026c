"""Compares the updates of an unedited model_fn on cut batches with those at once.

    difference = max |cut - whole| / max |whole - start|    for each variable

or one rounding of the variable in each update, where it changed by little.
Both start with the same values. The batch at once is the plain graph that an Estimator
makes of the model_fn; no files are written.
"""

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum import microbatch_model_fn
from estimator_accum.microbatch.own_optimizer.activations import SHARE
from tests.helpers.models.interception import AS_IT_IS

v1 = tf.compat.v1
TRAIN = tf.estimator.ModeKeys.TRAIN
MICRO_BATCHES = 4
UPDATES = 2
# Largest differences, by rounding alone.
DOUBLE, SINGLE = 1e-9, 2e-5
EQUAL = 1e-300  # no difference at all
# A variable whose own gradient cancels to nothing may change by rounding.
_CANCELS = 1e-4


class Refused(ValueError):
    """A model_fn cannot be cut: said before an update, with an operation's name."""


class Trained(NamedTuple):
    """Values, losses and names of one training.

    Attributes:
        start: First values of all variables by name.
        values: Last values of all variables by name.
        losses: `EstimatorSpec.loss` of each update.
        trainable: Names of the trained variables.
    """

    start: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    losses: list[np.ndarray]
    trainable: list[str]

    def changes(self) -> dict[str, float]:
        """Returns the largest change of each floating-point variable."""
        return {
            name: _largest(value, self.start[name])
            for name, value in self.values.items()
            if _is_float(value)
        }


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
        Refused: If it raises ValueError.
    """
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(7)
        random.seed(7)  # from which Keras's initializers take their seeds
        v1.train.get_or_create_global_step()
        features, labels = v1.data.make_one_shot_iterator(input_fn()).get_next()
        try:
            spec = model_fn(features, labels, mode=TRAIN)
            with _session(spec) as (session, raw):
                variables = {v.op.name: v for v in _variables()}
                _assign(raw, variables, start or {})
                start, losses = raw.run(variables), []
                try:
                    for _ in range(updates):
                        losses.append(session.run([spec.train_op, spec.loss])[1])
                except ValueError:
                    np.testing.assert_equal(raw.run(variables), start)
                    raise
                trainable = [v.op.name for v in v1.trainable_variables()]
                return Trained(start, raw.run(variables), losses, trainable)
        except ValueError as refusal:
            _assert_names_an_operation(str(refusal), graph)
            raise Refused(str(refusal)) from refusal


def assert_exact(
    model_fn: Callable,
    input_fn: Callable,
    micro_batches: int | tuple[int, ...] = MICRO_BATCHES,
    tolerance: float | None = None,
    updates: int = UPDATES,
    but: tuple[str, ...] = (),
) -> float:
    """Asserts that cut batches train as the batches at once do.

    Args:
        model_fn: Function of features, labels and mode, with an optimizer of its own.
        input_fn: Returns a dataset of batches.
        micro_batches: Number of micro-batches per batch, or several such numbers.
        tolerance: Largest difference of a variable or loss; None is `DOUBLE` or
            `SINGLE`, by its type.
        updates: Number of batches.
        but: Ends of the names of variables that are not compared.

    Returns:
        The largest share of the activations that is computed on the whole batch
        [percent].
    """
    whole, shares = None, _Shares()
    for number in [micro_batches] if isinstance(micro_batches, int) else micro_batches:
        cut_model_fn = microbatch_model_fn(model_fn, number)
        with shares.noted():
            cut = train(cut_model_fn, input_fn, updates, whole and whole.start)
        if whole is None:  # what is refused needs no other training
            whole = assert_trains(train(model_fn, input_fn, updates, cut.start))
        _assert_equal(cut, whole, tolerance, updates, but)
    return max(shares.received, default=0.0)


class _Shares(logging.Handler):
    """Notes the shares of activations that are logged.

    Attributes:
        received: The shares [percent].
    """

    def __init__(self):
        super().__init__("DEBUG")
        self.received = []

    def emit(self, record):
        if record.msg == SHARE:
            self.received += record.args

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        logger = logging.getLogger("tensorflow.estimator_accum")
        level = logger.level
        logger.setLevel("DEBUG")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
            logger.setLevel(level)


def _assert_equal(
    cut: Trained, whole: Trained, tolerance: float | None, updates: int, but
) -> None:
    changes = whole.changes()
    floor = _CANCELS * max(changes[name] for name in whole.trainable)
    for name, value in whole.values.items():
        if name.endswith(but or "/"):
            continue
        if name not in changes:  # counters, flags
            np.testing.assert_array_equal(cut.values[name], value, name)
            continue
        largest = (tolerance or _tolerance(value)) * max(changes[name], floor)
        last_place = np.spacing(np.max(np.abs(value), initial=0))
        largest = max(largest, updates * last_place)  # a rounding in each update
        difference = _largest(cut.values[name], value)
        assert difference <= largest, f"{name}: {difference:.1e} > {largest:.1e}"
    largest = tolerance or _tolerance(whole.losses[0])
    np.testing.assert_allclose(cut.losses, whole.losses, largest, largest)


def assert_exact_or_refused(model_fn: Callable, input_fn: Callable, **options) -> bool:
    """Asserts that a model_fn is refused unless cut batches train as whole ones.

    Returns:
        Whether it was trained.
    """
    try:
        assert_exact(model_fn, input_fn, **options)
    except Refused:
        return False
    return True


def assert_trains(trained: Trained) -> Trained:
    """Asserts that a training changes variables, and to finite values."""
    changes = trained.changes()
    assert all(np.isfinite(change) for change in changes.values()), changes
    assert max(changes[name] for name in trained.trainable) > 1e-6, changes
    return trained


@contextlib.contextmanager
def _session(spec) -> Iterator[tuple]:
    """Starts a session with the hooks of a spec; yields it, and the one beneath.

    A graph without hooks needs neither them nor the graph optimizer: it is the faster
    one that others are compared to.
    """
    if spec.training_hooks:
        hooks, kind = [*spec.training_hooks], v1.train.SingularMonitoredSession
        with kind(hooks, spec.scaffold) as session:
            yield session, session.raw_session()
        return
    with v1.Session(config=AS_IT_IS) as session:
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        session.run(v1.local_variables_initializer())
        yield session, session


def _variables() -> list[tf.Variable]:
    return [*v1.global_variables(), *v1.local_variables()]


def _assign(session, variables: dict, values: dict[str, np.ndarray]) -> None:
    """Sets variables, in place of their first values."""
    assigned = [variables[name] for name in values if name in variables]
    feeds = {v.initializer.inputs[1]: values[v.op.name] for v in assigned}
    session.run([v.initializer for v in assigned], feeds)


def _is_float(value: np.ndarray) -> bool:
    return np.issubdtype(value.dtype, np.floating) or value.dtype == "bfloat16"


def _tolerance(value: np.ndarray) -> float:
    return DOUBLE if value.dtype == np.float64 else SINGLE


def _largest(value: np.ndarray, other: np.ndarray) -> float:
    """Returns the largest difference of two arrays; NaN where only one is."""
    difference = value.astype(np.float64) - other.astype(np.float64)
    return float(np.max(np.abs(difference), initial=0))


def _assert_names_an_operation(message: str, graph: tf.Graph) -> None:
    assert "\n" not in message, message
    words = {word.strip("'\"`.,:;()[]").split(":")[0] for word in message.split()}
    assert words & {op.name for op in graph.get_operations()}, message
