"""The encoder with its classifier, compared with NumPy."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune.modeling import classifier_logits, encode
from estimator_accum import (
    make_accumulating_train_op,
    mixed_precision_config,
    recompute,
)
from tests.helpers.models import tiny_bert
from tests.helpers.oracles.onednn import is_onednn_on

pytestmark = pytest.mark.usefixtures("graph_optimizer")
_SIZES = {"vocab_size": 30, "hidden_size": 24, "num_attention_heads": 3}
_SIZES |= {"intermediate_size": 40, "max_position_embeddings": 12}
_CONFIG = dataclasses.replace(tiny_bert.CONFIG, num_hidden_layers=2, **_SIZES)
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_WITHOUT_DROPOUT = dataclasses.replace(_CONFIG, **_NO_DROPOUT)
# The names in google-research/bert's checkpoints, for two layers.
_LAYER = """
attention/self/query/kernel attention/self/query/bias attention/self/key/kernel
attention/self/key/bias attention/self/value/kernel attention/self/value/bias
attention/output/dense/kernel attention/output/dense/bias intermediate/dense/kernel
attention/output/LayerNorm/beta attention/output/LayerNorm/gamma intermediate/dense/bias
output/dense/kernel output/dense/bias output/LayerNorm/beta output/LayerNorm/gamma
"""
_PUBLISHED_NAMES = [
    *(f"bert/embeddings/{x}_embeddings" for x in ("word", "token_type", "position")),
    *(f"bert/embeddings/LayerNorm/{name}" for name in ("beta", "gamma")),
    *(f"bert/encoder/layer_{i}/{name}" for i in range(2) for name in _LAYER.split()),
    *("bert/pooler/dense/kernel", "bert/pooler/dense/bias"),
]

_IDS = np.array([[1, 7, 8, 9, 2, 11, 2], [1, 29, 2, 0, 0, 0, 0], [1, 5, 5, 2, 9, 2, 0]])
_MASK = np.array([[1] * 7, [1, 1, 1, 0, 0, 0, 0], [1] * 6 + [0]])
_SEGMENTS = np.array([[0] * 5 + [1] * 2, [0] * 7, [0] * 4 + [1, 1, 0]])
_BATCH = (_IDS, _MASK, _SEGMENTS)


class _Model:
    """An encoder with a classifier, in its own graph and session."""

    def __init__(
        self, config=_CONFIG, *, shape=(None, None), is_training=False, is_packed=True
    ):
        self.graph = tf.Graph()
        with self.graph.as_default():
            tf.compat.v1.set_random_seed(7)
            step = tf.compat.v1.train.get_or_create_global_step()
            self.next_step = step.assign_add(1)
            self.inputs = [tf.compat.v1.placeholder(tf.int32, shape) for _ in range(3)]
            mode = {"is_training": is_training}
            self.output = encode(config, *self.inputs, is_packed=is_packed, **mode)
            self.logits = classifier_logits(self.output.pooled, 2, **mode)
            self.variables = {v.op.name: v for v in tf.compat.v1.trainable_variables()}

    @functools.cached_property
    def session(self):
        session = tf.compat.v1.Session(graph=self.graph)
        # Large weights, and vectors other than 0 and 1, show bugs.
        generator = np.random.default_rng(3)
        values = {}
        for name, variable in self.variables.items():
            value = 0.3 * generator.standard_normal(variable.shape.as_list())
            values[variable.initializer.inputs[1]] = value + name.endswith("gamma")
        session.run([v.initializer for v in self.variables.values()], values)
        with self.graph.as_default():
            session.run(tf.compat.v1.train.get_global_step().initializer)
        return session

    @functools.cached_property
    def gradients(self):
        """Gradients of the logits' mean squared distance from 1, by variable."""
        with self.graph.as_default():
            losses = tf.reduce_sum(tf.square(self.logits - 1.0), axis=1)  # [B]
            variables = list(self.variables.values())
            gradients = tf.gradients(tf.reduce_mean(losses), variables)
        return dict(zip(self.variables, gradients, strict=True))

    def run(self, fetches, batch=_BATCH):
        values = self.session.run(fetches, dict(zip(self.inputs, batch, strict=True)))
        self.session.run(self.next_step)
        return values

    def values(self):
        """Values of all variables in float64."""
        return {k: np.float64(v) for k, v in self.session.run(self.variables).items()}


