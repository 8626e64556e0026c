"""`microbatch_model_fn`: full batches in, micro-batches inside, one update each.

    update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i ) )

over the micro-batches i of one batch. As before, one `session.run(train_op)` is one
batch of input_fn, one update and one `global_step`.
"""

import contextlib
import copy
import inspect
import os
import re
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.core.arguments import check_count
from estimator_accum.core.current_batch import current_batch
from estimator_accum.core.options import check_batch_norm, check_reduction
from estimator_accum.core.registry import get_windows
from estimator_accum.core.state import place_of_window
from estimator_accum.core.trained import device_here
from estimator_accum.graph.internals import argument_names
from estimator_accum.graph.outermost import value_of_graph
from estimator_accum.graph.walks import ancestors, control_inputs_of, path_to
from estimator_accum.graph.writers import writers_of
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.collecting import mean_over_batch
from estimator_accum.microbatch.constants import constant_features
from estimator_accum.microbatch.count import MicroBatchCount
from estimator_accum.microbatch.hooks import (
    EarlyHook,
    MicroBatchHook,
    PredictionHook,
    TrainingHook,
)
from estimator_accum.microbatch.inputs import RefuseTraining, is_fed
from estimator_accum.microbatch.outside import check_sources
from estimator_accum.microbatch.own_optimizer.batch_loss import (
    check_declared,
    loss_of_batch,
)
from estimator_accum.microbatch.own_optimizer.head import find_rows
from estimator_accum.microbatch.own_optimizer.missing_rows import add_missing_rows
from estimator_accum.microbatch.own_optimizer.unedited import build_unedited
from estimator_accum.microbatch.repeatable import check_not_written
from estimator_accum.microbatch.replica import ReplicaBatch, complete
from estimator_accum.microbatch.static_rows import (
    check_error_is_of_sizes,
    check_no_sizes,
    sizes_of_model_fn,
)
from estimator_accum.microbatch.static_sizes import StaticSizeError, StaticSizes

_COLLECTIVES = re.compile(r"Collective|Nccl")
_REPLICAS_ATTRIBUTE = "_estimator_accum_replica_batches"


class SharedWeightsError(ValueError):
    """Several workers write the weights that micro-batches read."""


