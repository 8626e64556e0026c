"""Stand-ins of tf.contrib."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.compat.v1 import (
    _arg_scope,
    _contrib,
    _framework,
    _losses,
    _normalization,
    _optimize_loss,
    _weights,
)
from tests.helpers.processes import legacy_runs

v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("fresh_graph")


def _run(*fetches, feeds=None):
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        return session.run(fetches, feeds)


def test_layer_norm_normalizes_the_axes_that_are_named():
    values = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    inputs = v1.placeholder_with_default(values, [None, 3, 4])
    last = _normalization.layer_norm(inputs, begin_norm_axis=-1)
    all_but_first = _normalization.layer_norm(inputs, scope="own")
    for output, axes in zip(_run(last, all_but_first), ((2,), (1, 2)), strict=True):
        mean = values.mean(axes, keepdims=True)
        deviation = np.sqrt(values.var(axes, keepdims=True) + 1e-12)
        np.testing.assert_allclose(output, (values - mean) / deviation, atol=1e-5)
    assert last.shape.as_list() == [None, 3, 4]


def test_variables_of_layer_norm_have_the_names_of_tensorflow_1():
    inputs = tf.ones([2, 3])
    with v1.variable_scope("layer"):
        _normalization.layer_norm(inputs)
        _normalization.layer_norm(inputs, variables_collections={"beta": ["betas"]})
        _normalization.layer_norm(inputs, center=False, trainable=False, scope="own")
    with v1.variable_scope("layer"):
        _normalization.layer_norm(inputs, reuse=True, scope="LayerNorm")
    shapes = {v.op.name: v.shape.as_list() for v in v1.global_variables()}
    assert shapes == {
        "layer/LayerNorm/beta": [3],
        "layer/LayerNorm/gamma": [3],
        "layer/LayerNorm_1/beta": [3],
        "layer/LayerNorm_1/gamma": [3],
        "layer/own/gamma": [3],
    }
    assert len(v1.model_variables()) == 5
    assert len(v1.trainable_variables()) == 4
    assert [v.op.name for v in v1.get_collection("betas")] == ["layer/LayerNorm_1/beta"]


def test_layer_norm_activates_collects_and_widens_epsilon_in_float16():
    inputs = tf.constant([[-1e-3, 1e-3]], tf.float16)
    half = _normalization.layer_norm(inputs)
    single = _normalization.layer_norm(tf.cast(inputs, tf.float32), scope="single")
    relu = _normalization.layer_norm(
        tf.constant([[-1.0, 1.0]]), activation_fn=tf.nn.relu, outputs_collections="out"
    )
    outputs = _run(half, single, relu)
    assert half.dtype == tf.float16
    np.testing.assert_allclose(outputs[0], [[-0.0316, 0.0316]], atol=1e-3)
    np.testing.assert_allclose(outputs[1], [[-1, 1]], atol=1e-4)
    np.testing.assert_allclose(outputs[2], [[0, 1]], atol=1e-6)
    assert v1.get_collection("out") == [relu]


@pytest.mark.parametrize(
    ("shape", "arguments", "sentence"),
    [
        (None, {}, "known rank and known last axes. Received: shape <unknown>"),
        ([2, None], {}, r"known last axes\. Received: shape \(2, None\)"),
        ([2, 3], {"begin_norm_axis": 2}, "axes of the inputs. Received: -1 and 2"),
        ([2, 3], {"begin_params_axis": 2}, "axes of the inputs. Received: 2 and 1"),
    ],
)
def test_layer_norm_refuses_shapes_and_axes(shape, arguments, sentence):
    inputs = v1.placeholder(tf.float32, shape)
    with pytest.raises(ValueError, match=sentence):
        _normalization.layer_norm(inputs, **arguments)


def test_regularizers_penalize_and_are_collected():
    weights = v1.get_variable("w", initializer=[3.0, -4.0])
    penalties = [
        _weights.l1_regularizer(0.5)(weights),
        _weights.l2_regularizer(0.5)(weights),
    ]
    total = _weights.apply_regularization(_weights.l2_regularizer(2.0), [weights])
    assert v1.losses.get_regularization_losses() == [total]
    assert _run(*penalties, total) == (3.5, 6.25, 25.0)
    assert _weights.l2_regularizer(0.0)(weights) is None
    nothing = _weights.apply_regularization(_weights.l1_regularizer(0.0), [weights])
    assert _run(nothing) == (0.0,)
    for scale in (1, -0.5, True):
        with pytest.raises(ValueError, match=f"a float >= 0. Received: {scale}"):
            _weights.l2_regularizer(scale)
    with pytest.raises(ValueError, match="WEIGHTS, must have a variable"):
        _weights.apply_regularization(_weights.l1_regularizer(0.1))


@pytest.fixture
def checkpoint(tmp_path):
    """Path of a checkpoint of a/x = [1, 2] and b = 3."""
    with tf.Graph().as_default(), v1.Session() as session:
        with v1.variable_scope("a"):
            v1.get_variable("x", initializer=[1.0, 2.0])
        v1.get_variable("b", initializer=3.0)
        session.run(v1.global_variables_initializer())
        return v1.train.Saver().save(session, str(tmp_path / "model.ckpt"))


def _restored(restore, *variables):
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        restore(session)
        return [session.run(variable).tolist() for variable in variables]


def test_values_of_a_checkpoint_are_assigned(checkpoint, caplog):
    x = v1.get_variable("x", initializer=[[0.0], [0.0]])
    b = v1.get_variable("b", initializer=0.0)
    new = v1.get_variable("new", initializer=7.0)
    op, feeds = _framework.assign_from_checkpoint(checkpoint, {"a/x": x, "b": b})
    values = _restored(lambda session: session.run(op, feeds), x, b, new)
    assert values == [[[1.0], [2.0]], 3.0, 7.0]
    with pytest.raises(ValueError, match=r"all variables\. Received: .* without new\."):
        _framework.assign_from_checkpoint(checkpoint, [b, new])
    op, feeds = _framework.assign_from_checkpoint(checkpoint, [b, new], True)
    assert _restored(lambda session: session.run(op, feeds), b, new) == [3.0, 7.0]
    assert "Variable new missing in checkpoint" in caplog.text


def test_function_restores_a_checkpoint_in_a_session(checkpoint):
    x = v1.get_variable("x", initializer=[[0.0], [0.0]])
    new = v1.get_variable("new", initializer=7.0)
    restore = _framework.assign_from_checkpoint_fn(
        checkpoint,
        {"a/x": x, "new": new},
        ignore_missing_vars=True,
        reshape_variables=True,
    )
    assert _restored(restore, x, new) == [[[1.0], [2.0]], 7.0]
    nothing = _framework.assign_from_checkpoint_fn(checkpoint, [new], True)
    assert nothing is None
    with pytest.raises(ValueError, match="`var_list` must have a variable"):
        _framework.assign_from_checkpoint_fn(checkpoint, [])


def test_arrays_are_assigned_by_name():
    b = v1.get_variable("b", initializer=[0.0, 0.0])
    assert _restored(_framework.assign_from_values_fn({"b": [1, 2]}), b) == [[1.0, 2.0]]
    for values, received in (
        ({"no_such": 1.0}, r"no_such of shape None for shape \(\)"),
        ({"b": [1.0]}, r"b of shape \(2,\) for shape \(1,\)"),
    ):
        with pytest.raises(ValueError, match=f"of its size. Received: {received}"):
            _framework.assign_from_values(values)


def test_variables_are_selected_by_scope_and_suffix():
    with v1.variable_scope("a") as scope:
        v1.get_variable("x", [])
        v1.get_variable("y", [], trainable=False)
    v1.get_variable("b", [])
    _normalization.layer_norm(tf.ones([1, 2]), scope="n", center=False)

    def names(variables):
        return [variable.op.name for variable in variables]

    assert names(_framework.get_variables(scope)) == ["a/x", "a/y"]
    assert names(_framework.get_variables("a", suffix="y")) == ["a/y"]
    assert names(_framework.get_trainable_variables("a")) == ["a/x"]
    assert names(_framework.get_model_variables()) == ["n/gamma"]
    restored = _framework.get_variables_to_restore
    assert names(restored(exclude=["a", "n"])) == ["b"]
    assert names(restored(include=["a", "b"], exclude=["a/x"])) == ["a/y", "b"]


def test_streaming_metrics_take_predictions_first():
    names = _contrib._stand_ins()["metrics"]
    value, update = names["streaming_precision"]([1, 1, 0], labels=[1, 0, 0])
    with v1.Session() as session:
        session.run(v1.local_variables_initializer())
        session.run(update)
        assert session.run(value) == 0.5


def _softmax(x, labels):
    chosen = x[range(len(x)), labels]
    return np.log(np.exp(x).sum(-1)) - chosen


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("softmax_cross_entropy", np.eye(2), _softmax),
        ("sparse_softmax_cross_entropy", np.arange(2), _softmax),
        ("mean_squared_error", np.eye(2), lambda x, _: (x - np.eye(2)) ** 2),
    ],
)
def test_losses_of_contrib_take_logits_first(name, labels, expected):
    x = np.array([[0.5, 2.0], [-1.0, 3.0]], np.float32)
    loss = getattr(_losses, name)(x, labels, weights=2.0)
    v1.losses.add_loss(tf.constant(1.0))
    with v1.Session() as session:
        total = session.run(_losses.get_total_loss())
    by_example = expected(x, np.arange(2))
    assert total == pytest.approx(1.0 + 2.0 * np.mean(by_example), rel=1e-6)
    assert _losses.get_losses()[0] is loss


@pytest.mark.parametrize("weight", [None, [2.0, 0.0, 1.0, 3.0]])
def test_streaming_correlation_is_that_of_all_batches(weight):
    names = _contrib._stand_ins()["metrics"]
    x, y = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32) + 100
    placeholders = v1.placeholder(tf.float32, [4]), v1.placeholder(tf.float32, [4])
    kinds = ("covariance", "pearson_correlation")
    metrics = [names[f"streaming_{kind}"](*placeholders, weight) for kind in kinds]
    values, updates = zip(*metrics, strict=True)
    counts = np.tile([1, 1, 1, 1] if weight is None else weight, 3).astype(int)
    pairs = np.repeat(np.stack([x.ravel(), y.ravel()]).astype(float), counts, axis=1)
    expected = np.cov(pairs)[0, 1], np.corrcoef(pairs)[0, 1]
    with v1.Session() as session:
        session.run(v1.local_variables_initializer())
        assert np.isnan(session.run(values)).all()
        for batch in zip(x, y, strict=True):
            updated = session.run(updates, dict(zip(placeholders, batch, strict=True)))
        np.testing.assert_allclose(updated, expected, rtol=1e-4)
        np.testing.assert_array_equal(session.run(values), updated)


def test_cross_shard_optimizer_is_the_optimizer_itself_without_a_tpu():
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    make = _contrib._stand_ins()["tpu"]["CrossShardOptimizer"]
    assert make(optimizer) is optimizer


def test_batches_of_contrib_data_are_whole():
    names = _contrib._stand_ins()["data"]
    dataset = tf.data.Dataset.range(7)
    batches = dataset.apply(names["batch_and_drop_remainder"](3))
    assert v1.data.get_output_shapes(batches).as_list() == [3]
    for name in ("map_and_batch", "parallel_interleave", "shuffle_and_repeat"):
        assert names[name] is getattr(v1.data.experimental, name)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("fully_connected", {"num_outputs": 2.0}, "an integer. Received: 2.0"),
        ("conv2d", {"num_outputs": 2, "kernel_size": 3}, "number of channels. Rec"),
        ("max_pool2d", {"kernel_size": 2, "data_format": "CHWN"}, "Received: 'CHWN'"),
        ("batch_norm", {}, r"number of channels. Received: shape \(4, None\)"),
        ("batch_norm", {"renorm": True}, "no stand-in. Received: renorm=True"),
        ("batch_norm", {"data_format": "NDHWC"}, "Received: 'NDHWC'"),
        ("stack", {"layer": tf.identity, "stack_args": 3}, "a list. Received: 3"),
        ("embed_sequence", {"vocab_size": 3}, "Received: 3 and None"),
    ],
)
def test_layer_refuses_arguments(name, arguments, sentence):
    inputs = v1.placeholder(tf.float32, [4, None])
    with pytest.raises((TypeError, ValueError), match=sentence):
        _contrib._stand_ins()["layers"][name](inputs, **arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"learning_rate": 1}, "a float >= 0, a scalar Tensor or None. Received: 1"),
        ({"optimizer": "Adamax"}, "`optimizer` must be one of Adagrad, .* 'Adamax'"),
        ({"learning_rate": None}, "a name or a class. Received: None, for SGD"),
        ({"clip_gradients": 1}, "a float, a function or None. Received: 1"),
        ({"summaries": ["accuracy"]}, "of learning_rate, .* Received: accuracy"),
        ({"learning_rate_decay_fn": max}, "a global step. Received: none"),
    ],
)
def test_optimize_loss_refuses_arguments(arguments, sentence):
    loss = v1.get_variable("w", []) ** 2
    usual = {"global_step": None, "learning_rate": 0.1, "optimizer": "SGD"}
    with pytest.raises(ValueError, match=sentence):
        _optimize_loss.optimize_loss(loss, **usual | arguments)


def test_inner_arg_scope_adds_to_the_outer_one_and_arguments_come_first():
    @_arg_scope.add_arg_scope
    def layer(inputs, first=1, second=2):
        return inputs, first, second

    assert _arg_scope.arg_scoped_arguments(layer) == ("first", "second")
    with _arg_scope.arg_scope([layer], first=3) as outer:
        with _arg_scope.arg_scope([layer], second=4):
            assert layer(0) == (0, 3, 4)
            assert layer(0, second=5) == (0, 3, 5)
        assert layer(0) == (0, 3, 2)
    assert layer(0) == (0, 1, 2)
    with _arg_scope.arg_scope(outer):
        assert layer(0) == (0, 3, 2)
    for functions, more, sentence in (
        (layer, {}, "in a list. Received: <function"),
        ([max], {}, "decorated by add_arg_scope. Received: <built-in"),
        (outer, {"first": 1}, "must have no arguments. Received: first"),
    ):
        with (
            pytest.raises((TypeError, ValueError), match=sentence),
            _arg_scope.arg_scope(functions, **more),
        ):
            pass


_LOGITS = np.array([[0.5], [-1.0], [2.0], [0.0]], np.float32)
_WEIGHTS = np.array([[1.0], [2.0], [0.0], [4.0]], np.float32)


def _head_loss(head, logits, labels, mode="eval", **more):
    spec = head.create_estimator_spec(
        {"weight": _WEIGHTS}, mode, logits, labels=labels, **more
    )
    return spec.loss, spec


def test_losses_of_contribs_heads_are_means_over_examples():
    heads = _contrib._stand_ins()["estimator"]
    targets = np.array([[1.0], [0.0], [1.0], [3.0]], np.float32)
    squared = (_LOGITS - targets) ** 2
    plain, spec = _head_loss(heads["regression_head"](name="price"), _LOGITS, targets)
    assert "average_loss/price" in spec.eval_metric_ops
    weighted, _ = _head_loss(heads["regression_head"]("weight"), _LOGITS, targets)
    total, _ = _head_loss(
        heads["regression_head"](None, 1, v1.losses.Reduction.SUM), _LOGITS, targets
    )
    is_one = np.array([[1.0], [0.0], [0.0], [1.0]], np.float32)
    crossed = np.log1p(np.exp(_LOGITS)) - is_one * _LOGITS
    binary, _ = _head_loss(heads["binary_classification_head"](), _LOGITS, is_one)
    scores = np.hstack([_LOGITS, -_LOGITS, 0 * _LOGITS])
    numbers = np.array([[0], [2], [1], [1]])
    logs = np.log(np.exp(scores).sum(1)) - scores[np.arange(4), numbers[:, 0]]
    several, _ = _head_loss(heads["multi_class_head"](3), scores, numbers)
    losses = _run(plain, weighted, total, binary, several)
    expected = [
        squared.mean(),
        # divided by the examples of the batch, not by their weights
        (_WEIGHTS * squared).sum() / 4,
        squared.sum(),
        crossed.mean(),
        logs.mean(),
    ]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_a_head_of_contrib_trains_by_a_function_of_its_loss():
    head = _contrib._stand_ins()["estimator"]["regression_head"]()
    w = v1.get_variable("w", initializer=0.5)
    losses = []

    def train_op_fn(loss):
        losses.append(loss)
        return v1.train.GradientDescentOptimizer(0.1).minimize(loss)

    loss, spec = _head_loss(
        head, w * _LOGITS, _LOGITS, "train", train_op_fn=train_op_fn
    )
    assert losses == [loss]
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(spec.train_op)
        expected = 0.5 + 0.1 * 2 * 0.5 * np.mean(_LOGITS**2)
        assert session.run(w) == pytest.approx(expected)


_REFUSED = """from estimator_accum.compat.v1 import enable_v1
tf = enable_v1()
from estimator_accum.compat.v1._imports import compile_v1
from tensorflow.contrib.tpu.python.tpu import tpu_config
assert tpu_config.TPUConfig is tf.contrib.tpu.TPUConfig is tf.estimator.tpu.TPUConfig
assert tf.contrib.tpu.TPUEstimator is tf.estimator.tpu.TPUEstimator
from tensorflow.contrib import slim
from tensorflow.contrib.layers.python.layers import initializers, utils
from tensorflow.contrib.framework.python.ops import arg_scope
assert slim.conv2d is tf.contrib.layers.conv2d and slim.arg_scope is arg_scope
assert initializers.xavier_initializer is tf.contrib.layers.xavier_initializer
assert utils is slim.utils
print(dir(tf.contrib))
for text in STATEMENTS:
    try:
        exec(compile_v1(text, "user.py"), {"tf": tf})
    except (AttributeError, ImportError) as error:
        print(type(error).__name__, error)
