"""Fetching MNIST: files, checksums, and error messages."""

import functools
import hashlib
import re
from dataclasses import replace

import pytest

from scripts import fetch_mnist
from tests.helpers.local_server import content_of

pytestmark = pytest.mark.once
_NAMES = [file.name for file in fetch_mnist.FILES]


@pytest.fixture
def server(server, monkeypatch):
    """A server with made-up files, whose checksums replace the published ones."""
    server.files = {f"/{name}": f"content of {name}".encode() for name in _NAMES}
    sums = [hashlib.sha256(each).hexdigest() for each in server.files.values()]
    files = zip(fetch_mnist.FILES, sums, strict=True)
    files = tuple(replace(file, sha256=made_up) for file, made_up in files)
    monkeypatch.setattr(fetch_mnist, "FILES", files)
    return server


@pytest.fixture
def flags(server, tmp_path):
    return [f"--base_url={server.url}", f"--data_dir={tmp_path / 'mnist'}"]


@pytest.fixture
def mnist(call, flags):
    """Runs fetch_mnist against the server."""
    return functools.partial(call, fetch_mnist.main, *flags)


def test_four_files_make_the_folder(mnist, server, tmp_path):
    done = mnist()
    assert (done.returncode, done.stderr) == (0, "")
    assert "MNIST: LeCun et al. 1998" in done.stdout
    expected = {name: f"content of {name}" for name in _NAMES}
    assert content_of(tmp_path / "mnist") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["mnist"]
    assert "already in" in mnist().stdout
    assert len(server.requests) == 4


def test_file_that_is_missing_or_changed_leaves_nothing(refusal, flags, server):
    last = f"/{_NAMES[-1]}"
    server.files[last] += b"!"
    stderr = refusal(fetch_mnist.main, *flags, code=1)
    assert re.search(r"must have the SHA-256 \w+\. Received: \w+\. ", stderr)
    del server.files[last]
    stderr = refusal(fetch_mnist.main, *flags, code=1)
    assert re.search(r"could not be downloaded: .*404.*--archive", stderr)


def test_files_downloaded_by_hand_need_no_network(mnist, server, tmp_path):
    by_hand = tmp_path / "by_hand"
    by_hand.mkdir()
    for name, content in server.files.items():
        (by_hand / name[1:]).write_bytes(content)
    assert mnist("--archive", *sorted(by_hand.iterdir())).stderr == ""
    assert server.requests == []
    assert content_of(tmp_path / "mnist") == content_of(by_hand)


def test_list_shows_addresses_and_terms(mnist, server):
    stdout = mnist("--list").stdout
    assert "LeCun" in stdout and server.requests == []
    for name in _NAMES:
        assert f"{server.url}/{name}" in stdout


def test_published_test_files_have_the_checksums(real_data):
    for file in fetch_mnist.FILES:
        path = real_data / "mnist" / file.name
        if path.exists():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    assert (real_data / "mnist" / _NAMES[2]).exists()
