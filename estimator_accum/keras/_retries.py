"""Batches of a Keras model that run out of memory, retried in more micro-batches.

begin     hold the batch, save metrics and seeds
run       Keras's own step
failed    before the update: restore what was saved, cut finer, run again;
          once the update has begun, raise the error
"""

import contextlib
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.microbatch.count import MicroBatchCount, is_out_of_memory


class Retries:
    """The number of micro-batches of a model's batches, adapted to memory.

    Args:
        keras_model: The family's functions.
        model: The model.
        variables: Variables of the steps, which each attempt may move.

    Attributes:
        number: Number of micro-batches, an int32 variable that cut steps read.
    """

    def __init__(self, keras_model, model, variables: list[tf.Variable]):
        self._keras_model, self._model = keras_model, model
        self._variables = variables
        self._count = MicroBatchCount()
        with tf.init_scope():
            self.number = tf.Variable(1, trainable=False, dtype=tf.int32)
            self._has_begun = tf.Variable(False, trainable=False)  # the update

    @property
    def is_cut(self) -> bool:
        """Returns whether batches are cut by now."""
        return self._count.value > 1

    def retrying(
        self, make: Callable, takes_data: bool, prove: Callable | None
    ) -> Callable:
        """Returns a function like Keras's own, which retries a batch without memory.

        Args:
            make: Makes Keras's own function, as batches are cut by now.
            takes_data: Whether it takes a batch, not an iterator.
            prove: Function of the first batch that raises an error if such batches
                cannot be cut.
        """
        functions = {}  # by whether batches are cut, and by their sizes

        def run(argument):
            data = argument if takes_data else next(argument)
            if not functions:
                self._keras_model.create_variables(self._model, data, takes_data)
                if prove:
                    prove(data)
            saved = self._save()
            spec = getattr(argument, "element_spec", None)
            while True:
                key = self.is_cut, repr(spec)
                if key not in functions:
                    function = make()
                    if not takes_data:
                        step_of = self._keras_model.step_of
                        function = step_of(self._model, function, spec)
                    functions[key] = function
                self._has_begun.assign(False)
                try:
                    return functions[key](data)
                except Exception as error:
                    if not is_out_of_memory(error) or self._has_begun.numpy():
                        raise
                    self._cut_finer(data, error)
                self._restore(saved)

        return run

    @contextlib.contextmanager
    def marking_updates(self):
        """Has updates begin when all gradients are there, and has them say so."""
        optimizer = self._model.optimizer
        apply_whole = optimizer.apply_gradients

        def apply_gradients(grads_and_vars, *args, **kwargs):
            pairs = list(grads_and_vars)
            gradients = [gradient for gradient, _ in pairs if gradient is not None]
            parts = tf.nest.flatten(gradients, expand_composites=True)
            with tf.control_dependencies(parts):
                begun = self._has_begun.assign(True)
            # All of it: `iterations` needs no gradient.
            with tf.control_dependencies([begun]):
                return apply_whole(pairs, *args, **kwargs)

        vars(optimizer)["apply_gradients"] = apply_gradients
        try:
            yield
        finally:
            vars(optimizer).pop("apply_gradients", None)

    def _cut_finer(self, data, error: Exception) -> None:
        rows = int(tf.nest.flatten(data)[0].shape[0])
        if self._count.is_last(rows):
            raise ValueError(
                "One example must fit in memory. Received: a batch of "
                f"{rows} examples, of which one alone ran out of memory. Use smaller "
                "examples, a smaller model, or a device with more memory."
            ) from error
        self._count.increase(rows, f"a batch of {rows} examples")
        self.number.assign(self._count.value)

    def _save(self) -> dict:
        """Returns the values of metrics, seeds and counters, by variable."""
        variables = [*self._variables, *self._keras_model.seeds_of(self._model)]
        variables += self._keras_model.counters_of(self._model)
        for metric in self._model.metrics:
            variables += self._keras_model.variables_of(metric)
        return {v.ref(): tf.identity(v.read_value()) for v in variables}

    def _restore(self, saved: dict) -> None:
        for key, value in saved.items():
            key.deref().assign(value)
        for metric in self._model.metrics:  # of the first step, which made variables
            variables = self._keras_model.variables_of(metric)
            if any(variable.ref() not in saved for variable in variables):
                metric.reset_state()
