"""Data of one's own: files of three kinds, described by a JSON file."""

import csv
import json
import logging
import pathlib

import numpy as np
import pytest

from bert_finetune import hf_export, results
from bert_finetune.own_task import find_task
from bert_finetune.tasks import Example, read_examples
from bert_finetune.tokenization import WordPieceTokenizer
from tests.helpers.models import tiny_bert

pytestmark = pytest.mark.once
_YELP = {
    "train_file": "train.csv",
    "dev_file": "test.csv",
    "test_file": "test.csv",
    "text_a": 2,
    "label": 1,
    "labels": {"1": "negative", "2": "positive"},
}
_PAIRS = {"text_a": "first", "text_b": "second", "label": "score", "labels": "numbers"}


def _task(folder: pathlib.Path, content, name: str = "yelp.json"):
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return find_task(str(path))


def _read(folder, task, file, text, labelled=True):
    (folder / file).write_text(text, encoding="utf-8", newline="")
    return read_examples(task, folder, file, labelled=labelled)


def test_a_csv_without_header_has_numbered_columns_and_the_label_first(tmp_path):
    """As Yelp's reviews, and as RFC 4180: quotation marks, commas and line breaks."""
    task = _task(tmp_path, _YELP)
    text = '"1","He said ""no"",\r\nthen left."\r\n\r\n2,Fine\r\n'
    assert _read(tmp_path, task, "train.csv", text) == [
        Example("train-1", 'He said "no",\nthen left.', None, 0),
        Example("train-4", "Fine", None, 1),
    ]
    rows = _read(tmp_path, task, "test.csv", text, labelled=False)
    assert [(row.guid, row.label) for row in rows] == [("0", None), ("1", None)]
    assert (task.name, task.main_metric) == ("yelp", "eval_accuracy")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a.tsv", 'score\tsecond\tfirst\n0.5\tB, "b\tA\n-2\tD\tC\n'),
        ("a.CSV", 'score,second,first\n0.5,"B, ""b",A\n-2,D,C\n'),
        (
            "a.jsonl",
            """{"first": "A", "second": "B, \\"b", "score": 0.5, "more": null}
{"second": "D", "first": "C", "score": "-2"}
""",
        ),
    ],
)
def test_pairs_and_numbers_are_read_by_the_columns_names(tmp_path, file, text):
    task = _task(tmp_path, _PAIRS)
    examples = _read(tmp_path, task, file, text)
    assert [row[1:] for row in examples] == [("A", 'B, "b', 0.5), ("C", "D", -2.0)]
    assert (task.num_outputs, task.metrics) == (1, ("pearson", "spearman"))


_TAGS = {"text_a": "text", "label": "tags", "separator": ";", "labels": ["b", "a", "c"]}
_MARKS = {"text_a": 1, "label": [2, 4], "labels": ["rude", "long"]}


def test_a_row_has_several_labels_in_a_column_or_in_columns_of_0_and_1(tmp_path):
    task = _task(tmp_path, _TAGS)
    examples = _read(tmp_path, task, "a.tsv", "tags\ttext\na; b\tA\n\tB\nc\tC\n")
    assert [row.label for row in examples] == [(1, 1, 0), (0, 0, 0), (0, 0, 1)]
    assert (task.num_outputs, task.main_metric) == (3, "roc_auc")
    task = _task(tmp_path, _MARKS)
    examples = _read(tmp_path, task, "a.csv", "A,1,x,0\nB,0,y,1\n")
    assert [row.label for row in examples] == [(1, 0), (0, 1)]
    texts = _read(tmp_path, task, "test.csv", "A,,,\n", labelled=False)
    assert [row.label for row in texts] == [None]


def test_a_quoted_text_may_be_long_and_follow_a_space(tmp_path):
    text = f'1, "A, a"\n2,"{200_000 * "B"}"\n'
    examples = _read(tmp_path, _task(tmp_path, _YELP), "a.csv", text)
    assert [example.text_a for example in examples] == ["A, a", 200_000 * "B"]
    assert csv.field_size_limit() < 200_000  # for all other readers


def test_columns_that_no_one_reads_are_named(tmp_path, caplog):
    caplog.set_level(logging.INFO, "tensorflow.bert_finetune")
    task = _task(tmp_path, _YELP)
    _read(tmp_path, task, "a.csv", "1,A,a\n2,B,b\n")
    _read(tmp_path, task, "b.csv", "1,A\n2,B\n")
    assert caplog.messages == ["a.csv has 3 columns; the task reads 1, 2"]


