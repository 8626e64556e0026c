"""accumulate(): Keras optimizers that update by a window's mean."""

import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.keras import AccumulationCallback, accumulate
from tests.helpers.models.keras_kinds import (
    KINDS,
    apply_each,
    dense_data,
    difference,
    fit,
    sparse_data,
)
from tests.helpers.models.replicas import two_replicas
from tests.helpers.processes import running


@pytest.mark.parametrize("kind", KINDS, ids="-".join, indirect=True)
@pytest.mark.parametrize(("name", "is_sparse"), [("SGD", False), ("Adam", True)])
def test_a_window_gives_the_weights_of_the_big_batch(kind, name, is_sparse):
    make = kind.sparse_model if is_sparse else kind.dense_model
    data = (sparse_data if is_sparse else dense_data)(96, "float64")
    options = {"momentum": 0.9} if name == "SGD" else {}
    big, ours = make("float64"), make("float64")
    fit(big, kind.optimizer(name, 0.05, **options), data, 32, 2)
    optimizer = accumulate(kind.optimizer(name, 0.05, **options), 4)
    fit(ours, optimizer, data, 8, 2)
    assert difference(big, ours) < 1e-12
    assert int(optimizer.iterations.numpy()) == 6


@pytest.mark.parametrize("policy", [None, "skip_window"])
def test_only_a_policy_takes_norms_of_gradients(kind, policy):
    variable = tf.Variable(tf.zeros([3]))
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2, on_nonfinite=policy)

    @tf.function
    def step():
        optimizer.apply_gradients([(tf.ones([3]), variable)])

    definition = step.get_concrete_function().graph.as_graph_def()
    nodes = [
        node for function in definition.library.function for node in function.node_def
    ]
    kinds = {node.op for node in [*definition.node, *nodes]}
    assert ("L2Loss" in kinds) == (policy is not None)


@pytest.mark.parametrize(
    ("is_sparse", "options"),
    [
        (True, {"run_eagerly": True}),
        (True, {"jit_compile": True}),
        (False, {"jit_compile": True}),
    ],
)
def test_eager_execution_and_xla_give_the_same_weights(kind, options, is_sparse):
    if is_sparse and "jit_compile" in options and not kind.is_3:
        optimizer = accumulate(kind.optimizer("Adam", 0.05), 2)
        with pytest.raises(ValueError, match="Sparse gradients must not be compiled"):
            fit(kind.sparse_model(), optimizer, sparse_data(8), 8, **options)
        return
    make = kind.sparse_model if is_sparse else kind.dense_model
    data = (sparse_data if is_sparse else dense_data)(32)
    big, ours = make(), make()
    fit(big, kind.optimizer("Adam", 0.05), data, 16, **options)
    optimizer = accumulate(kind.optimizer("Adam", 0.05), 2)
    options = options | {"callbacks": [AccumulationCallback()]}
    history = fit(ours, optimizer, data, 8, **options).history
    assert difference(big, ours) < 1e-6
    assert np.isfinite(history["window_loss"][0])


def test_off_the_boundary_nothing_moves_and_on_it_everything_does(kind):
    model = kind.dense_model()
    x, y = dense_data(8)
    optimizer = accumulate(kind.optimizer("Adam", 0.05), 3)
    fit(model, optimizer, (x, y), 8)
    inner = len(optimizer._inner_variables())

    def state():
        variables = [*model.trainable_variables, *optimizer._inner_variables()]
        return [v.numpy().copy() for v in variables]

    assert inner > 4
    before = state()
    for micro_step in range(2, 8):
        model.train_on_batch(x, y)
        after = state()
        is_same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
        weights = is_same[:4]
        assert not any(weights) if micro_step % 3 == 0 else all(is_same)
        assert int(optimizer.micro_steps.numpy()) == micro_step % 3
        assert int(optimizer.iterations.numpy()) == micro_step // 3
        before = after


def test_one_micro_step_per_update_is_the_plain_optimizer_to_the_bit(kind):
    plain, ours = kind.sparse_model(), kind.sparse_model()
    fit(plain, kind.optimizer("Adam", 0.05), sparse_data(64), 8)
    optimizer = accumulate(kind.optimizer("Adam", 0.05), 1)
    fit(ours, optimizer, sparse_data(64), 8)
    for expected, got in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert optimizer.micro_steps is None


