"""`AccumulationCallback`, which watches the windows of `fit`."""

import tensorflow as tf

from estimator_accum.keras._keras_3 import Keras3
from estimator_accum.keras._optimizer import Accumulating

_CHOICES = ("keep", "apply", "apply_every_epoch")


class AccumulationCallback:
    """A callback of `fit` for an optimizer from `accumulate`, of any Keras.

    `fit` ends an epoch when the data ends, which may be in mid-window.

    Args:
        partial_window: "keep" leaves a partial window open: the next epoch, `fit` or
            process that loads the model continues it. "apply" applies it when `fit`
            ends, and "apply_every_epoch" at the end of each epoch, before validation;
            both divide it by its own weight. If another callback has put other weights
            into the model before, such as the best ones, it is left out.

    Adds to the logs of `fit` (History, CSVLogger, TensorBoard, the progress bar):
        `updates`, the number of optimizer updates, after each epoch (Keras 3: after
        each batch), and `window_loss`, the mean loss of the last window that closed,
        after each batch, once one has closed in this `fit`.

    Raises:
        ValueError: If `partial_window` is not one of these values.
        TypeError: From `fit`, if the model's optimizer is not from `accumulate`.
        RuntimeError: From `fit`, in a graph.

    Example:
        model.fit(data, callbacks=[AccumulationCallback("apply")])
    """

    # Attributes that Keras's callback lists read, besides the hooks.
    _supports_tf_logs = True
    _chief_worker_only = None
    async_safe = False

    def __init__(self, partial_window: str = "keep"):
        if partial_window not in _CHOICES:
            raise ValueError(
                "`partial_window` must be one of 'keep', 'apply' and "
                f"'apply_every_epoch'. Received: {partial_window!r}. Use 'keep' to "
                "resume later."
            )
        self.partial_window = partial_window
        self.model, self.params = None, {}
        self._is_training = self._is_last_epoch = False
        self._first_update = 0

    def __getattr__(self, name):
        if name.startswith("on_"):  # the hooks that are not defined below
            return _do_nothing
        raise AttributeError(name)

    def set_model(self, model) -> None:
        """Sets the model, which Keras does before it calls the hooks."""
        self.model = model

    def set_params(self, params) -> None:
        """Sets the parameters of `fit`."""
        self.params = params

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False

    @property
    def _optimizer(self) -> Accumulating:
        optimizer = self.model.optimizer
        # Keras 2 may have wrapped it in a LossScaleOptimizer.
        inner = getattr(optimizer, "inner_optimizer", None)
        for candidate in (optimizer, inner):
            if isinstance(candidate, Accumulating):
                return candidate
        raise TypeError(
            "AccumulationCallback must have a model with an optimizer from "
            f"accumulate(). Received: {type(optimizer).__name__}. Compile the model "
            "with accumulate(optimizer)."
        )

    def on_train_begin(self, logs=None) -> None:
        """Stores the number of updates at the start of training."""
        del logs
        if not tf.executing_eagerly():
            raise RuntimeError(
                "AccumulationCallback must be called in TensorFlow 2's behavior: it "
                "reads variables. Received: fit() in a graph. Leave the callback out, or "
                "do not disable eager execution."
            )
        self._is_training = True
        self._first_update = int(self._optimizer.iterations.numpy())
        # The optimizer applies it before EMA's averages become the weights, which Keras
        # does before `on_train_end`.
        is_applied = self.partial_window == "apply"
        # In both cases: a `fit` that fails leaves what it has set.
        self._optimizer.partial_window = "apply" if is_applied else "keep"

    def on_epoch_begin(self, epoch, logs=None) -> None:
        """Notes whether `fit` ends with this epoch."""
        del logs
        self._is_last_epoch = epoch + 1 == self.params.get("epochs")

    def on_train_batch_begin(self, batch, logs=None) -> None:
        """Forgets the weights of an earlier epoch's end."""
        del batch, logs
        if self.params.get("steps") is not None:  # else it may have no data
            self._optimizer.forget_weights()

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Adds to the values that the progress bar shows; ends the epoch if it is known.

        Later events may come too late: other callbacks change the weights there.
        """
        steps = self.params.get("steps")
        is_last = self.model.stop_training or (steps is not None and batch + 1 >= steps)
        if self.partial_window != "keep" and (is_last or steps is None):
            self._optimizer.note_weights()
        if is_last:
            self._apply_if_due()
        self._add_to(logs, is_epoch=False)

    def on_test_begin(self, logs=None) -> None:
        """Ends the epoch: inside `fit`, validation comes before `on_epoch_end`."""
        del logs
        if self._is_training:
            self._end_epoch()

    def on_epoch_end(self, epoch, logs=None) -> None:
        """Adds to the values that History keeps."""
        del epoch
        self._end_epoch()
        self._add_to(logs, is_epoch=True)

    def on_train_end(self, logs=None) -> None:
        """Applies a partial window that is still open."""
        del logs
        self._is_training = False
        if self.partial_window == "apply":
            self._optimizer.apply_or_discard()
            self._optimizer.partial_window = "keep"

    def _end_epoch(self) -> None:
        self._optimizer.warn_of_short_batches()
        self._apply_if_due()

    def _apply_if_due(self) -> None:
        is_last = self.partial_window == "apply" and self._is_last_epoch
        if is_last or self.partial_window == "apply_every_epoch":
            self._optimizer.apply_or_discard()

    def _add_to(self, logs, is_epoch: bool) -> None:
        optimizer = self._optimizer
        updates = int(optimizer.iterations.numpy())
        has_updated = updates != self._first_update
        if logs is None or not (has_updated or is_epoch):
            return
        # The bar of Keras 2 would show the mean of all values so far.
        if is_epoch or isinstance(optimizer, Keras3):
            logs["updates"] = updates
        # EarlyStopping would take the NaN of an unknown loss for no progress.
        if has_updated and optimizer.has_loss and optimizer.window_loss is not None:
            logs["window_loss"] = float(optimizer.window_loss.numpy())


def _do_nothing(*args, **kwargs) -> None:
    del args, kwargs
