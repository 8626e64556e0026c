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
for a regression. A row may have several labels: in one column, with a `separator` between
them, or as a list of columns of 0 and 1, one for each of `labels`.
"""

import json
import pathlib
from typing import Any

from bert_finetune.tables import spelling
from bert_finetune.tasks import (
    CLASS_METRICS,
    MULTI_LABEL_METRICS,
    NUMBER_METRICS,
    Task,
    get_task,
)
from estimator_accum.programs.json_text import parse_json

NUMBERS = "numbers"  # `labels` of a regression
_FILES = ("train_file", "dev_file", "test_file")
_KEYS = (*_FILES, "text_a", "text_b", "label", "separator", "labels", "metrics")
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
        if not isinstance(content.get(key, ""), str) or "://" in content.get(key, ""):
            raise _unfit(path, f"name a file of --data_dir as {key}", content[key])
    labels = _labels(path, content["labels"])
    columns, without_header = _columns(path, content)
    _check_several_labels(path, content, labels)
    test_file = content.get("test_file")
    return Task(
        name=pathlib.Path(path).stem,
        text_a=columns["text_a"],
        text_b=columns.get("text_b"),
        label=columns["label"],
        separator=content.get("separator"),
        index=None,
        labels=tuple(labels),
        names=tuple(labels.values()),
        metrics=_metrics(path, content, len(labels)),
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


def _check_several_labels(path: str, content: dict, labels: dict[str, str]) -> None:
    """Raises ValueError if the keys of rows with several labels do not fit."""
    columns, separator = content["label"], content.get("separator")
    if "separator" in content:
        if not isinstance(separator, str) or not separator or isinstance(columns, list):
            rule = "have a text as separator, of the labels in one column"
            raise _unfit(path, rule, separator)
        if not labels or any(separator in label for label in labels):
            rule = f"have a list of labels without {separator!r}, their separator"
            raise _unfit(path, rule, content["labels"])
    if isinstance(columns, list) and not len(columns) == len(labels) > 0:
        rule = f"have one of labels for each of the {len(columns)} columns of label"
        raise _unfit(path, rule, content["labels"])


def _columns(
    path: str, content: dict
) -> tuple[dict[str, str | tuple[str, ...]], tuple[str, ...] | None]:
    """Returns the columns by key, and all columns if the files do not name them."""
    columns = {
        key: content[key] for key in ("text_a", "text_b", "label") if key in content
    }
    *texts, label = columns.values()
    flat = [*texts, *(label if isinstance(label, list) else [label])]
    shown = ", ".join(map(json.dumps, flat))
    if len(set(map(repr, flat))) < len(flat):
        raise _unfit(path, f"have different columns as {', '.join(columns)}", shown)
    has_names = all(isinstance(column, str) for column in flat)
    if has_names or all(type(column) is int and column > 0 for column in flat):
        named = {
            key: tuple(map(str, column)) if isinstance(column, list) else str(column)
            for key, column in columns.items()
        }
        last = 0 if has_names else max(flat)
        return named, tuple(str(i + 1) for i in range(last)) or None
    raise _unfit(
        path,
        "have as columns names alone, for files with a header, or numbers >= 1 alone, "
        "for files without one",
        shown,
    )


def _metrics(path: str, content: dict, num_classes: int) -> tuple[str, ...]:
    metrics = content.get("metrics")
    is_multi_label = "separator" in content or isinstance(content["label"], list)
    if is_multi_label:
        allowed = MULTI_LABEL_METRICS
    elif num_classes == 2:
        allowed = CLASS_METRICS
    else:
        allowed = CLASS_METRICS[:1] if num_classes else NUMBER_METRICS
    if metrics is None:
        return allowed if num_classes == 0 or is_multi_label else allowed[:1]
    if isinstance(metrics, list) and metrics and set(map(str, metrics)) <= set(allowed):
        return tuple(metrics)
    raise _unfit(path, f"have metrics out of {', '.join(allowed)}", metrics)


def _unfit(path: str, rule: str, received: Any) -> ValueError:
    shown = received if isinstance(received, str) else json.dumps(received)
    shown = f" Received: {shown or 'nothing'}."
    return ValueError(
        f"`--task_name` {path} must {rule}.{shown} See docs/bert.md, Your own data."
    )