def test_variables_have_the_names_that_they_have_without_accumulation(kind):
    plain, ours = (kind.optimizer("Adam", 0.05) for _ in range(2))
    for optimizer in (plain, accumulate(ours, 2)):
        fit(kind.dense_model(), optimizer, dense_data(8), 8)
    names = []
    for optimizer in (plain, ours):
        variables = optimizer.variables
        variables = variables() if callable(variables) else variables
        names.append([re.sub(r"_\d+", "", v.name) for v in variables])
    assert names[0] == names[1]


def test_variables_that_are_excluded_from_weight_decay_do_not_decay(kind):
    if kind.is_legacy:
        pytest.skip("optimizers.legacy have no weight decay")
    decayed, kept = (tf.Variable(1.0, name=name) for name in ("decayed", "kept"))
    optimizer = accumulate(kind.optimizer("SGD", 1.0, weight_decay=0.5), 2)
    optimizer.exclude_from_weight_decay(var_names=["kept"])
    for _ in range(2):
        optimizer.apply_gradients([(tf.constant(0.0), v) for v in (decayed, kept)])
    assert (decayed.numpy(), kept.numpy()) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("steps", "options", "gradients", "values"),
    [
        (  # a schedule of K counts updates
            lambda updates: tf.where(updates < 2, 1, 3),
            {},
            [1.0, 1.0, 3.0, 3.0, 3.0, 6.0, 0.0, 0.0],
            [-1, -2, -2, -2, -5, -5, -5, -7],
        ),
        (
            2,
            {"on_nonfinite": "skip_micro_batch"},
            [1.0, np.inf, 3.0, np.nan, 1.0, 1.0],
            [0, 0, -2, -2, -2, -3],
        ),
        (2, {"on_nonfinite": "skip_window"}, [1.0, np.inf, 3.0, 5.0], [0, 0, 0, -4]),
    ],
)
def test_the_variable_after_each_micro_step(kind, steps, options, gradients, values):
    optimizer = accumulate(kind.optimizer("SGD", 1.0), steps, **options)
    states = apply_each(optimizer, tf.Variable(0.0), gradients, in_graph=True)
    assert states == values
    assert int(optimizer.iterations.numpy()) == len(set(values) - {0})


@pytest.mark.parametrize("by_argument", [False, True])
def test_micro_batches_count_by_their_weight(kind, by_argument):
    variable, tokens = tf.Variable(0.0), tf.Variable(1.0)
    weight = None if by_argument else tokens.read_value
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2, weight=weight)
    options = {"weight": tokens} if by_argument else {}
    for gradient, count in [(1.0, 3.0), (5.0, 1.0)]:
        tokens.assign(count)
        optimizer.apply_gradients([(tf.constant(gradient), variable)], **options)
    assert variable.numpy() == -2.0


# The losses of a model are those of any optimizer.
_one_kind = pytest.mark.parametrize(
    "kind", [("keras", "new")], ids="-".join, indirect=True
)


def _mean_of_8(y, prediction):
    losses = tf.reduce_mean(tf.square(y - prediction), 1)
    return tf.nn.compute_average_loss(losses, global_batch_size=8)


def _mean_of_batch(y, prediction):
    losses = tf.reduce_mean(tf.square(y - prediction), 1)
    return tf.reduce_sum(losses) / tf.cast(tf.shape(y)[0], losses.dtype)


@pytest.mark.parametrize(
    ("examples", "steps", "weight", "options", "is_warned"),
    [
        (28, 2, None, {}, True),
        (20, 2, None, {}, False),
        (28, 2, lambda: tf.constant(1.0), {}, False),
        (24, 4, None, {}, False),
        (28, 2, None, {"run_eagerly": True}, False),  # no graph shows the batch
        (28, 2, None, {"loss": _mean_of_8}, False),  # counts by its examples
        (28, 2, None, {"loss": _mean_of_batch}, True),
    ],
)
@_one_kind
def test_a_short_batch_of_fit_is_warned_of(
    kind, examples, steps, weight, options, is_warned, caplog
):
    optimizer = accumulate(kind.optimizer("SGD", 0.1), steps, weight=weight)
    callbacks = [AccumulationCallback("apply_every_epoch")]
    data = dense_data(examples)
    fit(kind.dense_model(), optimizer, data, 8, 2, callbacks=callbacks, **options)
    sentence = "micro-batches of 4 to 8 examples counted alike, so the updates are not"
    assert caplog.text.count(sentence) == is_warned
    assert caplog.text.count("counted alike") == is_warned


