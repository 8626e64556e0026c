"""Model_fns that read the number of examples from a static shape.

n = the static number of examples, or 1 where it is None.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op, microbatch_model_fn
from tests.helpers.models.interception import build, cut, train
from tests.helpers.tables import rows

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
_X = np.linspace(-1, 1, 24).reshape(8, 3)
_BATCH = _X, np.ones([8, 1])
_SENTENCE = "from tf.shape in an evaluation.* Received: 8 examples of feat"

_NOT_STATIC = "from tf.shape where it is not static, .* Received: .*None"


def _by_plain_optimizer(loss):
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    return optimizer.minimize(loss, v1.train.get_global_step())


def _by_this_library(loss):
    return make_accumulating_train_op(loss, v1.train.GradientDescentOptimizer(0.1), 1)


def _model_fn(loss_fn, train_op=_by_plain_optimizer):
    """Returns a model_fn of `loss_fn(errors, features, n)`."""

    def model_fn(features, labels, mode, params=None):
        kernel = v1.get_variable("kernel", [3, 1], tf.float64, v1.ones_initializer())
        errors = tf.square(tf.matmul(features, kernel) - labels)
        loss = loss_fn(errors, features, features.shape[0] or 1)
        if not isinstance(loss, tuple):
            loss = loss, loss  # the reported one, and that of the optimizer
        return tf.estimator.EstimatorSpec(
            mode, loss=loss[0], train_op=train_op(loss[1])
        )

    return model_fn


def _gradient_penalty(errors, x):
    (gradient,) = tf.gradients(tf.reduce_mean(x**3 * errors), [x])
    return tf.reduce_mean(errors) + tf.reduce_sum(tf.square(gradient))


def _recurrent(x):
    cell = v1.nn.rnn_cell.BasicRNNCell(3)
    with v1.variable_scope("layer", initializer=v1.constant_initializer(0.1)):
        return v1.nn.dynamic_rnn(cell, x[..., None], dtype=tf.float64)[0]


def _of_n(values):
    return tf.reduce_sum(tf.cast(values, tf.float64))


_OTHER_NUMBERS = {
    "quotient": lambda e, x, n: tf.reduce_sum(e) / n,
    "factor": lambda e, x, n: tf.reduce_sum(e) * (1 / n),
    "root": lambda e, x, n: tf.reduce_sum(e) / np.sqrt(n),
    "cast": lambda e, x, n: tf.reduce_sum(e) / tf.cast(n, tf.float64),
    "ones": lambda e, x, n: tf.reduce_sum(e) / _of_n(tf.ones([n])),
    "filled": lambda e, x, n: tf.reduce_sum(e) / _of_n(tf.fill([n], 0.5)),
    "numbers": lambda e, x, n: tf.reduce_sum(e) * _of_n(tf.range(n)),
    "repeated": lambda e, x, n: (
        tf.reduce_mean(e) + tf.reduce_sum(tf.tile(tf.reduce_mean(e)[None], [n]))
    ),
    "elements": lambda e, x, n: tf.reduce_sum(e) / (x.shape.num_elements() or 1),
    "branch": lambda e, x, n: tf.reduce_mean(e) * (0.5 if x.shape[0] is None else 1),
    "a number that is there anyway": lambda e, x, n: tf.reduce_sum(8 * e) / n,
    "of the optimizer": lambda e, x, n: (tf.reduce_mean(e), tf.reduce_mean(e) / n),
    "in a function": lambda e, x, n: tf.function(lambda e: tf.reduce_sum(e) / n)(e),
    "sum": lambda e, x, n: (tf.reduce_sum if x.shape[0] else tf.reduce_mean)(e),
    "term": lambda e, x, n: (
        tf.reduce_mean(e) + (tf.reduce_mean(e * tf.reduce_sum(e)) if n > 1 else 0)
    ),
    "factor of one": lambda e, x, n: tf.reduce_mean(e) * (1.0 if n > 1 else 0.0),
    "largest": lambda e, x, n: tf.reduce_mean(
        tf.math.top_k(e[:, 0], max(1, n // 2))[0]
    ),
    "first": lambda e, x, n: tf.reduce_mean(e[: max(1, n // 2)]),
    "first slice": lambda e, x, n: tf.reduce_mean(
        tf.slice(e, [0, 0], [max(1, n // 2), 1])
    ),
    "sum in a function": lambda e, x, n: tf.function(
        tf.reduce_sum if n > 1 else tf.reduce_mean
    )(e),
    "of a function's integers": lambda e, x, n: tf.function(
        lambda e: tf.reduce_sum(e) / tf.cast(tf.constant(n), tf.float64)
    )(e),
    "of a branch's integers": lambda e, x, n: tf.cond(
        tf.reduce_sum(x) > -100,
        lambda: tf.reduce_sum(tf.sort(e[:, 0])[: max(1, n // 2)]),
        lambda: tf.reduce_sum(e),
    ),
    "of a loop's integers": lambda e, x, n: tf.while_loop(
        lambda i, s: i < 2,
        lambda i, s: (i + 1, s + tf.reduce_sum(e[:n])),
        (0, 0.0 * x[0, 0]),
    )[1],
    "comparison": lambda e, x, n: tf.where(tf.constant(n) > 4, e, 2 * e)[0, 0],
    "remainder": lambda e, x, n: (
        tf.reduce_mean(e) * tf.cast(tf.constant(n) % 3, e.dtype)
    ),
    "float attribute": lambda e, x, n: tf.reduce_mean(tf.nn.leaky_relu(e - 1, 1 / n)),
    "other attribute": lambda e, x, n: tf.reduce_mean(
        tf.cumsum(x, 1, reverse=n > 1) * e
    ),
    "order": lambda e, x, n: (
        tf.reduce_mean(e * e) - 2 * tf.reduce_mean(e)
        if n > 1
        else tf.reduce_mean(e) - 2 * tf.reduce_mean(e * e)
    ),
    "own gradient": lambda e, x, n: tf.reduce_mean(
        tf.custom_gradient(lambda y: (tf.identity(y), lambda d: d / n))(e)
    ),
    "rows": lambda e, x, n: tf.reduce_sum(e * (n + tf.zeros([n, 1], tf.float64))),
}
_RIGHT = {
    "mean": lambda e, x, n: tf.reduce_mean(e),
    "tf.shape": lambda e, x, n: tf.reduce_mean(
        e / tf.cast(tf.shape(x)[0], tf.float64) + e
    ),
    "tf.size": lambda e, x, n: tf.reduce_mean(e / tf.cast(tf.size(e), tf.float64) + e),
    "like others": lambda e, x, n: tf.reduce_mean(
        tf.reshape(e, [-1, 1]) * tf.zeros_like(e) + e * tf.ones_like(x)
    ),
    "tf.losses": lambda e, x, n: v1.losses.mean_squared_error(
        e, tf.ones_like(e), tf.ones_like(e) * 3
    ),
    "tensordot": lambda e, x, n: tf.reduce_mean(
        e * tf.tensordot(tf.stack([x, x], 1), tf.ones([3, 4], tf.float64), 1)[:, 0]
    ),
    "repeated": lambda e, x, n: tf.reduce_mean(
        tf.tile(e, [1, 3]) + tf.one_hot(tf.argmax(x, 1), 3, dtype=tf.float64)
    ),
    "recurrent": lambda e, x, n: tf.reduce_mean(_recurrent(x) * e[..., None]),
    "gradient of a mean": lambda e, x, n: _gradient_penalty(e, x),
    "NumPy's random numbers": lambda e, x, n: tf.reduce_mean(
        e * np.random.normal(size=[1])
    ),
}


_DAILY = {
    *("quotient", "factor", "root", "cast", "ones", "filled", "numbers", "branch"),
    *("a number that is there anyway", "of the optimizer", "sum", "term", "first"),
    *("factor of one", "sum in a function", "of a function's integers", "remainder"),
    *("float attribute", "order", "mean", "tf.shape", "NumPy's random numbers"),
}


@pytest.mark.parametrize("name", rows([*_OTHER_NUMBERS, *_RIGHT], _DAILY))
def test_a_model_fn_that_reads_a_static_size_trains_as_on_the_unsplit_batch(name):
    def weights(change):
        np.random.seed(3)
        model_fn = _model_fn((_OTHER_NUMBERS | _RIGHT)[name])
        return train(change(model_fn), _BATCH)[0]["kernel"]

    np.testing.assert_allclose(weights(cut), weights(lambda f: f), rtol=1e-12)


def _rate_of_n(features, labels, mode):
    optimizer = v1.train.GradientDescentOptimizer(0.1 / (features.shape[0] or 1))
    minimize = functools.partial(
        optimizer.minimize, global_step=v1.train.get_global_step()
    )
    return _model_fn(_RIGHT["mean"], minimize)(features, labels, mode)


def _start_of_n(features, labels, mode):
    start = v1.constant_initializer(1 / (features.shape[0] or 1))
    kernel = v1.get_variable("kernel", [3, 1], tf.float64, start)
    loss = tf.reduce_mean(tf.square(tf.matmul(features, kernel) - labels))
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=_by_plain_optimizer(loss)
    )


def _every_n(features, labels, mode):
    """Writes an average with every 64th example."""
    spec = _model_fn(lambda e, x, n: tf.reduce_mean(e))(features, labels, mode)
    kernel = v1.get_collection(v1.GraphKeys.TRAINABLE_VARIABLES)[0]
    start, step = v1.zeros_initializer(), v1.train.get_global_step()
    average = v1.get_variable("average", [3, 1], tf.float64, start, trainable=False)
    is_due = tf.equal(step % (64 // (features.shape[0] or 1)), 7)
    write = tf.cond(is_due, lambda: average.assign(kernel), average.read_value)
    return spec._replace(train_op=tf.group(spec.train_op, write))


def _default_of_n(features, labels, mode):
    def loss(errors, x, n):
        return v1.placeholder_with_default(np.float64(1 / n), []) * tf.reduce_sum(
            errors
        )

    return _model_fn(loss)(features, labels, mode)


def test_a_condition_of_a_write_may_depend_on_a_static_size():
    ours, theirs = (train(f, _BATCH, 9)[0] for f in (cut(_every_n), _every_n))
    assert theirs["average"].any() and ours["average"].any()


@pytest.mark.parametrize("model_fn", [_rate_of_n, _start_of_n, _default_of_n])
def test_rates_and_first_values_may_depend_on_a_static_size(model_fn):
    ours, theirs = (train(f, _BATCH)[0]["kernel"] for f in (cut(model_fn), model_fn))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("name", ["quotient", "of the optimizer", "in a function"])
def test_a_model_fn_that_trains_by_this_library_is_told_of_tf_shape(name):
    with pytest.raises(ValueError, match=_SENTENCE):
        build(_model_fn(_OTHER_NUMBERS[name], _by_this_library), _BATCH)


@pytest.mark.parametrize("name", ["tf.losses", "gradient of a mean"])
def test_any_other_loss_is_trained_by_this_library(name):
    build(_model_fn(_RIGHT[name], _by_this_library), _BATCH)


def _looked_up(rows):
    keys, values = tf.constant([0, 1, 2], tf.int64), tf.constant([1.0, 2.0, 4.0])
    start = tf.lookup.KeyValueTensorInitializer(keys, values)
    table = tf.lookup.StaticHashTable(start, 0.0)
    return table.lookup(tf.argmax(rows, 1))[:, None]


def _decoded(rows):
    def longer(i, words, state):
        number = state.shape[0] or tf.shape(state)[0]
        state = tf.reshape(tf.tanh(state), [number, 3])
        return i + 1, tf.concat([words, state[:, :1]], 1), state

    sizes = tf.TensorShape([]), tf.TensorShape([None, None]), rows.shape
    start = 0, rows[:, :1], rows
    return tf.while_loop(lambda i, *_: i < 3, longer, start, sizes)[1][:, -1:]


def _of_python(rows):
    """Calls functions whose code and values are those of each call."""
    scale = {"by": np.ones([1])}
    raised = functools.partial(lambda x, power: x.mean(1) ** power, power=2)

    def squares(x):
        return raised(x) * scale["by"]

    functions = squares, raised, _Scale(2).divide
    options = {"stateful": False}
    calls = [*((function, {}) for function in functions), (squares, options)]
    parts = [
        tf.numpy_function(function, [rows], tf.float64, **others)[:, None]
        for function, others in calls
    ]
    return tf.add_n([tf.ensure_shape(part, [None, 1]) for part in parts])


def _unknown_words(rows):
    words = tf.zeros_like(tf.strings.as_string(rows))
    return tf.strings.length(words)


def _noise(rows):
    return rows + tf.random.normal(tf.shape(rows), dtype=rows.dtype)


@pytest.mark.parametrize(
    "layer",
    [
        _looked_up,
        _of_python,
        _unknown_words,
        lambda x: tf.concat([v1.layers.dense(x, 2), x], 1),
        lambda x: _recurrent(x)[:, -1],
        lambda x: tf.map_fn(tf.identity, x),
        lambda x: tf.ensure_shape(x, x.shape),
        lambda x: tf.stop_gradient(_decoded(x)),
        lambda x: _noise(v1.layers.dense(_noise(x), 3)),
    ],
    ids=[
        "table",
        "Python",
        "words",
        "joined",
        "RNN",
        "map",
        "claim",
        "decoder",
        "noise",
    ],
)
def test_a_layer_behind_a_static_size_computes_the_same_for_none(layer):
    """As written, all differ in their operations and attributes."""

    def loss(errors, x, n):
        rows = x.shape[0] or tf.shape(x)[0]
        values = tf.cast(layer(tf.reshape(x, [rows, 3])), tf.float64)
        return tf.reduce_mean(errors) + tf.reduce_mean(values)

    build(_model_fn(loss, _by_this_library), _BATCH)


@tf.function(autograph=False)
def _twice_in_function(x):
    return 2 * x


def _tf1_branch(x):
    with_v2 = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        return tf.cond(tf.reduce_sum(x) > -99, lambda: 2 * x, lambda: x)
    finally:
        (v1.enable_control_flow_v2 if with_v2 else v1.disable_control_flow_v2)()


_FLOWS = {
    "function": _twice_in_function,
    "branch": lambda x: tf.cond(tf.reduce_sum(x) > -99, lambda: 2 * x, lambda: x),
    "branch of TensorFlow 1": _tf1_branch,
    "function of a loop": tf.function(lambda x: tf.map_fn(tf.identity, x)),
    "loop": lambda x: tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, 2 * y), (0, x)
    )[1],
    "loop of maps": lambda x: tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, tf.map_fn(tf.tanh, y)), (0, x)
    )[1],
    "map": lambda x: tf.map_fn(tf.identity, x),
    "scan": lambda x: tf.scan(lambda a, row: a + row, tf.transpose(x)),
    "RNN": lambda x: _recurrent(x)[..., 0],
}


def _of_size(flow):
    def loss(errors, x, n):
        sizes = [size or 1 for size in flow(x).shape.as_list()]
        return tf.reduce_sum(errors) / np.prod(sizes)

    return _model_fn(loss)


@pytest.mark.parametrize(
    "name", [name for name in _FLOWS if name != "branch of TensorFlow 1"]
)
def test_a_size_behind_a_flow_is_that_of_the_unsplit_batch(name):
    model_fn = _of_size(_FLOWS[name])
    ours, theirs = (train(f, _BATCH)[0]["kernel"] for f in (cut(model_fn), model_fn))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("name", _FLOWS)
def test_a_size_behind_a_branch_of_tensorflow_1_is_refused_unless_none_is_the_same(
    name,
):
    flow = _FLOWS[name]

    def flat(errors, x, n):
        values = flow(x)
        pairs = zip(values.shape.as_list(), tf.unstack(tf.shape(values)), strict=True)
        a, b = (size or unknown for size, unknown in pairs)
        return tf.reduce_mean(errors) + tf.reduce_mean(tf.reshape(values, [a * b]))

    build(_model_fn(flat, _by_this_library), _BATCH)
    if name == "branch of TensorFlow 1":
        with pytest.raises(ValueError, match="control flow of TensorFlow 1 computes"):
            build(_of_size(flow), _BATCH)


def test_a_shape_may_be_set_behind_a_loop():
    def repaired(errors, x, n):
        rows = tf.map_fn(lambda row: 2 * row, x)
        rows.set_shape([x.shape[0], 3])
        return tf.reduce_mean(errors) + tf.reduce_mean(rows)

    build(_model_fn(repaired), _BATCH)


def test_a_sparse_part_has_no_number_of_examples():
    """Its shape, of two numbers, is none of them."""

    def model_fn(features, labels, mode):
        rows = tf.map_fn(lambda row: 2 * row, features["dense"])
        number = rows.shape.as_list()[0]
        rows = tf.reshape(rows, [tf.shape(rows)[0] if number is None else number, 3])
        kernel = v1.get_variable("kernel", [3, 1], tf.float64, v1.ones_initializer())
        sums = tf.sparse.reduce_sum(features["sparse"])
        loss = tf.reduce_mean((rows @ kernel - labels) ** 2) + 0 * sums
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=_by_plain_optimizer(loss)
        )

    def batches():
        features = {"sparse": tf.sparse.from_dense(_BATCH[0]), "dense": _BATCH[0]}
        return tf.data.Dataset.from_tensor_slices((features, _BATCH[1])).batch(8)

    build(model_fn, batches)


def _batches_without_static_size():
    return tf.data.Dataset.from_tensor_slices(_BATCH).batch(8)


@pytest.fixture
def dimensions():
    """Makes sizes TensorFlow 1's `Dimension`s, as under --v1."""
    v1.disable_v2_tensorshape()
    yield
    v1.enable_v2_tensorshape()


