"""The notebook of examples/, with its outputs, as a page of the site."""

import json
import pathlib
from collections.abc import Iterator

from mkdocs.structure.files import File

_NAME = "bert_in_little_memory"
_NOTEBOOK = pathlib.Path(__file__).parents[1] / "examples" / f"{_NAME}.ipynb"


def on_files(files, config):
    """Adds the page; MkDocs calls this when it has listed its files."""
    cells = json.loads(_NOTEBOOK.read_text())["cells"]
    content = "\n\n".join(part for cell in cells for part in _parts(cell))
    files.append(File.generated(config, f"{_NAME}.md", content=content))
    return files


def _parts(cell: dict) -> Iterator[str]:
    """Yields the source of a cell and each of its outputs, in Markdown."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source.replace("../docs/", "")
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        if "text" in output:
            yield f"```text\n{''.join(output['text'])}```"
        else:
            png = output["data"]["image/png"].strip()
            yield f"![The losses of both runs](data:image/png;base64,{png})"
