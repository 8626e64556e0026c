"""Fetching published files: download or take from disk, verify, unpack, put in place.

Nothing appears at its destination before it is complete, and what is there already is
left alone, so that fetching twice is safe. A download that was cut off is kept beside
the destination, and the next call resumes it.
"""

import argparse
import contextlib
import hashlib
import pathlib
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bert_finetune.receiving import receive
from estimator_accum.programs.command_line import FetchError
from estimator_accum.programs.lock import locked

_CHUNK_BYTES = 1 << 18
_UNFINISHED = ".unfinished"  # suffix of a download that is not complete
# What zipfile raises for damage, encryption (RuntimeError) and unknown compression.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)


@dataclass(frozen=True)
class RemoteFile:
    """One published file.

    Attributes:
        url: Address at which it is published.
        sha256: Its checksum in hexadecimal; None if unknown.
    """

    url: str
    sha256: str | None = None

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.url.rpartition("/")[2]


def add_source_flags(
    parser: argparse.ArgumentParser, official_url: str, archive_help: str
) -> None:
    """Adds the flags of every fetching script: --archive, --base_url and --list.

    Args:
        parser: Parser that gets the flags.
        official_url: Address of the files unless `--base_url` names a mirror.
        archive_help: Description of what `--archive` takes, one path or several.
    """
    parser.add_argument(
        "--archive",
        type=pathlib.Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help=f"{archive_help}, downloaded by hand, instead of the network",
    )
    parser.add_argument(
        "--base_url",
        default=official_url,
        help="a mirror with the same paths (default: %(default)s)",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="show what there is, with addresses and terms, then leave",
    )


def check_base_url(base_url: str) -> None:
    """Raises ValueError unless `--base_url` is an http:// or https:// address."""
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(
            "`--base_url` must be an http:// or https:// address. "
            f"Received: {base_url!r}. Leave it out for the official one."
        )


def is_complete(destination: pathlib.Path, names: Sequence[str]) -> bool:
    """Returns whether `destination` holds all the files, False if it does not exist.

    Raises:
        ValueError: If it exists but lacks some of the files.
    """
    if not destination.exists():
        return False
    missing = [name for name in names if not (destination / name).is_file()]
    if missing:
        raise ValueError(
            f"{destination} must hold {', '.join(names)}, or not exist. Received: one "
            f"without {', '.join(missing)}. Remove it and run again."
        )
    return True


