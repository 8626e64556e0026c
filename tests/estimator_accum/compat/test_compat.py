"""enable_estimator on every TensorFlow: refusals, import forms, replaced modules."""

import re
import sys
import types

import pytest
import tensorflow as tf

from estimator_accum import compat
from estimator_accum.compat import _script, _training
from tests.helpers.processes import legacy_runs

_IS_REFERENCE = tf.__version__.startswith("2.15.")
later = pytest.mark.skipif(
    _IS_REFERENCE, reason="TensorFlow 2.15 carries tf.estimator: nothing is replaced"
)


def test_enabling_twice_is_enabling_once():
    compat.enable_estimator()  # may import modules of others, late
    before = tf.estimator, tf.compat.v1.estimator, dict(sys.modules)
    assert compat.enable_estimator() is tf
    assert tf.estimator is before[0]
    assert tf.compat.v1.estimator is before[1]
    assert sys.modules.keys() == before[2].keys()


def test_every_spelling_is_the_same_estimator():
    import tensorflow.compat.v1 as tf1
    from tensorflow import estimator
    from tensorflow.compat.v1 import estimator as estimator_v1
    from tensorflow.estimator import Estimator
    from tensorflow.estimator.export import ServingInputReceiver

    assert estimator.Estimator is tf.estimator.Estimator is Estimator
    assert estimator_v1.Estimator is tf1.estimator.Estimator
    assert tf.estimator.export.ServingInputReceiver is ServingInputReceiver
    assert issubclass(Estimator, tf1.estimator.Estimator)
    for v1 in (tf1.compat.v1, tf.compat.v2.compat.v1):
        assert v1.estimator.Estimator is tf1.estimator.Estimator


def test_names_from_before_2_16_are_the_modules_of_today():
    import tensorflow.python.estimator.canned.head as old_head
    from tensorflow.python.estimator import estimator_lib
    from tensorflow.python.estimator.estimator import Estimator
    from tensorflow.python.ops import gen_training_ops
    from tensorflow.python.training import training_ops
    from tensorflow_estimator.python.estimator.canned import head

    assert Estimator is tf.compat.v1.estimator.Estimator
    assert estimator_lib.EstimatorSpec is tf.estimator.EstimatorSpec
    assert old_head._regression_head is head._regression_head
    adam = training_ops.resource_apply_adam  # custom optimizers call it
    assert adam is gen_training_ops.resource_apply_adam


def test_module_that_tensorflow_estimator_lacks_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"no_such"):
        import tensorflow.python.estimator.no_such  # noqa: F401


@pytest.mark.parametrize(
    "use, is_of_v1",
    [
        (lambda: tf.placeholder, True),
        (lambda: tf.contrib, True),
        (lambda: tf.no_such, False),
        (lambda: tf.nn.no_such, False),
    ],
)
def test_names_of_tensorflow_1_are_told_from_others(use, is_of_v1):
    with pytest.raises(AttributeError) as raised:
        use()
    assert _script._is_of_tensorflow_1(raised.value) == is_of_v1
    missing = ModuleNotFoundError(name="tensorflow.contrib")
    assert _script._is_of_tensorflow_1(missing)


def test_import_of_the_library_enables_nothing():
    done = legacy_runs.run_python(
        "import os, estimator_accum, estimator_accum.compat, tensorflow as tf; "
        "print('estimator' in vars(tf), os.environ.get('TF_USE_LEGACY_KERAS'))"
    )
    assert done.stdout == f"{_IS_REFERENCE} None\n", done.stderr


@pytest.mark.skipif(not _IS_REFERENCE, reason="what happens on TensorFlow 2.15 only")
def test_reference_is_left_unchanged():
    done = legacy_runs.run_python(
        "import os, sys, estimator_accum.compat, tensorflow as tf\n"
        "before = dict(vars(tf)), dict(sys.modules), dict(os.environ)\n"
        "assert estimator_accum.compat.enable_estimator() is tf\n"
        "assert before == (dict(vars(tf)), dict(sys.modules), dict(os.environ))\n"
    )
    assert done.returncode == 0, done.stderr


