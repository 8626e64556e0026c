"""tf.estimator on TensorFlow 2.16 and later, which no longer carry it.

    tf = enable_estimator()

runs the frozen tensorflow-estimator 2.15.0 on a newer TensorFlow: unofficial, with
Keras 2 (`tf_keras`) in that process, and not supported by the TensorFlow team. Up to
TensorFlow 2.15 it does nothing. A script that is not to be edited runs with

    python -m estimator_accum.compat legacy_script.py --its --flags

What legacy scripts and tensorflow-estimator ask of TensorFlow and newer ones lack, and
what stands in:

    tensorflow.python.estimator.*    tensorflow-estimator's modules of the same names
    tensorflow.python.training.training_ops    TensorFlow's gen_training_ops, which
        optimizers of that time call
    tensorflow.python.distribute.estimator_training    the functions below: TF_CONFIG
        clusters, one task a process; no `experimental_distribute.remote_cluster`
    tensorflow.python.util.tf_export.ESTIMATOR_API_NAME    an `estimator_export` that
        returns what it decorates
    tensorflow.python.tpu.*, for TPUEstimator    classes that refuse to be made

Source of the contract: tensorflow_estimator 2.15.0 (run_config.py, training.py and
estimator.py; Apache-2.0, The TensorFlow Authors), and the behavior of TensorFlow
2.15's module of that name. This is the one file that asks for TensorFlow's version.
"""

import copy
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import operator
import os
import pathlib
import sys
import types
import warnings

import tensorflow as tf

ESTIMATOR_VERSION = "2.15.0"
VERIFIED_VERSIONS = ("2.16", "2.17", "2.18", "2.19", "2.20", "2.21")

_KERAS_VARIABLE = "TF_USE_LEGACY_KERAS"
_KERAS_IS_LEGACY = ("1", "true", "True")  # TensorFlow's own list
_KERAS_LOADERS = ("keras", "losses", "metrics", "optimizers", "initializers")
_KERAS_LOADERS += ("compat.v1.keras", "compat.v1.layers", "compat.v1.nn.rnn_cell")
_KERAS_LOADERS += ("compat.v2.keras",)
_ESTIMATOR = "tensorflow_estimator.python.estimator"
_OLD_NAMES = {  # up to TensorFlow 2.15 -> today
    "tensorflow.python.estimator": _ESTIMATOR,
    "tensorflow.python.training.training_ops": "tensorflow.python.ops.gen_training_ops",
}
_INDEPENDENT_WORKER = "independent_worker"


def enable_estimator() -> types.ModuleType:
    """Makes `tf.estimator` and `tf.compat.v1.estimator` work; returns `tf`.

    Call it before anything touches `tf.keras`: from then on that is Keras 2 in this
    process and, by TF_USE_LEGACY_KERAS, in those that it starts. A second call does
    nothing, and so does any call on TensorFlow 2.15 and earlier.

    Returns:
        The module `tensorflow`.

    Raises:
        ImportError: If tensorflow-estimator 2.15.0 or tf_keras is missing, protobuf
            does not fit, or `tf.keras` is Keras 3 already.
    """
    if _minor(tf.__version__) < (2, 16) or "estimator" in vars(tf):
        return tf
    check_packages(
        tf.__version__,
        {
            name: _installed(name)
            for name in ("tensorflow-estimator", "tf_keras", "protobuf")
        },
    )
    _use_keras_2()
    for module in _replacements():
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], name, module)
    sys.meta_path.insert(0, _OldNames())
    v1 = importlib.import_module(f"{_ESTIMATOR}.api._v1.estimator")
    v2 = importlib.import_module(f"{_ESTIMATOR}.api._v2.estimator")
    for name, api in (("", v2), (".compat.v1", v1), (".compat.v2", v2)):
        sys.modules[f"tensorflow{name}.estimator"] = api
    for outer in (tf, tf.compat.v1, tf.compat.v2):
        outer.compat.v1.estimator, outer.compat.v2.estimator = v1, v2
    tf.estimator = v2  # the last: it says that all is done
    return tf


