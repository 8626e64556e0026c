"""`microbatch`: one call from a Keras model to one that cuts its batches."""

import contextlib
import functools
from typing import Any

import tensorflow as tf

import estimator_accum.keras._internals as internals
from estimator_accum.core.arguments import check_count
from estimator_accum.core.gradients import scaled
from estimator_accum.graph.internals import dtype_of_handle
from estimator_accum.keras._accumulate import is_supported
from estimator_accum.keras._forward import PASS, Forward, trace_forward
from estimator_accum.keras._joined import (
    Cut,
    gradients_of,
    outputs_and_gradients_of,
    outputs_of,
)
from estimator_accum.keras._models import Model2, Model3, keras_of
from estimator_accum.keras._optimizer import is_compiled_by_xla
from estimator_accum.keras._retries import Retries
from estimator_accum.keras._row_loss import row_loss_of
from estimator_accum.keras._written import assign, values_of, written_outside

_STEPS = ("train_step", "test_step", "predict_step")
_AUTO = "auto"
_FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")


def microbatch(model: Any, micro_batches: int | str = 4) -> Any:
    """Cuts each batch of a Keras model into micro-batches, inside its steps.

        update = optimizer( gradient of loss(model(batch)) )

    `fit`, `evaluate`, `predict` and `train_on_batch` get whole batches, and one step is
    one batch and one update. The model runs on one micro-batch after the other. Unless
    each example's part of the loss is proved to need no other example, it runs twice
    while it trains: first for the outputs of all examples, then for the gradient. Loss,
    metrics, weights of examples and the update see the whole batch, so any loss is exact.
    Dropout draws the same numbers in both passes.

    Each row of the model's outputs must be computed from its own example, which is proved
    when the first step is traced. The model itself does not change: it is saved as
    before, and loaded without this library.

    Args:
        model: A `keras.Model` of Keras 3 on TensorFlow, `tf.keras` 2.15 or `tf_keras`,
            compiled or not, with Keras's own `train_step`, `test_step` and
            `predict_step`.
        micro_batches: Number of micro-batches of a batch, >= 1; a batch with fewer
            examples has one for each. 1 leaves the model as it is. "auto" runs whole
            batches until one runs out of memory; that batch is retried in twice as many
            micro-batches, before its update, and so are those after it.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is not such a model.
        ValueError: If `micro_batches` < 1. From `fit`: if a row of the outputs depends on
            other examples, as with batch normalization, or if a layer writes a variable
            or adds a loss.

    Example:
        model = microbatch(model, micro_batches=8)
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=256)     # in micro-batches of 32
    """
    keras_model = _check_model(model)
    _check_micro_batches(micro_batches)
    if micro_batches == 1:
        return model
    batches = _Batches(keras_model, model, micro_batches)
    # No closures: a copy of the model gets a copy of `batches`, which cuts the copy.
    for name in _STEPS:
        vars(model)[name] = functools.partial(batches.step, name)
    if keras_model is Model3 or micro_batches == _AUTO:
        for name in _FUNCTIONS:
            vars(model)[name] = functools.partial(batches.make, name)
    for name in _FUNCTIONS:
        setattr(model, name.removeprefix("make_"), None)  # of steps before
    return model


