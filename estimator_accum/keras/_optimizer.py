"""The optimizer that `accumulate` returns: a view of the wrapped one, with a window.

All attributes that it does not define (hyperparameters, slots, the name, the number of
updates) are the wrapped optimizer's. The wrapped optimizer's whole `apply_gradients`
runs once per window, with the mean, and so its `iterations`, schedules, weight decay,
EMA and clipping act once per update. In checkpoints it is the wrapped optimizer too,
with the window as one more dependency: a checkpoint that was written without
accumulation can be read.
"""

import logging
import threading

import numpy as np
import tensorflow as tf

from estimator_accum.checks.declared_loss import check_equal_weights
from estimator_accum.core.arguments import check_weight
from estimator_accum.core.gradients import cast
from estimator_accum.core.options import Options
from estimator_accum.core.trained import check_own_copies
from estimator_accum.graph.internals import (
    DelegatingTrackable,
    context_of,
    key_of,
    outer_graph_of,
    track,
)
from estimator_accum.keras._examples import is_sum_over_examples, number_of_examples
from estimator_accum.keras._saving import Saving
from estimator_accum.keras._window import (
    Variables,
    close_partial_window,
    discard,
    run_micro_step,
)
from estimator_accum.rows.places import has_one_slice_a_row

WINDOW = "accumulation_window"  # name in checkpoints
_logger = logging.getLogger("tensorflow.estimator_accum")


