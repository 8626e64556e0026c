"""One run at a time in a folder; a second one names the process that has the lock."""

import socket
import threading

import pytest

from estimator_accum.programs.lock import LockedFolderError, locked
from tests.helpers.processes import running

pytestmark = pytest.mark.once
_HOLD = """
import pathlib, sys, time
from estimator_accum.programs.lock import locked
with locked(sys.argv[1]):
    pathlib.Path(sys.argv[1], "held").touch()
    time.sleep(10_000)
"""


def _wait_for_lock(folder, order) -> None:
    with locked(folder, waits=True):
        order.append("locked")


def test_a_folder_is_one_runs_until_that_ends_or_dies(tmp_path):
    with running.start("-c", _HOLD, tmp_path) as holder:
        running.wait_until((tmp_path / "held").exists, holder)
        with pytest.raises(LockedFolderError) as refused, locked(tmp_path):
            pass
        said = f"process {holder.process.pid} of {socket.gethostname()} runs since 2"
        assert said in str(refused.value)
        with locked(tmp_path, is_holder=False):  # a cluster's other tasks
            pass
        (tmp_path / ".run.holder").unlink()
        with pytest.raises(LockedFolderError, match="another proc"), locked(tmp_path):
            pass
        order = []
        thread = threading.Thread(target=_wait_for_lock, args=[tmp_path, order])
        thread.start()
        order.append("killed")
        holder.kill()
        thread.join(running.DEADLINE_SECS)
        assert order == ["killed", "locked"]
    with pytest.raises(ArithmeticError), locked(tmp_path):
        raise ArithmeticError
    with locked(tmp_path):
        assert (tmp_path / ".run.holder").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"held", ".run.lock"}