class _Batches:
    """The model's calls inside its steps, in micro-batches.

    Args:
        keras_model: The family's functions.
        model: The model.
        micro_batches: Number of micro-batches, or "auto".
    """

    def __init__(self, keras_model, model, micro_batches: int | str):
        self._keras_model, self._model = keras_model, model
        with tf.init_scope():
            self._draws = tf.Variable(0, trainable=False)  # batches that drew numbers
        is_auto = micro_batches == _AUTO
        self._retries = Retries(keras_model, model, [self._draws]) if is_auto else None
        self._micro_batches = self._retries.number if self._retries else micro_batches
        self._steps = 0  # open ones: a strategy opens one for each replica
        self._should_compile = False
        self._is_traced_cut = False
        self._is_proving = False  # a loss that is proved may call the model
        self._seed = None  # of all numbers, from the global seed

    @property
    def _is_cut(self) -> bool:
        return self._retries is None or self._retries.is_cut or self._is_traced_cut

    def step(self, name: str, data):
        """Runs Keras's own step, with the calls of the model cut."""
        is_trained = name == "train_step"
        with contextlib.ExitStack() as stack:
            if self._is_cut:
                targets = _targets_of(data) if is_trained else None
                stack.enter_context(self._cut_calls(targets))
            if self._retries:
                stack.enter_context(self._retries.watching(is_trained))
            try:
                return getattr(type(self._model), name)(self._model, data)
            except (TypeError, ValueError) as error:
                _check_kept(error)
                raise

    def make(self, name: str, force: bool = False):
        """Returns the model's function of that name, made by Keras's own maker."""
        model, attribute = self._model, name.removeprefix("make_")
        if getattr(model, attribute) is not None and not force:
            return getattr(model, attribute)
        if self._retries:
            function = self._make_retrying(name)
        else:
            function = self._make_own(name)
        setattr(model, attribute, function)
        return function

    def _make_own(self, name: str):
        model, attribute = self._model, name.removeprefix("make_")
        before = getattr(model, attribute)
        with self._compiling_calls_alone():
            try:
                getattr(type(model), name)(model, True)
                return getattr(model, attribute)
            finally:
                setattr(model, attribute, before)

    @contextlib.contextmanager
    def _compiling_calls_alone(self):
        """Has XLA compile the calls that are cut, not the steps around them."""
        model = self._model
        if self._keras_model is Model2 or not self._is_cut:
            yield
            return
        self._should_compile = bool(model.jit_compile)
        model.jit_compile = False
        try:
            yield
        finally:
            model.jit_compile = self._should_compile

    def _make_retrying(self, name: str):
        model = self._model
        with model.distribute_strategy.scope():
            _check_strategy(is_retried=True)
        _check_compiler(self._keras_model is Model2 and model.jit_compile)
        _check_steps(internals.steps_per_execution_of(model))
        takes_data = self._keras_model is Model3 and "predict" in name
        step = f"{name.split('_')[1]}_step"

        def trace(data) -> None:
            """Finds the writes of a step; before it trains, says if it cannot be cut."""
            strategy = model.distribute_strategy
            (data,) = data if takes_data else (data,)
            is_cut = "train" in name

            def run(data):
                with self._cutting() if is_cut else contextlib.nullcontext():
                    return self.step(step, data)

            # In a replica, as a step: a mirrored seed has no handle elsewhere.
            with strategy.scope():
                traced = tf.function(
                    lambda data: strategy.run(run, (data,)), autograph=False
                )
                traced.get_concrete_function(data)

        return self._retries.retrying(lambda: self._make_own(name), takes_data, trace)

    @contextlib.contextmanager
    def _cutting(self):
        """Has steps cut their batches, although all fit in memory so far."""
        self._is_traced_cut = True
        try:
            yield
        finally:
            self._is_traced_cut = False

    @contextlib.contextmanager
    def _cut_calls(self, targets: list | None):
        # `call` is replaced in the steps only: saving never sees it.
        contents = vars(self._model)
        _check_functions(contents, self._steps)

        @tf.autograph.experimental.do_not_convert
        def call(inputs, *args, **kwargs):
            return self._call(targets, inputs, *args, **kwargs)

        self._steps += 1
        contents["call"] = call
        try:
            yield
        finally:
            self._steps -= 1
            if not self._steps:
                del contents["call"]
                contents.pop("compute_loss", None)

    def _call(self, targets: list | None, inputs, *args, **kwargs):
        """Returns the model's outputs for the whole batch."""
        model = self._model
        _check_strategy(is_retried=self._retries is not None)
        _check_compiler(is_compiled_by_xla())
        flat = tf.nest.flatten(inputs)
        if targets is None and _are_recorded(flat):
            # A loss asks for their gradient while it is evaluated.
            return type(model).call(model, inputs, *args, **kwargs)
        forward = self._forward(inputs, args, kwargs)
        _check_inputs([*flat, *forward.function.captured_inputs])
        seed = self._next_seed() if forward.draws else tf.zeros([2], tf.int32)
        variables = self._keras_model.trained_variables(model)
        # Eager steps would keep the activations of what a pass records.
        may_be_rows = variables and targets and not self._is_proving
        if may_be_rows and not tf.executing_eagerly():
            rows = flat[0].shape[0]
            self._is_proving = True
            try:
                loss = row_loss_of(self._keras_model, model, forward, targets, rows)
            finally:
                self._is_proving = False
            if loss is not None:
                return self._one_pass(forward, flat, seed, targets, loss)
        return self._two_passes(forward, flat, seed)

    def _next_seed(self) -> tf.Tensor:
        if self._seed is None:
            with tf.init_scope():
                seed = tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32)
                self._seed = seed.numpy()
        drawn = tf.identity(self._draws.assign_add(1))
        replica = tf.distribute.get_replica_context()
        if replica is not None:  # None in a loop of the caller's, outside of `run`
            drawn *= replica.num_replicas_in_sync
            drawn += replica.replica_id_in_sync_group
        return tf.stack([self._seed[0] + drawn, self._seed[1]])

    def _one_pass(self, forward: Forward, inputs: list, seed, targets: list, loss):
        model = self._model
        keras_loss = type(model).compute_loss  # not that of another replica
        variables = self._keras_model.trained_variables(model)
        cut = Cut(inputs, self._micro_batches, targets)
        with internals.stop_recording():
            outputs, gradients = outputs_and_gradients_of(
                forward, cut, inputs, seed, targets, loss, variables
            )

        @tf.custom_gradient
        def attach(loss, *weights):
            del weights
            return tf.identity(loss), lambda arriving: [
                arriving,
                *(None if g is None else scaled(g, arriving) for g in gradients),
            ]

        def compute_loss(*args, **kwargs):
            loss = keras_loss(model, *args, **kwargs)
            return attach(loss, *[variable.read_value() for variable in variables])

        vars(model)["compute_loss"] = compute_loss
        return forward.dressed(outputs)

    def _two_passes(self, forward: Forward, inputs: list, seed):
        variables = self._keras_model.trained_variables(self._model)
        cut = Cut(inputs, self._micro_batches)
        captured = forward.function.captured_inputs
        read = [handle for handle in captured if handle.dtype == tf.resource]
        before = values_of(filter(dtype_of_handle, read))
        with internals.stop_recording():
            outputs = outputs_of(forward, cut, inputs, seed)

        @tf.custom_gradient
        def attach(*weights):
            def gradient(*arriving):
                # The second pass reads what the first one did, whatever was written since.
                now = values_of(_written_among(read))
                written = {id(handle) for handle, _ in now}
                assign([pair for pair in before if id(pair[0]) in written])
                kinds = [output.dtype for output in outputs]
                arriving = [
                    value if kind.is_floating or kind.is_complex else None
                    for value, kind in zip(arriving, kinds, strict=True)
                ]
                gradients = gradients_of(
                    forward, cut, inputs, seed, arriving, variables
                )
                assign(now)
                return gradients

            del weights
            return list(map(tf.identity, outputs)), gradient

        weights = [variable.read_value() for variable in variables]
        # Of a loss that asks for the gradient while it is evaluated, too.
        if internals.is_recorded(weights):
            outputs = attach(*weights)
        return forward.dressed(outputs)

    def _forward(self, inputs, args, kwargs) -> Forward:
        own_call, model = type(self._model).call, self._model

        def call(values):
            return own_call(model, values, *args, **kwargs)

        # An eager step traces anew: Python that `call` reads may have other values.
        return trace_forward(
            self._keras_model, model, call, inputs, self._should_compile
        )