def test_gradients_from_outside_of_the_step_are_taken(kind):
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2)
    variables = [tf.Variable(1.0) for _ in range(3)]
    optimizer.build(variables)
    gradients = [tf.Variable(1.0), tf.constant(2.0), np.float32(3.0)]

    @tf.function
    def step():
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for _ in range(2):
        step()
    assert [v.numpy() for v in variables] == [0.0, -1.0, -2.0]


@_one_kind
def test_a_short_batch_of_an_own_step_is_warned_of(kind, caplog):
    optimizer = accumulate(kind.optimizer("SGD", 0.1), 2)
    variable = tf.Variable(1.0)
    optimizer.build([variable])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * variable)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    for examples in (8, 4):
        step(tf.ones([examples]))
    optimizer.apply_partial_window()
    assert caplog.text.count("micro-batches of 4 to 8 examples counted alike") == 1


@pytest.mark.parametrize(
    ("options", "is_sparse", "run_eagerly", "is_warned"),
    [
        ({"clipnorm": 0.1}, True, False, True),
        ({"global_clipnorm": 0.1}, True, True, True),
        ({"clipvalue": 0.01}, True, False, True),
        ({"clipvalue": 0.01}, False, False, False),
        ({}, True, False, False),
    ],
)
def test_clipping_of_an_embedding_is_warned_of(
    kind, options, is_sparse, run_eagerly, is_warned, caplog
):
    keras, layers = kind.keras, kind.keras.layers
    model = keras.Sequential([keras.Input((3,), dtype="int64")])
    for layer in (layers.Embedding(20, 4), layers.Flatten(), layers.Dense(1)):
        model.add(layer)
    data = sparse_data(16) if is_sparse else dense_data(16)
    optimizer = accumulate(kind.optimizer("SGD", 0.1, **options), 2)
    model = model if is_sparse else kind.dense_model()
    fit(model, optimizer, data, 4, run_eagerly=run_eagerly)
    sentence = "applies to an embedding's gradient with each row of the window once"
    assert caplog.text.count(f"{[*options, ''][0]} {sentence}") == is_warned
    assert caplog.text.count(sentence) == is_warned


@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_an_embedding_of_one_slice_a_row_is_clipped_as_in_the_big_batch(
    kind, option, caplog
):
    def train(optimizer, size):
        table = tf.Variable(np.linspace(-1.0, 1.0, 6).reshape(3, 2))
        table_and_scale = [table, tf.Variable(np.ones(2))]
        getattr(optimizer, "build", list)(table_and_scale)

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float64)])
        def step(x):
            with tf.GradientTape() as tape:
                rows = tf.gather(table, tf.range(3)) * table_and_scale[1]
                loss = tf.reduce_mean((x - tf.reduce_sum(rows, 1)) ** 2)
            gradients = tape.gradient(loss, table_and_scale)
            optimizer.apply_gradients(zip(gradients, table_and_scale, strict=True))

        values = np.random.default_rng(0).normal(size=[24, 3])
        for begin in range(0, 24, size):
            step(values[begin : begin + size])
        return table.numpy()

    options = {option: 0.02}
    expected = train(kind.optimizer("SGD", 0.5, **options), 8)
    ours = train(accumulate(kind.optimizer("SGD", 0.5, **options), 4), 2)
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    assert "applies to an embedding" not in caplog.text


@pytest.mark.parametrize("is_masked", [True, False])
@_one_kind
def test_a_mean_over_tokens_in_keras_is_warned_of(kind, is_masked, caplog):
    def loss(y, prediction):
        mask = tf.cast(y > 0.5, prediction.dtype) if is_masked else tf.ones_like(y)
        total = tf.reduce_sum(mask * tf.square(y - prediction))
        return total / tf.reduce_sum(mask)

    model = kind.dense_model()
    model.compile(accumulate(kind.optimizer("SGD", 0.1), 2), loss, jit_compile=False)
    model.train_on_batch(*dense_data(8))
    sentence = "Split whole batches by estimator_accum.keras.microbatch"
    assert caplog.text.count(sentence) == is_masked


