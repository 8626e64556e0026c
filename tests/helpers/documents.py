"""What users read: README.md and the pages of docs/, and the code in them."""

import re
import shlex
import string

from tests.helpers.running import ROOT

README = (ROOT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
TEXT = "\n".join([README, *PAGES.values()])


def blocks(text: str, language: str) -> list[str]:
    """Returns the fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Returns the words of each command in the `sh` blocks, with variables filled in."""
    found, variables = [], {}
    for line in "".join(blocks(text, "sh")).replace("\\\n", " ").splitlines():
        if assigned := re.fullmatch(r"(\w+)=(\S+)", line):
            variables[assigned[1]] = assigned[2]
        else:
            found.append(shlex.split(string.Template(line).substitute(variables)))
    return found
