"""Lock for one run at a time in an output folder; it ends with its process.

Two runs in one folder would overwrite each other's checkpoints. The operating system
locks `.run.lock`; `.run.holder` names the process that holds the lock. Between machines
the lock works on network folders that support locks: NFS and SMB do, object storage
mounted as a folder does not.
"""

import contextlib
import datetime
import errno
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

from estimator_accum.programs.folder import write_text

_LOCK, _HOLDER = ".run.lock", ".run.holder"


class LockedFolderError(ValueError):
    """Another process is running in the folder."""


class NoLockError(ValueError):
    """The operating system refuses the lock itself."""


@contextlib.contextmanager
def locked(
    output_dir: str | os.PathLike, is_holder: bool = True, *, waits: bool = False
) -> Iterator[None]:
    """Holds the folder's lock inside a `with` block.

    Args:
        output_dir: The folder, which exists.
        is_holder: Whether this process takes the lock: in a cluster, only the chief.
        waits: Whether to wait for a process that holds the lock.

    Raises:
        LockedFolderError: If another process holds the lock.
        NoLockError: If the folder cannot be locked, as on a file system without locks.
    """
    if not is_holder:
        yield
        return
    folder = pathlib.Path(output_dir)
    holder = folder / _HOLDER
    try:
        descriptor = _lock(folder / _LOCK, waits)
    except BlockingIOError as error:
        runs = "another process runs"
        if holder.exists():
            runs = holder.read_text(encoding="utf-8", errors="replace")
        raise LockedFolderError(
            f"A folder must be of one run at a time. Received: {folder}, in which "
            f"{runs}. Wait until it ends, or use another folder."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # the disk is full
            raise
        remedy = (
            "Use a folder of a local disk, or a network folder that supports locks."
        )
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "Use a folder that you may write to."
        raise NoLockError(
            f"A run must be able to lock its folder. Received: {folder}, whose {_LOCK} "
            f"cannot be locked ({error.strerror}). {remedy}"
        ) from error
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    name = f"process {os.getpid()} of {socket.gethostname()}"
    try:
        write_text(holder, f"{name} runs since {now}")
        yield
    finally:
        holder.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: pathlib.Path, waits: bool) -> int:
    """Locks a file; returns the descriptor that holds the lock until it is closed."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
