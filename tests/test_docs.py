"""Documents agree with the code: their examples, their flags."""

import html
import inspect
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import estimator_accum
from bert_finetune import settings as bert_settings
from bert_finetune.run_classifier import PROGRAM
from distributed import launch_local
from distributed import settings as distributed_settings
from estimator_accum import get_or_create_update_step
from estimator_accum.programs.flag_values import define_program_flags
from housing_example import settings as housing_settings
from scripts import pictures
from tests.helpers.processes import documents, legacy_runs

pytestmark = pytest.mark.once

_CODE = [
    code
    for page in ("model_fn", "whole_batches", "today")
    for code in documents.blocks(documents.PAGES[page], "python")
]


def _code_with(words: str) -> str:
    """Returns the first block of Python that contains these words."""
    return next(code for code in _CODE if words in code)


def _network(features):
    zeros = tf.compat.v1.zeros_initializer()
    weights = tf.compat.v1.get_variable("weights", [3, 1], initializer=zeros)
    return tf.matmul(features, weights)


def _train_ten_lines(estimator, batch, hooks=()):
    random = np.random.default_rng(0)
    data = random.normal(size=[64, 3]), random.normal(size=[64, 1])
    data = tuple(part.astype(np.float32) for part in data)
    dataset = tf.data.Dataset.from_tensor_slices
    estimator.train(lambda: dataset(data).batch(batch), hooks)
    return estimator.get_variable_value("weights")


def test_the_readme_quotes_the_whole_example():
    example = (documents.ROOT / "examples" / "minimal.py").read_text()
    _, shown = documents.blocks(documents.README, "python")
    assert shown == example


def test_the_ten_lines_train_like_the_big_batch(tmp_path):
    def train(code, batch, folder):
        names = {"network": _network}
        exec(code, names)  # noqa: S102, the pages are this project's own
        estimator = tf.estimator.Estimator(names["model_fn"], str(folder))
        return _train_ten_lines(estimator, batch)

    code = _CODE[0]
    whole = _without_accumulation(code)
    ours = train(code, 4, tmp_path / "ours")
    np.testing.assert_allclose(ours, train(whole, 16, tmp_path / "whole"), rtol=1e-5)
    assert np.all(ours != 0)


def _without_accumulation(code):
    before, after = code.split("gradient_accumulation_steps=4")
    return f"{before}gradient_accumulation_steps=1{after}"


def test_the_ten_lines_train_in_micro_batches_too(tmp_path):
    def train(code, folder):
        names = {"network": _network, "model_dir": str(folder), "config": None}
        names["microbatch_model_fn"] = estimator_accum.microbatch_model_fn
        exec(_without_accumulation(_CODE[0]), names)  # noqa: S102, as above
        exec(code, names)  # noqa: S102
        return _train_ten_lines(names["estimator"], 16)

    wrapped = _code_with("microbatch_model_fn(")
    plain = wrapped.replace('microbatch_model_fn(model_fn, "auto")', "model_fn")
    assert plain != wrapped
    theirs = train(plain, tmp_path / "plain")
    np.testing.assert_array_equal(train(wrapped, tmp_path / "ours"), theirs)


def _names_of(code) -> dict:
    public = {n: getattr(estimator_accum, n) for n in estimator_accum.__all__}
    names = {"tf": tf, **public}
    names["feature_columns"] = [tf.feature_column.numeric_column("x", [3])]
    exec(code, names)  # noqa: S102
    return names


def _estimator_with_head(code):
    def model_fn(features, labels, mode):
        names, logits = _names_of(code), _network(features["x"])
        variables = tf.compat.v1.trainable_variables()
        options = {"trainable_variables": variables}
        options["train_op_fn"] = names["train_op_fn"]
        make_spec = names["head"].create_estimator_spec
        return make_spec(features, mode, logits, labels, **options)

    return tf.estimator.Estimator(model_fn)


