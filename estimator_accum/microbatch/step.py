"""`microbatch_step`: any training step of TensorFlow 2 in micro-batches.

    batch -> | micro-batches: forward, backward | -> gradients -> | the rest of the step

The step is traced once for each signature, on a micro-batch. Its graph is divided as that
of a model_fn with an optimizer of its own, and its parts run as functions.

N = number of examples in the batch.
"""

import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.core.arguments import check_count
from estimator_accum.graph.functions import numbers_behind
from estimator_accum.graph.internals import is_composite, run_all_in_branches
from estimator_accum.graph.replicas import distributed
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.count import MicroBatchCount
from estimator_accum.microbatch.executors import Feeding, Functions
from estimator_accum.microbatch.own_optimizer.patches import intercepting
from estimator_accum.microbatch.own_optimizer.steps import StepPhase, build_step
from estimator_accum.microbatch.runner import BatchRunner, names_of
from estimator_accum.microbatch.staging import (
    UNUSED,
    destroy_unused_slots,
    named_leaves,
    slots_of,
    without_static_rows,
)
from estimator_accum.microbatch.work import Turn
from estimator_accum.seed import number_batches

_TENSORS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)
_ARRAYS = (np.ndarray, np.generic)
_logger = logging.getLogger("tensorflow.estimator_accum")


def microbatch_step(step: Callable, micro_batches: int | str = "auto") -> Callable:
    """Returns a training step that runs each batch as several micro-batches.

        train_step = microbatch_step(train_step)
        for x, y in data_set:
            loss = train_step(x, y)

    `step` takes a batch, computes gradients with tf.GradientTape or tf.gradients, and
    does with them as it likes: clips them, averages, changes variables. It sees one
    micro-batch at a time, and gets the gradients of the whole batch, for any loss.
    Operations that need a micro-batch run once for each; all others once per batch, with
    values of the whole batch, such as metrics. Results are those of the whole batch. A
    gradient that reads what an earlier update of the step has changed gets passes of its
    own.

    A step for several replicas calls `strategy.run` inside, and takes their batches as
    a distributed data set has them.

    Args:
        step: Function of a batch, with or without tf.function: tensors, sparse and ragged
            tensors of N examples along their first axis, in any structure of arguments.
            Scalars and values that are no tensors are the same for all micro-batches.
        micro_batches: Number of micro-batches of a batch, >= 1; a batch with fewer
            examples has one for each. 1 is a tf.function of `step`. "auto": 1, doubled
            after each out-of-memory error until the batch fits.

    Returns:
        A function with the arguments and results of `step`, traced once for each
        signature, as by tf.function.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `micro_batches` < 1. From a call: if the step uses a micro-batch in
            a way that several cannot replace, or one example does not fit in memory.
    """
    if not callable(step):
        raise TypeError(
            "`step` must be a function of a batch. Received: "
            f"{step!r}. Pass the function that computes gradients and applies them."
        )
    is_auto = isinstance(micro_batches, str) and micro_batches == "auto"
    remedy = "Use 1 to cut no batch."
    check_count("micro_batches", 1 if is_auto else micro_batches, remedy, " or 'auto'")
    return Step(step, MicroBatchCount(None if is_auto else int(micro_batches)))


class Step:
    """A step in micro-batches.

    Args:
        step: The step.
        count: The number of micro-batches.
    """

    def __init__(self, step: Callable, count: MicroBatchCount):
        self._step = getattr(step, "python_function", step)  # of a tf.function
        self._whole = tf.function(self._step)
        self._converted = _converted(self._step)
        self._count = count
        self._traces, self._number = {}, 1  # of the next batch
        self._lock = threading.Lock()  # a batch's slots hold one batch
        functools.update_wrapper(self, self._step, updated=())

    def __call__(self, *args, **kwargs):
        """Runs a batch; see `microbatch_step`."""
        if self._count.is_fixed and self._count.value == 1:
            return self._whole(*args, **kwargs)
        if not tf.executing_eagerly():
            raise RuntimeError(
                "A step in micro-batches must be called outside of tf.function: it runs "
                "several functions for each batch. Received: a call while another "
                "function is traced. Leave out the tf.function around the call."
            )
        with self._lock:
            return self._run(args, kwargs)

    def _run(self, args: tuple, kwargs: dict):
        batch = _bind(self._step, args, kwargs)
        destroy_unused_slots()
        if batch.key not in self._traces:
            numbers = self._trace_whole(args, kwargs)
            trace = _Trace(self._converted, batch, self._count, numbers)
            self._traces[batch.key] = trace
        number, self._number = self._number, self._number + 1
        return self._traces[batch.key].run(batch.values, number)

    def _trace_whole(self, args: tuple, kwargs: dict) -> set:
        """Traces the step for a whole batch; returns the numbers of its forward passes.

        That makes its variables, as each first call does, and finds errors of its own.
        """
        numbers = set()

        def note(request):
            numbers.update(numbers_behind(request.tops))
            return request.plain()

        def whole(*args, **kwargs):
            with intercepting(note, tf.compat.v1.get_default_graph()):
                return self._converted(*args, **kwargs)

        tf.function(whole, autograph=False).get_concrete_function(*args, **kwargs)
        return numbers


