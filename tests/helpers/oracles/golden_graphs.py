"""Graphs of many configurations, built without training, by digests.

    digest = SHA-256 of the nodes: name, operation, attributes, inputs, control inputs

Names of functions count for nothing, since TensorFlow numbers them through a process:
each function is known by the place where it is first called.
"""

import hashlib
import random
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    make_accumulating_train_op,
    microbatch_model_fn,
    recompute,
    whole_batch_loss,
)
from tests.helpers.models import interfaces, model_fns, toy_models
from tests.helpers.models.losses import input_fn_of
from tests.helpers.models.replicas import two_replicas

v1 = tf.compat.v1
_TRAIN = tf.estimator.ModeKeys.TRAIN
# TensorFlow counts these through a process.
_NUMBER = re.compile(r"(PartitionedCall|CustomGradient)-\d+")
CONFIGURATIONS: dict[str, Callable[[], None]] = {}


def digest(build: Callable[[], None]) -> str:
    """Returns the digest of the graph that `build` makes."""
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(7)
        random.seed(7)  # for Keras's initializers
        v1.train.get_or_create_global_step()
        build()
        lines = "\n".join(describe(graph.as_graph_def()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def describe(definition) -> Iterator[str]:
    """Yields a line for each node, those of functions in the order of their calls."""
    functions = {
        function.signature.name: function for function in definition.library.function
    }
    called, numbers = {}, {}

    def place_of(name: str) -> str:
        return f"function {called.setdefault(name, len(called))}"

    def value_of(attribute) -> str:
        kind = attribute.WhichOneof("value")
        if kind == "func":
            return place_of(attribute.func.name)
        if kind == "list" and attribute.list.func:
            return " ".join(place_of(function.name) for function in attribute.list.func)
        text = attribute.SerializeToString(deterministic=True).hex()
        if kind != "s":
            return text
        name = attribute.s.decode(errors="replace")
        if name in functions:
            return place_of(name)
        return _NUMBER.sub(lambda m: f"{numbers.setdefault(m[0], len(numbers))}", name)

    def lines_of(nodes) -> Iterator[str]:
        for node in nodes:
            attributes = {k: value_of(v) for k, v in sorted(node.attr.items())}
            yield f"{node.name} {node.op} {node.device} {list(node.input)} {attributes}"

    yield from lines_of(definition.node)
    described = 0
    while described < len(called):
        function = functions.get([*called][described])
        described += 1
        if function is not None:
            yield f"function {described - 1}: {dict(sorted(function.ret.items()))}"
            yield from lines_of(function.node_def)


def _add(name: str, build: Callable, *args, **kwargs) -> None:
    assert name not in CONFIGURATIONS, name
    CONFIGURATIONS[name] = lambda: build(*args, **kwargs)


# One train op, every run of which is a micro-step.

_STEPS = {
    "1": 1,
    "3": 3,
    "callable": lambda update_step: 1 + tf.cast(update_step % 2, tf.int32),
}
_OPTIONS = {
    "clip_norm": lambda: {"clip_norm": 1.0},
    "weight": lambda: {"weight": v1.placeholder(tf.float32, [], "weight")},
    "sum": lambda: {"reduction": "sum"},
    "slices": lambda: {"clip_norm": 1.0, "sparse_norm": "slices"},
    "skip_micro_batch": lambda: {"on_nonfinite": "skip_micro_batch"},
    "skip_window": lambda: {"on_nonfinite": "skip_window"},
    "float64": lambda: {"accumulator_dtype": tf.float64},
    "noise_scale": lambda: {"noise_scale": True},
    "after_update": lambda: {"after_update_ops": _average},
}


def _average() -> list[tf.Operation]:
    return [tf.train.ExponentialMovingAverage(0.9).apply(v1.trainable_variables())]


def _train_step_wise(interface, steps, options=dict, optimizer="Adam"):
    update_step = get_or_create_update_step()
    rate = 0.05 / (1.0 + tf.cast(update_step, tf.float32))
    wrapped = toy_models.OPTIMIZERS[optimizer](rate, update_step)
    interface(toy_models.make_model().loss, wrapped, steps, **options())


def _replicated(*args) -> None:
    with two_replicas().scope():
        strategy = tf.distribute.get_strategy()
        v1.train.get_or_create_global_step()
        strategy.extended.call_for_each_replica(_train_step_wise, args=args)


def _in_cluster(*args) -> None:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["localhost:1", "localhost:2"]}),
        task_type="worker",
        task_id=0,
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver)
    with strategy.scope():
        v1.train.get_or_create_global_step()
        strategy.extended.call_for_each_replica(_train_step_wise, args=args)