@pytest.fixture(scope="module")
def model() -> _Model:
    """A model for inference, whose graph takes batches of every shape."""
    return _Model()


def _numpy_gelu(x):
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def _numpy_gelu_new(x):
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1.0 + np.tanh(inner))


_NUMPY_ACTIVATIONS = {"gelu": _numpy_gelu, "gelu_new": _numpy_gelu_new}
_NUMPY_ACTIVATIONS |= {"relu": lambda x: np.maximum(x, 0.0), "tanh": np.tanh}
_NUMPY_ACTIVATIONS |= {"linear": lambda x: x}


def _numpy_encode(config, values, ids, segments):
    """Returns an unpadded example's hidden states [T, H] and pooled first token [H]."""

    def dense(x, scope):
        return x @ values[f"{scope}/kernel"] + values[f"{scope}/bias"]

    def norm(x, scope):
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.layer_norm_eps)
        scope = f"{scope}/LayerNorm"
        return x * values[f"{scope}/gamma"] + values[f"{scope}/beta"]

    def attention(x, scope):
        heads = np.split(np.arange(config.hidden_size), config.num_attention_heads)
        q, k, v = (dense(x, f"{scope}/{name}") for name in ("query", "key", "value"))
        parts = []
        for head in heads:
            scores = q[:, head] @ k[:, head].T / math.sqrt(len(head))
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            parts.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, head])
        return np.concatenate(parts, axis=-1)

    words = values["bert/embeddings/word_embeddings"][ids]
    positions = values["bert/embeddings/position_embeddings"][: len(ids)]
    types = values["bert/embeddings/token_type_embeddings"][segments]
    states = [norm(words + positions + types, "bert/embeddings")]
    for i in range(config.num_hidden_layers):
        layer, x = f"bert/encoder/layer_{i}", states[-1]
        context = attention(x, f"{layer}/attention/self")
        context = dense(context, f"{layer}/attention/output/dense")
        x = norm(x + context, f"{layer}/attention/output")
        wide = dense(x, f"{layer}/intermediate/dense")
        wide = _NUMPY_ACTIVATIONS[config.hidden_act](wide)
        states.append(norm(x + dense(wide, f"{layer}/output/dense"), f"{layer}/output"))
    return states, np.tanh(dense(states[-1][0], "bert/pooler/dense"))


def test_variables_are_those_of_the_published_checkpoints(model):
    shapes = {k: v.shape.as_list() for k, v in model.variables.items()}
    assert set(shapes) == {*_PUBLISHED_NAMES, "output_weights", "output_bias"}
    layer = "bert/encoder/layer_1"
    assert shapes["bert/embeddings/word_embeddings"] == [30, 24]
    assert shapes["bert/embeddings/position_embeddings"] == [12, 24]
    assert shapes["bert/embeddings/token_type_embeddings"] == [2, 24]
    assert shapes[f"{layer}/intermediate/dense/kernel"] == [24, 40]
    assert shapes[f"{layer}/output/dense/kernel"] == [40, 24]
    assert (shapes["output_weights"], shapes["output_bias"]) == ([2, 24], [2])


def test_tables_and_kernels_start_truncated_normal_and_the_rest_constant():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.set_random_seed(7)
        ids = tf.zeros([1, 1], tf.int32)
        encode(_CONFIG, ids, ids, ids, is_training=False)
        variables = tf.compat.v1.trainable_variables()
        session.run(tf.compat.v1.global_variables_initializer())
        values = session.run({v.op.name: v for v in variables})
    for name, value in values.items():
        if name.endswith("gamma"):
            np.testing.assert_array_equal(value, 1.0)
        elif name.endswith(("beta", "bias")):
            np.testing.assert_array_equal(value, 0.0)
        else:
            assert np.abs(value).max() <= 2 * _CONFIG.initializer_range, name
    # Truncation at two deviations leaves 0.88 of the deviation.
    kernel = values["bert/encoder/layer_0/intermediate/dense/kernel"]
    assert kernel.std() == pytest.approx(0.88 * _CONFIG.initializer_range, rel=0.1)