class _Batch(NamedTuple):
    """The arguments of a call.

    Attributes:
        values: For each replica, tensors of its batch by the names of arguments, such as
            `x` or `x['ids']`.
        bound: The arguments, with the name of each tensor of the batch in its place.
        key: The signature, for any number of examples.
    """

    values: list[dict[str, Any]]
    bound: inspect.BoundArguments
    key: tuple

    def call(self, step: Callable, values: list[dict]):
        """Calls a step with other tensors, by name, for each replica."""

        def value_of(leaf):
            if not isinstance(leaf, _Name):
                return leaf
            parts = [part[leaf] for part in values]
            return distributed(parts) if leaf.is_distributed else parts[0]

        arguments = tf.nest.map_structure(value_of, dict(self.bound.arguments))
        bound = inspect.BoundArguments(self.bound.signature, arguments)
        return step(*bound.args, **bound.kwargs)


class _Name(str):
    """Name of a tensor of the batch, in its place.

    Attributes:
        is_distributed: Whether each replica has its own.
    """

    is_distributed = False


def _bind(step: Callable, args: tuple, kwargs: dict) -> _Batch:
    """Returns the arguments of a call."""
    bound = inspect.signature(step).bind(*args, **kwargs)
    leaves = [
        pair
        for name, argument in bound.arguments.items()
        for pair in named_leaves(name, argument)
    ]
    number = max([1, *(len(_parts_of(leaf)) for _, leaf in leaves)])
    values, flat, key = [{} for _ in range(number)], [], []
    for name, leaf in leaves:
        parts = _parts_of(leaf)
        if isinstance(parts[0], _TENSORS):
            place = _Name(name)
            place.is_distributed = _is_distributed(leaf)
            flat.append(place)
            for i, part in enumerate(values):
                part[name] = parts[i % len(parts)]
            key.append((name, _any_rows(parts[0]), len(parts)))
        else:
            flat.append(leaf)
            key.append((name, type(leaf), _key_of(leaf)))
    if not values[0]:
        raise ValueError(
            "A step in micro-batches must take a batch. Received: arguments without a "
            "tensor. Pass the tensors of the batch, not an iterator or a data set."
        )
    structure = [*bound.arguments.values()]  # of which the batch is not kept
    arguments = tf.nest.pack_sequence_as(structure, flat)
    bound.arguments = dict(zip(bound.arguments, arguments, strict=True))
    return _Batch(values, bound, tuple(key))


def _is_distributed(leaf) -> bool:
    is_of_replicas = isinstance(leaf, tf.distribute.DistributedValues)
    return is_of_replicas and not isinstance(leaf, tf.Variable)


def _parts_of(leaf) -> tuple:
    """Returns the value of each replica, arrays as tensors."""
    if _is_distributed(leaf):
        if not tf.distribute.has_strategy():
            raise ValueError(
                "A step with the batches of several replicas must be called in the scope "
                "of their strategy. Received: a call outside. Call it inside "
                "`with strategy.scope()`."
            )
        return tf.distribute.get_strategy().experimental_local_results(leaf)
    return (tf.convert_to_tensor(leaf) if isinstance(leaf, _ARRAYS) else leaf,)


def _any_rows(value) -> tf.TypeSpec:
    """Returns the type of a tensor, for any number of examples."""
    if not value.shape.rank:
        return tf.type_spec_from_value(value)
    if isinstance(value, tf.RaggedTensor):
        return without_static_rows(value)
    shape = tf.TensorShape([None]).concatenate(value.shape[1:])
    kind = tf.SparseTensorSpec if isinstance(value, tf.SparseTensor) else tf.TensorSpec
    return kind(shape, value.dtype)


def _key_of(leaf):
    """Returns an argument that is no tensor; the number of one without a hash."""
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return leaf


