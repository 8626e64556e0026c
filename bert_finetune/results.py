"""Result files of a run: predictions, GLUE submissions."""

import os
import pathlib
from collections.abc import Iterable

from bert_finetune.tasks import Example, Task
from estimator_accum.programs.folder import write_text

EVALUATIONS, BEST, EXPORT = "evaluations.csv", "best", "export"


def prediction_files(task: Task) -> dict[str, str]:
    """Returns the names of the probabilities files by those of the submission files."""
    if not task.test_files:
        return {}
    main, *others = task.test_files
    return {main: "test_results.tsv"} | {o: f"test_results_{o}" for o in others}


def write_predictions(
    output_dir: str | os.PathLike,
    task: Task,
    submission_file: str,
    probabilities_file: str,
    rows: list[Example],
    predictions: Iterable[dict],
) -> tuple[pathlib.Path, pathlib.Path]:
    """Writes the model's outputs and a submission for GLUE's server, in file order.

    Args:
        output_dir: Folder of both files.
        task: The task, which names the classes.
        submission_file: GLUE's name of the submission, e.g. `CoLA.tsv`; its columns are
            index and prediction, the class's name, the labels' names or the number.
        probabilities_file: Name of the other file: one line per example, one column per
            class, no header, as google-research/bert's `test_results.tsv`; one column
            for a regression.
        rows: The test file's rows.
        predictions: One dict for each row, with "probabilities" and "label", with
            "probabilities" and "labels" for several, or with "score" for a regression.

    Returns:
        The paths (probabilities, submission).
    """
    probabilities, submission = [], ["index\tprediction\n"]
    for row, prediction in zip(rows, predictions, strict=True):
        if task.is_regression:
            outputs, answer = [prediction["score"]], str(prediction["score"])
        elif task.is_multi_label:
            outputs, labels = prediction["probabilities"], prediction["labels"]
            pairs = zip(task.class_names, labels, strict=True)
            names = [name for name, is_label in pairs if is_label]
            answer = (task.separator or ",").join(names)
        else:
            outputs = prediction["probabilities"]
            answer = task.class_names[prediction["label"]]
        probabilities.append("\t".join(map(str, outputs)) + "\n")
        submission.append(f"{row.guid}\t{answer}\n")
    folder = pathlib.Path(output_dir)
    paths = folder / probabilities_file, folder / submission_file
    write_text(paths[0], "".join(probabilities))
    write_text(paths[1], "".join(submission))
    return paths
