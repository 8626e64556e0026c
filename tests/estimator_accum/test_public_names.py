"""The package's public names, and that it takes no TensorFlow to import it."""

import subprocess
import sys

import pytest

import estimator_accum


@pytest.mark.parametrize("name", estimator_accum.__all__)
def test_public_names_are_there(name):
    assert getattr(estimator_accum, name).__name__ == name
    assert name in dir(estimator_accum)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="has no attribute 'accumulate'"):
        estimator_accum.accumulate  # noqa: B018, the error is what is tested


@pytest.mark.parametrize("module", ["", ".plan", ".batches", ".cluster"])
def test_what_needs_no_tensorflow_imports_none(module):
    program = f"import sys, estimator_accum{module}; print('tensorflow' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program]) == b"False\n"
