"""GLUE's classification tasks: one table of columns, labels, files and metrics.

Files are read as GLUE's own loaders read them: tab-separated, UTF-8 (a byte order mark
and CRLF line ends are accepted), and a quotation mark is a character like any other.
Empty lines are skipped.
"""

import logging
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_logger = logging.getLogger(__name__)


class Example(NamedTuple):
    """One row of a task's file.

    Attributes:
        guid: GLUE's own index for a row of a test file, else file and line: `train-17`.
        text_a: The first or only sentence.
        text_b: The second sentence; None for single-sentence tasks.
        label: Position in `Task.labels`; None where the file has no labels.
    """

    guid: str
    text_a: str
    text_b: str | None
    label: int | None


@dataclass(frozen=True, eq=False)
class Task:
    """Columns, labels, files and metrics of one task.

    Attributes:
        name: GLUE's spelling, the name of the task's folder.
        text_a: Column of the first or only sentence.
        text_b: Column of the second sentence; None for single-sentence tasks.
        labels: Labels as written in the files and in GLUE's submissions; a model's
            class i is `labels[i]`.
        metrics: Names out of accuracy, f1 (of class 1) and matthews_correlation.
        label: Column of the label.
        index: Column of the row's number in test files.
        train_file: Name of the training file.
        dev_files: Name of each dev file by suffix of its results (`""` for the main
            one).
        test_files: Name of each test file by name of its submission file.
        columns_without_header: Columns of labelled files that have no header line; None
            where line 1 names the columns. Test files always have a header.
        ignored_labels: Rows with such a label are skipped.
        skips_broken_rows: Whether labelled files are known to hold rows with too few
            columns, which GLUE's loaders skip.
    """

    name: str
    text_a: str
    text_b: str | None = None
    labels: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    label: str = "label"
    index: str = "index"
    train_file: str = "train.tsv"
    dev_files: dict[str, str] = field(default_factory=lambda: {"": "dev.tsv"})
    test_files: dict[str, str] = field(default_factory=dict)
    columns_without_header: tuple[str, ...] | None = None
    ignored_labels: tuple[str, ...] = ()
    skips_broken_rows: bool = False

    @property
    def main_metric(self) -> str:
        """The metric by which checkpoints are compared, as `eval_results.txt` names it.

        GLUE's own: Matthews correlation for CoLA, F1 for MRPC and QQP (GLUE averages
        it with accuracy), else accuracy, for MNLI that of the matched set.
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
    raise ValueError(
        f"`{flag}` must be one of {allowed}. Received: {name!r}. "
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
        ValueError: If the file is missing, is not UTF-8, lacks columns, has an unknown
            label, or has no example; the message names the file and the line.
    """
    path = _find_file(task, pathlib.Path(data_dir), split_file)
    rows = _rows(path)
    position = _column_positions(task, path, rows, labelled)
    examples = []
    broken = []
    for number, row in rows:
        if len(row) <= max(position.values()):
            broken.append(_too_few_columns(path, number, row, position))
            if labelled and task.skips_broken_rows:
                continue
            raise ValueError(broken[0])
        if labelled and row[position[task.label]] in task.ignored_labels:
            continue
        examples.append(_example(task, path, number, row, position))
    if broken:
        _check_mostly_whole(path, broken, len(examples))
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
        remedy = (
            f"Point it at the folder that holds {name}, or fetch one: "
            f"estimator-accum fetch glue --tasks={task.name}."
        )
    raise ValueError(
        f"`--data_dir` must hold {name} of {task.name}. "
        f"Received: {data_dir}, where {path} does not exist. {remedy}"
    )


def _rows(path: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number, from 1, and the columns of every non-empty line."""
    with path.open("rb") as lines:  # as text, a lone \r would end a line too
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} line {number} must be UTF-8. Received: the byte "
                    f"{line[error.start : error.start + 1]!r}. Convert the file."
                ) from error
            text = text.removesuffix("\n").removesuffix("\r")
            if text:
                yield number, text.split("\t")


def _column_positions(
    task: Task,
    path: pathlib.Path,
    rows: Iterator[tuple[int, list[str]]],
    labelled: bool,
) -> dict[str, int]:
    """Returns the positions of the needed columns by name; consumes the header."""
    needed = [column for column in (task.text_a, task.text_b) if column is not None]
    needed.append(task.label if labelled else task.index)
    header = task.columns_without_header if labelled else None
    if header is None:
        number, header = next(rows, (1, []))
        if not header:
            raise ValueError(_no_examples(task, path))
        if not set(needed) <= set(header):
            raise ValueError(
                f"{path} line {number} must be a header with the columns "
                f"{', '.join(needed)}. Received: {', '.join(header)}. "
                f"Use GLUE's own files of {task.name}, or another --task_name."
            )
    return {column: header.index(column) for column in needed}


def _example(
    task: Task,
    path: pathlib.Path,
    number: int,
    row: list[str],
    position: dict[str, int],
) -> Example:
    text_a = row[position[task.text_a]]
    text_b = None if task.text_b is None else row[position[task.text_b]]
    if task.label not in position:
        return Example(row[position[task.index]], text_a, text_b, None)
    label = row[position[task.label]]
    if label not in task.labels:
        raise ValueError(
            f"{path} line {number} must have a label of {task.name}: "
            f"{' or '.join(task.labels)}. Received: {label!r}. "
            "Correct the line, or use another --task_name."
        )
    guid = f"{path.stem}-{number}"
    return Example(guid, text_a, text_b, task.labels.index(label))


def _too_few_columns(
    path: pathlib.Path, number: int, row: list[str], position: dict[str, int]
) -> str:
    return (
        f"{path} line {number} must have at least {max(position.values()) + 1} "
        f"tab-separated columns. Received: {len(row)}. Correct or remove the line."
    )


def _check_mostly_whole(path: pathlib.Path, broken: list[str], whole: int) -> None:
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
        "file, or one with only a header. Fetch it again, or correct --data_dir."
    )
