"""Whole model_fns of scripts without this library: what they do with their gradients.

B = examples.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tests.helpers.models.examples import CLASSES, WORDS
from tests.helpers.models.losses import (
    each,
    entropies,
    number,
    outputs,
    squared,
    variable,
)
from tests.helpers.oracles.exactness import SINGLE

v1 = tf.compat.v1
_SPEC = tf.estimator.EstimatorSpec


class Script(NamedTuple):
    """A model_fn, and what its test needs.

    Attributes:
        model_fn: Function of features, labels and mode.
        features: Names of the features that it reads.
        tolerance: Largest difference; None is that of the variables' types.
    """

    model_fn: Callable
    features: tuple[str, ...] = ("x", "mask")
    tolerance: float | None = None


def _masked(features, y, z=None):
    """A loss that is no mean of micro-batches' losses."""
    z = outputs(features["x"]) if z is None else z
    mask = features["mask"]
    return tf.reduce_sum(each(y, z) * mask) / tf.maximum(tf.reduce_sum(mask), 1)


def _step():
    return v1.train.get_or_create_global_step()


def _descent(rate=0.02):
    return v1.train.GradientDescentOptimizer(rate)


def _adam(rate=0.02, **options):
    # Large, so that no rounding of a small gradient becomes an update.
    return v1.train.AdamOptimizer(rate, epsilon=1e-3, **options)


def _optimizer(make: Callable, **options):
    def model_fn(features, labels, mode):
        loss = _masked(features, labels)
        return _SPEC(
            mode, loss=loss, train_op=make().minimize(loss, _step(), **options)
        )

    return model_fn


def _clipped(features, labels, mode):
    """google-research/bert: tf.gradients, clip_by_global_norm, its own step."""
    loss = _masked(features, labels)
    step, variables = _step(), v1.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.1)
    train_op = _adam().apply_gradients(zip(gradients, variables, strict=True))
    return _SPEC(mode, loss=loss, train_op=tf.group(train_op, step.assign_add(1)))


def _each_clipped(features, labels, mode):
    loss, optimizer = _masked(features, labels), _descent()
    pairs = [
        (tf.clip_by_norm(tf.clip_by_value(gradient, -0.3, 0.3), 0.2), variable)
        for gradient, variable in optimizer.compute_gradients(loss)
    ]
    return _SPEC(mode, loss=loss, train_op=optimizer.apply_gradients(pairs, _step()))


def _sparse_and_clipped(features, labels, mode):
    """Rows of an embedding, looked up repeatedly; momentum moves the touched ones."""
    words = tf.gather(variable("table", WORDS, 3), features["ids"])
    loss = _masked(features, labels, tf.reduce_sum(words, 1) / 3)
    optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
    gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
    gradients, _ = tf.clip_by_global_norm(gradients, 0.2)
    pairs = zip(gradients, variables, strict=True)
    return _SPEC(mode, loss=loss, train_op=optimizer.apply_gradients(pairs, _step()))


