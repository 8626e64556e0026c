"""JSON that users write, parsed strictly."""

import json
import os
from typing import Any

from estimator_accum.reports import _files


def read_json(path: str | os.PathLike) -> Any:
    """Returns the value of a JSON file, also of storage such as gs://bucket/file.

    Raises:
        OSError: If it cannot be read; FileNotFoundError if there is no such file.
        ValueError: As for `parse_json`.
    """
    return parse_json(_files.read_bytes(os.fspath(path)))


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text, which may begin with a byte order mark.

    Args:
        text: Characters, or bytes in UTF-8.

    Raises:
        ValueError: If it is not JSON or not UTF-8, if an object has a key twice, of which
            `json` would take the last, or if values are nested more deeply than Python
            parses.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {json.dumps(twice)} twice")
    return content
