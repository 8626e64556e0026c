"""`AccumulatingOptimizer`: accumulation as a `tf.compat.v1.train.Optimizer`."""

import inspect
from collections.abc import Callable, Iterable

import tensorflow as tf

from estimator_accum.checks.before_runs import look_at_changes
from estimator_accum.checks.declared_loss import (
    check_declared_loss,
    check_equal_weights,
)
from estimator_accum.core.arguments import check_graph, check_loss
from estimator_accum.core.change import (
    are_as_computed,
    find_change,
    losses_of,
    remember,
)
from estimator_accum.core.clock import EveryKRuns, clock_of
from estimator_accum.core.current_batch import current_batch
from estimator_accum.core.gradients import Gradient
from estimator_accum.core.interception import without_interception
from estimator_accum.core.linear import check_linear
from estimator_accum.core.micro_batch import makes_mean, micro_batch_of, weigh
from estimator_accum.core.multipliers import Multipliers
from estimator_accum.core.options import AccumulationSteps, Options, check_minimize
from estimator_accum.core.registry import get_windows
from estimator_accum.core.replica_context import check_replica_context
from estimator_accum.core.trained import check_trained
from estimator_accum.core.v1_optimizers import changes_gradients, takes
from estimator_accum.core.window import make_train_op
from estimator_accum.graph.internals import trackable_children


