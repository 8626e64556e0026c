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
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.core.arguments import check_count
from estimator_accum.core.options import check_batch_norm
from estimator_accum.graph.internals import (
    convert_by_autograph,
    graph_of_new_function,
    is_compiled_by_xla,
    is_composite,
    is_converted_by_autograph,
    reduces_retracing,
    run_all_in_branches,
)
from estimator_accum.graph.replicas import distributed
from estimator_accum.graph.variables import is_of_library
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.count import MicroBatchCount
from estimator_accum.microbatch.executors import (
    UNUSED,
    Feeding,
    Functions,
    destroy_unused_slots,
    slots_of,
)
from estimator_accum.microbatch.made_rows import taking_rows
from estimator_accum.microbatch.own_optimizer.steps import build_step
from estimator_accum.microbatch.replica import ReplicaBatch, StepPhase
from estimator_accum.microbatch.runner import BatchRunner, names_of
from estimator_accum.microbatch.staging import named_leaves, with_shape
from estimator_accum.microbatch.static_sizes import StaticSizeError, sizes_of_graph
from estimator_accum.microbatch.work import Turn
from estimator_accum.precision import config_of_functions
from estimator_accum.reports._display import write_line
from estimator_accum.seed import number_batches

_TENSORS = (tf.Tensor, tf.SparseTensor, tf.RaggedTensor)
_ARRAYS = (np.ndarray, np.generic)
_LONG_SECS = 10  # of a trace
_MANY_TRACES = 5
_logger = logging.getLogger("tensorflow.estimator_accum")


