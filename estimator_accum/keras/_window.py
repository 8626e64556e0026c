"""Windows of Keras optimizers.

    mean = sum_i w_i * g_i / sum_i w_i

over all micro-batches i of the window and all replicas. Keras divides the loss by the
number of replicas, to share a batch among them: without weights, w_i is 1 / replicas,
so that a batch counts as one. Both sums are in units of no cluster, so that any number
of replicas may resume a saved window. One
implementation for every Keras, for eager execution, tf.function and graphs, which uses
the micro-step and the boundary of estimator_accum/core/window.py.
"""

import zlib
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.core.accumulators import (
    Accumulator,
    create_accumulator,
    variables_of,
)
from estimator_accum.core.clock import EveryKRuns
from estimator_accum.core.gradients import Gradient, dtype_of_sum
from estimator_accum.core.micro_batch import MicroBatch
from estimator_accum.core.options import AccumulationSteps, Options
from estimator_accum.core.plan import Plan
from estimator_accum.core.state import State
from estimator_accum.core.window import add, close
from estimator_accum.graph.branches import nan
from estimator_accum.graph.replicas import first_of
from estimator_accum.graph.variables import create_shared_scalar, set_to
from estimator_accum.keras._examples import UNKNOWN

# A function of (gradients, indices of variables) that applies the gradients in replica
# context, without a reduction, and returns the operations to run.
Apply = Callable[[list, tuple], list]


class Variables(tf.Module):
    """Variables of a window.

    Args:
        names: Names of the trained variables.
        variables: The trained `tf.Variable`s.

    Creates:
        `accumulation/micro_steps` (int64 scalar), `accumulation/window_loss`,
        `accumulation/weight`, `accumulation/loss` (scalars), and for each variable
        `<variable>/accumulator` of its shape, float32 for half precision, and, unless
        it is a scalar, `<variable>/accumulator_rows` (float32 [rows]): a checkpoint may
        be read before it is known which gradients are sparse.
    """

    def __init__(self, names: list[str], variables: list[tf.Variable]):
        super().__init__("accumulation")
        self.names, self.accumulators = [], []
        self.add(names, variables)
        dtypes = {variable.dtype.base_dtype for variable in variables}
        dtype = tf.float64 if tf.float64 in dtypes else tf.float32
        shape = tf.TensorShape([])
        self.weight = create_accumulator("accumulation/weight", shape, dtype)
        self.loss = create_accumulator("accumulation/loss", shape, dtype)
        self.window_loss = create_shared_scalar("accumulation/window_loss", dtype)
        self.micro_steps = create_shared_scalar("accumulation/micro_steps")
        # Number of the set of variables that the open window has gradients of, and the
        # largest and smallest number of examples that counted as one micro-batch of it;
        # they are in no checkpoint, and so not tracked.
        names = ("owner", "most", "least") if _is_eager() else ()
        scalars = {name: create_shared_scalar(f"accumulation/{name}") for name in names}
        for name in ("owner", "most", "least"):
            object.__setattr__(self, name, scalars.get(name))
        object.__setattr__(self, "_sets", {})  # sets of indices by the owner's number
        self.trained = None  # indices of the variables that get gradients
        self.sparse = set()  # of those, the ones with `IndexedSlices`

    def add(self, names: list[str], variables: list[tf.Variable]) -> None:
        """Creates the accumulators of more variables."""
        for name, v in zip(names, variables, strict=True):
            path, may_be_sparse = f"{name}/accumulator", v.shape.rank > 0
            dtype = dtype_of_sum(v.dtype.base_dtype)
            total = create_accumulator(path, v.shape, dtype, may_be_sparse)
            self.names.append(name)
            self.accumulators.append(total)

    def find_trained(self) -> None:
        """Sets `trained` to that of the open window, in eager execution."""
        if self.owner is not None:
            self.trained = self._sets.get(int(self.owner.numpy()), self.trained)

    @property
    def saved(self) -> list[tf.Variable]:
        """All variables, in an order that depends only on the trained ones."""
        summed = variables_of([*self.accumulators, self.weight, self.loss])
        return [self.micro_steps, self.window_loss, *summed]


class _Clock(EveryKRuns):
    """Counts micro-steps, whose gradients must be of the same variables in a window."""

    def __init__(self, steps: AccumulationSteps, variables: Variables):
        super().__init__(steps)
        self._variables = variables

    def opens_window(self, counter: tf.Variable) -> tf.Tensor:
        """Returns whether the counter is 0."""
        is_first = super().opens_window(counter)
        with tf.control_dependencies(_check_owner(self._variables, is_first)):
            return tf.identity(is_first)


