"""Output folder of a run, in which it may resume.

A run writes `run_settings.json` beside its checkpoints. Needs no TensorFlow.
"""

import contextlib
import json
import math
import os
import pathlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from estimator_accum.programs.json_text import read_json

SETTINGS_FILE, EVAL_RESULTS = "run_settings.json", "eval_results.txt"
METRICS = "train_metrics.csv"  # which the chief writes
FLAGS = "flags"  # key of the flags in `run_settings.json`
EXAMPLES_CHECKSUM, VOCABULARY_CHECKSUM = "examples_checksum", "vocabulary_checksum"
START, START_CHECKSUM = "init_checkpoint", "init_checkpoint_checksum"
PLACE = "a path of this machine, without ~"
OTHER_PLACE = (
    "Use $HOME for ~, and mount other storage, or copy its files to this machine."
)
_SAME_RUN = "`--output_dir` must be new or hold a run with the same settings."
_LAST_ROW_BYTES = 1000  # at most
_CHECKSUMS = {
    EXAMPLES_CHECKSUM: "different examples",
    VOCABULARY_CHECKSUM: "a different vocabulary",
    START_CHECKSUM: "a different --init_checkpoint",
}


class OtherRunError(ValueError):
    """The folder holds a run with other settings, or another task trains another run."""


def check_output_dir(
    output_dir: str | os.PathLike,
    *,
    files: Iterable[str] = (),
    folders: Iterable[str] = (),
) -> None:
    """Raises ValueError unless a run can write its results; writes nothing.

    Args:
        output_dir: The folder, which need not exist.
        files: Names that must not be folders.
        folders: Names that must not be files.
    """
    absolute = os.path.abspath(output_dir)  # which Estimator uses
    if fault := fault_of_place(output_dir) or fault_of_checkpoints(absolute):
        raise ValueError(f"`--output_dir` {fault}")
    folder = pathlib.Path(output_dir)
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    fault = "is not a folder" if not place.is_dir() else "cannot be written to"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(_unfit(folder, f"{place} {fault}"))
    for name in files:
        if (folder / name).is_dir():
            raise ValueError(_unfit(folder, f"{folder / name} is a folder"))
    for name in folders:
        if (folder / name).exists() and not (folder / name).is_dir():
            raise ValueError(_unfit(folder, f"{folder / name} is not a folder"))


def fault_of_place(path: str | os.PathLike) -> str | None:
    """Returns a sentence about a path that would make a folder named `gs:` or `~`."""
    path = os.fspath(path)
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/|~", path):
        return None
    return f"must be {PLACE}. Received: {path}. {OTHER_PLACE}"


def fault_of_checkpoints(path: str | os.PathLike) -> str | None:
    """Returns a sentence about a path at which TensorFlow finds no checkpoint, or others."""
    path = os.fspath(path)
    if not re.search(r"[\[*?\\]", path):
        return None
    return (
        "must have no [, *, ? or \\ in its path, which TensorFlow takes for a pattern of "
        f"names. Received: {path}. Rename that folder, or use another one."
    )


def _unfit(folder: str | os.PathLike, fault: str) -> str:
    return (
        "`--output_dir` must be a folder that a run can write to, or a path where one "
        f"can be made. Received: {folder}, but {fault}. Use another one."
    )


def check_free(
    output_dir: str | os.PathLike, foreign: str, remedy: str = "Use another one."
) -> None:
    """Raises ValueError if the folder holds other files and no run.

    Args:
        output_dir: The folder, which need not exist.
        foreign: Glob pattern of files that a folder without settings must not hold.
        remedy: Last sentence of the error message.
    """
    folder = pathlib.Path(output_dir)
    if (folder / SETTINGS_FILE).exists():
        return
    others = sorted(other.name for other in folder.glob(foreign))
    if others:
        raise ValueError(
            "`--output_dir` must be new, empty, or hold a run of this program. "
            f"Received: {folder} with {others[0]} and no {SETTINGS_FILE}. {remedy}"
        )


