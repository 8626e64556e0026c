"""`tf.contrib` on TensorFlows without it: names that others replace exactly.

A name without a stand-in raises an AttributeError when it is used, or a
ModuleNotFoundError when it is imported, with the names that exist.
"""

import importlib.abc
import inspect
import sys
import types

import tensorflow as tf
from tensorflow.python.ops import lookup_ops
from tensorflow.python.tpu import tpu_function
from tensorflow_estimator.python.estimator.canned import head as heads

from estimator_accum.compat import _modules
from estimator_accum.compat.v1 import (
    _arg_scope,
    _crf,
    _framework,
    _hparams,
    _layers,
    _learning,
    _losses,
    _metrics,
    _normalization,
    _optimize_loss,
    _outputs,
    _slim,
    _weights,
)

_CONTRIB = "tensorflow.contrib"
_OLD_NAMES = {
    f"{_CONTRIB}.tpu.python": "tensorflow_estimator.python.estimator",
    f"{_CONTRIB}.tensorboard": "tensorboard",
}
# Modules below those, from which scripts import the same names; outer ones first.
_INNER = "framework.python framework.python.ops framework.python.ops.arg_scope"
_INNER += " framework.python.ops.variables layers.python layers.python.layers"
_INNER += " crf.python crf.python.ops crf.python.ops.crf"
for _name in ("initializers", "layers", "optimizers", "regularizers", "utils"):
    _INNER += f" layers.python.layers.{_name}"


def install() -> None:
    """Makes `tf.compat.v1.contrib` and `tensorflow.contrib`."""
    stand_ins = _stand_ins()
    old_names = _OLD_NAMES
    if _slim.is_installed() and not _slim.import_error():
        _slim.add_names(stand_ins)
        old_names = old_names | _slim.OLD_NAMES
    modules = {
        name: _StandIn(f"{_CONTRIB}.{name}", dict(names))
        for name, names in stand_ins.items()
    }
    contrib = _StandIn(_CONTRIB, dict(modules))
    for path in _INNER.split():
        outer, _, last = path.rpartition(".")
        names = dict(stand_ins[path.partition(".")[0]])
        inner = _StandIn(f"{_CONTRIB}.{path}", names)
        modules[path] = _outputs if last == "utils" else inner
        vars(modules[outer])["_names"].setdefault(last, modules[path])
    sys.modules[_CONTRIB] = contrib
    sys.modules |= {f"{_CONTRIB}.{path}": module for path, module in modules.items()}
    sys.meta_path.insert(0, _NoStandIn())
    sys.meta_path.insert(0, _modules.OldNames(old_names))
    tf.compat.v1.contrib = contrib


class _StandIn(types.ModuleType):
    """One module; each name is looked up when it is used."""

    def __init__(self, name: str, names: dict):
        super().__init__(name, "Made by estimator_accum.compat.v1.")
        self.__path__ = []  # a package, for `from tensorflow.contrib.x import y`
        self._names = names

    def __getattr__(self, name):
        names = vars(self)["_names"]
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in names:
            raise AttributeError(_sentence(f"{self.__name__}.{name}", names))
        return names[name]

    def __dir__(self):
        return sorted(self._names)


class _NoStandIn(importlib.abc.MetaPathFinder):
    """Refuses imports of names of `tf.contrib` that this package lacks."""

    def find_spec(self, fullname, path=None, target=None):
        del path, target
        parent = fullname.rpartition(".")[0]
        if not f"{fullname}.".startswith(f"{_CONTRIB}."):
            return
        names = vars(sys.modules[parent]).get("_names", {})
        raise ModuleNotFoundError(_sentence(fullname, names))


def _sentence(name: str, names: dict) -> str:
    parent = name.rpartition(".")[0].replace("tensorflow.", "tf.")
    return (
        f"A name of `{parent}` must be one that has a stand-in: "
        f"{', '.join(sorted(names)) or 'none'}. Received: "
        f"{name.replace('tensorflow.', 'tf.')}. Replace it in the script, or run it "
        f"on TensorFlow 1.15.{_slim.remedy(name)}"
    )


_ARG_SCOPE = "add_arg_scope arg_scope arg_scope_func_key arg_scoped_arguments"
_ARG_SCOPE += " current_arg_scope has_arg_scope"
_CRF = "CrfDecodeBackwardRnnCell CrfDecodeForwardRnnCell CrfForwardRnnCell"
_CRF += " crf_binary_score crf_decode crf_log_likelihood crf_log_norm"
_CRF += " crf_multitag_sequence_score crf_sequence_score crf_unary_score viterbi_decode"
_FRAMEWORK = "assign_from_checkpoint assign_from_checkpoint_fn assign_from_values"
_FRAMEWORK += " assign_from_values_fn get_model_variables get_trainable_variables"
_FRAMEWORK += " get_variables get_variables_to_restore model_variable variable"
_TRAINING = "add_gradients_summaries clip_gradient_norms multiply_gradients"
_LAYERS = "avg_pool2d conv2d convolution2d dropout elu embed_sequence flatten"
_LAYERS += " fully_connected linear max_pool2d one_hot_encoding relu relu6 repeat"
_LAYERS += " softmax stack"
_LOSSES = "absolute_difference add_loss compute_weighted_loss get_losses"
_LOSSES += " get_regularization_losses get_total_loss log_loss mean_squared_error"
_LOSSES += " sigmoid_cross_entropy softmax_cross_entropy sparse_softmax_cross_entropy"
_WEIGHTS = "apply_regularization l1_l2_regularizer l1_regularizer l2_regularizer"
_WEIGHTS += " sum_regularizer variance_scaling_initializer xavier_initializer"


