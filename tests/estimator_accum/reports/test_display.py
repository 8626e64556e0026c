"""The progress display: a bar in a terminal or a notebook, lines elsewhere."""

import importlib
import io
import logging
import re
import sys
import types
import warnings

import pytest

from estimator_accum.reports import _display
from estimator_accum.reports._display import Display

pytestmark = pytest.mark.once


class _Terminal(io.StringIO):
    def isatty(self):
        return True


_NotebookStream = type(
    "OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"}
)


@pytest.mark.parametrize("kind", [_Terminal, _NotebookStream])
def test_a_terminal_and_a_notebook_show_a_bar_with_the_remaining_time(
    monkeypatch, kind
):
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    display = Display("training", "update", 10)
    display.open(4)
    for done in range(5, 8):
        display.show(done, loss="0.5")
    display.close()
    shown = stream.getvalue()
    assert "training" in shown and "7/10" in shown and "update" in shown
    assert "<" in shown and "loss=0.5" in shown  # elapsed<remaining


def test_a_bar_below_another_one_goes_when_it_is_closed(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    training, evaluation = Display("training", "update", 9), Display("test", "batch", 1)
    training.open()
    evaluation.open()
    evaluation.show(1)
    evaluation.close()
    cleared = terminal.getvalue().rpartition("batch/s]")[2]
    assert re.fullmatch(r"(\s|\x1b\[A)+", cleared) and " " * 20 in cleared
    training.close()
    assert re.search(r"training: .*\n$", terminal.getvalue())


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves ten seconds at every look."""
    times = iter(range(0, 10_000, 10))
    monkeypatch.setattr(_display.time, "perf_counter", lambda: next(times))


@pytest.mark.parametrize(
    ("level", "where"),
    [(logging.INFO, "log"), (logging.WARNING, "stderr"), (logging.ERROR, "nowhere")],
)
def test_elsewhere_a_line_appears_every_thirty_seconds(
    clock, caplog, capsys, level, where
):
    caplog.set_level(level, "tensorflow.estimator_accum")
    display = Display("training", "update", 120)
    display.open(20)
    for done in range(21, 30):
        display.show(done, loss="0.5")
    display.close()
    lines = {
        "log": [record.getMessage() for record in caplog.records],
        "stderr": capsys.readouterr().err.splitlines(),
        "nowhere": [],
    }
    assert lines["nowhere"] == lines.pop("stderr" if where == "log" else "log")
    if where != "nowhere":
        first, *others = lines[where]
        assert first == "training: update 23 of 120, loss 0.5, 21:33 left"
        assert 1 <= len(others) < 4
    else:
        assert lines["stderr"] == []


def test_a_line_without_a_total_has_the_place_alone(clock, capsys, caplog):
    caplog.set_level(logging.WARNING, "tensorflow.estimator_accum")
    display = Display("prediction", "batch", None)
    display.open()
    for done in range(1, 2000, 500):
        display.show(done)
    assert capsys.readouterr().err.splitlines() == ["prediction: batch 1,001"]


@pytest.fixture
def import_in_notebook(monkeypatch):
    """Imports the display again, as in a notebook with these modules; returns its bar."""

    def imported(**modules):
        shell = type("ZMQInteractiveShell", (), {})
        ipython = types.SimpleNamespace(get_ipython=shell)
        modules = {"ipykernel.zmqshell": object(), "IPython": ipython} | modules
        for name in ("auto", "autonotebook", "notebook"):
            monkeypatch.delitem(sys.modules, f"tqdm.{name}", raising=False)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            importlib.reload(_display)
        assert heard == []
        return _display.tqdm.auto.tqdm

    before = sys.modules["tqdm.auto"]
    yield imported
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "tqdm.auto", before)
    importlib.reload(_display)
    _display.tqdm.auto = before


def test_a_notebook_without_ipywidgets_has_a_bar_of_text_and_no_warning(
    import_in_notebook,
):
    bar = import_in_notebook(ipywidgets=None)
    assert not issubclass(bar, sys.modules["tqdm.notebook"].tqdm)


def test_a_notebook_with_ipywidgets_has_its_bar(import_in_notebook):
    names = ("HTML", "FloatProgress", "HBox")
    widgets = types.SimpleNamespace(**{name: type(name, (), {}) for name in names})
    bar = import_in_notebook(ipywidgets=widgets)
    assert issubclass(bar, sys.modules["tqdm.notebook"].tqdm)
