"""Tiny model_fns with the traits of well-known TF1 training scripts.

Each is a whole training recipe: how gradients are computed and clipped, the optimizer,
the clock of its learning rate, and what else one run of the train op changes.
`SCRIPTS` maps a name to (model_fn, input_fn); every batch has 16 examples.
"""

import re

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

BATCH = 16
_STEPS = 20
_WORDS = [f"word{i}" for i in range(30)]


def _dataset(**arrays) -> tf.data.Dataset:
    labels = arrays.pop("labels")
    data = tf.data.Dataset.from_tensor_slices((arrays, labels))
    return data.batch(BATCH, drop_remainder=True).repeat()


def _variable(name: str, *shape: int) -> tf.Variable:
    """Returns a variable whose first value does not depend on the graph."""
    size = int(np.prod(shape))
    value = np.sin(np.arange(1, size + 1) * (1 + len(name))).reshape(shape)
    return v1.get_variable(name, initializer=(0.3 * value).astype(np.float32))


def _spec(mode, loss, train_op, **more):
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, **more)


def _tokens_input_fn():
    """Returns sequences of word numbers with lengths from 3 to 8, and classes."""
    random = np.random.default_rng(0)
    ids = random.integers(1, 30, [5 * BATCH, 8])
    lengths = random.integers(3, 9, len(ids))
    ids *= np.arange(8) < lengths[:, None]
    return _dataset(ids=ids, lengths=lengths, labels=(ids.sum(1) % 3).astype(np.int64))


def _repeated_input_fn():
    """Returns batches whose four quarters are equal, as are their statistics."""
    random = np.random.default_rng(2)
    x = random.normal(size=[5, 1, 4, 5]).astype(np.float32)
    x = np.tile(x, [1, 4, 1, 1]).reshape(-1, 5)
    return _dataset(x=x, labels=np.sin(x.sum(1, keepdims=True)).astype(np.float32))


def _encoder(features) -> tf.Tensor:
    """Returns [B, 8]: embedded words, attention over them and a layer on top."""
    with v1.variable_scope("bert/embeddings"):
        table = _variable("word_embeddings", 30, 8)
        hidden = tf.gather(table, features["ids"])  # [B, T, H]
        hidden += _variable("position_embeddings", 8, 8)
    for layer in range(2):
        with v1.variable_scope(f"bert/encoder/layer_{layer}"):
            mask = tf.cast(tf.equal(features["ids"], 0), tf.float32)[:, None]
            query = tf.tensordot(hidden, _variable("query/kernel", 8, 8), 1)
            scores = tf.matmul(query, hidden, transpose_b=True) - 1e4 * mask
            hidden += tf.matmul(tf.nn.softmax(scores), hidden)
            with v1.variable_scope("LayerNorm"):
                mean, variance = tf.nn.moments(hidden, [-1], keepdims=True)
                hidden = (hidden - mean) * tf.math.rsqrt(variance + 1e-6)
                hidden = hidden * _variable("gamma", 8) + _variable("beta", 8)
    with v1.variable_scope("bert/pooler"):
        return tf.tanh(tf.matmul(hidden[:, 0], _variable("kernel", 8, 8)))


def _classifier_loss(features, labels) -> tf.Tensor:
    logits = tf.matmul(_encoder(features), _variable("output_weights", 8, 3))
    log_probs = tf.nn.log_softmax(logits, axis=-1)
    per_example = -tf.reduce_sum(tf.one_hot(labels, 3) * log_probs, axis=-1)
    return tf.reduce_mean(per_example)


class Assigning(v1.train.Optimizer):
    """An optimizer that only has `apply_gradients`, with variables of its own."""

    def __init__(self, rate):
        super().__init__(False, type(self).__name__)
        self._rate = rate

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        del global_step
        assignments = []
        for gradient, variable in grads_and_vars:
            if gradient is None:
                continue
            m, v = (
                v1.get_variable(
                    f"{variable.op.name}/{slot}",
                    variable.shape,
                    trainable=False,
                    initializer=v1.zeros_initializer(),
                )
                for slot in ("adam_m", "adam_v")
            )
            next_m = tf.multiply(0.9, m) + tf.multiply(0.1, gradient)
            next_v = tf.multiply(0.999, v) + tf.multiply(0.001, tf.square(gradient))
            update = next_m / (tf.sqrt(next_v) + 1e-6)
            if not re.search("LayerNorm", variable.op.name):
                update += 0.01 * variable
            next_value = variable - self._rate * update
            assignments += [variable.assign(next_value)]
            assignments += [m.assign(next_m), v.assign(next_v)]
        return tf.group(*assignments, name=name)


def _warm_up_and_decay(step: tf.Tensor) -> tf.Tensor:
    rate = 1e-3
    decayed = v1.train.polynomial_decay(rate, step, _STEPS, 0.0)
    done = tf.cast(step, tf.float32) / 4.0
    return tf.where(done < 1.0, rate * done, decayed)