def check_packages(tensorflow: str, installed: dict[str, str | None]) -> None:
    """Warns of a TensorFlow that is not verified.

    Args:
        tensorflow: TensorFlow's version, 2.16 or later.
        installed: The versions of tensorflow-estimator, tf_keras and protobuf; None
            for what is not installed.

    Raises:
        ImportError: If one of them does not fit.
    """
    major, minor = _minor(tensorflow)
    estimator = installed["tensorflow-estimator"]
    if estimator != ESTIMATOR_VERSION:
        raise ImportError(
            f"tensorflow-estimator must be {ESTIMATOR_VERSION}, the last one. "
            f"Received: {estimator or 'none'}. "
            f"Run: pip install tensorflow-estimator=={ESTIMATOR_VERSION}"
        )
    if installed["tf_keras"] is None:
        raise ImportError(
            f"tf.estimator on TensorFlow {tensorflow} must have Keras 2, which is "
            f"tf_keras. Received: none. Run: pip install 'tf_keras=={major}.{minor}.*'"
        )
    protobuf = installed["protobuf"] or "0"
    if (major, minor) == (2, 20) and int(protobuf.split(".")[0]) >= 7:
        raise ImportError(
            "protobuf must be older than 7 on TensorFlow 2.20, which cannot write a "
            f"graph with it. Received: {protobuf}. Run: pip install 'protobuf<7'"
        )
    if f"{major}.{minor}" not in VERIFIED_VERSIONS:
        warnings.warn(
            f"tf.estimator is verified on TensorFlow {', '.join(VERIFIED_VERSIONS)} "
            f"and not on this one. Received: {tensorflow}. Check your results, or "
            "install one of those.",
            stacklevel=3,
        )


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


## Keras


def _use_keras_2() -> None:
    """Resolves all of TensorFlow's names for Keras to tf_keras, now.

    TensorFlow reads TF_USE_LEGACY_KERAS at two times: when it is imported it takes
    the folders for `from tensorflow.keras import ...`, and each of its lazy loaders
    (`tf.keras`, `tf.losses`, ...) chooses at its own first use.
    """
    received = os.environ.get(_KERAS_VARIABLE) or "1"
    if received not in _KERAS_IS_LEGACY:
        raise ImportError(
            f"{_KERAS_VARIABLE} must be 1 for tf.estimator. "
            f"Received: {received}. Unset it, or set it to 1."
        )
    os.environ[_KERAS_VARIABLE] = received
    _redirect_imports_of_keras()
    names = {f"tf.{name}": operator.attrgetter(name)(tf) for name in _KERAS_LOADERS}
    for name in ("tensorflow.keras", "tensorflow.compat.v1.keras"):
        if name in sys.modules:
            names[name] = sys.modules[name]
    for name, module in names.items():
        _ = module.__name__  # a loader becomes the module that it stands for
        if _is_keras_3(module):
            raise ImportError(
                "tf.estimator must be enabled before Keras 3 is used as tf.keras. "
                f"Received: {name} = {module.__name__}. Call enable_estimator() "
                f"earlier, or start the process with {_KERAS_VARIABLE}=1."
            )


def _redirect_imports_of_keras() -> None:
    """Lets `from tensorflow.keras import ...` find tf_keras."""
    keras_3 = importlib.util.find_spec("keras")
    if keras_3 is None:
        return
    theirs = os.path.join(os.path.dirname(keras_3.origin), "api", "")
    keras_2 = importlib.util.find_spec("tf_keras")
    ours = os.path.join(os.path.dirname(keras_2.origin), "api", "")
    for module in (tf, tf.compat.v1, tf.compat.v1.nn, tf.compat.v2):
        module.__path__ = [path.replace(theirs, ours) for path in module.__path__]


def _is_keras_3(module: types.ModuleType) -> bool:
    if module.__name__.startswith("tensorflow."):  # by an import statement
        folder = pathlib.Path(module.__file__).parts
        return "tf_keras" not in folder
    return not module.__name__.startswith("tf_keras.")


## What tensorflow-estimator imports of TensorFlow