def run_micro_step(
    variables: Variables,
    gradients: dict[int, Gradient],
    weight: tf.Tensor | None,
    loss: tf.Tensor | None,
    iterations: tf.Variable,
    options: Options,
    is_reduced: bool,
    apply: Apply,
    examples: tf.Tensor | None = None,
) -> tf.Tensor:
    """Accumulates one micro-batch and, at the boundary, updates; in replica context.

    Args:
        variables: The window's variables.
        gradients: Gradients by index of the variable.
        weight: Scalar, the micro-batch's weight; None means 1.
        loss: Scalar, this replica's loss with the scale of its gradients; None if
            unknown.
        iterations: Number of updates so far.
        options: `optimizer`, `gradient_accumulation_steps` and `on_nonfinite`.
        is_reduced: Whether every replica's gradients are already the sum over replicas.
        apply: Applies the mean.
        examples: Scalar int64, number of examples without a weight; None: unknown.

    Returns:
        Scalar bool, whether the window closed.
    """
    gradients = _of_known_kinds(variables, gradients)
    plan = _open(variables, options)
    dtype = variables.weight.total.dtype
    loss = None if loss is None else tf.cast(loss, dtype)
    counts_for = tf.constant(1 / plan.num_replicas, dtype)
    term = nan(dtype) if loss is None else loss
    scale = None
    if weight is not None:
        counts_for = tf.cast(weight, dtype)
        # Keras has divided the loss, and so the gradients.
        scale = counts_for if plan.num_replicas == 1 else counts_for * plan.num_replicas
        term = scale * term
    if is_reduced and plan.num_replicas > 1:  # each replica adds the same sum
        scale = counts_for
    if options.on_nonfinite == "skip_window" and loss is not None:
        # The boundary checks the weight, because some losses may be unknown.
        is_known = tf.logical_or(tf.math.is_finite(loss), tf.equal(counts_for, 0.0))
        counts_for = tf.where(is_known, counts_for, nan(dtype))
    micro_batch = MicroBatch(
        gradients=list(gradients.values()),
        variables=[],
        loss=loss,
        scale=scale,
        sums={"weight": counts_for, "loss": term},
    )
    counted = add(plan, micro_batch)
    steps = plan.clock.steps(iterations)
    if examples is None:
        examples = tf.constant(UNKNOWN, tf.int64)
    return _close_if_done(variables, plan, counted, tf.identity(steps), apply, examples)


def close_partial_window(
    variables: Variables, options: Options, apply: Apply
) -> tf.Tensor:
    """Applies the micro-batches in the window so far, in replica context."""
    nothing = tf.constant(0, tf.int64)
    unknown = tf.constant(UNKNOWN, tf.int64)
    plan = _open(variables, options)
    return _close_if_done(variables, plan, nothing, nothing, apply, unknown)


def discard(variables: Variables) -> None:
    """Empties the open window, in eager execution."""
    for i in variables.sparse:  # the next window overwrites dense sums
        for variable in variables_of([variables.accumulators[i]]):
            variable.assign(tf.zeros(variable.shape, variable.dtype))
    variables.micro_steps.assign(0)


def _open(variables: Variables, options: Options) -> Plan:
    """Returns the open window; it has touched rows for sparse gradients only."""
    accumulators = [
        Accumulator(a.total, a.touched if i in variables.sparse else None)
        for i, a in enumerate(variables.accumulators)
    ]
    return Plan(
        options=options,
        clock=_Clock(options.gradient_accumulation_steps, variables),
        names=_names(variables),
        num_replicas=tf.distribute.get_strategy().num_replicas_in_sync,
        replica_divisor=1,
        is_observed=False,
        state=State(
            accumulators=[accumulators[i] for i in variables.trained],
            sums={"weight": variables.weight, "loss": variables.loss},
            micro_steps=variables.micro_steps,
        ),
    )


def _close_if_done(
    variables: Variables, plan: Plan, counted, steps, apply: Apply, examples
):
    return tf.distribute.get_replica_context().merge_call(
        lambda strategy, *args: _finish(strategy, variables, plan, apply, *args),
        args=(counted, steps, examples),
    )


def _finish(
    strategy, variables: Variables, plan: Plan, apply: Apply, counted, steps, examples
) -> tf.Tensor:
    """Closes the window at a boundary, in cross-replica context."""
    counted = strategy.experimental_local_results(counted)
    is_boundary, micro_steps = plan.clock.count(
        plan.state.micro_steps, counted, first_of(strategy, steps)
    )
    with tf.control_dependencies(counted):  # a failed step owns nothing
        owned = []
        if variables.owner is not None and variables.trained is not None:
            owned = [set_to(variables.owner, _owner_of(variables))]
            sizes = strategy.experimental_local_results(examples)
            owned += _note(variables, sizes, micro_steps <= 1)

    def apply_mean(mean, loss) -> list:
        del loss
        applied = strategy.extended.call_for_each_replica(
            lambda gradients: _run(apply(gradients, variables.trained)), args=(mean,)
        )
        return strategy.experimental_local_results(applied)

    def update() -> tf.Tensor:
        result = close(strategy, plan, apply_mean)
        with tf.control_dependencies([set_to(variables.window_loss, result.loss)]):
            return tf.constant(True)

    with tf.control_dependencies(owned):
        is_boundary = tf.identity(is_boundary)
    return plan.clock.branch(
        plan.state.micro_steps, is_boundary, update, lambda: tf.constant(False)
    )


