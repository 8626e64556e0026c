"""Contents of the wheel or the source archive, with their requirements."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest
import tqdm

import estimator_accum
from estimator_accum import reports
from tests.helpers.processes import running
from tests.helpers.processes.pages import write_wheels


def _python(*arguments, cwd: pathlib.Path = running.ROOT) -> str:
    command = [sys.executable, *map(str, arguments)]
    options = {"cwd": cwd, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """The wheel, built from the source archive, which lies beside it."""
    pytest.importorskip("build.env", reason="PyPA's build is not installed")
    source = tmp_path_factory.mktemp("source") / "tree"
    running.copy_tree(running.ROOT, source)
    dist = tmp_path_factory.mktemp("dist")
    _python("-m", "build", "--no-isolation", f"--outdir={dist}", source)
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
    """The interpreter of an environment with the wheel alone."""
    python = _environment(tmp_path_factory.mktemp("installed"))
    _python("-m", "pip", f"--python={python}", "install", "--no-deps", wheel)
    return python


def _environment(folder) -> pathlib.Path:
    """Creates an empty environment; returns its interpreter."""
    venv.create(folder)
    return folder / "bin" / "python"


@pytest.mark.once
def test_both_archives_are_well_described(wheel):
    pytest.importorskip("twine", reason="PyPA's twine is not installed")
    archives = list(wheel.parent.iterdir())
    assert len(archives) == 2
    _python("-m", "twine", "check", "--strict", *archives)
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        described = file.read(metadata).decode()
    assert "estimator_accum/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert f"\nVersion: {estimator_accum.__version__}\n" in described
    assert "\nLicense-Expression: Apache-2.0\n" in described
    rooms = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert rooms == {"estimator_accum", "bert_finetune"}
    with tarfile.open(*wheel.parent.glob("*.tar.gz")) as file:
        assert not any("/tests/" in name for name in file.getnames())


@pytest.mark.once
def test_the_wheel_trains_from_another_folder(installed, tmp_path):
    # Packages that the wheel needs come from here, but not this tree's modules.
    needed = str(pathlib.Path(tqdm.__file__).parents[1])
    shutil.copy(running.ROOT / "examples" / "minimal.py", tmp_path)
    options = {"python": str(installed), "cwd": tmp_path, "PYTHONPATH": needed}
    done = running.run("minimal.py", **options)
    assert done.returncode == 0, done.output
    said, difference = done.stdout.splitlines()[-1].split(": ")
    assert said == "largest difference of a weight"
    assert float(difference) < 1e-6


@pytest.mark.once
def test_a_file_that_uses_every_public_name_is_typed(installed, tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    file = running.ROOT / "tests/helpers/oracles/every_public_name.py"
    names = [*estimator_accum.__all__, *reports.__all__]
    assert all(name in file.read_text() for name in names)
    options = [
        "--strict",
        f"--python-executable={installed}",
        f"--cache-dir={tmp_path}",
    ]
    said = _python("-m", "mypy", *options, file, cwd=tmp_path)  # not this tree
    assert said.startswith("Success")


@pytest.mark.once
def test_the_site_has_no_broken_link(tmp_path):
    pytest.importorskip("mkdocs", reason="MkDocs is not installed")
    _python("-m", "mkdocs", "build", "--strict", f"--site-dir={tmp_path}")
    assert "make_accumulating_train_op" in (tmp_path / "api" / "index.html").read_text()
    start = (tmp_path / "index.html").read_text()
    assert "Gets the weights of batches of 32" in start  # examples/minimal.py
    assert "run_<wbr>settings.json" in start  # names break after underscores
    pages = {path.parent.name: path for path in tmp_path.glob("*/index.html")}
    descriptions = [
        re.search('name="description" content="(.*?)"', pages[name].read_text())[1]
        for name in pages
    ]
    assert [
        text
        for text in descriptions
        if not re.match("[A-Z]|microbatch|estimator-accum |make_accum", text)
    ] == []
    notebook = (tmp_path / "bert_in_little_memory" / "index.html").read_text()
    assert "200/200" in notebook and "data:image/png" in notebook


_OLD_TF = pytest.param(
    *("[tf]", "2.8.4", None),
    marks=pytest.mark.skipif(
        sys.version_info >= (3, 12), reason="TensorFlow 2.8 stops at Python 3.10"
    ),
)


@pytest.mark.parametrize(
    ("extra", "there", "tensorflow"),
    [("", "2.18.1", None), ("", None, None), _OLD_TF]
    + [("[tf]", None, "2.21.0" if sys.version_info >= (3, 12) else "2.15.1")],
)
def test_a_tensorflow_that_is_there_stays(wheel, tmp_path, extra, there, tensorflow):
    write_wheels(tmp_path)
    python = _environment(tmp_path / "environment")
    pip = ["-m", "pip", f"--python={python}", "install", "--no-index"]
    pip.append(f"--find-links={tmp_path}")
    if there:
        _python(*pip, f"tensorflow=={there}")
    report = json.loads(
        _python(*pip, "--quiet", "--dry-run", "--report=-", f"{wheel}{extra}")
    )
    versions = {
        package["metadata"]["name"]: package["metadata"]["version"]
        for package in report["install"]
    }
    assert versions.get("tensorflow") == tensorflow
    if extra and sys.version_info >= (3, 12):
        assert versions["tf_keras"] == tensorflow