def _assigned_step(features, labels, mode):
    """google-research: tf.gradients, clip_by_global_norm(1.0), global_step.assign."""
    loss = _classifier_loss(features, labels)
    step = v1.train.get_or_create_global_step()
    # One read: the schedule must not race the assignment below.
    now = tf.identity(step.read_value())
    optimizer, variables = Assigning(_warm_up_and_decay(now)), v1.trainable_variables()
    gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.3)
    pairs = zip(gradients, variables, strict=True)
    train_op = optimizer.apply_gradients(pairs, global_step=step)
    return _spec(mode, loss, tf.group(train_op, [step.assign(now + 1)]))


class _Adafactor(v1.train.Optimizer):
    """Factored second moments, with a decay rate of the global step."""

    def __init__(self):
        super().__init__(False, "Adafactor")

    def _create_slots(self, var_list):
        for variable in var_list:
            shape = variable.shape.as_list()
            parts = [shape] if len(shape) < 2 else [shape[:-1], shape[1:]]
            for name, part in zip(("vr", "vc"), parts, strict=False):
                zeros = tf.zeros(part)
                self._get_or_make_slot(variable, zeros, name, "Adafactor")

    def _resource_apply_sparse(self, grad, handle, indices):
        shape = tf.constant(handle.shape.as_list(), indices.dtype)
        slices = tf.IndexedSlices(grad, indices, shape)
        return self._resource_apply_dense(tf.convert_to_tensor(slices), handle)

    def _resource_apply_dense(self, grad, handle):
        step = tf.cast(v1.train.get_or_create_global_step(), tf.float32)
        rate = 0.05 * tf.math.rsqrt(step + 1.0)
        decay = 1.0 - tf.pow(step + 1.0, -0.8)
        squared, updates = tf.square(grad) + 1e-30, []
        row = self.get_slot(handle, "vr")
        if grad.shape.rank < 2:
            moment = decay * row + (1.0 - decay) * squared
            updates.append(row.assign(moment))
        else:
            column = self.get_slot(handle, "vc")
            new_row = decay * row + (1.0 - decay) * tf.reduce_mean(squared, -1)
            new_column = decay * column + (1.0 - decay) * tf.reduce_mean(squared, 0)
            updates += [row.assign(new_row), column.assign(new_column)]
            moment = new_row[:, None] / tf.reduce_mean(new_row) * new_column[None]
        update = grad * tf.math.rsqrt(moment)
        update /= tf.maximum(1.0, tf.sqrt(tf.reduce_mean(tf.square(update))))
        return tf.group(*updates, handle.assign_sub(rate * update))


def _adafactor(features, labels, mode):
    """tensor2tensor: Adafactor, by minimize."""
    loss = _classifier_loss(features, labels)
    step = v1.train.get_or_create_global_step()
    return _spec(mode, loss, _Adafactor().minimize(loss, step))


def _tagging_input_fn():
    """Returns sentences of strings, their lengths, and a tag for each word."""
    random = np.random.default_rng(3)
    ids = random.integers(0, 30, [5 * BATCH, 6])
    lengths = random.integers(2, 7, len(ids))
    words = np.array(_WORDS)[ids]
    return _dataset(words=words, lengths=lengths, labels=ids % 3)


def _lstm(inputs: tf.Tensor, units: int) -> tf.Tensor:
    """Returns the outputs [B, T, H] of an LSTM in a tf.while_loop."""
    kernel = _variable("lstm/kernel", inputs.shape[2] + units, 4 * units)
    time, batch = tf.shape(inputs)[1], tf.shape(inputs)[0]
    zeros = tf.zeros([batch, units])
    outputs = tf.TensorArray(tf.float32, time)

    def step(t, cell, hidden, outputs):
        gates = tf.matmul(tf.concat([inputs[:, t], hidden], 1), kernel)
        i, j, f, o = tf.split(gates, 4, 1)
        cell = cell * tf.sigmoid(f + 1.0) + tf.sigmoid(i) * tf.tanh(j)
        hidden = tf.tanh(cell) * tf.sigmoid(o)
        return t + 1, cell, hidden, outputs.write(t, hidden)

    *_, outputs = tf.while_loop(
        lambda t, *_: t < time, step, (0, zeros, zeros, outputs)
    )
    return tf.transpose(outputs.stack(), [1, 0, 2])