def _note(variables: Variables, examples: tuple, is_first: tf.Tensor) -> list:
    """Takes down the number of examples that count as one micro-batch, if it is known.

    A window that has mixed two numbers is kept until the warning; two windows may have
    a number each.
    """
    total = tf.add_n(examples)
    is_known = tf.reduce_all(tf.stack(examples) != UNKNOWN)  # a replica may have none
    most, least = variables.most.read_value(), variables.least.read_value()
    is_new = tf.logical_and(is_first, tf.equal(least, most))
    most, least = (tf.where(is_new, tf.zeros_like(n), n) for n in (most, least))
    smaller = tf.where(tf.equal(least, 0), total, tf.minimum(least, total))
    return [
        set_to(variables.most, tf.where(is_known, tf.maximum(most, total), most)),
        set_to(variables.least, tf.where(is_known, smaller, least)),
    ]


def _of_known_kinds(variables: Variables, gradients: dict[int, Gradient]):
    """Returns the gradients, each dense or sparse as in earlier micro-steps."""
    indices = tuple(gradients)
    is_new = variables.trained is None or indices != tuple(variables.trained)
    # Layers may be frozen or unfrozen between windows.
    if is_new and (variables.trained is None or _is_empty(variables)):
        variables.trained = indices
        for i, gradient in gradients.items():
            if isinstance(gradient, tf.IndexedSlices) and i not in variables.sparse:
                variables.sparse.add(i)
                _begin_rows(variables, variables.accumulators[i])
    elif is_new:
        raise ValueError(
            "Every micro-step must have gradients of the same variables. Received: "
            f"{_names(variables, indices)} after {_names(variables)}. Make one optimizer "
            "for each set of variables, by accumulate(), or end the window first, by "
            "apply_partial_window()."
        )
    return {
        i: _as_slices(g) if i in variables.sparse else tf.convert_to_tensor(g)
        for i, g in gradients.items()
    }


def _begin_rows(variables: Variables, accumulator: Accumulator) -> None:
    """Makes a sum that slices are added to of one that dense gradients may have had.

    These leave the sum of a closed window, and all its rows belong to an open one.
    """
    local = tf.distribute.get_strategy().experimental_local_results
    with tf.init_scope():
        if not tf.executing_eagerly():
            return
        is_open = int(variables.micro_steps.numpy()) > 0
        totals, all_touched = local(accumulator.total), local(accumulator.touched)
        for total, touched in zip(totals, all_touched, strict=True):
            has_rows = tf.reduce_any(touched > 0) or not tf.reduce_any(total != 0)
            if not has_rows and is_open:
                touched.assign(tf.ones_like(touched))
            elif not has_rows:
                total.assign(tf.zeros_like(total))


def _is_eager() -> bool:
    with tf.init_scope():
        return tf.executing_eagerly()


def _is_empty(variables: Variables) -> bool:
    """Returns whether the window is known to be empty now."""
    if variables.owner is None:
        return False
    with tf.init_scope():
        return int(variables.micro_steps.numpy()) == 0


def _owner_of(variables: Variables) -> tf.Tensor:
    """Returns a number > 0 for the set of variables that this micro-step trains."""
    indices = tuple(variables.trained)
    number = 1 + zlib.crc32(repr(indices).encode())
    variables._sets[number] = indices
    return tf.constant(number, tf.int64)


def _check_owner(variables: Variables, is_first: tf.Tensor) -> list:
    """Returns an assertion that the open window has gradients of the same variables."""
    if variables.owner is None:
        return []
    owner = variables.owner.read_value()
    is_known = tf.logical_or(tf.equal(owner, 0), tf.equal(owner, _owner_of(variables)))
    words = (
        "Every micro-step must have gradients of the same variables. Received: another "
        "set. Make one optimizer for each set, by accumulate()."
    )
    checked = tf.raw_ops.Assert(
        condition=tf.logical_or(is_first, is_known), data=[words]
    )
    return [] if checked is None else [checked]


def _as_slices(gradient: Gradient) -> tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.shape(gradient, tf.int64)
    return tf.IndexedSlices(gradient, tf.range(shape[0]), shape)


def _names(variables: Variables, indices=None) -> list[str]:
    return [
        variables.names[i] for i in (variables.trained if indices is None else indices)
    ]


def _run(operations) -> tf.Tensor:
    """Returns a tensor that needs `operations`; in eager execution they have run."""
    with tf.control_dependencies([o for o in operations if o is not None]):
        return tf.constant(True)