@pytest.mark.parametrize(
    ("words", "make", "name"),
    [
        ("RegressionHead", _estimator_with_head, "weights"),
        (
            "LinearRegressor",
            lambda code: _names_of(code)["estimator"],
            "linear/linear_model/x/weights",
        ),
    ],
    ids=["a head", "a canned estimator"],
)
def test_the_lines_for_an_estimator_train_like_the_big_batch(words, make, name):
    inputs = np.random.default_rng(0).normal(size=[64, 3]).astype(np.float32)
    data = {"x": inputs}, inputs.sum(axis=1, keepdims=True)

    def train(code, batch):
        estimator = make(code)
        estimator.train(lambda: tf.data.Dataset.from_tensor_slices(data).batch(batch))
        return estimator.get_variable_value(name)

    code = _code_with(words)
    ours = train(code, 4)
    np.testing.assert_allclose(ours, train(_without_accumulation(code), 16), rtol=1e-5)
    assert np.all(ours != 0)


def test_the_readmes_diff_is_a_train_op_and_its_hooks():
    (diff,) = documents.blocks(documents.README, "diff")
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    with tf.Graph().as_default():
        loss = tf.square(tf.compat.v1.get_variable("w", initializer=1.0))
        optimizer = tf.compat.v1.train.AdamOptimizer()
        names = {n: getattr(estimator_accum, n) for n in estimator_accum.__all__}
        names |= {"loss": loss, "optimizer": optimizer}
        exec("\n".join(added), names)  # noqa: S102, as above
        spec = {"train_op": names["train_op"], "training_hooks": names["hooks"]}
        tf.estimator.EstimatorSpec("train", loss=loss, **spec)


def _linked_text(row: str) -> str:
    """Returns the sections of docs/, or whole pages, that a row links to, joined."""
    sections = []
    for page, anchor in re.findall(r"\(docs/(\w+)\.md#?([\w-]*)\)", row):
        for section in re.split(r"(?m)^#+ ", documents.PAGES[page]):
            heading = re.sub(r"[^\w -]", "", section.partition("\n")[0].lower())
            if anchor in ("", heading.replace(" ", "-")):
                sections.append(section)
    return "\n".join(sections)


def _measured_rows() -> list[str]:
    """Returns the README's first bullets, and the rows of its tables of figures."""
    first, *parts = documents.README.split("\n## ")
    parts = [part for part in parts if part.startswith(("Compared\n", "Cost\n"))]
    rows = re.findall(r"(?m)^[*|] .*(?:\n {2}.*)*", "\n".join([first, *parts]))
    return [row for row in rows if re.search(r"\d", row)]


@pytest.mark.parametrize("row", _measured_rows(), ids=lambda row: row[2:20])
def test_a_figure_of_the_readme_is_on_the_page_that_its_row_links_to(row):
    number = r"\d(?:[\d,.]*\d)?(?:e[-+]\d+)?"
    linked = set(re.findall(number, _linked_text(row)))
    row_text = re.sub(r"\[[^]]*\]\[[^]]*\]|\]\([^)]*\)", "", row)  # others' pages
    assert set(re.findall(number, row_text)) - linked == set()


def test_the_migrated_script_has_two_more_lines():
    after = _code_with("enable_estimator")
    before = _CODE[_CODE.index(after) - 1].splitlines()
    after = after.splitlines()
    assert all(line in after for line in before)
    added = [line for line in after if line and line not in before]
    assert added == legacy_runs.TWO_LINES.splitlines()


