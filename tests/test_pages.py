"""Every block of code in the documents runs.

The blocks of a page run in order, as printed, in one folder that has the repository's
files. `pages` describes what stands in for the network, `_SHORTER` for minutes.
"""

import dataclasses
import gzip
import importlib
import json
import re
import shlex
import sys

import pytest
import tensorflow as tf

import estimator_accum
from distributed import digits
from estimator_accum import __main__ as command
from estimator_accum.programs.command_line import OneSentenceParser
from housing_example import demo_data
from tests.helpers.models import tiny_bert
from tests.helpers.models.hugging_face_folder import write_folder
from tests.helpers.processes import documents, pages
from tests.helpers.processes.local_server import make_zip
from tests.helpers.processes.running import ROOT

_MNIST = [
    f"{part}-{kind}-ubyte.gz"
    for part in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]
_ONE_WORKER = "--workers=1 --train_updates=2"
_SHORTER = {
    "scripts/quickstart_demo.py": "tests/helpers/processes/short_demo.py {}",
    "estimator-accum fetch glue": "tests/helpers/processes/made_up_archives.py glue {} "
    "--archive corpus.zip",
    "estimator-accum fetch bert": ".venv/bin/estimator-accum fetch bert {} "
    "--archive model.zip",
    "estimator-accum train": ".venv/bin/estimator-accum train {} --num_train_epochs=1",
    "scripts/fetch_mnist.py": "tests/helpers/processes/made_up_archives.py mnist {} --archive "
    + " ".join(f"archives/{name}" for name in _MNIST),
    "-m housing_example.main": "-m housing_example.main {} --train_updates=2 "
    "--gradient_accumulation_steps=1",  # trains once
    "-m distributed.launch_local": f"-m distributed.launch_local {{}} {_ONE_WORKER}",
    "-m distributed.main": "-m distributed.main {} --train_updates=2",
    "-m distributed.ray_train": "-m distributed.ray_train {} --help",  # without Ray
    "scripts/benchmark.py": "scripts/benchmark.py {} --parts=housing --rounds=1 "
    "--starts=1 --housing_updates=2",
    "scripts/experiments/optimizer_table.py": "scripts/experiments/"
    "optimizer_table.py {} --optimizers=Adam",
    "scripts/experiments/compare_batches.py": "scripts/experiments/"
    "compare_batches.py {} --updates=2",
}
_NOT_CODE = ("text", "console", "diff", "py")  # py: parts of code
_NOT_RUN = {
    "./scripts/test": "it runs this test",
    "./scripts/quickstart": "the session of first_five_minutes runs it",
}


def _write_cola(folder):
    tiny_bert.write_cola(folder / "glue" / "CoLA")


def _write_base_config(folder):
    path = folder / "bert" / "uncased_L-12_H-768_A-12" / "bert_config.json"
    path.parent.mkdir(parents=True)
    sizes = {"vocab_size": 30522, "max_position_embeddings": 512, "hidden_size": 128}
    config = dataclasses.replace(tiny_bert.CONFIG, **sizes)
    path.write_text(json.dumps(dataclasses.asdict(config)))


def _write_bert_archives(folder):
    config = dataclasses.replace(tiny_bert.CONFIG, max_position_embeddings=128)
    tiny_bert.write_bert(folder / "model", config=config)
    tiny_bert.write_cola(folder / "corpus")
    for name, prefix in (("model", ""), ("corpus", "CoLA/")):
        files = {file.name: file.read_bytes() for file in (folder / name).iterdir()}
        (folder / f"{name}.zip").write_bytes(make_zip(files, prefix))
    write_folder(folder / "DIR")
    reviews = folder / "yelp_review_polarity_csv"
    reviews.mkdir()
    for number, name in enumerate(("train.csv", "test.csv")):
        row = lambda _, label, text: f'"{label + 1}","{text}, ""good"""'
        tiny_bert.write_rows(reviews / name, 12, number, row)


def _write_mnist(folder):
    folder.mkdir()
    for name in _MNIST:
        images, labels = digits.generate(400, seed=len(name))
        content = images if "images" in name else labels
        sizes = b"".join(size.to_bytes(4, "big") for size in content.shape)
        head = bytes([0, 0, 8, content.ndim]) + sizes
        content = head + content.astype("uint8").tobytes()
        (folder / name).write_bytes(gzip.compress(content))


def _write_housing(folder):
    demo_data.generate(300).to_csv(folder / "train.csv", index=False)
    demo_data.generate(50, seed=1).to_csv(folder / "test.csv", index=False)


def _write_legacy_script(folder):
    (folder / "legacy_script.py").write_text("import tensorflow as tf\ntf.estimator")