@pytest.mark.usefixtures("dimensions")
def test_a_model_fn_reads_dimensions_in_code_of_tensorflow_1():
    read = []

    def model_fn(features, labels, mode):
        rows, width = features.shape[0].value, features.shape[-1].value
        read.append((rows, width))
        x = tf.reshape(features, [rows or tf.shape(features)[0], width])
        kernel = v1.get_variable("kernel", [width, 1], tf.float64)
        loss = tf.reduce_mean(tf.square(tf.matmul(x, kernel) - labels))
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=_by_plain_optimizer(loss)
        )

    build(model_fn, _BATCH)
    assert read[-1] == (None, 3) and (8, 3) in read


def test_a_batch_of_unknown_size_has_no_static_size_in_plain_training_either():
    model_fn = _model_fn(lambda e, x, n: tf.reduce_mean(e) / n)
    build(model_fn, _batches_without_static_size)


def test_an_error_for_want_of_a_static_size_tells_of_tf_shape():
    model_fn = _model_fn(lambda e, x, n: tf.reduce_sum(e) / x.shape[0])
    with pytest.raises(ValueError, match=_NOT_STATIC):
        build(model_fn, _batches_without_static_size)
    with pytest.raises(ValueError, match=_NOT_STATIC):  # in TensorFlow's own code
        build(_with_state(lambda x: tf.concat(tf.unstack(x[:, None]), 0)), _BATCH)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda e, x, n: tf.reduce_mean(x @ tf.ones([2, 1], x.dtype)), "must be equal"),
        (lambda e, x, n: tf.reduce_mean(tf.clip_by_norm(None, 1.0)), "None values not"),
    ],
)
def test_an_error_that_the_unsplit_batch_has_too_is_the_users_own(loss_fn, message):
    with pytest.raises(ValueError, match=message) as caught:
        build(_model_fn(loss_fn), _BATCH)
    assert "tf.shape" not in str(caught.value)


