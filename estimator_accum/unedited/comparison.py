"""Compares an Estimator's updates on unsplit batches with those in micro-batches.

    difference = |split - whole| / |whole - start|    for each variable, Euclidean norms

The same first batches, first values and updates; dropout is off. Rounding alone moves
the weights of an optimizer that divides by the gradient's size, so it is measured: by
the unsplit batch with its examples in reverse order.
"""

import collections
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum import microbatch_model_fn, mixed_precision_config
from estimator_accum.graph.internals import (
    DROPOUT,
    batch_of,
    call_of_model_fn,
    create_global_step,
    device_fn_of,
    replace_function,
    session_config_of,
    train_of_estimator,
    warm_start_of,
)
from estimator_accum.graph.names import is_draw, moves_generator
from estimator_accum.graph.walks import ancestors, descendants
from estimator_accum.microbatch.hooks import TrainingHook
from estimator_accum.microbatch.own_optimizer.order import find_unordered
from estimator_accum.microbatch.staging import without_static_rows
from estimator_accum.unedited.estimators import NO_STEP_LEFT, note_trainings
from estimator_accum.unedited.own_loops import OwnLoops

_COUNTS = (2, 8)
_TOLERANCE = 1e-4
_ROUNDING = 10  # times what the order of the examples does
_ONLY_ROUNDING = 1e-2  # if the order does more, nothing else moves the variable
_MOST_ROWS = 12
_REPEATS = 5  # of what reads and writes without an order
# Verdicts of a variable.
_DIFFERENT, _EQUAL = "DIFFERENT", "equal"
_NOT_FINITE, _ROUNDED = "NaN or infinite in both", "only rounding moves it"

Values = dict[str, np.ndarray]


class Batches(NamedTuple):
    """First batches of an input_fn.

    Attributes:
        structure: (features, labels), or (features,), of a graph that is gone.
        arrays: For each batch its components.
    """

    structure: Any
    arrays: list[list[np.ndarray]]

    def can_be_reversed(self) -> bool:
        """Returns whether all parts are dense."""
        parts = tf.nest.flatten(self.structure)
        return all(isinstance(part, tf.Tensor) for part in parts)

    def reversed(self) -> "Batches":
        """Returns the batches with their examples in reverse order."""
        arrays = [
            [array[::-1] if array.ndim else array for array in batch]
            for batch in self.arrays
        ]
        return Batches(self.structure, arrays)

    def tensors(self) -> tuple:
        """Returns (features, labels) of the next batch, in the default graph."""

        def pack(batch):
            flat = [tf.constant(array) for array in batch]
            structure = tf.nest.map_structure(without_static_rows, self.structure)
            return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)

        sets = [tf.data.Dataset.from_tensors(pack(batch)) for batch in self.arrays]
        data = functools.reduce(lambda a, b: a.concatenate(b), sets)
        iterator = tf.compat.v1.data.make_initializable_iterator(data)
        tf.compat.v1.add_to_collection(
            tf.compat.v1.GraphKeys.TABLE_INITIALIZERS, iterator.initializer
        )
        features, *labels = iterator.get_next()
        return features, labels[0] if labels else None


def check_instead_of_training(
    updates: int, precision: str = "float32", *, is_forced: bool = False
) -> Callable[[], int]:
    """Makes the first `Estimator.train` of the process print a comparison, and exit.

    Exit codes: 0 if the updates are equal up to rounding, 1 if not, 2 if the model_fn
    is refused.

    Args:
        updates: Number of updates to compare, >= 1.
        precision: Precision whose effect on unsplit updates is printed as well.
        is_forced: As for `mixed_precision_config`.

    Returns:
        A function to call when the script has ended, that returns the exit code.
    """
    codes = []

    def refuse_own_loop() -> None:
        raise SystemExit(exit_code())

    def train(estimator, input_fn, hooks, saving_listeners):
        del hooks, saving_listeners
        loops.stop()
        try:
            config = mixed_precision_config(
                precision, session_config_of(estimator), is_forced=is_forced
            )
        except ValueError as refusal:
            print(f"verdict: refused. {refusal}")
            codes.append(2)
        else:
            codes.append(_check(estimator, input_fn, updates, precision, config))
        raise SystemExit(codes[-1])

    replace_function(train_of_estimator(), lambda _: train)
    loops, trained = OwnLoops(refuse_own_loop), note_trainings()

    def exit_code() -> int:
        if not codes and trained:
            remedy = "Give it another model_dir, or more steps."
            print(f"no verdict: {NO_STEP_LEFT}. {remedy}")
            codes.append(1)
        elif not codes:
            print(
                "no verdict: the script trained no Estimator. A loop of session.run "
                "calls takes --gradient_accumulation_steps=K."
            )
            codes.append(1)
        return codes[-1]

    return exit_code


