"""Rows of text files: tab-separated, comma-separated, or one JSON object a line.

The end of the name says which: `.csv`, `.jsonl` (or `.json`), also in capitals; anything
else is tab-separated. All are UTF-8; a byte order mark and CRLF line ends are accepted,
and empty lines are skipped. In a tab-separated file a quotation mark is a character like
any other, as in GLUE's own loaders; in a comma-separated one it encloses commas, line
breaks and doubled quotation marks (RFC 4180), and spaces after a comma are ignored. In
JSON lines a text is a string; a label that is a number, true or false stands for its own
spelling.
"""

import csv
import json
import pathlib
from collections.abc import Iterator, Sequence

from estimator_accum.programs.json_text import parse_json

# Number of a row's first line, from 1, and the row's columns.
Row = tuple[int, list[str]]
_LONGEST_FIELD = 2**31 - 1  # of a CSV file [characters]; the default is 131,072


def read_rows(
    path: pathlib.Path, columns: Sequence[str], labels: Sequence[str]
) -> Iterator[Row]:
    """Yields the rows of a file, the header first if it has one.

    Args:
        path: The file.
        columns: Keys to take from each JSON object; the first row names them, as a
            header does. Other files have all their columns.
        labels: Those of these keys whose value need not be a string.

    Raises:
        ValueError: If a line is not UTF-8, or not CSV or JSON as its file's name says,
            or if an object lacks a key, or has another value there than a text.
    """
    lines = _lines(path)
    if path.suffix.lower() == ".csv":
        return _comma_separated(path, lines)
    if path.suffix.lower() in (".jsonl", ".json"):
        return _objects(path, lines, columns, labels)
    return ((number, line.split("\t")) for number, line in lines if line)


def separator_of(path: pathlib.Path) -> str:
    """Returns the word for the separator of a file's columns."""
    return "comma" if path.suffix.lower() == ".csv" else "tab"


def _lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as lines:  # as text, a lone \r would end a line too
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} line {number} must be UTF-8. Received: the byte "
                    f"{line[error.start : error.start + 1]!r}. Convert the file."
                ) from error
            yield number, text.removesuffix("\n").removesuffix("\r")


def _comma_separated(path: pathlib.Path, lines: Iterator[tuple[int, str]]):
    texts = (f"{line}\n" for _, line in lines)
    reader = csv.reader(texts, strict=True, skipinitialspace=True)
    number = 1
    usual = csv.field_size_limit(_LONGEST_FIELD)  # of all readers of the process
    try:
        for row in reader:
            if row:
                yield number, row
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path} line {number} must begin a comma-separated row, with texts that "
            "contain quotation marks inside of some, and theirs doubled. Received: "
            f"{error}. Correct the line, or name a tab-separated file .tsv."
        ) from error
    finally:
        csv.field_size_limit(usual)


def _objects(path: pathlib.Path, lines: Iterator[tuple[int, str]], columns, labels):
    yield 0, list(columns)
    for number, line in lines:
        if not line.strip():
            continue
        try:
            content = parse_json(line)
        except ValueError as error:
            content = error
        if not isinstance(content, dict) or None in map(content.get, columns):
            received = ", ".join(content) if isinstance(content, dict) else line[:60]
            if type(content) is ValueError:  # JSON's own line is no line of the file
                received += f" ({content})"
            raise ValueError(
                f"{path} line {number} must be a JSON object with {', '.join(columns)}, "
                "and none of them null. "
                f"Received: {received or 'nothing'}. Correct the line, or the columns in the "
                "task's file."
            )
        for name in columns:
            _check_value(f"{path} line {number}", name, content[name], name in labels)
        yield number, [spelling(content[name]) for name in columns]


def _check_value(place: str, name: str, value: object, is_label: bool) -> None:
    """Raises ValueError for a value that is no text, or no label."""
    rule = "a string"
    if is_label:
        rule += ", a number, true or false"
    if not isinstance(value, (str, int, float) if is_label else str):
        received = json.dumps(value)[:60]
    elif isinstance(value, str) and not _is_unicode(value):
        rule, received = "a string of whole characters", ascii(value)[:60]
    else:
        return
    raise ValueError(
        f"{place} must have {rule} as {name}. Received: {received}. Correct the line, or "
        "the columns in the task's file."
    )


def _is_unicode(text: str) -> bool:
    """Returns whether no half of a surrogate pair, such as \\ud800, is in a text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def spelling(value: object) -> str:
    """Returns a JSON value as text: a string as it is, others as JSON writes them."""
    return value if isinstance(value, str) else json.dumps(value)