@contextlib.contextmanager
def staging_folder(destination: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a folder whose empty `content/` becomes `destination` at the end.

    After an error, nothing of it is left, unless it holds the beginning of a download:
    then the next call for the same destination yields the same folder, with the files
    that have arrived.

    Raises:
        ValueError: If another process is in the same folder.
    """
    parent = destination.parent
    new_parents = [each for each in (parent, *parent.parents) if not each.exists()]
    staging = parent / f".{destination.name}.part"
    content = staging / "content"
    staging.mkdir(parents=True, exist_ok=True)
    try:
        with locked(staging):
            for left in staging.iterdir():  # by a process that was killed
                if left.is_dir():
                    shutil.rmtree(left)
            content.mkdir()
            try:
                yield staging
                content.rename(destination)
            finally:
                if content.exists() and _has_unfinished(staging):
                    shutil.rmtree(content)
                else:
                    shutil.rmtree(staging)
    finally:
        with contextlib.suppress(OSError):  # not empty: it has been filled
            for each in new_parents:
                each.rmdir()


def _has_unfinished(staging: pathlib.Path) -> bool:
    parts = staging.glob(f"*{_UNFINISHED}")
    return any(part.is_file() and part.stat().st_size for part in parts)


def obtain(
    files: Sequence[RemoteFile], archives: Sequence[pathlib.Path], folder: pathlib.Path
) -> list[pathlib.Path]:
    """Returns verified local copies of the files, in their order.

    Args:
        files: The files to obtain.
        archives: Copies that the user has downloaded by hand, recognized by their
            names (one for a single file may have any name); if empty, the files are
            downloaded.
        folder: Folder for downloads.

    Raises:
        FetchError: If a download fails or has another checksum. What has arrived of a
            download that was cut off stays in `folder`.
        ValueError: If the archives are not those files.
    """
    if not archives:
        return [_download(file, folder, _by_hand(files)) for file in files]
    named = {path.name: path for path in archives}
    if len(files) == len(archives) == 1:
        named = {files[0].name: archives[0]}
    if set(named) != {file.name for file in files}:
        raise ValueError(
            f"`--archive` must name {' and '.join(file.name for file in files)}. "
            f"Received: {' '.join(map(str, archives))}. {_by_hand(files)}"
        )
    for file in files:
        _check_archive(file, named[file.name])
    return [named[file.name] for file in files]


def _by_hand(files: Sequence[RemoteFile]) -> str:
    return (
        f"By hand: download {' and '.join(file.url for file in files)} anywhere and "
        f"run this again with --archive {' '.join(file.name for file in files)}."
    )


def _check_archive(file: RemoteFile, path: pathlib.Path) -> None:
    if not path.is_file():
        raise ValueError(
            f"`--archive` must name an existing file. Received: {path}. "
            f"{_by_hand([file])}"
        )
    if file.sha256 and sha256_of(path) != file.sha256:
        raise ValueError(
            f"`--archive` must be what is published at {file.url}, with the SHA-256 "
            f"{file.sha256}. Received: {path} with {sha256_of(path)}. Download it again."
        )


def sha256_of(path: pathlib.Path) -> str:
    """Returns a file's checksum in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while chunk := content.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _download(file: RemoteFile, folder: pathlib.Path, by_hand: str) -> pathlib.Path:
    path = folder / file.name
    if not path.exists():  # otherwise from an earlier call, which did not get them all
        unfinished = folder / f"{file.name}{_UNFINISHED}"
        receive(file.url, unfinished, by_hand)
        unfinished.rename(path)
    if file.sha256 and (found := sha256_of(path)) != file.sha256:
        path.unlink()
        raise FetchError(
            f"{file.url} must have the SHA-256 {file.sha256}. Received: {found}. "
            "It was changed or damaged on its way: try again later."
        )
    return path


def unpack(
    archive: pathlib.Path, names: Sequence[str], folder: pathlib.Path, *, is_own: bool
) -> None:
    """Copies files out of a zip, from the one folder in it that has them all.

    Every file's checksum in the zip is verified; other files are left out.

    Args:
        archive: The zip.
        names: The files' names, without folders.
        folder: Existing folder that the files are copied to.
        is_own: Whether the user gave the archive; determines the type of the error.

    Raises:
        FetchError: If a download is damaged or lacks a file.
        ValueError: If the user's own archive is damaged or lacks a file.
    """
    error_type = ValueError if is_own else FetchError
    try:
        with zipfile.ZipFile(archive) as content:
            inside = _folder_inside(content.namelist(), names)
            for name in names:
                source = content.open(inside + name)
                with source, (folder / name).open("wb") as target:
                    shutil.copyfileobj(source, target, _CHUNK_BYTES)
    except _ZIP_ERRORS as error:
        raise error_type(
            f"{archive.name} must be an undamaged zip file. Received: {error}. "
            "Download it again."
        ) from error
    except KeyError as error:
        raise error_type(
            f"{archive.name} must hold {', '.join(names)} in one folder. Received: a "
            f"zip file without {error.args[0]}. It is not the published one: download "
            "it again."
        ) from error


def _folder_inside(members: Sequence[str], names: Sequence[str]) -> str:
    """Returns the shallowest folder of a zip that has all names: `` or `CoLA/`."""
    members = {"", *members}  # never without a folder
    folders = {member[: member.rfind("/") + 1] for member in members}
    lacking = {
        folder: [name for name in names if folder + name not in members]
        for folder in folders
    }
    best = min(folders, key=lambda folder: (len(lacking[folder]), len(folder)))
    if lacking[best]:
        raise KeyError(", ".join(lacking[best]))
    return best
