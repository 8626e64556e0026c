"""Prediction in micro-batches.

    before_run    the micro-batches of the next batch (BatchRunner): their predictions
    session.run   Estimator's own run, which is fed with the batch's predictions

A session returns a fetched tensor that is also fed as it is, and computes nothing for
it. What is fed are copies of the model's own tensors, which keep the values of the last
micro-batch for the model's hooks.

N = number of examples in the batch.
"""

import numpy as np
import tensorflow as tf

from estimator_accum._graph import ancestors
from estimator_accum.microbatch._count import MicroBatchCount
from estimator_accum.microbatch._evaluation import EvaluationHook
from estimator_accum.microbatch._runner import ReplicaBatch


class PredictionHook(EvaluationHook):
    """Joins the predictions of each batch's micro-batches.

    Args:
        replica: The only replica, since Estimator predicts without a strategy.
        count: The number of micro-batches.
        predictions: `EstimatorSpec.predictions`, a Tensor or Tensors by name.

    Attributes:
        predictions: The predictions for Estimator to fetch. Those that do not depend on
            the micro-batch are the model's own.
    """

    _JOB = "prediction"

    def __init__(self, replica: ReplicaBatch, count: MicroBatchCount, predictions):
        super().__init__([replica], count)
        self._window = replica.window
        is_dict, begin = isinstance(predictions, dict), replica.window.begin.op
        named = predictions if is_dict else {None: predictions}
        self._predictions = {
            key: tf.identity(tensor)
            for key, tensor in named.items()
            if begin in ancestors([tensor.op])
        }
        named = named | self._predictions
        self.predictions = named if is_dict else named[None]

    def before_run(self, run_context):
        # Estimator.predict leaves out what `predict_keys` does not name.
        wanted = set(map(id, tf.nest.flatten(run_context.original_args.fetches)))
        self._fetched = {
            key: tensor
            for key, tensor in self._predictions.items()
            if id(tensor) in wanted
        }
        # In place: the runner holds this list.
        self._window.fetches[:] = [self._window.size, *self._fetched.values()]
        return super().before_run(run_context)

    def _results(self, fetched: list) -> dict:
        sizes, *columns = zip(*fetched[0], strict=True)
        return {
            tensor: _joined(_name(key), tensor, values, sizes)
            for (key, tensor), values in zip(
                self._fetched.items(), columns, strict=True
            )
        }


def _name(key) -> str:
    return "predictions" if key is None else f"predictions[{key!r}]"


def _joined(name: str, tensor: tf.Tensor, values: tuple, sizes: tuple) -> np.ndarray:
    """Returns a batch's prediction [N, ...], from those of its micro-batches.

    Args:
        name: Its name in messages.
        tensor: The graph's prediction.
        values: Its values, one for each micro-batch.
        sizes: The micro-batches' numbers of examples.

    Raises:
        ValueError: If several micro-batches cannot be joined.
    """
    if len(values) == 1:
        return values[0]
    # A mean that keeps its dimension has one row, in a micro-batch of one example too.
    is_fixed = tensor.shape.rank is not None and tensor.shape[:1] != [None]
    for value, size in zip(values, sizes, strict=True):
        if is_fixed or value.shape[:1] != (size,):
            raise ValueError(
                "A prediction must have one row per example, for micro-batches to be "
                f"joined. Received: {name} of shape {list(value.shape)} for {size} of "
                f"{sum(sizes)} examples. Give it a row per example, or leave it out "
                "with `predict_keys`."
            )
    shapes = sorted({value.shape[1:] for value in values})
    if len(shapes) > 1:
        raise ValueError(
            "A prediction must have rows of one shape in all micro-batches of a batch. "
            f"Received: {name} with rows of {list(shapes[0])} and {list(shapes[-1])}. "
            "Pad them to one length that does not depend on the micro-batch."
        )
    return np.concatenate(values)