def _keras_tape(features, labels, mode):
    """A Keras model, its penalties, a tape and an optimizer of Keras."""
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Dense(5, "tanh", kernel_regularizer="l2", dtype="float64"),
            layers.Dense(3, activity_regularizer="l1", dtype="float64"),
        ]
    )
    with tf.GradientTape() as tape:
        loss = _masked(features, labels, model(features["x"], training=True))
        loss += tf.add_n(model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer = tf.keras.optimizers.legacy.SGD(0.05, momentum=0.9)
    optimizer.iterations = _step()
    pairs = zip(gradients, model.trainable_variables, strict=True)
    return _SPEC(mode, loss=loss, train_op=optimizer.apply_gradients(pairs))


def _two_tapes(features, labels, mode):
    """One persistent tape, two losses, their gradients added with weights."""
    with tf.GradientTape(persistent=True) as tape:
        z = outputs(features["x"])
        loss, size = _masked(features, labels, z), tf.norm(z)
    variables = v1.trainable_variables()
    first, second = (tape.gradient(value, variables) for value in (loss, size))
    gradients = [a + 0.1 * b for a, b in zip(first, second, strict=True)]
    pairs = zip(gradients, variables, strict=True)
    return _SPEC(mode, loss=loss, train_op=_descent().apply_gradients(pairs, _step()))


def _several_losses(features, labels, mode):
    """tf.gradients of a list: a sum, a penalty, a loss per example."""
    z, variables = outputs(features["x"]), v1.trainable_variables()
    penalty = 10 * tf.nn.l2_loss(variables[0])
    losses = [tf.reduce_sum(each(labels, z)) / 10, penalty, tf.abs(z[:, 0])]
    pairs = zip(tf.gradients(losses, variables), variables, strict=True)
    train_op = _descent().apply_gradients(pairs, _step())
    return _SPEC(mode, loss=losses[0] + penalty, train_op=train_op)


def _own_derivative(features, labels, mode):
    """The derivative with respect to outputs by hand: grad_ys, divided by the size."""
    z, variables = outputs(features["x"]), v1.trainable_variables()
    derivative = 2 * (z - labels) / tf.cast(tf.size(z), tf.float64)
    gradients = tf.gradients(z, variables, grad_ys=[derivative])
    pairs = zip(gradients, variables, strict=True)
    loss = tf.reduce_mean(squared(labels, z))
    return _SPEC(mode, loss=loss, train_op=_descent().apply_gradients(pairs, _step()))


def _in_two_stages(features, labels, mode):
    """Back-propagation in two calls: to the outputs, and on to the weights."""
    z, variables = outputs(features["x"]), v1.trainable_variables()
    loss = _masked(features, labels, z)
    (slope,) = tf.gradients(loss, z)
    slope *= tf.minimum(tf.constant(1.0, tf.float64), 0.2 / tf.norm(slope))
    pairs = zip(tf.gradients(z, variables, slope), variables, strict=True)
    return _SPEC(
        mode, loss=loss, train_op=_descent(0.1).apply_gradients(pairs, _step())
    )


def _two_rates(features, labels, mode):
    """Two optimizers for two groups of variables, gradients computed once."""
    loss, variables = _masked(features, labels), v1.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.5)
    pairs = list(zip(gradients, variables, strict=True))
    first = _descent(0.05).apply_gradients(pairs[:2])
    second = _adam().apply_gradients(pairs[2:], _step())
    return _SPEC(mode, loss=loss, train_op=tf.group(first, second))


def _frozen(features, labels, mode):
    """Only the last layer is trained; the first one gets a loss of its own."""
    hidden = tf.tanh(tf.matmul(features["x"], variable("first", 4, 5)))
    z = tf.matmul(tf.stop_gradient(hidden), variable("last", 5, 3))
    loss, second = _masked(features, labels, z), tf.math.reduce_std(hidden)
    first, last = v1.trainable_variables()
    train_op = _descent().minimize(loss, _step(), var_list=[last])
    other = _descent(-0.1).minimize(second, var_list=[first])
    return _SPEC(mode, loss=loss, train_op=tf.group(train_op, other))


def _averaged_weights(features, labels, mode):
    loss = _masked(features, labels)
    train_op = _descent().minimize(loss, _step())
    average = tf.train.ExponentialMovingAverage(0.9)
    with tf.control_dependencies([train_op]):
        train_op = average.apply(v1.trainable_variables())
    return _SPEC(mode, loss=loss, train_op=train_op)


def _rate_of_the_loss(features, labels, mode):
    """Polyak's step: the loss over the gradient's squared norm."""
    loss, variables = _masked(features, labels), v1.trainable_variables()
    gradients = tf.gradients(loss, variables)
    rate = 0.1 * loss / tf.linalg.global_norm(gradients) ** 2
    pairs = zip(gradients, variables, strict=True)
    return _SPEC(
        mode, loss=loss, train_op=_descent(rate).apply_gradients(pairs, _step())
    )