def _replacements() -> list[types.ModuleType]:
    embedding = ("AdagradParameters", "AdamParameters", "EmbeddingConfigSpec")
    embedding += ("StochasticGradientDescentParameters",)
    tpu = ("TPUEstimator", "TPUEstimatorSpec", *embedding)
    return [
        _module(
            "tensorflow.python.distribute.estimator_training",
            init_run_config=_init_run_config,
            should_run_distribute_coordinator=_should_run_distribute_coordinator,
            train_and_evaluate=_train_and_evaluate,
            estimator_train=_refusing_method("train"),
            estimator_evaluate=_refusing_method("evaluate"),
        ),
        _module(
            f"{_ESTIMATOR}.estimator_export",
            estimator_export=_EstimatorExport,
        ),
        _module(f"{_ESTIMATOR}.tpu.tpu_estimator", **_refusing_classes(tpu)),
        _module(
            f"{_ESTIMATOR}.tpu._tpu_estimator_embedding",
            **_refusing_classes(embedding),
        ),
    ]


def _module(name: str, **contents) -> types.ModuleType:
    module = types.ModuleType(name, "Made by estimator_accum.compat.")
    vars(module).update(contents)
    return module


class _OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets an import of an old name, or of what is in it, find the module of today."""

    def find_spec(self, fullname, path=None, target=None):
        del path, target
        if self._name_today(fullname) is not None:
            return importlib.machinery.ModuleSpec(fullname, self)
        return None

    def exec_module(self, module):
        name = self._name_today(module.__name__)
        sys.modules[module.__name__] = importlib.import_module(name)

    def _name_today(self, name: str) -> str | None:
        for old, new in _OLD_NAMES.items():
            if f"{name}.".startswith(f"{old}."):
                return name.replace(old, new, 1)
        return None


class _EstimatorExport:
    """The decorator that named a symbol for TensorFlow's API: names nothing."""

    def __init__(self, *names: str, v1=None):
        del names, v1

    def __call__(self, symbol):
        return symbol

    def export_constant(self, module_name: str, name: str) -> None:
        del module_name, name


def _refusing_classes(names: tuple[str, ...]) -> dict[str, type]:
    def refuse(self, *args, **kwargs):
        del args, kwargs
        raise NotImplementedError(
            "TPU classes of tf.estimator must run on TensorFlow 2.15, the last with "
            f"their modules. Received: {type(self).__name__} on TensorFlow "
            f"{tf.__version__}. Use tf.estimator.Estimator."
        )

    return {name: type(name, (), {"__init__": refuse}) for name in names}


def _init_run_config(config, tf_config: dict) -> None:
    """Completes a RunConfig that has a strategy.

    Decides whether `train_and_evaluate` goes through TensorFlow's distribute
    coordinator, which needs a strategy to train with and a TF_CONFIG cluster of
    `chief`, `worker`, `ps` and `evaluator` tasks; a `master` is the older kind.
    """
    distribute = config._experimental_distribute
    if distribute is not None and distribute.remote_cluster:
        raise ValueError(
            "`experimental_distribute.remote_cluster` must be None on TensorFlow 2.16 "
            "and later: one client cannot drive a cluster there. Received: "
            f"{distribute.remote_cluster}. Start each task with its own TF_CONFIG."
        )
    for name in ("train_distribute", "eval_distribute"):
        strategy = getattr(distribute, name, None)
        if not strategy:
            continue
        if getattr(config, f"_{name}"):
            raise ValueError(
                f"Either `{name}` or `experimental_distribute.{name}` can be set. "
                "Received: both. Leave one of them out."
            )
        setattr(config, f"_{name}", strategy)
    cluster = tf.train.ClusterSpec(tf_config.get("cluster", {}))
    if cluster and config._train_distribute and "master" not in cluster.jobs:
        config._init_distributed_setting_from_environment_var({})
        config._cluster_spec = cluster  # the coordinator says the rest, at its time
        config._distribute_coordinator_mode = _INDEPENDENT_WORKER
        return
    config._distribute_coordinator_mode = None
    config._init_distributed_setting_from_environment_var(tf_config)
    config._maybe_overwrite_session_config_for_distributed_training()


def _should_run_distribute_coordinator(config) -> bool:
    mode = getattr(config, "_distribute_coordinator_mode", None)
    return mode == _INDEPENDENT_WORKER and bool(config.cluster_spec)


