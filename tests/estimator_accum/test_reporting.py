"""Progress: a bar on a terminal, a log line now and then elsewhere."""

import io
import logging
import sys

from estimator_accum import reporting
from estimator_accum.reporting import Progress, Update


def _update(step):
    return Update(
        update_step=step,
        global_step=4 * step,
        loss=0.5,
        gradient_norm=1.0,
        weight=4.0,
        learning_rate=None,
    )


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_updates_and_the_remaining_time(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress(total_updates=10)
    progress.open(4)
    for step in range(5, 8):
        progress.write(_update(step))
    progress.close()
    shown = terminal.getvalue()
    assert "7/10" in shown and "update" in shown and "loss=0.5" in shown
    assert "<" in shown  # elapsed<remaining


def test_elsewhere_a_line_appears_every_thirty_seconds(monkeypatch, caplog, capsys):
    caplog.set_level(logging.INFO, "tensorflow.estimator_accum")
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(reporting.time, "perf_counter", lambda: next(clock))
    progress = Progress(total_updates=100)
    progress.open(0)
    for step in range(1, 10):
        progress.write(_update(step))
    progress.close()
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) < 9
    assert lines[0].startswith("update 3 of 100: loss 0.5, ")
    assert lines[0].endswith(" left")
    assert capsys.readouterr().err == ""