@pytest.mark.parametrize(
    ("loss", "is_joining"), [("of_shares", 1), ("of_each_example", 0)]
)
@_one_kind
def test_other_divisors_in_keras_are_told_apart(kind, loss, is_joining, caplog):
    def of_shares(y, prediction):
        return 1 - tf.reduce_sum(y * prediction) / tf.reduce_sum(y + prediction)

    def of_each_example(y, prediction):
        squares = tf.reduce_sum(y * tf.square(prediction), 1)
        return tf.reduce_mean(squares / tf.reduce_sum(y, 1))

    losses = {f.__name__: f for f in (of_shares, of_each_example)}
    model = kind.dense_model()
    optimizer = accumulate(kind.optimizer("SGD", 0.1), 2)
    model.compile(optimizer, losses[loss], jit_compile=False)
    model.train_on_batch(*dense_data(1))
    assert caplog.text.count("is not a mean over examples alone") == is_joining


@_one_kind
def test_a_masked_sequence_is_a_mean_over_tokens(kind, caplog):
    layers, optimizer = kind.keras.layers, kind.optimizer("SGD", 0.1)
    model = kind.keras.Sequential(
        [layers.Embedding(5, 4, mask_zero=True), layers.Dense(1)]
    )
    model.compile(accumulate(optimizer, 2), "mse", jit_compile=False)
    ids = tf.constant([[1, 2, 0], [3, 0, 0]])
    data = tf.data.Dataset.from_tensors((ids, tf.ones([2, 3, 1]))).repeat(2)
    model.fit(data, verbose=0)
    assert caplog.text.count("Split whole batches by estimator_accum.keras") == 1


def test_windows_may_have_micro_batches_of_different_sizes(kind, caplog):
    optimizer = accumulate(kind.optimizer("SGD", 0.1), 2)
    model, sentence = kind.dense_model(), "micro-batches of 4 to 8 examples counted"
    for examples, batch_size, is_warned in [(16, 8, 0), (8, 4, 0), (20, 8, 1)]:
        callbacks = [AccumulationCallback("apply")]
        fit(model, optimizer, dense_data(examples), batch_size, 2, callbacks=callbacks)
        assert caplog.text.count(sentence) == is_warned


def test_weight_may_be_zero_for_one_micro_batch(kind):
    variable = tf.Variable(0.0)
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2)
    apply_each(optimizer, variable, [1.0], weight=0.0)
    assert apply_each(optimizer, variable, [3.0], weight=2.0) == [-3.0]


def test_learning_rate_is_the_wrapped_optimizers(kind):
    optimizer = accumulate(kind.optimizer("SGD", 0.5, momentum=0.25), 2)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.125
    assert float(optimizer.inner_optimizer.learning_rate) == 0.125
    if not kind.is_3:  # Keras 2 has a second name
        optimizer.lr = 2 * optimizer.lr
        assert float(optimizer.inner_optimizer.learning_rate) == 0.25
    assert float(optimizer.momentum) == 0.25
    assert optimizer.inner_optimizer is not optimizer


def test_raising_names_the_variable_and_accumulates_nothing(kind):
    model = kind.dense_model()
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2, on_nonfinite="raise")
    model.compile(optimizer, "mse", jit_compile=False)
    x, y = dense_data(8)
    model.train_on_batch(x, y)
    pattern = r"Gradients must be finite\. Received: NaN or infinity.* in .*kernel"
    with pytest.raises(tf.errors.InvalidArgumentError, match=pattern):
        model.train_on_batch(x * np.inf, y)
    assert int(model.optimizer.micro_steps.numpy()) == 1


def test_raising_is_refused_where_xla_has_no_assertions(kind):
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2, on_nonfinite="raise")
    with pytest.raises(ValueError, match="must not be 'raise' under XLA"):
        fit(kind.dense_model(), optimizer, dense_data(8), 8, jit_compile=True)