@pytest.mark.parametrize("power", [0, 1])
def test_a_model_fn_reads_none_if_it_computes_with_the_same_numbers(power):
    sizes = []

    def loss(errors, x, n):
        sizes.append(x.shape[0])
        rows = x.shape[0] or tf.shape(x)[0]  # as google-research/bert
        ones = tf.ones([rows, 1], tf.float64)
        steps = tf.reshape(tf.function(tf.tanh)(x) * ones, [rows, 3, 1])
        steps = v1.layers.dense(steps, 1) + tf.zeros_like(steps)
        ones = tf.ones([1, 1], tf.float64)
        steps = tf.function(lambda t: tf.reshape(tf.tensordot(t, ones, 1), [rows, 3]))(
            steps
        )
        rows = steps.shape[0] or tf.shape(steps)[0]  # of a function
        errors *= tf.reshape(steps, [rows, 3])
        weights = tf.reshape(errors[:, 0], [rows])
        errors += v1.losses.compute_weighted_loss(weights**2, weights)
        noise = tf.nn.dropout(tf.zeros([rows, 2], tf.float64), 0.5)
        errors += tf.reduce_sum(noise)
        return tf.reduce_mean(errors) / n**power

    build(_model_fn(loss), _BATCH)
    assert sizes[-1] == (8 if power else None)


