"""The table of house prices.

Needs no TensorFlow.
"""

import hashlib
import io
import pathlib
import re

import numpy as np
import pandas as pd

TARGET = "MEDV"  # median price; 1,000 dollars in the Boston data, any unit does
CATEGORY = "CHAS"  # 1 where the tract bounds the river, else 0
COLUMNS = (
    *("CRIM", "ZN", "INDUS", CATEGORY, "NOX", "RM", "AGE", "DIS", "RAD", "TAX"),
    *("PTRATIO", "B", "LSTAT", TARGET),
)
_SPLIT_SEED = 0
_TEST_SHARE = 0.3
_LARGEST = 1e12  # bound of a cell, so that its square fits in float32


def read_table(path: str) -> pd.DataFrame:
    """Reads a CSV file with the columns `COLUMNS`.

    The first line may name the columns, in any case and any order; other columns are
    dropped. Without such a line there must be 14 columns in the order of `COLUMNS`.

    Returns:
        One row per example, in file order; CHAS is int64, the others float64.

    Raises:
        ValueError: If the file is missing or invalid; the message names the line.
    """
    text = _read_text(path)
    line_numbers = [
        number
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip(" \t")  # pandas skips the others
    ]
    if not line_numbers:
        raise ValueError(
            f"{path} must hold at least one example. Received: an empty file. "
            f"Write the columns {','.join(COLUMNS)}."
        )
    try:
        cells = pd.read_csv(
            io.StringIO(text),
            header=None,
            dtype=str,
            keep_default_na=False,
            skipinitialspace=True,
        )
    except pd.errors.ParserError as error:
        reason = re.sub(r"^.*C error: ", "", str(error)).strip()
        raise ValueError(
            f"{path} must be a table, with as many cells on every line as on the "
            f"first. Received: {reason}. Correct that line."
        ) from error
    cells = cells.fillna("").apply(lambda column: column.str.strip())
    cells.index = line_numbers[: len(cells)]
    cells = _name_columns(path, cells)
    if cells.empty:
        raise ValueError(
            f"{path} must hold at least one example. Received: only the columns' "
            "names. Add lines of numbers."
        )
    table = cells.apply(lambda column: pd.to_numeric(column, errors="coerce"))
    table = table.astype(np.float64)
    _check_cells(path, cells, table)
    return table.astype({CATEGORY: np.int64}).reset_index(drop=True)


def _read_text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(
            "`--train_csv` and `--test_csv` must be files that can be read. "
            f"Received: {path} ({error.strerror}). Check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be a CSV file in UTF-8. Received: a file that is not text "
            f"(byte {error.start}). Save it as CSV."
        ) from error


def _name_columns(path: str, cells: pd.DataFrame) -> pd.DataFrame:
    """Returns the examples' cells, with named columns in the order of `COLUMNS`."""
    first = cells.iloc[0].str.upper()
    is_number = pd.to_numeric(first, errors="coerce").notna()
    if is_number.any() and not first.isin(COLUMNS).any():
        if len(first) != len(COLUMNS):
            raise ValueError(
                f"{path} must have the {len(COLUMNS)} columns {','.join(COLUMNS)}. "
                f"Received: {len(first)} columns without names. Name them on the "
                "first line if there are others."
            )
        return cells.set_axis(list(COLUMNS), axis="columns")
    missing = [name for name in COLUMNS if name not in set(first)]
    if missing:
        raise ValueError(
            f"{path} must have the columns {','.join(COLUMNS)}. Received: a first "
            f"line without {', '.join(missing)}. Add the missing columns, or leave out "
            "the line of names where the columns have this order."
        )
    twice = [name for name in COLUMNS if (first == name).sum() > 1]
    if twice:
        raise ValueError(
            f"{path} must name each column once. Received: {twice[0]} "
            f"{(first == twice[0]).sum()} times. Rename the others."
        )
    return cells.iloc[1:].set_axis(list(first), axis="columns")[list(COLUMNS)]


def _check_cells(path: str, cells: pd.DataFrame, table: pd.DataFrame) -> None:
    """Raises ValueError for the first cell that breaks the rule of its column."""
    is_number = table.abs() < _LARGEST  # false for NaN
    rules = {
        CATEGORY: (table[CATEGORY].isin([0, 1]), "0 or 1"),
        "CRIM": (table["CRIM"] >= 0, "a number >= 0"),
        TARGET: (table[TARGET] > 0, "a price > 0"),
    }
    is_fit = is_number.copy()
    for name, (is_right, _) in rules.items():
        is_fit[name] &= is_right
    wrong = np.argwhere(~is_fit.to_numpy())
    if not len(wrong):
        return
    row, column = wrong[0]
    name, line = COLUMNS[column], table.index[row]
    if is_number.iat[row, column]:
        rule = rules[name][1]
    elif np.isnan(table.iat[row, column]):
        rule = "a number"
    else:
        rule = f"a number of less than {_LARGEST:g} in size"
    raise ValueError(
        f"{path} line {line} must have {rule} for {name}. "
        f"Received: {cells.iat[row, column]!r}. Correct or remove the line."
    )


def split(table: pd.DataFrame, source: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns (70% for training, 30% for testing), the same for the same table.

    Raises:
        ValueError: If there are fewer than 2 rows in `source`.
    """
    if len(table) < 2:
        raise ValueError(
            f"{source} must hold at least 2 examples, to train and to test. "
            f"Received: {len(table)}. Add some, or give a --test_csv."
        )
    test = table.sample(frac=_TEST_SHARE, random_state=_SPLIT_SEED)
    return table.drop(test.index), test


def csv_text(table: pd.DataFrame) -> str:
    """Returns the table as CSV lines for `tf.data`, after a header line."""
    return table[list(COLUMNS)].to_csv(index=False, lineterminator="\n")


def checksum(*tables: pd.DataFrame) -> str:
    """Returns the SHA-256 checksum of all examples in their order."""
    text = "\n".join(csv_text(table) for table in tables)
    return hashlib.sha256(text.encode()).hexdigest()
