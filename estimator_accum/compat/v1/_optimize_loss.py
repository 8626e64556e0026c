"""`optimize_loss` of TensorFlow 1's `tf.contrib.layers`."""

import tensorflow.compat.v1 as tf

from estimator_accum.compat.v1._learning import with_values

OPTIMIZER_CLS_NAMES = {
    "Adagrad": tf.train.AdagradOptimizer,
    "Adam": tf.train.AdamOptimizer,
    "Ftrl": tf.train.FtrlOptimizer,
    "Momentum": lambda learning_rate: tf.train.MomentumOptimizer(learning_rate, 0.9),
    "RMSProp": tf.train.RMSPropOptimizer,
    "SGD": tf.train.GradientDescentOptimizer,
}
OPTIMIZER_SUMMARIES = [
    "learning_rate",
    "loss",
    "gradients",
    "gradient_norm",
    "global_gradient_norm",
]


def optimize_loss(
    loss,
    global_step,
    learning_rate,
    optimizer,
    gradient_noise_scale: float | None = None,
    gradient_multipliers: dict | None = None,
    clip_gradients=None,
    learning_rate_decay_fn=None,
    update_ops=None,
    variables=None,
    name: str | None = None,
    summaries=None,
    colocate_gradients_with_ops: bool = False,
    increment_global_step: bool = True,
):
    """Returns the loss as a Tensor that, when it is run, updates the variables.

    Args:
        loss: Scalar Tensor.
        global_step: Variable that counts updates; None for the graph's.
        learning_rate: Float >= 0, scalar Tensor, or None. Of a float a variable
            `learning_rate` is made.
        optimizer: A key of OPTIMIZER_CLS_NAMES, an Optimizer, its class, or a function
            from the rate (without one: of nothing) to an Optimizer.
        gradient_noise_scale: Factor of truncated normal noise in the gradients, or None.
        gradient_multipliers: Factors by variables or their names, or None.
        clip_gradients: Largest global norm, a function of the (gradient, variable)
            pairs that returns such pairs, or None.
        learning_rate_decay_fn: Function from the rate and the global step to the rate,
            or None.
        update_ops: Operations to run before the loss; by default those of UPDATE_OPS.
        variables: Variables to train; by default all that can be.
        name: Name of the variable scope; by default `OptimizeLoss`, made unique.
        summaries: Names of OPTIMIZER_SUMMARIES; by default loss, learning rate and
            global norm.
        colocate_gradients_with_ops: As in `compute_gradients`.
        increment_global_step: Whether an update counts.

    Raises:
        ValueError: If an argument does not fit.
    """
    loss = tf.convert_to_tensor(loss)
    if global_step is None:
        global_step = tf.train.get_global_step()
    else:
        tf.train.assert_global_step(global_step)
    summaries = _checked_summaries(summaries)
    with tf.variable_scope(name, "OptimizeLoss", [loss, global_step]):
        if update_ops is None:
            update_ops = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
        if update_ops:
            with tf.control_dependencies(list(dict.fromkeys(update_ops))):
                loss = tf.identity(loss, "control_dependency")
        rate = _rate(learning_rate)
        if rate is not None and learning_rate_decay_fn is not None:
            rate = _decayed(rate, learning_rate_decay_fn, global_step, summaries)
        optimizer = _optimizer(optimizer, rate)
        if variables is None:
            variables = tf.trainable_variables()
        pairs = optimizer.compute_gradients(
            loss, variables, colocate_gradients_with_ops=colocate_gradients_with_ops
        )
        if gradient_noise_scale is not None:
            pairs = [(_with_noise(g, gradient_noise_scale), v) for g, v in pairs]
        if gradient_multipliers is not None:
            pairs = [(_multiplied(g, v, gradient_multipliers), v) for g, v in pairs]
        _summarize_norm(pairs, "gradient_norm", summaries)
        pairs = _clipped(pairs, clip_gradients)
        if "loss" in summaries:
            tf.summary.scalar("loss", loss)
        _summarize(pairs, summaries)
        if clip_gradients is not None:
            _summarize_norm(pairs, "clipped_gradient_norm", summaries)
        updates = optimizer.apply_gradients(
            pairs, global_step if increment_global_step else None, name="train"
        )
        with tf.control_dependencies([updates]):
            return tf.identity(loss, "control_dependency")


