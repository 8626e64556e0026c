"""A program's standard streams; its error messages."""

import io
import json
import subprocess
import sys

import pytest
from absl import flags

from estimator_accum.programs import command_line, launch, program
from estimator_accum.programs.folder import make_run_folder
from estimator_accum.programs.sentences import path_sentence, sentence
from housing_example.main import PROGRAM as HOUSING
from tests.helpers.models import tiny_bert
from tests.helpers.processes import running

pytestmark = pytest.mark.once
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


@pytest.mark.parametrize("flags", [["--verbosity=0"], ["--verbosity", "1"], ["-v=1"]])
def test_verbosity_brings_the_noise_back(flags):
    assert _stderr(*flags) == "noise\nmore\nafter\n"


def test_import_that_fails_shows_the_noise():
    stderr = _stderr(end="import no_such_module")
    assert stderr.startswith("noise\nmore\nTraceback")
    assert "No module named 'no_such_module'" in stderr


def test_ctrl_c_before_the_jobs_is_one_sentence(monkeypatch, capsys, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "set_verbosity", interrupted)
    with pytest.raises(SystemExit) as ended:
        HOUSING.run(["", f"--output_dir={tmp_path}", "--train_csv=a.csv"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"{HOUSING.name}: stopped by Ctrl-C\n"


def test_closed_streams_are_opened_and_say_nothing(tmp_path):
    program = _PROGRAM.format(end="pass") + "open(sys.argv[1], 'w').write('done')"
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program]
    subprocess.run([*shell, tmp_path / "file"], cwd=running.ROOT, check=True)
    assert (tmp_path / "file").read_text() == "done"


def test_a_path_that_the_system_refuses_is_named(tmp_path):
    with pytest.raises(OSError, match="File name too long") as raised:
        (tmp_path / ("x" * 300)).mkdir()
    assert sentence(raised.value, flags.FlagValues()).endswith(
        "xxx': File name too long. Correct it, or name another one."
    )
    assert path_sentence(OSError("A sentence of our own.")) is None


@pytest.mark.parametrize("entrance", ["script", "program", "launcher"])
def test_a_character_that_the_output_lacks_is_escaped(entrance, monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stdout)
    if entrance == "script":
        command_line.exit_code_of(lambda: None)
    elif entrance == "program":
        HOUSING.run(["", "--version"])
    else:
        monkeypatch.setattr(launch, "_keep_running", lambda launched: 0)
        launch.run(launch.Launch([], 1))
    stdout.seek(0)
    print("5 €", file=stdout, flush=True)
    assert stdout.buffer.getvalue().startswith(b"5 \\u20ac\n")


def test_a_reader_that_leaves_is_no_error():
    program = (
        "import sys; from estimator_accum.programs.command_line import exit_code_of\n"
    )
    program += "sys.exit(exit_code_of(lambda: print('line\\n' * 100_000)))"
    assert _code_without_reader(program) == 141
    program = "from estimator_accum.programs.program import show\n"
    assert _code_without_reader(program + "show('line\\n' * 100_000)") == 0


def _code_without_reader(program: str) -> int:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=running.ROOT, **pipes) as process:
        process.stdout.close()
        code = process.wait()
        assert process.stderr.read() == b""
    return code


@pytest.mark.usefixtures("real_starts")
def test_what_needs_no_tensorflow_is_checked_before_its_import(tmp_path):
    """The import takes seconds, and a launcher does not need it."""
    bert = tmp_path / "bert"
    tiny_bert.write_bert(bert)
    tiny_bert.write_cola(tmp_path / "cola")
    good = tiny_bert.command_line(bert, tmp_path / "cola", tmp_path / "new")
    train = "bert_finetune.run_classifier"
    sizes = {"effective_batch_size": 30, "gradient_accumulation_steps": 4}
    sizes |= {"micro_batch_size": 7}
    commands = [
        (train, good | changes)
        for changes in (
            {"task_name": "COLAA"},
            sizes,
            {"data_dir": "nowhere"},
            {"vocab_file": "nowhere"},
            {"bert_config_file": "nowhere"},
            {"max_seq_length": 2},
            {"max_seq_length": 25},
            {"output_dir": "/dev/null"},
        )
    ]
    commands += [
        ("bert_finetune.import_hf_checkpoint", {"input_dir": "n", "output_dir": "m"}),
        ("housing_example.main", {"train_csv": "nowhere.csv"}),
        ("housing_example.main", {"output_dir": "/dev/null"}),
        ("housing_example.main", {"output_dir": bert}),
        ("housing_example.main", {"output_dir": tmp_path / "new"} | sizes),
        ("distributed.main", {"data_dir": "nowhere"}),
        ("distributed.main", {"output_dir": "/dev/null"}),
        ("distributed.main", {"output_dir": tmp_path / "new"} | sizes),
        ("distributed.launch_local", {"workers": 0}),
    ]
    program = (
        "import json, runpy, sys\n"
        "for module, flags in json.loads(sys.argv[1]):\n"
        "    sys.argv[1:] = [f'--{name}={value}' for name, value in flags.items()]\n"
        "    try:\n"
        "        runpy.run_module(module, run_name='__main__', alter_sys=True)\n"
        "    except SystemExit as end:\n"
        "        print(end.code, 'tensorflow' in sys.modules)\n"
    )
    done = running.run("-c", program, json.dumps(commands, default=str))
    assert done.stdout.split("\n")[:-1] == ["2 False"] * len(commands), done.stderr
    assert done.stderr.count("\n") == len(commands)


def test_the_folders_above_a_run_are_made_too(tmp_path):
    make_run_folder(tmp_path / "runs" / "first")
    assert (tmp_path / "runs" / "first").is_dir()
