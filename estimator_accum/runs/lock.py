"""One run at a time in an output folder: a lock that ends with the process that holds it.

Two runs in one folder would write checkpoints over one another's. `.run.lock` is locked,
by the operating system; `.run.holder` says by whom. Between machines that holds where a
network folder has locks: NFS and SMB do, object storage mounted as a folder does not.
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
    """Another process runs in the folder."""


@contextlib.contextmanager
def locked(output_dir: str | os.PathLike, is_holder: bool = True) -> Iterator[None]:
    """Holds the folder's lock inside a `with` block.

    Args:
        output_dir: The folder, which exists.
        is_holder: Whether this process is to hold it: of a cluster, the chief is.

    Raises:
        LockedFolderError: If another process holds it.
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
            "`--output_dir` must be of one run at a time. Received: "
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
    except (OSError, ValueError, KeyError, TypeError):  # it is just writing it
        return "another process runs"
    return f"process {pid} of {host} runs since {since}"