def _checked_summaries(summaries) -> list:
    if summaries is None:
        return ["loss", "learning_rate", "global_gradient_norm"]
    for summary in summaries:
        if summary not in OPTIMIZER_SUMMARIES:
            raise ValueError(
                f"`summaries` must be of {', '.join(OPTIMIZER_SUMMARIES)}. Received: "
                f"{summary}. Leave it out."
            )
    return list(summaries)


def _rate(learning_rate):
    """Returns the learning rate as a Tensor or variable, or None."""
    if learning_rate is None:
        return None
    if isinstance(learning_rate, float) and learning_rate >= 0:
        return tf.get_variable(
            "learning_rate",
            [],
            trainable=False,
            initializer=tf.constant_initializer(learning_rate),
        )
    if tf.is_tensor(learning_rate) and learning_rate.shape.rank == 0:
        return learning_rate
    raise ValueError(
        "`learning_rate` must be a float >= 0, a scalar Tensor or None. Received: "
        f"{learning_rate!r}. Write e.g. 0.1."
    )


def _decayed(rate, decay_fn, global_step, summaries: list):
    if global_step is None:
        raise ValueError(
            "`learning_rate_decay_fn` must have a global step. Received: none. "
            "Create it by tf.train.get_or_create_global_step()."
        )
    rate = decay_fn(rate, global_step)
    if "learning_rate" in summaries:
        tf.summary.scalar("learning_rate", rate)
    return rate


def _optimizer(optimizer, rate):
    """Returns an Optimizer for each of the four kinds of argument."""
    kind = tf.train.Optimizer
    if isinstance(optimizer, kind):
        return optimizer
    is_class = isinstance(optimizer, type) and issubclass(optimizer, kind)
    if isinstance(optimizer, str) or is_class:
        if rate is None:
            raise ValueError(
                "`learning_rate` must be given for an optimizer that is a name or a "
                f"class. Received: None, for {optimizer}. Pass it, or an Optimizer."
            )
        if is_class:
            return optimizer(learning_rate=rate)
        if optimizer in OPTIMIZER_CLS_NAMES:
            return OPTIMIZER_CLS_NAMES[optimizer](learning_rate=rate)
    elif callable(optimizer):
        result = optimizer() if rate is None else optimizer(rate)
        if isinstance(result, kind):
            return result
    raise ValueError(
        f"`optimizer` must be one of {', '.join(OPTIMIZER_CLS_NAMES)}, an Optimizer of "
        f"tf.train, its class, or a function that returns one. Received: {optimizer!r}. "
        "Use one of them."
    )


def _with_noise(gradient, scale: float):
    if gradient is None:
        return None
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    shape = gradient.dense_shape if is_sparse else gradient.shape
    return gradient + tf.truncated_normal(shape) * scale


def _multiplied(gradient, variable, factors: dict):
    by_variable = {
        key.ref() if isinstance(key, tf.Variable) else key: factor
        for key, factor in factors.items()
    }
    factor = by_variable.get(variable.ref(), by_variable.get(variable.name))
    if factor is None:
        return gradient
    return with_values(gradient, lambda values: values * tf.cast(factor, values.dtype))


def _clipped(pairs: list, clip_gradients) -> list:
    if clip_gradients is None:
        return pairs
    if isinstance(clip_gradients, float):
        gradients, variables = zip(*pairs, strict=True)
        gradients, _ = tf.clip_by_global_norm(gradients, clip_gradients)
        return list(zip(gradients, variables, strict=True))
    if callable(clip_gradients):
        return clip_gradients(pairs)
    raise ValueError(
        "`clip_gradients` must be a float, a function or None. Received: "
        f"{clip_gradients!r}. Write e.g. 1.0."
    )


def _summarize_norm(pairs: list, name: str, summaries: list) -> None:
    if "global_gradient_norm" in summaries or "gradient_norm" in summaries:
        norm = tf.global_norm([gradient for gradient, _ in pairs])
        tf.summary.scalar(f"global_norm/{name}", norm)


def _summarize(pairs: list, summaries: list) -> None:
    for gradient, variable in pairs:
        if gradient is None:
            continue
        values = getattr(gradient, "values", gradient)
        name = variable.name.replace(":", "_")
        if "gradients" in summaries:
            tf.summary.histogram(f"gradients/{name}", values)
        if "gradient_norm" in summaries:
            norm = tf.global_norm([values])
            tf.summary.scalar(f"gradient_norm/{name}", norm)