@later
def test_keras_is_keras_2_by_every_spelling():
    done = legacy_runs.run_python(
        "import tensorflow as tf\n"
        "from estimator_accum.compat import enable_estimator\n"
        "assert enable_estimator() is tf\n"
        "from tensorflow.keras.layers import Dense\n"
        "from tensorflow.compat.v1.keras.layers import Dense as V1Dense\n"
        "from tensorflow import keras\n"
        "import tf_keras\n"
        "assert Dense is keras.layers.Dense is tf.keras.layers.Dense\n"
        "assert Dense is tf_keras.layers.Dense\n"
        "assert V1Dense.__module__.startswith('tf_keras.'), V1Dense\n"
    )
    assert done.returncode == 0, done.stderr


@later
@pytest.mark.parametrize(
    ("use", "received"),
    [
        ("import tensorflow as tf; tf.keras.layers", r"tf\.keras = keras\."),
        ("import tensorflow as tf; tf.losses.Loss", r"tf\.losses = keras\."),
        ("from tensorflow.keras.layers import Dense", r"tf\.keras = tensorflow\.keras"),
    ],
)
def test_keras_3_in_use_is_refused(use, received):
    done = legacy_runs.run_python(
        f"{use}\nfrom estimator_accum.compat import enable_estimator\n"
        "enable_estimator()"
    )
    assert re.search(
        "ImportError: tf.estimator must be enabled before Keras 3 is used as tf.keras. "
        rf"Received: {received}.*\. Call enable_estimator\(\) earlier, or start the "
        "process with TF_USE_LEGACY_KERAS=1.",
        done.stderr,
    )


_ESTIMATOR = "tensorflow-estimator"
_GOOD = {_ESTIMATOR: "2.15.0", "tf_keras": "2.21.0", "protobuf": "7.1.0"}


@pytest.mark.parametrize(
    ("tensorflow", "installed", "sentence"),
    [
        ("2.21.0", {_ESTIMATOR: "2.14.0"}, r"the last one\. Received: 2\.14\.0\. Run"),
        ("2.21.0", {_ESTIMATOR: None}, r"must be 2\.15\.0, the last .* Received: none"),
        (
            "2.19.1",
            {"tf_keras": None},
            r"needs tf_keras .*not installed.* 'tf_keras==2\.19\.\*'",
        ),
        (
            "2.20.0",
            {},
            r"older than 7 on TensorFlow 2\.20, .*7\.1\.0\. Run: .* 'protobuf<7'",
        ),
    ],
)
def test_packages_that_do_not_fit_are_refused(tensorflow, installed, sentence):
    with pytest.raises(ImportError, match=sentence):
        compat.check_packages(tensorflow, _GOOD | installed)


@pytest.mark.parametrize("version", [f"{v}.1" for v in compat.VERIFIED_VERSIONS])
def test_verified_versions_raise_no_warning(recwarn, version):
    compat.check_packages(version, _GOOD | {"protobuf": "6.33.6"})
    assert len(recwarn) == 0


@pytest.mark.parametrize("version", ["2.22.0", "2.30.0-rc1", "3.0.0"])
def test_unverified_version_warns(version):
    with pytest.warns(
        UserWarning,
        match=r"verified on TensorFlow 2\.16, .*2\.21 and not on this one\. "
        rf"Received: {re.escape(version)}\. Check your results",
    ):
        compat.check_packages(version, _GOOD)


@later
def test_refused_enabling_leaves_no_estimator():
    done = legacy_runs.run_python(
        "import importlib.metadata as metadata, tensorflow as tf\n"
        "metadata.version = lambda name: '2.14.0'\n"
        "from estimator_accum.compat import enable_estimator\n"
        "try:\n    enable_estimator()\nexcept ImportError as error:\n"
        "    print(error, hasattr(tf, 'estimator'))\n"
    )
    assert re.search(r"Received: 2\.14\.0\..* False$", done.stdout), done.stderr


