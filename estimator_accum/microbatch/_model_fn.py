"""`microbatch_model_fn`: full batches in, micro-batches inside, one update each.

    update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i ) )

over the micro-batches i of one batch. As before, one `session.run(train_op)` is one
batch of input_fn, one update and one `global_step`.
"""

import inspect
import os
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from estimator_accum._clock import current_batch
from estimator_accum._options import check_reduction, check_scalar
from estimator_accum.microbatch._batch import WholeBatch
from estimator_accum.microbatch._count import FixedCount, MicroBatchCount
from estimator_accum.microbatch._evaluation import (
    EvaluationHook,
    UntrainedBatch,
    split_metrics,
)
from estimator_accum.microbatch._export import RefuseTraining, is_fed
from estimator_accum.microbatch._graph import (
    Snapshot,
    ancestors,
    check_input_summaries,
    check_micro_ops,
    check_update,
    split_train_op,
)
from estimator_accum.microbatch._hook import MicroBatchHook
from estimator_accum.microbatch._prediction import PredictionHook
from estimator_accum.microbatch._repeatable import check_not_written
from estimator_accum.microbatch._runner import ReplicaBatch
from estimator_accum.microbatch._staging import Slot, StagedBatch, stage
from estimator_accum.unedited._reports import check_declared, loss_of_batch
from estimator_accum.unedited._train_op import build_unedited

_REPLICAS_ATTRIBUTE = "_estimator_accum_replica_batches"


def microbatch_model_fn(
    model_fn: Callable,
    micro_batches: int | str = "auto",
    *,
    initial_micro_batches: int = 1,
    max_micro_batches: int | None = None,
    reduction: str = "mean",
    grow_after: int | None = None,
) -> Callable:
    """Returns a model_fn that trains each batch as several micro-batches.

    For `tf.estimator.Estimator(microbatch_model_fn(model_fn), ...)`. `input_fn` returns
    whole batches; `model_fn` sees one micro-batch at a time.

    A model_fn with an optimizer of its own, such as that of a canned estimator, gets
    the gradients of the whole batch: what its loss does with the examples is computed
    on the whole batch, and nothing is assumed of it. Everything else that its train op
    does is done once per batch, with values of the whole batch.

    A model_fn that makes its train op with `make_accumulating_train_op` or
    `AccumulatingOptimizer` declares by `reduction` and `weight` how its loss combines
    examples. These use the batch as their window, whatever the value of K, so the same
    code trains by micro-steps as well.

    With "auto", a batch that runs out of memory is retried with twice as many
    micro-batches: the whole batch, before any update, after all variables that its
    micro-batches wrote are rolled back. Where one example does not fit, layers that the
    model passes to `recompute` are recomputed; and after a batch ran out of memory,
    half as many micro-batches with recomputed layers are tried and kept if they are
    faster. The number is kept in `micro_batches.json` in the output folder, and the
    next run starts with it.

    A batch in one micro-batch gives the weights of the plain Estimator bit for bit (up
    to rounding for gradient descent where a sparse gradient has a row twice), and in
    several micro-batches up to rounding.

    In training by this library:

    * operations of a grouped train op that need the micro-batch, such as metrics and
      batch normalization's averages, run once per micro-batch; the rest once per batch;
    * `EstimatorSpec.loss` is reported as the batch's mean, other tensors through
      `batch_mean`. A summary or hook that fetches a tensor of the micro-batch gets the
      last micro-batch's value;
    * a retried batch draws new dropout masks.

    With a fixed number, evaluation and prediction use `model_fn` unchanged. With "auto"
    their batches are cut and retried too, each job with a number of its own, kept in
    `micro_batches-eval.json` and `micro_batches-predict.json`:

    * each example counts once in every metric: updates of metrics that need the
      micro-batch run once per micro-batch, the rest once per batch, and
      `EstimatorSpec.loss` is the batch's mean. Metrics that count examples are those of
      the whole batch, others up to rounding;
    * predictions are joined in the order of the examples. Where a batch is cut, a
      prediction that needs the micro-batch must have one row per example, and rows of
      one shape;
    * what the model computes from several examples at once, such as a metric's update
      with the mean loss, or batch statistics, sees those of one micro-batch;
      `batch_mean` is the mean over the batch there too;
    * features from placeholders are not cut, so an exported graph is that of
      `model_fn`.

    Args:
        model_fn: Function of features and, if it takes them, labels, mode, params and
            config.
        micro_batches: Number of micro-batches per batch, >= 1, at most one per example;
            "auto": as few as memory allows, doubled until the batch fits.
        initial_micro_batches: First number for "auto", >= 1.
        max_micro_batches: Largest number for "auto", >= 1; None is one per example.
        reduction: For a model_fn that trains by this library: "mean" for a loss that is
            the mean over the micro-batch; "sum" for one that sums over its examples. A
            train op with `reduction="sum"` also counts as "sum".
        grow_after: Batches that fit in memory [batches] after which "auto" tries half
            as many micro-batches; each failed trial doubles the wait. None: never.

    Returns:
        A function with the arguments of `model_fn`, and config.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range. Where batches are cut: if a model_fn
            does with a micro-batch what cannot be done with several, or declares a sum
            over examples as a mean; if the parts of a batch have different numbers of
            examples, one example does not fit in memory, `max_micro_batches` is too
            small, or predictions cannot be joined.
    """
    if not callable(model_fn):
        raise TypeError(
            "`model_fn` must be a function of features, labels, mode. "
            f"Received: {model_fn!r}. Pass the one that your Estimator has."
        )
    _check_count("micro_batches", micro_batches, "'auto'")
    _check_count("initial_micro_batches", initial_micro_batches)
    _check_count("max_micro_batches", max_micro_batches, None)
    _check_count("grow_after", grow_after, None)
    check_reduction(reduction)
    is_auto = micro_batches == "auto"

    def wrapped(features, labels=None, mode=None, params=None, config=None):
        given = {"labels": labels, "mode": mode, "params": params, "config": config}
        build = _with_arguments(model_fn, given)
        modes = tf.estimator.ModeKeys
        cut = (modes.TRAIN, modes.EVAL, modes.PREDICT) if is_auto else (modes.TRAIN,)
        # Inside another model_fn that is wrapped, the batch is cut already.
        if mode not in cut or current_batch() is not None:
            return build(features, labels)
        if is_fed({"features": features, "labels": labels}):
            spec = build(features, labels)
            hooks = [RefuseTraining()] if mode == modes.TRAIN else []
            return spec._replace(training_hooks=hooks)

        def make_count(of: str = "", units: str = "batches"):
            if not is_auto:
                return FixedCount(int(micro_batches))
            path = None if config is None else _count_path(config, of)
            initial = int(initial_micro_batches)
            return MicroBatchCount(initial, max_micro_batches, grow_after, path, units)

        if mode == modes.TRAIN:
            batch = WholeBatch(reduction, is_auto)
            staged, spec = _build_on_micro_batches(batch, build, features, labels)
            is_undone = is_auto or batch.keys is not None
            snapshot = Snapshot(batch.micro_ops, batch.handles) if is_undone else None
            replica = ReplicaBatch(batch, staged, snapshot)
            hook = _hook(replica, make_count(units="updates"), spec, config)
            return spec._replace(training_hooks=[hook, *spec.training_hooks])
        batch = UntrainedBatch(reduction)
        staged, build_on_slice = _stage(batch, build, features, labels)
        with batch.as_current():
            spec = build_on_slice()
        if mode == modes.EVAL:
            return _evaluated(batch, staged, spec, make_count("-eval"))
        return _predicted(batch, staged, spec, make_count("-predict"))

    return _like(model_fn, wrapped)


