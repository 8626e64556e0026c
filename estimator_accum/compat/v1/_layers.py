"""Layers of TensorFlow 1's `tf.contrib.layers`, with its variables' names."""

import functools
import math
import numbers
import types
from collections.abc import Callable

import tensorflow.compat.v1 as tf

from estimator_accum.compat.v1 import _outputs
from estimator_accum.compat.v1._arg_scope import add_arg_scope
from estimator_accum.compat.v1._framework import model_variable
from estimator_accum.compat.v1._normalization import checked_format, collections_of
from estimator_accum.compat.v1._weights import xavier_initializer

_XAVIER = xavier_initializer()
_ZEROS = tf.zeros_initializer()
_RENAMED = {"kernel": "weights", "bias": "biases"}


@add_arg_scope
def fully_connected(
    inputs,
    num_outputs: int,
    activation_fn=tf.nn.relu,
    normalizer_fn=None,
    normalizer_params: dict | None = None,
    weights_initializer=_XAVIER,
    weights_regularizer=None,
    biases_initializer=_ZEROS,
    biases_regularizer=None,
    reuse=None,
    variables_collections=None,
    outputs_collections=None,
    trainable: bool = True,
    scope=None,
):
    """Dense layer.

    `rule: activation_fn(inputs @ weights + biases)`, or, with a normalizer,
    `activation_fn(normalizer_fn(inputs @ weights))`

    Args:
        inputs: Tensor [..., C], C known.
        num_outputs: Integer, the outputs' last axis.
        activation_fn: Callable, or None.
        normalizer_fn: Callable in place of biases, or None.
        normalizer_params: Its arguments.
        weights_initializer: Initializer of `weights`.
        weights_regularizer: Function from a variable to a scalar Tensor, or None.
        biases_initializer: Initializer of `biases`; None for none.
        biases_regularizer: Like `weights_regularizer`.
        reuse: As in `tf.variable_scope`.
        variables_collections: Collections of the variables besides the usual ones: a
            list, or a dictionary by "weights" and "biases".
        outputs_collections: Collections for the result: a list or one name.
        trainable: Whether the variables are trained.
        scope: Name or variable scope; by default `fully_connected`, made unique.

    Creates:
        `<scope>/weights`, [C, num_outputs], and `<scope>/biases`, [num_outputs].

    Returns:
        Tensor [..., num_outputs].

    Raises:
        TypeError: If `num_outputs` is not an integer.
        ValueError: If C is unknown.
    """
    arguments = locals()
    if not isinstance(num_outputs, int):
        raise TypeError(
            f"`num_outputs` must be an integer. Received: {num_outputs!r}. Use int()."
        )

    def multiply(inputs, weights):
        rank = inputs.shape.rank
        if rank == 2:
            return tf.matmul(inputs, weights)
        outputs = tf.tensordot(inputs, weights, [[rank - 1], [0]])
        outputs.set_shape([*inputs.shape[:-1], num_outputs])
        return outputs

    return _weighted("fully_connected", [], multiply, arguments)


@add_arg_scope
def convolution2d(
    inputs,
    num_outputs: int,
    kernel_size,
    stride=1,
    padding: str = "SAME",
    data_format: str | None = None,
    rate=1,
    activation_fn=tf.nn.relu,
    normalizer_fn=None,
    normalizer_params: dict | None = None,
    weights_initializer=_XAVIER,
    weights_regularizer=None,
    biases_initializer=_ZEROS,
    biases_regularizer=None,
    reuse=None,
    variables_collections=None,
    outputs_collections=None,
    trainable: bool = True,
    scope=None,
):
    """Convolution of images; `tf.contrib.layers.conv2d` is another name of it.

    Args:
        inputs: Tensor [B, height, width, C], or [B, C, height, width] with "NCHW".
        num_outputs: Number of filters.
        kernel_size: Height and width of a filter, or one integer for both.
        stride: Like `kernel_size`.
        padding: "SAME" or "VALID".
        data_format: "NHWC", its default, or "NCHW".
        rate: Dilation, like `kernel_size`; 1 where `stride` is not.

    The other arguments are those of `fully_connected`; the scope is `Conv` by default.

    Creates:
        `<scope>/weights`, [kernel height, width, C, num_outputs], and `<scope>/biases`,
        [num_outputs].

    Returns:
        Tensor of images with `num_outputs` channels.
    """
    arguments = locals()
    arguments["data_format"] = data_format = checked_format(data_format or "NHWC")

    def convolve(inputs, weights):
        return tf.nn.convolution(
            inputs,
            weights,
            padding.upper(),
            strides=_pair(stride),
            dilation_rate=_pair(rate),
            data_format=data_format,
            name="Conv2D",
        )

    return _weighted("Conv", _pair(kernel_size), convolve, arguments)


