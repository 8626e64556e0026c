"""scripts/experiments/keras_table.py: the table of Keras optimizers."""

import importlib.util
import re

import pytest

from scripts.experiments import keras_table


@pytest.mark.slow
@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_table_holds_its_bounds_and_shows_the_others(keras, capsys, monkeypatch):
    if importlib.util.find_spec(keras) is None:
        pytest.skip(f"{keras} is not installed")
    for feature in ("weight decay", "clipnorm"):  # like EMA and global_clipnorm
        monkeypatch.delitem(keras_table._FEATURES, feature)
    arguments = [f"--keras={keras}", "--optimizers=Adam", "--updates=4"]
    assert keras_table.main(arguments) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| Adam \|(.*)\|$", printed, re.MULTILINE)
    assert len(rows[0].split("|")) == 5
    if len(rows) > 1:  # Keras 3 moves averages and schedules per micro-step
        cells = [cell.split(",")[0] for cell in rows[1].split("|")]
        plain, average, schedule, *_ = map(float, cells)
        assert plain < 1e-6
        assert min(average, schedule) > 1e-3
