"""Names of outputs in collections, as TensorFlow 1's `tf.contrib.layers.utils` has them."""

import collections

import tensorflow.compat.v1 as tf


def collect_named_outputs(collections, alias: str, outputs):
    """Adds a Tensor to collections under a name; returns it.

    Args:
        collections: One collection, a list of them, or None.
        alias: The name, e.g. "inception_v3/conv1".
        outputs: The Tensor.
    """
    if collections:
        append_tensor_alias(outputs, alias)
        tf.add_to_collections(collections, outputs)
    return outputs


def append_tensor_alias(tensor, alias: str):
    """Adds a name to those of a Tensor; returns it."""
    tensor.aliases = [*getattr(tensor, "aliases", ()), alias.removesuffix("/")]
    return tensor


def get_tensor_aliases(tensor) -> list[str]:
    """Returns the names of a Tensor; by default that of its operation."""
    return getattr(tensor, "aliases", None) or [tensor.name.removesuffix(":0")]


def convert_collection_to_dict(collection: str, clear_collection: bool = False):
    """Returns the Tensors of a collection by their names.

    Args:
        collection: The collection.
        clear_collection: Whether to empty it afterwards.
    """
    tensors = collections.OrderedDict(
        (alias, tensor)
        for tensor in tf.get_collection(collection)
        for alias in get_tensor_aliases(tensor)
    )
    if clear_collection:
        tf.get_default_graph().clear_collection(collection)
    return tensors


def constant_value(value):
    """Returns the value of a Python value or constant Tensor, else None."""
    if isinstance(value, tf.Variable):
        return None
    return tf.get_static_value(value) if tf.is_tensor(value) else value


def smart_cond(pred, fn1, fn2, name=None):
    """Returns `fn1()` or `fn2()`, without a `tf.cond` if `pred` is known.

    Args:
        pred: Truth value, or a scalar Tensor.
        fn1: Function for a true one.
        fn2: Function for a false one.
        name: Name of the `tf.cond`.
    """
    constant = constant_value(pred)
    if constant is None:
        return tf.cond(pred, fn1, fn2, name=name)
    return fn1() if constant else fn2()
