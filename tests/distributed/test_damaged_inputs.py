"""Damaged images or clusters: a task continues, or ends with one sentence."""

import json

import pytest

from distributed import inputs, jobs, main
from estimator_accum.programs.inputs import Inputs
from estimator_accum.programs.launchers import read_cluster
from tests.helpers.oracles import fuzzing

pytestmark = pytest.mark.once
_TF_CONFIG = {
    "cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"], "evaluator": ["d:4"]},
    "task": {"type": "worker", "index": 1},
    "rpc_layer": "grpc",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "execute", lambda job: None)

    def run(*flags: str) -> None:
        main.main(["", "--train_updates=3", f"--output_dir={tmp_path}/new", *flags])

    return run


def test_damaged_tf_config_is_used_or_refused(tmp_path, monkeypatch, run):
    monkeypatch.setattr(inputs, "read", _read)
    monkeypatch.setattr(jobs, "prepare", lambda read: read)

    def damage(content: bytes) -> None:
        text = content.decode(errors="surrogateescape").replace("\0", "")
        monkeypatch.setenv("TF_CONFIG", text)
        run()

    good = json.dumps(_TF_CONFIG).encode()
    fuzzing.check(fuzzing.damaged_json(good), damage, tmp_path / "new")


def _read(settings, cluster):
    """Returns inputs without examples, which are not damaged here."""
    return Inputs(settings, cluster, None, None, "")


@pytest.mark.parametrize("name", ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
def test_damaged_images_are_used_or_refused(name, tmp_path, run, idx_dir):
    good = (idx_dir / name).read_bytes()

    def damage(content: bytes) -> None:
        (idx_dir / name).write_bytes(content)
        run(f"--data_dir={idx_dir}", "--effective_batch_size=4")

    fuzzing.check(fuzzing.damaged(good), damage, tmp_path / "new")


@pytest.fixture
def idx_dir(tmp_path):
    """Folder with ten images of 4 x 4, in two files."""
    folder = tmp_path / "idx"
    folder.mkdir()
    sizes = b"\0\0\0\x0a" + b"\0\0\0\x04" * 2
    images = b"\0\0\x08\x03" + sizes + bytes(range(160))
    (folder / "t10k-images-idx3-ubyte").write_bytes(images)
    labels = b"\0\0\x08\x01\0\0\0\x0a" + bytes(range(10))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(labels)
    return folder


def test_the_good_ones_are_good(monkeypatch, run, idx_dir):
    assert read_cluster({"TF_CONFIG": json.dumps(_TF_CONFIG)}).num_workers == 3
    run(f"--data_dir={idx_dir}", "--effective_batch_size=4")
