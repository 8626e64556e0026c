"""Batches of a Keras model that run out of memory, retried in more micro-batches.

begin     hold the batch, save what the step writes before its update
run       Keras's own step
failed    before the update: restore what was saved, cut finer, run again;
          once the update has begun, raise the error
"""

import contextlib
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.graph.walks import descendants
from estimator_accum.keras._written import Values, assign, values_of, written_outside
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
        self._written = {}  # handles by their ids, before updates
        with tf.init_scope():
            self.number = tf.Variable(1, trainable=False, dtype=tf.int32)
            self._has_begun = tf.Variable(False, trainable=False)  # the update

    @property
    def is_cut(self) -> bool:
        """Returns whether batches are cut by now."""
        return self._count.value > 1

    def retrying(self, make: Callable, takes_data: bool, trace: Callable) -> Callable:
        """Returns a function like Keras's own, which retries a batch without memory.

        Args:
            make: Makes Keras's own function, as batches are cut by now.
            takes_data: Whether it takes a batch, not an iterator.
            trace: Function that traces the step of the first batch, and raises an error
                if batches that must be cut cannot be.
        """
        functions = {}  # by whether batches are cut, and by their sizes

        def run(argument):
            data = argument if takes_data else next(argument)
            if not functions:
                self._keras_model.create_variables(self._model, data, takes_data)
                trace(data)
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
                assign(saved)

        return run

    @contextlib.contextmanager
    def watching(self, is_trained: bool):
        """Has updates say that they begin, and finds the writes before them.

        An update begins when all gradients are there.
        """
        optimizer, begins = self._model.optimizer, []

        def apply_gradients(grads_and_vars, *args, **kwargs):
            pairs = list(grads_and_vars)
            gradients = [gradient for gradient, _ in pairs if gradient is not None]
            parts = tf.nest.flatten(gradients, expand_composites=True)
            with tf.control_dependencies(parts):
                begun = self._has_begun.assign(True, read_value=False)
            begins.append(begun)
            # All of it: `iterations` needs no gradient.
            with tf.control_dependencies([begun] if begun is not None else []):
                return apply_whole(pairs, *args, **kwargs)

        if is_trained:
            apply_whole = optimizer.apply_gradients
            vars(optimizer)["apply_gradients"] = apply_gradients
        try:
            yield
        finally:
            if is_trained:
                vars(optimizer).pop("apply_gradients", None)
        if not tf.executing_eagerly():
            updates = {*begins, *descendants(begins)}
            graph = tf.compat.v1.get_default_graph()
            for handle in written_outside(graph, updates):
                self._written[id(handle)] = handle

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

    def _save(self) -> Values:
        """Returns the values of variables that the step and its function write."""
        local = self._model.distribute_strategy.experimental_local_results
        counters = self._keras_model.counters_of(self._model)
        handles = [v.handle for counter in counters for v in local(counter)]
        return values_of([*self._written.values(), *handles])