def _claimed(rows):
    values = tf.numpy_function(lambda x: x**2, [rows], tf.float64)
    values.set_shape([rows.shape[0], 3])
    return tf.reshape(values, [-1])


def _normalized(rows):
    """Has gradients that TensorFlow tiles if the shape is static, and else broadcasts."""
    return tf.nn.l2_normalize(v1.layers.dense(rows, 3), 1)


def _shares(rows):
    """Has gradients whose axes of size 1 are added up in one graph alone."""
    steps = tf.exp(v1.layers.dense(rows, 3))[:, :, None]
    return steps / tf.reduce_sum(steps, 1, keepdims=True)


@pytest.mark.parametrize("layer", [_claimed, _normalized, _shares])
def test_shapes_that_one_graph_knows_make_no_other_expressions(layer):
    sizes = []

    def loss(errors, x, n):
        sizes.append(x.shape[0])
        rows = layer(tf.reshape(x, [x.shape[0] or tf.shape(x)[0], 3]))
        return tf.reduce_mean(errors) + tf.reduce_mean(rows)

    build(_model_fn(loss), _BATCH)
    assert sizes == [None, 8, None]


class _Scale:
    def __init__(self, n):
        self.n = n

    def divide(self, x):
        return x.sum(1) / self.n


def _in_a_method(x, n):
    return tf.numpy_function(_Scale(n).divide, [x], tf.float64)