def _write_scripts(folder):
    """Writes a script with an Estimator, and one with a loop of its own."""
    (folder / "train.py").write_text(
        "import sys, tensorflow as tf\n"
        "def model_fn(features, labels, mode):\n"
        "    w = tf.compat.v1.get_variable('w', initializer=0.0)\n"
        "    loss = tf.reduce_mean(tf.square(w - features))\n"
        "    optimizer = tf.compat.v1.train.AdamOptimizer(0.1)\n"
        "    step = tf.compat.v1.train.get_global_step()\n"
        "    train_op = optimizer.minimize(loss, step)\n"
        "    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)\n"
        "def input_fn():\n"
        "    numbers = tf.data.Dataset.range(128).map(lambda i: tf.cast(i, tf.float32))\n"
        "    return numbers.batch(int(sys.argv[1].split('=')[1]))\n"
        "tf.estimator.Estimator(model_fn, 'model').train(input_fn)\n"
    )
    (folder / "loop.py").write_text(
        "import tensorflow.compat.v1 as tf\n"
        "tf.disable_eager_execution()\n"
        "w = tf.get_variable('w', initializer=1.0)\n"
        "step = tf.train.get_or_create_global_step()\n"
        "train_op = tf.train.AdamOptimizer(0.1).minimize(tf.square(w), step)\n"
        "hooks = [tf.train.StopAtStepHook(2)]\n"
        "with tf.train.MonitoredTrainingSession(hooks=hooks) as session:\n"
        "    while not session.should_stop():\n"
        "        session.run(train_op)\n"
    )


# Files that a page expects in its folder: another page's results, archives, a user's files.
_THERE = {
    "bert": _write_bert_archives,
    "clusters": lambda folder: _write_mnist(folder / "mnist"),
    "distributed": lambda folder: _write_mnist(folder / "archives"),
    "errors": _write_base_config,
    "housing_example": _write_housing,
    "no_edit": _write_scripts,
    "performance": _write_cola,
    "today": _write_legacy_script,
    "whole_batches": _write_base_config,
}
# Their programs have tests of their own, and their flags are looked up below.
_LONG = ("bert", "clusters", "distributed", "first_five_minutes", "housing_example")
_LONG += ("performance", "update")
_WITH_SHELL = [
    name
    for name, text in documents.ALL.items()
    if any(documents.blocks(text, kind) for kind in ("sh", "console"))
]


def _script(page: str) -> str:
    """Returns the page's blocks as one script."""
    lines = ["set -eu"]
    for number, (language, block) in enumerate(documents.all_blocks(page), 1):
        if language == "sh":
            block = "".join(
                "\n" if line.strip() in _NOT_RUN else line
                for line in block.splitlines(keepends=True)
            )
            lines += [f"echo '== block {number}'", block]
        elif language == "console":
            lines += documents.typed(block)
    return "\n".join(lines)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.daily] if page in _LONG else [])
        for page in _WITH_SHELL
    ],
)
def test_the_shell_blocks_of_a_page_run_in_order(page, tmp_path):
    with pages.shell(tmp_path) as run:
        _THERE.get(page, lambda folder: None)(tmp_path)
        printed = run(_script(documents.ALL[page]), _SHORTER)
    print(printed)


@pytest.mark.once
def test_blocks_are_of_languages_that_tests_read():
    languages = {
        language
        for text in documents.ALL.values()
        for language, _ in documents.all_blocks(text)
    }
    assert languages == {"sh", "python", *_NOT_CODE}


_COMMAND = re.compile(
    r"^ {4,}(?:\./|\.venv|python|pip|estimator-accum|sudo|git|docker|import) .*",
    re.MULTILINE,
)


@pytest.mark.once
@pytest.mark.parametrize("page", documents.ALL)
def test_commands_are_in_fenced_blocks(page):
    fenced = re.compile(r"^```.*\n(?s:.*?)^```$", re.MULTILINE)
    assert not _COMMAND.findall(fenced.sub("", documents.ALL[page]))