@pytest.mark.parametrize(
    ("activation", "num_layers", "is_packed"),
    [("gelu", 2, True), ("gelu", 2, False), ("gelu_new", 1, True)]
    + [("relu", 1, False), ("tanh", 1, True), ("linear", 1, False)],
)
def test_every_layer_and_the_pooler_equal_numpy(activation, num_layers, is_packed):
    changes = {"hidden_act": activation, "num_hidden_layers": num_layers}
    config = dataclasses.replace(_CONFIG, **changes)
    model = _Model(config, is_packed=is_packed)
    layers, sequence, pooled = model.run(model.output)
    values = model.values()
    assert len(layers) == num_layers + 1
    np.testing.assert_array_equal(sequence, layers[-1])
    assert not is_packed or not any(layer[_MASK == 0].any() for layer in layers)
    for row, length in enumerate(_MASK.sum(axis=1)):
        expected, expected_pooled = _numpy_encode(
            config, values, _IDS[row, :length], _SEGMENTS[row, :length]
        )
        for layer, states in zip(layers, expected, strict=True):
            np.testing.assert_allclose(layer[row, :length], states, atol=2e-5)
        np.testing.assert_allclose(pooled[row], expected_pooled, atol=2e-5)


def test_logits_are_pooled_times_output_weights_plus_output_bias(model):
    values = model.values()
    pooled, logits = model.run([model.output.pooled, model.logits])
    expected = pooled @ values["output_weights"].T + values["output_bias"]
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("is_training", [True, False])
def test_every_shape_is_known_where_padding_is_computed_on(is_training):
    def shapes(is_packed):
        model = _Model(shape=(3, 7), is_training=is_training, is_packed=is_packed)
        operations = model.graph.get_operations()
        return [
            tensor.shape for operation in operations for tensor in operation.outputs
        ]

    assert all(shape.is_fully_defined() for shape in shapes(is_packed=False))
    assert not all(shape.is_fully_defined() for shape in shapes(is_packed=True))


@pytest.mark.parametrize("shape", [(None, 7), (3, None)])
def test_static_shapes_are_known_as_far_as_those_of_the_input(shape):
    model = _Model(dataclasses.replace(_CONFIG, num_hidden_layers=1), shape=shape)
    for layer in model.output.layers:
        assert layer.shape.as_list() == [*shape, 24]
    assert model.output.pooled.shape.as_list()[1] == 24


def test_one_graph_takes_batches_of_every_size(model):
    for batch_size, num_tokens in ((1, 1), (2, 12), (5, 3)):
        ones = np.ones([batch_size, num_tokens], np.int32)
        layers, _, pooled = model.run(model.output, (ones, ones, 0 * ones))
        assert layers[-1].shape == (batch_size, num_tokens, 24)
        assert pooled.shape == (batch_size, 24)


def test_what_stands_at_padding_has_no_influence(model):
    noise = np.random.default_rng(0).integers(0, 30, _IDS.shape)
    other_ids = np.where(_MASK, _IDS, noise)
    other_segments = np.where(_MASK, _SEGMENTS, 1)
    assert (other_ids != _IDS).any()
    fetches = [model.output, model.gradients]
    expected = model.run(fetches)
    got = model.run(fetches, (other_ids, _MASK, other_segments))
    tf.nest.map_structure(np.testing.assert_array_equal, got, expected)


