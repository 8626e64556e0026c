"""Fetching MNIST: what arrives, what is verified, and what is said when it fails."""

import hashlib
from dataclasses import replace

import pytest
from local_server import assert_one_sentence, content_of

from scripts import fetch_mnist

pytestmark = pytest.mark.once
_NAMES = [file.name for file in fetch_mnist.FILES]


@pytest.fixture
def server(server, monkeypatch):
    """Publishes made-up files, whose checksums are taken for the published ones."""
    server.files = {f"/{name}": f"content of {name}".encode() for name in _NAMES}
    sums = [hashlib.sha256(each).hexdigest() for each in server.files.values()]
    files = zip(fetch_mnist.FILES, sums, strict=True)
    files = tuple(replace(file, sha256=made_up) for file, made_up in files)
    monkeypatch.setattr(fetch_mnist, "FILES", files)
    return server


@pytest.fixture
def mnist(server, tmp_path, capsys):
    """Runs fetch_mnist against the server: exit code, stdout, stderr."""

    def run(*flags):
        own = [f"--base_url={server.url}", f"--data_dir={tmp_path / 'mnist'}"]
        return fetch_mnist.main([*own, *map(str, flags)]), *capsys.readouterr()

    return run


def test_four_files_make_the_folder(mnist, server, tmp_path):
    code, stdout, stderr = mnist()
    assert (code, stderr) == (0, "")
    assert "MNIST: LeCun et al. 1998" in stdout
    assert content_of(tmp_path / "mnist") == {
        name: f"content of {name}" for name in _NAMES
    }
    assert [path.name for path in tmp_path.iterdir()] == ["mnist"]
    code, stdout, _ = mnist()
    assert code == 0 and "already in" in stdout
    assert len(server.requests) == 4


def test_file_that_is_missing_or_changed_leaves_nothing(mnist, server, tmp_path):
    last = f"/{_NAMES[-1]}"
    server.files[last] += b"!"
    code, _, stderr = mnist()
    assert code == 1
    assert_one_sentence(stderr, r"must have the SHA-256 \w+\. Received: \w+\. ")
    del server.files[last]
    code, _, stderr = mnist()
    assert code == 1
    assert_one_sentence(stderr, r"could not be downloaded: .*404.*--archive")
    assert not list(tmp_path.iterdir())


def test_files_downloaded_by_hand_need_no_network(mnist, server, tmp_path):
    by_hand = tmp_path / "by_hand"
    by_hand.mkdir()
    for name, content in server.files.items():
        (by_hand / name[1:]).write_bytes(content)
    code, _, stderr = mnist("--archive", *sorted(by_hand.iterdir()))
    assert (code, stderr, server.requests) == (0, "", [])
    assert content_of(tmp_path / "mnist") == content_of(by_hand)


def test_list_shows_addresses_and_terms(mnist, server):
    code, stdout, _ = mnist("--list")
    assert code == 0 and "LeCun" in stdout and server.requests == []
    for name in _NAMES:
        assert f"{server.url}/{name}" in stdout


def test_published_test_files_have_the_checksums(real_data):
    for file in fetch_mnist.FILES:
        path = real_data / "mnist" / file.name
        if path.exists():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    assert (real_data / "mnist" / _NAMES[2]).exists()
