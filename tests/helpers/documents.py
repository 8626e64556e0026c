"""What users read: README.md and the pages of docs/, and the code in them."""

import re

from tests.helpers.running import ROOT

README = (ROOT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
TEXT = "\n".join([README, *PAGES.values()])


def blocks(text: str, language: str) -> list[str]:
    """Returns the fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