def _baseline(features, labels, mode):
    """A policy gradient with a moving average of rewards as its baseline."""
    z, reward = outputs(features["x"]), features["w"]
    start = tf.zeros([], tf.float64)
    baseline = v1.get_variable("baseline", initializer=start, trainable=False)
    advantage = tf.stop_gradient(reward - baseline.read_value())
    loss = tf.reduce_mean(advantage * entropies(features["cls"], z))
    with tf.control_dependencies([loss]):
        update = baseline.assign(0.9 * baseline + 0.1 * tf.reduce_mean(reward))
    train_op = _descent().minimize(loss, _step())
    return _SPEC(mode, loss=loss, train_op=tf.group(train_op, update))


def _metrics(features, labels, mode):
    """Metrics of the examples, updated in the train op."""
    z, cls = outputs(features["x"]), features["cls"]
    loss = tf.reduce_mean(entropies(cls, z))
    predicted = tf.argmax(z, 1)
    updates = [
        v1.metrics.accuracy(cls, predicted)[1],
        v1.metrics.mean(tf.cast(each(labels, z), tf.float32))[1],
        v1.metrics.true_positives(cls > 0, predicted > 0)[1],
    ]
    train_op = _descent().minimize(loss, _step())
    return _SPEC(mode, loss=loss, train_op=tf.group(train_op, *updates))


def _counted(features, labels, mode):
    """Counters of examples, of classes and of updates."""
    cls = features["cls"]
    loss = tf.reduce_mean(entropies(cls, outputs(features["x"])))
    seen = v1.get_variable("seen", [], tf.int64, trainable=False, initializer=_zeros())
    of_class = v1.get_variable(
        "of_class", [CLASSES], tf.int32, trainable=False, initializer=_zeros()
    )
    updates = [
        seen.assign_add(tf.shape(cls, tf.int64)[0]),
        of_class.assign_add(tf.math.bincount(cls, minlength=CLASSES)),
    ]
    train_op = _descent().minimize(loss, _step())
    return _SPEC(mode, loss=loss, train_op=tf.group(train_op, *updates))


def _zeros():
    return v1.zeros_initializer()


def _judged(features):
    noise = features["pair"]
    with v1.variable_scope("maker"):
        made = tf.matmul(
            tf.tanh(tf.matmul(noise, variable("in", 4, 6))), variable("out", 6, 4)
        )
    weights = variable("judge/in", 4, 6), variable("judge/out", 6, 1)

    def judge(x):
        return tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[1])

    return made, judge


def _of(part: str) -> list[tf.Variable]:
    return [v for v in v1.trainable_variables() if part in v.op.name]


def _adversaries(features, labels, mode):
    """A GAN: two losses, two optimizers, the second update after the first."""
    made, judge = _judged(features)
    real, fake = judge(features["x"]), judge(made)
    cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits
    judge_loss = tf.reduce_mean(cross_entropy(tf.ones_like(real), real))
    judge_loss += tf.reduce_mean(cross_entropy(tf.zeros_like(fake), fake))
    made_loss = tf.reduce_mean(cross_entropy(tf.ones_like(fake), fake))
    # All gradients before the first update, or the maker's would race it.
    of_judge = tf.gradients(judge_loss, _of("judge"))
    of_maker = tf.gradients(made_loss, _of("maker"))
    with tf.control_dependencies([*of_judge, *of_maker]):
        pairs = zip(of_judge, _of("judge"), strict=True)
        judge_op = _adam(0.01, beta1=0.5).apply_gradients(pairs)
    with tf.control_dependencies([judge_op]):
        pairs = zip(of_maker, _of("maker"), strict=True)
        train_op = _adam(0.01, name="Maker").apply_gradients(pairs, _step())
    return _SPEC(mode, loss=judge_loss + made_loss, train_op=train_op)