def microbatch_model_fn(
    model_fn: Callable,
    micro_batches: int | str = "auto",
    *,
    reduction: str = "mean",
    grow_after: int | None = None,
    batch_norm: str = "batch",
) -> Callable:
    """Returns a model_fn that trains each batch as several micro-batches.

        estimator = tf.estimator.Estimator(microbatch_model_fn(model_fn), folder)

    `input_fn` returns whole batches; `model_fn` sees one micro-batch at a time. With an
    optimizer of its own it gets the gradients of the whole batch, for any loss. If it
    trains by `make_accumulating_train_op` or `AccumulatingOptimizer`, these use the batch
    as their window and ignore K; `reduction` and `weight` declare how the loss combines
    examples. Operations that need a micro-batch run once for each, all others once per
    batch. Hooks, summaries and outer model_fns fetch values of the whole batch.

    With "auto", a batch that runs out of memory is rolled back and retried in twice as
    many micro-batches, with new dropout masks, or with recomputed layers; in evaluation
    and prediction as well. The output folder keeps the number for the next run. With a
    fixed number, evaluation and prediction use `model_fn` unchanged. One micro-batch gives
    the weights of the plain Estimator bit for bit (embeddings under plain gradient descent
    up to rounding), several micro-batches up to rounding. See docs/whole_batches.md.

    Args:
        model_fn: Function of features and, if it takes them, labels, mode, params and
            config.
        micro_batches: Number of micro-batches per batch, >= 1, at most one per example;
            "auto": 1, doubled after each out-of-memory error until the batch fits.
        reduction: For a model_fn that trains by this library: "mean" for a loss that is
            the mean over the micro-batch; "sum" for one that sums over its examples. A
            train op with `reduction="sum"` also counts as "sum".
        grow_after: Batches that fit in memory [batches] after which "auto" tries half
            as many micro-batches; each failed trial doubles the wait. None: never.
        batch_norm: For a model_fn with an optimizer of its own, the statistics by which
            layers of batch normalization normalize in training: "batch" for those of the
            whole batch, as the plain Estimator does; "micro_batch" for those of each
            micro-batch, which takes less memory. Moving averages get the statistics of
            the whole batch in both cases.

    Returns:
        A function with the arguments of `model_fn`, and config.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range. Where batches are split: if a model_fn
            uses a micro-batch in a way that several cannot replace, or declares a sum
            over examples as a mean; if a run fetches another batch's values; if the
            parts of a batch have different numbers of examples, or a part may belong to
            no example, one example does not fit in memory, or predictions cannot be
            joined.
    """
    is_auto = isinstance(micro_batches, str) and micro_batches == "auto"
    _check_arguments(model_fn, 1 if is_auto else micro_batches, grow_after)
    check_reduction(reduction)
    check_batch_norm(batch_norm)

    @tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
    def wrapped(features, labels=None, mode=None, params=None, config=None):
        arguments = {"labels": labels, "mode": mode, "params": params, "config": config}
        build = _with_arguments(model_fn, arguments)
        modes = tf.estimator.ModeKeys
        cut = (modes.TRAIN, modes.EVAL, modes.PREDICT) if is_auto else (modes.TRAIN,)
        # Inside another model_fn that is wrapped, the batch is split already.
        if mode not in cut or current_batch() is not None:
            return build(features, labels)
        whole = {"features": features, "labels": labels}
        if is_fed(whole):
            spec = build(features, labels)
            hooks = [RefuseTraining()] if mode == modes.TRAIN else []
            return spec._replace(training_hooks=hooks)
        is_trained = mode == modes.TRAIN

        def make_batch(data: dict) -> WholeBatch:
            return WholeBatch(data, reduction, is_auto, is_trained, batch_norm)

        def build_again(sliced: dict):
            copies = arguments | {"params": copy.deepcopy(params)}
            return _with_arguments(model_fn, copies)(*sliced.values())

        batch = make_batch(whole)
        sizes = sizes_of_model_fn(batch, whole, make_batch, build_again)

        def build_on_slice():
            try:
                with sizes.shown() if sizes is not None else contextlib.nullcontext():
                    return build(batch.sliced["features"], batch.sliced["labels"])
            except StaticSizeError as error:
                if sizes.has_rows:
                    check_error_is_of_sizes(error, whole, build_again)
                raise

        def make_count(of: str = ""):
            if not is_auto:
                return MicroBatchCount(int(micro_batches))
            path = None if config is None else _count_path(config, of)
            return MicroBatchCount(None, grow_after, path)

        if is_trained:
            return _trained(batch, whole, build_on_slice, sizes, make_count(), config)
        constants = constant_features(whole)
        with batch.as_current():
            spec = build_on_slice()
        check_no_sizes(sizes, whole)
        add_missing_rows(batch)
        if mode == modes.EVAL:
            return _evaluated(batch, spec, make_count("-eval"), constants)
        return _predicted(batch, spec, make_count("-predict"), constants)

    return _like(model_fn, wrapped)


def _check_arguments(model_fn, micro_batches, grow_after) -> None:
    if not callable(model_fn) or isinstance(model_fn, type):
        raise TypeError(
            "`model_fn` must be a function of features, labels, mode. "
            f"Received: {model_fn!r}. Pass the one that your Estimator has."
        )
    remedy = "Use 1 to split no batch."
    check_count("micro_batches", micro_batches, remedy, " or 'auto'")
    if grow_after is not None:
        remedy = "Use None to never try fewer."
        check_count("grow_after", grow_after, remedy, " or None")


def _trained(
    batch: WholeBatch,
    whole: dict,
    build: Callable,
    sizes: StaticSizes | None,
    count: MicroBatchCount,
    config,
):
    """Returns a spec whose train op is only the update."""
    spec, phases = build_unedited(batch, build)
    if phases is None:  # else the analysis of rows knows what belongs to examples
        check_no_sizes(sizes, whole)
        constants = constant_features(whole)
        spec = _split_declared(batch, spec)
        batches = [batch]
    else:
        _check_only_worker(config)
        batches = [phase.replicas[0].batch for phase in phases]
    for of_phase in batches:
        check_sources(of_phase)
        _check_micro_ops(of_phase.works.micro_ops)
    if phases is None:
        _check_writes(batch.works.micro_ops)
        replica = complete(batch, constants=constants)
    else:
        replica = phases[-1].replicas[0]
    hook = TrainingHook(
        _replicas(replica),
        count,
        find_rows,
        spec.scaffold.saver if spec.scaffold else None,
        config.model_dir if config is not None and config.is_chief else None,
        phases or [],
    )
    return spec._replace(
        training_hooks=[hook, *spec.training_hooks],
        training_chief_hooks=[EarlyHook(hook), *spec.training_chief_hooks],
    )


