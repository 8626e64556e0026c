"""Builds the train op of a model_fn that has an optimizer of its own.

    micro-batches    forward and backward; sums of gradients, rows that are reported
    once             the train op, and whatever else the model_fn writes

If a gradient reads what an earlier update of the same train op has changed, there are
several such phases (phases.py); the last one is the train op.
"""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum.graph.walks import ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.division import divide
from estimator_accum.microbatch.own_optimizer.once_per_batch import Model
from estimator_accum.microbatch.own_optimizer.order import order
from estimator_accum.microbatch.own_optimizer.patches import intercepting
from estimator_accum.microbatch.own_optimizer.phases import Phases
from estimator_accum.microbatch.own_optimizer.steps import complete_phases
from estimator_accum.microbatch.repeatable import make_repeatable
from estimator_accum.microbatch.replica import StepPhase, complete


def build_unedited(batch: WholeBatch, build: Callable):
    """Returns the EstimatorSpec of a model_fn, and its phases.

    If it trains by this library, the latter are None. If it has a train op of its own,
    that is what the last phase runs once.

    Args:
        batch: The batch; the operations of its micro-batches are added to it.
        build: Calls the model_fn on a micro-batch.

    Raises:
        ValueError: If no gradient with respect to a variable is computed, or what the
            model_fn does with a micro-batch cannot be done with several.
    """
    phases = Phases([batch])
    with batch.as_current(), intercepting(phases.gradients):
        spec = build()
    interception = phases.all[0][0]
    if batch.has_train_op and not phases.is_used:
        with batch.as_current():
            make_repeatable(batch.works.total.twice)
        return spec, None
    train_op = getattr(spec.train_op, "op", spec.train_op)
    _check_trains(batch, phases, train_op)
    losses = [spec.loss, *tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)]
    if len(phases.all) > 1:
        built = complete_phases(phases, [], [train_op], losses)
        with tf.control_dependencies(None):
            train_op = tf.group(*built[-1].changes, name="train_batch")
        return spec._replace(train_op=train_op), built
    losses[1:1] = [loss for call in interception.calls for loss in call.losses]
    with batch.as_current():
        model = Model(interception)
        plan = divide(model.graph, [train_op, *model.waits], losses)
        values = model.values(plan, losses)
        model.share_draws(values)
        parts = model.parts(values, losses)
        fed = [*(tensor for tensor, _ in values.pairs), *batch.works.total.done]
        order(plan._replace(fed=fed))
    with tf.control_dependencies(None):
        roots = [root for root in plan.roots if root not in model.waits]
        train_op = tf.group(*roots, *model.clear, name="train_batch")
    replica = complete(batch, **parts)
    return spec._replace(train_op=train_op), [
        StepPhase([replica], {}, [], [], [], None)
    ]


def _check_trains(batch: WholeBatch, phases: Phases, train_op: tf.Operation) -> None:
    if batch.has_train_op:
        raise ValueError(
            "A model_fn must train by this library or by optimizers of its own, not by "
            f"both. Received: {train_op.name}. Wrap all optimizers in "
            "AccumulatingOptimizer, or none."
        )
    if not phases.is_used:
        raise ValueError(
            "A model_fn must train by gradients with respect to variables. Received: "
            f"{getattr(train_op, 'name', None)} as the train op, and no call of "
            "tf.gradients or an optimizer. Train without micro-batches."
        )
    reads = phases.reads
    if reads and ancestors([train_op]).keys().isdisjoint(reads):
        raise ValueError(
            "The train op must use the gradients: nothing else has a micro-batch, such "
            f"as operations that a hook runs. Received: {train_op.name}, which needs "
            "none of them. Put all updates into the train op, or train without "
            "micro-batches."
        )
