"""Fetching published files: download or take from disk, verify, unpack, put in place.

Nothing appears at its destination before it is complete, and an existing folder is not
changed, so that fetching twice is safe. The library `pooch` downloads: it tries again
after errors, compares checksums, and leaves nothing of a download that fails.
"""

import argparse
import contextlib
import pathlib
import shutil
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from estimator_accum.programs.command_line import FetchError, OneSentenceParser
from estimator_accum.programs.lock import locked

_CHUNK_BYTES = 1 << 18
_TIMEOUT_SECS = 60
_RETRIES = 3
# Exceptions of zipfile for damage, encryption (RuntimeError) and unknown compression.
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


def on_mirror(
    files: Sequence[RemoteFile], official_url: str, base_url: str
) -> list[RemoteFile]:
    """Returns the files as `base_url` publishes them, with the same paths."""
    return [
        replace(file, url=file.url.replace(official_url, base_url)) for file in files
    ]


def make_parser(
    description: str, official_url: str, archive_help: str, name: str | None = None
) -> OneSentenceParser:
    """Returns a fetching script's parser, with --archive, --base_url and --list.

    Args:
        description: Docstring of the script.
        official_url: Address of the files unless `--base_url` names a mirror.
        archive_help: Description of what `--archive` takes, one path or several.
        name: Name with which messages begin; None is the file's name.
    """
    parser = OneSentenceParser(description, prog=name, allow_abbrev=False)
    source = parser.add_argument_group("source of the files")
    source.add_argument(
        "--archive",
        type=pathlib.Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help=f"{archive_help}, downloaded by hand, instead of the network",
    )
    source.add_argument(
        "--base_url",
        type=_parse_base_url,
        default=official_url,
        help="a mirror with the same paths (default: %(default)s)",
    )
    source.add_argument(
        "--list",
        action="store_true",
        help="list all choices, with addresses and terms, then leave",
    )
    return parser


def _parse_base_url(base_url: str) -> str:
    if not base_url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"must be an http:// or https:// address. Received: {base_url!r}. Leave it "
            "out for the official one."
        )
    return base_url.rstrip("/")


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

    After an error, nothing of it is left.

    Raises:
        ValueError: If another process is in the same folder.
    """
    parent = destination.parent
    new_parents = [
        new_folder
        for new_folder in (parent, *parent.parents)
        if not new_folder.exists()
    ]
    staging = parent / f".{destination.name}.part"
    content = staging / "content"
    staging.mkdir(parents=True, exist_ok=True)
    try:
        with locked(staging):
            try:
                for left in staging.iterdir():  # by a process that was killed
                    if left.is_dir():
                        shutil.rmtree(left)
                content.mkdir()
                yield staging
                content.rename(destination)
            finally:
                shutil.rmtree(staging)
    finally:
        with contextlib.suppress(OSError):  # not empty: it has been filled
            for new_folder in new_parents:
                new_folder.rmdir()


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
        FetchError: If a download fails or has another checksum.
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
            f"`--archive` must be the file published at {file.url}, with the SHA-256 "
            f"{file.sha256}. Received: {path} with {sha256_of(path)}. Download it again."
        )


def sha256_of(path: pathlib.Path) -> str:
    """Returns a file's checksum in hexadecimal."""
    import pooch  # of an extra

    return pooch.file_hash(str(path))


def _download(file: RemoteFile, folder: pathlib.Path, by_hand: str) -> pathlib.Path:
    import pooch
    import requests  # which pooch needs

    pooch.get_logger().setLevel("ERROR")
    store = pooch.create(
        path=folder,
        base_url="",
        registry={file.name: file.sha256},
        urls={file.name: file.url},
        retry_if_failed=_RETRIES,
    )
    receive = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(),
        chunk_size=_CHUNK_BYTES,
        timeout=_TIMEOUT_SECS,
        # The published bytes: requests would unpack what a server packs for the way.
        headers={"User-Agent": "estimator-accum", "Accept-Encoding": "identity"},
    )
    try:
        return pathlib.Path(store.fetch(file.name, downloader=receive))
    except requests.RequestException as error:
        raise FetchError(
            f"{file.url} could not be downloaded: {root_cause(error)}. {by_hand}"
        ) from error
    except ValueError as error:
        raise wrong_checksum(file.url, file.sha256) from error


def wrong_checksum(name: str, sha256: str | None) -> FetchError:
    """Returns the error for a download that differs from the published file."""
    return FetchError(
        f"{name} must have the SHA-256 {sha256}. Received: another one. "
        "It was changed or damaged on its way: try again later."
    )


def root_cause(error: BaseException) -> str:
    """Returns the message of the first of a chain of errors, in one line."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return " ".join(str(error).split()).rstrip(".")


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
