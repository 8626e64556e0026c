"""Task of one's own, described by a JSON file.

    {
      "train_file": "train.csv",
      "dev_file": "test.csv",
      "text_a": 2,
      "label": 1,
      "labels": {"1": "negative", "2": "positive"}
    }

`--task_name=yelp.json` is the task yelp. A column is a name for files whose first line
names the columns and for JSON lines, and a number from 1 for files without such a line.
`labels` lists the classes as the files write them, maps them to names, or is "numbers"
for a regression.
"""

import json
import pathlib
from typing import Any

from bert_finetune.tables import spelling
from bert_finetune.tasks import CLASS_METRICS, NUMBER_METRICS, Task, get_task
from estimator_accum.programs.json_text import parse_json

NUMBERS = "numbers"  # `labels` of a regression
_FILES = ("train_file", "dev_file", "test_file")
_KEYS = (*_FILES, "text_a", "text_b", "label", "labels", "metrics")
_REQUIRED = ("text_a", "label", "labels")


def is_task_file(task_name: str) -> bool:
    """Returns whether a `--task_name` is the file of a task, and not one of GLUE's."""
    return task_name.endswith(".json")


def find_task(task_name: str) -> Task:
    """Returns GLUE's task of this name, or the one that a file describes.

    Raises:
        ValueError: If there is none, or the file does not describe one.
    """
    return read_task(task_name) if is_task_file(task_name) else get_task(task_name)


def read_task(path: str) -> Task:
    """Returns the task that a JSON file describes.

    Raises:
        ValueError: If the file cannot be read, or its content is not that of a task.
    """
    try:
        content = parse_json(pathlib.Path(path).read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _unfit(path, "be a JSON file", str(reason)) from error
    if not isinstance(content, dict):
        raise _unfit(path, "be a JSON object", content)
    for key in content:
        if key not in _KEYS:
            raise _unfit(path, f"have the keys {', '.join(_KEYS)} alone", key)
    for key in _REQUIRED:
        if key not in content:
            raise _unfit(path, f"have the key {key}", ", ".join(content) or "none")
    for key in _FILES:
        if not isinstance(content.get(key, ""), str):
            raise _unfit(path, f"name a file of --data_dir as {key}", content[key])
    labels = _labels(path, content["labels"])
    columns, without_header = _columns(path, content)
    test_file = content.get("test_file")
    return Task(
        name=pathlib.Path(path).stem,
        text_a=columns["text_a"],
        text_b=columns.get("text_b"),
        label=columns["label"],
        index=None,
        labels=tuple(labels),
        names=tuple(labels.values()),
        metrics=_metrics(path, content.get("metrics"), len(labels)),
        train_file=content.get("train_file"),
        dev_files={"": content["dev_file"]} if "dev_file" in content else {},
        test_files={"predictions.tsv": test_file} if test_file else {},
        columns_without_header=without_header,
        source=path,
    )


def _labels(path: str, labels: Any) -> dict[str, str]:
    """Returns the name of each class by its spelling in the files."""
    if labels == NUMBERS:
        return {}
    classes = names = []
    if isinstance(labels, dict):
        classes, names = list(labels), list(labels.values())
    elif isinstance(labels, list) and not any(
        isinstance(value, list | dict | None) for value in labels
    ):
        classes = names = [spelling(value) for value in labels]
    is_named = all(isinstance(name, str) for name in names)
    if is_named and len(names) > 1 and len(set(names)) == len(names):
        return dict(zip(classes, names, strict=True))
    raise _unfit(
        path,
        "have as labels a list of two or more different classes, names by class, or "
        f'"{NUMBERS}" for a regression',
        labels,
    )


def _columns(path: str, content: dict) -> tuple[dict[str, str], tuple[str, ...] | None]:
    """Returns the columns by key, and all columns if the files do not name them."""
    columns = {
        key: content[key] for key in ("text_a", "text_b", "label") if key in content
    }
    if len(set(map(repr, columns.values()))) < len(columns):
        shown = ", ".join(json.dumps(column) for column in columns.values())
        raise _unfit(path, f"have different columns as {', '.join(columns)}", shown)
    if all(isinstance(column, str) for column in columns.values()):
        return columns, None
    if all(type(column) is int and column > 0 for column in columns.values()):
        last = max(columns.values())
        numbered = {key: str(column) for key, column in columns.items()}
        return numbered, tuple(str(number) for number in range(1, last + 1))
    raise _unfit(
        path,
        "have as columns names alone, for files with a header, or numbers >= 1 alone, "
        "for files without one",
        ", ".join(json.dumps(column) for column in columns.values()),
    )


def _metrics(path: str, metrics: Any, num_classes: int) -> tuple[str, ...]:
    if num_classes == 2:
        allowed = CLASS_METRICS
    else:
        allowed = CLASS_METRICS[:1] if num_classes else NUMBER_METRICS
    if metrics is None:
        return allowed if num_classes == 0 else allowed[:1]
    if isinstance(metrics, list) and metrics and set(map(str, metrics)) <= set(allowed):
        return tuple(metrics)
    raise _unfit(path, f"have metrics out of {', '.join(allowed)}", metrics)


def _unfit(path: str, rule: str, received: Any) -> ValueError:
    shown = received if isinstance(received, str) else json.dumps(received)
    shown = f" Received: {shown or 'nothing'}."
    return ValueError(
        f"`--task_name` {path} must {rule}.{shown} See docs/bert.md, Your own data."
    )