@pytest.mark.parametrize("steps", [1, 2])
def test_keras_itself_warns_of_variables_without_a_gradient(kind, steps, caplog):
    used, unused = tf.Variable(1.0), tf.Variable(1.0, name="unused")
    optimizer = accumulate(kind.optimizer("SGD", 1.0), steps)
    with (
        caplog.at_level("WARNING", "absl"),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        optimizer.apply_gradients([(None, unused), (tf.constant(1.0), used)])
    messages = (
        [str(warning.message) for warning in seen] if kind.is_3 else caplog.messages
    )
    sentence = r"Gradients do not exist for variables \['unused(:0)?'\] when minimizing"
    assert all(re.match(sentence, message) for message in messages)
    assert messages
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply_gradients([(None, unused), (None, used)])


def test_a_multi_optimizer_takes_variables_without_a_gradient(kind):
    if not kind.is_3:
        pytest.skip("Keras 2 has no MultiOptimizer")
    optimizers = kind.keras.optimizers
    sgd = optimizers.SGD(1.0)
    both = optimizers.MultiOptimizer(lambda variable: sgd)
    used, unused = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = accumulate(both, 2)
    for _ in range(2):
        optimizer.apply_gradients([(None, unused), (tf.constant(1.0), used)])
    assert (used.numpy(), unused.numpy()) == (0.0, 1.0)


def test_no_pairs_at_all_are_no_micro_step(kind):
    if kind.is_3:
        pytest.skip("Keras 3 refuses them")
    optimizer, variable = accumulate(kind.optimizer("SGD", 1.0), 2), tf.Variable(0.0)
    for pairs in ([], [(tf.constant(1.0), variable)], []):
        optimizer.apply_gradients(pairs)
    assert int(optimizer.micro_steps.numpy()) == 1


def test_variables_without_a_gradient_are_left_alone(kind):
    used, unused = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2)
    for _ in range(2):
        optimizer.apply_gradients([(None, unused), (tf.constant(1.0), used)])
    assert (used.numpy(), unused.numpy()) == (0.0, 1.0)
    optimizer.apply_gradients([(tf.constant(1.0), used)])
    with pytest.raises(ValueError, match="gradients of the same variables. Received"):
        optimizer.apply_gradients([(tf.constant(1.0), unused)])


def test_between_two_windows_other_variables_may_be_trained(kind):
    """For example when layers are frozen between two fits."""
    first, second = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2)
    optimizer.build([first, second])

    @tf.function
    def train_both():
        optimizer.apply_gradients([(tf.constant(1.0), v) for v in (first, second)])

    @tf.function
    def train_second():
        optimizer.apply_gradients([(tf.constant(2.0), second)])

    for train in (train_both, train_both, train_second, train_second, train_both):
        train()
    assert (first.numpy(), second.numpy()) == (0.0, -2.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="of the same variables"):
        train_second()
    assert optimizer.apply_partial_window()
    assert (first.numpy(), second.numpy()) == (-1.0, -3.0)


@pytest.mark.parametrize("left_open", [False, True])
def test_a_dense_gradient_that_becomes_sparse_leaves_nothing_behind(kind, left_open):
    """For example without the penalty of an embedding, after a restore."""
    table, first, second = (tf.Variable(tf.zeros([3, 1])) for _ in range(3))
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2)
    optimizer.build([table, first, second])
    ones = tf.ones([3, 1])
    slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), tf.constant([3, 1]))
    for _ in range(1 if left_open else 2):
        optimizer.apply_gradients([(8 * ones, table), (ones, first)])
    before = table.numpy()
    if left_open:  # as restored: it is not known which variables the window has
        optimizer._window.trained = None
        optimizer._window.owner.assign(0)
        optimizer.apply_gradients([(slices, table), (ones, first)])
    else:
        for _ in range(2):
            optimizer.apply_gradients([(slices, table), (ones, second)])
    expected = [-4.5, -4.0, -4.0] if left_open else [-1.0, 0.0, 0.0]
    np.testing.assert_array_equal((table.numpy() - before)[:, 0], expected)


def test_a_dense_gradient_behind_slices_is_added_to_all_rows(kind):
    table = tf.Variable(tf.zeros([3, 1]))
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2)
    slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), tf.constant([3, 1]))
    for gradient in (slices, 8 * tf.ones([3, 1])):
        optimizer.apply_gradients([(gradient, table)])
    np.testing.assert_array_equal(table.numpy()[:, 0], [-4.5, -4.0, -4.0])