class AccumulatingOptimizer(tf.compat.v1.train.Optimizer):
    """Wraps an optimizer so that K micro-batches make one update.

        update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i ) )

    For code that takes an optimizer and makes the train op itself: heads and canned
    estimators of `tf.compat.v1.estimator`, `minimize` in a model_fn. Each call of
    `minimize` or `apply_gradients` makes one accumulating train op; see
    `make_accumulating_train_op` for the arguments, the variables and the errors. Changes
    to the gradients between `compute_gradients` and `apply_gradients` apply to the
    window's mean, before `clip_norm`. A learning-rate schedule must be computed from
    `get_or_create_update_step()`. Inside `microbatch_model_fn` the batch is the window,
    for any value of K.

    Args:
        optimizer: The `tf.compat.v1.train.Optimizer` that updates.
        gradient_accumulation_steps: K >= 1 [micro-steps per update], or a callable.
        clip_norm: Largest global norm of the window's mean gradient; None: no clipping.
        weight: The micro-batch's weight: a scalar Tensor, or a callable without
            arguments that returns it in the graph of the gradients. None means 1;
            inside `microbatch_model_fn` the number of examples.
        name: Scope of the window's counters; None takes the next free one.
        reduction: "mean" or "sum". Canned estimators of `tf.compat.v1.estimator` sum
            the loss over the batch unless `loss_reduction` says otherwise.
        sparse_norm: "rows", or "slices" for the norm of tf.clip_by_global_norm.
        on_nonfinite: "raise", "skip_micro_batch" or "skip_window".
        accumulator_dtype: Dtype of the accumulators; None keeps each variable's dtype,
            and takes float32 for float16 and bfloat16.
        noise_scale: Whether to estimate the gradient noise scale.
        update_ops: Operations that run with every micro-step; None takes the graph's
            `UPDATE_OPS`.
        after_update_ops: A function that makes the operations to run once after each
            update.

    Example:
        estimator = tf.compat.v1.estimator.DNNClassifier(
            [16],
            columns,
            optimizer=lambda: AccumulatingOptimizer(
                tf.compat.v1.train.AdamOptimizer(1e-3),
                gradient_accumulation_steps=4,
                reduction="sum",
            ),
        )
    """

    def __init__(
        self,
        optimizer: tf.compat.v1.train.Optimizer,
        gradient_accumulation_steps: AccumulationSteps,
        clip_norm: float | None = None,
        weight: tf.Tensor | Callable[[], tf.Tensor] | None = None,
        name: str | None = None,
        *,
        reduction: str = "mean",
        sparse_norm: str = "rows",
        on_nonfinite: str = "raise",
        accumulator_dtype: tf.DType | None = None,
        noise_scale: bool = False,
        update_ops: list[tf.Operation] | None = None,
        after_update_ops: Callable[[], list[tf.Operation]] | None = None,
    ):
        self._options = Options.of(locals())
        super().__init__(use_locking=False, name=name or "AccumulatingOptimizer")
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self._optimizer = optimizer

    @tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
    def minimize(self, *args, **kwargs) -> tf.Operation:
        """Returns the train op, as TensorFlow's `minimize` does."""
        check_minimize(self._optimizer)
        return super().minimize(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
    def compute_gradients(self, loss, *args, **kwargs) -> list[tuple]:
        """Returns the (gradient, variable) pairs of the wrapped optimizer.

        Changes to the gradients before `apply_gradients` apply to the window's mean.
        """
        check_graph()
        # An optimizer that computes gradients in its own way may take a loss for each
        # example, for privacy say.
        is_own = changes_gradients(self._optimizer)
        if not callable(loss) and not is_own:
            loss = check_loss(loss)
        with without_interception():
            options = self._without_defaults(kwargs)
            pairs = list(self._optimizer.compute_gradients(loss, *args, **options))
        clock = clock_of(self._options.inside(current_batch()))
        if is_own and makes_mean(clock) and not _has_examples(loss):
            gradients = [gradient for gradient, _ in pairs if gradient is not None]
            check_linear(gradients, self._optimizer)
        remember(pairs, loss)
        return pairs

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple],
        global_step: tf.Variable | None = None,
        name: str | None = None,
    ) -> tf.Operation:
        """Accumulates one micro-batch's gradients; at the boundary, applies the mean.

        Args:
            grads_and_vars: (gradient, variable) pairs of the mean loss over this
                replica's micro-batch, from `compute_gradients`. They may be changed,
                but by nothing else of the micro-batch. From elsewhere only gradients
                that tf.gradients returns, constants, and sums and constant multiples.
            global_step: Variable that increases by 1 every micro-step; None leaves that
                to the caller.
            name: Ignored; the constructor's `name` is used.

        Returns:
            The train op.
        """
        del name
        check_graph()
        options = self._options.inside(current_batch())
        clock = clock_of(options)
        check_replica_context(options.optimizer)
        # Whatever can be made a tensor is taken, such as the result of an assignment.
        to_tensor = tf.compat.v1.convert_to_tensor_or_indexed_slices
        pairs = [(g if g is None else to_tensor(g), v) for g, v in grads_and_vars]
        loss = _loss_of([g for g, _ in pairs if g is not None])
        gradients, variables, device = check_trained(pairs, loss)
        if isinstance(clock, EveryKRuns):
            steps, reduction = options.gradient_accumulation_steps, options.reduction
            if are_as_computed(gradients):
                check_declared_loss(steps, reduction, loss)
            check_equal_weights(steps, loss, reduction, options.weight)
        change, multipliers = None, []
        if makes_mean(clock):  # else the given gradients are applied
            change = find_change(gradients, variables, get_windows())
            multipliers = [Multipliers(gradients)]
        if change is not None:
            _check_sparse_norm(options)
            pairs = zip(change.gradients, change.sources, strict=True)
            gradients, variables, device = check_trained(pairs, loss)
        value = options.weight() if callable(options.weight) else options.weight
        weight, scale = weigh(value, options.reduction)
        is_weighted = value is None and tf.get_static_value(scale) == 1.0
        micro_batch = micro_batch_of(
            options,
            clock,
            gradients,
            variables,
            loss,
            weight,
            scale,
            is_weighted,
            change,
        )._replace(device=device)
        train_op = make_train_op(options, clock, micro_batch, global_step)
        look_at_changes(multipliers, get_windows)
        return train_op

    def _without_defaults(self, kwargs: dict) -> dict:
        """Returns arguments that the wrapped optimizer takes, or that a caller has set.

        `minimize` of TensorFlow names all arguments of its own `compute_gradients`.
        """
        usual = inspect.signature(tf.compat.v1.train.Optimizer.compute_gradients)
        return {
            name: value
            for name, value in kwargs.items()
            if takes(self._optimizer, name)
            or name not in usual.parameters
            or value is not usual.parameters[name].default
        }

    def get_slot(self, var, name: str) -> tf.Variable | None:
        """Returns the wrapped optimizer's slot."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Returns the names of the wrapped optimizer's slots."""
        return self._optimizer.get_slot_names()

    def variables(self) -> list[tf.Variable]:
        """Returns the wrapped optimizer's variables, then the windows' variables."""
        return [*self._optimizer.variables(), *_window_variables()]

    def _trackable_children(self, *args, **kwargs):
        """Returns the children in object-based checkpoints, as of Keras Estimators."""
        children = trackable_children(self._optimizer, *args, **kwargs)
        return {**children, **{v.op.name: v for v in _window_variables()}}


def _has_examples(loss) -> bool:
    """Returns whether a loss has an axis for examples."""
    return not callable(loss) and tf.convert_to_tensor(loss).shape.rank != 0


def _loss_of(gradients: list[Gradient]) -> tf.Tensor | None:
    """Returns the loss to report; None unless it is known, one scalar of this graph."""
    with tf.init_scope():
        graph = tf.compat.v1.get_default_graph()
    losses = losses_of(gradients)
    if len(losses) != 1 or getattr(losses[0], "graph", None) is not graph:
        return None
    return losses[0] if losses[0].shape == [] else None


def _check_sparse_norm(options: Options) -> None:
    if options.sparse_norm == "slices":
        raise ValueError(
            "`sparse_norm='slices'` must not be combined with gradients that are changed "
            "before apply_gradients, whose slices are not known. Received: both. Leave "
            "`sparse_norm` out."
        )


def _window_variables() -> list[tf.Variable]:
    return [v for window in get_windows() for v in window.variables]
