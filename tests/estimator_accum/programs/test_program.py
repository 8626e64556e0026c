"""A program's standard streams, and its error messages."""

import subprocess
import sys

import pytest
from absl import flags

from estimator_accum.programs.folder import make_run_folder
from estimator_accum.programs.program import path_sentence, sentence
from tests.helpers.processes import running

_NOISE = "import os, sys; os.write(2, b'noise\\n'); print('more', file=sys.stderr)"
_PROGRAM = f"""
import sys
from estimator_accum.programs.program import quiet_import
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


@pytest.mark.parametrize("given", [["--verbosity=0"], ["--verbosity", "1"], ["-v=1"]])
def test_verbosity_brings_the_noise_back(given):
    assert _stderr(*given) == "noise\nmore\nafter\n"


def test_import_that_fails_shows_the_noise():
    stderr = _stderr(end="import no_such_module")
    assert stderr.startswith("noise\nmore\nTraceback")
    assert "No module named 'no_such_module'" in stderr


def test_closed_streams_are_opened_and_say_nothing(tmp_path):
    program = _PROGRAM.format(end="pass") + "open(sys.argv[1], 'w').write('done')"
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    subprocess.run([*shell, tmp_path / "file"], cwd=running.ROOT, check=True)
    assert (tmp_path / "file").read_text() == "done"


def test_a_path_that_the_system_refuses_is_named(tmp_path):
    with pytest.raises(OSError, match="File name too long") as raised:
        (tmp_path / ("x" * 300)).mkdir()
    assert sentence(raised.value, flags.FlagValues()).endswith(
        "xxx': File name too long. Name another path, or change this one."
    )
    assert path_sentence(OSError("A sentence of our own.")) is None


def test_a_reader_that_leaves_is_no_error():
    program = (
        "import sys; from estimator_accum.programs.command_line import exit_code_of\n"
    )
    program += "sys.exit(exit_code_of(lambda: print('line\\n' * 100_000)))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=running.ROOT, **pipes) as process:
        process.stdout.close()
        assert process.wait() == 141
        assert process.stderr.read() == b""


@pytest.mark.once
@pytest.mark.usefixtures("real_starts")
def test_flags_are_read_before_tensorflow_is_imported():
    """The import takes seconds, and a launcher does not need it."""
    program = (
        "import sys, bert_finetune.run_classifier, distributed.launch_local\n"
        "import distributed.main, housing_example.main\n"
        "print('tensorflow' in sys.modules)"
    )
    assert running.run("-c", program).stdout == "False\n"


def test_the_folders_above_a_run_are_made_too(tmp_path):
    make_run_folder(tmp_path / "runs" / "first")
    assert (tmp_path / "runs" / "first").is_dir()
