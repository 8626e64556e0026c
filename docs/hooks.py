"""Pages of the site from files outside of docs/."""

import json
import pathlib
import re
from collections.abc import Iterator

from mkdocs.structure.files import File

_ROOT = pathlib.Path(__file__).parents[1]
_NOTEBOOK = "examples/bert_in_little_memory.ipynb"
_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "licence.md",
    _NOTEBOOK: "bert_in_little_memory.md",
}
_LENGTH = 155  # of a description, which search engines show


def on_files(files, config):
    """Adds the pages; MkDocs calls this when it has listed its files."""
    for name, page in _PAGES.items():
        content = (_ROOT / name).read_text()
        if name == _NOTEBOOK:
            cells = json.loads(content)["cells"]
            content = "\n\n".join(part for cell in cells for part in _parts(cell))
        elif name == "LICENSE":
            content = f"# Licence\n\n```text\n{content}```\n"
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to pages of the site, and describes the page by its first sentences."""
    for name, other in _PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{name}", f"]({other}", markdown)
    page.meta.setdefault("description", _description(markdown))
    if page.file.src_uri == "errors.md":  # whoever searches has met one
        page.meta["search"] = {"boost": 3}
    markdown = re.sub(
        r"\[([^\]]*)\]\(\.\./(?:distributed|examples)/[^)]*\)", r"`\1`", markdown
    )
    return re.sub(r"\]\((?:\.\./)?docs/", "](", markdown)


def on_page_content(html, page, config, files):
    """Lets a name break after its underscores only, a flag on narrow screens only."""
    html = re.sub("<code>([^<]*--[^<]*)</code>", _unbroken, html)
    return re.sub(
        "(?<!<pre>)<code>[^<]+</code>",
        lambda code: re.sub(r"(?<=\w_)(?=[^\W_])", "<wbr>", code[0]),
        html,
    )


def _unbroken(code: re.Match) -> str:
    def in_pieces(flag: re.Match) -> str:
        pieces = re.findall("[^_]+_*", flag[0])
        words = "<wbr>".join(f'<span class="piece">{piece}</span>' for piece in pieces)
        return f'<span class="flag">{words}</span>'

    return re.sub(r"(?<![\w-])--\w+", in_pieces, code[0])


def _description(markdown: str) -> str:
    """Returns the beginning of the first paragraph of sentences, without markup."""
    markdown = re.sub(r"(?ms)^```.*?^```$", "", markdown)
    parts = (part.strip("\n") for part in re.split(r"\n{2,}", markdown))
    sentences = (part for part in parts if re.match(r"\[?[A-Z]|`\w", part))
    text = " ".join(next(sentences, "").split())
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub("[`*]", "", text)
    if len(text) <= _LENGTH:
        return text.rstrip(":")
    return text[:_LENGTH].rpartition(" ")[0] + " ..."


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