def batch_mean(
    tensor: tf.Tensor, weight: tf.Tensor | None = None, reduction: str = "mean"
) -> tf.Tensor:
    """Returns the mean over the batch's micro-batches, for summaries and hooks.

        sum_i w_i * tensor_i / sum_i w_i

    Returns `tensor` itself outside `microbatch_model_fn`, in evaluation and prediction
    with a fixed number, and if `tensor` does not depend on the micro-batch.

    Args:
        tensor: Floating-point scalar, the mean over the micro-batch.
        weight: Scalar, the micro-batch's weight; None is its number of examples.
        reduction: "mean", or "sum" to add up without weights.

    Raises:
        TypeError: If `tensor` or `weight` is not a number.
        ValueError: If `tensor` or `weight` is not a scalar.
    """
    batch = current_batch()
    if batch is None:
        return tensor
    tensor = check_scalar("tensor", tensor)
    weight = (
        batch.default_weight(reduction)
        if weight is None
        else check_scalar("weight", weight)
    )
    return _mean_over_batch(batch, tensor, weight, reduction)


def _mean_over_batch(batch: WholeBatch, tensor, weight, reduction: str) -> tf.Tensor:
    if reduction == "mean" and batch.begin.op not in ancestors([tensor.op]):
        return tensor  # e.g. a window's loss: the same for every micro-batch
    scale = batch.scale(weight) if reduction == "mean" else tf.ones_like(weight)
    sums = []
    for value in (tf.cast(scale, tensor.dtype) * tensor, weight):
        total, zero = Slot("batch_mean", value.dtype, value.shape), tf.zeros_like(value)
        batch.handles.append(total.handle)
        batch.micro_ops.append(
            total.write(value + tf.where(batch.is_first, zero, total.read()))
        )
        with tf.control_dependencies(None):
            zero = tf.zeros([], value.dtype)
            batch.initialize_ops.append(total.write(zero))
            sums.append(total.read())
    with tf.control_dependencies(None):
        total, weight = sums
        if reduction == "sum":
            return total
        mean = tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
        return tf.where(batch.is_whole, total, mean)


def _stage(batch: WholeBatch, build: Callable, features, labels):
    """Returns the staged batch, and a function that builds on its micro-batches."""
    whole = {"features": features, "labels": labels}
    check_input_summaries(whole)
    with tf.device("/cpu:0"):
        staged = stage(whole, batch)
    sliced = staged.sliced
    return staged, lambda: build(sliced["features"], sliced["labels"])


