"""Results of small graphs of `tf.contrib.layers`.

`python tests/helpers/models/contrib_layers.py` prints the table RECORDED of
tests/estimator_accum/compat/v1/test_against_tensorflow_1.py. It needs TensorFlow 1.15
on Python 3.7, whose syntax this file therefore keeps to.
"""

import textwrap

import numpy as np

IMAGES = np.sin(np.arange(2 * 6 * 5 * 3)).reshape([2, 6, 5, 3])
ROWS = np.sin(np.arange(4 * 3) + 0.5).reshape([4, 3])


def _cases(tf, layers, framework):
    """Returns functions from (images, rows) to a Tensor by their names."""
    l2 = layers.l2_regularizer(0.1)

    def conv_with_norm(images, rows):
        outer = framework.arg_scope(
            [layers.conv2d, layers.fully_connected],
            normalizer_fn=layers.batch_norm,
            weights_regularizer=l2,
            variables_collections={"weights": ["ours"]},
            outputs_collections="ends",
        )
        with outer, framework.arg_scope([layers.batch_norm], decay=0.9, scale=True):
            outputs = layers.conv2d(images, 4, 3, stride=2, scope="first")
            outputs = layers.conv2d(outputs, 2, [2, 1], padding="VALID")
            return layers.fully_connected(layers.flatten(outputs), 3)

    def shared(images, rows):
        once = layers.fully_connected(rows, 3, weights_regularizer=l2, scope="both")
        return once + layers.fully_connected(
            rows, 3, weights_regularizer=l2, reuse=True, scope="both"
        )

    def scopes_regularizer(images, rows):
        with tf.variable_scope("outer", regularizer=l2):
            return layers.fully_connected(rows, 2, activation_fn=None)

    def own_normalizer(images, rows):
        def normalize(inputs, power):
            return inputs**power * tf.get_variable("bias", [2])

        return layers.fully_connected(
            rows, 2, normalizer_fn=normalize, normalizer_params={"power": 2}
        )

    def sequences(unique):
        def embed(images, rows):
            ids = tf.constant([[3, 1, 3], [0, 1, 3]])
            embedded = layers.embed_sequence(ids, 4, 2, unique, regularizer=l2)
            return tf.identity(embedded, "outputs")

        return embed

    def normalized(**arguments):
        def normalize(images, rows):
            inputs = rows if arguments.pop("rank", 4) == 2 else images
            if arguments.get("is_training") == "fed":
                arguments["is_training"] = tf.placeholder_with_default(True, [])
            return tf.identity(layers.batch_norm(inputs, **arguments), "outputs")

        return normalize

    def optimized(**arguments):
        def optimize(images, rows):
            with tf.variable_scope("w"):
                outputs = layers.fully_connected(
                    rows, 1, None, biases_initializer=None, weights_regularizer=l2
                )
                outputs = layers.batch_norm(outputs, scale=True)
            loss = tf.reduce_mean(
                (outputs - tf.reduce_sum(rows, 1, keepdims=True)) ** 2
            )
            step = tf.train.get_or_create_global_step()
            return layers.optimize_loss(loss, step, **arguments)

        return optimize

    def pooled(pool, *arguments, **others):
        return lambda images, rows: getattr(layers, pool)(images, *arguments, **others)

    def dense(num_outputs, **others):
        return lambda images, rows: layers.fully_connected(rows, num_outputs, **others)

    def conv(*arguments, **others):
        return lambda images, rows: layers.conv2d(images, *arguments, **others)

    def initialized(initializer, shape):
        return lambda images, rows: initializer(shape, tf.float32)

    def penalized(regularizer):
        return lambda images, rows: regularizer(tf.get_variable("w", [3, 2]))

    weights = [0.5, 2.0]
    xavier, scaling = layers.xavier_initializer, layers.variance_scaling_initializer
    return {
        "dense": dense(2),
        "dense without biases": dense(2, biases_initializer=None, trainable=False),
        "dense of images": lambda images, rows: layers.fully_connected(
            images, 2, activation_fn=tf.nn.tanh, biases_regularizer=l2, scope="s"
        ),
        "shared dense": shared,
        "scope's regularizer": scopes_regularizer,
        "own normalizer": own_normalizer,
        "conv": conv(2, 3),
        "conv, strides": conv(2, [3, 2], stride=[2, 1], padding="VALID", scope="s"),
        "conv, rate": conv(2, 3, rate=2, activation_fn=None),
        "conv with norm": conv_with_norm,
        "max_pool2d": pooled("max_pool2d", 2),
        "max_pool2d, same": pooled("max_pool2d", [3, 2], stride=1, padding="SAME"),
        "avg_pool2d": pooled("avg_pool2d", [2, 2]),
        "avg_pool2d, same": pooled("avg_pool2d", 3, stride=[2, 2], padding="SAME"),
        "dropout": lambda images, rows: tf.identity(
            layers.dropout(rows, 0.7, seed=2), "outputs"
        ),
        "dropout, no training": lambda images, rows: layers.dropout(
            rows, is_training=False
        ),
        "norm": normalized(),
        "norm of rows": normalized(rank=2, scale=True),
        "norm, not fused": normalized(fused=False, scale=True, decay=0.5),
        "norm, updates at once": normalized(updates_collections=None, decay=0.5),
        "norm of rows, updates at once": normalized(
            rank=2, updates_collections=None, fused=False, decay=0.5
        ),
        "norm, no training": normalized(is_training=False, activation_fn=tf.nn.relu),
        "norm of rows, no training": normalized(rank=2, is_training=False),
        "norm, training is fed": normalized(is_training="fed", decay=0.5),
        "norm of rows, training is fed": normalized(
            rank=2, is_training="fed", updates_collections=None, decay=0.5
        ),
        "norm, weights": normalized(batch_weights=weights, decay=0.5),
        "norm without a bias to 0": normalized(zero_debias_moving_mean=True, decay=0.5),
        "norm, parameters": normalized(
            param_initializers={"beta": tf.ones_initializer()},
            param_regularizers={"beta": l2},
            variables_collections={"beta": ["ours"], "moving_mean": ["ours"]},
        ),
        "layer_norm": lambda images, rows: layers.layer_norm(images),
        "embeddings": sequences(False),
        "unique embeddings": sequences(True),
        "one_hot": lambda images, rows: layers.one_hot_encoding([2, 0], 3, 2.0, 0.5),
        "softmax": lambda images, rows: tf.identity(layers.softmax(images), "outputs"),
        "repeat": lambda images, rows: layers.repeat(images, 2, layers.conv2d, 3, 2),
        "stack": lambda images, rows: layers.stack(
            rows, layers.fully_connected, [2, 3], activation_fn=tf.nn.tanh, scope="fc"
        ),
        "optimize_loss, SGD": optimized(learning_rate=0.1, optimizer="SGD"),
        "optimize_loss, Momentum": optimized(
            learning_rate=0.1,
            optimizer="Momentum",
            clip_gradients=0.5,
            gradient_multipliers={"w/fully_connected/weights:0": 3.0},
            learning_rate_decay_fn=lambda rate, step: (
                rate / tf.cast(step + 2, tf.float32)
            ),
            summaries=["loss", "gradient_norm", "gradients", "learning_rate"],
        ),
        "optimize_loss, Adam": optimized(
            learning_rate=None,
            optimizer=lambda: tf.train.AdamOptimizer(0.1),
            clip_gradients=lambda pairs: [(2.0 * g, v) for g, v in pairs],
            update_ops=[],
            increment_global_step=False,
            name="opt",
        ),
        "xavier": initialized(xavier(seed=3), [4, 5]),
        "xavier, normal": initialized(xavier(uniform=False, seed=3), [2, 3, 4, 5]),
        "scaling": initialized(scaling(seed=3), [4, 5]),
        "scaling, vector": initialized(scaling(1.0, "FAN_OUT", True, seed=3), [7]),
        "l1": penalized(layers.l1_regularizer(0.3)),
        "l1 and l2": penalized(layers.l1_l2_regularizer(0.3, 0.5)),
        "sum": penalized(layers.sum_regularizer([l2, None, l2])),
        "apply_regularization": lambda images, rows: layers.apply_regularization(
            l2, [tf.get_variable("w", [2]), tf.get_variable("x", [3])]
        ),
    }


