"""Recomputed layers: the same weights bit for bit, with less memory."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from estimator_accum import (
    make_accumulating_train_op,
    micro_batch_seed,
    microbatch_model_fn,
    recompute,
)
from estimator_accum.graph.walks import ancestors
from tests.helpers.models.interfaces import most_bytes_alive, start_session
from tests.helpers.models.microbatch_runs import INPUT, hidden_layer, output_layer
from tests.helpers.tables import first

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
_WIDTH, _ROWS = 12, 7  # of which 7 x 12 bits are no whole bytes


def _variable(name, shape=(_WIDTH, _WIDTH)):
    initializer = v1.glorot_uniform_initializer(seed=len(name))
    return v1.get_variable(name, shape, initializer=initializer)


def _dense(h):
    return tf.tanh(tf.matmul(h, _variable("dense")) + _variable("bias", [1, _WIDTH]))


def _dropout(h):
    return _dense(tf.nn.dropout(_dense_2(h), rate=0.4, seed=3))


def _dense_2(h):
    return tf.nn.silu(tf.matmul(h, _variable("dense_2")))


def _stateless(h):
    seed = micro_batch_seed(v1.get_variable_scope().name)
    return tf.nn.experimental.stateless_dropout(_dense(h), 0.4, seed) * h


def _noise(h):
    return _dense(h) * tf.random.normal(tf.shape(h), seed=5)


def _embedding(h):
    table = _variable("table", (5, _WIDTH))
    rows = tf.nn.embedding_lookup(table, tf.range(_ROWS) % 3)
    return _dense(h + rows) + tf.gather(table + 0.0, [4] * _ROWS)


def _branch(h):
    inner = tf.cond(tf.reduce_sum(h) > 0, lambda: tf.exp(-h), lambda: 3.0 * h)
    return _dense(inner) * h


def _branch_with_dropout(h):
    masked = functools.partial(tf.nn.dropout, rate=0.5, seed=4)
    return _dense(tf.cond(tf.reduce_sum(h) > -99.0, lambda: masked(h), lambda: h))


def _loop(h):
    def body(i, x):
        return i + 1, tf.tanh(x) * 1.5

    return _dense(tf.while_loop(lambda i, _: i < 3, body, [0, h])[1])


def _loop_with_a_variable(h):
    """Keeps the list of its results, a variant."""
    kernel = _variable("kernel")
    return h + tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(kernel, row)), h)


def _custom_gradient(h):
    @tf.custom_gradient
    def half_gradient(x):
        return tf.square(x), lambda dy: dy * x

    return half_gradient(_dense(h))


def _unused_variable(h):
    _variable("unused")
    return _dense(h)


def _nested(h):
    with v1.variable_scope("first"):
        h = recompute(_embedding)(h)
    return recompute(_dropout)(h)


def _batch_normalization(h):
    mean, variance = tf.nn.moments(h, [0])
    average = v1.get_variable("average", [_WIDTH], trainable=False)
    update = average.assign(0.9 * average + 0.1 * mean)
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    scale = _variable("scale", (1, _WIDTH))
    return tf.nn.batch_normalization(h, mean, variance, None, scale, 1e-3)


_LAYERS = [
    _dense,
    _dropout,
    _stateless,
    _noise,
    _embedding,
    _branch,
    _branch_with_dropout,
    _loop,
    _loop_with_a_variable,
    _custom_gradient,
    _unused_variable,
    _nested,
    _batch_normalization,
]


def _features():
    x = v1.get_variable("x", [_ROWS, _WIDTH], initializer=v1.ones_initializer())
    return x * tf.reshape(tf.linspace(-1.0, 1.0, _ROWS * _WIDTH), [_ROWS, _WIDTH])


def _session():
    """Returns a session that fuses no operations.

    TensorFlow may fuse those that no backward pass reads, and so round otherwise.
    """
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.remapping = RewriterConfig.OFF
    return start_session(config)


@functools.cache
@functools.cache
def _trained(wrap, layer):
    """Returns the loss and every variable after three updates with two layers."""
    with tf.Graph().as_default():
        v1.set_random_seed(1)
        v1.train.get_or_create_global_step()
        h = _features()
        for i in range(2):
            with v1.variable_scope(f"layer_{i}"):
                h = wrap(layer)(h)
        loss = tf.reduce_mean(h**2)
        optimizer = v1.train.AdamOptimizer(0.1)
        train_op = make_accumulating_train_op(loss, optimizer, 2)
        train_op = tf.group(train_op, v1.get_collection(v1.GraphKeys.UPDATE_OPS))
        with _session() as session:
            for _ in range(2 * 3):
                last, _ = session.run([loss, train_op])
            return last, session.run(v1.global_variables())


def _as_it_is(layer):
    return layer


def _switched(should_recompute):
    """Returns `recompute` that each run switches on by `should_recompute(step)`."""

    def wrap(layer):
        def wrapped(*arguments):
            switch = should_recompute(v1.train.get_or_create_global_step())
            return recompute(layer, always=switch)(*arguments)

        return wrapped

    return wrap


_always = _switched(lambda step: tf.equal(tf.identity(step), step))
_never = _switched(lambda step: tf.not_equal(tf.identity(step), step))
_sometimes = _switched(lambda step: tf.equal(step % 2, 1))


# A switch is tried with random numbers, loops, nested layers and writes.
_SWITCHED = [_dropout, _branch_with_dropout, _loop_with_a_variable, _nested]
_SWITCHED += [_batch_normalization]


_FIRST = {(layer, recompute) for layer in (_dense, _stateless, _nested, _loop)}
_FIRST |= {
    (layer, _sometimes) for layer in (_branch_with_dropout, _loop_with_a_variable)
}
_FIRST |= {(_batch_normalization, recompute), (_custom_gradient, recompute)}


@pytest.mark.parametrize(
    ("layer", "wrap"),
    first(
        [
            *itertools.product(_LAYERS, [recompute]),
            *itertools.product(_SWITCHED, [_sometimes]),
        ],
        _FIRST,
    ),
)
def test_weights_are_those_without_bit_for_bit(layer, wrap):
    plain_loss, plain = _trained(_as_it_is, layer)
    loss, weights = _trained(wrap, layer)
    assert np.isfinite(loss) and loss == plain_loss
    assert len(weights) == len(plain)
    for ours, theirs in zip(weights, plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_structures_and_results_from_outside_pass_through():
    def layer(inputs, factor, name):
        assert name == "name"
        both = {"sum": inputs["a"] * factor + inputs["b"], "same": inputs["a"]}
        return both, [tf.shape(inputs["b"]), None, "text"]

    with tf.Graph().as_default(), v1.Session() as session:
        a, b = tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])
        result, (shape, nothing, text) = recompute(layer)(
            {"a": a, "b": b}, 5.0, name="name"
        )
        assert nothing is None and text == "text"
        gradients = tf.gradients([result["sum"] * 2.0, result["same"] * 7.0], [a, b])
        assert session.run([result["sum"], result["same"], shape, gradients]) == [
            pytest.approx([8.0, 14.0]),
            pytest.approx([1.0, 2.0]),
            pytest.approx([2]),
            [pytest.approx([17.0, 17.0]), pytest.approx([2.0, 2.0])],
        ]


def test_a_gradient_of_rows_stays_one_of_rows():
    with tf.Graph().as_default():
        table = v1.get_variable("table", [5, 2])
        rows = recompute(lambda ids: tf.nn.embedding_lookup(table, ids) ** 2)([3, 3, 0])
        (gradient,) = tf.gradients(rows, table)
        assert isinstance(gradient, tf.IndexedSlices)
        with start_session() as session:
            value, slices = session.run([table, gradient])
        np.testing.assert_array_equal(slices.indices, [3, 3, 0])
        np.testing.assert_allclose(slices.values, 2 * value[[3, 3, 0]])


def test_a_result_that_is_not_used_has_no_gradient():
    def layer(x):
        with v1.variable_scope("unused"):
            root = tf.sqrt(_variable("kernel", (2, 2)) * 0.0)  # of an infinite slope
        return tf.sin(x), root

    with tf.Graph().as_default():
        x = tf.constant([1.0, 2.0])
        y, _ = recompute(layer)(x)
        (kernel,) = v1.trainable_variables()
        assert tf.gradients(y, kernel) == [None]
        y, _ = recompute(lambda x: (tf.sin(x), tf.sqrt(x * 0.0)))(x)
        (dx,) = tf.gradients(y, x)
        with v1.Session() as session:
            np.testing.assert_allclose(session.run(dx), np.cos([1.0, 2.0]), rtol=1e-6)


def test_a_reference_variable_that_a_layer_reads_and_writes_is_refused():
    def layer(x):
        average = v1.get_variable("average", [2], trainable=False, use_resource=False)
        read = tf.identity(average)
        with tf.control_dependencies([v1.assign(average, 0.9 * read + 0.1 * x)]):
            return tf.sin(x * read)

    with tf.Graph().as_default():
        sentence = r"reads\. Received: average, written by Assign\. Make"
        with pytest.raises(ValueError, match=sentence):
            recompute(layer)(tf.constant([1.0, 2.0]))


def test_a_tape_keeps_the_activations():
    with tf.Graph().as_default() as graph, tf.GradientTape() as tape:
        x = tf.constant([0.5])
        tape.watch(x)
        slope = tape.gradient(recompute(lambda x: tf.sin(tf.sin(x)))(x), x)
        assert not any("recompute" in op.name for op in graph.get_operations())
        with v1.Session() as session:
            expected = np.cos(np.sin(0.5)) * np.cos(0.5)
            np.testing.assert_allclose(session.run(slope), [expected], rtol=1e-6)


def test_a_layer_may_return_nothing():
    with tf.Graph().as_default():
        assert recompute(lambda x: None)(tf.constant(1.0)) is None


def test_a_second_derivative_needs_a_layer_that_always_is_recomputed():
    def slope_of_slope(wrap):
        x = tf.constant([0.5])
        (slope,) = tf.gradients(wrap(tf.sin)(x), x)
        return tf.gradients(slope, x)[0]

    with tf.Graph().as_default(), v1.Session() as session:
        values = session.run(slope_of_slope(recompute))
        np.testing.assert_allclose(values, [-np.sin(0.5)], rtol=1e-6)
        with pytest.raises(ValueError, match="second derivative, .* always=True"):
            slope_of_slope(_always)


_DEPTH = 8


@functools.cache
def _peak_bytes(wrap, layer):
    """Returns the most bytes that are alive in one step."""
    with tf.Graph().as_default():
        h = tf.random.normal([1000, 100])
        for i in range(_DEPTH):
            with v1.variable_scope(f"layer_{i}"):
                h = wrap(layer)(h)
        gradients = tf.gradients(tf.reduce_sum(h), v1.trainable_variables())
        norm = tf.linalg.global_norm(gradients)
        # One thread goes on to the next layer, if nothing holds it back.
        config = v1.ConfigProto(
            inter_op_parallelism_threads=1, use_per_session_threads=True
        )
        with start_session(config) as session:
            session.run(norm)
            return most_bytes_alive(session, norm)


_DROPOUTS = 4


def _deep(h):
    kernel = v1.get_variable("kernel", [100, 100])
    wide = h
    for seed in range(_DROPOUTS):
        wide = tf.nn.dropout(tf.tanh(tf.matmul(wide, kernel)), rate=0.1, seed=seed)
    return wide


def test_layers_keep_their_inputs_and_a_bit_for_each_random_decision():
    kept = 1000 * 100 * (4 + _DROPOUTS / 8)  # bytes of one layer
    plain, ours = _peak_bytes(_as_it_is, _deep), _peak_bytes(recompute, _deep)
    assert ours < _DEPTH * kept + 0.2 * plain
    assert ours < 0.3 * plain


@pytest.mark.once
def test_a_switch_keeps_all_or_inputs_alone():
    plain = _peak_bytes(_as_it_is, _deep)
    assert _peak_bytes(_always, _deep) < 0.3 * plain
    assert 0.8 * plain < _peak_bytes(_never, _deep) < 1.2 * plain


def test_a_layers_output_waits_for_the_switch():
    """Until it is known, everything that it may drop is in memory."""
    with tf.Graph().as_default():
        switch = v1.placeholder(tf.bool, [])
        y = recompute(tf.sin, always=switch)(tf.ones([2]))
        assert switch.op in ancestors([y.op])


@pytest.mark.parametrize("is_trainable", [True, False])
def test_a_layers_gradient_waits_for_those_of_trainable_variables(is_trainable):
    with tf.Graph().as_default():
        x = tf.ones([2, 3])
        kernel = v1.get_variable("kernel", [3, 3], trainable=is_trainable)
        y = recompute(lambda x: tf.matmul(x, tf.cast(kernel, tf.float32)))(x)
        dx, dkernel = tf.gradients(y, [x, kernel])
        (product,) = [
            op
            for op in ancestors([dkernel.op]).keys() - ancestors([y.op])
            if op.type == "MatMul"
        ]
        assert (product in ancestors([dx.op])) == is_trainable


@pytest.mark.parametrize("shape", [[], [1], [8], [3, 5], [2, 0], [4, 2, 8]])
def test_a_mask_of_any_shape_is_the_same_in_the_second_pass(shape):
    """The gradient of a dropped number is dropped."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = tf.ones(shape)
        y = recompute(lambda x: tf.nn.dropout(x, 0.5, seed=3))(x)
        outputs, slope = session.run([y, tf.gradients(y, x)[0]])
    np.testing.assert_array_equal(outputs, slope)