def _check_only_worker(config) -> None:
    """Raises SharedWeightsError if others write weights between micro-batches."""
    workers = getattr(config, "num_worker_replicas", 1)
    variables = tf.compat.v1.trainable_variables()
    if workers > 1 and place_of_window(variables, device_here(), False).is_on_worker:
        raise SharedWeightsError(
            "With parameter servers and several workers a model_fn must train by this "
            "library: the weights may change between the micro-batches of a batch. "
            f"Received: an optimizer of its own and {workers} workers. Use "
            "AccumulatingOptimizer or make_accumulating_train_op, which pull the weights "
            "once per batch, or one chief without workers."
        )


def _split_declared(batch: WholeBatch, spec):
    """Returns the spec of a model_fn that trains by this library, without micro-batches."""
    train_op = getattr(spec.train_op, "op", spec.train_op)
    if train_op is None:
        raise ValueError(
            "A model_fn must return a train op. Received: None in its EstimatorSpec. "
            "Pass the train op of make_accumulating_train_op or of an optimizer."
        )
    _check_update(batch.begin.op)
    if batch.batch_norm != "batch":
        raise ValueError(
            "`batch_norm` must be left out for a model_fn that trains by this library: "
            "its layers normalize each micro-batch, and update their averages with each. "
            f"Received: {batch.batch_norm!r}. Leave it out, or train by an optimizer of "
            "TensorFlow."
        )
    add_missing_rows(batch)
    for loss in {loss.ref(): loss for loss in (spec.loss, *batch.losses)}.values():
        check_declared(batch, loss)
    micro_ops, once = _split(train_op, batch.begin.op)
    batch.works.add(micro_ops=micro_ops)
    loss = mean_over_batch(batch, spec.loss, batch.weight, batch.reduction)
    check_not_written(batch.works.total.twice, batch.works.micro_ops)
    with tf.control_dependencies(None):
        train_op = tf.group(*once, name="train_batch")
    return spec._replace(loss=loss, train_op=train_op)


def _split(
    train_op: tf.Operation, begin: tf.Operation
) -> tuple[list[tf.Operation], list[tf.Operation]]:
    """Splits `train_op` into (per-micro-batch, per-batch) operations.

    Args:
        train_op: Train op of an EstimatorSpec; groups of operations are taken apart.
        begin: The placeholder on which every slice of the batch depends.
    """
    micro_ops, once, seen, waiting = [], [], set(), [train_op]
    while waiting:
        operation = waiting.pop()
        if operation in seen:
            continue
        seen.add(operation)
        if begin not in ancestors([operation]):
            once.append(operation)
        elif operation.type == "NoOp":
            waiting += control_inputs_of(operation)
        else:
            micro_ops.append(operation)
    return micro_ops, once


def _check_update(begin: tf.Operation) -> None:
    """Raises ValueError if an update is computed from a micro-batch.

    Args:
        begin: The placeholder on which every slice of the batch depends.
    """
    for window in get_windows():
        needed = ancestors([window.has_updated.op])
        if begin in needed:
            path = path_to(needed, needed[begin], first=6)
            raise ValueError(
                "The update, and its learning rate, must not depend on one micro-batch: "
                f"an update has several. Received: {path}. Compute it from "
                "get_or_create_update_step(), or from a number that you pass in."
            )


def _check_writes(micro_ops: list[tf.Operation]) -> None:
    """Raises ValueError if they write trained variables, with every micro-batch."""
    trained = {name for window in get_windows() for name in window.names}
    written = writers_of(ancestors(micro_ops))
    for variable in sorted(written, key=lambda op: op.name):
        if variable.name in trained:
            raise ValueError(
                "A trained variable must not be changed by anything computed from a "
                "micro-batch, which would change it with every micro-batch. Received: "
                f"{variable.name}, written by {written[variable][0].name}. Put what "
                "changes it into the loss, or leave it out."
            )