def microbatch_step(
    step: Callable, micro_batches: int | str = "auto", *, batch_norm: str = "batch"
) -> Callable:
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
        batch_norm: Statistics by which layers of batch normalization normalize in
            training: "batch" for those of the whole batch, as the unsplit batch does;
            "micro_batch" for those of each micro-batch, which takes less memory. Moving
            averages get the statistics of the whole batch in both cases.

    Returns:
        A function with the arguments and results of `step`, traced once for each
        signature, as by tf.function.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range. From a call: if the step uses a
            micro-batch in a way that several cannot replace, or one example does not fit
            in memory.
    """
    _check_step(step)
    is_auto = isinstance(micro_batches, str) and micro_batches == "auto"
    remedy = "Use 1 to split no batch."
    check_count("micro_batches", 1 if is_auto else micro_batches, remedy, " or 'auto'")
    check_batch_norm(batch_norm)
    count = MicroBatchCount(None if is_auto else int(micro_batches))
    return Step(step, count, batch_norm)


def _check_step(step) -> None:
    remedy = "Pass the function that computes gradients and applies them."
    called = _without_partial(step)
    called = _without_partial(getattr(called, "python_function", called))
    call = type(called).__call__ if callable(called) else None
    root = (getattr(call, "__module__", None) or "").partition(".")[0]
    if root in ("keras", "tf_keras"):  # it would compute, but train nothing
        remedy += " For `fit` there is estimator_accum.keras.microbatch(model)."
    elif callable(step) and not isinstance(step, type):
        return
    raise TypeError(
        f"`step` must be a function of a batch. Received: {step!r}. {remedy}"
    )


def _without_partial(function: Callable) -> Callable:
    """Returns the function behind `functools.partial`."""
    return function.func if isinstance(function, functools.partial) else function


def python_of(function: Callable) -> Callable:
    """Returns the Python function that a tf.function traces, without XLA."""
    if is_compiled_by_xla(function):
        _logger.warning(
            "micro-batches: XLA does not compile a step in micro-batches, so "
            "`jit_compile=True` of its tf.function is left out"
        )
    python = function.python_function
    # As tf.function does, which its argument `autograph` may forbid.
    return (
        convert_by_autograph(python) if is_converted_by_autograph(function) else python
    )


class Step:
    """A step in micro-batches.

    Args:
        step: The step.
        count: The number of micro-batches.
        batch_norm: As for `microbatch_step`.

    Attributes:
        reduces_retracing: Whether batches of several sizes share a trace.
    """

    def __init__(self, step: Callable, count: MicroBatchCount, batch_norm: str):
        is_function = hasattr(step, "python_function")  # of tf.function
        self._whole = step if is_function else tf.function(step)
        self._step = step.python_function if is_function else step
        self._count, self._specs = count, self._whole.input_signature
        self._batch_norm = batch_norm
        self._converted = None if self._is_whole else python_of(self._whole)
        self.reduces_retracing = reduces_retracing(self._whole)
        self._general, self._is_anew = {}, False
        self._traces, self._last, self._number = {}, None, 1  # of the next batch
        self._traced = 0  # traces so far
        self._lock = threading.Lock()  # a batch's slots hold one batch
        self._methods = weakref.WeakKeyDictionary()
        functools.update_wrapper(self, self._step, updated=())

    def __get__(self, instance, owner=None):
        """Returns the step of an instance, if a class has it as a method."""
        if instance is None:
            return self
        if instance not in self._methods:
            # Bound by TensorFlow, with all arguments of the tf.function.
            bound = self._whole.__get__(instance, owner)
            self._methods[instance] = Step(bound, self._count, self._batch_norm)
        return self._methods[instance]

    def __call__(self, *args, **kwargs):
        """Runs a batch; see `microbatch_step`."""
        if self._is_whole:
            return self._whole(*args, **kwargs)
        if not tf.executing_eagerly():
            raise RuntimeError(
                "A step in micro-batches must be called outside of tf.function: it runs "
                "several functions for each batch. Received: a call while another "
                "function is traced. Leave out the tf.function around the call. In Orbit, "
                "pass StandardTrainerOptions(use_tf_while_loop=False, "
                "use_tf_function=False); around a TF-Agents Learner, call "
                "tf.config.run_functions_eagerly(True)."
            )
        is_in_replica = not tf.distribute.in_cross_replica_context()
        if is_in_replica and _has_threads():
            raise RuntimeError(
                "A step in micro-batches must be called outside of strategy.run: it runs "
                "its replicas together. Received: a call in a replica. Call strategy.run "
                "inside of the step, and the step in the scope of the strategy."
            )
        return self.run(args, kwargs)

    @property
    def _is_whole(self) -> bool:
        return self._count.is_fixed and self._count.value == 1

    def run(self, args: tuple, kwargs: dict | None = None, specs: tuple | None = None):
        """Runs a batch, also as one micro-batch; returns the step's results.

        Args:
            args: The step's arguments.
            kwargs: Those with a name.
            specs: Types of `args`, such as a data set's; None are their own.
        """
        with self._lock:
            return self._run(args, kwargs or {}, specs or self._specs)

    def release(self, *, are_traces_kept: bool = True) -> None:
        """Frees the memory of the last batch and of the sums, until the next batch.

        Args:
            are_traces_kept: If not, the next batch is traced anew.
        """
        with self._lock:
            if self._last is not None:
                self._last.release()
            self._last = None
            if not are_traces_kept:
                self._traces.clear()
                self._is_anew = True

    def _run(self, args: tuple, kwargs: dict, specs: tuple | None):
        batch = _bind(self._step, args, kwargs, specs)
        destroy_unused_slots()
        trace = self._trace_of(batch)
        if trace is None and self.reduces_retracing:
            batch = self._generalize(batch)
            trace = self._trace_of(batch)
        if trace is None:
            self._traces = {
                key: old for key, old in self._traces.items() if not _is_gone(key)
            }
            self._general = {
                key: specs for key, specs in self._general.items() if not _is_gone(key)
            }
            since = time.monotonic()
            trace = self._trace(batch, args, kwargs)
            secs = time.monotonic() - since
            if secs > _LONG_SECS:
                line = f"micro-batches: the step was traced in {secs:.0f} s"
                write_line(line, _logger)
            key = batch.key_with_sizes if trace.reads_sizes else batch.key
            self._traces[key] = trace
            self._warn_of_many_traces()
        if self._last not in (None, trace):  # each has sums of the model's size
            self._last.release()
        self._last = trace
        number, self._number = self._number, self._number + 1
        step = _without_partial(self._step)
        name = getattr(step, "__name__", type(step).__name__)
        return trace.run(batch.values, number, f"step {number} of {name}")

    def _warn_of_many_traces(self) -> None:
        """Warns once if most of the first batches are traced anew, as tf.function does."""
        self._traced += 1
        if self._traced == _MANY_TRACES and self._number <= 2 * _MANY_TRACES:
            _logger.warning(
                "micro-batches: the step was traced for %d of %d batches, and each trace "
                "takes time and memory. Pass Python numbers that change as tensors, and "
                "batches of few shapes",
                self._traced,
                self._number,
            )

    def _trace_of(self, batch: "_Batch") -> "_Trace | None":
        return self._traces.get(batch.key_with_sizes) or self._traces.get(batch.key)

    def _generalize(self, batch: "_Batch") -> "_Batch":
        """Returns a batch with None for sizes that differ from those of batches before."""
        before = self._general.get(batch.key_of_ranks, batch.specs)
        specs = tf.nest.map_structure(_common_type, before, batch.specs)
        self._general[batch.key_of_ranks] = specs
        return batch._replace(specs=specs)

    def _trace(self, batch: "_Batch", args: tuple, kwargs: dict) -> "_Trace":
        # Functions begin anew with a trace, and with the numbers that they draw.
        seed = self._number - 1 if self._is_anew else 0
        arguments = self._converted, batch, self._count, self._batch_norm, seed
        try:
            return _Trace(*arguments)
        except _MakesVariablesError as error:
            # As at each first call of a tf.function, which is traced again without them.
            if not error.are_made:
                self._whole.get_concrete_function(*args, **kwargs)
            return _Trace(*arguments, is_first=False)
        except StaticSizeError:
            self._whole.get_concrete_function(*args, **kwargs)  # may have its own error
            raise


def _has_threads() -> bool:
    """Returns whether there is a strategy whose replicas have threads of their own."""
    strategy = tf.distribute.get_strategy()
    is_here = isinstance(strategy, tf.distribute.OneDeviceStrategy)
    return tf.distribute.has_strategy() and not is_here


class _MakesVariablesError(BaseException):
    """Ends a trace of a step that makes variables, past its exceptions.

    Attributes:
        are_made: Whether they are made; False at one of a tensor of the graph.
    """

    def __init__(self, are_made: bool):
        super().__init__()
        self.are_made = are_made


class _Batch(NamedTuple):
    """The arguments of a call.

    Attributes:
        values: For each replica, tensors of its batch by the names of arguments, such as
            `x` or `x['ids']`.
        specs: Their types by name, as the step sees them.
        bound: The arguments, with the name of each tensor of the batch in its place.
        others: The part of the signature that tensors do not have.
    """

    values: list[dict[str, Any]]
    specs: list[dict[str, tf.TypeSpec]]
    bound: inspect.BoundArguments
    others: tuple

    @property
    def key(self) -> tuple:
        """Returns the signature, for any number of examples."""
        return (*self.others, *map(_any_rows, tf.nest.flatten(self.specs)))

    @property
    def key_with_sizes(self) -> tuple:
        """Returns the signature."""
        return (*self.others, *tf.nest.flatten(self.specs))

    @property
    def key_of_ranks(self) -> tuple:
        """Returns the signature, for any sizes."""
        specs = tf.nest.flatten(self.specs)
        specs = [with_shape(s, _any_shape(s.shape)) for s in specs]
        return (*self.others, *specs)

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


def _bind(step: Callable, args: tuple, kwargs: dict, signature=None) -> _Batch:
    """Returns the arguments of a call.

    Args:
        step: The step.
        args, kwargs: Its arguments.
        signature: Types of its arguments, in their structure; None: those of their values.
    """
    bound = inspect.signature(step).bind(*args, **kwargs)
    leaves = _leaves_of(bound.arguments)
    specs = [None] * len(leaves)
    if signature is not None:
        types = inspect.signature(step).bind_partial(*signature).arguments
        leaves, specs = _with_signature(bound.arguments, signature, types)
    number = max([1, *(len(_parts_of(leaf)) for _, leaf in leaves)])
    batch = _Batch([{} for _ in range(number)], [{} for _ in range(number)], bound, ())
    flat, others = [], []
    for (name, leaf), spec in zip(leaves, specs, strict=True):
        parts = _parts_of(leaf)
        if isinstance(parts[0], _TENSORS):
            place = _Name(name)
            place.is_distributed = _is_distributed(leaf)
            flat.append(place)
            for i, (values, types) in enumerate(
                zip(batch.values, batch.specs, strict=True)
            ):
                values[name] = parts[i % len(parts)]
                types[name] = spec or tf.type_spec_from_value(values[name])
            others.append((name, len(parts)))
        else:
            flat.append(leaf)
            others.append((name, type(leaf), _key_of(name, leaf)))
    if not batch.values[0]:
        raise ValueError(
            "A step in micro-batches must take a batch. Received: arguments without a "
            "tensor. Pass the tensors of the batch, not an iterator or a data set."
        )
    structure = [*bound.arguments.values()]  # of which the batch is not kept
    others.append(_structure_of([*bound.arguments.items()]))
    arguments = tf.nest.pack_sequence_as(structure, flat)
    bound.arguments = dict(zip(bound.arguments, arguments, strict=True))
    return batch._replace(others=tuple(others))


def _structure_of(value) -> tuple | None:
    """Returns the types of containers, with the keys of mappings; None for a leaf."""
    if isinstance(value, Mapping):
        keys = sorted(value)
        parts = [(key, _structure_of(value[key])) for key in keys]
    elif isinstance(value, list | tuple):
        parts = map(_structure_of, value)
    else:
        return None
    return type(value), *parts


def _leaves_of(arguments: dict) -> list[tuple[str, Any]]:
    """Returns (name, leaf) pairs of arguments."""
    return [
        pair
        for name, argument in arguments.items()
        for pair in named_leaves(name, argument)
    ]


def _with_signature(arguments: dict, signature, types: dict) -> tuple[list, list]:
    """Returns (name, leaf) pairs of arguments, as tensors of a signature, and their types.

    Args:
        arguments: The arguments by name.
        signature: Their types, in their order.
        types: The types by name; those of arguments that are left out do not count.

    Raises:
        TypeError: If they have other types.
    """
    specs = _leaves_of({n: types[n] for n in arguments if n in types})
    leaves = _leaves_of(arguments)
    if [name for name, _ in leaves] != [name for name, _ in specs]:
        raise TypeError(_sentence_of_signature(signature, [name for name, _ in leaves]))
    pairs = []
    for (name, leaf), (_, spec) in zip(leaves, specs, strict=True):
        is_dense = isinstance(spec, tf.TensorSpec) and not _is_distributed(leaf)
        value = tf.convert_to_tensor(leaf, spec.dtype) if is_dense else leaf
        for part in _parts_of(value):
            if spec is not None and not spec.is_compatible_with(part):
                received = f"{name} of type {type(part).__name__} {part.shape}"
                raise TypeError(_sentence_of_signature(signature, received))
        pairs.append((name, value))
    return pairs, [spec for _, spec in specs]


def _sentence_of_signature(signature, received) -> str:
    return (
        "The arguments of a step must be those of the `input_signature` of its "
        f"tf.function. Received: {received} for {signature}. Change one of them."
    )


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


def _any_rows(spec: tf.TypeSpec) -> tf.TypeSpec:
    """Returns the type of a tensor, for any number of examples."""
    return with_shape(spec, [None, *spec.shape[1:]]) if spec.shape.rank else spec


def _common_type(spec: tf.TypeSpec, other: tf.TypeSpec) -> tf.TypeSpec:
    """Returns the type of a tensor, with None for each size that two types differ in."""
    return with_shape(spec, spec.shape.most_specific_compatible_shape(other.shape))


def _any_shape(shape: tf.TensorShape) -> tf.TensorShape:
    """Returns a shape of the same rank."""
    return shape if shape.rank is None else tf.TensorShape([None] * shape.rank)


def _is_gone(key: tuple) -> bool:
    """Returns whether a signature has an argument that nobody can pass any more."""
    leaves = [leaf for part in key if isinstance(part, tuple) for leaf in part]
    return any(isinstance(leaf, weakref.ref) and leaf() is None for leaf in leaves)


def _key_of(name: str, leaf):
    """Returns an argument that is no tensor; the number of a variable.

    An object that equals no other one is not kept, such as a model.

    Raises:
        TypeError: If it has no hash, as for tf.function: its values might change.
    """
    if hasattr(leaf, "assign"):  # a variable, of Keras too
        return id(leaf)
    try:
        hash(leaf)
    except TypeError as error:
        raise TypeError(
            "An argument of a step that is no tensor must have a hash, so that a changed "
            f"one is traced anew. Received: {name} of type {type(leaf).__name__}. Pass "
            "its values as arguments, or read them from an object of the step's own."
        ) from error
    is_itself = type(leaf).__hash__ is object.__hash__
    return weakref.ref(leaf) if is_itself and type(leaf).__weakrefoffset__ else leaf


class _Trace:
    """A step that is traced for one signature, and runs batches.

    Args:
        step: The step.
        batch: The arguments of its first call.
        count: The number of micro-batches.
        batch_norm: As for `microbatch_step`.
        seed: Number that is added to the seed of TensorFlow, if there is one.
        is_first: Whether the step may make variables.

    Attributes:
        reads_sizes: Whether the step has read static sizes of this batch.

    Raises:
        _MakesVariablesError: If the first trace of the step makes a variable.
    """

    def __init__(
        self,
        step: Callable,
        batch: _Batch,
        count: MicroBatchCount,
        batch_norm: str,
        seed: int,
        is_first: bool = True,
    ):
        self._count, self._was, self._is_first = count, None, is_first
        # By the name of a tf.function's graph, Keras 2 would keep losses elsewhere.
        self._graph = graph_of_new_function("step")
        if self._graph.seed is not None:
            self._graph.seed += seed
        run_all_in_branches(self._graph)
        self._batch = batch._replace(values=[])
        # A variable is known by its place in memory, which it keeps.
        leaves = tf.nest.flatten(dict(batch.bound.arguments))
        self._variables = [leaf for leaf in leaves if hasattr(leaf, "assign")]
        try:
            with self._graph.as_default():
                self._build(step, batch_norm)
        finally:
            weakref.finalize(self, UNUSED.extend, slots_of(self._graph))
        self._functions = Functions(self._graph)
        self._runners = [
            BatchRunner(phase.replicas, count, lambda: None, is_zero=False)
            for phase in self._phases
        ]
        for runner in self._runners:
            runner.begin()
            runner.initialize(self._functions, config_of_functions())

    def _build(self, step: Callable, batch_norm: str) -> None:
        """Traces the step, in the default graph."""
        specs = [
            {name: _any_rows(spec) for name, spec in specs.items()}
            for specs in self._batch.specs
        ]
        flat = [
            tf.compat.v1.placeholder(spec.dtype, spec.shape)
            for spec in tf.nest.flatten(specs, expand_composites=True)
        ]
        self._inputs = names_of(flat)
        values = tf.nest.pack_sequence_as(specs, flat, expand_composites=True)
        number = tf.compat.v1.placeholder(tf.int64, [], "batch_number")
        number_batches(number)
        self._number = number.name
        is_auto = not self._count.is_fixed
        wholes = [
            WholeBatch(value, "mean", is_auto, batch_norm=batch_norm)
            for value in values
        ]
        sizes = sizes_of_graph(self._graph)
        for whole, specs in zip(wholes, self._batch.specs, strict=True):
            sizes.add(whole.sliced.values(), specs.values())

        def build() -> list[tf.Tensor]:
            values, variables = [whole.sliced for whole in wholes], []
            make = functools.partial(_make_outside, variables)
            makes_outside = tf.variable_creator_scope(make)
            with makes_outside, sizes.shown(), taking_rows(wholes, sizes):
                results = self._flat_results(self._batch.call(step, values))
            if variables and self._is_first:
                raise _MakesVariablesError(are_made=True)
            return results

        self._phases = build_step(wholes, build)
        self._batch = None  # nor are the arguments kept
        self.reads_sizes = sizes.are_read
        slots = [write.inputs[0] for whole in wholes for write in whole.stage[1]]
        for replica in self._replicas:
            slots += replica.batch.works.slots
        self._free = [tf.raw_ops.DestroyResourceOp(resource=slot) for slot in slots]

    def release(self) -> None:
        """Frees the memory of the batch and of the sums, until the next batch."""
        release = [replica.total.release for replica in self._replicas]
        self._functions.run([*release, self._free])
        self._functions.run([replica.total.initialize for replica in self._replicas])

    @property
    def _replicas(self) -> list[ReplicaBatch]:
        return [replica for phase in self._phases for replica in phase.replicas]

    def _flat_results(self, results) -> list[tf.Tensor]:
        self._results = tf.nest.map_structure(_as_result, results)
        flat = tf.nest.flatten(self._results, expand_composites=True)
        return [result for result in flat if result is not None]

    def run(self, values: list[dict], number: int, place: str):
        """Runs a batch; returns the step's results.

        Args:
            values: For each replica, tensors of the batch by name.
            number: Number of the batch.
            place: Name of the batch in messages.
        """
        flat = tf.nest.flatten(values, expand_composites=True)
        inputs = dict(zip(self._inputs, flat, strict=True)) | {self._number: number}
        results, reported = {}, {}
        for phase, runner in zip(self._phases, self._runners, strict=True):
            earlier = {t.name: reported[t.name] for t in phase.earlier}
            executor = Feeding(self._functions.run, inputs | earlier)
            with runner.undoing(executor):
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
        """Tells how batches are split, at the first one and where the number changes."""
        value, rows = self._count.value, self._runners[0].rows
        split = value, max(rows) > 1
        if self._was in (split, (value, True)):  # one example says nothing new
            return
        self._was = split
        passes = [len(_passes_of(phase)) for phase in self._phases]
        is_whole = 1 in (value, max(rows)) and all(rows)
        runs = "as unsplit" if is_whole else _describe_runs(passes)
        described = self._count.describe(rows)
        line = f"micro-batches: at {place}: {described}; the model runs {runs}"
        write_line(line, _logger)


def _describe_runs(passes: list[int]) -> str:
    """Returns how often the model runs, and why, by the passes of each phase."""
    total, number = sum(passes), len(passes)
    runs = {1: "once", 2: "twice"}.get(total, f"{total} times")
    if number > 1:
        runs += f" for {number} updates in turn"
    return runs if total <= number else f"{runs}: its loss or a layer compares examples"


def _passes_of(phase: StepPhase) -> list[Turn]:
    """Returns the passes in which a phase runs the model."""
    passes = phase.replicas[0].passes
    return [turn for turn, work in passes.items() if work.micro_ops]


def _make_outside(variables: list, make: Callable, **arguments) -> tf.Variable:
    """Makes a variable outside of the graph, as tf.function does at a first call.

    Args:
        variables: The step's variables so far.
        make: Makes a variable.
        **arguments: Its arguments.
    """
    value = arguments.get("initial_value")
    if not tf.executing_eagerly() and hasattr(value, "op"):
        arguments["initial_value"] = tf.get_static_value(value)
        if arguments["initial_value"] is None:
            raise _MakesVariablesError(are_made=False)
    # A function inside that makes one would be traced again without it.
    arguments["experimental_enable_variable_lifting"] = False
    with tf.init_scope():
        variable = make(**arguments)
    if not is_of_library(value):
        variables.append(variable)
    return variable


def _as_result(value):
    """Returns a result of a step as tf.function has it."""
    if value is None or isinstance(value, tf.Operation):
        return None
    is_variable = isinstance(value, tf.Variable)  # of which a tensor has the value
    if is_composite(value) and not is_variable:
        return value
    return tf.convert_to_tensor(value)