def test_a_second_pass_through_the_forward_pass_is_not_run_early():
    """Its first operation waits for the gradient of the layer's output."""
    order = []

    def note(name):
        def noted(x):
            order.append(name)
            return x

        return lambda x: tf.ensure_shape(tf.numpy_function(noted, [x], x.dtype), [2])

    with tf.Graph().as_default(), v1.Session() as session:
        x = tf.constant([1.0, 2.0])
        y = recompute(lambda x: tf.exp(tf.sin(x)))(x)

        @tf.custom_gradient
        def loss(y):
            return y, lambda dy: note("gradient")(dy)

        (dx,) = tf.gradients(loss(y), x)
        (gate,) = (op for op in x.graph.get_operations() if op.type == "PyFunc")
        copies = [op for op in x.graph.get_operations() if "/recompute" in op.name]
        assert any(op.type == "Exp" for op in copies)
        early = [op for op in copies if gate not in ancestors([op])]
        assert not [op.name for op in early if op.type != "Const"]
        session.run(dx)
        assert order == ["gradient"]


def test_inside_whole_batches_in_micro_batches():
    def model_fn(features, labels, mode):
        hidden = wrap(lambda x: _dropout_by_seed(hidden_layer(x)))(features["x"])
        loss = tf.reduce_mean((output_layer(hidden) - labels) ** 2)
        train_op = make_accumulating_train_op(loss, v1.train.AdamOptimizer(0.1), 1)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def _dropout_by_seed(x):
        seed = micro_batch_seed("dropout")
        return tf.nn.experimental.stateless_dropout(x, 0.3, seed)

    config = tf.estimator.RunConfig(tf_random_seed=1)

    def weights():
        in_three = microbatch_model_fn(model_fn, 3)
        estimator = tf.estimator.Estimator(in_three, config=config)
        estimator.train(INPUT)
        return [estimator.get_variable_value(name) for name in ("hidden", "output")]

    wrap = _as_it_is
    plain = weights()
    wrap = recompute
    for ours, theirs in zip(weights(), plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _in_a_function():
    tf.function(recompute(tf.exp)).get_concrete_function(tf.constant(1.0))


def _in_a_branch():
    x = tf.constant(1.0)
    tf.cond(x > 0, lambda: recompute(tf.exp)(x), lambda: x)


def _in_a_branch_of_tensorflow_1():
    v1.disable_control_flow_v2()
    try:
        _in_a_branch()
    finally:
        v1.enable_control_flow_v2()


def _around_a_branch_of_tensorflow_1():
    v1.disable_control_flow_v2()
    try:
        x = tf.constant(1.0)
        recompute(lambda: tf.cond(x > 0, lambda: tf.exp(x), lambda: x))()
    finally:
        v1.enable_control_flow_v2()


def _twice():
    x = tf.constant(1.0)
    layer = recompute(lambda x: tf.exp(recompute(tf.sin)(x)))
    (first,) = tf.gradients(layer(x), x)
    tf.gradients(first, x)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (_in_a_function, "outside of branches and loops. Received: a tf.function, or"),
        (_in_a_branch, "a tf.function, or a branch or loop of control flow v2"),
        (_in_a_branch_of_tensorflow_1, "a branch or loop of control flow v1. Call it "),
        (
            _around_a_branch_of_tensorflow_1,
            "control flow of TensorFlow 1. .*type (Merge|Switch)",
        ),
        (_twice, "must be taken once. Received: a second derivative, through"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(call, sentence):
    with tf.Graph().as_default(), pytest.raises(ValueError, match=sentence):
        call()


def test_eager_execution_is_refused():
    with pytest.raises(ValueError, match="Received: eager execution, for which"):
        recompute(tf.exp)(tf.constant(1.0))


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="`layer` must be a function of tensors. Rec"):
        recompute(5)