def test_more_padding_changes_nothing(model):
    wider = [np.pad(x, [(0, 0), (0, 5)]) for x in _BATCH]
    fetches = [model.output.sequence, model.output.pooled, model.gradients]
    sequence, pooled, gradients = model.run(fetches)
    wide_sequence, wide_pooled, wide_gradients = model.run(fetches, wider)
    np.testing.assert_allclose(wide_sequence[:, :7], sequence, atol=1e-5)
    np.testing.assert_array_equal(wide_sequence[:, 7:], 0.0)
    np.testing.assert_allclose(wide_pooled, pooled, atol=1e-5)
    words = "bert/embeddings/word_embeddings"
    wide, narrow = wide_gradients[words].indices, gradients[words].indices
    np.testing.assert_array_equal(wide, narrow)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    tf.nest.map_structure(close, wide_gradients, gradients)


def test_an_example_without_tokens_gives_finite_numbers_and_gradients(model):
    mask = _MASK.copy()
    mask[1] = 0
    batch = (_IDS, mask, _SEGMENTS)
    got = model.run([model.output, model.gradients], batch)
    assert all(np.isfinite(x).all() for x in tf.nest.flatten(got))


def test_gradient_of_the_word_table_is_indexed_slices_over_the_real_tokens(model):
    sparse = {k for k, g in model.gradients.items() if isinstance(g, tf.IndexedSlices)}
    assert sparse == {"bert/embeddings/word_embeddings"}
    gradient = model.run(model.gradients["bert/embeddings/word_embeddings"])
    np.testing.assert_array_equal(gradient.indices, _IDS[_MASK == 1])


def test_gradients_in_training_equal_the_derived_ones_without_dropout():
    config = dataclasses.replace(_WITHOUT_DROPOUT, num_hidden_layers=1)
    results = []
    for is_training, is_packed in ((False, True), (True, True), (True, False)):
        model = _Model(config, is_training=is_training, is_packed=is_packed)
        with model.graph.as_default():
            loss = tf.reduce_sum(model.output.pooled)
            encoder = [v for k, v in model.variables.items() if k in _PUBLISHED_NAMES]
            gradients = [*map(tf.convert_to_tensor, tf.gradients(loss, encoder))]
            layers = [tf.boolean_mask(x, _MASK == 1) for x in model.output.layers]
        results.append(model.run([layers, model.output.pooled, gradients]))
    for ours in results[1:]:
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        tf.nest.map_structure(close, ours, results[0])


def test_gradients_in_bfloat16_differ_by_less_than_1_percent():
    model, results = _Model(_WITHOUT_DROPOUT, is_training=True), []
    with model.graph.as_default():
        gradients = [*map(tf.convert_to_tensor, model.gradients.values())]
        together = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
        initialize = tf.compat.v1.global_variables_initializer()
    for precision in ("float32", "bfloat16"):
        config = mixed_precision_config(precision, is_forced=True)
        with tf.compat.v1.Session(graph=model.graph, config=config) as session:
            session.run(initialize)
            feed = dict(zip(model.inputs, _BATCH, strict=True))
            results.append(session.run(together, feed))
    exact, low = results
    error = np.linalg.norm(low - exact) / np.linalg.norm(exact)
    assert (error > 0) == is_onednn_on() and error < 1e-2


def test_dropout_is_on_only_in_training_and_the_graph_seed_repeats_it(model):
    training, again = (_Model(is_training=True) for _ in range(2))
    for net, is_training in ((training, True), (model, False)):
        first, second = (net.run([net.output, net.logits]) for _ in range(2))
        for a, b in zip(tf.nest.flatten(first), tf.nest.flatten(second), strict=True):
            assert np.array_equal(a, b) != is_training
        if is_training:
            for expected in (first, second):
                logits = again.run([again.output, again.logits])[1]
                np.testing.assert_array_equal(logits, expected[1])


