"""Disk space: refusals before training, full disks, removal of unfinished files."""

import collections
import errno
import logging
import shutil
import threading

import pytest
import tensorflow as tf

from estimator_accum.compat import enable_estimator
from estimator_accum.programs import disk, ending

enable_estimator()
v1 = tf.compat.v1
_Usage = collections.namedtuple("_Usage", "free")


@pytest.mark.parametrize(
    "kept, there, needed", [(5, 0, 600), (None, 0, 200), (5, 400, 200)]
)
def test_checkpoints_must_fit(kept, there, needed, tmp_path, monkeypatch, caplog):
    config = tf.estimator.RunConfig(str(tmp_path), keep_checkpoint_max=kept)
    (tmp_path / "model.ckpt-7.data-00000-of-00001").write_bytes(b"x" * there)
    with tf.Graph().as_default() as graph:
        v1.get_variable("w", [25], use_resource=True)
        graph_bytes = graph.as_graph_def().ByteSize()
        needed += graph_bytes * (2 if kept is None else 6)
        hook = disk.DiskSpaceHook(config)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(needed))
        with caplog.at_level(logging.INFO, "tensorflow.estimator_accum"):
            hook.begin()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(needed - 1))
        with pytest.raises(OSError, match="needed for checkpoints") as refused:
            hook.begin()
    assert refused.value.errno == errno.ENOSPC
    assert f"where {disk.spoken(needed)} are free" in caplog.text


@pytest.mark.parametrize(
    "size, text", [(999, "1 kB"), (10**6, "1.0 MB"), (2.5e12, "2,500.0 GB")]
)
def test_sizes_have_a_unit(size, text):
    assert disk.spoken(size) == text


def _behind(error):
    try:
        raise RuntimeError from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    "error, expected",
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "full"), True),
        (OSError(errno.EACCES, "denied"), False),
        (RuntimeError("events.out; No space left on device"), True),
        (
            tf.errors.ResourceExhaustedError(None, None, "x; No space left on device"),
            True,
        ),
        (tf.errors.ResourceExhaustedError(None, None, "OOM when allocating"), False),
        (_behind(OSError(errno.ENOSPC, "full")), True),
    ],
)
def test_a_full_disk_is_told_from_other_errors(error, expected):
    assert disk.is_of_full_disk(error) == expected


def test_a_full_disk_that_tensorflow_reports_is_one_sentence(tmp_path, capsys):
    full = tf.errors.ResourceExhaustedError(None, None, "No space left on device")
    ended = ending.ended_in_words("program", str(tmp_path), "")

    def write():
        raise full

    with pytest.raises(SystemExit, match="2"), ended:
        writer = threading.Thread(target=write)  # as TensorFlow's event writer
        writer.start()
        writer.join()
        write()
    said = capsys.readouterr().err
    assert "Received: no room is left. Free some" in said and said.count("\n") == 1


def test_what_was_cut_off_is_removed_and_nothing_else(tmp_path):
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("w", [])
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver()
        saver.save(session, str(tmp_path / "run" / "model.ckpt"), 3)
    kept = {path.name for path in (tmp_path / "run").iterdir()} | {"mine.tmp", "run"}
    (tmp_path / "mine.tmp").touch()
    (tmp_path / "run" / "model.ckpt-9_temp").mkdir()
    data = "data-00000-of-00001"
    names = [f"model.ckpt-9_temp/part-00000-of-00001.{data}", f"model.ckpt-9.{data}"]
    for name in (
        *names,
        "graph.pbtxt.tmp1f",
        "checkpoint.tmp2",
        "model.ckpt-3.meta.tmp3",
        ".results.txt.partial",
    ):
        (tmp_path / "run" / name).touch()
    assert disk.remove_unfinished(tmp_path / "run") == "model.ckpt-3"
    assert {path.name for path in tmp_path.rglob("*")} == kept
    assert disk.remove_unfinished(tmp_path) == "run/model.ckpt-3"  # of one of several
    assert disk.remove_unfinished(tmp_path / "run" / "other") is None