def _taking_turns(features, labels, mode):
    """Each update trains one of two networks, chosen by the global step."""
    made, judge = _judged(features)
    loss = tf.reduce_mean(judge(made)) - tf.reduce_mean(judge(features["x"]))
    loss += tf.math.reduce_variance(judge(made))
    step, optimizer = _step(), _descent()
    of_judge = optimizer.compute_gradients(loss, _of("judge"))
    of_maker = optimizer.compute_gradients(-loss, _of("maker"))
    train_op = tf.cond(
        tf.equal(tf.identity(step) % 2, 0),
        lambda: optimizer.apply_gradients(of_judge),
        lambda: optimizer.apply_gradients(of_maker),
    )
    with tf.control_dependencies([train_op]):
        return _SPEC(mode, loss=loss, train_op=step.assign_add(1))


def _scaled_loss(features, labels, mode):
    """Mixed precision by hand: float16 layers, a scaled loss, float32 variables."""
    weights = variable("first", 4, 5, dtype=np.float32)
    hidden = tf.tanh(
        tf.matmul(tf.cast(features["x"], tf.float16), tf.cast(weights, tf.float16))
    )
    z = tf.cast(hidden, tf.float64) @ variable("last", 5, 3)
    loss, variables = _masked(features, labels, z), v1.trainable_variables()
    gradients = [g / 64 for g in tf.gradients(64 * loss, variables)]
    pairs = zip(gradients, variables, strict=True)
    return _SPEC(mode, loss=loss, train_op=_descent().apply_gradients(pairs, _step()))


def _skipping(features, labels, mode):
    """Skips the update of a batch whose gradients are not finite, or too large."""
    loss, variables, step = _masked(features, labels), v1.trainable_variables(), _step()
    gradients = tf.gradients(loss, variables)
    norm = tf.linalg.global_norm(gradients)
    pairs = list(zip(gradients, variables, strict=True))
    train_op = tf.cond(
        tf.math.is_finite(norm) & (norm < 1e3),
        lambda: _descent().apply_gradients(pairs),
        tf.no_op,
    )
    with tf.control_dependencies([train_op]):
        return _SPEC(mode, loss=loss, train_op=step.assign_add(1))


def _summarized(features, labels, mode):
    """tf.contrib.layers.optimize_loss: norms in summaries, the loss as the train op."""
    loss, optimizer = _masked(features, labels), v1.train.RMSPropOptimizer(0.02)
    pairs = optimizer.compute_gradients(loss)
    for gradient, each_variable in pairs:
        v1.summary.histogram(f"gradients/{each_variable.op.name}", gradient)
    v1.summary.scalar("norm", tf.linalg.global_norm([g for g, _ in pairs]))
    v1.summary.scalar("loss", loss)
    update = optimizer.apply_gradients(pairs, _step())
    with tf.control_dependencies([update]):
        return _SPEC(mode, loss=loss, train_op=tf.identity(loss))


def _without_conflict(features, labels, mode):
    """PCGrad: of two tasks' gradients, the parts that oppose are taken off."""
    z, variables = outputs(features["x"]), v1.trainable_variables()
    loss = _masked(features, labels, z)
    other = tf.reduce_mean(entropies(features["cls"], -z))
    first, second = (tf.gradients(value, variables) for value in (loss, other))
    product = tf.add_n(
        [tf.reduce_sum(a * b) for a, b in zip(first, second, strict=True)]
    )
    size = tf.linalg.global_norm(second) ** 2
    part = tf.minimum(product, tf.zeros_like(product)) / size
    gradients = [a - part * b + b for a, b in zip(first, second, strict=True)]
    pairs = zip(gradients, variables, strict=True)
    return _SPEC(mode, loss=loss, train_op=_descent().apply_gradients(pairs, _step()))


def _partitioned(features, labels, mode):
    """A partitioned variable."""
    with v1.variable_scope("parts", partitioner=v1.fixed_size_partitioner(2)):
        start = tf.constant_initializer(0.3)
        weights = v1.get_variable("weights", [4, 3], tf.float64, initializer=start)
    z = tf.matmul(features["x"], tf.convert_to_tensor(weights))
    loss = _masked(features, labels, z)
    return _SPEC(mode, loss=loss, train_op=_descent().minimize(loss, _step()))