def _config(monkeypatch, tf_config, **arguments):
    monkeypatch.setenv("TF_CONFIG", tf_config)
    return tf.estimator.RunConfig(**arguments)


@later
def test_remote_cluster_is_refused():
    distribute = _distribute_config(remote_cluster={"worker": 1})
    sentence = "remote_cluster` must be None .*each task with its own TF_CONFIG"
    with pytest.raises(ValueError, match=sentence):
        tf.estimator.RunConfig(experimental_distribute=distribute)


def _distribute_config(**fields):
    from tensorflow.python.distribute.distribute_config import DistributeConfig

    return DistributeConfig(**fields)


def test_strategy_may_come_from_either_argument_and_not_from_both():
    cpu = tf.distribute.OneDeviceStrategy("/cpu:0")
    distribute = _distribute_config(train_distribute=cpu)
    config = tf.estimator.RunConfig(experimental_distribute=distribute)
    assert config.train_distribute is cpu
    assert config.eval_distribute is None
    with pytest.raises(ValueError, match="Either `train_distribute` or"):
        tf.estimator.RunConfig(train_distribute=cpu, experimental_distribute=distribute)


_CLUSTER = (
    '{"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}, '
    '"task": {"type": "worker", "index": 1}}'
)


def test_cluster_without_a_strategy_is_the_estimators_own_business(monkeypatch):
    config = _config(monkeypatch, _CLUSTER)
    assert (config.task_type, config.task_id) == ("worker", 1)
    assert config.global_id_in_cluster == 2
    assert config.num_worker_replicas == 3


@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_cluster_with_a_strategy_takes_train_and_evaluate_only(monkeypatch, method):
    cpu = tf.distribute.OneDeviceStrategy("/cpu:0")
    config = _config(monkeypatch, _CLUSTER, train_distribute=cpu, eval_distribute=cpu)
    assert config.cluster_spec.num_tasks("worker") == 2
    estimator = tf.estimator.Estimator(lambda features: None, config=config)
    with pytest.raises(ValueError, match=rf"[Ee]stimator\.{method}`"):
        getattr(estimator, method)(lambda: None, steps=1)


@pytest.mark.parametrize(
    ("job", "index", "number"),
    [("chief", 0, 0), ("worker", 0, 2), ("worker", 1, 3), ("ps", 0, 4), (None, 0, 0)],
)
def test_chief_is_first_and_parameter_servers_are_last(job, index, number):
    jobs = {"ps": ["d"], "worker": ["b", "c"], "chief": ["a"], "other": ["e"]}
    context = types.SimpleNamespace(task_type=job, task_id=index)
    assert _training.global_id(jobs, context) == number


@later
def test_tpus_are_refused():
    tpu = tf.compat.v1.estimator.tpu
    sentence = (
        r"TPUs with tf\.estimator must have TensorFlow 2\.15, the last with their "
        r"modules\. Received: {} on TensorFlow 2\.\d+\.\d+\. "
        r"Use TPUEstimator\(use_tpu=False\)"
    )

    def model_fn(features, labels, mode, params):
        del features, labels, mode, params

    config = tpu.RunConfig()
    for arguments in ({}, {"use_tpu": True}):  # True is the default
        with pytest.raises(
            NotImplementedError,
            match=sentence.format(r"TPUEstimator\(use_tpu=True\)"),
        ):
            tpu.TPUEstimator(model_fn, config=config, train_batch_size=8, **arguments)
    with pytest.raises(
        NotImplementedError, match=sentence.format("EmbeddingConfigSpec")
    ):
        tpu.experimental.EmbeddingConfigSpec(feature_columns=[])
    estimator = tpu.TPUEstimator(model_fn, None, config, None, False, 8)
    assert isinstance(estimator, tf.compat.v1.estimator.Estimator)


def test_missing_tensorflow_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"must be installed.*estimator-accum\[tf\]"):
        compat.enable_estimator()