def _written_among(read: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the handles of variables and tables that may have been written so far."""
    if tf.executing_eagerly():  # without a graph that tells
        return list(filter(dtype_of_handle, read))
    written = written_outside(tf.compat.v1.get_default_graph())
    ids = {id(handle) for handle in written}
    return [handle for handle in read if id(handle) in ids]


def _check_kept(error: Exception) -> None:
    """Raises ValueError if an error of TensorFlow is of a tensor inside of a pass."""
    if f"was defined in FuncGraph(name={PASS}," in str(error):
        raise ValueError(
            "The loss and metrics of a cut model must read no tensor that its call has "
            "kept, such as in self: it is of one micro-batch. Received: "
            f"{str(error).strip().splitlines()[-1].strip()} Return it as one more output "
            "of the model, or train with accumulate()."
        ) from error


def _targets_of(data) -> list:
    """Returns the targets and the weights of examples that a batch has."""
    _, y, *weights = (*data, None) if isinstance(data, tuple | list) else (data, None)
    return [] if y is None else [y, *(value for value in weights if value is not None)]


def _check_functions(contents: dict, steps: int) -> None:
    """Raises TypeError for functions of a model that are not its class's.

    Args:
        contents: The model's attributes.
        steps: Number of steps that have replaced `call` already.
    """
    for name in ("call", "compute_loss"):
        if name in contents and not steps:
            raise TypeError(
                f"A cut model must have the {name} of its class. Received: a model with "
                f"a {name} of its own. Define it in a subclass of keras.Model."
            )


def _check_strategy(is_retried: bool) -> None:
    """Raises ValueError for replicas whose batches are not cut.

    Args:
        is_retried: Whether batches that run out of memory are retried.
    """
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    name = f"{type(strategy).__name__} of {replicas} replicas"
    if internals.has_parameter_servers(strategy):
        received, remedy = "a ParameterServerStrategy", "Train an Estimator there"
    elif replicas > 1 and not isinstance(strategy, tf.distribute.MirroredStrategy):
        received, remedy = f"a {name}", "Train with accumulate()"
    elif replicas > 1 and is_retried:
        received = f'micro_batches="auto" and a {name}'
        remedy = "Pass a number of micro-batches"
    else:
        return
    raise ValueError(
        "Batches must be cut on one replica, or into a fixed number of micro-batches on "
        f"those of a MirroredStrategy. Received: {received}. {remedy}."
    )


def _check_compiler(is_compiled: bool) -> None:
    if is_compiled:
        raise ValueError(
            "A model of Keras 2 that cuts its batches must not be compiled by XLA. "
            "Received: jit_compile=True. Leave it out, or use Keras 3."
        )


def _are_recorded(tensors: list) -> bool:
    """Returns whether a tape watches any."""
    tensors = [t for t in tensors if tf.is_tensor(t) and t.dtype.is_floating]
    return internals.is_recorded(tf.nest.flatten(tensors, expand_composites=True))


def _check_inputs(tensors: list) -> None:
    """Raises ValueError if a gradient with respect to the inputs would be lost."""
    if _are_recorded(tensors):
        raise ValueError(
            "The inputs of a cut model must be data, without a gradient. Received: "
            "inputs that a tape watches, or that are computed from weights. Compute "
            "them in the model, or train with accumulate()."
        )


def _check_model(model):
    """Returns the family's functions; raises TypeError for anything else."""
    keras = keras_of(model)
    if keras is None or not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` must be a keras.Model. Received: {model!r}. Make one, such as "
            "keras.Sequential([...])."
        )
    if not is_supported(keras):
        raise TypeError(
            "`model` must be of Keras 2.15 or later. Received: a model of Keras "
            f"{keras.__version__}. Install TensorFlow 2.15 or later."
        )
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise TypeError(
            "`model` must run on TensorFlow. Received: Keras 3 with the backend "
            f"{backend}. Set KERAS_BACKEND=tensorflow."
        )
    for name in (*_STEPS, *_FUNCTIONS):
        if name in vars(model):
            raise TypeError(
                "`model` must not cut its batches already. Received: a model with a "
                f"{name} of its own. Call microbatch() once."
            )
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise TypeError(
                f"`model` must have Keras's own {name}. Received: that of "
                f"{type(model).__name__}. Train with accumulate()."
            )
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise ValueError(
            "`model` must train by its train_step. Received: a model in a graph of "
            "TensorFlow 1, which does not. Enable eager execution."
        )
    return Model3 if hasattr(keras, "ops") else Model2


def _check_steps(steps: int | str) -> None:
    if steps != 1:
        raise ValueError(
            'micro_batches="auto" retries one batch at a time. Received: '
            f"steps_per_execution={steps}. Leave it out, or pass a number of "
            "micro-batches."
        )


def _check_micro_batches(micro_batches) -> None:
    if micro_batches != _AUTO:
        remedy = "Use 1 to leave batches whole."
        check_count("micro_batches", micro_batches, remedy, ' or "auto"')
