"""disturb_evaluation.py: errors change no metric and no prediction; faults are found."""

import re

from estimator_accum.microbatch import _graph
from scripts.experiments import disturb_evaluation

_ROW = re.compile(r"\| (\w+) \| (\d+) \| \d+ \| (\w+) \| (\d+) \| (\d+) \|")


def _rows(text: str) -> dict[tuple[str, str], tuple[int, int]]:
    return {
        (job, name): (int(differences), int(distance))
        for job, _, name, differences, distance in _ROW.findall(text)
    }


def test_out_of_memory_changes_no_metric_and_no_prediction(capsys):
    assert disturb_evaluation.main(["--errors=5"]) == 0
    rows = _rows(capsys.readouterr().out)
    names = {"auc", "confusion", "loss", "mean_loss", "out_of_order"}
    assert {("evaluation", name) for name in names} <= rows.keys()
    assert {("prediction", name) for name in ("text", "probability")} <= rows.keys()
    assert all(differences == 0 for differences, _ in rows.values())
    assert all(distance <= 64 for _, distance in rows.values())


def test_a_metric_that_is_not_rolled_back_is_found(capsys, monkeypatch):
    monkeypatch.setattr(_graph.Snapshot, "_copy", lambda self, variable: None)
    monkeypatch.setattr(disturb_evaluation, "_JOBS", ("evaluation",))
    assert disturb_evaluation.main(["--errors=5"]) == 1
    differences, distance = _rows(capsys.readouterr().out)["evaluation", "examples"]
    assert differences and distance