def _check(estimator, input_fn, updates: int, precision: str, config) -> int:
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    logging.getLogger("tensorflow.estimator_accum.summary").setLevel(logging.ERROR)
    batches = _first_batches(estimator, input_fn, updates)
    sizes = [max(a.shape[0] for a in batch if a.ndim) for batch in batches.arrays]
    counts = [count for count in _COUNTS if count <= min(sizes)]
    with without_dropout():
        model_fn = functools.partial(_model_fn, estimator)
        trained = _train(estimator, model_fn, batches)
        start, whole, _, drawn, unordered = trained
        if _differs_from_itself(estimator, model_fn, batches, trained):
            return 1
        if precision != "float32":
            low = _train(estimator, model_fn, batches, start, config).values
            _print_effect(precision, start, whole, low)
        orders = {}
        if batches.can_be_reversed():
            orders["order"] = _train(
                estimator, model_fn, batches.reversed(), start
            ).values
        for count in counts:
            cut = microbatch_model_fn(model_fn, count)
            logging.getLogger("tensorflow.estimator_accum").setLevel(
                logging.WARNING if count == counts[0] else logging.ERROR
            )
            try:
                orders[f"in {count}"] = _train(estimator, cut, batches, start).values
            except ValueError as refusal:
                print(f"verdict: refused. {refusal}")
                return 2
    return report(start, whole, orders, drawn, unordered)


def _model_fn(estimator, features, labels, mode):
    call = getattr(*call_of_model_fn())
    return call(estimator, features, labels, mode, estimator.config)


def _first_batches(estimator, input_fn, number: int) -> Batches:
    with tf.Graph().as_default() as graph:
        tf.compat.v1.set_random_seed(estimator.config.tf_random_seed or 1)
        create_global_step(estimator, graph)
        features, labels, hooks = batch_of(estimator, input_fn)
        structure = (features,) if labels is None else (features, labels)
        flat = tf.nest.flatten(structure, expand_composites=True)
        arrays = []
        with tf.compat.v1.train.SingularMonitoredSession(
            hooks=hooks, config=session_config_of(estimator)
        ) as session:
            while len(arrays) < number and not session.should_stop():
                arrays.append(session.run(flat))
    return Batches(structure, arrays)


class _Trained(NamedTuple):
    """Values of all variables before and after training.

    Attributes:
        again: Values after it, when it is repeated.
        drawn: Names of operations that draw random numbers.
        unordered: Sentences on reads and writes of a variable that have no order.
    """

    start: Values
    values: Values
    again: list[Values]
    drawn: list[str]
    unordered: list[str]