class Accumulating(Saving, DelegatingTrackable):
    """Optimizer part that all Keras versions share; see `accumulate` for arguments."""

    _TAKES_MORE_VARIABLES = False  # whether others than the first ones may be trained

    def __init__(
        self,
        optimizer,
        gradient_accumulation_steps=4,
        weight=None,
        on_nonfinite=None,
    ):
        # Attributes of this object; all others are set on the wrapped optimizer.
        vars(self).update(
            _inner=optimizer,
            _trackable=optimizer,  # of DelegatingTrackable
            gradient_accumulation_steps=gradient_accumulation_steps,
            weight=weight,
            on_nonfinite=on_nonfinite,
            partial_window="keep",
            _window=None,
            _indices={},
            _trained_variables=[],
            _losses={},
            _clock=None,
            _strategy=None,
            _noted_weights=[],
            has_loss=False,  # whether a micro-step has had a known loss
            _closing={},  # functions that apply a partial window
            _is_traced=False,
            _has_warned=False,
            _is_checked=False,
            _has_looked_at_clipping=False,
        )

    def __getattr__(self, name):
        if name == "_inner" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getattribute__(self, name):
        # Keras's own method would look for hyperparameters first.
        return object.__getattribute__(self, name)

    def __setattr__(self, name, value):
        if name in ("gradient_accumulation_steps", "weight", "on_nonfinite"):
            self._check_setting(name, value)
        is_own = name in vars(self)
        if is_own or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)

    def __dir__(self):
        # Keras saves all attributes that it finds here, and these are saved already.
        hidden = {"inner_optimizer", "_inner", "_trackable", "_innermost"}
        return sorted(set(super().__dir__()) - hidden)

    @property
    def inner_optimizer(self):
        """The wrapped optimizer."""
        return self._inner

    @property
    def _innermost(self):
        """The optimizer that has the slots."""
        return getattr(self._inner, "inner_optimizer", self._inner)

    @property
    def iterations(self):
        """The number of updates."""
        return self._inner.iterations

    @iterations.setter
    def iterations(self, variable):
        self._inner.iterations = variable

    @property
    def learning_rate(self):
        """The wrapped optimizer's learning rate."""
        return self._inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value):
        self._inner.learning_rate = value

    @property
    def _is_plain(self) -> bool:
        """Returns True for K = 1 without weight or policy: the wrapped optimizer does all."""
        steps = self.gradient_accumulation_steps
        is_one = not callable(steps) and steps == 1
        return is_one and self.weight is None and self.on_nonfinite is None

    def build(self, variables) -> None:
        """Creates the wrapped optimizer's variables and the window's."""
        variables = self._unknown(variables)
        if not variables or (self._indices and not self._TAKES_MORE_VARIABLES):
            return
        _check_variables(variables)
        self._strategy = tf.distribute.get_strategy()
        has_window = self._window is not None or not self._is_plain
        if has_window:
            _check_strategy(self._strategy)
        self._build_inner(variables)
        if has_window:
            names = [self._name_of(v) for v in variables]
            tf_variables = [self._tf_variable(v) for v in variables]
            check_own_copies(tf_variables)
            if self._window is None:
                self._window = Variables(names, tf_variables)
                track(self._inner, self._window, WINDOW)
            else:
                self._window.add(names, tf_variables)
        for variable in variables:
            self._indices[self._key(variable)] = len(self._trained_variables)
            self._trained_variables.append(variable)

    def _unknown(self, variables) -> list:
        """Returns those of the variables that the optimizer was not built with."""
        return [v for v in variables if self._key(v) not in self._indices]

    def _check_takes(self, unknown) -> None:
        if not self._TAKES_MORE_VARIABLES:
            names = ", ".join(self._name_of(v) for v in unknown)
            raise ValueError(
                "Variables must be those that the optimizer was built with. Received: "
                f"unknown variables, {names}. Make a new optimizer for another model, or "
                "for layers that are no longer frozen, or build this one with all "
                "variables first: optimizer.build(model.variables)."
            )

    def exclude_from_weight_decay(self, *args, **kwargs):
        """Delegates to the innermost optimizer, which decays the weights."""
        self._innermost.exclude_from_weight_decay(*args, **kwargs)

    def finalize_variable_values(self, var_list) -> None:
        """Applies a partial window if asked to, then delegates to the wrapped one."""
        if self.partial_window == "apply":
            self.apply_or_discard()
        self.warn_of_short_batches()
        self._inner.finalize_variable_values(var_list)

    def warn_of_short_batches(self) -> None:
        """Warns, once, if micro-batches of different sizes have counted as one each."""
        window = self._window
        is_noted = window is not None and window.most is not None
        if self._has_warned or not is_noted or not tf.executing_eagerly():
            return
        least, most = int(window.least.numpy()), int(window.most.numpy())
        if least < most:
            self._has_warned = True
            _logger.warning(
                "accumulate: micro-batches of %d to %d examples counted alike, so the "
                "updates are not those of the big batch, unless the loss is a sum over "
                "the examples, divided by a constant. If it is a mean, choose a "
                "batch_size that divides the number of examples, or leave a short last "
                "batch out, by batch(batch_size, drop_remainder=True) of tf.data. In a "
                "loop of your own, pass apply_gradients(pairs, weight=...).",
                least,
                most,
            )

    def apply_partial_window(self) -> bool:
        """Applies the open window, divided by its own weight.

        Call it between training steps, outside of `tf.function` and `strategy.run`; in
        a cluster, on every worker.

        Returns:
            Whether the window held any micro-step.

        Raises:
            ValueError: If the window was loaded and no training step followed.
        """
        self.warn_of_short_batches()
        if self._window is None or not int(self._window.micro_steps.numpy()):
            return False
        if self._window.trained is None:  # restored, and no step since
            raise ValueError(
                "A partial window must be applied after a training step of the same "
                "process, which tells the sparse gradients. Received: a window that was "
                "just loaded. Call fit() once."
            )
        window = self._window
        window.find_trained()
        kind = self.on_nonfinite, tuple(window.trained), frozenset(window.sparse)
        if kind not in self._closing:
            args = (window, self._options(), self._apply_to)
            self._closing[kind] = tf.function(lambda: close_partial_window(*args))
        self._strategy.run(self._closing[kind])
        return True

    def note_weights(self) -> None:
        """Notes the weights after the last step of the open window."""
        self.forget_weights()
        if self._window is None or not int(self._window.micro_steps.numpy()):
            return
        # A table with sparse gradients would be copied, and changes with the others.
        indices, sparse = self._window.trained or (), self._window.sparse
        indices = [i for i in indices if i not in sparse] or indices
        variables = (self._tf_variable(self._trained_variables[i]) for i in indices)
        self._noted_weights.extend((v, tf.convert_to_tensor(v)) for v in variables)

    def forget_weights(self) -> None:
        """Forgets noted weights, which the next update would have to copy."""
        self._noted_weights.clear()

    def apply_or_discard(self) -> None:
        """Applies the open window, or leaves it out if the model has other weights."""
        if all(
            np.array_equal(variable.numpy(), noted.numpy(), equal_nan=True)
            for variable, noted in self._noted_weights
        ):
            self.apply_partial_window()
        else:
            _logger.warning(
                "accumulate: a partial window was left out, because a callback has put "
                "other weights into the model than those of its gradients. List "
                "AccumulationCallback before a callback that swaps weights."
            )
            discard(self._window)
        self.forget_weights()

    @property
    def window_loss(self):
        """Mean loss of the last window that closed, a variable; None if unknown."""
        return None if self._window is None else self._window.window_loss

    @property
    def micro_steps(self):
        """Micro-steps in the open window, a variable; None without windows."""
        return None if self._window is None else self._window.micro_steps

    def _key(self, variable):
        return key_of(self._tf_variable(variable))

    def _remember_loss(self, loss) -> None:
        if isinstance(loss, tf.Tensor) and loss.shape.rank == 0:
            self._losses[threading.get_ident()] = loss  # each replica has a thread

    def _known_loss(self):
        """Returns this micro-batch's loss; None if the gradients came without one."""
        loss = self._losses.pop(threading.get_ident(), None)
        if loss is None or tf.executing_eagerly():
            return loss
        graph = getattr(loss, "graph", None)
        return loss if graph is tf.compat.v1.get_default_graph() else None

    def _options(self) -> Options:
        steps = self.gradient_accumulation_steps
        return Options(self, steps, on_nonfinite=self.on_nonfinite)

    def _apply_to(self, gradients, indices):
        variables = [self._trained_variables[i] for i in indices]
        pairs = zip(gradients, variables, strict=True)
        return self._apply_reduced(
            [(cast(g, self._tf_variable(v).dtype), v) for g, v in pairs]
        )

    def _accumulate(self, grads_and_vars, weight, is_reduced: bool):
        """Runs one micro-step; returns whether it closed a window."""
        pairs = list(grads_and_vars)
        replica = tf.distribute.get_replica_context()
        if replica is None:
            raise RuntimeError(
                "apply_gradients() must be called in replica context. Received: "
                "cross-replica context. Call it inside strategy.run()."
            )
        if not pairs:  # ignored, as by Keras
            return self._run_plain(pairs, is_reduced)
        if not self._indices:
            replica.merge_call(lambda strategy: self.build([v for _, v in pairs]))
        loss = self._known_loss()
        self.has_loss |= loss is not None
        if not tf.executing_eagerly():
            self._is_traced = True
        if weight is None and self.weight is not None:
            weight = self.weight()
        if weight is not None:
            weight = check_weight(weight)
        if self._window is None and weight is None:
            return self._run_plain(pairs, is_reduced)
        if self._window is None:
            raise ValueError(
                "`weight` must be given to accumulate() where every micro-step is an "
                "update. Received: a weight in apply_gradients(), and "
                "gradient_accumulation_steps=1. Pass accumulate(..., weight=...)."
            )
        gradients = self._gradients_by_index(self._without_empty(pairs), replica)
        self._check_clipping([*gradients.values()])
        examples = None
        if weight is None:
            self._check_equal_weights(loss)
            if not _counts_examples(loss):
                examples = number_of_examples([*gradients.values()])
        return run_micro_step(
            self._window,
            gradients,
            weight,
            loss,
            self._tf_variable(self.iterations),
            self._options(),
            is_reduced,
            self._apply_to,
            examples,
        )

    @tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
    def _check_equal_weights(self, loss) -> None:
        """Warns, once, of a loss whose divisor differs between micro-batches."""
        if loss is not None and not tf.executing_eagerly() and not self._is_checked:
            self._is_checked = True
            remedy = (
                "Split whole batches by estimator_accum.keras.microbatch, which computes "
                "the loss of the whole batch, or pass apply_gradients(pairs, weight=...) "
                "in a loop of your own."
            )
            steps = self.gradient_accumulation_steps
            check_equal_weights(steps, loss, "mean", None, remedy)

    @tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
    def _check_clipping(self, gradients: list) -> None:
        """Warns, once, if Keras would clip each slice of a gradient in an unsplit batch."""
        parts = [self._innermost, *getattr(self._innermost, "optimizers", [])]
        options = [
            name
            for name in ("clipnorm", "global_clipnorm", "clipvalue")
            if any(getattr(part, name, None) for part in parts)
        ]
        sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
        if self._has_looked_at_clipping or not options or not sparse:
            return
        self._has_looked_at_clipping = True
        if not all(map(_has_one_slice_a_row, sparse)):
            _logger.warning(
                "accumulate: %s applies to an embedding's gradient with each row of the "
                "window once, where Keras has a slice for each lookup of a batch, so the "
                "updates are not those of the big batch once they are clipped. For these, "
                "split whole batches by estimator_accum.keras.microbatch.",
                options[0],
            )

    def _gradients_by_index(self, pairs: list, replica) -> dict:
        """Returns gradients by the numbers of their variables, which may be new."""
        if unknown := self._unknown([v for _, v in pairs]):
            self._check_takes(unknown)
            replica.merge_call(lambda strategy: self.build(unknown))
        if is_compiled_by_xla():
            self._check_xla(pairs)
        gradients = {}
        for gradient, variable in pairs:
            index = self._indices[self._key(variable)]
            if index in gradients:  # Keras would make two updates of it
                raise ValueError(
                    "apply_gradients() must get each variable once, for which a window "
                    f"has one sum. Received: {self._name_of(variable)} twice. Leave the "
                    "second one out, also where the gradients are computed."
                )
            gradients[index] = gradient
        return dict(sorted(gradients.items()))

    def _check_setting(self, name: str, value) -> None:
        before = getattr(self, name)
        if self._is_traced and value != before:
            raise ValueError(
                f"`{name}` must not be set once a training step was traced, which would "
                f"continue with {before}. Received: {value}. Pass a callable to "
                "accumulate(), or compile the model with a new optimizer."
            )
        if self._indices and self._window is None and value not in (None, 1):
            raise ValueError(
                f"`{name}` must not be set once the optimizer was built without a "
                f"window. Received: {value}. Pass it to accumulate()."
            )

    def _check_xla(self, pairs) -> None:
        if self.on_nonfinite == "raise":
            raise ValueError(
                "`on_nonfinite` must not be 'raise' under XLA, which has no "
                "assertions. Received: jit_compile. Pass on_nonfinite="
                "'skip_micro_batch' or 'skip_window', or compile(jit_compile=False)."
            )
        is_sparse = any(isinstance(g, tf.IndexedSlices) for g, _ in pairs)
        if is_sparse and not self._has_sparse_xla:
            raise ValueError(
                "Sparse gradients must not be compiled by XLA with Keras 2: it would "
                "update wrong rows. Received: jit_compile and a gradient that is an "
                "IndexedSlices. Pass compile(jit_compile=False), or use Keras 3."
            )