def _trained(recomputed):
    """Returns all variables after 4 updates with dropout."""
    with tf.Graph().as_default():
        tf.compat.v1.set_random_seed(7)
        tf.compat.v1.train.get_or_create_global_step()
        inputs = [tf.compat.v1.placeholder(tf.int32, [None, None]) for _ in _BATCH]
        output = encode(_CONFIG, *inputs, is_training=True, recomputed=recomputed)
        logits = classifier_logits(output.pooled, 2, is_training=True)
        loss = tf.reduce_mean(tf.square(logits - 1.0))
        optimizer = tf.compat.v1.train.AdamOptimizer(0.01)
        train_op = make_accumulating_train_op(loss, optimizer, 2, clip_norm=1.0)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for _ in range(8):
                session.run(train_op, dict(zip(inputs, _BATCH, strict=True)))
            variables = tf.compat.v1.global_variables()
            return dict(
                zip([v.name for v in variables], session.run(variables), strict=True)
            )


def test_recomputed_layers_train_to_the_same_weights_bit_for_bit():
    plain, ours = _trained(None), _trained(recompute)
    assert plain.keys() == ours.keys()
    for name, value in plain.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_dropout_of_the_attention_alone_changes_the_first_layer_not_the_embeddings():
    config = dataclasses.replace(_CONFIG, hidden_dropout_prob=0.0)
    model = _Model(config, is_training=True)
    first, second = (model.run(model.output.layers) for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])
    assert (first[1] != second[1]).any()


def test_dropout_of_the_classifier_keeps_nine_tenths_of_pooled():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.set_random_seed(7)
        tf.compat.v1.train.get_or_create_global_step()
        logits = classifier_logits(tf.ones([4000, 10]), 1, is_training=True)
        weights = tf.compat.v1.trainable_variables()[0]
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(weights.assign(np.full([1, 10], 0.9)))
        num_kept = session.run(logits)  # each kept unit adds 0.9 / 0.9
    np.testing.assert_allclose(num_kept, np.round(num_kept), atol=1e-3)
    assert num_kept.mean() == pytest.approx(9.0, abs=0.1)


def test_pooled_takes_the_last_layer_for_first_tokens_only(model):
    scattered = model.output.sequence.op
    assert scattered.type == "ScatterNd"
    last_layer = scattered.inputs[1].op.name
    for output, is_needed in ((model.output.sequence, True), (model.logits, False)):
        graph, names = model.graph.as_graph_def(), [output.op.name]
        needed = tf.compat.v1.graph_util.extract_sub_graph(graph, names)
        assert (last_layer in {node.name for node in needed.node}) == is_needed


def test_gradients_inside_a_while_loop_equal_those_outside():
    model = _Model()
    with model.graph.as_default():
        ids, mask, segments = model.inputs

        def add_example(i, total):
            rows = [x[i : i + 1] for x in (ids, mask, segments)]
            with tf.compat.v1.variable_scope("", reuse=True):
                output = encode(_WITHOUT_DROPOUT, *rows, is_training=True)
                logits = classifier_logits(output.pooled, 2, is_training=False)
            loss = tf.reduce_sum(tf.square(logits - 1.0))
            return i + 1, total + tf.gradients(loss, model.variables[kernel])[0]

        kernel = "bert/encoder/layer_0/attention/self/query/kernel"
        start = tf.zeros_like(model.variables[kernel])
        _, total = tf.while_loop(lambda i, _: i < 3, add_example, [0, start])
    got, expected = model.run([total, model.gradients[kernel]])
    np.testing.assert_allclose(got / 3.0, expected, rtol=1e-4, atol=1e-5)


def test_more_tokens_than_positions_are_refused_when_the_graph_is_built():
    sentence = "at most `max_position_embeddings` = 12 tokens per example. Received: 13"
    with pytest.raises(ValueError, match=sentence):
        _Model(shape=(None, 13))


@pytest.mark.parametrize(
    ("shape", "token", "sentence"),
    [((1, 13), 1, "embeddings` = 12 tokens"), ((3, 7), 30, r"30 is not in \[0, 30\)")],
)
def test_too_many_and_unknown_tokens_fail_at_run_time(model, shape, token, sentence):
    ones = np.ones(shape, np.int32)
    with pytest.raises(tf.errors.InvalidArgumentError, match=sentence):
        model.run(model.output.pooled, (token * ones, ones, 0 * ones))