class _Sum:
    def run(self, x):
        return self.of(x)

    def of(self, x):
        return x.sum(1)


class _Mean(_Sum):
    def of(self, x):
        return x.mean(1)


def _by_a_class(x, n):
    return tf.numpy_function((_Sum if n > 1 else _Mean)().run, [x], tf.float64)


def _by_an_empty_cell(x, n):
    power, root = (2.0, None) if n > 1 else (None, 2.0)
    return tf.numpy_function(
        lambda x: x.sum(1) ** power if power else x.sum(1) / root, [x], tf.float64
    )


def _by_joined_words(x, n):
    words = tf.strings.as_string(x[:, 0])
    return tf.strings.to_number(words + "9" if n > 1 else "9" + words, tf.float64)


def _in_a_list(x, n):
    array = tf.TensorArray(tf.float64, n, element_shape=[])
    return array.write(0, tf.reduce_sum(x)).stack()


def _in_a_table(x, n):
    keys, values = tf.constant([0, 1, 2], tf.int64), tf.constant([1.0, 2.0, 4.0]) / n
    start = tf.lookup.KeyValueTensorInitializer(keys, values)
    return tf.lookup.StaticHashTable(start, 0.0).lookup(tf.argmax(x, 1))


def _in_a_summary(x, n):
    v1.summary.scalar("sum", tf.reduce_sum(x) / n)
    return tf.reduce_sum(x, 1)