def _regression_head(features, labels, mode):
    """A head with the weights of examples, an optimizer of its own."""
    head = tf.estimator.RegressionHead(3, weight_column="w")
    z = tf.cast(outputs(features["x"]), tf.float32)
    return head.create_estimator_spec(
        features,
        mode,
        z,
        tf.cast(labels, tf.float32),
        train_op_fn=lambda loss: _descent().minimize(loss, _step()),
    )


def _canned(kind: str, **options):
    def model_fn(features, labels, mode):
        config = tf.estimator.RunConfig()
        columns = [tf.feature_column.numeric_column("x", [4])]
        if kind.startswith("DNNLinear"):
            options["linear_feature_columns"] = options["dnn_feature_columns"] = columns
        else:
            options["feature_columns"] = columns
        estimator = getattr(v1.estimator, kind)(**options, config=config)
        if "Regressor" in kind:
            labels = tf.cast(labels, tf.float32)
        else:
            labels = features.pop("cls")
        return estimator.model_fn(features, labels, mode, config)

    return model_fn


MODEL_FNS = {
    "adam": Script(_optimizer(_adam)),
    "adagrad": Script(_optimizer(lambda: v1.train.AdagradOptimizer(0.05))),
    "options_of_minimize": Script(
        _optimizer(
            _descent,
            aggregation_method=tf.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N,
            gate_gradients=v1.train.Optimizer.GATE_GRAPH,
        )
    ),
    "clipped": Script(_clipped),
    "each_clipped": Script(_each_clipped),
    "sparse_and_clipped": Script(_sparse_and_clipped, ("ids", "mask")),
    "keras_tape": Script(_keras_tape),
    "two_gradients_of_a_tape": Script(_two_tapes),
    "several_losses": Script(_several_losses, ("x",)),
    "own_derivative": Script(_own_derivative, ("x",)),
    "two_rates": Script(_two_rates),
    "frozen": Script(_frozen),
    "averaged_weights": Script(_averaged_weights),
    "rate_of_the_loss": Script(_rate_of_the_loss),
    "metrics": Script(_metrics, ("x", "cls")),
    "counted": Script(_counted, ("x", "cls")),
    "adversaries": Script(_adversaries, ("x", "pair")),
    "scaled_loss": Script(_scaled_loss, tolerance=5e-3),
    "summarized": Script(_summarized),
    "without_conflict": Script(_without_conflict, ("x", "mask", "cls")),
    "partitioned": Script(_partitioned),
    "regression_head": Script(_regression_head, ("x", "w"), SINGLE),
    "canned_classifier": Script(
        _canned("DNNClassifier", hidden_units=[5], n_classes=3),
        ("x", "cls"),
        SINGLE,
    ),
    "canned_wide_and_deep": Script(
        _canned("DNNLinearCombinedClassifier", dnn_hidden_units=[5], n_classes=3),
        ("x", "cls"),
        SINGLE,
    ),
}

# With both kinds of control flow.
WITH_CONTROL_FLOW = {
    "taking_turns": Script(_taking_turns, ("x", "pair")),
    "skipping": Script(_skipping),
}


def _sharpness_aware(features, labels, mode):
    """SAM: gradients at weights that were moved along the gradient."""
    loss, variables = _masked(features, labels), v1.trainable_variables()
    gradients = tf.gradients(loss, variables)
    scale = 0.05 / tf.linalg.global_norm(gradients)
    moves = [scale * gradient for gradient in gradients]
    with tf.control_dependencies(moves):
        ascent = [v.assign_add(m) for v, m in zip(variables, moves, strict=True)]
    with tf.control_dependencies(ascent):
        z = outputs(tf.identity(features["x"]))
        gradients = tf.gradients(_masked(features, labels, z), variables)
    with tf.control_dependencies(gradients):
        back = [v.assign_sub(m) for v, m in zip(variables, moves, strict=True)]
    with tf.control_dependencies(back):
        pairs = zip(gradients, variables, strict=True)
        train_op = _descent().apply_gradients(pairs, _step())
    return _SPEC(mode, loss=loss, train_op=train_op)


