"""A forked program behaves like a started one, in all that `programs` promises."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import tensorflow as tf

from tests.helpers.processes import programs, running

pytestmark = pytest.mark.once

_FACTS = """
import atexit, json, logging, os, signal, sys, threading, warnings
facts = {
    "argv": sys.argv,
    "path": [each for each in sys.path if each],
    "main": [__name__, sys.modules["__main__"].__dict__ is globals()],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "signals": {n: repr(signal.getsignal(n))[:20] for n in (1, 2, 13, 15, 17)},
    "pipes": [os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in range(3)],
    "threads": threading.active_count(),
    "is_leader": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "parent": os.getppid(),
    "stdin": sys.stdin.read(),
    "buffering": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "encoding": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors],
    "handlers": len(logging.getLogger().handlers),
    "project": [name for name in sys.modules if name.startswith("estimator_accum")],
}
atexit.register(print, "the end")
print(json.dumps(facts))
threading.Timer(0.05, print, ["a thread"]).start()
"""


def _facts(folder, arguments, **options) -> tuple[list, str, str]:
    options |= {"input": "some input", "capture_output": True, "text": True}
    options["env"] = os.environ | {
        "OWN": "1",
        "PYTHONPATH": f"{folder}/a{os.pathsep}/b",
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, check=True, **options)
    first, *rest = done.stdout.splitlines()
    return json.loads(first), rest, done.stderr


@pytest.mark.parametrize("form", ["script", "module", "code"])
@pytest.mark.parametrize("has_session", [False, True])
def test_forked_program_finds_what_a_started_one_finds(tmp_path, form, has_session):
    (tmp_path / "facts.py").write_text(_FACTS)
    first = {"script": ["facts.py"], "module": ["-m", "facts"], "code": ["-c", _FACTS]}
    arguments = [*first[form], "--flag=1", "word"]
    ours = _facts(tmp_path, arguments, start_new_session=has_session)
    with programs.real_starts():
        theirs = _facts(tmp_path, arguments, start_new_session=has_session)
    for name, value in theirs[0].items():
        assert ours[0][name] == value, name
    assert ours[1:] == theirs[1:] == (["a thread", "the end"], "")


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit(130)", 130, ""),
        ("import sys; sys.exit('a sentence')", 1, "a sentence\n"),
        ("import os; os._exit(7)", 7, ""),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt\n"),
        ("import os; os.abort()", -6, ""),
        ("def f(): 1 / 0\nf()", 1, "ZeroDivisionError: division by zero\n"),
        ("def", 1, "SyntaxError: invalid syntax\n"),
    ],
)
def test_exit_codes_and_tracebacks(tmp_path, code, expected, said):
    script = tmp_path / "script.py"
    script.write_text(code)
    done = running.run(script)
    assert done.returncode == expected
    assert done.stderr.endswith(said) and bool(done.stderr) == bool(said)
    assert os.path.basename(programs.__file__) not in done.stderr


def test_signals_reach_the_program_alone():
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
    code += "print('ready', flush=True); signal.pause()"
    for number, expected in ((signal.SIGTERM, 5), (signal.SIGKILL, -9)):
        with subprocess.Popen([sys.executable, "-c", code], stdout=-1) as process:
            process.stdout.readline()
            process.send_signal(number)
            assert process.wait() == expected


def _optimizes_graphs() -> bool:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        config = session._config
    options = config and config.graph_options.rewrite_options
    is_off = tf.config.optimizer.get_experimental_options()["disable_meta_optimizer"]
    assert is_off == bool(options and options.disable_meta_optimizer)
    return not is_off


def test_graphs_are_optimized_only_where_a_test_asks_for_it():
    assert not _optimizes_graphs()
    with programs.graph_optimizer():
        assert _optimizes_graphs()


_NESTED = """
import ctypes, os, signal, subprocess, sys
def prepare():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
own = subprocess.Popen(
    [sys.executable, "-c", "import os, sys; print(sys.argv, flush=True); sys.stdin.read()"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, OPTIONS)
print(os.getppid(), own.stdout.readline(), own.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("options", ["", "start_new_session=True, preexec_fn=prepare"])
def test_program_of_a_program_is_its_child(options):
    code = _NESTED.replace(", OPTIONS", f", {options}")
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=-1, stdout=-1, text=True
    ) as process:
        parent, argv = process.stdout.readline().split(maxsplit=1)
        pid = int(process.stdout.readline())
        assert (int(parent), argv) == (os.getpid(), "['-c']\n")
        inner = psutil.Process(pid)
        assert inner.ppid() == process.pid
        assert (os.getpgid(pid) == pid) == bool(options)
        process.kill()
        process.wait()
        # One waits until its parent closes the pipe, the other one dies with its
        # parent.
        inner.wait(running.DEADLINE_SECS)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["echo"], {}),
        ([sys.executable, "-S", "-c", ""], {}),
        ([sys.executable, "-u", "-c", ""], {}),
        ([sys.executable, "-c", ""], {"env": {"PYTHONHASHSEED": "1"}}),
        ([sys.executable, "-c", ""], {"preexec_fn": lambda: None}),
        ([sys.executable, "-c", ""], {"env": {"TF_ENABLE_ONEDNN_OPTS": "0"}}),
    ],
)
def test_what_cannot_be_as_started_is_really_started(monkeypatch, command, options):
    monkeypatch.setattr(programs, "_server", None)  # a request for a fork fails
    monkeypatch.setattr(programs._Server, "start", None)
    subprocess.run(command, check=True, **options)


def test_program_does_not_import_tensorflow_again():
    code = "import sys; print('tensorflow' in sys.modules)"
    assert running.run("-c", code).stdout == "True\n"