class _Trace:
    """A step that is traced for one signature, and runs batches.

    Args:
        step: The step.
        batch: The arguments of its first call.
        count: The number of micro-batches.
        numbers: Numbers of the forward passes of a whole batch, by `numbers_behind`.
    """

    def __init__(
        self, step: Callable, batch: _Batch, count: MicroBatchCount, numbers: set
    ):
        self._count, self._was = count, None
        self._graph = None
        specs = [
            {name: _any_rows(value) for name, value in values.items()}
            for values in batch.values
        ]
        flat = tf.nest.flatten(specs, expand_composites=True)
        # An object without a hash is known by its place in memory, which it keeps.
        batch = self._batch = batch._replace(values=[])
        numbers_of_cut = set()

        def trace(*flat: tf.Tensor) -> None:
            self._graph = graph = tf.compat.v1.get_default_graph()
            # By its former name, Keras 2 would keep losses elsewhere.
            graph.name = "step"
            run_all_in_branches(graph)
            self._inputs = names_of(flat)
            values = tf.nest.pack_sequence_as(specs, flat, expand_composites=True)
            number = tf.compat.v1.placeholder(tf.int64, [], "batch_number")
            number_batches(number)
            self._number = number.name
            is_auto = not count.is_fixed
            wholes = [WholeBatch(value, "mean", is_auto) for value in values]
            self._phases = build_step(
                wholes,
                lambda: self._flat_results(
                    batch.call(step, [whole.sliced for whole in wholes])
                ),
                lambda tops: numbers_of_cut.update(numbers_behind(tops)),
            )

        try:
            # The function keeps the variables that are made inside.
            self._wrapped = tf.compat.v1.wrap_function(trace, flat)
        finally:
            slots = slots_of(self._graph) if self._graph is not None else []
            weakref.finalize(self, UNUSED.extend, slots)
        _check_numbers(numbers, numbers_of_cut)
        self._functions = Functions(self._graph)
        self._runners = [
            BatchRunner(phase.replicas, count, lambda: None) for phase in self._phases
        ]
        for runner in self._runners:
            runner.begin()
            runner.initialize(self._functions)

    def _flat_results(self, results) -> list[tf.Tensor]:
        self._results = tf.nest.map_structure(_as_result, results)
        flat = tf.nest.flatten(self._results, expand_composites=True)
        return [result for result in flat if result is not None]

    def run(self, values: list[dict], number: int):
        """Runs a batch; returns the step's results.

        Args:
            values: For each replica, tensors of the batch by name.
            number: Number of the batch.
        """
        flat = tf.nest.flatten(values, expand_composites=True)
        inputs = dict(zip(self._inputs, flat, strict=True)) | {self._number: number}
        place, results, reported = f"step {number}", {}, {}
        for phase, runner in zip(self._phases, self._runners, strict=True):
            executor = Feeding(self._functions, inputs)
            feeds, _ = runner.run(executor, place, [], [[] for _ in phase.replicas])
            fetches = phase.results, phase.kept, phase.changes
            fetched, kept, _ = executor.run(fetches, reported | feeds)
            runner.is_open = False
            results |= fetched
            inputs |= dict(zip(names_of(phase.kept), kept, strict=True))
            pairs = [pair for replica in phase.replicas for pair in replica.reported]
            reported |= {tensor.name: feeds[tensor.name] for tensor, _ in pairs}
        self._count.count_update(place)
        self._describe(place)
        flat = tf.nest.flatten(self._results, expand_composites=True)
        numbers = iter(range(len(results)))
        flat = [None if result is None else results[next(numbers)] for result in flat]
        return tf.nest.pack_sequence_as(self._results, flat, expand_composites=True)

    def _describe(self, place: str) -> None:
        """Logs how batches are cut, at the first one and where the number changes."""
        value = self._count.value
        if value == self._was:
            return
        self._was = value
        rows = [n for runner in self._runners[:1] for n in runner.rows]
        passes = [turn for phase in self._phases for turn in _passes_of(phase)]
        runs = {1: "once", 2: "twice"}.get(len(passes), f"{len(passes)} times")
        _logger.info(
            "micro-batches: at %s %s = %d x %d; the model runs %s",
            place,
            " + ".join(map(str, rows)),
            value,
            -(-max(rows) // value),
            runs if value > 1 else "once",
        )


def _passes_of(phase: StepPhase) -> list[Turn]:
    """Returns the passes in which a phase runs the model."""
    passes = phase.replicas[0].passes
    return [turn for turn, work in passes.items() if work.micro_ops]


def _check_numbers(whole: set, cut: set) -> None:
    """Raises ValueError if a step computes with the static number of examples."""
    if whole != cut:
        numbers = sorted(map(str, whole ^ cut))
        raise ValueError(
            "A step must not compute with the number of examples that Python reads, as in "
            "`x.shape[0]`: micro-batches have others. Received: a forward pass with other "
            f"numbers for any number of examples ({', '.join(numbers[:4])}). Use "
            "`tf.shape(x)[0]`."
        )


def _as_result(value):
    """Returns a result of a step as tf.function has it."""
    if value is None or isinstance(value, tf.Operation):
        return None
    is_variable = isinstance(value, tf.Variable)  # of which a tensor has the value
    if is_composite(value) and not is_variable:
        return value
    return tf.convert_to_tensor(value)


def _converted(step: Callable) -> Callable:
    """Returns a step as AutoGraph converts it, if it can, as tf.function does."""
    try:
        if inspect.ismethod(step):
            return functools.partial(
                tf.autograph.to_graph(step.__func__), step.__self__
            )
        return tf.autograph.to_graph(step)
    except Exception as error:  # noqa: BLE001, such as source code that is not there
        _logger.debug("micro-batches: AutoGraph does not convert %r: %s", step, error)
        return step
