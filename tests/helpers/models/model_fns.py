"""Whole scripts without this library, by their ways with gradients.

A script is a function that returns (loss, train op), or a spec; `model_fn_of` makes it a
model_fn. Its arguments are named after what it reads, as those of the losses in
`tests.helpers.models.losses`. `EXACT`, `WITH_CONTROL_FLOW` and `EXACT_OR_REFUSED` have
(script, tolerance) by name; None is the tolerance of the variables' types.

B = examples.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tests.helpers.models.examples import CLASSES, TOKENS, WORDS
from tests.helpers.models.losses import (
    call,
    entropies,
    errors,
    number,
    outputs,
    squared,
    variable,
)
from tests.helpers.oracles.exactness import SINGLE

v1 = tf.compat.v1
EXACT, WITH_CONTROL_FLOW, EXACT_OR_REFUSED = {}, {}, {}


def model_fn_of(script: Callable) -> Callable:
    def model_fn(features, labels, mode):
        result = call(script, features, labels)
        if isinstance(result, tf.estimator.EstimatorSpec):
            return result
        return tf.estimator.EstimatorSpec(mode, loss=result[0], train_op=result[1])

    return model_fn


def _in(table: dict, tolerance: float | None = None) -> Callable:
    """Decorates the scripts of a table."""

    def add(script):
        table[script.__name__] = script, tolerance
        return script

    return add


def _masked(y, z, mask):
    """A loss that is no mean of micro-batches' losses."""
    return tf.reduce_sum(errors(y, z) * mask) / tf.maximum(tf.reduce_sum(mask), 1)


def _step():
    return v1.train.get_or_create_global_step()


def _descent(rate=0.02):
    return v1.train.GradientDescentOptimizer(rate)


def _adam(rate=0.02, **options):
    # Large, so that no rounding of a small gradient becomes an update.
    return v1.train.AdamOptimizer(rate, epsilon=1e-3, **options)


def _apply(gradients, rate=0.02):
    """Descends along gradients of all variables."""
    pairs = zip(gradients, v1.trainable_variables(), strict=True)
    return _descent(rate).apply_gradients(pairs, _step())


def _gradients(loss, *more):
    return tf.gradients(loss, v1.trainable_variables(), *more)


def _state(name, start, dtype=tf.float64):
    """A variable that is not trained."""
    start = tf.constant(start, dtype)
    return v1.get_variable(name, initializer=start, trainable=False)


@_in(EXACT)
def adam(y, z, mask):
    loss = _masked(y, z, mask)
    return loss, _adam().minimize(loss, _step())


@_in(EXACT)
def adagrad(y, z, mask):
    loss = _masked(y, z, mask)
    return loss, v1.train.AdagradOptimizer(0.05).minimize(loss, _step())


@_in(EXACT)
def options_of_minimize(y, z, mask):
    loss = _masked(y, z, mask)
    aggregation = tf.AggregationMethod.EXPERIMENTAL_ACCUMULATE_N
    gate = v1.train.Optimizer.GATE_GRAPH
    return loss, _descent().minimize(
        loss, _step(), gate_gradients=gate, aggregation_method=aggregation
    )


@_in(EXACT)
def clipped(y, z, mask):
    """google-research/bert: tf.gradients, clip_by_global_norm, its own step."""
    loss = _masked(y, z, mask)
    step, variables = _step(), v1.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.1)
    train_op = _adam().apply_gradients(zip(gradients, variables, strict=True))
    return loss, tf.group(train_op, step.assign_add(1))


@_in(EXACT)
def each_clipped(y, z, mask):
    loss, optimizer = _masked(y, z, mask), _descent()
    pairs = [
        (tf.clip_by_norm(tf.clip_by_value(gradient, -0.3, 0.3), 0.2), variable)
        for gradient, variable in optimizer.compute_gradients(loss)
    ]
    return loss, optimizer.apply_gradients(pairs, _step())


def _clipped_momentum(loss):
    optimizer = v1.train.MomentumOptimizer(0.1, 0.9)
    gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
    gradients, _ = tf.clip_by_global_norm(gradients, 0.2)
    pairs = zip(gradients, variables, strict=True)
    return loss, optimizer.apply_gradients(pairs, _step())


@_in(EXACT)
def sparse_and_clipped(y, ids, mask):
    """Rows of an embedding, looked up repeatedly; momentum moves the touched ones."""
    words = tf.gather(variable("table", WORDS, 3), ids)
    return _clipped_momentum(_masked(y, tf.reduce_sum(words, 1) / 3, mask))


