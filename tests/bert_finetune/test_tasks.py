"""GLUE's files, in GLUE's layout or with all kinds of errors."""

import logging

import pytest

from bert_finetune.tasks import TASKS, Example, get_task, read_examples

pytestmark = pytest.mark.once

_MNLI_TEXT = "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\t" + (
    "sentence2_binary_parse\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2"
)
_MNLI_ROW = "1\t1\tfiction\t( a )\t( b )\t(A)\t(B)\t{a}\t{b}"


def _pair(first, second):
    header = f"index\t{first}\t{second}"
    return f"{header}\tlabel", "0\t{a}\t{b}\t{label}", header, "3\t{a}\t{b}"


# Header and rows of each task's labelled files, then of its test files.
_LAYOUTS = {
    "CoLA": (None, "gj04\t{label}\t*\t{a}", "index\tsentence", "3\t{a}"),
    "SST-2": ("sentence\tlabel", "{a}\t{label}", "index\tsentence", "3\t{a}"),
    "MRPC": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "{label}\t7\t8\t{a}\t{b}",
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "3\t7\t8\t{a}\t{b}",
    ),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "5\t1\t2\t{a}\t{b}\t{label}",
        "id\tquestion1\tquestion2",
        "3\t{a}\t{b}",
    ),
    "MNLI": (
        f"{_MNLI_TEXT}\tlabel1\tgold_label",
        f"0\t{_MNLI_ROW}\tneutral\t{{label}}",
        _MNLI_TEXT,
        f"3\t{_MNLI_ROW}",
    ),
    "STS-B": (
        "index\tgenre\tsentence1\tsentence2\tscore",
        "0\tnews\t{a}\t{b}\t{label}",
        "index\tgenre\tsentence1\tsentence2",
        "3\tnews\t{a}\t{b}",
    ),
    "QNLI": _pair("question", "sentence"),
    "RTE": _pair("sentence1", "sentence2"),
    "WNLI": _pair("sentence1", "sentence2"),
}
_ALL = [task.name for task in TASKS]


def _write(folder, name, *lines, end="\n", start=b""):
    content = start + "".join(f"{line}{end}" for line in lines).encode()
    (folder / name).write_bytes(content)


def _read(folder, name, file):
    return read_examples(get_task(name), folder, file, labelled=file != "test.tsv")


def _texts(text, row):
    """Returns two texts, the first ending with a space; None for a missing second."""
    return f"A {text}. ", f"B {text}?" if "{b}" in row else None


def _labelled(name):
    """Returns the header of a labelled file, and a row for each label."""
    header, row, *_ = _LAYOUTS[name]
    rows = []
    for label in get_task(name).labels or ("0.0", "1.0"):
        a, b = _texts(label, row)
        rows.append(row.format(label=label, a=a, b=b))
    return header, rows


@pytest.mark.parametrize("name", _ALL)
def test_labelled_files_are_read_in_glues_layout(tmp_path, name):
    task = get_task(name)
    header, rows = _labelled(name)
    first_line = 1 if header is None else 2
    for file in (task.train_file, *task.dev_files.values()):
        _write(tmp_path, file, *([] if header is None else [header]), *rows)
        for i, example in enumerate(_read(tmp_path, name, file)):
            texts = _texts((task.labels or ("0.0", "1.0"))[i], _LAYOUTS[name][1])
            assert example == Example(f"{file[:-4]}-{first_line + i}", *texts, i)
        assert i == len(rows) - 1


@pytest.mark.parametrize("name", _ALL)
def test_test_files_are_read_with_glues_index_and_no_label(tmp_path, name):
    *_, header, row = _LAYOUTS[name]
    a, b = _texts("1", row)
    for file in get_task(name).test_files.values():
        _write(tmp_path, file, header, row.format(a=a, b=b))
        examples = read_examples(get_task(name), tmp_path, file, labelled=False)
        assert examples == [Example("3", a, b, None)]


def test_table_names_glues_files_labels_and_metrics():
    assert [name.removesuffix(".tsv") for t in TASKS for name in t.test_files] == [
        *(
            "CoLA",
            "SST-2",
            "MRPC",
            "QQP",
            "STS-B",
            "MNLI-m",
            "MNLI-mm",
            "QNLI",
            "RTE",
            "WNLI",
        )
    ]
    labels = {task.name: task.labels for task in TASKS}
    assert labels.pop("MNLI") == ("contradiction", "entailment", "neutral")
    assert labels.pop("QNLI") == labels.pop("RTE") == ("entailment", "not_entailment")
    assert labels.pop("STS-B") == ()
    assert set(labels.values()) == {("0", "1")}
    files = {"": "dev_matched.tsv", "_mismatched": "dev_mismatched.tsv"}
    assert get_task("mnli").dev_files == files
    assert get_task("mnli").test_files["MNLI-mm.tsv"] == "test_mismatched.tsv"
    assert get_task("cola").metrics == ("accuracy", "matthews_correlation")
    assert {t.name for t in TASKS if "f1" in t.metrics} == {"MRPC", "QQP"}


@pytest.mark.parametrize("name", ["SST-2", "sst-2", "SST2", "sst2", "Sst-2"])
def test_case_and_dashes_of_a_task_name_do_not_matter(name):
    assert get_task(name).name == "SST-2"


def test_unknown_task_lists_those_allowed():
    allowed = f"{', '.join(_ALL)} or a JSON file for your own data"
    sentence = f"`--task_name` must be one of {allowed}. Received: 'ax'."
    with pytest.raises(ValueError, match=sentence):
        get_task("ax")


