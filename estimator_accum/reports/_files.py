"""Text files, wherever TensorFlow can read or write."""

import os
import pathlib
import re
import uuid


def path_in(folder: str | os.PathLike, name: str = "") -> str:
    """Returns the path of a folder, or of a file in it, without changing an address.

    Raises:
        ValueError: If `pathlib` has shortened an address: gs:/bucket; or if a shell has
            not expanded ~.
    """
    folder = os.fspath(folder)
    if folder.startswith("~"):
        raise ValueError(
            "The path of a folder must not begin with ~, which only shells expand. "
            f"Received: {folder}. Use os.path.expanduser, or ./~ for such a name."
        )
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)", folder):
        raise ValueError(
            "The address of a folder must have two slashes behind the colon. Received: "
            f"{folder}. Give it as a string: pathlib.Path drops one."
        )
    if _is_address(folder):
        return f"{folder.rstrip('/')}/{name}".rstrip("/")
    return str(pathlib.Path(folder, name))


def exists(path: str) -> bool:
    """Returns whether something is there, be it a link to nothing.

    Raises:
        OSError: If TensorFlow cannot look, such as in an unknown file system.
    """
    if not _is_address(path):
        return os.path.lexists(path)
    import tensorflow as tf

    try:
        return tf.io.gfile.exists(path)
    except tf.errors.OpError as error:
        raise OSError(error.message) from error


def read(path: str) -> str:
    """Returns the text of a file; raises OSError or ValueError if it has none."""
    return read_bytes(path).decode()


def read_bytes(path: str) -> bytes:
    """Returns the content of a file.

    Raises:
        OSError: If it cannot be read; FileNotFoundError if there is no such file.
    """
    if not _is_address(path):
        return pathlib.Path(path).read_bytes()
    import tensorflow as tf

    try:
        with _gfile().GFile(path, "rb") as file:
            return file.read()
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(error.message or "no such file") from error
    except tf.errors.OpError as error:
        raise OSError(error.message) from error


def write(path: str, text: str) -> None:
    """Replaces a file atomically, and makes its folder; several processes may do so."""
    partial = f"{path}.{uuid.uuid4().hex}.partial"
    if not _is_address(path):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        pathlib.Path(partial).write_text(text, encoding="utf-8", newline="")
        os.replace(partial, path)
        return
    _gfile().makedirs(path.rpartition("/")[0])
    with _gfile().GFile(partial, "w") as file:
        file.write(text)
    _gfile().rename(partial, path, overwrite=True)


def append(path: str, text: str) -> None:
    """Appends to a file."""
    with (
        _gfile().GFile(path, "a")
        if _is_address(path)
        else open(path, "a", encoding="utf-8", newline="")
    ) as file:
        file.write(text)


def _is_address(path: str) -> bool:
    return "://" in path


def _gfile():
    import tensorflow as tf  # not above: its import takes seconds

    return tf.io.gfile
