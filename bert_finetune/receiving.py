"""Receiving a file from the network: retried, and resumed after the bytes on disk."""

import contextlib
import http.client
import pathlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from tqdm import tqdm

from estimator_accum.programs.command_line import FetchError

_CHUNK_BYTES = 1 << 18
_TIMEOUT_SECS = 60
_PAUSES_SECS = (1, 2, 4)  # before each further attempt
_PASSING = (408, 429)  # HTTP errors that may pass, besides those of 500 and more
_NOT_SATISFIABLE = 416


def receive(url: str, path: pathlib.Path, by_hand: str) -> None:
    """Downloads a file, with a progress bar on a terminal.

    An attempt asks for the bytes that `path` does not have yet; a server that sends all
    of them is listened to from the start. Four attempts are made.

    Args:
        url: Address of the file.
        path: Local file. If it exists, it is the beginning of the file.
        by_hand: Sentence that ends the error message, with another way to get the file.

    Raises:
        FetchError: If the last attempt fails, or the server refuses. `path` has what
            has arrived.
    """
    for pause_secs in (*_PAUSES_SECS, None):
        try:
            return _receive_rest(url, path)
        except _NetworkError as error:
            if pause_secs is None or not error.may_pass:
                there = _size(path)
                resumed = f"The same command resumes after {there:,} bytes. "
                raise FetchError(
                    f"{url} could not be downloaded: {error}. "
                    f"{resumed if there else ''}{by_hand}"
                ) from error
        time.sleep(pause_secs)


class _NetworkError(Exception):
    """A failed attempt; `may_pass` says whether another one may succeed."""

    def __init__(self, reason: object, may_pass: bool = True):
        super().__init__(str(reason))
        self.may_pass = may_pass


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive_rest(url: str, path: pathlib.Path) -> None:
    there = _size(path)
    headers = {"User-Agent": "estimator-accum"}
    if there:
        headers["Range"] = f"bytes={there}-"
    request = urllib.request.Request(url, headers=headers)
    with contextlib.ExitStack() as stack:
        with _network_errors(path):
            response = stack.enter_context(
                urllib.request.urlopen(request, timeout=_TIMEOUT_SECS)
            )
        is_rest = response.headers.get("Content-Range", "").startswith(
            f"bytes {there}-"
        )
        received = there if is_rest else 0
        length = response.headers["Content-Length"]
        total = received + int(length) if length else None
        bar = stack.enter_context(
            tqdm(
                desc=url.rpartition("/")[2],
                initial=received,
                total=total,
                unit="B",
                unit_scale=True,
                disable=None,  # no bar unless stderr is a terminal
            )
        )
        output = stack.enter_context(path.open("ab" if is_rest else "wb"))
        while True:
            with _network_errors(path):
                chunk = response.read(_CHUNK_BYTES)
            if not chunk:
                break
            output.write(chunk)
            received += len(chunk)
            bar.update(len(chunk))
        if total is not None and received < total:
            raise _NetworkError(f"it ended after {received} of {total} bytes")


@contextlib.contextmanager
def _network_errors(path: pathlib.Path) -> Iterator[None]:
    # Only around network calls: a disk error must not be reported as a network error.
    try:
        yield
    except urllib.error.HTTPError as error:
        if error.code == _NOT_SATISFIABLE:  # `path` is not the beginning of this file
            path.unlink(missing_ok=True)
        may_pass = error.code >= 500 or error.code in (*_PASSING, _NOT_SATISFIABLE)
        raise _NetworkError(error, may_pass) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)  # urllib's own says no more
        raise _NetworkError(getattr(reason, "strerror", None) or reason) from error
