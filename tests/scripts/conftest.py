"""Fixtures that tests of fetching share."""

import pytest
from local_server import running_server


@pytest.fixture
def server(monkeypatch):
    """Publishes its `files`."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with running_server() as server:
        yield server