def _weighted(name: str, window: list, apply_weights: Callable, arguments: dict):
    """Returns a layer with weights [*window, C, num_outputs], and with biases.

    Args:
        name: Scope of the layer by default.
        window: First sides of the weights.
        apply_weights: Function of the inputs and the weights.
        arguments: Arguments of the public layer by name.
    """
    layer = types.SimpleNamespace(**{"data_format": "NHWC"} | arguments)
    options = {"reuse": layer.reuse, "custom_getter": _get_model_variable}
    with tf.variable_scope(layer.scope, name, [layer.inputs], **options) as opened:
        inputs = tf.convert_to_tensor(layer.inputs)
        sides = inputs.shape.as_list() if (inputs.shape.rank or 0) > 1 else [None] * 2
        channels = sides[1 if layer.data_format == "NCHW" else -1]
        if channels is None:
            raise ValueError(
                f"The inputs of {opened.name} must have a known number of channels. "
                f"Received: shape {inputs.shape}. Call `set_shape` first."
            )
        dtype = inputs.dtype.base_dtype

        def variable(name, shape, *kinds):
            weight = tf.get_variable(
                name, shape, dtype, *kinds, trainable=layer.trainable
            )
            for collection in collections_of(layer.variables_collections, name):
                if all(other is not weight for other in tf.get_collection(collection)):
                    tf.add_to_collection(collection, weight)
            return weight

        kinds = layer.weights_initializer, layer.weights_regularizer
        weights = variable("weights", [*window, channels, layer.num_outputs], *kinds)
        outputs = apply_weights(inputs, weights)
        if layer.normalizer_fn is not None:
            outputs = layer.normalizer_fn(outputs, **layer.normalizer_params or {})
        elif layer.biases_initializer is not None:
            kinds = layer.biases_initializer, layer.biases_regularizer
            biases = variable("biases", [layer.num_outputs], *kinds)
            outputs = tf.nn.bias_add(outputs, biases, layer.data_format, name="BiasAdd")
        if layer.activation_fn is not None:
            outputs = layer.activation_fn(outputs)
        collections = layer.outputs_collections
        return _outputs.collect_named_outputs(collections, opened.name, outputs)


def _get_model_variable(getter, name, *arguments, **others):
    """Gets every variable of a layer and of its callees (a custom getter)."""
    *scopes, last = name.split("/")
    name = "/".join([*scopes, _RENAMED.get(last, last)])
    names = ("initializer", "regularizer", "trainable", "collections")
    names += ("caching_device", "partitioner", "use_resource")
    names += ("synchronization", "aggregation", "shape", "dtype")
    kept = {key: others[key] for key in names if key in others}
    return model_variable(name, *arguments, **kept, custom_getter=getter)