def _train(
    estimator,
    model_fn: Callable,
    batches: Batches,
    start: Values | None = None,
    config: tf.compat.v1.ConfigProto | None = None,
    repeats: int = 0,
) -> _Trained:
    """Trains on `batches`, from the values `start`, in a session of `config`.

    None takes the model's own values, and the Estimator's own config.
    """
    trained = []
    with tf.Graph().as_default() as graph, graph.device(device_fn_of(estimator)):
        tf.compat.v1.set_random_seed(estimator.config.tf_random_seed or 1)
        create_global_step(estimator, graph)
        features, labels = batches.tensors()
        mode = tf.estimator.ModeKeys.TRAIN
        spec = model_fn(features=features, labels=labels, mode=mode)
        if warm_start := warm_start_of(estimator):
            tf.compat.v1.train.warm_start(*warm_start)
        hooks = [h for h in spec.training_hooks if isinstance(h, TrainingHook)]
        variables = {v.op.name: v for v in tf.compat.v1.global_variables()}
        drawn = random_operations(ancestors([spec.loss.op]))
        unordered = _without_order(spec.train_op, tf.nest.flatten((features, labels)))
        for _ in range(1 + repeats):
            with tf.compat.v1.train.SingularMonitoredSession(
                hooks=hooks,
                scaffold=spec.scaffold,
                config=config or session_config_of(estimator),
            ) as session:
                raw = session.raw_session()
                if start is None:
                    start = raw.run(variables)
                for name, value in start.items():
                    variables[name].load(value, raw)
                for _ in batches.arrays:
                    session.run([spec.train_op, spec.loss])  # as Estimator does
                trained.append(raw.run(variables))
        return _Trained(start, trained[0], trained[1:], drawn, unordered)


def random_operations(operations: Iterable[tf.Operation]) -> list[str]:
    """Returns the names of those of the operations that draw random numbers."""
    draws = [op for op in operations if is_draw(op) or moves_generator(op.type)]
    return sorted(operation.name for operation in draws)


def _without_order(train_op, batch: list) -> list[str]:
    """Returns sentences on reads and writes of one variable that any run may exchange."""
    needed = ancestors([getattr(train_op, "op", train_op)])
    tensors = [part for part in batch if isinstance(part, tf.Tensor)]
    late = descendants(tensors)  # the forward pass takes longer than all else
    return [
        f"{variable.name} is read by {readers[0].name} and written by {writer.name} in "
        "one session.run, in no order."
        for variable, writer, readers in find_unordered(
            needed, needed.keys() - late, late
        )
    ]


def _differs_from_itself(
    estimator, model_fn: Callable, batches: Batches, trained: _Trained
) -> bool:
    """Prints a verdict and returns True if training again gives other values."""
    start, whole, _, _, unordered = trained
    repeats = _REPEATS if unordered else 0
    again = _train(estimator, model_fn, batches, start, repeats=repeats)
    names = {
        name
        for values in (again.values, *again.again)
        for name, value in values.items()
        if value.dtype != object
        and _compared(start[name], whole[name], {"again": value})[2] == _DIFFERENT
    }
    if names:
        print(
            "verdict: undecided. The script is not deterministic: two runs on unsplit "
            f"batches, from the same values, differ in {len(names)} of {len(whole)} "
            f"variables, such as {min(names)}."
        )
        _print_without_order(unordered)
    return bool(names)


def _print_without_order(unordered: list[str]) -> None:
    for sentence in unordered[:3]:
        print(f"  {sentence} Have the write wait by tf.control_dependencies.")


@contextlib.contextmanager
def without_dropout() -> Iterator[None]:
    """Turns dropout off in graphs that are made inside."""
    original = replace_function(
        DROPOUT, lambda _: lambda x, *args, **kwargs: tf.convert_to_tensor(x)
    )
    try:
        yield
    finally:
        setattr(*DROPOUT, original)


def _print_effect(precision: str, start: Values, whole: Values, low: Values) -> None:
    differences = {
        name: _compared(start[name], whole[name], {precision: value})[1][precision]
        for name, value in low.items()
        if value.dtype.kind == "f"
    }
    name = max(differences, key=differences.get)
    print(
        f"--precision={precision} changes the updates by a median of "
        f"{np.median([*differences.values()]):.0e}, most in {name}: "
        f"{differences[name]:.0e}"
    )


def report(
    start: Values,
    whole: Values,
    orders: dict[str, Values],
    drawn: list[str],
    unordered: list[str] = (),
) -> int:
    """Prints the table and the verdict; returns the exit code."""
    rows = [
        (
            *_compared(start[name], value, {way: v[name] for way, v in orders.items()}),
            name,
        )
        for name, value in whole.items()
        if value.dtype != object  # strings
    ]
    rows.sort(key=lambda row: (row[0], row[-1]), reverse=True)
    _print_table(rows, list(orders))
    return _print_verdict([verdict for _, _, verdict, _ in rows], drawn, unordered)