def _check_micro_ops(micro_ops: list[tf.Operation]) -> None:
    """Raises ValueError if they wait for the update, or for other replicas."""
    updates = {
        operation
        for window in get_windows()
        for operation in (window.update_step_after.op, window.has_updated.op)
    }
    needed = ancestors(micro_ops)
    for operation in needed:
        if operation in updates:
            raise ValueError(
                "An operation that needs the micro-batch must not wait for the update, "
                f"which comes after the last of them. Received: {path_to(needed, operation)}. "
                "Group it with the train op (tf.group) without a dependency."
            )
        if _COLLECTIVES.match(operation.type):
            raise ValueError(
                "Micro-batches must not communicate: each replica runs as many as its "
                f"memory asks for. Received: {operation.name} of type "
                f"{operation.type}. Use batch normalization that is not synchronized."
            )


def _evaluated(batch: WholeBatch, spec, count: MicroBatchCount, constants: list):
    """Returns the spec of an evaluation in micro-batches."""
    metrics = _split_metrics(batch, spec.eval_metric_ops)
    check_sources(batch)
    _check_micro_ops(batch.works.micro_ops)
    batch.works.add(empty=batch.works.micro_ops)  # as without micro-batches
    loss, refusals = loss_of_batch(batch, spec.loss)
    replicas = _replicas(complete(batch, constants=constants, refusals=refusals))
    hook = MicroBatchHook(replicas, count, find_rows)
    return spec._replace(
        loss=loss,
        eval_metric_ops=metrics,
        evaluation_hooks=[hook, *spec.evaluation_hooks],
    )


def _predicted(batch: WholeBatch, spec, count: MicroBatchCount, constants: list):
    """Returns the spec of a prediction in micro-batches."""
    predictions = tf.nest.flatten(spec.predictions)
    check_sources(batch, predictions)
    replica = complete(batch, predictions, constants=constants)
    hook = PredictionHook(replica, count, find_rows, spec.predictions)
    return spec._replace(
        predictions=hook.predictions,
        prediction_hooks=[hook, *spec.prediction_hooks],
    )


def _split_metrics(batch: WholeBatch, metrics: dict[str, tuple]) -> dict[str, tuple]:
    """Moves metric updates that need the micro-batch from `metrics` to `batch`.

    Args:
        batch: The batch, which gets the operations of each micro-batch.
        metrics: `EstimatorSpec.eval_metric_ops`, (value, update) by name.

    Returns:
        The metrics, whose updates do the rest, once a batch.

    Raises:
        ValueError: If a metric's value needs a micro-batch.
    """
    begin, rest = batch.begin.op, {}
    for name, (value, update) in metrics.items():
        if begin in ancestors(_operations(value)):
            raise ValueError(
                "A metric's value must be computed from variables, since it is read "
                f"after the last batch. Received: {name!r}, computed from a batch. "
                "Use a streaming metric, such as tf.compat.v1.metrics.mean."
            )
        with tf.control_dependencies(None):
            whole = tf.group(*_operations(update))
        micro_ops, once = _split(whole, begin)
        batch.works.add(micro_ops=micro_ops)
        with tf.control_dependencies(None):
            rest[name] = value, tf.group(*once)
    return rest


def _operations(structure) -> list[tf.Operation]:
    return [getattr(element, "op", element) for element in tf.nest.flatten(structure)]


def _replicas(replica: ReplicaBatch) -> list[ReplicaBatch]:
    """Returns the graph's list of replicas, which gets this one too.

    Every replica has a hook, of which only the first one's runs.
    """
    graph = tf.compat.v1.get_default_graph()
    replicas = value_of_graph(graph, _REPLICAS_ATTRIBUTE, [])
    replicas.append(replica)
    return replicas


def _with_arguments(model_fn: Callable, values: dict) -> Callable:
    """Returns a function of (features, labels) that calls `model_fn` by keywords."""
    taken = {name: values[name] for name in argument_names(model_fn) if name in values}

    def build(features, labels):
        arguments = {**taken, "labels": labels} if "labels" in taken else taken
        return model_fn(features=features, **arguments)

    return build


def _like(model_fn: Callable, wrapped: Callable) -> Callable:
    """Returns `wrapped` with the signature of `model_fn`, which Estimator reads."""
    names = dict.fromkeys([*argument_names(model_fn), "mode", "config"])
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    wrapped.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind) for name in names]
    )
    return wrapped


def _count_path(config, of: str) -> str:
    """Returns the count's file: one per task, since each has its own memory.

    Args:
        config: The Estimator's `tf.estimator.RunConfig`.
        of: Part of the name for the use of the number, such as "-eval".
    """
    task = ""
    if config.num_worker_replicas > 1:
        task = f"-{config.task_type}-{config.task_id}"
    return os.path.join(config.model_dir, f"micro_batches{of}{task}.json")
