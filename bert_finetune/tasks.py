"""GLUE's tasks: one table, from which their examples are read.

`own_task` makes a task of a user's own data. `tables` reads the rows.
"""

import logging
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bert_finetune.tables import Row, read_rows, separator_of
from estimator_accum.programs.numerals import parse_number

CLASS_METRICS = ("accuracy", "f1", "matthews_correlation")
NUMBER_METRICS = ("pearson", "spearman")
MULTI_LABEL_METRICS = ("f1", "roc_auc")
_LARGEST = 1e12  # bound of a regression's labels, so that the square fits in float32

_logger = logging.getLogger("tensorflow.bert_finetune")


class Example(NamedTuple):
    """One row of a task's file.

    Attributes:
        guid: The index of a row of a test file, else file and line: `train-17`.
        text_a: The first or only sentence.
        text_b: The second sentence; None for single-sentence tasks.
        label: Position in `Task.labels`, the number of a regression, or 0 or 1 for each
            of several labels; None where the file has no labels.
    """

    guid: str
    text_a: str
    text_b: str | None
    label: int | float | tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class Task:
    """Columns, labels, files and metrics of one task.

    Attributes:
        name: GLUE's spelling, the name of the task's folder; else that of `source`.
        text_a: Column of the first or only sentence.
        text_b: Column of the second sentence; None for single-sentence tasks.
        labels: Labels as written in the files; a model's class i is `labels[i]`. None
            of them is a regression, whose labels are numbers.
        metrics: Names out of `CLASS_METRICS`, `NUMBER_METRICS` for a regression, or
            `MULTI_LABEL_METRICS`.
        label: Column of the label, or a column of 0 and 1 for each of `labels`.
        index: Column of the row's number in test files; None numbers the rows from 0,
            and test files are like the labelled ones.
        train_file: Name of the training file; None if there is none.
        dev_files: Name of each dev file by suffix of its results (`""` for the main
            one).
        test_files: Name of each test file by name of its submission file.
        columns_without_header: Columns of labelled files that have no header line, all
            of them if GLUE's, else up to the last that is used; None where line 1 names
            the columns. Test files of GLUE always have a header.
        ignored_labels: Rows with such a label are skipped.
        skips_broken_rows: Whether labelled files are known to hold rows with too few
            or too many columns, which GLUE's loaders skip.
        separator: Text between several labels of a row; None if the column holds one.
        names: Names of the classes in predictions and exports; those of `labels` if
            empty.
        source: The file that describes the task; None for GLUE's.
    """

    name: str
    text_a: str
    text_b: str | None = None
    labels: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    label: str | tuple[str, ...] = "label"
    index: str | None = "index"
    train_file: str | None = "train.tsv"
    dev_files: dict[str, str] = field(default_factory=lambda: {"": "dev.tsv"})
    test_files: dict[str, str] = field(default_factory=dict)
    columns_without_header: tuple[str, ...] | None = None
    ignored_labels: tuple[str, ...] = ()
    skips_broken_rows: bool = False
    separator: str | None = None
    names: tuple[str, ...] = ()
    source: str | None = None

    @property
    def is_regression(self) -> bool:
        """True if labels are numbers, and the model's output is one."""
        return not self.labels

    @property
    def is_multi_label(self) -> bool:
        """True if a row may have any number of labels."""
        return self.separator is not None or not isinstance(self.label, str)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns of the labels."""
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def num_outputs(self) -> int:
        """Outputs of the model's head: the classes, or the one number."""
        return len(self.labels) or 1

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes in predictions and exports; none of a regression."""
        return self.names or self.labels

    @property
    def main_metric(self) -> str:
        """The metric by which checkpoints are compared, as `eval_results.txt` names it.

        The last of `metrics`. GLUE's own: Matthews correlation for CoLA, F1 for MRPC
        and QQP (GLUE averages it with accuracy), Spearman for STS-B (GLUE averages it
        with Pearson), else accuracy, for MNLI that of the matched set.
        """
        return {"accuracy": "eval_accuracy"}.get(self.metrics[-1], self.metrics[-1])


TASKS = (
    Task(
        name="CoLA",
        metrics=("accuracy", "matthews_correlation"),
        text_a="sentence",
        test_files={"CoLA.tsv": "test.tsv"},
        columns_without_header=("source", "label", "original label", "sentence"),
    ),
    Task(name="SST-2", text_a="sentence", test_files={"SST-2.tsv": "test.tsv"}),
    Task(
        name="MRPC",
        metrics=("accuracy", "f1"),
        text_a="#1 String",
        text_b="#2 String",
        label="Quality",
        test_files={"MRPC.tsv": "test.tsv"},
    ),
    Task(
        name="QQP",
        metrics=("accuracy", "f1"),
        text_a="question1",
        text_b="question2",
        label="is_duplicate",
        index="id",
        test_files={"QQP.tsv": "test.tsv"},
        # Line breaks inside questions: https://github.com/nyu-mll/GLUE-baselines/issues/5
        skips_broken_rows=True,
    ),
    Task(
        name="STS-B",
        labels=(),  # similarity, 0 to 5
        metrics=NUMBER_METRICS,
        text_a="sentence1",
        text_b="sentence2",
        label="score",
        test_files={"STS-B.tsv": "test.tsv"},
    ),
    Task(
        name="MNLI",
        # google-research/bert's order, so that its classifiers' checkpoints fit.
        labels=("contradiction", "entailment", "neutral"),
        text_a="sentence1",
        text_b="sentence2",
        label="gold_label",
        dev_files={"": "dev_matched.tsv", "_mismatched": "dev_mismatched.tsv"},
        test_files={
            "MNLI-m.tsv": "test_matched.tsv",
            "MNLI-mm.tsv": "test_mismatched.tsv",
        },
        ignored_labels=("-",),  # the annotators did not agree
    ),
    Task(
        name="QNLI",
        labels=("entailment", "not_entailment"),
        text_a="question",
        text_b="sentence",
        test_files={"QNLI.tsv": "test.tsv"},
    ),
    Task(
        name="RTE",
        labels=("entailment", "not_entailment"),
        text_a="sentence1",
        text_b="sentence2",
        test_files={"RTE.tsv": "test.tsv"},
    ),
    Task(
        name="WNLI",
        text_a="sentence1",
        text_b="sentence2",
        test_files={"WNLI.tsv": "test.tsv"},
    ),
)


def get_task(name: str, flag: str = "--task_name") -> Task:
    """Returns a task by name; case and dashes do not matter: `cola`, `SST-2`, `sst2`.

    Args:
        name: The user's name for the task.
        flag: Flag that the name comes from, for the error message.

    Raises:
        ValueError: If there is no such task.
    """
    for task in TASKS:
        if task.name.lower().replace("-", "") == name.lower().replace("-", ""):
            return task
    allowed = ", ".join(task.name for task in TASKS)
    or_file = " or a JSON file for your own data" if flag == "--task_name" else ""
    raise ValueError(
        f"`{flag}` must be one of {allowed}{or_file}. Received: {name!r}. "
        "Case and dashes do not matter."
    )


def read_examples(
    task: Task, data_dir: str | pathlib.Path, split_file: str, *, labelled: bool
) -> list[Example]:
    """Reads one file of a task.

    Args:
        task: The task, which determines the layout of the file.
        data_dir: The folder that holds the file.
        split_file: `task.train_file`, or a value of `dev_files` or `test_files`.
        labelled: Whether the file has labels: True for training and dev files.

    Returns:
        The examples in the file's order, at least one.

    Raises:
        ValueError: If the file is missing, is not UTF-8, lacks columns, has a row of
            more or fewer columns than the header (or the first row, or GLUE's layout), an
            unknown label, or no example; the message names the file and the line.
    """
    path = _find_file(task, pathlib.Path(data_dir), split_file)
    columns = _columns(task, labelled)
    rows = read_rows(path, columns, task.label_columns)
    position, width = _layout(task, path, rows, columns, labelled)
    examples = []
    broken = []
    for number, row in rows:
        width = width or _width_of_first(task, path, number, row, position)
        if len(row) != width.columns:
            broken.append(_other_width(task, path, number, row, width))
            if labelled and task.skips_broken_rows:
                continue
            raise ValueError(broken[0])
        if labelled and row[position[task.label_columns[0]]] in task.ignored_labels:
            continue
        guid = f"{path.stem}-{number}"
        if not labelled:
            guid = (
                str(len(examples)) if task.index is None else row[position[task.index]]
            )
        examples.append(_example(task, path, number, row, position, guid))
    if broken:
        _check_mostly_whole(broken, len(examples))
    if not examples:
        raise ValueError(_no_examples(task, path))
    return examples


def _find_file(task: Task, data_dir: pathlib.Path, name: str) -> pathlib.Path:
    path = data_dir / name
    if path.is_file():
        return path
    if (data_dir / task.name / name).is_file():
        remedy = f"Use --data_dir={data_dir / task.name}."
    else:
        other = f"fetch one: estimator-accum fetch glue --tasks={task.name}"
        if task.source:
            other = f"correct {task.source}"
        remedy = f"Point it at the folder that holds {name}, or {other}."
    raise ValueError(
        f"`--data_dir` must hold {name} of {task.name}. "
        f"Received: {data_dir}, where {path} does not exist. {remedy}"
    )


def _columns(task: Task, labelled: bool) -> list[str]:
    """Returns the columns that are needed of a file."""
    columns = [task.text_a, task.text_b]
    columns += task.label_columns if labelled else [task.index]
    return [column for column in columns if column is not None]


class _Width(NamedTuple):
    """Number of columns of every row of a file, with a clause that says why."""

    columns: int
    reason: str


def _layout(
    task: Task,
    path: pathlib.Path,
    rows: Iterator[Row],
    columns: list[str],
    labelled: bool,
) -> tuple[dict[str, int], _Width | None]:
    """Returns the needed columns' positions by name, and the rows' width.

    Consumes the header. The width is None if the first row determines it.
    """
    has_header = task.columns_without_header is None
    if has_header or not labelled and task.index is not None:
        number, header = next(rows, (1, []))
        if not header:
            raise ValueError(_no_examples(task, path))
        if not set(columns) <= set(header):
            remedy = f"Use GLUE's own files of {task.name}, or another --task_name."
            if task.source:
                remedy = (
                    f"Correct the columns in {task.source}; numbers from 1 are for "
                    "files without a header."
                )
            raise ValueError(
                f"{path} line {number} must be a header with the columns "
                f"{', '.join(columns)}. Received: {', '.join(header)}. {remedy}"
            )
        _check_each_column_once(task, path, number, header, columns)
        width = _Width(len(header), f"as the header in line {number} has")
    else:
        header = task.columns_without_header
        width = (
            None if task.source else _Width(len(header), f"as {task.name}'s files have")
        )
    return {column: header.index(column) for column in columns}, width


def _check_each_column_once(
    task: Task, path: pathlib.Path, number: int, header: list[str], columns: list[str]
) -> None:
    twice = [column for column in columns if header.count(column) > 1]
    if twice:
        raise ValueError(
            f"{path} line {number} must be a header that names the column {twice[0]} "
            f"once. Received: {', '.join(header)}. Rename the others"
            f"{f', or correct {task.source}' if task.source else ''}."
        )


def _width_of_first(
    task: Task,
    path: pathlib.Path,
    number: int,
    row: list[str],
    position: dict[str, int],
) -> _Width:
    """Returns the width of a file without a header, of which no layout is known."""
    needed = max(position.values()) + 1
    if len(row) < needed:
        return _Width(needed, f"which {task.source} needs")
    if len(row) > needed:  # or a text with a separator in it, in each row
        used = ", ".join(map(str, sorted(place + 1 for place in position.values())))
        _logger.info("%s has %d columns; the task reads %s", path.name, len(row), used)
    return _Width(len(row), f"as line {number} has")


def _example(
    task: Task,
    path: pathlib.Path,
    number: int,
    row: list[str],
    position: dict[str, int],
    guid: str,
) -> Example:
    text_a = row[position[task.text_a]]
    text_b = None if task.text_b is None else row[position[task.text_b]]
    label = None
    if task.label_columns[0] in position:
        texts = [row[position[column]] for column in task.label_columns]
        label_of = _several_labels if task.is_multi_label else _label
        label = label_of(task, f"{path} line {number}", *texts)
    return Example(guid, text_a, text_b, label)


def _several_labels(task: Task, place: str, *texts: str) -> tuple[int, ...]:
    """Returns 0 or 1 for each label."""
    if task.separator is None:
        rule = f"0 or 1 in each of the columns {', '.join(task.label_columns)}"
        numbers = [{"0": 0, "1": 1}.get(text.strip()) for text in texts]
        wrong = [text for text, n in zip(texts, numbers, strict=True) if n is None]
    else:
        words = [word.strip() for word in texts[0].split(task.separator)]
        words = [word for word in words if word]
        rule = f"labels of {task.name}, with {task.separator!r} between them: "
        rule += " or ".join(task.labels)
        numbers = [int(label in words) for label in task.labels]
        wrong = [word for word in words if word not in task.labels]
    if wrong:
        raise ValueError(
            f"{place} must have {rule}. Received: {wrong[0]!r}. Correct the line, or "
            f"`labels` and `separator` in {task.source}."
        )
    return tuple(numbers)


def _label(task: Task, place: str, text: str) -> int | float:
    """Returns the position of a class, or the number of a regression."""
    if text in task.labels:
        return task.labels.index(text)
    rule = f"a label of {task.name}: {' or '.join(task.labels)}"
    if task.is_regression:
        try:
            number = parse_number(text)
        except ValueError:
            number = None
        if number is not None and abs(number) <= _LARGEST:
            return number
        rule = f"a finite number as its label of {task.name}"
        if number is not None:
            rule = f"a number of at most {_LARGEST:g} in size as its label"
    remedy = f"`labels` in {task.source}" if task.source else "use another --task_name"
    if task.source and task.columns_without_header:
        remedy += ", where columns must have names if the file has a header"
    raise ValueError(
        f"{place} must have {rule}. Received: {text!r}. Correct the line, or {remedy}."
    )


def _other_width(
    task: Task, path: pathlib.Path, number: int, row: list[str], width: _Width
) -> str:
    """Returns the sentence about a row of more or fewer columns than the others."""
    remedy = "Correct or remove the line"
    if len(row) > width.columns and path.suffix.lower() == ".csv":
        remedy = 'Put a text that contains commas in quotation marks: "a, b"'
    elif len(row) > width.columns:
        remedy = (
            "Remove the tabs inside its texts, or use a .csv file with quoted texts"
        )
    if not task.source:
        remedy += ", or use a JSON file as --task_name for your own data"
    return (
        f"{path} line {number} must have {width.columns} {separator_of(path)}-separated "
        f"columns, {width.reason}. Received: {len(row)}. {remedy}."
    )


def _check_mostly_whole(broken: list[str], whole: int) -> None:
    """Raises ValueError if at least half of the rows are broken: it is another file."""
    if len(broken) >= whole:
        raise ValueError(broken[0])
    _logger.warning(
        "skipped %d broken of %d rows, as GLUE's own loaders do; the first: %s",
        len(broken),
        len(broken) + whole,
        broken[0],
    )


def _no_examples(task: Task, path: pathlib.Path) -> str:
    return (
        f"{path} must hold at least one example of {task.name}. Received: an empty "
        "file, or one with only a header. Replace it, or correct --data_dir."
    )