def _pooling(pool: Callable, name: str, scope_name: str, what: str) -> Callable:
    """Returns the stand-in for a pooling layer."""

    def pool2d(
        inputs,
        kernel_size,
        stride=2,
        padding: str = "VALID",
        data_format: str = "NHWC",
        outputs_collections=None,
        scope=None,
    ):
        data_format = checked_format(data_format)

        def of_images(pair):
            return [1, 1, *pair] if data_format == "NCHW" else [1, *pair, 1]

        with tf.name_scope(scope, scope_name, [inputs]) as opened:
            outputs = pool(
                tf.convert_to_tensor(inputs),
                of_images(_pair(kernel_size)),
                of_images(_pair(stride)),
                padding.upper(),
                data_format,
            )
            return _outputs.collect_named_outputs(outputs_collections, opened, outputs)

    pool2d.__name__ = pool2d.__qualname__ = name
    pool2d.__doc__ = f"""{what} of each window of images.

    Args:
        inputs: Tensor [B, height, width, C], or [B, C, height, width] with "NCHW".
        kernel_size: Height and width of a window, or one integer for both.
        stride: Like `kernel_size`.
        padding: "SAME" or "VALID".
        data_format: "NHWC" or "NCHW".
        outputs_collections: Collections for the result: a list or one name.
        scope: Name scope; by default `{scope_name}`.
    """
    return add_arg_scope(pool2d)


max_pool2d = _pooling(tf.nn.max_pool, "max_pool2d", "MaxPool2D", "Largest value")
avg_pool2d = _pooling(tf.nn.avg_pool, "avg_pool2d", "AvgPool2D", "Mean")


@add_arg_scope
def dropout(
    inputs,
    keep_prob=0.5,
    noise_shape=None,
    is_training=True,
    outputs_collections=None,
    scope=None,
    seed: int | None = None,
):
    """Inputs with some elements replaced by 0, and the others divided by `keep_prob`.

    Args:
        inputs: Tensor of floating point.
        keep_prob: Probability that an element is kept: a number or scalar Tensor.
        noise_shape: Shape of the random choices, or None.
        is_training: Truth value or a scalar Tensor; without it nothing is replaced.
        outputs_collections: Collections for the result: a list or one name.
        scope: Name or variable scope; by default `Dropout`, made unique.
        seed: Seed of the choices.
    """
    with tf.variable_scope(scope, "Dropout", [inputs]) as opened:
        inputs = tf.convert_to_tensor(inputs)
        outputs = _outputs.smart_cond(
            is_training,
            lambda: tf.nn.dropout(
                inputs, rate=1 - keep_prob, noise_shape=noise_shape, seed=seed
            ),
            lambda: tf.identity(inputs),
        )
        return _outputs.collect_named_outputs(outputs_collections, opened.name, outputs)


@add_arg_scope
def flatten(inputs, outputs_collections=None, scope=None):
    """Inputs [B, ...] as [B, N].

    Args:
        inputs: Tensor of rank >= 2.
        outputs_collections: Collections for the result: a list or one name.
        scope: Name scope; by default `Flatten`.
    """
    with tf.name_scope(scope, "Flatten", [inputs]) as opened:
        inputs = tf.convert_to_tensor(inputs)
        outputs = tf.reshape(inputs, [tf.shape(inputs)[0], -1])
        sides = inputs.shape[1:]
        if sides.is_fully_defined():
            outputs.set_shape([inputs.shape[0], math.prod(sides.as_list())])
        return _outputs.collect_named_outputs(outputs_collections, opened, outputs)


@add_arg_scope
def one_hot_encoding(
    labels,
    num_classes: int,
    on_value=1.0,
    off_value=0.0,
    outputs_collections=None,
    scope=None,
):
    """Labels [B] as [B, num_classes], `on_value` at the label, `off_value` elsewhere."""
    with tf.name_scope(scope, "OneHotEncoding", [labels, num_classes]) as opened:
        labels = tf.convert_to_tensor(labels)
        outputs = tf.one_hot(labels, num_classes, on_value, off_value)
        return _outputs.collect_named_outputs(outputs_collections, opened, outputs)


@add_arg_scope
def softmax(logits, scope=None):
    """Probabilities over the last axis of logits of rank >= 2."""
    with tf.variable_scope(scope, "softmax", [logits]):
        return tf.nn.softmax(logits)


