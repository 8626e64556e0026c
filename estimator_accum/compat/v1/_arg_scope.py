"""`arg_scope` of TensorFlow 1's `tf.contrib.framework`: default arguments by function.

    with arg_scope([conv2d, fully_connected], activation_fn=None):
        conv2d(inputs, 8, 3)  # without an activation

Inner scopes add to outer ones, and arguments of a call come before both.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable

_SCOPES = [{}]  # innermost last: key of a function -> its default arguments
_ARGUMENTS = {}  # key of a function -> names of its arguments with a default


def add_arg_scope(function: Callable) -> Callable:
    """Returns the function with defaults of the current scope (a decorator)."""
    key = arg_scope_func_key(function)
    _ARGUMENTS[key] = tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    )

    @functools.wraps(function)
    def with_defaults(*arguments, **others):
        return function(*arguments, **current_arg_scope().get(key, {}) | others)

    with_defaults._key_op = key
    return with_defaults


@contextlib.contextmanager
def arg_scope(list_ops_or_scope, **kwargs):
    """Sets default arguments of functions in a `with` block.

    Args:
        list_ops_or_scope: List or tuple of functions that `add_arg_scope` returned, or
            a scope that `arg_scope` yielded before, which then is the scope again.
        **kwargs: Default arguments; none with a scope.

    Yields:
        The scope, a dictionary.

    Raises:
        TypeError: If functions are in neither a list nor a tuple.
        ValueError: If a function has no scope, or a scope comes with arguments.
    """
    if isinstance(list_ops_or_scope, dict):
        if kwargs:
            raise ValueError(
                "An arg_scope that is used again must have no arguments. Received: "
                f"{', '.join(kwargs)}. Open another arg_scope inside."
            )
        scope = dict(list_ops_or_scope)
    else:
        scope = current_arg_scope() | _defaults(list_ops_or_scope, kwargs)
    _SCOPES.append(scope)
    try:
        yield scope
    finally:
        _SCOPES.pop()


def _defaults(functions, arguments: dict) -> dict:
    if not isinstance(functions, (list, tuple)):
        raise TypeError(
            "The functions of an arg_scope must be in a list. Received: "
            f"{functions!r}. Write [conv2d]."
        )
    for function in functions:
        if not has_arg_scope(function):
            raise ValueError(
                "A function in an arg_scope must be decorated by add_arg_scope. "
                f"Received: {function!r}. Decorate it."
            )
    keys = [arg_scope_func_key(function) for function in functions]
    return {key: current_arg_scope().get(key, {}) | arguments for key in keys}


def current_arg_scope() -> dict:
    """Returns the innermost scope."""
    return _SCOPES[-1]


def has_arg_scope(func: Callable) -> bool:
    """Returns whether `add_arg_scope` made the function."""
    return arg_scope_func_key(func) in _ARGUMENTS


def arg_scoped_arguments(func: Callable) -> tuple[str, ...]:
    """Returns the names of the arguments that a scope can set."""
    return _ARGUMENTS[arg_scope_func_key(func)]


def arg_scope_func_key(op: Callable) -> str:
    """Returns the function's key in a scope."""
    return getattr(op, "_key_op", str(op))
