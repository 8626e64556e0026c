"""Names that Python or NumPy removed."""

import collections
import importlib.util
import inspect
import os
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import variable_scope
from tensorflow.python.training import training_util

from estimator_accum.compat.v1 import _global_step, _removed

v1 = tf.compat.v1


@pytest.fixture
def installed(monkeypatch):
    """Installs the names, and takes them back; no imp."""
    for module in (inspect, collections, np):
        for name in set(_removed._NUMPY) | set(_removed._ABSTRACT) | {"getargspec"}:
            if name in vars(module):
                monkeypatch.setitem(vars(module), name, vars(module)[name])
            else:  # an item that is set and deleted is deleted in the end
                monkeypatch.setitem(vars(module), name, None)
                del vars(module)[name]
    monkeypatch.delitem(sys.modules, "imp", raising=False)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "imp" else find_spec(name, package),
    )
    _removed.install()
    yield
    del sys.modules["imp"]


@pytest.mark.usefixtures("installed", "fresh_graph")
def test_removed_names_are_there_again():
    assert np.object is object and np.int is int and np.float is float
    assert np.unicode is str and np.asscalar(np.array([3])) == 3
    assert np.array([1.0], np.float_).dtype == np.float64
    assert collections.Mapping is collections.abc.Mapping
    assert inspect.getargspec(os.path.join) == (["a"], "p", None, None)
    step = variable_scope.variable(lambda: 0, name="step", use_resource=True)
    assert step.op.name == "step"
    import distutils.version  # setuptools has it
    import imp

    assert distutils.version.LooseVersion("1.15") > distutils.version.LooseVersion(
        "1.9"
    )
    assert imp.new_module("m").__name__ == "m"


@pytest.mark.usefixtures("fresh_graph")
def test_a_variable_is_the_global_step_by_its_name(monkeypatch):
    for module in (training_util, v1.train):
        monkeypatch.setattr(module, "get_global_step", v1.train.get_global_step)
    _global_step.install()
    step = v1.Variable(6, name="global_step", trainable=False, use_resource=True)
    assert v1.train.get_or_create_global_step() is step
    assert v1.train.get_global_step() is step


def test_names_that_exist_are_left_alone():
    module = types.ModuleType("some")
    module.kept = 1
    _removed._add(module, {"kept": 2, "new": 3})
    assert (module.kept, module.new) == (1, 3)


def test_every_numpy_name_has_a_replacement_that_works():
    numpy = types.SimpleNamespace(**_removed._NUMPY)
    pairs = np.array([[1, 2], [3, 4]])
    assert numpy.product(pairs) == 24
    assert numpy.cumproduct([1, 2, 3]).tolist() == [1, 2, 6]
    assert numpy.sometrue([0, 1]) and not numpy.alltrue([0, 1])
    assert numpy.in1d(pairs, [2, 3]).tolist() == [False, True, True, False]
    assert numpy.row_stack(([1], [2])).tolist() == [[1], [2]]
    assert numpy.rank(pairs) == 2
    assert numpy.round_(1.26, 1) == 1.3
    assert numpy.PINF == -numpy.NINF == float("inf")


def test_getargspec_refuses_keyword_only_arguments():
    def function(a, b=1, *others, **rest):
        del a, b, others, rest

    assert _removed.getargspec(function) == (["a", "b"], "others", "rest", (1,))
    with pytest.raises(ValueError, match="without keyword-only arguments. Received"):
        _removed.getargspec(lambda *, a: a)


def test_load_source_imports_a_file_with_tensorflow_1(tmp_path, monkeypatch):
    (tmp_path / "settings.py").write_text("import tensorflow as tf\nRATE = 1\n")
    monkeypatch.setitem(sys.modules, "own_settings", None)
    module = _removed.load_source("own_settings", str(tmp_path / "settings.py"))
    assert module is sys.modules["own_settings"]
    assert (module.RATE, module.tf) == (1, tf.compat.v1)
