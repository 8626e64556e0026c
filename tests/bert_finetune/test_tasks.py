"""GLUE's files, in GLUE's layout and with everything that can be wrong in them."""

import logging

import pytest

from bert_finetune.tasks import TASKS, Example, get_task, read_examples

pytestmark = pytest.mark.once

_MNLI_TEXT = "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\t" + (
    "sentence2_binary_parse\tsentence1_parse\tsentence2_parse\tsentence1\tsentence2"
)
# The header of each task's labelled files, a row for each label, and what they say.
_LABELLED = {
    "CoLA": (
        None,
        {"0": "gj04\t0\t*\tThe book what.", "1": "gj04\t1\t\tThe book."},
        {"0": ("The book what.", None), "1": ("The book.", None)},
    ),
    "SST-2": (
        "sentence\tlabel",
        {"0": "a bore \t0", "1": "a joy \t1"},
        {"0": ("a bore ", None), "1": ("a joy ", None)},
    ),
    "MRPC": (
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        {"0": "0\t7\t8\tIt fell.\tIt rose.", "1": "1\t9\t10\tIt fell.\tIt dropped."},
        {"0": ("It fell.", "It rose."), "1": ("It fell.", "It dropped.")},
    ),
    "QQP": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        {"0": "5\t1\t2\tWhy?\tWho?\t0", "1": "6\t3\t4\tWhy?\tWhat for?\t1"},
        {"0": ("Why?", "Who?"), "1": ("Why?", "What for?")},
    ),
    "MNLI": (
        f"{_MNLI_TEXT}\tlabel1\tgold_label",
        {
            label: f"0\t1\t1e\tfiction\t( a )\t( b )\t(A)\t(B)\tA.\tB.\tneutral\t{label}"
            for label in ("contradiction", "entailment", "neutral")
        },
        dict.fromkeys(("contradiction", "entailment", "neutral"), ("A.", "B.")),
    ),
    "QNLI": (
        "index\tquestion\tsentence\tlabel",
        {
            "entailment": "0\tWho?\tShe did.\tentailment",
            "not_entailment": "1\tWho?\tIt rains.\tnot_entailment",
        },
        {
            "entailment": ("Who?", "She did."),
            "not_entailment": ("Who?", "It rains."),
        },
    ),
    "RTE": (
        "index\tsentence1\tsentence2\tlabel",
        {
            "entailment": "0\tIt rains.\tIt is wet.\tentailment",
            "not_entailment": "1\tIt rains.\tIt is dry.\tnot_entailment",
        },
        {
            "entailment": ("It rains.", "It is wet."),
            "not_entailment": ("It rains.", "It is dry."),
        },
    ),
    "WNLI": (
        "index\tsentence1\tsentence2\tlabel",
        {"0": "0\tIt broke.\tThe egg broke.\t0", "1": "1\tIt fell.\tThe egg fell.\t1"},
        {"0": ("It broke.", "The egg broke."), "1": ("It fell.", "The egg fell.")},
    ),
}
# The header of each task's test files, a row, and what it says.
_TEST = {
    "CoLA": ("index\tsentence", "3\tThe book.", ("3", "The book.", None)),
    "SST-2": ("index\tsentence", "3\ta joy", ("3", "a joy", None)),
    "MRPC": (
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "3\t7\t8\tIt fell.\tIt rose.",
        ("3", "It fell.", "It rose."),
    ),
    "QQP": ("id\tquestion1\tquestion2", "3\tWhy?\tWho?", ("3", "Why?", "Who?")),
    "MNLI": (
        _MNLI_TEXT,
        "3\t1\t1\tfiction\t( a )\t( b )\t(A)\t(B)\tA.\tB.",
        ("3", "A.", "B."),
    ),
    "QNLI": ("index\tquestion\tsentence", "3\tWho?\tShe.", ("3", "Who?", "She.")),
    "RTE": ("index\tsentence1\tsentence2", "3\tWet.\tDry.", ("3", "Wet.", "Dry.")),
    "WNLI": ("index\tsentence1\tsentence2", "3\tWet.\tDry.", ("3", "Wet.", "Dry.")),
}
_ALL = [task.name for task in TASKS]


