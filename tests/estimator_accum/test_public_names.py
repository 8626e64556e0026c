"""The package's public names."""

import pytest

import estimator_accum
from tests.helpers.processes import running


@pytest.mark.parametrize("name", estimator_accum.__all__)
def test_public_names_are_there(name):
    assert getattr(estimator_accum, name).__name__ == name
    assert name in dir(estimator_accum)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="has no attribute 'accumulate'"):
        estimator_accum.accumulate  # noqa: B018, the error is what is tested


def test_without_tensorflow_the_remedy_is_named():
    names = "from estimator_accum import get_windows"
    done = running.run("-c", f"import sys; sys.modules['tensorflow'] = None; {names}")
    assert "ImportError: estimator_accum needs TensorFlow 2.8 to 2.21." in done.stderr


def test_what_needs_no_tensorflow_imports_none(real_starts):
    modules = ("", ".compat", ".programs.batches", ".programs.launchers")
    imports = ", ".join(f"estimator_accum{module}" for module in modules)
    program = f"import sys, {imports}; print('tensorflow' in sys.modules)"
    assert running.run("-c", program).output == "False\n"