def names(tf, layers, framework):
    """Returns the names of the graphs."""
    return sorted(_cases(tf, layers, framework))


def record(name, tf, layers, framework):
    """Returns (names, numbers) of one graph.

    Args:
        name: Its name.
        tf: TensorFlow 1's API.
        layers: `tf.contrib.layers`.
        framework: `tf.contrib.framework`.

    Returns:
        Names: of all variables, those that are not trained with "-" and those outside
        of the model with "*" behind them, then of the output, and how many there are
        in each other collection. Numbers: one each for the output, for the sum of the
        losses in collections, for each gradient, and for each variable that two runs
        with the updates change.
    """
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        images = tf.placeholder(tf.float32, [None, 6, 5, 3], "images")
        rows = tf.placeholder(tf.float32, [None, 3], "rows")
        outputs = _cases(tf, layers, framework)[name](images, rows)
        losses = tf.losses.get_regularization_losses()
        variables, trained = tf.global_variables(), tf.trainable_variables()
        in_model = tf.model_variables()

        def is_in(variable, variables):
            return any(variable is other for other in variables)

        marks = [
            v.op.name + "-" * (not is_in(v, trained)) + "*" * (not is_in(v, in_model))
            for v in variables
        ]
        counts = {
            key: len(tf.get_collection(key))
            for key in ("regularization_losses", "update_ops", "ours", "ends")
            + ("summaries",)
        }
        total = tf.reduce_sum(outputs * _ramp(outputs.shape)) + sum(losses)
        gradients = tf.gradients(total, trained)
        fetches = [g for g in gradients if g is not None]
        updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for i, variable in enumerate(variables):
                if is_in(variable, trained + in_model):
                    before = session.run(variable)
                    is_random = before.min() != before.max()
                    some = np.cos(np.arange(before.size) + i).reshape(before.shape)
                    # TensorFlow 1's seeds without a number are not today's.
                    before = 0.25 * some + (0.0 if is_random else before)
                    variable.load(before, session)
            feeds = {images: IMAGES, rows: ROWS}
            before = session.run(variables)
            numbers = [digest(a) for a in session.run([outputs, losses], feeds)[:1]]
            numbers += [float(sum(session.run(losses, feeds)))]
            numbers += [digest(a) for a in session.run(fetches, feeds)]
            session.run([outputs, updates], feeds)
            session.run([outputs, updates], feeds)
            for old, new in zip(before, session.run(variables)):
                if not np.array_equal(old, new):
                    numbers.append(digest(new))
        kept = [f"{key} {count}" for key, count in sorted(counts.items()) if count]
        return " ".join(marks + [outputs.name] + kept), numbers


def _ramp(shape):
    sides = [side for side in shape.as_list() if side]
    return np.cos(np.arange(int(np.prod(sides)))).reshape(sides).astype(np.float32)


def digest(value):
    """Returns one number that another value, or another order, would change."""
    value = getattr(value, "values", value)
    flat = np.asarray(value, np.float64).ravel()
    return float(np.dot(flat, np.cos(np.arange(flat.size)) + 1.5))


def _print_table():
    import tensorflow as tf

    layers, framework = tf.contrib.layers, tf.contrib.framework
    print("RECORDED = {")
    for name in names(tf, layers, framework):
        text, numbers = record(name, tf, layers, framework)
        rounded = " ".join(f"{number:.6g}" for number in numbers)
        lines = textwrap.wrap(text, 68, drop_whitespace=False, break_on_hyphens=False)
        print(f"{name!r}: (({' '.join(map(repr, lines))}), {rounded!r}),")
    print("}")


if __name__ == "__main__":
    _print_table()