def test_quotation_marks_and_lone_separators_are_characters(tmp_path):
    texts = ['He said "no', '"Yes."', '""', "one\rtwo\u2028three\x85four\x0bfive"]
    _write(tmp_path, "train.tsv", *(f"x\t1\t\t{text}" for text in texts))
    examples = _read(tmp_path, "cola", "train.tsv")
    assert [example.text_a for example in examples] == texts


def test_byte_order_mark_and_crlf_are_accepted(tmp_path):
    header, rows = _labelled("SST-2")
    _write(tmp_path, "train.tsv", header, *rows, end="\r\n", start=b"\xef\xbb\xbf")
    examples = _read(tmp_path, "sst2", "train.tsv")
    assert [(e.text_a, e.label) for e in examples] == [("A 0. ", 0), ("A 1. ", 1)]


def test_empty_lines_and_rows_of_mnli_without_a_gold_label_are_skipped(tmp_path):
    _write(tmp_path, "train.tsv", "x\t1\t\tA.", "", "x\t0\t\tB.", "")
    examples = _read(tmp_path, "cola", "train.tsv")
    header, (*_, row) = _labelled("MNLI")
    _write(tmp_path, "train.tsv", header, row.removesuffix("neutral") + "-", row)
    examples += _read(tmp_path, "mnli", "train.tsv")
    assert [example.guid for example in examples] == ["train-1", "train-3", "train-3"]


def test_broken_rows_of_qqp_are_skipped_and_counted(tmp_path, caplog):
    header, rows = _labelled("QQP")
    broken = ['7\t1\t2\tWhy? "', '"\tWho?\t0', f"{rows[0]}\t0"]
    _write(tmp_path, "train.tsv", header, *broken, *rows, rows[0], rows[1])
    with caplog.at_level(logging.WARNING):
        examples = _read(tmp_path, "qqp", "train.tsv")
    assert [example.guid for example in examples] == [
        f"train-{n}" for n in (5, 6, 7, 8)
    ]
    assert "skipped 3 broken of 7 rows" in caplog.text
    assert "train.tsv line 2 must have 6" in caplog.text


_QQP, _QNLI = _labelled("QQP"), _labelled("QNLI")


@pytest.mark.parametrize(
    ("path", "lines", "sentence"),
    [
        (
            "qqp/train.tsv",
            [_QQP[0], "1\tWhy?\tWho?", _QQP[1][0]],  # mostly broken
            "line 2 must have 6 tab-separated",
        ),
        (
            "qqp/test.tsv",
            [_LAYOUTS["QQP"][2], "3\tWhy?\tWho?", "4\tWhy?", "5\tWhy?\tWho?"],
            "test.tsv line 3 must have 3",
        ),
        (
            "cola/train.tsv",
            [*["x\t1\t\tA."] * 16, "x\t1", *["x\t1\t\tA."] * 16],
            "line 17 must have 4 tab-separated columns, as CoLA's files have. Received: 2",
        ),
        (
            "cola/train.tsv",
            ["x\t1\t\tA.\ta"],
            "line 1 must have 4 .* Received: 5. .*, or use a JSON file as --task_name",
        ),
        (
            "sst-2/train.tsv",
            ["sentence\tlabel", "A.\ta\t1"],
            "line 2 must have 2 .*, as the header in line 1 has. Received: 3. Remove",
        ),
        (
            "qnli/dev.tsv",
            [_QNLI[0], *_QNLI[1], "2\tWho?\tShe.\tmaybe"],
            "line 4 must have a label of QNLI: entailment or not_.* Received: 'maybe'.",
        ),
        (
            "rte/train.tsv",
            ["index\tsentence1\tlabel", "0\tA.\tentailment"],
            "must be a header with .* sentence1, sentence2, label. .*: index, sentence1",
        ),
        (
            "sts-b/train.tsv",
            [_LAYOUTS["STS-B"][0], "0\tnews\tA.\tB.\tnan"],
            "line 2 must have a finite number as its label of STS-B. Received: 'nan'.",
        ),
        ("cola/test.tsv", ["0\tThe book."], "columns sentence, index. Received: 0, Th"),
        ("sst-2/train.tsv", [], "train.tsv must hold at least one example"),
        ("sst-2/train.tsv", [""], "train.tsv must hold at least one example"),
        ("sst-2/train.tsv", ["sentence\tlabel"], "must hold at least one example"),
        ("cola/train.tsv", None, "tsv of CoLA. Received: .*fetch glue --tasks=CoLA"),
        ("cola/CoLA/train.tsv", ["x\t1\t\tA."], r"Use --data_dir=.*CoLA\."),
    ],
)
def test_unfit_file_is_refused_with_file_and_line(tmp_path, path, lines, sentence):
    name, _, file = path.partition("/")
    (tmp_path / "CoLA").mkdir()
    if lines is not None:
        _write(tmp_path, file, *lines)
    with pytest.raises(ValueError, match=sentence):
        _read(tmp_path, name, file.rpartition("/")[2])


def test_other_encodings_name_file_and_line(tmp_path):
    (tmp_path / "train.tsv").write_bytes(b"x\t1\t\tA.\nx\t1\t\tcaf\xe9\n")
    with pytest.raises(ValueError, match=r"train.tsv line 2 must be UTF-8. .*b'\\xe9'"):
        _read(tmp_path, "cola", "train.tsv")


def test_real_cola_has_its_published_number_of_examples(real_data):
    files = ("train.tsv", "dev.tsv", "test.tsv")
    train, dev, test = (_read(real_data / "cola", "cola", file) for file in files)
    assert [len(train), len(dev), len(test)] == [7250, 1043, 1063]
    assert {example.label for example in train} == {0, 1}
    assert [example.guid for example in test] == [str(i) for i in range(1063)]
    text = "The sailors rode the breeze clear of the rocks."
    assert dev[0] == Example("dev-1", text, None, 1)
