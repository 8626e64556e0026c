"""Rows of a table of tests, some of which are left to the daily tier."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rows(table: Iterable, daily: Collection) -> list[Any]:
    """Returns a table's rows for `pytest.mark.parametrize`.

    Args:
        table: The rows; a tuple is the values of several arguments.
        daily: Those that are marked `daily`, since others fail for the same mistake.
    """
    table = list(table)
    unknown = set(daily) - set(table)
    assert not unknown, f"No row of the table: {unknown}."
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            marks=[pytest.mark.daily] if row in daily else [],
        )
        for row in table
    ]


def first(table: Iterable, chosen: Iterable) -> list[Any]:
    """Returns a table's rows, of which all but the chosen ones are marked `daily`."""
    table, chosen = list(table), set(chosen)
    assert chosen <= set(table), f"No row of the table: {chosen - set(table)}."
    return rows(table, set(table) - chosen)