def _stand_ins() -> dict[str, dict]:
    """Returns the names of each module of `tf.contrib` with their stand-ins."""
    v1 = tf.compat.v1
    estimator, tpu = v1.estimator, v1.estimator.tpu
    checkpoints = _pick(v1.train, "list_variables load_checkpoint load_variable")
    checkpoints |= _pick(v1.train, "init_from_checkpoint checkpoints_iterator")
    steps = "assert_global_step create_global_step get_global_step"
    steps += " get_or_create_global_step"
    framework = (
        checkpoints
        | _pick(v1.train, steps)
        | _pick(v1, "argsort is_tensor nest sort")
        | _pick(_arg_scope, _ARG_SCOPE)
        | _pick(_framework, _FRAMEWORK)
    )
    layers = (
        _pick(_layers, _LAYERS)
        | _pick(_normalization, "batch_norm layer_norm")
        | _pick(_optimize_loss, "optimize_loss OPTIMIZER_CLS_NAMES OPTIMIZER_SUMMARIES")
        | _pick(_weights, _WEIGHTS)
        | {"xavier_initializer_conv2d": _weights.xavier_initializer}
    )
    return {
        "cluster_resolver": _public(v1.distribute.cluster_resolver),
        "crf": _pick(_crf, _CRF),
        "data": _public(v1.data.experimental)
        | {"batch_and_drop_remainder": _batch_and_drop_remainder},
        "estimator": _public(estimator.experimental)
        | _pick(estimator, "add_metrics")
        | {
            "binary_classification_head": _with_mean_loss(
                heads._binary_logistic_head_with_sigmoid_cross_entropy_loss
            ),
            "multi_class_head": _with_mean_loss(
                heads._multi_class_head_with_softmax_cross_entropy_loss
            ),
            "regression_head": _with_mean_loss(heads._regression_head),
        },
        "framework": framework,
        "layers": layers,
        "lookup": _pick(
            lookup_ops,
            "HashTable KeyValueTensorInitializer TextFileIndex TextFileInitializer "
            "index_table_from_file index_table_from_tensor "
            "index_to_string_table_from_file index_to_string_table_from_tensor",
        ),
        "losses": _pick(_losses, _LOSSES),
        "metrics": {
            f"streaming_{name}": _losses.with_second_first(getattr(v1.metrics, name))
            for name in ("accuracy", "auc", "precision", "recall", "mean_squared_error")
        }
        | _pick(_metrics, "streaming_covariance streaming_pearson_correlation")
        | {"streaming_mean": v1.metrics.mean},
        "rnn": _public(v1.nn.rnn_cell)
        | _pick(v1.nn, "static_bidirectional_rnn static_rnn"),
        "slim": framework
        | layers
        | {"utils": _outputs, "learning": _learning, "losses": _losses},
        "tpu": _public(v1.tpu)
        | _pick(tpu, "InputPipelineConfig RunConfig TPUConfig TPUEstimator")
        | _pick(tpu, "TPUEstimatorSpec")
        | {"CrossShardOptimizer": _cross_shard_optimizer},
        "training": checkpoints
        | _pick(_learning, _TRAINING)
        | {
            "HParams": _hparams.HParams,
            "create_train_op": _learning.create_transformed_train_op,
        },
    }


def _pick(module, names: str) -> dict:
    return {name: getattr(module, name) for name in names.split()}


def _public(module) -> dict:
    return _pick(module, " ".join(name for name in dir(module) if name[0] != "_"))


def _cross_shard_optimizer(opt, *arguments, **others):
    """Returns the optimizer itself, unless the program of a TPU is built."""
    if tpu_function.get_tpu_context().number_of_shards is None:
        return opt
    return tf.compat.v1.tpu.CrossShardOptimizer(opt, *arguments, **others)


def _with_mean_loss(make_head):
    """Returns a maker of heads of canned estimators, whose own default is a sum."""
    signature = inspect.signature(make_head)

    def make(*arguments, **others):
        bound = signature.bind(*arguments, **others)
        mean = tf.compat.v1.losses.Reduction.SUM_OVER_BATCH_SIZE
        bound.arguments.setdefault("loss_reduction", mean)
        return make_head(*bound.args, **bound.kwargs)

    return make


def _batch_and_drop_remainder(batch_size):
    return lambda dataset: dataset.batch(batch_size, drop_remainder=True)
