"""Lock for one run at a time in an output folder; it ends with its process.

Two runs in one folder would overwrite each other's checkpoints. The operating system
locks `.run.lock`; `.run.holder` names the process that holds the lock. Between machines
the lock works on network folders that support locks: NFS and SMB do, object storage
mounted as a folder does not.
"""

import contextlib
import datetime
import json
import os
import pathlib
import socket
from collections.abc import Iterator

import filelock

_LOCK, _HOLDER = ".run.lock", ".run.holder"


class LockedFolderError(ValueError):
    """Another process is running in the folder."""


@contextlib.contextmanager
def locked(output_dir: str | os.PathLike, is_holder: bool = True) -> Iterator[None]:
    """Holds the folder's lock inside a `with` block.

    Args:
        output_dir: The folder, which exists.
        is_holder: Whether this process takes the lock: in a cluster, only the chief.

    Raises:
        LockedFolderError: If another process holds the lock.
    """
    if not is_holder:
        yield
        return
    folder = pathlib.Path(output_dir)
    lock = filelock.FileLock(folder / _LOCK)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout as error:
        raise LockedFolderError(
            "A folder must be of one run at a time. Received: "
            f"{folder}, in which {_read_holder(folder / _HOLDER)}. Wait until it ends, "
            "or use another folder."
        ) from error
    holder = folder / _HOLDER
    try:
        holder.write_text(json.dumps(_describe_this_process()) + "\n")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _describe_this_process() -> dict:
    now = datetime.datetime.now().astimezone()
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": now.isoformat(" ", "seconds"),
    }


def _read_holder(path: pathlib.Path) -> str:
    try:
        holder = json.loads(path.read_text())
        pid, host, since = holder["pid"], holder["host"], holder["since"]
    except (OSError, ValueError, KeyError, TypeError):  # being written
        return "another process runs"
    return f"process {pid} of {host} runs since {since}"
