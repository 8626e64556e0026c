"""Functions of TensorFlow 1's `tf.contrib.layers`, with its variables' names."""

import numbers

import tensorflow.compat.v1 as tf

# Standard deviation of a normal distribution that is cut off at two of them.
_TRUNCATED_STDDEV = 0.87962566103423978


def layer_norm(
    inputs,
    center: bool = True,
    scale: bool = True,
    activation_fn=None,
    reuse=None,
    variables_collections=None,
    outputs_collections=None,
    trainable: bool = True,
    begin_norm_axis: int = 1,
    begin_params_axis: int = -1,
    scope=None,
):
    """Layer normalization (Ba et al. 2016, https://arxiv.org/abs/1607.06450).

    `rule: gamma * (x - mean) / sqrt(variance + 1e-12) + beta`, 1e-3 in float16

    Args:
        inputs: Tensor of known rank, its axes from `begin_params_axis` on known.
        center: Whether to add `beta`.
        scale: Whether to multiply by `gamma`.
        activation_fn: Callable for the result, or None.
        reuse: As in `tf.variable_scope`.
        variables_collections: Collections of the variables besides the usual ones: a
            list, or a dictionary by "beta" and "gamma".
        outputs_collections: Collections for the result: a list or one name.
        trainable: Whether the variables are trained.
        begin_norm_axis: First axis of those over which mean and variance are taken.
        begin_params_axis: First axis of those that the variables have.
        scope: Name or variable scope; by default `LayerNorm`, made unique.

    Creates:
        `<scope>/beta`, zeros, and `<scope>/gamma`, ones, of the inputs' dtype.

    Returns:
        Tensor of the inputs' shape and dtype.

    Raises:
        ValueError: If a shape that is needed is unknown.
    """
    with tf.variable_scope(scope, "LayerNorm", [inputs], reuse=reuse):
        inputs = tf.convert_to_tensor(inputs)
        shape, rank = inputs.shape, inputs.shape.rank
        if rank is None:
            _refuse_shape(shape)
        axis = begin_norm_axis + (rank if begin_norm_axis < 0 else 0)
        if begin_params_axis >= rank or axis >= rank:
            raise ValueError(
                "`begin_params_axis` and `begin_norm_axis` must be axes of the inputs. "
                f"Received: {begin_params_axis} and {begin_norm_axis}, for shape "
                f"{shape}. Use smaller ones."
            )
        params_shape = shape[begin_params_axis:]
        if not params_shape.is_fully_defined():
            _refuse_shape(shape)

        def variable(name, initializer):
            own = variables_collections or ()
            own = own.get(name, ()) if isinstance(own, dict) else own
            usual = (tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES)
            return tf.get_variable(
                name,
                params_shape,
                inputs.dtype.base_dtype,
                initializer,
                trainable=trainable,
                collections=[*own, *usual],
            )

        beta = variable("beta", tf.zeros_initializer()) if center else None
        gamma = variable("gamma", tf.ones_initializer()) if scale else None
        mean, variance = tf.nn.moments(inputs, list(range(axis, rank)), keepdims=True)
        epsilon = 1e-3 if inputs.dtype == tf.float16 else 1e-12
        outputs = tf.nn.batch_normalization(
            inputs, mean, variance, beta, gamma, variance_epsilon=epsilon
        )
        outputs.set_shape(shape)
        if activation_fn is not None:
            outputs = activation_fn(outputs)
        for collection in _as_list(outputs_collections):
            tf.add_to_collection(collection, outputs)
        return outputs


def xavier_initializer(uniform: bool = True, seed: int | None = None, dtype=tf.float32):
    """Initializer of Glorot and Bengio (2010), uniform or truncated normal."""
    return variance_scaling_initializer(1.0, "FAN_AVG", uniform, seed, dtype)


def variance_scaling_initializer(
    factor: float = 2.0,
    mode: str = "FAN_IN",
    uniform: bool = False,
    seed: int | None = None,
    dtype=tf.float32,
):
    """Initializer with variance `factor / n`, or 1.3 times that before it is truncated.

    Args:
        factor: Number > 0.
        mode: "FAN_IN", "FAN_OUT" or "FAN_AVG", which `n` is.
        uniform: Uniform distribution, or a normal one that is truncated at two
            standard deviations.
        seed: Seed of the values.
        dtype: Type of the values, floating point.
    """
    # TensorFlow 2's class divides by the true deviation of a truncated normal.
    scale = factor if uniform else factor * 1.3 * _TRUNCATED_STDDEV**2
    distribution = "uniform" if uniform else "truncated_normal"
    return tf.initializers.variance_scaling(
        scale, mode.lower(), distribution, seed=seed, dtype=dtype
    )


def l1_regularizer(scale: float, scope=None):
    """Returns a function that returns `scale * sum(abs(weights))`."""
    _check_scale(scale)

    def l1(weights, name=None):
        with tf.name_scope(scope or name or "l1_regularizer"):
            return tf.cast(scale, weights.dtype) * tf.reduce_sum(tf.abs(weights))

    return l1 if scale else _no_loss


def l2_regularizer(scale: float, scope=None):
    """Returns a function that returns `scale * sum(weights**2) / 2`."""
    _check_scale(scale)

    def l2(weights, name=None):
        with tf.name_scope(scope or name or "l2_regularizer"):
            return tf.cast(scale, weights.dtype) * tf.nn.l2_loss(weights)

    return l2 if scale else _no_loss


def apply_regularization(regularizer, weights_list=None):
    """Returns the sum of the weights' penalties, and collects it as a loss.

    Args:
        regularizer: Function from a variable to a scalar Tensor or None.
        weights_list: Variables; by default the collection WEIGHTS.

    Raises:
        ValueError: If there are no weights.
    """
    weights = weights_list or tf.get_collection(tf.GraphKeys.WEIGHTS)
    if not weights:
        raise ValueError(
            "`weights_list`, or the collection WEIGHTS, must have a variable. "
            "Received: none. Pass the variables."
        )
    with tf.name_scope("get_regularization_penalty"):
        penalties = [regularizer(variable) for variable in weights]
        penalties = [penalty for penalty in penalties if penalty is not None]
        penalty = tf.add_n(penalties) if penalties else tf.constant(0.0)
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, penalty)
        return penalty


def _no_loss(weights, name=None):
    del weights, name


def _check_scale(scale) -> None:
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not is_number or isinstance(scale, numbers.Integral) or scale < 0:
        raise ValueError(
            f"`scale` must be a float >= 0. Received: {scale!r}. Use e.g. 1e-4."
        )


def _refuse_shape(shape):
    raise ValueError(
        "The inputs of layer_norm must have a known rank and known last axes. "
        f"Received: shape {shape}. Call `set_shape` first."
    )


def _as_list(value) -> list:
    return [value] if isinstance(value, str) else list(value or [])
