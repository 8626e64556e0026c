"""Imports of TensorFlow in the user's modules under --v1."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf

from estimator_accum.compat.v1 import _imports
from estimator_accum.compat.v1._imports import compile_v1
from tests.helpers.processes import legacy_runs

v1 = tf.compat.v1


def _execute(code, **names) -> dict:
    exec(code, names)  # noqa: S102, the code is this file's
    return names


@pytest.mark.parametrize(
    ("statement", "name", "expected"),
    [
        ("import tensorflow as tf", "tf", lambda: v1),
        ("import tensorflow", "tensorflow", lambda: v1),
        ("import os, tensorflow as tf", "os", lambda: os),
        ("import os.path, tensorflow", "os", lambda: os),
        ("import tensorflow.compat.v1 as tf", "tf", lambda: v1),
        ("import tensorflow.compat.v2 as tf", "tf", lambda: tf.compat.v2),
        ("import tensorflow.keras", "tensorflow", lambda: v1),
        ("from tensorflow import train", "train", lambda: v1.train),
        ("from tensorflow import train as t", "t", lambda: v1.train),
        ("from tensorflow.train import Saver", "Saver", lambda: v1.train.Saver),
        (
            "from tensorflow.keras.layers import GRU",
            "GRU",
            lambda: v1.keras.layers.GRU,
        ),
        (
            "import tensorflow.keras.backend as K",
            "K.get_session",
            lambda: v1.keras.backend.get_session,
        ),
        (
            "from tensorflow.estimator import Estimator",
            "Estimator",
            lambda: v1.estimator.Estimator,
        ),
        (
            "from tensorflow.python.ops import math_ops",
            "math_ops.add",
            lambda: sys.modules["tensorflow.python.ops.math_ops"].add,
        ),
        (
            "def load():\n    import tensorflow as tf\n    return tf\ntf = load()",
            "tf",
            lambda: v1,
        ),
        ("from tensorflow import *", "Session", lambda: v1.Session),
    ],
)
def test_import_binds_the_name_of_tensorflow_1(statement, name, expected):
    module = _execute(compile_v1(statement.encode(), "user.py"))
    assert eval(name, module) is expected()


def test_names_that_tensorflow_never_had_are_refused_as_they_were_written():
    code = compile_v1(b"import tensorflow.no_such as x", "user.py")
    with pytest.raises(ModuleNotFoundError, match=r"'tensorflow\.no_such'"):
        _execute(code)


def test_relative_imports_are_left_alone():
    code = compile_v1(b"from . import tensorflow", "user.py")
    with pytest.raises(ImportError, match="no known parent package"):
        _execute(code, __name__="user")


def test_code_has_the_lines_and_columns_of_the_text(tmp_path):
    text = (
        '"""Doc."""\nfrom __future__ import annotations\nimport tensorflow as tf\n1/0\n'
    )
    code = compile_v1(text.encode(), "user.py")
    plain = compile(text, "user.py", "exec", dont_inherit=True)
    assert list(code.co_positions())[-5:] == list(plain.co_positions())[-5:]
    assert code.co_flags == plain.co_flags
    assert code.co_consts[0] == "Doc."


def test_only_files_that_nobody_installed_are_the_users(tmp_path, monkeypatch):
    target = tmp_path / "target"  # as `pip install --target` leaves it
    (target / "some-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(target)
    assert _imports.is_users(str(tmp_path / "script.py"))
    assert _imports.is_users(__file__)
    for installed in (
        os.__file__,
        tf.__file__,
        _imports.__file__,
        str(target / "some" / "__init__.py"),
        "/usr/lib/python3/dist-packages/some.py",
    ):
        assert not _imports.is_users(installed), installed


_SCRIPT = """import importlib, sys
from absl import logging
import tensorflow as tf
import installed
import package.module
import enabling
print(tf.__name__, package.module.tf is tf, installed.tf is tf)
print(tf.executing_eagerly(), tf.get_variable("v", []).op.type)
print(tf.cond(tf.placeholder(tf.bool, []), lambda: 1, lambda: 2).op.type)
v = tf.get_variable("random", [])
twice = tf.Variable(2 * v.initialized_value())
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    print(session.run(tf.equal(twice, 2 * v)))
    session.run(v.assign(7.0))
    print(session.run(v.initialized_value()))
print(importlib.import_module("tensorflow") is installed.tf)
logging.use_absl_handler()  # as tf.app.run does
tf.logging.error("said once")
tf.get_logger().getChild("estimator_accum").error("this too")
print(enabling.enable_v1() is tf, sys.argv)
package.module.fail()
"""
_MODULE = """import tensorflow as tf


def fail():
    tf.Session, tf.no_such
"""


@pytest.fixture
def script_folder(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "module.py").write_text(_MODULE)
    (tmp_path / "enabling.py").write_text(
        "from estimator_accum.compat.v1 import enable_v1\n"
    )
    installed = tmp_path / "installed" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "installed.py").write_text("import tensorflow as tf\n")
    (tmp_path / "script.py").write_text(_SCRIPT)
    return tmp_path


def test_runner_gives_tensorflow_1_to_the_users_modules_alone(script_folder):
    installed = str(script_folder / "installed" / "site-packages")
    path = os.pathsep.join([str(legacy_runs.running.ROOT), installed])
    arguments = ("-m", "estimator_accum.compat", "--v1", "script.py", "--its", "--v1")
    done = legacy_runs.run_python(None, *arguments, cwd=script_folder, PYTHONPATH=path)
    assert done.stdout.splitlines() == [
        "tensorflow.compat.v1 True False",
        "False VarHandleOp",
        "Merge",  # control flow of version 1
        "True",  # one random number for both
        "7.0",
        "True",
        "True ['script.py', '--its', '--v1']",
    ]
    assert done.returncode == 1
    assert done.stderr.count("said once") == done.stderr.count("this too") == 1
    assert "    tf.no_such: package/module.py line 5\n" in done.stderr
    trace = done.stderr[done.stderr.index("Traceback") :].splitlines()
    files = [line.split(", in ")[0] for line in trace if line.startswith("  File")]
    assert files[:2] == [
        f'  File "{script_folder / "script.py"}", line 22',
        f'  File "{script_folder / "package" / "module.py"}", line 5',
    ]
    assert "    tf.Session, tf.no_such" in trace
    assert trace[-1].startswith("AttributeError")
    # Python alone would run the bytecode, with TensorFlow 2.
    assert not list(script_folder.glob("package/__pycache__/*"))


def test_bytecode_of_a_run_without_v1_is_not_used(script_folder):
    module = script_folder / "package" / "module.py"
    command = [sys.executable, "-m", "py_compile", str(module)]
    subprocess.run(command, check=True)
    loader = _imports.UsersLoader("module", str(module))
    assert _execute(loader.get_code("module"))["tf"] is v1
