"""The table of updates, new or resumed."""

import pytest

from estimator_accum.reports import CsvReport, Update

pytestmark = pytest.mark.once


def _update(step):
    return Update(step, 4 * step, loss=0.5, gradient_norm=1.0, weight=4.0, secs=10.0)


_HEADER = (
    "update_step,global_step,examples,learning_rate,loss,gradient_norm,examples_per_sec"
)


def _table(tmp_path, *lines):
    text = "".join(line + "\n" for line in (_HEADER, *lines))
    (tmp_path / "train_metrics.csv").write_text(text)
    return CsvReport(tmp_path, "examples")


@pytest.mark.parametrize(
    ("content", "received"),
    [
        (b"a,b\n1,2\n", "a,b"),
        (bytes(range(256)), "'utf-8' codec can't decode byte 0x80 in position 128: i"),
        (f"{_HEADER}\n1,4\n".encode(), "a row with too few or too many columns"),
        (f"{_HEADER}\nx,4,8,1,1,1,1\n".encode(), "invalid literal for int"),
        (f"{_HEADER}\n1,4,y,1,1,1,1\n".encode(), "could not convert string to float"),
        (None, "[Errno 21] Is a directory"),
    ],
)
def test_a_table_of_another_origin_is_refused_untouched(tmp_path, content, received):
    path = tmp_path / "train_metrics.csv"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    metrics = CsvReport(tmp_path, "examples")
    for act in (metrics.check, lambda: metrics.open(1)):
        with pytest.raises(ValueError) as refused:
            act()
        sentence = str(refused.value)
        rule = f"must have the columns {_HEADER}"
        rule = "must be a file that this machine can read" if content is None else rule
        assert sentence.startswith(f"{path} {rule}. Received: {received}")
        assert sentence.endswith(". Use another folder.")
    assert path.is_dir() if content is None else path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_folder_without_a_table_and_an_empty_one_pass(tmp_path):
    CsvReport(tmp_path, "examples").check()
    (tmp_path / "train_metrics.csv").write_text("")
    CsvReport(tmp_path, "examples").check()


def test_a_table_whose_last_line_was_cut_off_goes_on_with_the_whole_ones(tmp_path):
    rows = ["1,4,8,0.1,0.5,1,10", "2,8,16,0.1,0.5,1,10"]
    metrics = _table(tmp_path, *rows)
    path = tmp_path / "train_metrics.csv"
    path.write_text(path.read_text() + "3,12,2")  # cut off from 3,12,24,...
    metrics.check()
    metrics.open(3)
    metrics.write(_update(3))
    assert path.read_text().splitlines()[:3] == [_HEADER, *rows]
    assert path.read_text().splitlines()[3] == "3,12,20,,0.5,1,0.4"


def test_an_address_is_written_by_tensorflow(tmp_path, monkeypatch):
    import tensorflow as tf

    monkeypatch.chdir(tmp_path)
    for update in (1, 2):  # the second resumes behind the first
        report = CsvReport("ram://metrics/run", "examples")
        report.check()
        report.open(update - 1)
        report.write(_update(update))
    here = CsvReport("here", "examples")
    here.open(0)
    here.write(_update(1))
    here.write(_update(2))
    with tf.io.gfile.GFile("ram://metrics/run/train_metrics.csv", "rb") as file:
        text = file.read()
    assert text == (tmp_path / "here" / "train_metrics.csv").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_an_address_that_cannot_be_read_is_refused_in_a_sentence():
    import tensorflow as tf

    tf.io.gfile.makedirs("ram://folders/train_metrics.csv")  # not a file
    sentence = (
        r"csv must be a file that this machine can read\. Received: .*\w\. Use another"
    )
    with pytest.raises(ValueError, match=sentence):
        CsvReport("ram://folders").check()
    with pytest.raises(ValueError, match="Received: File system scheme 'none' not"):
        CsvReport("none://folders").check()


def test_a_home_folder_that_no_shell_expanded_is_refused():
    with pytest.raises(ValueError, match=r"begin with ~, .* Received: ~/run\. Use os"):
        CsvReport("~/run")


def test_an_address_that_pathlib_shortened_is_refused(tmp_path):
    import pathlib

    with pytest.raises(ValueError, match=r"two slashes .* Received: gs:/bucket/run\. "):
        CsvReport(pathlib.Path("gs://bucket/run"))
