"""Names of `tf.contrib` in tf_slim, the package that TensorFlow 1's slim has become.

They replace stand-ins of the same name, so that all functions share one arg_scope.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import sys

import tensorflow as tf

_INSTALL = "pip install git+https://github.com/google-research/tf-slim"
# Modules of `tf.contrib` -> those of tf_slim with their names.
_MODULES = {
    "framework": ("tf_slim.ops.variables", "tf_slim.ops.arg_scope"),
    "layers": ("tf_slim.layers",),
    "losses": ("tf_slim.losses",),
    "metrics": ("tf_slim.metrics",),
    "slim": ("tf_slim",),
    "training": ("tf_slim.training.training",),
}
_NETS = "alexnet inception overfeat resnet_utils resnet_v1 resnet_v2 vgg"
OLD_NAMES = {  # of submodules; inner ones first
    "tensorflow.contrib.slim.python.slim": "tf_slim",
    "tensorflow.contrib.slim.python": "tf_slim",
    "tensorflow.contrib.slim.nets": "tf_slim.nets",
}


def is_installed() -> bool:
    """Returns whether tf_slim is installed."""
    return importlib.util.find_spec("tf_slim") is not None


@functools.cache
def import_error() -> str:
    """Returns the error with which the installed tf_slim fails; "" if it has none."""
    nets = (f"tf_slim.nets.{net}" for net in _NETS.split())
    try:
        _complete_tensorflow()
        for path in itertools.chain(nets, *_MODULES.values()):
            importlib.import_module(path)
    except (ImportError, AttributeError) as error:  # of names that TensorFlow removed
        return repr(error)
    return ""


def remedy(name: str) -> str:
    """Returns a sentence on how to install tf_slim, if that may have a name.

    Args:
        name: Missing name, e.g. "tf.contrib.slim.dataset".

    Returns:
        The sentence, after a space; "" if tf_slim can be imported or has no such module.
    """
    _, is_contrib, rest = name.partition(".contrib.")
    if not is_contrib or rest.partition(".")[0] not in _MODULES:
        return ""
    if is_installed():
        packages = importlib.metadata.distributions(name="tf_slim")
        name = " ".join(["tf_slim", *(package.version for package in packages)])
        error = import_error()
        sentence = f" The installed {name} cannot be imported, {error}: {_INSTALL}"
        return sentence if error else ""
    return f" The package tf_slim has more names of slim and layers: {_INSTALL}"


def add_names(stand_ins: dict[str, dict]) -> None:
    """Adds the names of tf_slim, which can be imported, to the stand-ins.

    Args:
        stand_ins: Modules of `tf.contrib` -> names -> stand-ins.
    """
    for name, paths in _MODULES.items():
        for module in map(importlib.import_module, paths):
            public = getattr(module, "__all__", dir(module))
            stand_ins[name] |= {
                member: getattr(module, member)
                for member in public
                if not member.startswith("_")
            }


def _complete_tensorflow() -> None:
    """Gives `tensorflow.python.layers` the module of Keras that it imports."""
    path = type(tf.compat.v1.layers.BatchNormalization()).__module__
    name = "tf_keras.legacy_tf_layers.normalization"
    sys.modules.setdefault(name, importlib.import_module(path))