def _newton(features, labels, mode):
    """A product with the Hessian: a gradient of a gradient of the weights."""
    loss, variables = _masked(features, labels), v1.trainable_variables()
    gradients = tf.gradients(loss, variables)
    norm = tf.add_n([tf.reduce_sum(g**2) for g in gradients])
    products = tf.gradients(norm, variables)
    pairs = [
        (g + 0.1 * p, v) for g, p, v in zip(gradients, products, variables, strict=True)
    ]
    return _SPEC(mode, loss=loss, train_op=_descent().apply_gradients(pairs, _step()))


def _learned_step(features, labels, mode):
    """MAML: the loss of other examples after one step on these."""
    first = variable("inner", 4, 3)
    inner = tf.reduce_mean(squared(labels, tf.matmul(features["x"], first)))
    moved = first - 0.1 * tf.gradients(inner, first)[0]
    loss = tf.reduce_mean(squared(labels, tf.matmul(features["pair"], moved)))
    return _SPEC(mode, loss=loss, train_op=_descent().minimize(loss, _step()))


def _centers(features, labels, mode):
    """Center loss: classes' centers move towards their examples, before the loss."""
    z, cls = outputs(features["x"]), features["cls"]
    centers = v1.get_variable(
        "centers", [CLASSES, 3], tf.float64, _zeros(), trainable=False
    )
    moved = 0.5 * (tf.gather(centers, cls) - z)
    update = v1.scatter_sub(centers, cls, tf.stop_gradient(moved))
    with tf.control_dependencies([update]):
        away = squared(z, tf.gather(centers.read_value(), cls))
    loss = tf.reduce_mean(each(labels, z)) + 0.1 * tf.reduce_mean(away)
    return _SPEC(mode, loss=loss, train_op=_descent().minimize(loss, _step()))


def _codebook(features, labels, mode):
    """VQ-VAE: codes are moving averages of the examples that chose them."""
    z = outputs(features["x"])
    start = tf.constant(np.linspace(-1, 1, 12).reshape(4, 3))
    codes = v1.get_variable("codes", initializer=start, trainable=False)
    distances = tf.reduce_sum(squared(z[:, None], codes.read_value()), 2)
    chosen = tf.one_hot(tf.argmin(distances, 1), 4, dtype=tf.float64)
    quantized = tf.stop_gradient(tf.matmul(chosen, codes.read_value()))
    loss = tf.reduce_mean(squared(z, quantized)) + tf.reduce_mean(
        squared(labels, z + tf.stop_gradient(quantized - z))
    )
    train_op = _descent().minimize(loss, _step())
    counts = tf.reduce_sum(chosen, 0)[:, None]
    sums = tf.matmul(chosen, tf.stop_gradient(z), transpose_a=True)
    with tf.control_dependencies([train_op, sums]):
        target = (codes + sums) / (1 + counts)
        update = codes.assign(0.8 * codes + 0.2 * target)
    return _SPEC(mode, loss=loss, train_op=tf.group(train_op, update))


def _usage(features, labels, mode):
    """An integer variable takes on the number of selected examples."""
    loss = _masked(features, labels)
    usage = v1.get_variable(
        "usage", [], tf.int64, trainable=False, initializer=_zeros()
    )
    found = tf.cast(tf.reduce_sum(features["mask"]), tf.int64)
    train_op = _descent().minimize(loss, _step())
    return _SPEC(mode, loss=loss, train_op=tf.group(train_op, usage.assign(found)))


