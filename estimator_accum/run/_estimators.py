"""Makes every Estimator of the process train each batch in micro-batches."""

import logging

import tensorflow as tf

from estimator_accum import microbatch_model_fn

_logger = logging.getLogger("tensorflow.estimator_accum")


def cut_batches(micro_batches: int | str) -> None:
    """Changes `tf.estimator.Estimator` for the rest of the process.

    All ways to a model_fn lead through `Estimator._call_model_fn`: subclasses, canned
    estimators, TPUEstimator, strategies and `train_and_evaluate`.

    Args:
        micro_batches: As for `microbatch_model_fn`.
    """
    _logger.setLevel(logging.INFO)  # tells what it does
    kind = tf.compat.v1.estimator.Estimator
    own = kind._call_model_fn

    # AutoGraph has nothing to convert here, nor in the library.
    @tf.autograph.experimental.do_not_convert
    def call_model_fn(estimator, features, labels, mode, config):
        def model_fn(features, labels, mode, config):
            return own(estimator, features, labels, mode, config)

        if mode == tf.estimator.ModeKeys.TRAIN:
            _logger.info(
                "micro-batches: %s trains each batch in %s, then updates once",
                _name(estimator._model_fn),
                _described(micro_batches),
            )
        cut = microbatch_model_fn(model_fn, micro_batches)
        return cut(features, labels=labels, mode=mode, config=config)

    kind._call_model_fn = call_model_fn


def _described(micro_batches: int | str) -> str:
    if micro_batches == "auto":
        return "as few micro-batches as fit in memory"
    return f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"


def _name(model_fn) -> str:
    model_fn = getattr(model_fn, "func", model_fn)  # of functools.partial
    name = getattr(model_fn, "__qualname__", type(model_fn).__name__)
    return f"{getattr(model_fn, '__module__', '')}.{name}".replace("<locals>.", "")