def _build_on_micro_batches(batch: WholeBatch, build: Callable, features, labels):
    """Returns the staged batch, and a spec whose train op is only the update."""
    staged, build_on_slice = _stage(batch, build, features, labels)
    spec, is_declared = build_unedited(batch, build_on_slice)
    if not is_declared:
        check_micro_ops(batch.micro_ops)
        return staged, spec
    train_op = getattr(spec.train_op, "op", spec.train_op)
    if train_op is None:
        raise ValueError(
            "A model_fn must return a train op. Received: None in its EstimatorSpec. "
            "Pass what make_accumulating_train_op or an optimizer returned."
        )
    check_update(batch.begin.op)
    check_declared(batch, spec.loss)
    each, once = split_train_op(train_op, batch.begin.op)
    batch.micro_ops += each
    loss = _mean_over_batch(batch, spec.loss, batch.weight, batch.reduction)
    check_micro_ops(batch.micro_ops)
    check_not_written(batch.computed_twice, batch.micro_ops)
    with tf.control_dependencies(None):
        train_op = tf.group(*once, name="train_batch")
    return staged, spec._replace(loss=loss, train_op=train_op)


def _evaluated(batch: UntrainedBatch, staged: StagedBatch, spec, count):
    """Returns the spec of an evaluation in micro-batches."""
    metrics = split_metrics(batch, spec.eval_metric_ops)
    check_micro_ops(batch.micro_ops)
    batch.empty_ops += batch.micro_ops  # as without micro-batches
    loss = loss_of_batch(batch, spec.loss)
    replica = ReplicaBatch(batch, staged, Snapshot(batch.micro_ops, batch.handles))
    hook = EvaluationHook(_replicas(replica), count)
    return spec._replace(
        loss=loss,
        eval_metric_ops=metrics,
        evaluation_hooks=[hook, *spec.evaluation_hooks],
    )


def _predicted(batch: UntrainedBatch, staged: StagedBatch, spec, count):
    """Returns the spec of a prediction in micro-batches."""
    tensors = tf.nest.flatten(spec.predictions)
    operations = [*batch.micro_ops, *(tensor.op for tensor in tensors)]
    replica = ReplicaBatch(batch, staged, Snapshot(operations, batch.handles))
    hook = PredictionHook(replica, count, spec.predictions)
    return spec._replace(
        predictions=hook.predictions,
        prediction_hooks=[hook, *spec.prediction_hooks],
    )


def _replicas(replica: ReplicaBatch) -> list[ReplicaBatch]:
    """Returns the graph's list of replicas, which gets this one too."""
    graph = tf.compat.v1.get_default_graph()
    replicas = getattr(graph, _REPLICAS_ATTRIBUTE, [])
    replicas.append(replica)
    setattr(graph, _REPLICAS_ATTRIBUTE, replicas)
    return replicas


def _hook(replica: ReplicaBatch, count, spec, config) -> MicroBatchHook:
    """Returns this replica's hook; only the first replica's hook runs."""
    return MicroBatchHook(
        _replicas(replica),
        count,
        spec.scaffold.saver if spec.scaffold else None,
        config.model_dir if config is not None and config.is_chief else None,
    )


def _with_arguments(model_fn: Callable, given: dict) -> Callable:
    """Returns a function of (features, labels) that calls `model_fn` by keywords."""
    taken = {name: given[name] for name in _arguments(model_fn) if name in given}

    def build(features, labels):
        arguments = {**taken, "labels": labels} if "labels" in taken else taken
        return model_fn(features=features, **arguments)

    return build


def _arguments(model_fn: Callable) -> list[str]:
    return list(inspect.signature(model_fn).parameters)


def _like(model_fn: Callable, wrapped: Callable) -> Callable:
    """Returns `wrapped` with the signature of `model_fn`, which Estimator reads."""
    names = dict.fromkeys([*_arguments(model_fn), "mode", "config"])
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    wrapped.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind) for name in names]
    )
    return wrapped


def _count_path(config, of: str) -> str:
    """Returns the count's file: one per task, since each has its own memory.

    Args:
        config: The Estimator's `tf.estimator.RunConfig`.
        of: Part of the name for what the number is of, such as "-eval".
    """
    task = ""
    if config.num_worker_replicas > 1:
        task = f"-{config.task_type}-{config.task_id}"
    return os.path.join(config.model_dir, f"micro_batches{of}{task}.json")


def _check_count(argument: str, value, *others) -> None:
    """Raises unless `value` is an integer >= 1 or the one in `others`."""
    also = f" or {others[0]}" if others else ""
    if value is None and None in others:
        return
    if value == "auto" and others == ("'auto'",):
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"`{argument}` must be an integer >= 1{also}. "
            f"Received: {value!r}. Use 1 for the whole batch at once."
        )
    if value < 1:
        raise ValueError(
            f"`{argument}` must be an integer >= 1{also}. "
            f"Received: {value}. Use 1 for the whole batch at once."
        )