@_in(EXACT)
def lookups_clipped(y, sparse, mask):
    """An embedding_column: the batch at once has one slice for each place."""
    words = tf.SparseTensor(
        sparse.indices, tf.cast(sparse.values, tf.int64) % WORDS, sparse.dense_shape
    )
    table = variable("table", WORDS, 3)
    rows = tf.nn.safe_embedding_lookup_sparse(table, words)
    return _clipped_momentum(_masked(y, rows @ variable("out", 3, 3), mask))


@_in(EXACT)
def lookups_of_both_kinds_clipped(y, sparse, ids, mask):
    words = tf.SparseTensor(
        sparse.indices, tf.cast(sparse.values, tf.int64) % WORDS, sparse.dense_shape
    )
    table = variable("table", WORDS, 3)
    rows = tf.nn.safe_embedding_lookup_sparse(table, words, combiner="sum")
    rows += tf.reduce_sum(tf.gather(table, ids), 1)
    return _clipped_momentum(_masked(y, rows @ variable("out", 3, 3), mask))


@_in(EXACT)
def positions_clipped(y, seq, mask):
    """Places of no example, looked up once by the batch at once."""
    table = variable("positions", TOKENS + 2, 4)
    places = tf.gather(table, tf.range(TOKENS) // 2)
    hidden = tf.tanh(seq + places)
    return _clipped_momentum(
        _masked(y, tf.reduce_sum(hidden, 1) @ variable("out", 4, 3), mask)
    )


@_in(EXACT)
def keras_tape(y, x, mask):
    """A Keras model, its penalties, a tape and an optimizer of Keras."""
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Dense(5, "tanh", kernel_regularizer="l2", dtype="float64"),
            layers.Dense(3, activity_regularizer="l1", dtype="float64"),
        ]
    )
    with tf.GradientTape() as tape:
        loss = _masked(y, model(x, training=True), mask) + tf.add_n(model.losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer = tf.keras.optimizers.legacy.SGD(0.05, momentum=0.9)
    optimizer.iterations = _step()
    pairs = zip(gradients, model.trainable_variables, strict=True)
    return loss, optimizer.apply_gradients(pairs)


@_in(EXACT)
def two_gradients_of_a_tape(y, x, mask):
    """One persistent tape, two losses, their gradients added with weights."""
    with tf.GradientTape(persistent=True) as tape:
        z = outputs(x)
        loss, size = _masked(y, z, mask), tf.norm(z)
    variables = v1.trainable_variables()
    first, second = (tape.gradient(value, variables) for value in (loss, size))
    return loss, _apply([a + 0.1 * b for a, b in zip(first, second, strict=True)])


@_in(EXACT)
def several_losses(y, z):
    """tf.gradients of a list: a sum, a penalty, a loss per example."""
    penalty = 10 * tf.nn.l2_loss(v1.trainable_variables()[0])
    losses = [tf.reduce_sum(errors(y, z)) / 10, penalty, tf.abs(z[:, 0])]
    return losses[0] + penalty, _apply(_gradients(losses))


@_in(EXACT)
def own_derivative(y, z):
    """The derivative with respect to outputs by hand: grad_ys, divided by the size."""
    derivative = 2 * (z - y) / tf.cast(tf.size(z), tf.float64)
    return tf.reduce_mean(squared(y, z)), _apply(_gradients(z, [derivative]))


@_in(EXACT)
def two_rates(y, z, mask):
    """Two optimizers for two groups of variables, gradients computed once."""
    loss, variables = _masked(y, z, mask), v1.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.5)
    pairs = list(zip(gradients, variables, strict=True))
    first = _descent(0.05).apply_gradients(pairs[:2])
    return loss, tf.group(first, _adam().apply_gradients(pairs[2:], _step()))


@_in(EXACT)
def frozen(y, x, mask):
    """Only the last layer is trained; the first one gets a loss of its own."""
    hidden = tf.tanh(tf.matmul(x, variable("first", 4, 5)))
    z = tf.matmul(tf.stop_gradient(hidden), variable("last", 5, 3))
    loss, second = _masked(y, z, mask), tf.math.reduce_std(hidden)
    first, last = v1.trainable_variables()
    train_op = _descent().minimize(loss, _step(), var_list=[last])
    return loss, tf.group(train_op, _descent(-0.1).minimize(second, var_list=[first]))


