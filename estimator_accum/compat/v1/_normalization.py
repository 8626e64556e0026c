"""Normalization layers of TensorFlow 1's `tf.contrib.layers`."""

from collections.abc import Callable, Iterable

import tensorflow.compat.v1 as tf
from tensorflow.python.training import moving_averages

from estimator_accum.compat.v1 import _outputs
from estimator_accum.compat.v1._arg_scope import add_arg_scope
from estimator_accum.compat.v1._framework import model_variable


@add_arg_scope
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
    with tf.variable_scope(scope, "LayerNorm", [inputs], reuse=reuse) as opened:
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
            return model_variable(
                name,
                params_shape,
                inputs.dtype.base_dtype,
                initializer,
                None,
                trainable,
                collections_of(variables_collections, name),
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
        return _outputs.collect_named_outputs(outputs_collections, opened.name, outputs)


@add_arg_scope
def batch_norm(
    inputs,
    decay: float = 0.999,
    center: bool = True,
    scale: bool = False,
    epsilon: float = 0.001,
    activation_fn=None,
    param_initializers: dict | None = None,
    param_regularizers: dict | None = None,
    updates_collections=tf.GraphKeys.UPDATE_OPS,
    is_training=True,
    reuse=None,
    variables_collections=None,
    outputs_collections=None,
    trainable: bool = True,
    batch_weights=None,
    fused: bool | None = None,
    data_format: str = "NHWC",
    zero_debias_moving_mean: bool = False,
    scope=None,
    renorm: bool = False,
    renorm_clipping=None,
    renorm_decay: float = 0.99,
    adjustment=None,
):
    """Batch normalization (Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167).

    `rule: gamma * (x - mean) / sqrt(variance + epsilon) + beta`, with the batch's mean
    and variance in training and the moving ones elsewhere;
    `moving = decay * moving + (1 - decay) * batch's`

    The moving variance gets the batch's times `N / (N - 1)` from TensorFlow's fused
    operation, which is used for inputs of rank 2 and 4 unless `fused=False`.

    Args:
        inputs: Tensor [B, ..., C], or [B, C, ...] with `data_format="NCHW"`.
        decay: Number in [0, 1].
        center: Whether to add `beta`.
        scale: Whether to multiply by `gamma`.
        epsilon: Number > 0.
        activation_fn: Callable for the result, or None.
        param_initializers: Initializers by the variables' names.
        param_regularizers: Regularizers by "beta" and "gamma".
        updates_collections: Collections for the operations that move mean and
            variance, to be run with the train op; None runs them before the outputs.
        is_training: Truth value, or a scalar Tensor.
        reuse: As in `tf.variable_scope`.
        variables_collections: Collections of the variables besides the usual ones: a
            list, or a dictionary by names of variables.
        outputs_collections: Collections for the result: a list or one name.
        trainable: Whether `beta` and `gamma` are trained.
        batch_weights: Weights [B] of the examples in mean and variance, or None.
        fused: Whether TensorFlow's fused operation may be used; None is True.
        data_format: "NHWC" or "NCHW".
        zero_debias_moving_mean: Whether the moving mean starts without a bias to 0.
        scope: Name or variable scope; by default `BatchNorm`, made unique.
        renorm: False.
        renorm_clipping: Unused.
        renorm_decay: Unused.
        adjustment: None.

    Creates:
        `<scope>/beta`, `gamma`, `moving_mean` and `moving_variance`, [C].

    Returns:
        Tensor of the inputs' shape and dtype.

    Raises:
        ValueError: If a shape that is needed is unknown, or batch renormalization or an
            adjustment is asked for, which have no stand-in.
    """
    del renorm_clipping, renorm_decay
    if renorm or adjustment is not None:
        raise ValueError(
            "batch_norm must be without batch renormalization and adjustments, which "
            f"have no stand-in. Received: renorm={renorm}, adjustment={adjustment}. "
            "Leave them out, or run the script on TensorFlow 1.15."
        )
    checked_format(data_format)
    inputs = tf.convert_to_tensor(inputs)
    rank, shape = inputs.shape.rank, inputs.shape
    channels = _channels(shape, data_format)
    is_fused = fused is not False and batch_weights is None and rank in (2, 4)
    # TensorFlow 1 had three ways, with differences in what they create.
    needs_own_updates = (
        batch_weights is not None
        or zero_debias_moving_mean
        or updates_collections != tf.GraphKeys.UPDATE_OPS
    )
    is_core_layer = not needs_own_updates and not (is_fused and rank == 2)
    if not is_core_layer and not is_fused:
        param_regularizers = None
    dtype = inputs.dtype.base_dtype
    if is_fused or (is_core_layer and dtype == tf.float16):
        dtype = tf.float32
    with tf.variable_scope(scope, "BatchNorm", [inputs], reuse=reuse) as opened:

        def variable(name, initializer, **others):
            return model_variable(
                name,
                [channels],
                dtype,
                (param_initializers or {}).get(name, initializer),
                (param_regularizers or {}).get(name),
                collections=collections_of(variables_collections, name),
                **others,
            )

        names = [
            name for name, is_used in (("beta", center), ("gamma", scale)) if is_used
        ]
        learned, moving_mean, moving_variance = _make_variables(
            variable, reversed(names) if is_core_layer else names, trainable
        )
        normalize = _normalize_fused if is_fused else _normalize
        outputs, mean, variance = normalize(
            inputs,
            learned.get("beta"),
            learned.get("gamma"),
            (moving_mean, moving_variance),
            is_training,
            epsilon,
            data_format,
            batch_weights,
        )
        outputs = _with_updates(
            outputs,
            lambda: (
                _move(moving_mean, mean, decay, zero_debias_moving_mean),
                _move(moving_variance, variance, decay),
            ),
            (moving_mean, moving_variance),
            is_training,
            updates_collections,
        )
        outputs.set_shape(shape)
        if activation_fn is not None:
            outputs = activation_fn(outputs)
        return _outputs.collect_named_outputs(outputs_collections, opened.name, outputs)


def _channels(shape: tf.TensorShape, data_format: str) -> int:
    axis = 1 if data_format == "NCHW" else -1
    channels = None if shape.rank is None else shape.as_list()[axis]
    if channels is None:
        raise ValueError(
            "The inputs of batch_norm must have a known rank and number of channels. "
            f"Received: shape {shape}. Call `set_shape` first."
        )
    return channels


def _make_variables(make: Callable, names: Iterable[str], trainable: bool) -> tuple:
    """Returns (learned variables by name, moving mean, moving variance)."""
    zeros, ones = tf.zeros_initializer(), tf.ones_initializer()
    initializers = {"beta": zeros, "gamma": ones}
    learned = {
        name: make(name, initializers[name], trainable=trainable) for name in names
    }
    moving = {
        "trainable": False,
        "partitioner": None,
        "synchronization": tf.VariableSynchronization.ON_READ,
        "aggregation": tf.VariableAggregation.MEAN,
    }
    mean = make("moving_mean", zeros, **moving)
    return learned, mean, make("moving_variance", ones, **moving)


def _with_updates(outputs, update: Callable, moving, is_training, collections):
    """Returns the outputs, after the moving statistics if no collection gets these."""

    def outputs_after_update():
        with tf.control_dependencies(update()):
            return tf.identity(outputs)

    constant = _outputs.constant_value(is_training)
    if constant is not None and not constant:
        return outputs
    if collections is None:
        return _outputs.smart_cond(is_training, outputs_after_update, lambda: outputs)
    for moved in _outputs.smart_cond(is_training, update, lambda: moving):
        tf.add_to_collections(collections, moved)
    return outputs


def checked_format(data_format: str) -> str:
    """Returns the data format.

    Raises:
        ValueError: If it is neither "NHWC" nor "NCHW".
    """
    if data_format not in ("NHWC", "NCHW"):
        raise ValueError(
            f'`data_format` must be "NHWC" or "NCHW". Received: {data_format!r}. Use '
            '"NHWC".'
        )
    return data_format


def collections_of(variables_collections, name: str) -> list:
    """Returns the collections for the variable of that name, without the usual ones."""
    if isinstance(variables_collections, dict):
        variables_collections = variables_collections.get(name)
    return list(variables_collections or ())


def _normalize_fused(
    inputs, beta, gamma, moving, is_training, epsilon, data_format, batch_weights
):
    """Returns outputs, and the mean and variance for the moving ones."""
    del batch_weights  # None
    shape = inputs.shape
    channels = shape.as_list()[1 if data_format == "NCHW" else -1]
    images = inputs
    if shape.rank == 2:
        sides = [channels, 1, 1] if data_format == "NCHW" else [1, 1, channels]
        images = tf.reshape(inputs, [-1, *sides])
    arguments = (
        images,
        tf.ones([channels]) if gamma is None else gamma,
        tf.zeros([channels]) if beta is None else beta,
    )
    options = {"epsilon": epsilon, "data_format": data_format}
    outputs, mean, variance = _outputs.smart_cond(
        is_training,
        lambda: tf.nn.fused_batch_norm(*arguments, **options),
        lambda: tf.nn.fused_batch_norm(
            *arguments, mean=moving[0], variance=moving[1], is_training=False, **options
        ),
    )
    if shape.rank == 2:
        outputs = tf.reshape(outputs, tf.shape(inputs))
    return outputs, mean, variance


def _normalize(
    inputs, beta, gamma, moving, is_training, epsilon, data_format, batch_weights
):
    """Returns outputs, and the mean and variance for the moving ones."""
    rank = inputs.shape.rank
    channel_axis = 1 if data_format == "NCHW" else rank - 1
    axes = [axis for axis in range(rank) if axis != channel_axis]
    if batch_weights is None:
        mean, variance = tf.nn.moments(inputs, axes)
    else:
        weights = tf.reshape(batch_weights, [-1] + [1] * (rank - 1))
        mean, variance = tf.nn.weighted_moments(inputs, axes, weights)
    used = _outputs.smart_cond(is_training, lambda: (mean, variance), lambda: moving)
    parameters = [*used, beta, gamma]
    if data_format == "NCHW":
        sides = [1, -1] + [1] * (rank - 2)
        parameters = [p if p is None else tf.reshape(p, sides) for p in parameters]
    parameters = [p if p is None else tf.cast(p, inputs.dtype) for p in parameters]
    outputs = tf.nn.batch_normalization(inputs, *parameters, epsilon)
    return outputs, mean, variance


def _move(variable, value, decay: float, zero_debias: bool = False):
    """Returns the op `variable = decay * variable + (1 - decay) * value`."""
    if zero_debias:
        return moving_averages.assign_moving_average(
            variable, value, decay, zero_debias=True
        )
    difference = variable - tf.cast(value, variable.dtype)
    return variable.assign_sub(difference * (1.0 - decay))


def _refuse_shape(shape):
    raise ValueError(
        "The inputs of layer_norm must have a known rank and known last axes. "
        f"Received: shape {shape}. Call `set_shape` first."
    )