def test_the_reports_hear_of_the_updates(tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    (code,) = documents.blocks(documents.PAGES["reports"], "python")
    names = {"network": _network}
    exec(_CODE[0], names)  # noqa: S102, as above
    estimator = tf.estimator.Estimator(names["model_fn"], str(tmp_path / "model"))
    code = code.replace("% 100", "% 2").replace("estimator.train(input_fn, ", "dict(")
    names |= {"model_dir": estimator.model_dir}
    exec(code, names)  # noqa: S102
    _train_ten_lines(estimator, 4, names["hooks"])
    words = ["training begins after update 0", "update 2: loss ", "update 4: loss "]
    lines = capsys.readouterr().out.splitlines()
    assert [line[: len(w)] for line, w in zip(lines, words, strict=True)] == words
    (loss,) = (tmp_path / "runs").glob("*/*/metrics/loss")
    assert [line.split()[2] for line in loss.read_text().splitlines()] == list("1234")
    assert len((tmp_path / "model/train_metrics.csv").read_text().splitlines()) == 5


def test_the_update_step_is_a_counter():
    with tf.Graph().as_default():
        assert get_or_create_update_step().dtype == tf.int64


def _program_text() -> str:
    """Returns the texts of this project, Estimator's hooks and Keras, joined."""
    theirs = (tf.estimator.StepCounterHook, tf.estimator.NanTensorHook)
    theirs = {inspect.getsourcefile(item) for item in theirs}
    theirs.add(inspect.getsourcefile(tf.keras.optimizers.get))
    ours = [p for n in ("estimator_accum", "bert_finetune") for p in _sources(n)]
    text = "\n".join(pathlib.Path(path).read_text() for path in [*theirs, *ours])
    return re.sub(r'"\s*\n\s*f?"', "", text)


def _sources(package: str) -> list[pathlib.Path]:
    return sorted((documents.ROOT / package).rglob("*.py"))


def test_every_message_on_the_page_of_errors_is_in_the_source():
    quoted = documents.blocks(documents.PAGES["errors"], "text")
    fragments = [f for block in quoted for f in " ".join(block.split()).split("...")]
    text = _program_text()
    assert [f for f in fragments if f.strip() not in text] == []
    assert len(quoted) > 12


def test_the_page_of_errors_has_twenty():
    assert len(re.findall("(?m)^### ", documents.PAGES["errors"])) >= 20
    with pytest.raises(AttributeError, match="^module 'tensorflow' has no attribute"):
        tf.contrib  # noqa: B018, as on the page


_OUR_LINES = re.sub(  # without those of Slurm, Docker and TensorBoard
    "(?m)^(#SBATCH|docker|TensorBoard) .*", "", documents.TEXT
)


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"--([a-z_]+)=", _OUR_LINES))))
def test_every_flag_in_the_pages_exists(flag):
    folder = pathlib.Path(estimator_accum.__file__).parent
    scripts = [
        *folder.parent.glob("scripts/**/*.py"),
        *folder.parent.glob("bert_finetune/*.py"),
        folder.parent / "distributed/ray_train.py",
        folder / "programs/launch.py",
        folder / "programs/plot_loss.py",
        folder / "programs/task.py",
        folder / "unedited/run.py",
    ]
    texts = [path.read_text() for path in scripts]
    rooms = (PROGRAM.flags(), launch_local.make_flags())
    is_known = any(flag in flags for flags in rooms)
    assert is_known or any(re.search(f'"(--)?{flag}"', text) for text in texts)


def test_values_of_flags_in_the_pages_are_read():
    values = PROGRAM.flags()
    pages = documents.ALL.values()
    blocks = "".join(b for page in pages for b in documents.blocks(page, "sh"))
    pairs = set(re.findall(r"--([a-z_]+)=([\w./,-]+)(?=\s)", blocks))
    arguments = [f"--{flag}={value}" for flag, value in pairs if flag in values]
    assert len(arguments) > 20
    for argument in arguments:
        values(["program", argument])


_SETTINGS_BY_PAGE = {
    "bert": bert_settings.Settings,
    "distributed": distributed_settings.Settings,
    "housing_example": housing_settings.Settings,
}


@pytest.mark.parametrize("page", _SETTINGS_BY_PAGE)
def test_a_table_of_flags_names_the_defaults_of_help(page):
    settings = _SETTINGS_BY_PAGE[page]
    flags = define_program_flags(settings)
    table = documents.ALL[page].split("| flag | default | |")[1].split("\n\n")[0]
    rows = re.findall(r"(?m)^\| (`--.*?) \|(.*?)\|", table)
    cells = {
        name: cell.strip(" `").removeprefix("none")
        for names, cell in rows
        for name in re.findall(r"--(\w+)", names)
    }
    assert len(cells) > 15
    assert cells == {name: _default(settings, flags[name]) for name in cells}