def _queue(features, labels, mode):
    """MoCo: the batch's outputs are stored for the next batch."""
    z = outputs(features["x"])
    stored = v1.get_variable(
        "stored", [11, 3], tf.float64, tf.ones_initializer(), trainable=False
    )
    scores = tf.matmul(z, stored.read_value(), transpose_b=True)
    loss = tf.reduce_mean(tf.reduce_logsumexp(scores, 1)) + _masked(features, labels, z)
    with tf.control_dependencies([scores]):
        update = stored.assign(tf.stop_gradient(z[:11]))
    train_op = _descent().minimize(loss, _step())
    return _SPEC(mode, loss=loss, train_op=tf.group(train_op, update))


def _rescaled_targets(features, labels, mode):
    """PopArt: moving averages of the labels standardize them; the update comes first."""
    mean = v1.get_variable("mean", [3], tf.float64, _zeros(), trainable=False)
    update = mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(labels, 0))
    with tf.control_dependencies([update]):
        target = labels - mean.read_value()
    loss = _masked(features, target)
    return _SPEC(mode, loss=loss, train_op=_descent().minimize(loss, _step()))


def _metric_of_the_loss(features, labels, mode):
    loss = _masked(features, labels)
    _, update = v1.metrics.mean(loss)
    train_op = _descent().minimize(loss, _step())
    return _SPEC(mode, loss=loss, train_op=tf.group(train_op, update))


def _normalized(features, labels, mode):
    """Batch normalization, whose averages are updates of the train op."""
    hidden = tf.matmul(features["x"], variable("first", 4, 5))
    hidden = v1.layers.batch_normalization(hidden, momentum=0.9, training=True)
    z = tf.matmul(tf.nn.relu(hidden), variable("last", 5, 3))
    loss = _masked(features, labels, z)
    with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
        train_op = _descent().minimize(loss, _step())
    return _SPEC(mode, loss=loss, train_op=train_op)


def _private(features, labels, mode):
    """DP-SGD without noise: each example's gradient is clipped by itself."""
    weights = variable("weights", 4, 3)
    z = tf.matmul(features["x"], weights)
    errors = 2 * (z - labels)
    norms = tf.norm(features["x"], axis=1) * tf.norm(errors, axis=1)
    factors = tf.minimum(1 / norms, tf.ones_like(norms))[:, None]
    gradient = tf.matmul(features["x"], errors * factors, transpose_a=True)
    gradient /= number(labels)
    loss = tf.reduce_mean(squared(labels, z))
    train_op = _descent().apply_gradients([(gradient, weights)], _step())
    return _SPEC(mode, loss=loss, train_op=train_op)


def _by_hand(features, labels, mode):
    """Gradients without tf.gradients: there is nothing to intercept."""
    weights = variable("weights", 4, 3)
    error = tf.matmul(features["x"], weights) - labels
    gradient = tf.matmul(features["x"], error, transpose_a=True) / number(labels)
    update = weights.assign_sub(0.1 * gradient)
    with tf.control_dependencies([update]):
        train_op = _step().assign_add(1)
    return _SPEC(mode, loss=tf.reduce_mean(error**2), train_op=train_op)


# Variables that the batch writes before it reads them, gradients of gradients, and
# updates without gradients: exact, or refused; never another update.
EXACT_OR_REFUSED = {
    "in_two_stages": Script(_in_two_stages),
    "sharpness_aware": Script(_sharpness_aware),
    "newton": Script(_newton),
    "learned_step": Script(_learned_step, ("x", "pair")),
    "baseline": Script(_baseline, ("x", "w", "cls")),
    "centers": Script(_centers, ("x", "cls")),
    "codebook": Script(_codebook, ("x",)),
    "usage": Script(_usage),
    "queue": Script(_queue),
    "rescaled_targets": Script(_rescaled_targets),
    "metric_of_the_loss": Script(_metric_of_the_loss),
    "normalized": Script(_normalized),
    "private": Script(_private, ("x",)),
    "by_hand": Script(_by_hand, ("x",)),
}
