"""Legacy scripts on TensorFlow without tf.estimator."""

import re

import pytest
import tensorflow as tf

from tests.helpers.processes import legacy_runs

later = pytest.mark.skipif(
    tf.__version__.startswith("2.15."),
    reason="TensorFlow 2.15 carries tf.estimator: nothing is replaced",
)


def _runner(*arguments, cwd=None, **variables):
    return legacy_runs.run_python(
        None, "-m", "estimator_accum.compat", *arguments, cwd=cwd, **variables
    )


def _cases():
    """Yields all scripts unedited, and one per import form with the two lines."""
    everywhere = ("train_and_evaluate", "tensorflow_1")
    for name in everywhere:
        yield name, "unedited"
    for name in legacy_runs.names():
        if name not in everywhere:
            yield pytest.param(name, "unedited", marks=later)
    for name in ("keras_in_estimators", "train_and_evaluate", "version_1_style"):
        yield pytest.param(name, "two_lines", marks=later)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), list(_cases()))
def test_legacy_script_runs(tmp_path, name, way):
    codes, output = legacy_runs.run(name, tmp_path, way)
    assert codes == [0]
    assert re.search(r"(?m)^(loss|slope|weights|prediction|regressor|multi_)", output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "tasks"),
    [
        ("unedited", ("worker", "worker")),
        pytest.param("two_lines", ("chief", "worker", "evaluator"), marks=later),
    ],
)
def test_legacy_cluster_runs(tmp_path, way, tasks):
    codes, output = legacy_runs.run("cluster", tmp_path, way, tasks=tasks)
    assert codes == [0] * len(tasks)
    assert len(re.findall(r"^slope (1\.99|2\.0)", output, re.MULTILINE)) == 2


@later
def test_legacy_script_needs_help(tmp_path):
    codes, output = legacy_runs.run("warm_start", tmp_path, "plain")
    assert codes == [1]
    assert "has no attribute 'estimator'" in output


def test_runner_enables_before_the_script_begins(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport tensorflow as tf\n"
        "print(sys.modules['__main__'].tf is tf, tf.estimator.ModeKeys.TRAIN)\n"
    )
    done = _runner(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True train\n"


_NOSY_SCRIPT = """'''Looks around.'''
import atexit, pickle, sys
import neighbor
class Picklable: pass
atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Picklable())))))
print(__name__, __file__, __doc__, __package__, __spec__, neighbor.__file__)
print(sys.argv, sys.path[0], vars(sys.modules["__main__"]) is globals())
if sys.argv[1] == "--exit":
    sys.exit(3)
if sys.argv[1] == "--interrupt":
    raise KeyboardInterrupt
if sys.argv[1] == "--fail":
    try:
        neighbor.fail()
    except KeyError as error:
        raise ValueError("and why") from error
"""


@pytest.mark.parametrize("flag", ["--exit", "--fail", "--interrupt"])
def test_runner_is_like_python_to_the_script(tmp_path, flag):
    (tmp_path / "neighbor.py").write_text("def fail():\n    raise KeyError(1)\n")
    (tmp_path / "script.py").write_text(_NOSY_SCRIPT)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "script.py").symlink_to("../script.py")
    command = ["link/script.py", flag, "--steps=2", "--help"]
    plain = legacy_runs.run_python(None, *command, cwd=tmp_path)
    done = _runner(*command, cwd=tmp_path)
    assert done.returncode == plain.returncode
    assert done.stdout == plain.stdout
    assert plain.stdout.endswith("<class '__main__.Picklable'>\n")
    assert done.stderr.endswith(plain.stderr)
    assert ("Traceback" in plain.stderr) == (flag in ("--fail", "--interrupt"))
    assert done.stderr.count("Traceback") == plain.stderr.count("Traceback")


_MODULE = """import pickle, sys
from . import neighbor
class Picklable: pass
print(__name__, __file__, __package__, __spec__.name, neighbor.__name__)
print(sys.argv, sys.path[0], type(pickle.loads(pickle.dumps(Picklable()))))
neighbor.fail()
"""


@pytest.mark.parametrize("name", ["package.module", "package"])
def test_runner_is_like_python_to_a_module(tmp_path, name):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "neighbor.py").write_text("def fail():\n    raise KeyError(1)\n")
    for file in ("module", "__main__"):
        (package / f"{file}.py").write_text(_MODULE)
    plain = legacy_runs.run_python(None, "-m", name, "--steps=2", cwd=tmp_path)
    done = _runner("-m", name, "--steps=2", cwd=tmp_path)
    assert done.returncode == plain.returncode == 1
    assert done.stdout == plain.stdout != ""
    trace = plain.stderr[plain.stderr.index(f'  File "{package}') :]
    assert done.stderr.endswith(f"Traceback (most recent call last):\n{trace}")


def test_runner_says_that_there_is_no_such_module(tmp_path):
    done = _runner("-m", "no_such", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "estimator-accum compat: -m must be followed by a module that is a file, or a "
        "package with a __main__.py. Received: no_such. Run it where python -m no_such "
        "works."
    )


def test_script_that_does_not_compile_fails_as_under_python(tmp_path):
    (tmp_path / "script.py").write_text("x = = 1\n")
    plain = legacy_runs.run_python(None, "script.py", cwd=tmp_path)
    done = _runner("script.py", cwd=tmp_path)
    assert done.returncode == plain.returncode == 1
    assert "SyntaxError" in plain.stderr
    assert done.stderr.endswith(plain.stderr)
    assert "Traceback" not in done.stderr


def test_runner_has_a_help_of_its_own():
    done = _runner("--help")
    assert (done.returncode, done.stderr) == (0, "")  # TensorFlow has not greeted
    assert done.stdout.startswith(
        "usage: estimator-accum compat [--v1] legacy_script.py --its --flags\n"
    )


@pytest.mark.parametrize(
    ("arguments", "received"), [([], "none"), (["/no/such.py"], "/no/such.py")]
)
def test_runner_without_a_script_says_one_sentence(arguments, received):
    done = _runner(*arguments, TF_CPP_MIN_LOG_LEVEL="3")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"estimator-accum compat: A Python script must be given. Received: {received}. "
        "Run: estimator-accum compat [--v1] legacy_script.py --its --flags"
    )


@later
def test_runner_says_a_refusal_in_one_sentence(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('not reached')")
    done = _runner(script, TF_USE_LEGACY_KERAS="0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        "estimator-accum compat: TF_USE_LEGACY_KERAS must be 1 for tf.estimator. "
        "Received: 0. Unset it, or set it to 1."
    )
