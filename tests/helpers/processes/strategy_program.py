"""Trains a small model under a strategy, with one JSON line as its result.

    python -m tests.helpers.processes.strategy_program WAY STRATEGY FOLDER [OPTION[=VALUE] ...]

WAY: "estimator", a regression in an Estimator; "whole_batch", a loss over the whole
batch of both replicas plus that of each one's own examples; "keras", an optimizer in
`fit`; "step", a training step of TensorFlow 2 in micro-batches; "steps", those of
test_step.py. The result is all variables, or a report, for Keras beside
FOLDER/weights-N.npz.

STRATEGY: "none"; "mirrored", two of four logical CPUs; "multi_worker", one process of a TF_CONFIG
cluster; "collectives", a MirroredStrategy that is created eagerly, and so uses
collectives by default. `end` runs all processes, for a test.

Options of "estimator": batch, K and micro_steps; fits=N[,N], with which batches are
trained in as many micro-batches as a memory of N examples needs, a number a task;
no_hooks, loss_scaling, recompute, save_summary_steps=N; one_device, a
ReductionToOneDevice for the strategy; two_devices, two CPU devices for the Session. Of
"whole_batch": fits=N,N, rows for which the backward pass of a task has memory. Of
"keras": root and kind as in keras_kinds; nested, the optimizer in a LossScaleOptimizer;
multi, a MultiOptimizer; loop, training without `fit`; resume, saved and loaded in
mid-window for four replicas, one and two; plain, training without accumulation; cut, also
whole batches in micro-batches.
"""

import importlib
import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from estimator_accum import (
    get_or_create_update_step,
    make_accumulating_train_op,
    make_accumulation_hooks,
    microbatch_model_fn,
    per_example,
    recompute,
    whole_batch_loss,
)
from estimator_accum.compat import enable_estimator
from estimator_accum.keras import AccumulationCallback, accumulate, microbatch
from tests.helpers.models import of_replicas
from tests.helpers.models.keras_kinds import Kind, dense_data, sparse_data
from tests.helpers.processes import programs, running

v1 = tf.compat.v1
_EXAMPLES = 96
# Examples of the two replicas, update by update; a worker must have some.
_SIZES = {
    "mirrored": [(6, 4), (5, 0), (3, 8)],
    "multi_worker": [(6, 4), (2, 5), (3, 8)],
}


def end(way: str, strategy: str, folder, *options: str) -> list[running.Done]:
    """Runs the program's processes to their end, for a test."""
    program = ("-m", "tests.helpers.processes.strategy_program")
    command = (*program, way, strategy, folder, *options)
    if strategy != "multi_worker":
        return [running.run(*command)]
    with running.cluster(command, jobs=("worker", "worker")) as tasks:
        return [task.wait() for task in tasks]


def result(way: str, strategy: str, folder, *options: str) -> dict:
    """Runs the processes, which must end with 0; returns the output of the first one."""
    tasks = end(way, strategy, folder, *options)
    assert [task.returncode for task in tasks] == [0] * len(tasks)
    return json.loads(tasks[0].stdout.splitlines()[-1])


def _make_strategy(kind: str, options: dict):
    if kind in ("mirrored", "collectives"):
        cpu = tf.config.list_physical_devices("CPU")[0]
        logical = [tf.config.LogicalDeviceConfiguration()] * 4
        tf.config.set_logical_device_configuration(cpu, logical)
        cross_device_ops = None
        if "one_device" in options:
            cross_device_ops = tf.distribute.ReductionToOneDevice()
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops)
    if kind == "multi_worker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    return None


def _task_index() -> int:
    return json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"][
        "index"
    ]


def _fits(options: dict) -> int | None:
    """Returns for how many examples this task has memory; None is for all."""
    fits = options.get("fits", "").split(",")
    return int(fits[_task_index() % len(fits)]) if fits[0] else None


def _in_memory(tensor: tf.Tensor, fits: int) -> tf.Tensor:
    """Returns 1.0; runs out of memory if `tensor` has more than `fits` rows."""

    def check(rows):
        if rows > fits:
            raise MemoryError(f"{rows} rows")
        return np.float32(1)

    rows = tf.shape(tensor)[0]
    return tf.numpy_function(check, [rows], tf.float32, stateful=False)


