"""Matrix products in low precision, everything else in float32."""

import io

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    get_windows,
    make_accumulating_train_op,
    mixed_precision_config,
)
from estimator_accum import (
    precision as precision_module,
)
from tests.helpers.oracles.onednn import is_onednn_on

v1 = tf.compat.v1


def _gradient_and_graph(precision):
    """Returns a window's gradient, by variable, and the operations that ran.

    Three micro-batches of a network of two layers; the rate is 1.
    """
    random = np.random.default_rng(0)
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 64])
        shapes = {"hidden": (64, 128), "output": (128, 8)}
        kernels = {
            name: v1.get_variable(
                name, initializer=random.normal(size=shape).astype(np.float32) / 10
            )
            for name, shape in shapes.items()
        }
        hidden = tf.tanh(tf.matmul(x, kernels["hidden"]))
        logits = tf.matmul(hidden, kernels["output"])
        labels = tf.argmax(x[:, :8], axis=-1)
        loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
        v1.train.create_global_step()
        train_op = make_accumulating_train_op(
            loss, v1.train.GradientDescentOptimizer(1.0), 3
        )
        assert all(
            v.dtype.base_dtype != tf.bfloat16
            for v in [*v1.global_variables(), *get_windows()[-1].state]
        )
        ran = v1.RunMetadata()
        options = v1.RunOptions(output_partition_graphs=True)
        config = mixed_precision_config(precision, is_forced=True)
        with v1.Session(config=config) as session:
            session.run(v1.global_variables_initializer())
            before = session.run(v1.trainable_variables())
            for _ in range(3):
                feed = {x: random.normal(size=(32, 64))}
                session.run(train_op, feed, options=options, run_metadata=ran)
            after = session.run(v1.trainable_variables())
    nodes = [node for graph in ran.partition_graphs for node in graph.node]
    return [a - b for a, b in zip(after, before, strict=True)], nodes


@pytest.mark.usefixtures("graph_optimizer")
def test_bfloat16_computes_products_and_changes_a_windows_gradient_below_1_percent():
    exact, _ = _gradient_and_graph("float32")
    low, nodes = _gradient_and_graph("bfloat16")
    products = [node for node in nodes if "MatMul" in node.op]
    assert products
    kinds = {node.name: tf.as_dtype(node.attr["T"].type) for node in products}
    expected = tf.bfloat16 if is_onednn_on() else tf.float32
    assert set(kinds.values()) == {expected}, kinds
    for value, right in zip(low, exact, strict=True):
        error = np.linalg.norm(value - right) / np.linalg.norm(right)
        assert (error > 0) == is_onednn_on() and error < 1e-2


def test_float32_is_the_config_that_is_given():
    config = v1.ConfigProto(inter_op_parallelism_threads=3)
    assert mixed_precision_config("float32", config) == config


def test_precisions_that_are_unknown_are_refused():
    message = "`precision` must be one of 'float32', 'bfloat16' and 'float16'. Received: 'fp8'"
    with pytest.raises(ValueError, match=message):
        mixed_precision_config("fp8")


@pytest.mark.parametrize(
    "precision, cpuinfo, missing",
    [
        ("bfloat16", "flags\t\t: fpu avx512f amx_bf16\n", None),
        ("bfloat16", "flags\t\t: avx512_bf16\nbugs\t: none\n", None),
        ("bfloat16", "Features\t: fp asimd bf16\n", None),
        ("bfloat16", "isa\t: rv64imafdc\n", None),  # no list of instructions
        ("bfloat16", None, None),  # macOS, Windows
        (
            "bfloat16",
            "flags\t: avx2 avx_ne_convert\n",
            "amx_bf16 and avx512_bf16 and bf16",
        ),
        ("bfloat16", "Features\t: fp asimd\n", "amx_bf16 and avx512_bf16 and bf16"),
        ("float16", "flags\t: amx_fp16\n", None),
        ("float16", "flags\t: amx_bf16 avx512_fp16\n", "amx_fp16"),
    ],
)
def test_processor_without_a_precisions_instructions_is_warned_of_once(
    precision, cpuinfo, missing, monkeypatch, caplog
):
    def open_file(path):
        assert path == "/proc/cpuinfo"
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return io.StringIO(cpuinfo)

    monkeypatch.setattr(precision_module, "open", open_file, raising=False)
    precision_module._warn_of_processor.cache_clear()
    forced = mixed_precision_config(precision, is_forced=True)
    assert not caplog.messages
    assert mixed_precision_config(precision) == mixed_precision_config(precision)
    assert mixed_precision_config(precision) == forced
    precision_module._warn_of_processor.cache_clear()
    assert len(caplog.messages) == (missing is not None)
    for message in caplog.messages:
        for words in ("--precision", "--force_precision", repr(precision), missing):
            assert words in message


@pytest.mark.usefixtures("graph_optimizer")
def test_convolutions_in_bfloat16_run_in_a_session_of_a_cluster():
    server = tf.distribute.Server.create_local_server()
    config = mixed_precision_config("bfloat16", is_forced=True, is_in_cluster=True)
    with tf.Graph().as_default():
        images = v1.placeholder(tf.float32, [None, 8, 8, 4])
        kernel, bias = v1.placeholder(tf.float32, [3, 3, 4, 8]), tf.ones([8])
        hidden = tf.nn.elu(
            tf.nn.bias_add(tf.nn.conv2d(images, kernel, 1, "SAME"), bias)
        )
        with v1.Session(server.target, config=config) as session:
            feed = {images: np.ones([2, 8, 8, 4]), kernel: np.ones([3, 3, 4, 8])}
            highest = session.run(tf.reduce_max(hidden), feed)
    assert highest == 1 + 3 * 3 * 4