def _crf_log_likelihood(scores, tags, lengths) -> tf.Tensor:
    """Returns the log-likelihood [B] of tags in a linear-chain CRF."""
    transitions = _variable("crf/transitions", 3, 3)
    mask = tf.sequence_mask(lengths, tf.shape(scores)[1], tf.float32)
    unary = tf.reduce_sum(scores * tf.one_hot(tags, 3), -1)
    pairs = tf.gather_nd(transitions, tf.stack([tags[:, :-1], tags[:, 1:]], -1))
    path = tf.reduce_sum(unary * mask, 1) + tf.reduce_sum(pairs * mask[:, 1:], 1)

    def step(alpha, inputs):
        score, is_word = inputs
        following = tf.reduce_logsumexp(alpha[:, :, None] + transitions, 1) + score
        return tf.where(is_word[:, None] > 0, following, alpha)

    over_time = tf.transpose(scores, [1, 0, 2])[1:], tf.transpose(mask)[1:]
    alphas = tf.scan(step, over_time, initializer=scores[:, 0])
    last = tf.concat([scores[None, :, 0], alphas], 0)[-1]
    return path - tf.reduce_logsumexp(last, 1)


def _tagger(features, labels, mode):
    """tf_ner: tables of words, an LSTM's while loop, a CRF, Adam, moving averages."""
    table = tf.lookup.StaticVocabularyTable(
        tf.lookup.KeyValueTensorInitializer(
            _WORDS[:20], tf.range(20, dtype=tf.int64), tf.string, tf.int64
        ),
        num_oov_buckets=1,
    )
    embedded = tf.gather(_variable("words", 21, 4), table.lookup(features["words"]))
    hidden = _lstm(embedded, 6)
    scores = tf.tensordot(hidden, _variable("tags", 6, 3), 1)
    likelihood = _crf_log_likelihood(scores, labels, features["lengths"])
    loss = tf.reduce_mean(-likelihood)
    optimizer = v1.train.AdamOptimizer(0.01)
    train_op = optimizer.minimize(loss, v1.train.get_or_create_global_step())
    average = tf.train.ExponentialMovingAverage(0.9)
    with tf.control_dependencies([train_op]):
        average_op = average.apply(v1.trainable_variables())
    return _spec(mode, loss, tf.group(train_op, average_op))


def _residual(features, labels, mode):
    """The official ResNet: batch normalization, weight decay, momentum, UPDATE_OPS."""
    hidden = tf.matmul(features["x"], _variable("in/kernel", 5, 8))
    for layer in range(2):
        normalized = v1.layers.batch_normalization(
            hidden, momentum=0.9, training=True, name=f"bn_{layer}"
        )
        kernel = _variable(f"layer_{layer}/kernel", 8, 8)
        hidden += tf.matmul(tf.nn.relu(normalized), kernel)
    predicted = tf.matmul(hidden, _variable("out/kernel", 8, 1))
    loss = tf.reduce_mean(tf.square(predicted - labels))
    kernels = [v for v in v1.trainable_variables() if "kernel" in v.name]
    loss += 1e-3 * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])
    step = v1.train.get_or_create_global_step()
    rate = v1.train.piecewise_constant(step, [5, 10], [0.02, 0.01, 0.005])
    optimizer = v1.train.MomentumOptimizer(rate, 0.9)
    pairs = optimizer.compute_gradients(loss)
    minimize_op = optimizer.apply_gradients(pairs, step)
    update_ops = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
    assert len(update_ops) == 4
    return _spec(mode, loss, tf.group(minimize_op, *update_ops))


def _window_by_hand(features, labels, mode):
    """A window of its own: every third batch applies the mean of three gradients."""
    loss = _classifier_loss(features, labels)
    step = v1.train.get_or_create_global_step()
    variables = v1.trainable_variables()
    sums = [
        v1.get_variable(
            f"{variable.op.name}/sum",
            variable.shape,
            initializer=v1.zeros_initializer(),
            trainable=False,
        )
        for variable in variables
    ]
    gradients = tf.gradients(loss, variables)
    pairs = list(zip(sums, map(tf.convert_to_tensor, gradients), strict=True))

    def add():
        return tf.group(*(total.assign_add(gradient) for total, gradient in pairs))

    def add_and_apply():
        with tf.control_dependencies([add()]):
            means, _ = tf.clip_by_global_norm([total / 3.0 for total in sums], 0.3)
            optimizer = v1.train.AdamOptimizer(_warm_up_and_decay(step.read_value()))
            update = optimizer.apply_gradients(zip(means, variables, strict=True))
        with tf.control_dependencies([update]):
            return tf.group(*(total.assign(tf.zeros_like(total)) for total in sums))

    window = tf.cond(tf.equal(step.read_value() % 3, 2), add_and_apply, add)
    with tf.control_dependencies([window]):
        return _spec(mode, loss, step.assign_add(1))


SCRIPTS = {
    "bert": (_assigned_step, _tokens_input_fn),
    "tensor2tensor": (_adafactor, _tokens_input_fn),
    "tf_ner": (_tagger, _tagging_input_fn),
    "resnet": (_residual, _repeated_input_fn),
    "window by hand": (_window_by_hand, _tokens_input_fn),
}