def test_files_with_a_byte_order_mark_describe_a_task(tmp_path):
    task = _task(tmp_path, f"\ufeff{json.dumps(_YELP)}")
    assert task.text_a == "2"


def test_classes_are_written_as_in_json_lines_too(tmp_path):
    content = {"text_a": "text", "label": "stars", "labels": [1, 2, True]}
    task = _task(tmp_path, content | {"metrics": ["accuracy"]})
    lines = [{"text": "A", "stars": value} for value in (2, "1", True)]
    text = "\n".join(map(json.dumps, lines))
    examples = _read(tmp_path, task, "a.jsonl", text)
    assert [example.label for example in examples] == [1, 0, 2]
    assert task.class_names == ("1", "2", "true")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", r"yelp.json must be a JSON file. Received: Expecting property name"),
        ("[]", r"must be a JSON object. Received: \[\]. See docs/bert.md, Your own"),
        pytest.param(
            "[" * 100_000,
            "must be a JSON file. Received: values are nested too deeply.",
            id="nested",
        ),
        ('{"label": 1, "label": 2}', 'an object has the key "label" twice. See docs'),
        (
            _YELP | {"text_b": 2},
            "must have different columns as text_a, text_b, label. Received: 2, 2, 1.",
        ),
        (_YELP | {"lable": 1}, "must have the keys train_file, .* alone. .*: lable. "),
        ({"text_a": 2, "label": 1}, "must have the key labels. Received: text_a, lab"),
        (_YELP | {"dev_file": 3}, "must name a file of --data_dir as dev_file. .*: 3"),
        (_YELP | {"dev_file": "gs://b/x"}, "must name a file of --data_dir as dev_"),
        (
            _YELP | {"text_a": "text"},
            'have as columns names alone, .* Rec.*: "text", 1',
        ),
        (_YELP | {"label": 0}, "numbers >= 1 alone, .* Received: 2, 0."),
        (_YELP | {"labels": ["1"]}, "have as labels a list of two .* Received: .*1"),
        (_YELP | {"labels": [None, "1"]}, r"as labels a list of .* Received: \[null, "),
        (_YELP | {"labels": {"1": "a", "2": "a"}}, "two or more different"),
        (_YELP | {"labels": ["a", "b", "a"]}, "a list of two or more different class"),
        (_TAGS | {"separator": ""}, "have a text as separator, .* Received: nothing"),
        (_MARKS | {"separator": ","}, "have a text as separator, of the labels in one"),
        (_TAGS | {"labels": ["a;b", "c"]}, "a list of labels without ';', their sep"),
        (_TAGS | {"labels": "numbers"}, "have a list of labels without .*: numbers"),
        (
            _MARKS | {"labels": ["a", "b", "c"]},
            "have one of labels for each of the 2 c",
        ),
        (_MARKS | {"label": [2, 1]}, "different columns as text_a, label. .*: 1, 2, 1"),
        (_MARKS | {"metrics": ["accuracy"]}, "metrics out of f1, roc_auc. Received"),
        (_YELP | {"metrics": ["f2"]}, "metrics out of accuracy, f1, matthews_corr"),
        (_YELP | {"labels": "numbers", "metrics": ["f1"]}, "out of pearson, spearman."),
        (
            _YELP | {"labels": [1, 2, 3], "metrics": ["f1"]},
            "metrics out of accuracy. R",
        ),
    ],
)
def test_an_unfit_task_file_is_refused(tmp_path, content, sentence):
    with pytest.raises(ValueError, match=sentence):
        _task(tmp_path, content)


