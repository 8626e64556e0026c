"""The command `estimator-accum`: its parts answer at once."""

import json
import re
import sys

import pytest

import estimator_accum
from estimator_accum import __main__ as command
from tests.helpers.processes import running

pytestmark = pytest.mark.once

_MODULES = {
    "train": "bert_finetune/run_classifier.py",
    "plan": "bert_finetune/plan.py",
    "fetch bert": "bert_finetune/fetch_bert.py",
    "fetch glue": "bert_finetune/fetch_glue.py",
    "import": "bert_finetune/import_hf_checkpoint.py",
    "plot": "estimator_accum/programs/plot_loss.py",
    "launch": "estimator_accum/programs/launch.py",
    "task": "estimator_accum/programs/task.py",
    "run": "estimator_accum/unedited/run.py",
    "check": "estimator_accum/unedited/check.py",
}


def _call(line: str) -> tuple[int, str, str]:
    """Returns (exit code, stdout, stderr)."""
    done = running.run("-m", "estimator_accum", *line.split())
    return done.returncode, done.stdout, done.stderr


def test_help_lists_every_command():
    code, said, _ = _call("--help")
    assert code == 0
    assert all(f"\n    {name} " in said for name in [*_MODULES, "compat"])
    listed = re.findall(r"^    (.+?)  ", said, re.MULTILINE)
    assert listed == [*command._COMMANDS]
    for line in ("", "help"):
        assert _call(line) == (0, said, "")


def test_help_of_fetch_is_its_own():
    code, said, _ = _call("fetch --help")
    assert code == 0 and "\n    fetch glue  downloads" in said and "train" not in said
    assert _call("fetch") == _call("help fetch") == (0, said, "")


@pytest.mark.parametrize("line", ["--version", "train --version", "plan --version"])
def test_version(line):
    said = f"estimator-accum {estimator_accum.__version__}\n"
    assert _call(line) == (0, said, "")


@pytest.mark.parametrize(
    "line, sentence",
    [
        (
            "trian",
            "estimator-accum: A command must be one of train, plan, .*Received: trian. Did you mean train?",
        ),
        ("fetch x", "must be one of fetch bert, fetch glue. Received: fetch x. See "),
        (
            "train --no_such=1",
            "estimator-accum train: Flags must be those of --help. Received: --no_such.",
        ),
        ("plan", "estimator-accum plan: The flags `--bert_config_file`, `--eff"),
    ],
)
def test_what_is_no_command_or_flag_is_one_sentence(line, sentence):
    code, out, error = _call(line)
    assert code == 2 and out == "" and error.count("\n") == 1
    assert all(part in error for part in sentence.split(".*"))


@pytest.mark.parametrize("name, path", _MODULES.items())
def test_a_command_is_its_program(name, path):
    source = (running.ROOT / path).read_text()
    description = source.partition('"""')[2].partition("\n")[0]
    code, said, _ = _call(f"{name} --help")
    assert code == 0 and description in said
    assert said.startswith(f"usage: estimator-accum {name} [")


def test_compat_runs_a_script_with_its_flags(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(__name__, sys.argv[1:])")
    line = ["-m", "estimator_accum", "compat", tmp_path / "script.py", "--its=flag"]
    assert running.run(*line).stdout.endswith("__main__ ['--its=flag']\n")


@pytest.mark.usefixtures("real_starts")
def test_help_version_and_bad_flags_import_neither_tensorflow_nor_pandas():
    """Imports of seconds, for an answer that the reader waits for."""
    program = (
        "import json, runpy, sys\n"
        "found = []\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    sys.argv[1:] = line.split()\n"
        "    try: runpy.run_module('estimator_accum', run_name='__main__')\n"
        "    except SystemExit: pass\n"
        "    found += {'tensorflow', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "print(found)"
    )
    lines = ["--help", "--version", *(f"{name} --help" for name in _MODULES)]
    lines += [f"{name} --no_such=1" for name in _MODULES if name != "launch"]
    done = running.run("-c", program, json.dumps(lines))
    assert done.stdout.endswith("[]\n"), done.output


@pytest.mark.parametrize(
    "missing, extra", [("tensorflow", "tf"), ("pandas", "plot"), ("tokenizers", "bert")]
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    monkeypatch, capsys, missing, extra
):
    def fail(*args, **kwargs):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(command.runpy, "run_module", fail)
    monkeypatch.setattr(sys, "argv", ["estimator-accum", "train"])
    assert command.main() == 2
    said = (
        f"estimator-accum train: The package {missing} must be installed. Received: "
        f"none. Run pip install 'estimator-accum[{extra}]'.\n"
    )
    assert capsys.readouterr().err == said
