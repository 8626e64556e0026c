"""Names without a stand-in, listed from a script's source; names of tf_slim."""

import re
import sys
import types

import pytest
import tensorflow as tf

from estimator_accum.compat import __main__
from estimator_accum.compat.v1 import _contrib, _missing, _slim

_SCRIPT = """import tensorflow as tf
import tensorflow.contrib.slim as slim
from tensorflow.contrib import crf, layers
from tensorflow.examples.tutorials.mnist import input_data
from package import model
try:
    from tensorflow.contrib.opt import LazyAdam
except ImportError:
    LazyAdam = None
losses = tf.contrib.losses

def network(x):
    layers = []
    layers.append(x)
    x = slim.conv2d(slim.separable_conv2d(x), 1) + tf.app.flags.FLAGS.any
    return losses.log_loss(x), tf.nn.relu(x)
"""
_INNER = """import collections as c, numpy as np, tensorflow
from . import inner

def network():
    return tensorflow.contrib.image.rotate, np.no_such.name, np.random.randint

def other(c):
    return c.nothing
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "model.py").write_text(_INNER)
    (tmp_path / "package" / "inner.py").write_text("x = = 1")
    (tmp_path / "package" / "unused.py").write_text("import imp.no_such")
    (tmp_path / "script.py").write_text(_SCRIPT)
    names = _contrib._stand_ins()["slim"]
    slim = _contrib._StandIn("tensorflow.contrib.slim", names)
    v1 = types.ModuleType("v1")
    vars(v1).update({"nn": tf.nn, "app": tf.compat.v1.app})
    v1.contrib = _contrib._StandIn("tensorflow.contrib", {"slim": slim, "layers": slim})
    monkeypatch.setattr(_missing, "tf", v1)
    monkeypatch.setattr(_slim, "is_installed", lambda: False)
    return tmp_path


def test_names_without_a_stand_in_are_listed_at_once(folder):
    assert _missing.list_missing(
        str(folder / "script.py"), str(folder)
    ).splitlines() == [
        (
            "Names of TensorFlow 1 that have no stand-in, so that the script fails where "
            "it uses them (6):"
        ),
        "    numpy.no_such: package/model.py line 5",
        "    tf.contrib.crf: script.py line 3",
        "    tf.contrib.image: package/model.py line 5",
        "    tf.contrib.losses: script.py line 10, script.py line 16",
        "    tf.contrib.slim.separable_conv2d: script.py line 15",
        "    tf.examples: script.py line 4",
        (
            "Replace them in the script, or run it on TensorFlow 1.15. The package "
            "tf_slim has more names of slim and layers: pip install "
            "git+https://github.com/google-research/tf-slim"
        ),
    ]


def test_script_with_all_its_names_has_no_list(folder):
    script = folder / "script.py"
    script.write_text("import tensorflow.contrib.slim\ntensorflow.contrib.slim.conv2d")
    assert _missing.list_missing(str(script), str(folder)) == ""


@pytest.mark.parametrize(
    ("content", "code", "printed"),
    [
        (_SCRIPT, 1, r"script.py: Names of TensorFlow 1 that have no stand-in.*\(6\):"),
        ("", 0, r"script.py: every name of TensorFlow 1 has a stand-in"),
    ],
)
def test_list_runs_nothing(content, code, printed, folder, monkeypatch, capsys):
    monkeypatch.setattr(__main__, "enable_v1", lambda: None)
    script = folder / "script.py"
    script.write_text(content + "raise AssertionError")
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--v1", "--list", str(script)])
    assert ended.value.code == code
    assert re.search(printed, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--v1", "--list", "no_such.py"], "--list must be followed by Python scripts"),
        (["--list", __file__], "--list needs --v1. Run: estimator-accum compat --v1 -"),
    ],
)
def test_list_needs_scripts(flags, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(flags)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.fixture
def tf_slim(tmp_path, monkeypatch):
    """Returns a function that installs a module tf_slim of a text."""

    def install(text):
        (tmp_path / "tf_slim.py").write_text(text)
        (tmp_path / "tf_slim-1.1.0.dist-info").mkdir()
        metadata = "Metadata-Version: 2.1\nName: tf-slim\nVersion: 1.1.0\n"
        (tmp_path / "tf_slim-1.1.0.dist-info" / "METADATA").write_text(metadata)

    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "tf_slim"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(_slim, "_MODULES", {"slim": ("tf_slim",)})
    monkeypatch.setattr(_slim, "_NETS", "")
    _slim.import_error.cache_clear()
    yield install
    _slim.import_error.cache_clear()
    sys.modules.pop("tf_slim", None)


def test_installed_tf_slim_adds_names_and_replaces_those_of_its_arg_scope(tf_slim):
    tf_slim("conv2d, dataset, _private = 1, 2, 3")
    stand_ins = {"slim": {"conv2d": 0, "relu": 0}, "tpu": {}}
    _slim.add_names(stand_ins)
    assert stand_ins == {"slim": {"conv2d": 1, "relu": 0, "dataset": 2}, "tpu": {}}
    assert _slim.is_installed() and _slim.remedy("tf.contrib.slim.no_such") == ""


def test_an_unfit_tf_slim_is_named_where_a_name_is_missing(tf_slim):
    tf_slim("from tensorflow.python.no_such import name")
    names = _contrib._stand_ins()["slim"]
    slim = _contrib._StandIn("tensorflow.contrib.slim", names)
    words = (
        r"installed tf_slim 1\.1\.0 cannot be imported, ModuleNotFoundError.*no_such.*"
    )
    with pytest.raises(AttributeError, match=words + "pip install git"):
        _ = slim.dataset