def check_same(
    output_dir: str | os.PathLike,
    now: Mapping[str, Any],
    remedy: str,
    rule: str = _SAME_RUN,
) -> None:
    """Raises OtherRunError if the folder holds a run with other settings.

    Args:
        output_dir: The folder, which need not exist.
        now: Settings in the form of `run_settings.json`; those of a dict are compared
            one by one, and flags that determine no weight are not compared.
        remedy: Last sentence of the error message.
        rule: Its first sentence.
    """
    if not (run := settings_in(output_dir)):
        return
    before = _flat(run)
    for name, value in _flat(now).items():
        if name == f"--{START}":  # a path, which may be another one at each start
            continue
        # A setting that is on or off was off where a run does not name it.
        if before.get(name, False if value is False else None) != value:
            what = _CHECKSUMS.get(name, f"{name}={before.get(name)}, not {value}")
            raise OtherRunError(
                f"{rule} Received: {os.fspath(output_dir)}, which holds a run with "
                f"{what}. {remedy}"
            )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns flags by `--name`, and the values of a dict by `name.key`."""
    flat = {}
    for name, value in values.items():
        if name == FLAGS:
            continue
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": part for key, part in value.items()}
        else:
            flat[name if name in _CHECKSUMS else f"--{name}"] = value
    return flat


def make_run_folder(output_dir: str | os.PathLike) -> None:
    """Makes the folder; raises ValueError if that is impossible."""
    try:
        pathlib.Path(output_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            "`--output_dir` must be a folder, or a path where one can be made. "
            f"Received: {output_dir} ({error.strerror}). Use another one."
        ) from error


def settings_in(output_dir: str | os.PathLike) -> dict[str, Any]:
    """Returns the settings of the folder's run; none if there is no run."""
    try:
        return read_settings(os.path.join(output_dir, SETTINGS_FILE))
    except _AbsentError:
        return {}


class _AbsentError(ValueError):
    """There is no such file."""


def read_settings(
    path: str | os.PathLike, *, flag: str | None = None
) -> dict[str, Any]:
    """Returns the settings that a run has written; raises ValueError if unreadable.

    Args:
        path: The file.
        flag: Flag that named the file; None if it is in the output folder.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        content = error
    if isinstance(content, dict):
        return content
    what = f"`{flag}`" if flag else path
    named = f"{path}, a file" if flag else "a file"
    is_absent = isinstance(content, FileNotFoundError | NotADirectoryError)
    raise (_AbsentError if is_absent else ValueError)(
        f"{what} must be the settings file of a run. Received: {named} that cannot be "
        f"read ({content}). Use another {'file' if flag else 'folder'}."
    )


def write_settings(output_dir: str | os.PathLike, settings: Mapping[str, Any]) -> None:
    """Writes the settings with which the run can resume."""
    text = json.dumps(settings, indent=2) + "\n"
    write_text(pathlib.Path(output_dir) / SETTINGS_FILE, text)


def write_results(output_dir: str | os.PathLike, values: Mapping[str, Any]) -> str:
    """Writes `eval_results.txt`: lines of `name = value`, sorted by name.

    Returns:
        Its text.
    """
    text = "".join(f"{name} = {values[name]}\n" for name in sorted(values))
    write_text(pathlib.Path(output_dir) / EVAL_RESULTS, text)
    return text


def last_row(output_dir: str | os.PathLike) -> dict[str, float]:
    """Returns the known values of the last whole row of `train_metrics.csv`, by column."""
    try:
        with (pathlib.Path(output_dir) / METRICS).open("rb") as file:
            names = file.readline().decode(errors="replace").strip().split(",")
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_ROW_BYTES))
            rows = file.read().decode(errors="replace").split("\n")[1:-1]
    except FileNotFoundError:
        return {}
    return next(filter(None, (_values(names, row) for row in reversed(rows))), {})


def read_rows(path: str | os.PathLike) -> list[dict[str, float]]:
    """Returns the known values of each row of `train_metrics.csv`, by column.

    Without rows that are damaged; none of a file that cannot be read.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    names, *rows = text.splitlines() or [""]
    return [*filter(None, (_values(names.split(","), row) for row in rows))]


def _values(names: list[str], row: str) -> dict[str, float]:
    """Returns the known values of a row by column; none of a damaged one."""
    with contextlib.suppress(ValueError):
        pairs = zip(names, row.strip().split(","), strict=False)
        values = {name: float(value) for name, value in pairs if value}
        if math.isfinite(values.get("update_step", math.nan)):
            return values
    return {}


def last_update(output_dir: str | os.PathLike) -> int:
    """Returns the last update that `train_metrics.csv` has; 0 before the first.

    After a restart it keeps its value until training resumes.
    """
    return int(last_row(output_dir).get("update_step", 0))


def update_at(output_dir: str | os.PathLike, global_step: str) -> int | None:
    """Returns the update that ended at a micro-step; None if the metrics lack it."""
    rows = read_rows(pathlib.Path(output_dir) / METRICS)
    rows = [row for row in rows if "global_step" in row]
    updates = {f"{row['global_step']:.0f}": int(row["update_step"]) for row in rows}
    return updates.get(global_step)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically: it is complete or absent."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole_file(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary path, which replaces `path` if the `with` block succeeds.

    Several processes, also of several machines, may write the same file.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