@_in(EXACT)
def averaged_weights(y, z, mask):
    loss = _masked(y, z, mask)
    train_op = _descent().minimize(loss, _step())
    average = tf.train.ExponentialMovingAverage(0.9)
    with tf.control_dependencies([train_op]):
        return loss, average.apply(v1.trainable_variables())


@_in(EXACT)
def rate_of_the_loss(y, z, mask):
    """Polyak's step: the loss over the gradient's squared norm."""
    loss = _masked(y, z, mask)
    gradients = _gradients(loss)
    rate = 0.1 * loss / tf.linalg.global_norm(gradients) ** 2
    return loss, _apply(gradients, rate)


@_in(EXACT_OR_REFUSED)
def baseline(z, w, cls):
    """A policy gradient with a moving average of rewards as its baseline."""
    average = _state("baseline", 0)
    advantage = tf.stop_gradient(w - average.read_value())
    loss = tf.reduce_mean(advantage * entropies(cls, z))
    with tf.control_dependencies([loss]):
        update = average.assign(0.9 * average + 0.1 * tf.reduce_mean(w))
    return loss, tf.group(_descent().minimize(loss, _step()), update)


@_in(EXACT)
def metrics(y, z, cls):
    """Metrics of the examples, updated in the train op."""
    loss = tf.reduce_mean(entropies(cls, z))
    predicted = tf.argmax(z, 1)
    updates = [
        v1.metrics.accuracy(cls, predicted)[1],
        v1.metrics.mean(tf.cast(errors(y, z), tf.float32))[1],
        v1.metrics.true_positives(cls > 0, predicted > 0)[1],
    ]
    return loss, tf.group(_descent().minimize(loss, _step()), *updates)


@_in(EXACT)
def counted(z, cls):
    """Counters of examples, of classes and of updates."""
    loss = tf.reduce_mean(entropies(cls, z))
    seen, of_class = _state("seen", 0, tf.int64), _state("of_class", [0] * 3, tf.int32)
    updates = [
        seen.assign_add(tf.shape(cls, tf.int64)[0]),
        of_class.assign_add(tf.math.bincount(cls, minlength=CLASSES)),
    ]
    return loss, tf.group(_descent().minimize(loss, _step()), *updates)


def _judged(noise):
    with v1.variable_scope("maker"):
        hidden = tf.tanh(tf.matmul(noise, variable("in", 4, 6)))
        imitation = tf.matmul(hidden, variable("out", 6, 4))
    weights = variable("judge/in", 4, 6), variable("judge/out", 6, 1)
    return imitation, lambda x: tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[1])


def _of(part: str) -> list[tf.Variable]:
    return [v for v in v1.trainable_variables() if part in v.op.name]


@_in(EXACT)
def adversaries(x, pair):
    """A GAN: two losses, two optimizers, the second update after the first."""
    imitation, judge = _judged(pair)
    real, fake = judge(x), judge(imitation)
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
    return judge_loss + made_loss, train_op


def _judge_loss(real, fake):
    cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits
    loss = tf.reduce_mean(cross_entropy(tf.ones_like(real), real))
    return loss + tf.reduce_mean(cross_entropy(tf.zeros_like(fake), fake))


@_in(EXACT)
def adversaries_in_order(x, pair):
    """A GAN whose maker is trained by the judge's update, of which there is an average."""
    imitation, judge = _judged(pair)
    judge_loss = _judge_loss(judge(x), judge(imitation))
    gradients = tf.gradients(judge_loss, _of("judge"))
    clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
    pairs = zip(clipped, _of("judge"), strict=True)
    with tf.control_dependencies([_adam(0.05).apply_gradients(pairs)]):
        judge_op = v1.train.ExponentialMovingAverage(0.5).apply(_of("judge"))
    with tf.control_dependencies([judge_op]):
        fake = judge(imitation)
        made_loss = tf.reduce_mean(tf.nn.softplus(-fake)) + tf.math.reduce_variance(
            fake
        )
        rate = v1.train.exponential_decay(np.float64(0.05), _step(), 1, 0.5)
        optimizer = _adam(rate, name="Maker")
        train_op = optimizer.minimize(made_loss, _step(), _of("maker"))
    return judge_loss + made_loss, tf.group(judge_op, train_op)