def _train_estimator(kind, folder, options, model_fn, dataset, steps: int) -> None:
    """Trains `model_fn(features, labels, mode)`, and prints all variables."""
    if kind != "collectives":
        v1.disable_eager_execution()
    v1.logging.set_verbosity("ERROR")
    session_config = None
    if "two_devices" in options:
        session_config = v1.ConfigProto(
            device_count={"CPU": 2}, allow_soft_placement=True
        )
    config = tf.estimator.RunConfig(
        folder,
        train_distribute=_make_strategy(kind, options),
        session_config=session_config,
        save_checkpoints_steps=1000,
        save_summary_steps=int(options.get("save_summary_steps", 100)),
        experimental_max_worker_delay_secs=0,
    )
    estimator = tf.estimator.Estimator(model_fn, config=config)
    if kind == "multi_worker":  # Estimator.train refuses it

        def input_fn():
            return dataset().shard(2, _task_index())

        tf.estimator.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(input_fn, max_steps=steps),
            tf.estimator.EvalSpec(input_fn, steps=1),
        )
    else:
        estimator.train(dataset, steps=steps)
    if _task_index() == 0:
        names = estimator.get_variable_names()
        values = {name: estimator.get_variable_value(name).tolist() for name in names}
        print(json.dumps(values))


# WAY "estimator"


def _regress(kind: str, folder: str, options: dict) -> None:
    steps, batch = int(options["K"]), int(options["batch"])
    fits = _fits(options)

    def model_fn(features, labels, mode):
        if mode == tf.estimator.ModeKeys.EVAL:
            return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_mean(labels))
        inputs = features["inputs"]
        if fits is not None:
            inputs = per_example(inputs * _in_memory(inputs, fits))
        predict = recompute(_predict) if "recompute" in options else _predict
        loss = tf.reduce_mean(tf.square(predict(inputs, features["ids"]) - labels))
        rate = 0.05 / (1.0 + tf.cast(get_or_create_update_step(), tf.float32))
        optimizer = v1.train.MomentumOptimizer(rate, 0.9)
        if "loss_scaling" in options:
            loss_scaling = v1.mixed_precision.MixedPrecisionLossScaleOptimizer
            optimizer = loss_scaling(optimizer, 4.0)
        train_op = make_accumulating_train_op(loss, optimizer, steps, clip_norm=1.0)
        hooks = make_accumulation_hooks("apply") if "no_hooks" not in options else []
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=train_op, training_hooks=hooks
        )

    random = np.random.default_rng(0)
    inputs = random.normal(size=[_EXAMPLES, 3]).astype(np.float32)
    features = {"inputs": inputs, "ids": random.integers(0, 6, _EXAMPLES)}
    labels = random.normal(size=_EXAMPLES).astype(np.float32)

    def dataset():
        examples = tf.data.Dataset.from_tensor_slices((features, labels))
        return examples.repeat().batch(batch)

    if fits is not None:
        model_fn = microbatch_model_fn(model_fn, "auto")
    micro_steps = int(options["micro_steps"])
    _train_estimator(kind, folder, options, model_fn, dataset, micro_steps)


def _predict(inputs: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    dense = v1.get_variable("dense", [3], initializer=v1.zeros_initializer())
    table = v1.get_variable("table", [7, 1], initializer=v1.zeros_initializer())
    return tf.linalg.matvec(inputs, dense) + tf.gather(table, ids)[:, 0]


# WAY "whole_batch"


def batches(kind: str, is_joined: bool = False) -> tf.data.Dataset:
    """Returns x [examples, 2, 3] and the replica [examples], for one replica or both."""

    def generate():
        random = np.random.default_rng(0)
        for sizes in _SIZES[kind]:
            parts = [random.normal(size=[n, 2, 3]).astype(np.float32) for n in sizes]
            replicas = [np.full([n], i) for i, n in enumerate(sizes)]
            if is_joined:
                yield np.concatenate(parts), np.concatenate(replicas)
            else:
                yield from zip(parts, replicas, strict=True)

    signature = tf.TensorSpec([None, 2, 3]), tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(generate, output_signature=signature)


def towers(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    start = np.random.default_rng(0).normal(size=[3, 4]).astype(np.float32)
    kernel = v1.get_variable("kernel", initializer=start)
    embeddings = tf.math.l2_normalize(tf.tanh(tf.tensordot(x, kernel, 1)), -1)
    v1.get_variable("scale", initializer=1.0)
    return embeddings[:, 0], embeddings[:, 1]


def loss_fn(outputs) -> tf.Tensor:
    with v1.variable_scope("", reuse=True):
        scale = v1.get_variable("scale")
    logits = tf.exp(scale) * tf.matmul(outputs[0], outputs[1], transpose_b=True)
    rows = tf.shape(logits)[0]
    with tf.control_dependencies([tf.debugging.assert_positive(rows)]):
        labels = tf.range(rows)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )


def train_op_of(loss: tf.Tensor) -> tf.Operation:
    optimizer = v1.train.MomentumOptimizer(0.5, 0.9)
    return make_accumulating_train_op(loss, optimizer, 1, clip_norm=1.0)


def _contrast(kind: str, folder: str, options: dict) -> None:
    fits = _fits(options)

    def model_fn(features, labels, mode):
        del labels
        if mode == tf.estimator.ModeKeys.EVAL:
            return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_mean(features))
        query, document = towers(features)
        if fits is not None:
            query = _with_gradient_in_memory(query, fits)
        outputs = query, document
        loss = joint = whole_batch_loss(outputs, loss_fn, across_replicas=True)
        loss += whole_batch_loss(outputs, loss_fn)
        hooks = [] if kind == "mirrored" else [_WriteAtEnd(joint, folder)]
        train_op = train_op_of(loss)
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=train_op, training_chief_hooks=hooks
        )

    model_fn = microbatch_model_fn(model_fn, 3 if fits is None else "auto")
    updates = len(_SIZES[kind])
    _train_estimator(kind, folder, options, model_fn, lambda: batches(kind), updates)