def _write(folder, name, *lines, end="\n", start=b""):
    content = start + "".join(f"{line}{end}" for line in lines).encode()
    (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", _ALL)
def test_labelled_files_are_read_in_glues_layout(tmp_path, name):
    task = get_task(name)
    header, rows, texts = _LABELLED[name]
    first_line = 1 if header is None else 2
    files = [task.train_file, *task.dev_files.values()]
    for file in files:
        lines = [rows[label] for label in task.labels]
        _write(tmp_path, file, *([] if header is None else [header]), *lines)
        assert read_examples(task, tmp_path, file, labelled=True) == [
            Example(f"{file[:-4]}-{first_line + index}", *texts[label], index)
            for index, label in enumerate(task.labels)
        ]


@pytest.mark.parametrize("name", _ALL)
def test_test_files_are_read_with_glues_index_and_no_label(tmp_path, name):
    task = get_task(name)
    header, row, expected = _TEST[name]
    for file in task.test_files.values():
        _write(tmp_path, file, header, row)
        examples = read_examples(task, tmp_path, file, labelled=False)
        assert examples == [Example(*expected, None)]


def test_table_names_glues_files_labels_and_metrics():
    submissions = [name for task in TASKS for name in task.test_files]
    assert submissions == [
        "CoLA.tsv",
        "SST-2.tsv",
        "MRPC.tsv",
        "QQP.tsv",
        "MNLI-m.tsv",
        "MNLI-mm.tsv",
        "QNLI.tsv",
        "RTE.tsv",
        "WNLI.tsv",
    ]
    assert get_task("mnli").dev_files == {
        "": "dev_matched.tsv",
        "_mismatched": "dev_mismatched.tsv",
    }
    assert get_task("mnli").test_files["MNLI-mm.tsv"] == "test_mismatched.tsv"
    assert get_task("mnli").labels == ("contradiction", "entailment", "neutral")
    assert get_task("cola").metrics == ("accuracy", "matthews_correlation")
    assert {t.name for t in TASKS if "f1" in t.metrics} == {"MRPC", "QQP"}


@pytest.mark.parametrize("name", ["SST-2", "sst-2", "SST2", "sst2", "Sst-2"])
def test_case_and_dashes_of_a_task_name_do_not_matter(name):
    assert get_task(name).name == "SST-2"


def test_unknown_task_lists_those_allowed():
    with pytest.raises(
        ValueError,
        match=r"`--task_name` must be one of CoLA, SST-2, MRPC, QQP, MNLI, QNLI, RTE, "
        r"WNLI\. Received: 'sts-b'\.",
    ):
        get_task("sts-b")


def test_quotation_marks_are_characters(tmp_path):
    text = 'He said "no'
    _write(tmp_path, "train.tsv", f"x\t1\t\t{text}", 'x\t0\t\t"Yes."', 'x\t0\t\t""')
    examples = read_examples(get_task("cola"), tmp_path, "train.tsv", labelled=True)
    assert [example.text_a for example in examples] == [text, '"Yes."', '""']


def test_byte_order_mark_and_crlf_are_accepted(tmp_path):
    header, rows, _ = _LABELLED["SST-2"]
    bom = b"\xef\xbb\xbf"
    _write(tmp_path, "train.tsv", header, *rows.values(), end="\r\n", start=bom)
    examples = read_examples(get_task("sst2"), tmp_path, "train.tsv", labelled=True)
    assert [(e.text_a, e.label) for e in examples] == [("a bore ", 0), ("a joy ", 1)]


def test_lone_carriage_returns_and_line_separators_end_no_line(tmp_path):
    text = "one\rtwo\u2028three\x85four\x0bfive"
    _write(tmp_path, "train.tsv", f"x\t1\t\t{text}")
    examples = read_examples(get_task("cola"), tmp_path, "train.tsv", labelled=True)
    assert [example.text_a for example in examples] == [text]


def test_empty_lines_are_skipped_and_counted(tmp_path):
    _write(tmp_path, "train.tsv", "x\t1\t\tA.", "", "x\t0\t\tB.", "")
    examples = read_examples(get_task("cola"), tmp_path, "train.tsv", labelled=True)
    assert [example.guid for example in examples] == ["train-1", "train-3"]


def test_mnli_rows_without_a_gold_label_are_skipped(tmp_path):
    header, rows, _ = _LABELLED["MNLI"]
    row = rows["neutral"]
    _write(tmp_path, "train.tsv", header, row.removesuffix("neutral") + "-", row)
    examples = read_examples(get_task("mnli"), tmp_path, "train.tsv", labelled=True)
    assert [example.guid for example in examples] == ["train-3"]


def test_broken_rows_of_qqp_are_skipped_and_counted(tmp_path, caplog):
    header, rows, _ = _LABELLED["QQP"]
    broken = ['7\t1\t2\tWhy? "', '"\tWho?\t0']
    _write(tmp_path, "train.tsv", header, *broken, *rows.values(), rows["0"])
    with caplog.at_level(logging.WARNING):
        examples = read_examples(get_task("qqp"), tmp_path, "train.tsv", labelled=True)
    assert [example.guid for example in examples] == ["train-4", "train-5", "train-6"]
    assert "skipped 2 broken of 5 rows" in caplog.text
    assert "train.tsv line 2 must have at least 6" in caplog.text


def test_qqp_file_that_is_mostly_broken_is_refused(tmp_path):
    header, rows, _ = _LABELLED["QQP"]
    _write(tmp_path, "train.tsv", header, "1\tWhy?\tWho?", rows["0"])
    with pytest.raises(ValueError, match="line 2 must have at least 6 tab-separated"):
        read_examples(get_task("qqp"), tmp_path, "train.tsv", labelled=True)


def test_broken_test_row_of_qqp_is_refused(tmp_path):
    header, row, _ = _TEST["QQP"]
    _write(tmp_path, "test.tsv", header, row, "4\tWhy?", row)
    with pytest.raises(ValueError, match=r"test\.tsv line 3 must have at least 3"):
        read_examples(get_task("qqp"), tmp_path, "test.tsv", labelled=False)


def test_too_few_columns_name_file_and_line(tmp_path):
    rows = ["x\t1\t\tA."] * 16
    _write(tmp_path, "train.tsv", *rows, "x\t1", *rows)
    with pytest.raises(
        ValueError,
        match=r"train\.tsv line 17 must have at least 4 tab-separated columns\. "
        r"Received: 2\. Correct or remove the line\.",
    ):
        read_examples(get_task("cola"), tmp_path, "train.tsv", labelled=True)


def test_unknown_label_names_file_and_line_and_lists_the_allowed(tmp_path):
    header, rows, _ = _LABELLED["QNLI"]
    _write(tmp_path, "dev.tsv", header, *rows.values(), "2\tWho?\tShe.\tmaybe")
    with pytest.raises(
        ValueError,
        match=r"dev\.tsv line 4 must have a label of QNLI: entailment or "
        r"not_entailment\. Received: 'maybe'\. Correct the line, or use another "
        r"--task_name\.",
    ):
        read_examples(get_task("qnli"), tmp_path, "dev.tsv", labelled=True)


def test_missing_columns_name_those_that_must_be_there(tmp_path):
    _write(tmp_path, "train.tsv", "index\tsentence1\tlabel", "0\tA.\tentailment")
    with pytest.raises(
        ValueError,
        match=r"train\.tsv line 1 must be a header with the columns sentence1, "
        r"sentence2, label\. Received: index, sentence1, label\. Use GLUE's own files "
        r"of RTE, or another --task_name\.",
    ):
        read_examples(get_task("rte"), tmp_path, "train.tsv", labelled=True)


def test_test_file_without_a_header_is_refused(tmp_path):
    _write(tmp_path, "test.tsv", "0\tThe book.")
    with pytest.raises(
        ValueError, match="the columns sentence, index. Received: 0, Th"
    ):
        read_examples(get_task("cola"), tmp_path, "test.tsv", labelled=False)


def test_missing_file_names_path_and_remedy(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"`--data_dir` must hold train\.tsv of CoLA\. Received: .*, where "
        r".*train\.tsv does not exist\. Point it at .* or fetch one: python "
        r"scripts/fetch_glue\.py --tasks=CoLA\.",
    ):
        read_examples(get_task("cola"), tmp_path, "train.tsv", labelled=True)


def test_folder_above_the_tasks_own_is_recognized(tmp_path):
    (tmp_path / "CoLA").mkdir()
    _write(tmp_path / "CoLA", "train.tsv", "x\t1\t\tA.")
    with pytest.raises(ValueError, match=r"Use --data_dir=.*CoLA\."):
        read_examples(get_task("cola"), tmp_path, "train.tsv", labelled=True)


@pytest.mark.parametrize("lines", [[], [""], ["sentence\tlabel"]])
def test_file_without_examples_is_refused(tmp_path, lines):
    _write(tmp_path, "train.tsv", *lines)
    with pytest.raises(
        ValueError,
        match=r"train\.tsv must hold at least one example of SST-2\. Received: an empty "
        r"file, or one with only a header\. Fetch it again, or correct --data_dir\.",
    ):
        read_examples(get_task("sst-2"), tmp_path, "train.tsv", labelled=True)


def test_other_encodings_name_file_and_line(tmp_path):
    (tmp_path / "train.tsv").write_bytes(b"x\t1\t\tA.\nx\t1\t\tcaf\xe9\n")
    with pytest.raises(
        ValueError,
        match=r"train\.tsv line 2 must be UTF-8\. Received: the byte b'\\xe9'",
    ):
        read_examples(get_task("cola"), tmp_path, "train.tsv", labelled=True)


def test_real_cola_has_its_published_number_of_examples(real_data):
    task = get_task("cola")
    folder = real_data / "cola"
    train = read_examples(task, folder, "train.tsv", labelled=True)
    dev = read_examples(task, folder, "dev.tsv", labelled=True)
    test = read_examples(task, folder, "test.tsv", labelled=False)
    assert [len(train), len(dev), len(test)] == [7250, 1043, 1063]
    assert {example.label for example in train} == {0, 1}
    assert [example.guid for example in test] == [str(i) for i in range(1063)]
    assert dev[0] == Example(
        "dev-1", "The sailors rode the breeze clear of the rocks.", None, 1
    )
