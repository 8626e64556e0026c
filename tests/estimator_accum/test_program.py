"""What an import of TensorFlow writes to stderr."""

import pytest
import running

_NOISE = "import os, sys; os.write(2, b'noise\\n'); print('more', file=sys.stderr)"
_PROGRAM = f"""
import sys
from estimator_accum.program import quiet_import
with quiet_import(sys.argv[1:]):
    {_NOISE}
    {{end}}
print("after", file=sys.stderr)
"""


def _stderr(*arguments, end="pass"):
    return running.run("-c", _PROGRAM.format(end=end), *arguments).stderr


@pytest.mark.parametrize("arguments", [[], ["--verbosity=-1"], ["--task=v 0"]])
def test_import_is_quiet_and_what_follows_is_not(arguments):
    assert _stderr(*arguments) == "after\n"


@pytest.mark.parametrize(
    "arguments", [["--verbosity=0"], ["--verbosity", "1"], ["-v=1"]]
)
def test_verbosity_brings_the_noise_back(arguments):
    assert _stderr(*arguments) == "noise\nmore\nafter\n"


def test_import_that_fails_shows_the_noise():
    stderr = _stderr(end="import no_such_module")
    assert stderr.startswith("noise\nmore\nTraceback")
    assert "No module named 'no_such_module'" in stderr