@pytest.mark.parametrize("mode", ["eval", "infer"])
@pytest.mark.parametrize(
    "scores_of",
    [
        lambda x, n: tf.reduce_sum(x, 1) / n,
        _in_a_method,
        _by_a_class,
        _by_an_empty_cell,
        _by_joined_words,
        _in_a_list,
        _in_a_table,
        _in_a_summary,
    ],
    ids=["sum", "method", "class", "cell", "words", "list", "table", "summary"],
)
def test_evaluations_and_predictions_must_not_read_it(scores_of, mode):
    def model_fn(features, labels, mode):
        scores = scores_of(features, features.shape[0] or 1)
        metrics = {"score": v1.metrics.mean(scores)}
        if mode == "infer":
            return tf.estimator.EstimatorSpec(mode, predictions=scores)
        loss = tf.reduce_mean(labels)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    with tf.Graph().as_default(), pytest.raises(ValueError, match=_SENTENCE):
        batch = map(tf.constant, _BATCH)
        microbatch_model_fn(model_fn)(*batch, mode=mode)


def test_the_value_of_a_metric_must_not_read_it():
    def model_fn(features, labels, mode):
        value, update = v1.metrics.mean(features)
        metrics = {"score": (value / (features.shape[0] or 1), update)}
        loss = tf.reduce_mean(labels)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    with tf.Graph().as_default(), pytest.raises(ValueError, match=_SENTENCE):
        microbatch_model_fn(model_fn)(*map(tf.constant, _BATCH), mode="eval")


