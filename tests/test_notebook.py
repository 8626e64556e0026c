"""The notebook of examples/ runs from top to bottom, in a kernel, from a clean folder."""

import ast
import importlib
import json
import re
import signal
import sys

import pytest

from bert_finetune.run_classifier import PROGRAM
from scripts.changed_tests import imported_modules
from tests.helpers.processes import programs
from tests.helpers.processes.running import DEADLINE_SECS, ROOT

nbclient = pytest.importorskip("nbclient", reason="Jupyter's client is not installed")
nbformat = pytest.importorskip("nbformat", reason="Jupyter's format is not installed")
pytestmark = pytest.mark.once
_PATH = ROOT / "examples" / "bert_in_little_memory.ipynb"
_SHORTER = {"UPDATES = 200": "UPDATES = 12"}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> list[str]:
    """Output of each cell of code: text, and the kinds of its other outputs."""
    folder = tmp_path_factory.mktemp("notebook")
    text = _PATH.read_text()
    for words, short in _SHORTER.items():
        assert text.count(words) == 1
        text = text.replace(words, short)
    notebook = nbformat.reads(text, nbformat.NO_CONVERT)
    with pytest.MonkeyPatch.context() as patch, programs.real_starts():
        kernels = folder / "kernels" / "python3"
        kernels.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": "Python", "language": "python"}
        (kernels / "kernel.json").write_text(json.dumps(spec))
        patch.setenv("JUPYTER_PATH", str(folder))
        patch.setenv("IPYTHONDIR", str(folder))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.delenv("TF_USE_LEGACY_KERAS", raising=False)
        resources = {"metadata": {"path": str(folder)}}
        client = nbclient.NotebookClient(
            notebook, timeout=DEADLINE_SECS, kernel_name="python3", resources=resources
        )
        handler = signal.getsignal(signal.SIGINT)
        client.execute()
        signal.signal(signal.SIGINT, handler)  # the client sets Python's own
    return [_shown(cell) for cell in notebook.cells if cell.cell_type == "code"]


def _shown(cell) -> str:
    return "".join(
        output.get("text") or " ".join(output.get("data", {}))
        for output in cell.outputs
    )


def test_it_is_valid_and_kept_with_its_outputs():
    notebook = nbformat.read(_PATH, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    _check("\n".join(map(_shown, code)), updates=200)


def test_its_code_uses_names_and_flags_that_exist():
    notebook = nbformat.read(_PATH, nbformat.NO_CONVERT)
    code = "\n".join(c.source for c in notebook.cells if c.cell_type == "code")
    flags = re.findall("--([a-z_]+)", code)
    assert flags and {*flags} - {"device_memory"} <= {*PROGRAM.flags()}
    assert '"--device_memory"' in (ROOT / "bert_finetune" / "plan.py").read_text()
    python = re.sub(r"(?m)^\s*[!%].*(\\\n.*)*$", "", code)
    for module, names in imported_modules(ast.parse(python)):
        for name in names or ():
            assert hasattr(importlib.import_module(module), name), (module, name)


@pytest.mark.daily
@pytest.mark.slow
def test_it_plans_trains_compares_and_draws(outputs):
    shown = "\n".join(outputs)
    print(shown)
    _check(shown, updates=12)


def _check(shown: str, updates: int) -> None:
    """Fails unless the outputs have the plan, the bars, the differences and a figure."""
    assert re.search(r"(?m)^--.* --gradient_accumulation_steps=\d+ --max_seq", shown)
    assert "training" in shown and f"{updates}/{updates}" in shown
    differences = re.findall(r"difference of \d{2} variables: (\S+)", shown)
    differences += re.findall(r"difference of a Keras weight: (\S+)", shown)
    assert len(differences) == 3 and all(float(part) < 1e-3 for part in differences)
    assert "image/png" in shown