def test_a_task_file_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="must be a JSON file. Received: No such file"):
        find_task("none.json")


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        (
            "a.csv",
            "1,A\n3,B\n",
            "a.csv line 2 must have a label of yelp: 1 or 2. .*'3'",
        ),
        (
            "a.csv",
            "1,A\n2\n",
            "a.csv line 2 must have 2 comma-separated columns, as line 1 has. .*: 1. Corr",
        ),
        ("a.csv", "1,A\n2,B, b\n", 'line 2 must .* Received: 3. Put a text .*: "a, b"'),
        ("a.csv", "1,A, a\n2,B\n", "line 2 must have 3 .*, as line 1 has. Received: 2"),
        ("a.tsv", "1\tA\n2\tB\tb", "2 must have 2 tab-.* Received: 3. Remove the tabs"),
        (
            "a.csv",
            '1,A\n2,"B\n\nC',
            "line 2 must begin a comma-separated row, .* end of",
        ),
        (
            "a.csv",
            '1,"A"b\n',
            "a.csv line 1 must begin .* Received: ',' expected after",
        ),
        ("a.tsv", "1 A\n", "a.tsv line 1 must have 2 tab-.*, which .*yelp.json needs"),
        ("a.csv", "", "a.csv must hold at least one example of yelp"),
    ],
)
def test_an_unfit_row_is_refused_with_file_and_line(tmp_path, file, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        _read(tmp_path, _task(tmp_path, _YELP), file, text)


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        (
            "a.csv",
            "first,score\nA,1\n",
            "header .* second, score. .*: first, score. Corr",
        ),
        (
            "a.jsonl",
            '\n{"first": "A"}',
            "line 2 must be a JSON object with first, secon",
        ),
        (
            "a.jsonl",
            "A",
            "a.jsonl line 1 must be a JSON object .* Received: A. Correct",
        ),
        (
            "a.jsonl",
            '{"first": "A", "second": null, "score": 1}',
            "line 1 must .* and none of them null. Received: first, second, score. Corr",
        ),
        *(
            (
                "a.tsv",
                f"first\tsecond\tscore\nA\tB\t{number}",
                "line 2 must have a finite number",
            )
            for number in ("high", "1_000", "１", "nan", "-inf", "1e999", "0x1", "1,5")
        ),
        (
            "a.tsv",
            "first\tsecond\tscore\nA\tB\t-2e12",
            r"must have a number of at most 1e\+12 in size as its label. .*: '-2e12'",
        ),
        (
            "a.tsv",  # the second text would be the tail of the first
            "first\tsecond\tscore\nA\ta\tB\t1",
            "line 2 must have 3 tab-.*, as the header in line 1 has. Received: 4. Rem",
        ),
        (
            "a.tsv",
            "first\tsecond\tscore\tfirst\nA\tB\t1\tC",
            "line 1 must be a header that names the column first once. .*, first. Ren",
        ),
        *(
            (
                "a.jsonl",
                json.dumps({"first": value, "second": "B", "score": 1}),
                "line 1 must have a string as first. Received: .*. Correct the line",
            )
            for value in (["A"], {"a": "A"}, True, 1.5, [])
        ),
        (
            "a.jsonl",
            '{"first": "A", "second": "B", "score": [1]}',
            r"must have a string, a number, true or false as score. Received: \[1\].",
        ),
        (
            "a.jsonl",
            '{"first": "A", "first": "a", "second": "B", "score": 1}',
            r'must be a JSON object .* \(an object has the key "first" twice\)\. Correct',
        ),
        pytest.param(
            "a.jsonl",
            "[" * 100_000,
            r"line 1 must .*\[ \(values are nested too deeply",
            id="nested",
        ),
        (
            "a.jsonl",
            r'{"first": "\ud800", "second": "B", "score": 1}',
            "line 1 must have a string of whole characters as first. Received: '.*ud80",
        ),
    ],
)
def test_an_unfit_row_of_named_columns_is_refused(tmp_path, file, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        _read(tmp_path, _task(tmp_path, _PAIRS), file, text)


@pytest.mark.parametrize(
    ("content", "text", "sentence"),
    [
        (
            _TAGS,
            "tags\ttext\na;d\tA\n",
            "have labels of .*: b or a or c. Received: 'd'",
        ),
        (_MARKS, "A\t1\tx\t2\n", "have 0 or 1 in each of the columns 2, 4. .*: '2'"),
    ],
)
def test_a_row_with_another_label_is_refused(tmp_path, content, text, sentence):
    with pytest.raises(ValueError, match=sentence):
        _read(tmp_path, _task(tmp_path, content), "a.tsv", text)


def test_predictions_and_the_hugging_face_config_have_the_names_of_classes(
    tmp_path, bert_dir
):
    task = _task(tmp_path, _YELP)
    (name,) = task.test_files
    rows = [Example(str(number), "A", None, None) for number in range(2)]
    answers = [{"probabilities": [0.25, 0.75], "label": 1}] * 2
    paths = results.write_predictions(tmp_path, task, name, "all.tsv", rows, answers)
    assert paths[0].read_text() == "0.25\t0.75\n0.25\t0.75\n"
    assert paths[1].read_text() == "index\tprediction\n0\tpositive\n1\tpositive\n"
    tokenizer = WordPieceTokenizer(bert_dir / "vocab.txt", do_lower_case=True)
    config = hf_export._config(tiny_bert.CONFIG, task, tokenizer)
    assert config["id2label"] == {"0": "negative", "1": "positive"}
    assert config["label2id"] == {"negative": 0, "positive": 1}
    config = hf_export._config(tiny_bert.CONFIG, find_task("STS-B"), tokenizer)
    assert (config["problem_type"], config["num_labels"]) == ("regression", 1)
    config = hf_export._config(tiny_bert.CONFIG, _task(tmp_path, _TAGS), tokenizer)
    assert config["problem_type"] == "multi_label_classification"


@pytest.mark.parametrize("micro_batch_size", [4, "auto"])
def test_a_regression_learns_and_predicts_numbers(settings, tmp_path, micro_batch_size):
    """Words below w10 mean 4, the others 0."""

    def row(_, label, text):
        return json.dumps({"text": text, "score": 4.0 * label})

    for seed, (name, count) in enumerate({"train": 50, "dev": 20}.items()):
        tiny_bert.write_rows(tmp_path / f"{name}.jsonl", count, seed, row)
    files = {"train_file": "train.jsonl", "dev_file": "dev.jsonl"}
    files["test_file"] = "dev.jsonl"
    content = files | {"text_a": "text", "label": "score", "labels": "numbers"}
    _task(tmp_path, content, "stars.json")
    folder = tiny_bert.run(
        settings,
        task_name=str(tmp_path / "stars.json"),
        data_dir=str(tmp_path),
        micro_batch_size=micro_batch_size,
        effective_batch_size=8,
        gradient_accumulation_steps=2 if micro_batch_size == 4 else None,
        num_train_epochs=10.0,
        **dict.fromkeys(("do_train", "do_eval", "do_predict", "do_export"), True),
    )
    metrics = tiny_bert.results(folder)
    _, *lines = (folder / "predictions.tsv").read_text().splitlines()
    scores = np.array([float(line.split("\t")[1]) for line in lines])
    np.testing.assert_array_equal(np.loadtxt(folder / "test_results.tsv"), scores)
    dev = (tmp_path / "dev.jsonl").read_text().splitlines()
    labels = np.array([json.loads(line)["score"] for line in dev])
    assert metrics["pearson"] > 0.9
    assert metrics["pearson"] == pytest.approx(np.corrcoef(labels, scores)[0, 1], 1e-4)
    assert metrics["eval_loss"] == pytest.approx(np.mean((scores - labels) ** 2), 1e-4)
    settings_file = json.loads((folder / "run_settings.json").read_text())
    assert settings_file["task_name"] == "stars"
    assert settings_file["flags"]["task_name"] == str(tmp_path / "stars.json")


def test_several_labels_are_learned_and_predicted(settings, tmp_path):
    """Words below w10 mean low, the others high; each row is a text."""

    def row(_, label, text):
        labels = ["low", "text"] if label else ["high", "text"]
        return json.dumps({"text": text, "tags": ",".join(labels)})

    for seed, (name, count) in enumerate({"train": 50, "dev": 20}.items()):
        tiny_bert.write_rows(tmp_path / f"{name}.jsonl", count, seed, row)
    files = {"train_file": "train.jsonl", "dev_file": "dev.jsonl"}
    content = {"text_a": "text", "label": "tags", "labels": ["low", "high", "text"]}
    content |= files | {"test_file": "dev.jsonl", "separator": ","}
    _task(tmp_path, content, "tags.json")
    folder = tiny_bert.run(
        settings,
        task_name=str(tmp_path / "tags.json"),
        data_dir=str(tmp_path),
        effective_batch_size=8,
        num_train_epochs=30.0,
        **dict.fromkeys(("do_train", "do_eval", "do_predict"), True),
    )
    metrics = tiny_bert.results(folder)
    assert metrics["f1"] > 0.9 and metrics["roc_auc"] > 0.9
    assert json.loads((folder / "run_settings.json").read_text())["is_multi_label"]
    probabilities = np.loadtxt(folder / "test_results.tsv")
    assert np.any(probabilities.sum(1) > 1.5)
    lines = (folder / "predictions.tsv").read_text().splitlines()[1:]
    names = [",".join(np.array(content["labels"])[row > 0.5]) for row in probabilities]
    assert [line.split("\t")[1] for line in lines] == names
    wanted = [
        json.loads(line)["tags"].split(",")
        for line in (tmp_path / "dev.jsonl").read_text().splitlines()
    ]
    labels = np.array([[name in row for name in content["labels"]] for row in wanted])
    losses = -np.log(np.where(labels, probabilities, 1 - probabilities))
    assert metrics["eval_loss"] == pytest.approx(losses.mean(), 1e-3)