def test_other_parts_of_a_batch_have_static_sizes_too():
    def model_fn(features, labels, mode):
        rows = [features[name].shape[0] or 1 for name in ("words", "ids")]
        weight = v1.get_variable("w", [], tf.float64, v1.ones_initializer())
        loss = weight**2 * tf.reduce_mean(labels) / sum(rows)
        train_op = _by_plain_optimizer(loss)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    words, ids = tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense(np.eye(2))

    def input_fn():
        features = {"words": words, "ids": ids}
        features = tf.nest.map_structure(tf.constant, features, expand_composites=True)
        return tf.data.Dataset.from_tensors((features, tf.ones([2], tf.float64)))

    ours, theirs = (train(f, input_fn)[0]["w"] for f in (cut(model_fn), model_fn))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_a_seed_of_keras_is_that_of_each_call():
    tf.keras.utils.set_random_seed(1)
    sizes = []

    def loss(errors, x, n):
        sizes.append(x.shape[0])
        layer = tf.keras.layers.Dense(1, dtype="float64")
        return tf.reduce_mean(errors) + tf.reduce_mean(layer(x))

    build(_model_fn(loss), _BATCH)
    assert sizes[-1] is None


def test_a_second_call_leaves_the_parameters_and_random_numbers_alone():
    def model_fn(features, labels, mode, params):
        assert params.pop("rate") == 0.1
        return _model_fn(_RIGHT["NumPy's random numbers"])(features, labels, mode)

    def weights(model_fn):
        np.random.seed(3)
        return train(
            lambda *batch, mode: model_fn(*batch, mode=mode, params={"rate": 0.1}),
            _BATCH,
        )[0]

    ours, plain = weights(cut(model_fn)), weights(model_fn)
    np.testing.assert_allclose(ours["kernel"], plain["kernel"], 1e-6)


def test_a_model_fn_that_cannot_be_called_again_reads_the_size_of_its_batch():
    scales = []

    def input_fn():
        scales.append(tf.constant(2.0, tf.float64))  # of the graph that trains
        return tf.data.Dataset.from_tensors(_BATCH)

    model_fn = _model_fn(lambda e, x, n: scales[-1] * tf.reduce_sum(e) / n)
    ours, theirs = (train(f, input_fn)[0]["kernel"] for f in (cut(model_fn), model_fn))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def _read_rows(features):
    return tf.zeros([features.shape[0], 4], tf.float64)


def _fill_a_shape(features):
    return tf.zeros(features.shape, tf.float64)[:, :1] + tf.zeros([1, 4], tf.float64)


def _tile(features):
    return tf.tile(tf.zeros([1, 4], tf.float64), [features.shape[0], 1])


def _read_tensor(features):
    return tf.zeros([tf.shape(features)[0], 4], tf.float64)


def _with_state(start):
    """Returns a model_fn whose first state is `start(features)`."""
    return _model_fn(lambda e, x, n: tf.reduce_mean(tf.square(e + start(x))))


@pytest.mark.parametrize("start", [_read_rows, _fill_a_shape, _tile, _read_tensor])
def test_a_state_may_have_the_static_batch_size(start):
    ours, _ = train(cut(_with_state(start)), _BATCH, 3)
    theirs, _ = train(_with_state(start), _BATCH, 3)
    np.testing.assert_allclose(ours["kernel"], theirs["kernel"], 1e-12)


def test_another_error_of_a_model_fn_stays_as_it_is():
    def fail(features):
        raise ValueError("no hidden layers")

    with pytest.raises(ValueError, match="^no hidden layers$"):
        build(_with_state(fail), _BATCH)
