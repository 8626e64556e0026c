"""Fixtures shared by the tests of several packages."""

import collections
import gc
import importlib
import logging
import os
import pathlib
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.helpers.processes import cpu_seconds, programs, running

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_LONG = 24  # rows of a table
_WHOLE = {"rows", "keras", "compat"}  # folders whose tables run on both Pythons
# But tables of what models compute, in which Keras's version decides little.
_OF_GRAPHS = {"test_microbatch.py", "test_state_of_steps.py", "test_own_train_steps.py"}


def pytest_addoption(parser):
    cpu_seconds.add_option(parser)
    text = "leave out the tests marked daily"
    parser.addoption("--without-daily", action="store_true", help=text)
    text = "number of random losses in test_composed_losses.py"
    parser.addoption("--composed-losses", type=int, default=15, help=text)
    text = "number of attacks in test_attacked_rules.py, beyond those of each type"
    parser.addoption("--attacks", type=int, default=0, help=text)
    text = "number of looks of the spot check in test_rounded_products.py"
    parser.addoption("--looks", type=int, default=4, help=text)
    text = "number of killed workers in tests/distributed/test_ray_train.py"
    parser.addoption("--ray-kills", type=int, default=2, help=text)
    text = "write the digests that test_golden_graphs.py compares to its file"
    parser.addoption("--record-graphs", action="store_true", help=text)


def pytest_configure(config):
    """Imports TensorFlow where tests run, not in the process that hands them out.

    That one lets xdist's processes be forked, so TensorFlow is imported once for all.
    """
    # A shell's background process ignores Ctrl-C, as would all programs that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(cpu_seconds)
    has_processes = bool(config.getoption("numprocesses", None))
    programs.fork_from_now_on(unbuffered=has_processes)
    if has_processes:
        return
    gc.disable()  # until all modules are imported
    programs.write_no_graph_files()
    programs.optimize_few_graphs()
    programs.optimize_functions(False)
    tf = importlib.import_module("estimator_accum.compat").enable_estimator()
    if tf.__version__.startswith(("2.8.", "2.9.", "2.10.")):  # all are the older ones
        tf.keras.optimizers.legacy = tf.keras.optimizers


def pytest_collection_finish():
    """Leaves imported modules out of each collection of garbage."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # a graph is thousands of objects that stay
    gc.enable()


def pytest_unconfigure():
    """Leaves all objects out of the collections at the end of the process."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    """Marks rows `once`, and sorts files with many slow tests first.

    Such a file would run on a single core if it was the last one.
    """
    if config.getoption("without_daily"):
        daily = [item for item in items if item.get_closest_marker("daily")]
        items[:] = [item for item in items if not item.get_closest_marker("daily")]
        config.hook.pytest_deselected(items=daily)
    _mark_rows(items)
    marked = [item.path for item in items if item.get_closest_marker("slow")]
    slow = collections.Counter(marked)
    items.sort(key=lambda item: -slow[item.path])


def _mark_rows(items) -> None:
    """Marks `once` all but every third row of a table, or every sixth of a long one.

    The others show that the library reads the newest TensorFlow's graphs. The tests of a
    file that have no rows are a table, too. Tables of the core stay whole, and those of
    the folders `_WHOLE`, but for the rows of the files `_OF_GRAPHS`.
    """
    tables = collections.defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("once", "core"))):
            has_rows = hasattr(item, "callspec")
            table = item.nodeid.partition("[")[0] if has_rows else item.path
            tables[table].append(item)
    for rows in tables.values():
        parts = {*rows[0].path.parts}
        is_of_graphs = _OF_GRAPHS & parts and hasattr(rows[0], "callspec")
        if _WHOLE & parts and not is_of_graphs:
            continue
        step = 6 if len(rows) >= _LONG else 3
        for row in (row for number, row in enumerate(rows) if number % step):
            row.add_marker("once")


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_the_suite():
    """Fails if a program is left; this process adopts orphans, see programs.py."""
    yield
    children = psutil.Process().children(recursive=True)
    # Python's own resource tracker ends with this process.
    children = [
        child
        for child in children
        if child.pid != programs.server_pid() and not _is_resource_tracker(child)
    ]
    # The killed ones end soon, on a busy machine later.
    _, left = psutil.wait_procs(children, timeout=running.DEADLINE_SECS)
    names = ["pid", "ppid", "status", "cmdline", "cwd", "cpu_times"]
    described = [process.as_dict(names) for process in left]
    for process in left:
        process.kill()
    assert not described, f"tests must end what they start. Received: {described}."


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" in str(process.cmdline())
    except psutil.Error:  # it has ended
        return False


@pytest.fixture
def call(capsys) -> Callable[..., running.Done]:
    """Runs a script's `main` in this process."""

    def run(main, *flags) -> running.Done:
        try:
            code = main([*map(str, flags)])
        except SystemExit as left:
            code = left.code
        return running.Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def refusal(call, tmp_path) -> Callable[..., str]:
    """Runs `main`, which must refuse and write nothing; returns its error message."""

    def content() -> dict[pathlib.Path, bytes | None]:
        paths = tmp_path.rglob("*")
        return {path: path.read_bytes() if path.is_file() else None for path in paths}

    def run(main, *flags, code: int = 2) -> str:
        before = content()
        done = call(main, *flags)
        assert done.returncode == code
        assert done.stderr.count("\n") == 1, done.stderr
        assert content() == before
        return done.stderr

    return run


@pytest.fixture
def every_line(monkeypatch):
    """Lets the progress display print each line, however soon after the last one."""
    name = "estimator_accum.reports._display._SECS_BETWEEN_LINES"
    monkeypatch.setattr(name, 0)


@pytest.fixture
def real_starts():
    """Starts the programs of the test as a user does, without forking."""
    with programs.real_starts():
        yield


@pytest.fixture(scope="module")
def graph_optimizer():
    """Leaves TensorFlow's graph optimizer on, as users have it."""
    with programs.graph_optimizer():
        yield


@pytest.fixture(autouse=True)
def _loggers_as_before():
    """Restores the process's loggers, which main() changes and other tests read."""
    rooms = ("estimator_accum", "bert_finetune", "distributed", "housing_example")
    summary = "tensorflow.estimator_accum.summary"
    names = ("absl", "tensorflow", *(f"tensorflow.{room}" for room in rooms), summary)
    loggers = [logging.getLogger(name) for name in names]
    states = [(log.level, log.propagate, list(log.handlers)) for log in loggers]
    yield
    for log, (level, propagate, handlers) in zip(loggers, states, strict=True):
        log.setLevel(level)
        log.propagate = propagate
        log.handlers[:] = handlers
        log.disabled = False


@pytest.fixture
def count_session_runs(monkeypatch) -> Callable[[Callable[[], object]], int]:
    """Counts the `session.run` calls that a function makes in this process."""
    session, begun = importlib.import_module("tensorflow").compat.v1.Session, []
    run = session.run

    def noted(self, fetches, *args, **kwargs):
        begun.append(fetches)
        return run(self, fetches, *args, **kwargs)

    def count(function) -> int:
        before = len(begun)
        function()
        return len(begun) - before

    monkeypatch.setattr(session, "run", noted)
    return count


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path:
    """Folder with `cola/`, `housing/` and `mnist/`; skips the test if it is missing."""
    named = os.environ.get("ESTIMATOR_ACCUM_DATA")
    folder = pathlib.Path(named) if named else _REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(
            f"no real data at {folder}: set ESTIMATOR_ACCUM_DATA to a folder with "
            "cola/, housing/ and mnist/ to run this test"
        )
    return folder