class _WriteAtEnd(v1.train.SessionRunHook):
    """Writes a scalar to FOLDER/at_end."""

    def __init__(self, tensor: tf.Tensor, folder: str):
        self._tensor, self._file = tensor, pathlib.Path(folder, "at_end")

    def end(self, session) -> None:
        self._file.write_text(str(session.run(self._tensor)))


def _with_gradient_in_memory(outputs: tf.Tensor, fits: int) -> tf.Tensor:
    @tf.custom_gradient
    def identity(outputs):
        return tf.identity(outputs), lambda arrived: arrived * _in_memory(arrived, fits)

    return identity(outputs)


# WAY "keras"


def _fit(kind_of_strategy: str, folder: str, options: dict) -> None:
    """Trains on eleven batches of 8: three windows of 3 and a partial one, applied."""
    strategy = _make_strategy(kind_of_strategy, options)
    reductions = _record_reductions()
    kind = Kind(options["root"], options["kind"])
    with strategy.scope():
        model = kind.sparse_model("float64")
        optimizer = kind.optimizer("Adam", 0.05)
        if "multi" in options:
            optimizers = kind.keras.optimizers
            optimizer = optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizer))
        if "plain" not in options:
            optimizer = accumulate(optimizer, 3)
        if "nested" in options:
            optimizer = kind.keras.mixed_precision.LossScaleOptimizer(optimizer)
        model.compile(optimizer, "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices(sparse_data(88, "float64")).batch(8)
    sharded = tf.data.Options()
    sharded.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    data = data.with_options(sharded)
    if "loop" in options:
        step = tf.function(lambda batch: strategy.run(model.train_step, args=(batch,)))
        for batch in strategy.experimental_distribute_dataset(data):
            step(batch)
        model.optimizer.apply_partial_window()
    else:
        if "resume" in options:
            four = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
            alone = tf.distribute.get_strategy()
            for number, others in (1, four), (3, alone), (3, strategy):
                model.fit(data.take(number), shuffle=False, verbose=0)
                data = data.skip(number)
                model = _loaded(kind, model, folder, others.scope())
        callbacks = [] if "plain" in options else [AccumulationCallback("apply")]
        model.fit(data, shuffle=False, verbose=0, callbacks=callbacks)
    np.savez(pathlib.Path(folder, f"weights-{_task_index()}"), *model.get_weights())
    updates = int(model.optimizer.iterations.numpy())
    report = {"updates": updates, "reductions": list(reductions)}
    if not {"plain", "nested", "loop", "resume"} & options.keys():
        report["window_loss"] = float(optimizer.window_loss.numpy())
    if "cut" in options:
        if not kind.is_3:
            reductions = _record_reductions([_OF_KERAS_2])
        report["cut"] = _fit_cut(strategy, kind, reductions)
        report["dropped"] = _drop_cut(strategy, kind)
    print(json.dumps(report))


def _step(kind: str, folder: str, options: dict) -> None:
    del folder, options
    # Collectives wait for each other, on as many threads as there are replicas.
    strategy = _make_strategy(kind, {"one_device": ""})
    report = {
        "difference": of_replicas.difference(strategy),
        "refusal": of_replicas.refusal(strategy),
    }
    print(json.dumps(report))


def _steps(kind: str, folder: str, options: dict) -> None:
    del folder
    module = "tests.estimator_accum.microbatch.test_step"
    makers = [getattr(importlib.import_module(module), name) for name in options]
    strategy = _make_strategy(kind, {"one_device": ""})
    print(json.dumps(of_replicas.differences(strategy, makers)))


def _fit_cut(strategy, kind: Kind, reductions: list[str]) -> list[tuple]:
    """Returns (difference, *reductions in the graph that is split), for two losses.

    The first loss is split in 3 and in "auto", the second in 3. The difference is the
    largest one of weights, losses and metrics, trained unsplit and in micro-batches. One
    replica has no example of the last batch.
    """
    data = tf.data.Dataset.from_tensor_slices(dense_data(73, "float64")).batch(24)
    results = []
    for loss, splits in ("mse", (3, "auto")), (_compare, (3,)):
        weights, numbers = [], []
        for micro_batches in 1, *splits:
            begin = len(reductions)
            with strategy.scope():
                model = microbatch(kind.dense_model("float64"), micro_batches)
                options = {"metrics": ["mae"], "jit_compile": False}
                model.compile(kind.optimizer("Adam", 0.05), loss, **options)
            history = model.fit(data, shuffle=False, verbose=0).history
            weights.append([*model.get_weights(), *history["loss"], *history["mae"]])
            numbers.append(reductions[begin:].count("step"))
        whole, *others = weights
        pairs = [pair for ours in others for pair in zip(ours, whole, strict=True)]
        results.append((max(np.abs(a - b).max() for a, b in pairs), *numbers[1:]))
    return results


def _drop_cut(strategy, kind: Kind) -> tuple[int, float]:
    """Returns the number of distinct masks of dropout, of 12 examples on 2 replicas.

    Beside it, the largest difference of the weights from those that the masks of the
    loss give.
    """
    layers, masks = kind.keras.layers, []

    def loss(y, outputs):
        def note(values):
            masks.extend(values)
            return np.float64(0)

        zero = tf.numpy_function(note, [outputs], tf.float64)
        zero.set_shape([])
        return tf.reduce_mean(outputs, -1) + zero

    options = {"use_bias": False, "kernel_initializer": "identity"}
    with strategy.scope():
        model = kind.keras.Sequential(
            [
                kind.keras.Input((32,), dtype="float64"),
                layers.Dense(32, dtype="float64", **options),
                layers.Dropout(0.5, dtype="float64"),
            ]
        )
        model = microbatch(model, 3)
        model.compile(kind.optimizer("SGD", 1.0), loss, jit_compile=False)
    ones = np.ones([12, 32])
    model.fit(ones, ones, batch_size=12, verbose=0)
    expected = np.eye(32) - np.mean(masks, axis=0) / 32
    difference = np.abs(model.get_weights()[0] - expected).max()
    return len({tuple(mask) for mask in masks}), difference


def _compare(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns a loss of all pairs of examples, so the model runs twice."""
    return tf.reduce_logsumexp(outputs - tf.transpose(outputs), 1) + outputs * y


def _loaded(kind: Kind, model, folder: str, scope):
    """Saves the model in mid-window, and loads it for other replicas."""
    path = str(pathlib.Path(folder, "model.h5" if kind.is_legacy else "model.keras"))
    model.save(path)
    with scope:
        custom = {"Summing": type(model)}
        return kind.keras.models.load_model(path, custom_objects=custom)


# Every replica reduces by its own `all_reduce`; if all replicas are CPUs of one process,
# the library sums on one device, once for all of them.
_OF_LIBRARY = (
    (tf.distribute.ReplicaContext, "all_reduce"),
    (tf.distribute.ReductionToOneDevice, "batch_reduce"),
)
_OF_KERAS_2 = (tf.distribute.StrategyExtended, "batch_reduce_to")


def _record_reductions(methods=_OF_LIBRARY) -> list[str]:
    """Returns a list to which each call of a method adds its graph's name."""
    names = []

    def noting(function):
        def run(*args, **kwargs):
            names.append(v1.get_default_graph().name)
            return function(*args, **kwargs)

        return run

    for owner, name in methods:
        setattr(owner, name, noting(getattr(owner, name)))
    return names


if __name__ == "__main__":
    way, kind_of_strategy, folder_of_run, *words = sys.argv[1:]
    if way in ("keras", "step", "steps"):
        programs.optimize_functions(False)
    else:
        enable_estimator()
    ways = {
        "estimator": _regress,
        "whole_batch": _contrast,
        "keras": _fit,
        "step": _step,
        "steps": _steps,
    }
    flags = dict(word.partition("=")[::2] for word in words)
    ways[way](kind_of_strategy, folder_of_run, flags)
