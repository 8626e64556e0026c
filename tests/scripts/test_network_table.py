"""The table of K, which is also in the README of distributed/."""

import pathlib

import pytest

from scripts.benchmarks import network_table

pytestmark = pytest.mark.once
_README = pathlib.Path(__file__).resolve().parents[2] / "distributed" / "README.md"


def test_table_of_the_readme_is_what_the_script_prints(capsys):
    assert network_table.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3
    assert "\n".join(lines) in _README.read_text()


def test_larger_micro_steps_hide_more():
    [short] = [line for line in network_table.table(1e8, 0.1, 0.1) if "| 8 |" in line]
    [long] = [line for line in network_table.table(1e8, 0.2, 0.1) if "| 8 |" in line]
    assert short == "| 8 | K = 504 (5.60 s) | K = 51 (0.56 s) | K = 6 (0.06 s) |"
    assert long == "| 8 | K = 252 (5.60 s) | K = 26 (0.56 s) | K = 3 (0.06 s) |"
