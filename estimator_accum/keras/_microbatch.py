"""`microbatch`: one call from a Keras model to one that splits its batches.

Keras makes its functions of an iterator as it always does. Each is then a step of one
batch, which `microbatch_step` runs: all that a model does in a step is split there.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

import estimator_accum.keras._internals as internals
from estimator_accum.core.arguments import check_count
from estimator_accum.core.options import check_batch_norm
from estimator_accum.keras._accumulate import check_keras
from estimator_accum.microbatch.count import MicroBatchCount
from estimator_accum.microbatch.step import Step, python_of

_AUTO = "auto"
_logger = logging.getLogger("tensorflow.estimator_accum")
_FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")
_STEPS = ("train_step", "test_step", "predict_step")


def microbatch(
    model: Any, micro_batches: int | str = _AUTO, *, batch_norm: str = "batch"
) -> Any:
    """Splits each batch of a Keras model into micro-batches, inside its steps.

        update = optimizer( gradient of loss(model(batch)) )

    `fit`, `evaluate`, `predict` and `train_on_batch` get whole batches, and one step is
    one batch and one update, by Keras's `train_step` or the model's own. What needs a
    micro-batch runs once for each; loss, metrics and the update see the whole batch, so
    any loss is exact; see `microbatch_step`. The model itself does not change: it is
    saved as before, and loaded without this library.

    Args:
        model: A `keras.Model` of Keras 3 on TensorFlow, `tf.keras` 2.15 or `tf_keras`,
            compiled or not.
        micro_batches: Number of micro-batches of a batch, >= 1; a batch with fewer
            examples has one for each. 1 leaves the model as it is. "auto" runs whole
            batches until one runs out of memory; that batch is retried in twice as many
            micro-batches, before its update, and so are those after it.
        batch_norm: Statistics by which layers of batch normalization normalize in
            training: "batch" for those of the whole batch, as the unsplit batch does;
            "micro_batch" for those of each micro-batch, which takes less memory. Moving
            averages get the statistics of the whole batch in both cases.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is not such a model.
        ValueError: If an argument is out of range. From `fit`: if a step uses a
            micro-batch in a way that several cannot replace, or one example does not fit
            in memory.

    Example:
        model = microbatch(model, micro_batches=8)
        model.compile("adam", "mse")
        model.fit(x, y, batch_size=256)     # in micro-batches of 32
    """
    keras = _check_model(model)
    if micro_batches != _AUTO:
        remedy = "Use 1 to leave batches whole."
        check_count("micro_batches", micro_batches, remedy, ' or "auto"')
    check_batch_norm(batch_norm)
    if micro_batches == 1:
        return model
    count = MicroBatchCount(None if micro_batches == _AUTO else int(micro_batches))
    make_step = functools.partial(Step, count=count, batch_norm=batch_norm)
    functions = _Functions(model, make_step, is_3=hasattr(keras, "ops"))
    # No closures: a copy of the model gets a copy of `functions`, which splits the copy.
    for name in _FUNCTIONS:
        vars(model)[name] = functools.partial(functions.make, name)
        setattr(model, name.removeprefix("make_"), None)  # of steps before
    for name in _STEPS:
        # As Python: no gradients inside of a tf.function can be split.
        steps = vars(model).get(name), getattr(type(model), name)
        if hasattr(steps[0], "python_function"):
            vars(model)[name] = python_of(steps[0])
        elif steps[0] is None and hasattr(steps[1], "python_function"):
            vars(model)[name] = functools.partial(python_of(steps[1]), model)
    return model


class _Functions:
    """The functions by which a model runs its batches.

    Args:
        model: The model.
        make_step: Returns a `Step` that runs the batches of a tf.function.
        is_3: Whether the model is of Keras 3.

    Attributes:
        model, make_step, is_3: As given.
    """

    def __init__(self, model, make_step: Callable, is_3: bool):
        self.model, self.make_step, self.is_3 = model, make_step, is_3
        self._last = None  # the function that ran last, which has sums of the model
        self._is_told = False  # that XLA compiles none

    def begin(self, function: "_Function") -> None:
        """Frees the memory of the other functions before one runs."""
        if self._last not in (None, function):
            self._last.step.release()
        self._last = function

    def make(self, name: str, force: bool = False):
        """Returns the model's function of that name, which Keras's own maker makes."""
        model, attribute = self.model, name.removeprefix("make_")
        if getattr(model, attribute) is None or force:
            _check_strategy(model.distribute_strategy)
            self._check_compiler()
            with internals.one_eager_step(model):
                getattr(type(model), name)(model, True)
            function = getattr(model, attribute)
            setattr(model, attribute, _Function(self, function, attribute))
        return getattr(model, attribute)

    def _check_compiler(self) -> None:
        """Raises ValueError if XLA compiles the model; says so if Keras 3 decides it."""
        if not self.model.jit_compile or self._is_told:
            return
        if not self.is_3:
            raise ValueError(
                "A model of Keras 2 that splits its batches must not be compiled by XLA. "
                "Received: jit_compile=True. Leave it out."
            )
        self._is_told = True
        # No warning: by default, Keras 3 compiles any model.
        _logger.info(
            "micro-batches: XLA does not compile a step in micro-batches, so "
            "`jit_compile` of the model is left out"
        )


class _Function:
    """Keras's function of an iterator, whose batches run in micro-batches.

    Args:
        functions: The model's functions.
        function: Keras's own, of one batch, without a tf.function.
        name: Its name.

    Attributes:
        step: The step of one batch.
    """

    def __init__(self, functions: "_Functions", function: Callable, name: str):
        self._functions, self._model = functions, functions.model
        self._is_predicting = name == "predict_function"
        takes_list = functions.is_3 and self._is_predicting

        def step(data):
            return function([data] if takes_list else iter([data]))

        step.__name__ = name.replace("function", "step")
        # As Keras 2 has it, and as Keras 3.
        step = tf.function(step, autograph=not functions.is_3, reduce_retracing=True)
        self.step = functions.make_step(step)

    def __deepcopy__(self, memo: dict) -> None:
        """Returns None, with which the copy of a model makes its own."""
        return

    def __call__(self, batches: Iterator) -> Any:
        """Runs as many batches as Keras's own function, and returns the same."""
        model = self._model
        steps = range(internals.steps_per_execution_of(model))
        specs = internals.specs_of(batches)
        outputs = []
        with model.distribute_strategy.scope():
            # In this order, in which no batch is taken in vain.
            for _, data in zip(steps, batches, strict=False):
                if model.run_eagerly:  # its Python code runs with each batch
                    self.step.release(are_traces_kept=False)
                self._functions.begin(self)
                data = internals.without_optionals(data)
                outputs.append(self.step.run((data,), specs=specs))
                if not self._is_predicting:
                    del outputs[:-1]
        if not outputs:
            raise StopIteration
        if len(outputs) == 1:
            return outputs[0]
        return tf.nest.map_structure(_joined, *outputs)


