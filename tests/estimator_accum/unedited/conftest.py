"""Fixtures of the tests of unedited scripts."""

import pytest

from estimator_accum.graph import internals


@pytest.fixture
def own_sessions(monkeypatch):
    """Restores the sessions and gradients of the process, which the commands change."""
    for place in (internals.INIT_OF_FETCHES, internals.GRADIENTS):
        monkeypatch.setattr(*place, getattr(*place))