@_in(EXACT)
def several_critics(x, pair):
    """A Wasserstein GAN: two updates of the critic, each clipped, then the maker's."""
    imitation, critic = _judged(pair)
    done, losses = [], []
    for i in range(2):
        with tf.control_dependencies(done):
            losses.append(tf.reduce_mean(critic(imitation)) - tf.reduce_mean(critic(x)))
            optimizer = v1.train.RMSPropOptimizer(0.05, epsilon=1e-3, name=f"Critic{i}")
            critic_op = optimizer.minimize(losses[-1], _step(), _of("judge"))
        with tf.control_dependencies([critic_op]):
            done = [v.assign(tf.clip_by_value(v, -0.5, 0.5)) for v in _of("judge")]
    with tf.control_dependencies(done):
        made_loss = -tf.reduce_mean(critic(tf.identity(imitation)))
        rate = 0.1 / tf.cast(_step().read_value(), tf.float64)
        train_op = _descent(rate).minimize(made_loss, _step(), _of("maker"))
    return losses[0] + losses[1] + made_loss, train_op


@_in(EXACT)
def adversarial_words(ids, x):
    """An embedding that is trained against a network that has changed before."""
    table = variable("words", WORDS, 4)
    words = tf.nn.embedding_lookup(table, ids[:, 0])
    weights = variable("judge/in", 4, 1)
    logits = tf.concat([tf.matmul(words, weights), tf.matmul(x, -weights)], 0)
    loss = tf.reduce_mean(tf.nn.softplus(logits))
    judge_op = _adam(0.05).minimize(loss, var_list=[weights])
    with tf.control_dependencies([judge_op]):
        made_loss = tf.reduce_mean(tf.nn.softplus(-tf.matmul(words, weights)))
        train_op = v1.train.AdagradOptimizer(0.1).minimize(made_loss, _step(), [table])
    return made_loss, train_op


@_in(WITH_CONTROL_FLOW)
def taking_turns(x, pair):
    """Each update trains one of two networks, chosen by the global step."""
    imitation, judge = _judged(pair)
    loss = tf.reduce_mean(judge(imitation)) - tf.reduce_mean(judge(x))
    loss += tf.math.reduce_variance(judge(imitation))
    step, optimizer = _step(), _descent()
    of_judge = optimizer.compute_gradients(loss, _of("judge"))
    of_maker = optimizer.compute_gradients(-loss, _of("maker"))
    train_op = tf.cond(
        tf.equal(tf.identity(step) % 2, 0),
        lambda: optimizer.apply_gradients(of_judge),
        lambda: optimizer.apply_gradients(of_maker),
    )
    with tf.control_dependencies([train_op]):
        return loss, step.assign_add(1)


@_in(EXACT, 5e-3)
def scaled_loss(y, x, mask):
    """Mixed precision by hand: float16 layers, a scaled loss, float32 variables."""
    weights = variable("first", 4, 5, dtype=np.float32)
    hidden = tf.matmul(tf.cast(x, tf.float16), tf.cast(weights, tf.float16))
    z = tf.cast(tf.tanh(hidden), tf.float64) @ variable("last", 5, 3)
    loss = _masked(y, z, mask)
    return loss, _apply([g / 64 for g in _gradients(64 * loss)])


@_in(WITH_CONTROL_FLOW)
def skipping(y, z, mask):
    """Skips the update of a batch whose gradients are not finite, or too large."""
    loss, variables, step = _masked(y, z, mask), v1.trainable_variables(), _step()
    gradients = tf.gradients(loss, variables)
    norm = tf.linalg.global_norm(gradients)
    pairs = list(zip(gradients, variables, strict=True))
    train_op = tf.cond(
        tf.math.is_finite(norm) & (norm < 1e3),
        lambda: _descent().apply_gradients(pairs),
        tf.no_op,
    )
    with tf.control_dependencies([train_op]):
        return loss, step.assign_add(1)


@_in(EXACT)
def summarized(y, z, mask):
    """tf.contrib.layers.optimize_loss: norms in summaries, the loss as the train op."""
    loss, optimizer = _masked(y, z, mask), v1.train.RMSPropOptimizer(0.02)
    pairs = optimizer.compute_gradients(loss)
    for gradient, each_variable in pairs:
        v1.summary.histogram(f"gradients/{each_variable.op.name}", gradient)
    v1.summary.scalar("norm", tf.linalg.global_norm([g for g, _ in pairs]))
    v1.summary.scalar("loss", loss)
    update = optimizer.apply_gradients(pairs, _step())
    with tf.control_dependencies([update]):
        return loss, tf.identity(loss)