def _print_table(rows: list, orders: list[str]) -> None:
    """Prints the variables with the largest differences.

    Args:
        rows: For each variable the values of `_compared`, and its name.
        orders: Names of the columns.
    """
    width = max([len("variable"), *(len(row[-1]) for row in rows[:_MOST_ROWS])])
    print(
        "  ".join(["variable".ljust(width), *(o.rjust(7) for o in orders), "verdict"])
    )
    for _, differences, verdict, name in rows[:_MOST_ROWS]:
        numbers = [f"{value:7.0e}" for value in differences.values()]
        print("  ".join([name.ljust(width), *numbers, verdict]))
    if len(rows) > _MOST_ROWS:
        print(f"... and {len(rows) - _MOST_ROWS} variables with smaller differences")


def _print_verdict(words: list[str], drawn: list[str], unordered: list[str]) -> int:
    """Prints the verdict on all variables; returns the exit code."""
    verdicts = collections.Counter(words)
    number = verdicts[_DIFFERENT]
    if drawn and (number or verdicts[_ROUNDED]):
        print(
            f"verdict: undecided, for random numbers differ: {', '.join(drawn[:3])}. "
            "Turn them off by the script's flags."
        )
        return 1
    if number and unordered:
        print(
            f"verdict: undecided, for {number} of {len(words)} variables differ, and the "
            "script leaves open an order: in micro-batches, reads come first."
        )
        _print_without_order(unordered)
        return 1
    if number == 0 and verdicts[_NOT_FINITE]:
        print(
            f"verdict: undecided, for {verdicts[_NOT_FINITE]} of {len(words)} variables "
            "are NaN or infinite in the unsplit batch too. Choose other first batches."
        )
        return 1
    if number == 0:
        print(f"verdict: equal up to rounding, all {len(words)} variables")
        return 0
    print(
        f"verdict: different, {number} of {len(words)} variables. An update with "
        "micro-batches is not that of the unsplit batch: look for batch normalization, "
        "a loss that compares examples, or a loss that is not the mean over examples."
    )
    return 1


def _compared(
    start: np.ndarray, whole: np.ndarray, values: dict[str, np.ndarray]
) -> tuple[float, dict[str, float], str]:
    """Returns the values to compare of one variable.

    Args:
        start: Its value before the updates.
        whole: Its value after those with the unsplit batch.
        values: Its values after others, by their columns.

    Returns:
        (difference in units of the tolerance, difference in each column, verdict).
    """
    wide = np.complex128 if whole.dtype.kind == "c" else np.float64
    cut = [value for way, value in values.items() if way != "order"]
    moved = np.linalg.norm(np.ravel(whole.astype(wide) - start.astype(wide)))
    if moved == 0:
        moved = max(np.linalg.norm(np.ravel(whole.astype(wide))), 1.0)
    differences = {
        way: np.linalg.norm(np.ravel(value.astype(wide) - whole.astype(wide))) / moved
        for way, value in values.items()
    }
    bad = [~np.isfinite(value.astype(wide)) for value in (whole, *cut)]
    if np.any(bad):
        is_same = all(np.array_equal(bad[0], places) for places in bad)
        return math.inf, differences, _NOT_FINITE if is_same else _DIFFERENT
    if whole.dtype.kind in "biu":  # counts are exact
        is_equal = all(np.array_equal(whole, value) for value in cut)
        return (
            (0.0, differences, _EQUAL)
            if is_equal
            else (math.inf, differences, _DIFFERENT)
        )
    order = differences.get("order", 0.0)
    largest = max((d for way, d in differences.items() if way != "order"), default=0.0)
    excess = largest / max(_TOLERANCE, _ROUNDING * order)
    if order > _ONLY_ROUNDING:
        return 0.0, differences, _ROUNDED
    return excess, differences, _DIFFERENT if excess > 1 else _EQUAL
