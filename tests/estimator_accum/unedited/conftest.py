"""Fixtures of the tests of unedited scripts."""

import pytest
from tensorflow.python.client import session
from tensorflow.python.ops import gradients_util


@pytest.fixture
def own_sessions(monkeypatch):
    """Restores the sessions and gradients of the process, which the commands change."""
    handler, helper = session._FetchHandler, gradients_util._GradientsHelper
    monkeypatch.setattr(handler, "__init__", handler.__init__)
    monkeypatch.setattr(gradients_util, "_GradientsHelper", helper)