def embed_sequence(
    ids,
    vocab_size: int | None = None,
    embed_dim: int | None = None,
    unique: bool = False,
    initializer=None,
    regularizer=None,
    trainable: bool = True,
    scope=None,
    reuse=None,
):
    """Embeddings [..., embed_dim] of ids.

    Args:
        ids: Tensor of integers in [0, vocab_size).
        vocab_size: Number of embeddings; None where they are reused.
        embed_dim: Size of each; None where they are reused.
        unique: Whether an id that occurs several times is looked up once.
        initializer: Initializer of the embeddings, or None for the scope's.
        regularizer: Function from a variable to a scalar Tensor, or None.
        trainable: Whether the embeddings are trained.
        scope: Name or variable scope; by default `EmbedSequence`, made unique.
        reuse: As in `tf.variable_scope`.

    Creates:
        `<scope>/embeddings`, [vocab_size, embed_dim].

    Raises:
        ValueError: If a size is missing for new embeddings.
    """
    if not reuse and not (vocab_size and embed_dim):
        raise ValueError(
            "`vocab_size` and `embed_dim` must be given for new embeddings. Received: "
            f"{vocab_size} and {embed_dim}. Pass them, or reuse=True."
        )
    with tf.variable_scope(scope, "EmbedSequence", [ids], reuse=reuse):
        is_known = vocab_size is not None and embed_dim is not None
        embeddings = model_variable(
            "embeddings",
            [vocab_size, embed_dim] if is_known else None,
            initializer=initializer,
            regularizer=regularizer,
            trainable=trainable,
        )
        if not unique:
            return tf.nn.embedding_lookup(embeddings, ids)
        with tf.name_scope("EmbeddingLookupUnique"):
            ids = tf.convert_to_tensor(ids)
            different, where = tf.unique(tf.reshape(ids, [-1]))
            rows = tf.gather(tf.nn.embedding_lookup(embeddings, different), where)
            shape = tf.concat([tf.shape(ids), tf.shape(rows)[1:]], axis=0)
            outputs = tf.reshape(rows, shape)
            outputs.set_shape(ids.shape.concatenate(rows.shape[1:]))
            return outputs


def repeat(inputs, repetitions: int, layer, *args, **kwargs):
    """A layer applied again and again, in the scopes `<scope>/<scope>_1`, ...

    Args:
        inputs: Tensor.
        repetitions: Number of applications.
        layer: Function `layer(inputs, *args, **kwargs, scope=scope)`.
        *args: Further arguments of the layer.
        **kwargs: The same; `scope` is by default the layer's name.
    """
    return _applied("Repeat", "repeat", inputs, layer, [args] * repetitions, kwargs)


def stack(inputs, layer, stack_args, **kwargs):
    """Like `repeat`, with other arguments at each application.

    Args:
        inputs: Tensor.
        layer: Function `layer(inputs, *arguments, **kwargs, scope=scope)`.
        stack_args: List with the arguments of each application, or its only argument.
        **kwargs: Further arguments of all.

    Raises:
        TypeError: If `stack_args` is neither a list nor a tuple.
    """
    if not isinstance(stack_args, (list, tuple)):
        raise TypeError(
            f"`stack_args` must be a list. Received: {stack_args!r}. Write [32, 64]."
        )
    arguments = [a if isinstance(a, (list, tuple)) else [a] for a in stack_args]
    return _applied("Stack", "stack", inputs, layer, arguments, kwargs)


def _applied(scope_name, nameless, inputs, layer, arguments, others):
    scope = others.pop("scope", None)
    with tf.variable_scope(scope, scope_name, [inputs]):
        function = getattr(layer, "func", layer)  # of a functools.partial
        prefix = scope or getattr(layer, "__name__", None)
        prefix = prefix or getattr(function, "__name__", nameless)
        outputs = tf.convert_to_tensor(inputs)
        for i, more in enumerate(arguments, 1):
            outputs = layer(outputs, *more, scope=f"{prefix}_{i}", **others)
        return outputs


def _pair(value) -> list[int]:
    if isinstance(value, numbers.Integral):
        return [int(value)] * 2
    return [int(number) for number in value]


conv2d = convolution2d
linear = functools.partial(fully_connected, activation_fn=None)
relu = functools.partial(fully_connected, activation_fn=tf.nn.relu)
relu6 = functools.partial(fully_connected, activation_fn=tf.nn.relu6)
elu = functools.partial(fully_connected, activation_fn=tf.nn.elu)