@pytest.mark.parametrize("in_graph", [False, True])
def test_variables_that_come_later_are_trained_or_refused_as_without_us(kind, in_graph):
    """For example those of layers that are no longer frozen, or of a second model."""

    def train(optimizer, steps):
        first, second = tf.Variable(1.0), tf.Variable([1.0, 2.0], name="later")
        for variables in [first], [first, second], [second]:
            pairs = [(v * 0 + 2.0, v) for v in variables]

            def step(pairs=pairs):
                optimizer.apply_gradients(pairs)

            step = tf.function(step) if in_graph else step
            for _ in range(2 * steps):
                step()
        return [first.numpy(), *second.numpy()]

    options = {"momentum": 0.5}
    plain = kind.optimizer("SGD", 0.1, **options)
    ours = accumulate(kind.optimizer("SGD", 0.1, **options), 3)
    if kind.is_legacy:
        np.testing.assert_allclose(train(ours, 3), train(plain, 1), rtol=1e-6)
        return
    with pytest.raises((ValueError, KeyError)):
        train(plain, 1)
    message = (
        r"that the optimizer was built with\. Received: unknown variables, .*later"
    )
    with pytest.raises(ValueError, match=message):
        train(ours, 3)


def test_what_is_wrong_is_refused_in_a_sentence(kind):
    sgd = kind.optimizer("SGD", 1.0)
    with pytest.raises(ValueError, match=r"integer >= 1\. Received: 0\. Use 1"):
        accumulate(sgd, 0)
    with pytest.raises(
        TypeError, match="must not accumulate already. Received: an optimizer"
    ):
        accumulate(accumulate(sgd, 2), 2)
    with pytest.raises(TypeError, match=r"Received: GradientDescentOptimizer.*Accumul"):
        accumulate(tf.compat.v1.train.GradientDescentOptimizer(1.0))
    with pytest.raises(TypeError, match="must be a Keras optimizer. Received: 'adam'"):
        accumulate("adam")
    with pytest.raises(TypeError, match=r"`weight` must be a callable.*Received: 3"):
        accumulate(sgd, weight=3)
    with pytest.raises(ValueError, match="`on_nonfinite` must be one of"):
        accumulate(sgd, on_nonfinite="hide")
    variable = tf.Variable(1.0)
    with pytest.raises(ValueError, match=r"`weight` must be given to accumulate\(\)"):
        apply_each(accumulate(sgd, 1), variable, [1.0], weight=2.0)
    with pytest.raises(ValueError, match="`weight` must be > 0; .*Received: -1.0 for"):
        apply_each(accumulate(sgd, 2), variable, [1.0], weight=-1.0)
    if kind.is_3:
        built_in = kind.optimizer("SGD", 1.0, gradient_accumulation_steps=2)
        with pytest.raises(TypeError, match="SGD with gradient_accumulation_steps=2"):
            accumulate(built_in, 2)


def test_an_epoch_without_validation_ends_its_window_too(kind):
    model, data = kind.dense_model("float64"), dense_data(40, "float64")
    callback = AccumulationCallback("apply_every_epoch")
    optimizer = accumulate(kind.optimizer("SGD", 0.05), 4)
    history = fit(model, optimizer, data, 8, 2, callbacks=[callback]).history
    assert history["updates"] == [2, 4]


@pytest.mark.parametrize(
    ("choice", "updates"),
    [("keep", [1, 2, 3]), ("apply", [1, 2, 4]), ("apply_every_epoch", [2, 4, 6])],
)
def test_callback_decides_what_becomes_of_a_partial_window(kind, choice, updates):
    model = kind.dense_model("float64")
    data = dense_data(40, "float64")
    optimizer = accumulate(kind.optimizer("Adam", 0.05), 4)
    callback = AccumulationCallback(choice)
    is_every_epoch = choice == "apply_every_epoch"
    kwargs = {"validation_data": data} if is_every_epoch else {}
    history = fit(model, optimizer, data, 8, 3, callbacks=[callback], **kwargs).history
    assert history["updates"] == updates
    left = 3 if choice == "keep" else 0
    assert int(optimizer.micro_steps.numpy()) == left
    if choice == "keep":
        return
    expected = kind.dense_model("float64")
    expected.compile(kind.optimizer("Adam", 0.05), "mse", jit_compile=False)
    x, y = (np.concatenate([part] * 3) for part in data)
    cuts = [32, 40, 72, 80, 112, 120] if is_every_epoch else [32, 64, 96, 120]
    for start, end in zip([0, *cuts], cuts):
        loss = expected.train_on_batch(x[start:end], y[start:end])
    assert difference(expected, model) < 1e-12
    if is_every_epoch:
        np.testing.assert_allclose(history["window_loss"][-1], loss, rtol=1e-6)
        validated = expected.evaluate(*data, batch_size=40, verbose=0)
        np.testing.assert_allclose(history["val_loss"][-1], validated, rtol=1e-6)