@_in(EXACT)
def without_conflict(y, z, mask, cls):
    """PCGrad: of two tasks' gradients, the parts that oppose are taken off."""
    loss, other = _masked(y, z, mask), tf.reduce_mean(entropies(cls, -z))
    first, second = _gradients(loss), _gradients(other)
    product = tf.add_n(
        [tf.reduce_sum(a * b) for a, b in zip(first, second, strict=True)]
    )
    size = tf.linalg.global_norm(second) ** 2
    part = tf.minimum(product, tf.zeros_like(product)) / size
    return loss, _apply([a - part * b + b for a, b in zip(first, second, strict=True)])


@_in(EXACT)
def partitioned(y, x, mask):
    """A partitioned variable."""
    with v1.variable_scope("parts", partitioner=v1.fixed_size_partitioner(2)):
        start = tf.constant_initializer(0.3)
        weights = v1.get_variable("weights", [4, 3], tf.float64, initializer=start)
    loss = _masked(y, tf.matmul(x, tf.convert_to_tensor(weights)), mask)
    return loss, _descent().minimize(loss, _step())


@_in(EXACT, SINGLE)
def regression_head(y, z, x, w):
    """A head with the weights of examples, an optimizer of its own."""
    return tf.estimator.RegressionHead(3, weight_column="w").create_estimator_spec(
        {"x": x, "w": w},
        tf.estimator.ModeKeys.TRAIN,
        tf.cast(z, tf.float32),
        tf.cast(y, tf.float32),
        train_op_fn=lambda loss: _descent().minimize(loss, _step()),
    )


# Variables that the batch writes before it reads them, gradients of gradients, and
# updates without gradients: exact, or refused; never another update.


@_in(EXACT_OR_REFUSED)
def in_two_stages(y, z, mask):
    """Back-propagation in two calls: to the outputs, and on to the weights."""
    loss = _masked(y, z, mask)
    (slope,) = tf.gradients(loss, z)
    slope *= tf.minimum(tf.constant(1.0, tf.float64), 0.2 / tf.norm(slope))
    return loss, _apply(_gradients(z, slope), 0.1)


@_in(EXACT)
def sharpness_aware(y, x, z, mask):
    """SAM: gradients at weights that were moved along the gradient."""
    loss, variables = _masked(y, z, mask), v1.trainable_variables()
    gradients = tf.gradients(loss, variables)
    scale = 0.05 / tf.linalg.global_norm(gradients)
    moves = [scale * gradient for gradient in gradients]
    with tf.control_dependencies(moves):
        ascent = [v.assign_add(m) for v, m in zip(variables, moves, strict=True)]
    with tf.control_dependencies(ascent):
        gradients = _gradients(_masked(y, outputs(tf.identity(x)), mask))
    with tf.control_dependencies(gradients):
        back = [v.assign_sub(m) for v, m in zip(variables, moves, strict=True)]
    with tf.control_dependencies(back):
        return loss, _apply(gradients)


@_in(EXACT_OR_REFUSED)
def newton(y, z, mask):
    """A product with the Hessian: a gradient of a gradient of the weights."""
    loss = _masked(y, z, mask)
    gradients = _gradients(loss)
    products = _gradients(tf.add_n([tf.reduce_sum(g**2) for g in gradients]))
    return loss, _apply([g + 0.1 * p for g, p in zip(gradients, products, strict=True)])


@_in(EXACT_OR_REFUSED)
def learned_step(y, x, pair):
    """MAML: the loss of other examples after one step on these."""
    first = variable("inner", 4, 3)
    inner = tf.reduce_mean(squared(y, tf.matmul(x, first)))
    moved = first - 0.1 * tf.gradients(inner, first)[0]
    loss = tf.reduce_mean(squared(y, tf.matmul(pair, moved)))
    return loss, _descent().minimize(loss, _step())


@_in(EXACT_OR_REFUSED)
def centers(y, z, cls):
    """Center loss: classes' centers move towards their examples, before the loss."""
    of_classes = _state("centers", np.zeros([CLASSES, 3]))
    moved = 0.5 * (tf.gather(of_classes, cls) - z)
    update = v1.scatter_sub(of_classes, cls, tf.stop_gradient(moved))
    with tf.control_dependencies([update]):
        away = squared(z, tf.gather(of_classes.read_value(), cls))
    loss = tf.reduce_mean(errors(y, z)) + 0.1 * tf.reduce_mean(away)
    return loss, _descent().minimize(loss, _step())


