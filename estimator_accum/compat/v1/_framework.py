"""Functions of TensorFlow 1's `tf.contrib.framework` that newer ones lack."""

import logging

import numpy as np
import tensorflow.compat.v1 as tf

from estimator_accum.compat.v1._arg_scope import add_arg_scope


@add_arg_scope
def variable(
    name: str,
    shape=None,
    dtype=None,
    initializer=None,
    regularizer=None,
    trainable: bool = True,
    collections=None,
    caching_device=None,
    device=None,
    partitioner=None,
    custom_getter=None,
    use_resource=None,
    synchronization=tf.VariableSynchronization.AUTO,
    aggregation=tf.VariableAggregation.NONE,
):
    """Returns the variable of that name, as `tf.get_variable` does.

    Args:
        device: Device of the variable, or None.
        custom_getter: Function to call in place of `tf.get_variable`, or None.

    The other arguments are those of `tf.get_variable`.
    """
    arguments = locals()
    del arguments["name"], arguments["device"], arguments["custom_getter"]
    getter = tf.get_variable
    if custom_getter is not None:
        getter, arguments["reuse"] = custom_getter, tf.get_variable_scope().reuse
    collections = dict.fromkeys(collections or [tf.GraphKeys.GLOBAL_VARIABLES])
    with tf.device(device or ""):
        return getter(name, **arguments | {"collections": list(collections)})


@add_arg_scope
def model_variable(
    name: str,
    shape=None,
    dtype=tf.float32,
    initializer=None,
    regularizer=None,
    trainable: bool = True,
    collections=None,
    *arguments,
    **others,
):
    """Returns a `variable` that is also in the collection MODEL_VARIABLES."""
    usual = (tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.MODEL_VARIABLES)
    return variable(
        name,
        shape,
        dtype,
        initializer,
        regularizer,
        trainable,
        [*(collections or ()), *usual],
        *arguments,
        **others,
    )


def get_variables(scope=None, suffix: str | None = None, collection: str | None = None):
    """Returns the variables of a collection whose names match.

    Args:
        scope: Beginning of the name, a regular expression, or a variable scope.
        suffix: End of the name.
        collection: Key of the collection, GLOBAL_VARIABLES by default.
    """
    scope = getattr(scope, "name", scope)
    if suffix is not None:
        scope = f"{scope or ''}.*{suffix}{'' if ':' in suffix else ':'}"
    return tf.get_collection(collection or tf.GraphKeys.GLOBAL_VARIABLES, scope)


def get_trainable_variables(scope=None, suffix: str | None = None):
    """Returns the trainable variables whose names match; see `get_variables`."""
    return get_variables(scope, suffix, tf.GraphKeys.TRAINABLE_VARIABLES)


def get_model_variables(scope=None, suffix: str | None = None):
    """Returns the model variables whose names match; see `get_variables`."""
    return get_variables(scope, suffix, tf.GraphKeys.MODEL_VARIABLES)


def get_variables_to_restore(include=None, exclude=None) -> list:
    """Returns all variables, or those of scopes, without those of other scopes.

    Args:
        include: List of scopes; None for all variables.
        exclude: List of scopes, or None.
    """
    included = [v for scope in include or [None] for v in get_variables(scope)]
    excluded = {v.name for scope in exclude or [] for v in get_variables(scope)}
    return [variable for variable in included if variable.name not in excluded]


def assign_from_checkpoint(model_path, var_list, ignore_missing_vars: bool = False):
    """Makes the op that assigns values of a checkpoint, and the values to feed.

    Args:
        model_path: Path of the checkpoint.
        var_list: Variables, or a dictionary from names in the checkpoint to variables.
        ignore_missing_vars: Whether a variable that the checkpoint lacks is left as it
            is, with a warning.

    Returns:
        (op, feed_dict) for `session.run(op, feed_dict)`.

    Raises:
        ValueError: If the checkpoint lacks a variable, or has it in another size.
    """
    reader = tf.train.load_checkpoint(model_path)
    variables = _by_name(var_list)
    missing = [name for name in variables if not reader.has_tensor(name)]
    if missing and not ignore_missing_vars:
        raise ValueError(
            "The checkpoint must have all variables. Received: "
            f"{model_path} without {', '.join(missing)}. Leave them out, or pass "
            "ignore_missing_vars=True."
        )
    _warn_of(missing, model_path)
    return assign_from_values(
        {
            variable: reader.get_tensor(name)
            for name, variable in variables.items()
            if name not in missing
        }
    )


def assign_from_checkpoint_fn(
    model_path,
    var_list,
    ignore_missing_vars: bool = False,
    reshape_variables: bool = False,
):
    """Returns a function from a session that restores variables from a checkpoint.

    Args:
        model_path: Path of the checkpoint.
        var_list: Variables, or a dictionary from names in the checkpoint to variables.
        ignore_missing_vars: Whether a variable that the checkpoint lacks is left as it
            is, with a warning.
        reshape_variables: Whether a value of the same size in another shape is taken.

    Returns:
        The function; None if no variable is left.

    Raises:
        ValueError: If `var_list` is empty.
    """
    if not var_list:
        raise ValueError(
            "`var_list` must have a variable. Received: none. Pass the variables to "
            "restore."
        )
    variables = _by_name(var_list)
    if ignore_missing_vars:
        reader = tf.train.load_checkpoint(model_path)
        missing = [name for name in variables if not reader.has_tensor(name)]
        _warn_of(missing, model_path)
        variables = {n: v for n, v in variables.items() if n not in missing}
    if not variables:
        return None
    saver = tf.train.Saver(variables, reshape=reshape_variables)
    return lambda session: saver.restore(session, model_path)


def assign_from_values(values: dict):
    """Makes the op that assigns arrays to variables, and its feed_dict.

    Args:
        values: Dictionary from variables, or their names, to arrays.

    Returns:
        (op, feed_dict) for `session.run(op, feed_dict)`.

    Raises:
        ValueError: If a variable is unknown, or has another size than its array.
    """
    assigns, feeds = [], {}
    by_name = {v.op.name: v for v in tf.global_variables()}
    for key, value in values.items():
        variable = by_name.get(key) if isinstance(key, str) else key
        value = np.asarray(value)
        shape = tuple(variable.shape.as_list()) if variable is not None else None
        if shape is None or value.size != np.prod(shape, dtype=int):
            name = key if isinstance(key, str) else key.op.name
            raise ValueError(
                "A value must be for a variable of the graph, of its size. Received: "
                f"{name} of shape {shape} for shape {value.shape}. Correct the model, "
                "or leave it out."
            )
        placeholder = tf.placeholder(variable.dtype.base_dtype, shape)
        assigns.append(variable.assign(placeholder).op)
        feeds[placeholder] = value.reshape(shape)
    return tf.group(*assigns), feeds


def assign_from_values_fn(values: dict):
    """Returns a function from a session that assigns arrays; see `assign_from_values`."""
    op, feeds = assign_from_values(values)
    return lambda session: session.run(op, feeds)


def _by_name(var_list) -> dict:
    if isinstance(var_list, dict):
        return dict(var_list)
    return {variable.op.name: variable for variable in var_list}


def _warn_of(missing: list[str], model_path) -> None:
    for name in missing:
        logging.getLogger("tensorflow").warning(
            "Variable %s missing in checkpoint %s", name, model_path
        )