def test_a_fit_that_fails_leaves_the_next_one_its_choice(kind):
    model, data = kind.dense_model("float64"), dense_data(40, "float64")
    optimizer = accumulate(kind.optimizer("SGD", 0.05), 4)
    stop = kind.keras.callbacks.LambdaCallback(on_train_batch_end=_interrupt)
    with pytest.raises(KeyboardInterrupt):
        callbacks = [AccumulationCallback("apply"), stop]
        fit(model, optimizer, data, 8, callbacks=callbacks)
    model.fit(*data, batch_size=8, verbose=0, callbacks=[AccumulationCallback("keep")])
    assert int(optimizer.micro_steps.numpy()) == 2  # 1 + 5 micro-steps


def test_gradients_without_a_loss_have_no_loss_of_a_window(kind):
    class Own(kind.keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            pairs = zip(gradients, self.trainable_variables, strict=True)
            self.optimizer.apply_gradients(pairs)
            return {"loss": loss}

    optimizer, data = accumulate(kind.optimizer("SGD", 0.05), 2), dense_data(32)
    model = Own(kind.dense_model().layers)
    history = fit(model, optimizer, data, 8, callbacks=[AccumulationCallback()]).history
    assert history["updates"] == [2]
    assert "window_loss" not in history


def test_an_epoch_in_which_no_window_closed_has_no_loss_of_one(kind):
    optimizer = accumulate(kind.optimizer("SGD", 0.05), 2)
    callbacks = [AccumulationCallback()]
    model, data = kind.dense_model(), dense_data(8)
    history = fit(model, optimizer, data, 8, 3, callbacks=callbacks).history
    assert history["updates"] == [0, 1, 1]
    assert len(history["window_loss"]) == 2


def _interrupt(batch, logs):
    raise KeyboardInterrupt


def test_callback_refuses_other_optimizers_and_choices(kind):
    with pytest.raises(ValueError, match="`partial_window` must be one of 'keep'"):
        AccumulationCallback("drop")
    callbacks = [AccumulationCallback()]
    with pytest.raises(TypeError, match=r"an optimizer from accumulate\(\). Received"):
        sgd = kind.optimizer("SGD", 1.0)
        fit(kind.dense_model(), sgd, dense_data(8), 8, callbacks=callbacks)


def test_applying_a_partial_window_comes_before_the_averages(kind):
    if kind.is_legacy:
        pytest.skip("optimizers.legacy have no EMA")
    options = {"use_ema": True, "ema_momentum": 0.5}
    big, ours = kind.dense_model("float64"), kind.dense_model("float64")
    x, y = dense_data(24, "float64")
    big.compile(kind.optimizer("SGD", 0.1, **options), "mse", jit_compile=False)
    big.train_on_batch(x[:16], y[:16])
    big.train_on_batch(x[16:], y[16:])
    big.optimizer.finalize_variable_values(big.trainable_variables)
    optimizer = accumulate(kind.optimizer("SGD", 0.1, **options), 2)
    callbacks = [AccumulationCallback("apply")]
    fit(ours, optimizer, (x, y), 8, callbacks=callbacks)
    assert difference(big, ours) < 1e-12


def test_a_partial_window_leaves_the_best_weights_as_they_are(kind):
    """Keras 2 puts them into the model before it ends training."""
    options = {"restore_best_weights": True, "mode": "max", "patience": 1}
    best = kind.keras.callbacks.EarlyStopping("loss", **options)
    model, callbacks = kind.sparse_model(), [best, AccumulationCallback("apply")]
    optimizer = accumulate(kind.optimizer("SGD", 0.05), 4)
    fit(model, optimizer, sparse_data(24), 8, 9, callbacks=callbacks)
    pairs = zip(model.get_weights(), best.best_weights, strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)
    is_left = [
        np.any(v.numpy())
        for v in optimizer._window.saved
        if "micro_steps" in v.name or "accumulator_rows" in v.name
    ]
    assert not any(is_left)


def test_weights_of_an_epochs_end_are_copied_for_no_later_update(kind):
    optimizer, copies = accumulate(kind.optimizer("SGD", 0.05), 2), []

    class Look(kind.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            copies.append(len(optimizer._noted_weights))

        on_train_batch_begin = on_epoch_end

    model, callbacks = kind.dense_model(), [AccumulationCallback("apply"), Look()]
    fit(model, optimizer, dense_data(24), 8, 2, callbacks=callbacks)
    number = len(model.trainable_variables)
    assert copies == [0, 0, 0, number] + 4 * [0]


@pytest.mark.parametrize("choice", ["apply", "apply_every_epoch"])
def test_a_partial_window_is_applied_before_averages_are_swapped_in(kind, choice):
    if not hasattr(kind.keras.callbacks, "SwapEMAWeights"):
        pytest.skip("SwapEMAWeights is a callback of Keras 3")
    x, y = dense_data(40, "float64")
    is_every = choice == "apply_every_epoch"
    options = {"validation_data": (x, y)} if is_every else {}
    models = []
    for steps, batch in ((None, 16), (2, 8)):
        models.append(kind.dense_model("float64"))
        optimizer = kind.optimizer("SGD", 0.1, use_ema=True, ema_momentum=0.5)
        callbacks = [kind.keras.callbacks.SwapEMAWeights(not is_every)]
        if steps:
            optimizer = accumulate(optimizer, steps)
            callbacks.append(AccumulationCallback(choice))
        options["callbacks"] = callbacks
        fit(models[-1], optimizer, (x, y), batch, 1 + is_every, **options)
    assert difference(*models) < 1e-12


def test_averages_are_swapped_in_under_a_loss_scale_too(kind):
    if not hasattr(kind.keras.callbacks, "SwapEMAWeights"):
        pytest.skip("SwapEMAWeights is a callback of Keras 3")
    data, losses = dense_data(64, "float64"), []
    for steps, batch in ((None, 32), (1, 32), (4, 8)):
        model = kind.dense_model("float64")
        inner = kind.optimizer("Adam", 0.05, use_ema=True, ema_momentum=0.5)
        optimizer = kind.keras.mixed_precision.LossScaleOptimizer(inner)
        optimizer = accumulate(optimizer, steps) if steps else optimizer
        options = {"callbacks": [kind.keras.callbacks.SwapEMAWeights(True)]}
        options |= {"validation_data": data}
        history = fit(model, optimizer, data, batch, 2, **options).history
        losses.append([*history["val_loss"], *model.get_weights()[0].ravel()])
    np.testing.assert_array_equal(losses[1], losses[0])
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-9)


def test_a_keras_whose_own_sum_over_replicas_has_moved_is_refused(kind, monkeypatch):
    if not kind.is_3:
        pytest.skip("an argument of Keras 2 leaves the sum out")
    sgd = kind.optimizer("SGD", 1.0)
    (home,) = [c for c in type(sgd).__mro__ if "_all_reduce_sum_gradients" in vars(c)]
    monkeypatch.delattr(home, "_all_reduce_sum_gradients")
    accumulate(sgd, 2).build([tf.Variable(1.0)])  # right with one replica
    with tf.Graph().as_default(), two_replicas().scope():
        optimizer = accumulate(kind.optimizer("SGD", 1.0), 2)
        with pytest.raises(
            RuntimeError, match="Received: 2 replicas and a SGD of Keras"
        ):
            optimizer.build([tf.Variable(1.0)])


def test_importing_estimator_accum_alone_imports_no_keras_of_ours():
    code = (
        "import sys, estimator_accum; assert 'estimator_accum.keras' not in sys.modules"
    )
    assert running.run("-c", code).returncode == 0