def _default(settings, flag) -> str:
    """Returns the default of a flag as a table shows it; "" for none."""
    usual = {"default_gradient_accumulation_steps": 1, **settings.usual_sizes}
    usual = usual.get(f"default_{flag.name}")
    if flag.name in ("micro_batch_size", "gradient_accumulation_steps"):
        return "from the others" + (f", or {usual}" if usual else "")
    if flag.name == "effective_batch_size":
        return str(usual or "from the others")
    is_bool = isinstance(flag.default, bool)
    text = str(flag.default).lower() if is_bool else str(flag.default)
    return text.removeprefix("none" if flag.default == "none" else "None")


def _prose(page: str) -> str:
    """Returns a page without code and headings, a sentence or a cell per line."""
    text = re.sub(r"(?ms)^```.*?^```$", "", _WRITTEN[page])
    text = re.sub(r"(?m)^(#| {4}|!\[).*", "", text)
    text = re.sub(r"(?m)^\|.*", lambda row: row[0].replace("|", "\n\n"), text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "CODE", text))
    text = re.sub(r"(?m)^(\* |\d\. )", "\n", text).replace("*", "")
    sentences = re.split(r"\n\s*\n|(?<=[^.][.?!:]) ", text)
    sentences = (" ".join(text.split()) for text in sentences)
    return "\n".join(text for text in sentences if text)


_WRITTEN = documents.ALL | {
    name.lower(): (
        documents.ROOT / f"{name}.md"
    ).read_text()  # those of docs/ include them
    for name in ("CHANGELOG", "CONTRIBUTING")
}


@pytest.mark.parametrize("page", _WRITTEN)
def test_a_page_is_in_plain_sentences(page):
    sentences = _prose(page).splitlines()
    unclear = r"(?i)\bwhat\b|\b(that|those) of\b|\b(has|have) not\b|\bf0087d5"
    allowed = r"\?$"  # questions
    allowed += {"architecture": "|Git keeps", "contributing": "|begins with"}.get(
        page, ""
    )
    hits = [s for s in sentences if re.search(unclear, s)]
    assert [text for text in hits if not re.search(allowed, text)] == []
    lengths = [len(text.split()) for text in sentences if len(text.split()) > 3]
    assert sum(lengths) <= 20 * max(len(lengths), 1)


def test_the_changelog_begins_with_this_version():
    version = estimator_accum.__version__
    assert _WRITTEN["changelog"].startswith(f"# Changelog\n\n## {version}, ")


def test_the_glossary_has_at_most_fifteen_words():
    words = documents.PAGES["update"].split("## Words")[1].split("##")[0]
    assert 10 <= len(re.findall("(?m)^\\| ", words)) - 1 <= 15


_PRIVATE = r"\b(windows?|micro-steps?|micro-batch(es)?|rows|the patch)\b"


@pytest.mark.parametrize("page", _WRITTEN)
def test_a_page_with_words_of_the_glossary_links_to_it(page):
    if re.search(_PRIVATE, _prose(page)) and page not in (
        "update",
        "first_five_minutes",
    ):
        assert "update.md#words" in _WRITTEN[page]


@pytest.mark.parametrize("page", _WRITTEN)
def test_other_private_words_are_not_used(page):
    words = re.findall(r"(?i)\b(cut|uncut|at once|the article|kept)\b", _prose(page))
    assert words == []


@pytest.mark.parametrize("page", _WRITTEN)
def test_measured_differences_carry_a_date(page):
    if re.search(r"\d\.\d+e-0\d", _prose(page)):
        assert re.search(r"\d+ November\s+2026", _WRITTEN[page])


def test_pictures_show_the_numbers_of_their_pages():
    folder = documents.ROOT / "docs/images"
    for name, bars in (
        ("memory", pictures.memory_bars("whole_batches")),
        ("keras_memory", pictures.memory_bars("keras_batches")),
        ("performance", pictures.performance_panels()),
        ("keras", pictures.keras_bars()),
    ):
        assert (
            html.escape(str(bars), quote=False) in (folder / f"{name}.svg").read_text()
        )
        assert f"images/{name}.svg" in documents.TEXT
