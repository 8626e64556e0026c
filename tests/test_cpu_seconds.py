"""cpu_seconds.py: the parts of a test's CPU seconds."""

import pytest

from tests.helpers.processes.cpu_seconds import Parts

pytestmark = pytest.mark.once


def test_a_part_has_its_seconds_without_the_parts_within_it():
    parts = Parts(iter([0, 1, 5, 10]).__next__)  # the inner part takes from 1 to 5
    outer, inner = parts.noting("setup"), parts.noting("fixture")
    next(outer)
    next(inner)
    for part in (inner, outer):
        with pytest.raises(StopIteration):
            next(part)
    assert parts.secs == {"setup": 6, "fixture": 4}