def _train_and_evaluate(estimator, train_spec, eval_spec, executor_class) -> None:
    """Runs this process's task of the cluster, whatever it is, to its end."""
    coordinator = importlib.import_module(
        "tensorflow.python.distribute.distribute_coordinator"
    )

    def train(strategy):
        local = _for_this_task(estimator, "train", strategy)
        local.train(
            train_spec.input_fn,
            hooks=list(train_spec.hooks),
            max_steps=train_spec.max_steps,
        )

    def evaluate(strategy):
        local = _for_this_task(estimator, "eval", strategy)
        executor_class(local, train_spec, eval_spec)._start_continuous_evaluation()

    coordinator.run_distribute_coordinator(
        train,
        estimator.config.train_distribute,
        eval_fn=evaluate,
        eval_strategy=estimator.config.eval_distribute,
        mode=_INDEPENDENT_WORKER,
        session_config=estimator.config.session_config,
    )


def _for_this_task(estimator, kind: str, strategy):
    """Returns a copy that knows its task and its server, and no coordinator."""
    context = importlib.import_module(
        "tensorflow.python.distribute.distribute_coordinator_context"
    ).get_current_worker_context()
    local = copy.deepcopy(estimator)
    setattr(local, f"_{kind}_distribution", strategy)
    cluster, is_evaluator = context.cluster_spec, context.task_type == "evaluator"
    jobs = cluster.as_dict() if cluster and not is_evaluator else {}
    workers = len(jobs.get("chief", [])) + len(jobs.get("worker", []))
    settings = {
        f"{kind}_distribute": strategy,
        "distribute_coordinator_mode": None,  # or it would start a coordinator again
        "service": None,
        "task_type": context.task_type,
        "task_id": context.task_id,
        "master": context.master_target,
        "evaluation_master": context.master_target,
        "is_chief": context.is_chief,
        # An evaluator is alone: it reads checkpoints and talks to no other task.
        "cluster_spec": tf.train.ClusterSpec({}) if is_evaluator else cluster,
        "num_ps_replicas": len(jobs.get("ps", [])),
        "num_worker_replicas": workers if cluster else 1,
        "global_id_in_cluster": None if is_evaluator else _global_id(jobs, context),
    }
    for name, value in settings.items():
        setattr(local._config, f"_{name}", value)
    return local


def _global_id(jobs: dict[str, list], context) -> int:
    """The chief is 0; then come the other jobs by name, and parameter servers last."""
    if not context.task_type:
        return 0
    order = sorted(jobs, key=lambda job: (job != "chief", job == "ps", job))
    before = order[: order.index(context.task_type)]
    return sum(len(jobs[job]) for job in before) + context.task_id


def _refusing_method(method: str):
    def refuse(estimator, distributed_fn, hooks):
        del estimator, distributed_fn, hooks
        raise ValueError(
            f"`Estimator.{method}` must run without a strategy for a TF_CONFIG cluster: "
            "its tasks would not start together. Received: a cluster and a strategy. "
            "Use tf.estimator.train_and_evaluate."
        )

    return refuse


## A script that is not to be edited


_USAGE = "python -m estimator_accum.compat legacy_script.py --its --flags"


def main(arguments: list[str]) -> None:
    """Runs `legacy_script.py --its --flags` as `python` does, with `tf.estimator`.

    Not by runpy: what the script leaves to run at exit finds its `__main__`.
    """
    script, *_ = arguments or ["nothing"]
    if script in ("-h", "--help"):
        print(f"usage: {_USAGE}\n\nRuns the script as python does, with tf.estimator.")
        return
    if not os.path.isfile(script):
        _leave(f"A Python script must be given. Received: {script}. Run: {_USAGE}")
    try:
        enable_estimator()
    except ImportError as error:
        _leave(str(error))
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):  # else there is no folder of ours
        sys.path[0] = str(pathlib.Path(script).resolve().parent)
    path = os.path.abspath(script)
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.excepthook = functools.partial(_show_from, path)
    code = compile(pathlib.Path(path).read_bytes(), path, "exec")
    exec(code, vars(module))  # noqa: S102, what python does


def _show_from(path: str, kind: type, error: BaseException, trace) -> None:
    """Shows a traceback that begins in that file, as under `python`."""
    while trace and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _leave(sentence: str):
    print(f"estimator_accum.compat: {sentence}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    # The module by its name, which the script may import too: one copy of it.
    importlib.import_module("estimator_accum.compat").main(sys.argv[1:])