def _in_control_flow_v1(build, *args) -> None:
    v1.disable_control_flow_v2()
    try:
        build(*args)
    finally:
        v1.enable_control_flow_v2()


def _clipped(loss, optimizer, steps):
    """Changes gradients between compute_gradients and apply_gradients."""
    ours = AccumulatingOptimizer(optimizer, steps)
    gradients, variables = zip(*ours.compute_gradients(loss), strict=True)
    gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
    step = v1.train.get_global_step()
    ours.apply_gradients(zip(gradients, variables, strict=True), step)


_TRAIN_OP = interfaces.by_train_op
for _interface in (*interfaces.ALL, _clipped):
    _case = _interface.__name__.removeprefix("_")
    for _name, _k in _STEPS.items():
        _add(f"{_case}, K={_name}", _train_step_wise, _interface, _k)
    _add(f"{_case}, K=3, mirrored", _replicated, _interface, 3)
for _name, _options in _OPTIONS.items():
    _add(f"option {_name}", _train_step_wise, _TRAIN_OP, 3, _options)
for _name in ("slices", "skip_micro_batch", "skip_window", "noise_scale"):
    _add(f"option {_name}, mirrored", _replicated, _TRAIN_OP, 3, _OPTIONS[_name])
for _name in ("GradientDescent", "Momentum", "Ftrl"):
    _add(_name, _train_step_wise, _TRAIN_OP, 3, dict, _name)
for _k in (1, 3):
    _add(f"cluster, K={_k}", _in_cluster, _TRAIN_OP, _k)
_v1 = _in_control_flow_v1, _train_step_wise, _TRAIN_OP, 3
_add("control flow v1", *_v1)
_add("control flow v1, skip_window", *_v1, _OPTIONS["skip_window"])


# Whole batches, cut in the graph.

_WIDTH = 5


def _whole_batches(make_train_op, micro_batches=4, mode=_TRAIN, body=tf.tanh):
    def model_fn(features, labels, mode):
        hidden = body(tf.matmul(features, _kernel("hidden", _WIDTH, 8)))
        predicted = tf.matmul(hidden, _kernel("output", 8, 1))
        loss = tf.reduce_mean(tf.square(predicted - labels))
        train_op = make_train_op(loss, predicted)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    data = tf.data.Dataset.from_tensor_slices((tf.ones([9, _WIDTH]), tf.ones([9, 1])))
    batch = v1.data.make_one_shot_iterator(data.batch(4)).get_next()
    microbatch_model_fn(model_fn, micro_batches)(*batch, mode=mode)


def _kernel(name: str, rows: int, columns: int) -> tf.Variable:
    start = tf.reshape(tf.linspace(-1.0, 1.0, rows * columns), [rows, columns])
    return v1.get_variable(name, initializer=start)


def _by_train_op(loss, predicted):
    del predicted
    return make_accumulating_train_op(loss, v1.train.AdamOptimizer(), 1, clip_norm=1.0)


def _by_minimize(loss, predicted):
    del predicted
    return interfaces.by_minimize(loss, v1.train.AdamOptimizer(), 1)


def _by_own_optimizer(loss, predicted):
    del predicted
    return v1.train.AdamOptimizer().minimize(loss, v1.train.get_global_step())


def _by_loss_of_all(loss, predicted):
    spread = whole_batch_loss(predicted, lambda all_: tf.math.reduce_variance(all_))
    return _by_train_op(loss + spread, predicted)


for _train in (_by_train_op, _by_minimize, _by_own_optimizer, _by_loss_of_all):
    _case = _train.__name__.removeprefix("_")
    for _number in (4, "auto"):
        _add(f"whole batch {_case}, {_number}", _whole_batches, _train, _number)
_MODES = tf.estimator.ModeKeys
_add("whole batch, evaluation", _whole_batches, _by_train_op, mode=_MODES.EVAL)
_recomputed = recompute(tf.tanh)
_add("whole batch, recompute", _whole_batches, _by_train_op, body=_recomputed)


def _unedited(script) -> None:
    data = input_fn_of(script)()
    features, labels = v1.data.make_one_shot_iterator(data).get_next()
    model_fn = microbatch_model_fn(model_fns.model_fn_of(script), 4)
    model_fn(features, labels, mode=_TRAIN)


_SCRIPTS = model_fns.EXACT | model_fns.WITH_CONTROL_FLOW
for _name, (_script, _) in _SCRIPTS.items():
    if _name != "keras_tape":  # Keras's version would decide
        _add(f"unedited {_name}", _unedited, _script)