@_in(EXACT)
def codebook(y, z):
    """VQ-VAE: codes are moving averages of the examples that chose them."""
    codes = _state("codes", np.linspace(-1, 1, 12).reshape(4, 3))
    distances = tf.reduce_sum(squared(z[:, None], codes.read_value()), 2)
    chosen = tf.one_hot(tf.argmin(distances, 1), 4, dtype=tf.float64)
    quantized = tf.stop_gradient(tf.matmul(chosen, codes.read_value()))
    loss = tf.reduce_mean(squared(z, quantized)) + tf.reduce_mean(
        squared(y, z + tf.stop_gradient(quantized - z))
    )
    train_op = _descent().minimize(loss, _step())
    counts = tf.reduce_sum(chosen, 0)[:, None]
    sums = tf.matmul(chosen, tf.stop_gradient(z), transpose_a=True)
    with tf.control_dependencies([train_op, sums]):
        target = (codes + sums) / (1 + counts)
        update = codes.assign(0.8 * codes + 0.2 * target)
    return loss, tf.group(train_op, update)


@_in(EXACT_OR_REFUSED)
def usage(y, z, mask):
    """An integer variable takes on the number of selected examples."""
    loss, words = _masked(y, z, mask), tf.cast(tf.reduce_sum(mask), tf.int64)
    train_op = _descent().minimize(loss, _step())
    return loss, tf.group(train_op, _state("usage", 0, tf.int64).assign(words))


@_in(EXACT_OR_REFUSED)
def queue(y, z, mask):
    """MoCo: the batch's outputs are stored for the next batch."""
    stored = _state("stored", np.ones([11, 3]))
    scores = tf.matmul(z, stored.read_value(), transpose_b=True)
    loss = tf.reduce_mean(tf.reduce_logsumexp(scores, 1)) + _masked(y, z, mask)
    with tf.control_dependencies([scores]):
        update = stored.assign(tf.stop_gradient(z[:11]))
    return loss, tf.group(_descent().minimize(loss, _step()), update)


@_in(EXACT_OR_REFUSED)
def rescaled_targets(y, z, mask):
    """PopArt: moving averages of the labels standardize them; the update comes first."""
    mean = _state("mean", [0, 0, 0])
    update = mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(y, 0))
    with tf.control_dependencies([update]):
        target = y - mean.read_value()
    loss = _masked(target, z, mask)
    return loss, _descent().minimize(loss, _step())


@_in(EXACT_OR_REFUSED)
def metric_of_the_loss(y, z, mask):
    loss = _masked(y, z, mask)
    _, update = v1.metrics.mean(loss)
    return loss, tf.group(_descent().minimize(loss, _step()), update)


@_in(EXACT_OR_REFUSED)
def normalized(y, x, mask):
    """Batch normalization, whose averages are updates of the train op."""
    hidden = tf.matmul(x, variable("first", 4, 5))
    hidden = v1.layers.batch_normalization(hidden, momentum=0.9, training=True)
    loss = _masked(y, tf.matmul(tf.nn.relu(hidden), variable("last", 5, 3)), mask)
    with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
        return loss, _descent().minimize(loss, _step())


@_in(EXACT_OR_REFUSED)
def private(y, x):
    """DP-SGD without noise: each example's gradient is clipped by itself."""
    z = tf.matmul(x, variable("weights", 4, 3))
    errors = 2 * (z - y)
    norms = tf.norm(x, axis=1) * tf.norm(errors, axis=1)
    factors = tf.minimum(1 / norms, tf.ones_like(norms))[:, None]
    gradient = tf.matmul(x, errors * factors, transpose_a=True) / number(y)
    return tf.reduce_mean(squared(y, z)), _apply([gradient])


@_in(EXACT_OR_REFUSED)
def by_hand(y, x):
    """Gradients without tf.gradients: there is nothing to intercept."""
    weights = variable("weights", 4, 3)
    error = tf.matmul(x, weights) - y
    gradient = tf.matmul(x, error, transpose_a=True) / number(y)
    with tf.control_dependencies([weights.assign_sub(0.1 * gradient)]):
        return tf.reduce_mean(error**2), _step().assign_add(1)