def _has_one_slice_a_row(gradient: tf.IndexedSlices) -> bool:
    """Returns whether an unsplit batch provably has one slice for each row."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    is_traced = getattr(gradient.indices, "graph", None) is graph is not None
    return is_traced and has_one_slice_a_row(gradient) is True


@tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
def _counts_examples(loss: tf.Tensor | None) -> bool:
    """Returns whether micro-batches provably count by their examples, without a weight."""
    is_traced = loss is not None and not tf.executing_eagerly()
    return is_traced and is_sum_over_examples(loss)


def is_compiled_by_xla() -> bool:
    """Returns whether this is traced for tf.function(jit_compile=True)."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        context = context_of(graph)
        while context is not None:
            if context.IsXLAContext():
                return True
            context = context.outer_context
        graph = outer_graph_of(graph)
    return False


def _check_strategy(strategy) -> None:
    """Raises ValueError for parameter servers, whose workers would share a window."""
    has_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if has_servers:
        raise ValueError(
            "Keras optimizers must accumulate without parameter servers. Received: a "
            "ParameterServerStrategy. Use MultiWorkerMirroredStrategy, or an Estimator "
            "with make_accumulating_train_op."
        )


def _check_variables(variables) -> None:
    overwritten = [v for v in variables if getattr(v, "overwrite_with_gradient", False)]
    if overwritten:
        raise ValueError(
            "Variables that their gradients overwrite, those of float8 layers, must "
            "be trained without accumulation: they have no mean. Received: "
            f"{overwritten[0].name}. Use another dtype policy."
        )
