"""Errors that end a program: one sentence, one exit code."""

import errno
import fcntl
import os

import pytest
import tensorflow as tf

from estimator_accum.programs import ending
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.lock import locked

_OOM = tf.errors.ResourceExhaustedError(
    None,
    None,
    "Graph execution error:\n\n(0) OOM when allocating tensor with shape[8,12]\n\t[[x]]",
)


def _refusal(reason: Exception) -> ValueError:
    error = ValueError("One example must fit in memory.\nReceived: one.")
    error.__cause__ = reason
    return error


def _end(error: BaseException, folder, capsys) -> tuple[int, str]:
    """Returns the exit code of a program that fails, and its stderr."""
    ended = ending.ended_in_words("program", str(folder), "")
    with pytest.raises(SystemExit) as exit_info, ended:
        raise error
    return exit_info.value.code, capsys.readouterr().err


_SENTENCE = (
    "program: A batch must fit in memory. Received: (0) OOM when allocating tensor with "
    "shape[8,12]. Use smaller batches; --micro_batch_size=auto finds the size of those "
    "that train.\n"
)
_REFUSED = "program: One example must fit in memory. Received: one.\n"


def test_process_that_saves_nothing_is_stopped(capsys):
    assert _end(KeyboardInterrupt(), "", capsys) == (130, "program: stopped.\n")


@pytest.mark.parametrize(
    ("error", "sentence"), [(_OOM, _SENTENCE), (_refusal(_OOM), _REFUSED)]
)
def test_lack_of_memory_is_one_sentence(error, sentence, tmp_path, capsys):
    assert _end(error, tmp_path, capsys) == (2, sentence)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model.ckpt-5.index", "stopped. The same command resumes from the last check"),
        ("model/model.ckpt-5.index", "stopped. The same command resumes from the last"),
        ("run_settings.json", "stopped before the first checkpoint: nothing is saved"),
    ],
)
def test_ctrl_c_promises_to_resume_where_there_is_a_checkpoint(
    name, sentence, tmp_path, capsys
):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    code, said = _end(KeyboardInterrupt(), tmp_path, capsys)
    assert code == 130 and f"program: {sentence}" in said


def test_any_other_error_keeps_its_traceback(tmp_path, capsys):
    code, said = _end(_refusal(KeyError("x")), tmp_path, capsys)
    assert code == 1 and "Traceback" in said


class _Left(Exception):
    """Stands in for the end of a process."""


@pytest.mark.once
@pytest.mark.parametrize(
    ("task", "address"),
    [
        (("chief", 0), "chief:1 of chief 0"),
        (("worker", 1), "b:3 of worker 1"),
        (("ps", 0), "ps:4 of ps 0"),
    ],
)
def test_a_task_whose_port_is_taken_names_its_address(
    tmp_path, capsys, monkeypatch, task, address
):
    def leave(code):
        raise _Left(code)

    monkeypatch.setattr(ending.os, "_exit", leave)
    cluster = Cluster("chief:1", ("a:2", "b:3"), False, *task, servers=("ps:4",))
    ended = ending.ended_in_words("program", str(tmp_path), "", cluster)
    with pytest.raises(_Left, match="75"), ended:
        server = tf.distribute.Server({"local": ["127.0.0.1:0"]})
        taken = server.target.removeprefix("grpc://")
        tf.distribute.Server({"local": [taken]}, "local", 0)
    assert f"Received: {address}, whose port another" in capsys.readouterr().err


@pytest.mark.once
def test_a_task_that_may_not_open_its_port_is_told_so(tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise PermissionError

    codes = []
    monkeypatch.setattr(ending.os, "_exit", codes.append)
    monkeypatch.setattr(ending.socket.socket, "bind", refuse)
    cluster = Cluster("chief:80", ("a:2222",))
    with ending.ended_in_words("program", str(tmp_path), "", cluster):
        raise tf.errors.UnknownError(None, None, "Could not start gRPC server")
    said = capsys.readouterr().err
    assert codes == [2] and "Received: chief:80 of chief 0, and port 80 is" in said


@pytest.mark.once
@pytest.mark.parametrize(
    ("cluster", "code"), [(Cluster("a:1", ("b:2",)), 75), (Cluster(), 2)]
)
def test_a_cluster_is_started_again_when_its_folder_is_locked(
    tmp_path, monkeypatch, cluster, code
):
    codes = []
    monkeypatch.setattr(ending.os, "_exit", codes.append)
    monkeypatch.setattr(ending.sys, "exit", codes.append)
    with (
        locked(tmp_path),
        ending.ended_in_words("program", str(tmp_path), "", cluster),
        locked(tmp_path),
    ):
        pytest.fail("two processes hold one lock")
    assert codes[0] == code


@pytest.mark.once
@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOLCK, "that supports locks."),
        (errno.ENOSYS, "that supports locks."),
        (errno.ENOTSUP, "that supports locks."),
        (errno.EROFS, "that you may write to."),
    ],
)
def test_a_folder_without_locks_is_one_sentence(
    tmp_path, capsys, monkeypatch, number, remedy
):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    ended = ending.ended_in_words("program", str(tmp_path), "")
    with pytest.raises(SystemExit, match="2"), ended, locked(tmp_path):
        pytest.fail("there is no lock")
    (line,) = capsys.readouterr().err.splitlines()
    cause = f"whose .run.lock cannot be locked ({os.strerror(number)})"
    assert f"{tmp_path}, {cause}" in line and line.endswith(remedy)
