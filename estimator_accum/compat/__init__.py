"""tf.estimator on TensorFlow >= 2.16, which no longer includes it.

    tf = enable_estimator()

runs the frozen tensorflow-estimator 2.15.0 on a newer TensorFlow: unofficial, with
Keras 2 (`tf_keras`) in that process, and not supported by the TensorFlow team. Up to
TensorFlow 2.15 it does nothing. A script that must not be edited runs with

    estimator-accum compat legacy_script.py --its --flags

Names that legacy scripts and tensorflow-estimator need and newer TensorFlows lack, with
their replacements:

    tensorflow.python.estimator.*    tensorflow-estimator's modules of the same names
    tensorflow.python.training.training_ops    TensorFlow's gen_training_ops, which
        optimizers of that time call
    tensorflow.python.distribute.estimator_training    the functions of _training.py:
        TF_CONFIG clusters, one task per process; no
        `experimental_distribute.remote_cluster`
    tensorflow.python.util.tf_export.ESTIMATOR_API_NAME    an `estimator_export` that
        returns what it decorates
    tensorflow.python.tpu.session_support, .tpu_embedding_gradient    empty modules:
        TPUEstimator(use_tpu=False) uses nothing of them, another is refused

Source of the contract: tensorflow_estimator 2.15.0 (run_config.py, training.py and
estimator.py; Apache-2.0, The TensorFlow Authors), and the behavior of TensorFlow
2.15's module of that name. This is the only package that checks TensorFlow's version.
"""

import importlib.metadata
import os
import types
import warnings

ESTIMATOR_VERSION = "2.15.0"
VERIFIED_VERSIONS = ("2.16", "2.17", "2.18", "2.19", "2.20", "2.21")


def enable_estimator() -> types.ModuleType:
    """Makes `tf.estimator` and `tf.compat.v1.estimator` work; returns `tf`.

    Call it before any use of `tf.keras`: from then on `tf.keras` is Keras 2 in this
    process and, by TF_USE_LEGACY_KERAS, in processes that it starts. A second call does
    nothing, like any call on TensorFlow 2.15 and earlier.

    Returns:
        The module `tensorflow`.

    Raises:
        ImportError: If TensorFlow, tensorflow-estimator 2.15.0 or tf_keras is missing,
            protobuf does not fit, or `tf.keras` is already Keras 3.
    """
    prefer_keras_2()
    try:
        import tensorflow as tf  # here, because the command's --help must not need it
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise ImportError(
            "The package tensorflow must be installed. Received: none. Run "
            "pip install 'estimator-accum[tf]'."
        ) from None
    if _minor(tf.__version__) < (2, 16) or "estimator" in vars(tf):
        return tf
    check_packages(
        tf.__version__,
        {
            name: _installed(name)
            for name in ("tensorflow-estimator", "tf_keras", "protobuf")
        },
    )
    from estimator_accum.compat import _keras, _modules

    _keras.use_keras_2()
    _modules.install()
    return tf


def prefer_keras_2() -> None:
    """Makes a later import of TensorFlow 2.16 or newer load Keras 2, and not Keras 3.

    `enable_estimator` would replace Keras 3, whose import takes a second or more. A
    value that TF_USE_LEGACY_KERAS already has stays.
    """
    version = _installed("tensorflow")
    if version is not None and _minor(version) >= (2, 16) and _installed("tf_keras"):
        os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")


def check_packages(tensorflow: str, installed: dict[str, str | None]) -> None:
    """Checks installed packages, and warns if TensorFlow's version is not verified.

    Args:
        tensorflow: TensorFlow's version, 2.16 or later.
        installed: The versions of tensorflow-estimator, tf_keras and protobuf; None
            for a package that is not installed.

    Raises:
        ImportError: If a package is missing or its version does not fit.
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
            f"tf.estimator on TensorFlow {tensorflow} needs tf_keras (Keras 2), which is "
            f"not installed. Run: pip install 'tf_keras=={major}.{minor}.*'"
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