"""
_STATEMENTS = [
    "tf.contrib.signal.stft",
    "tf.contrib.data.no_such",
    "import tensorflow.contrib.signal as signal",
    "from tensorflow.contrib import seq2seq",
    "from tensorflow.contrib.training import no_such",
    "from tensorflow.contrib.layers.python.ops import sparse_ops",
    "from tensorflow.contrib.lookup import index_table_from_file",
]


def test_name_without_a_stand_in_is_refused_in_one_sentence():
    done = legacy_runs.run_python(f"STATEMENTS = {_STATEMENTS}\n{_REFUSED}")
    assert done.returncode == 0, done.stderr
    modules, *refusals = done.stdout.splitlines()
    assert modules == str(sorted(_contrib._stand_ins()))
    all_modules = ", ".join(sorted(_contrib._stand_ins()))
    end = "Replace it in the script, or run it on TensorFlow 1.15."
    top = f"A name of `tf.contrib` must be one that has a stand-in: {all_modules}."
    assert refusals[0] == f"AttributeError {top} Received: tf.contrib.signal. {end}"
    assert refusals[1].startswith("AttributeError A name of `tf.contrib.data` must be")
    assert (
        refusals[2] == f"ModuleNotFoundError {top} Received: tf.contrib.signal. {end}"
    )
    assert (
        refusals[3] == f"ModuleNotFoundError {top} Received: tf.contrib.seq2seq. {end}"
    )
    assert "of `tf.contrib.training` must" in refusals[4]
    assert refusals[4].endswith("https://github.com/google-research/tf-slim")
    assert "Received: tf.contrib.layers.python.ops. " in refusals[5]
    assert len(refusals) == 6


def test_names_of_the_page_have_stand_ins_of_tensorflow():
    table = _contrib._stand_ins()
    hook = v1.estimator.experimental.stop_if_no_increase_hook
    assert table["estimator"]["stop_if_no_increase_hook"] is hook
    assert table["rnn"]["LSTMCell"] is v1.nn.rnn_cell.LSTMCell
    assert table["training"]["checkpoints_iterator"] is v1.train.checkpoints_iterator
    assert table["cluster_resolver"].keys() >= {"TPUClusterResolver"}
    framework = "list_variables load_variable load_checkpoint init_from_checkpoint "
    framework += "get_global_step get_or_create_global_step"
    for name in framework.split():
        assert table["framework"][name] is getattr(v1.train, name)
    metrics = "accuracy auc covariance mean mean_squared_error pearson_correlation "
    metrics += "precision recall"
    assert {f"streaming_{name}" for name in metrics.split()} == table["metrics"].keys()