def _model_fn(features, labels, mode):
    loss = tf.reduce_mean(labels * tf.compat.v1.get_variable("weight", []))
    train_op = estimator_accum.make_accumulating_train_op(
        loss, tf.compat.v1.train.GradientDescentOptimizer(0.1), 1
    )
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def _plain_model_fn(features, labels, mode):
    loss = tf.reduce_mean(labels * tf.compat.v1.get_variable("weight", []))
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
    train_op = optimizer.minimize(loss, tf.compat.v1.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def _input_fn():
    return tf.data.Dataset.from_tensors((tf.ones([2, 3]), tf.ones([2, 1])))


# Names that the reader of a page has already; other tests run its code.
_PUBLIC = {name: getattr(estimator_accum, name) for name in estimator_accum.__all__}
_ESTIMATORS = {"tf": tf, "model_fn": _model_fn, "input_fn": _input_fn, **_PUBLIC}
_READERS = {
    "model_fn": lambda: {"feature_columns": [tf.feature_column.numeric_column("x")]},
    "whole_batches": lambda: _ESTIMATORS | {"config": None},
    "no_edit": lambda: _ESTIMATORS | {"plain_model_fn": _plain_model_fn},
    "README": lambda: _ESTIMATORS | {"model_fn": _plain_model_fn},
    "today": lambda: _ESTIMATORS,
    "reports": lambda: _ESTIMATORS | {"estimator": tf.estimator.Estimator(_model_fn)},
}
_EXAMPLE = (ROOT / "examples" / "minimal.py").read_text()  # test_package.py runs it
_EXAMPLES = {"keras_batches": "keras_batches.py", "own_loops": "own_loop.py"}


@pytest.mark.parametrize(
    "page",
    [name for name, text in documents.ALL.items() if documents.blocks(text, "python")],
)
def test_the_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch, capsys):
    if page == "reports":
        pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    names = _READERS[page]() if page in _READERS else {}
    names |= {"model_dir": str(tmp_path / "results")}
    for code in documents.blocks(documents.ALL[page], "python"):
        if code != _EXAMPLE:
            exec(code, names)  # noqa: S102, the pages are this project's own
    if page == "keras":
        assert int(names["optimizer"].iterations.numpy()) == 2
        assert int(names["optimizer"].micro_steps.numpy()) == 0
    if page in _EXAMPLES:
        _check_example(page, capsys.readouterr().out)
    if page == "whole_batch_loss":
        example = (ROOT / "examples" / "two_towers.py").read_text()
        assert code in example
        exec(example, {"__name__": "__main__"})  # noqa: S102, as above
        _check_two_towers(capsys.readouterr().out)


def _check_example(name: str, printed: str) -> None:
    """Fails unless the example is on the page, and trains as the page says."""
    page = documents.PAGES[name]
    example = ROOT / "examples" / _EXAMPLES[name]
    assert documents.blocks(page, "python")[0] == example.read_text()
    number = re.compile(r"\d\.\d+(?:e-\d+)?")
    (shown,) = documents.blocks(page, "text")
    assert number.sub("N", printed).strip().endswith(number.sub("N", shown).strip())
    at_once, ours, difference = number.findall(printed)[-3:]
    assert at_once == ours and float(difference) < 1e-4


def _check_two_towers(printed: str) -> None:
    """Fails unless the example trains as the page says."""
    line = re.compile(r"(.+?) +found (.+)%, difference of a weight (.+)")
    (shown,) = documents.blocks(documents.PAGES["whole_batch_loss"], "text")
    names, values, differences = zip(*line.findall(printed), strict=True)
    assert names == tuple(match[0] for match in line.findall(shown))
    at_once, whole, separate = map(float, values)
    assert at_once == whole > separate + 5
    assert [float(part) < 1e-5 for part in differences] == [True, True, False]


class _Read(Exception):
    """Raised when the flags have been read."""


_INLINE = sorted(
    {
        (script, *shlex.split(flags))
        for text in documents.ALL.values()
        for script, flags in re.findall(
            r"`(?:sudo )?python (scripts/[\w/]+\.py)(\s[^`]*)?`", text
        )
    }
)


@pytest.mark.once
@pytest.mark.parametrize("script, flags", [(words[0], words[1:]) for words in _INLINE])
def test_flags_of_measurements_that_take_minutes_are_read(script, flags, monkeypatch):
    def parse_and_stop(self, arguments=None):
        parse_args(self, arguments)
        raise _Read

    parse_args = OneSentenceParser.parse_args
    monkeypatch.setattr(OneSentenceParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [script, *flags])
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    with pytest.raises(_Read):
        module.main()


_ROOMS = "bert_finetune|distributed|estimator_accum|examples|housing_example|scripts"
_STARTED = re.findall(
    rf"python(?:3\S*)? (?:-m )?((?:{_ROOMS})[./][\w./]+\w)",
    "\n".join(
        block
        for text in documents.ALL.values()
        for block in documents.blocks(text, "sh")
    ),
)


@pytest.mark.once
@pytest.mark.parametrize("program", sorted({*_STARTED}))
def test_every_program_in_the_pages_exists(program):
    path = program if "/" in program else program.replace(".", "/") + ".py"
    assert (ROOT / path).is_file()


_NAMED = set(
    re.findall(
        r"estimator-accum ((?:fetch )?[a-z]+) ", "\n".join(documents.ALL.values())
    )
)


@pytest.mark.once
@pytest.mark.parametrize("words", sorted(_NAMED))
def test_every_command_in_the_pages_exists(words):
    assert words in command._COMMANDS