def _joined(*parts):
    """Returns the predictions of several batches, as Keras joins them."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.stack(parts) if parts[0].shape.rank == 0 else tf.concat(parts, 0)


def _check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Raises ValueError for replicas whose batches are not split."""
    replicas = strategy.num_replicas_in_sync
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        received, remedy = "a ParameterServerStrategy", "Train an Estimator there"
    elif replicas > 1 and not isinstance(strategy, tf.distribute.MirroredStrategy):
        received = f"a {type(strategy).__name__} of {replicas} replicas"
        remedy = "Train with accumulate()"
    else:
        return
    raise ValueError(
        "Batches must be split on one replica, or on those of a MirroredStrategy. "
        f"Received: {received}. {remedy}."
    )


def _check_model(model):
    """Returns the model's Keras; raises TypeError for anything else."""
    loaded = filter(None, map(sys.modules.get, ("keras", "tf_keras")))
    # A module of the user's may have the name.
    keras = next(
        (k for k in loaded if isinstance(model, getattr(k, "Model", ()))), None
    )
    if keras is None:
        raise TypeError(
            f"`model` must be a keras.Model. Received: {model!r}. Make one, such as "
            "keras.Sequential([...])."
        )
    check_keras(keras, "model")
    for name in _FUNCTIONS:
        if name in vars(model):
            raise TypeError(
                "`model` must not split its batches already. Received: a model with a "
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
    return keras
