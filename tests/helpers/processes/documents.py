"""Users' documents: README.md with the pages of docs/."""

import re
import shlex
import string

import yaml

from tests.helpers.processes.running import ROOT

README = (ROOT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in sorted(ROOT.glob("docs/*.md"))}
TEXT = "\n".join([README, *PAGES.values()])
# Every page with its name: that of its folder, if it is the README of a room.
ALL = {"README": README} | PAGES
ALL |= {path.parent.name: path.read_text() for path in ROOT.glob("[!.]*/README.md")}


def blocks(text: str, language: str) -> list[str]:
    """Returns the fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def manifests() -> list[dict]:
    """Returns the manifests for Kubernetes: runtime, TrainJob, TFJob."""
    files = (ROOT / "distributed" / f"{name}.yaml" for name in ("train_job", "tf_job"))
    return [
        document for file in files for document in yaml.safe_load_all(file.read_text())
    ]


def all_blocks(text: str) -> list[tuple[str, str]]:
    """Returns (language, content) of every fenced block, in order."""
    return re.findall(r"^```(.*)\n((?s:.*?))^```$", text, re.MULTILINE)


def typed(session: str) -> list[str]:
    """Returns the commands of a `console` block, without their output."""
    typed_commands, lines = [], iter(session.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            continue
        command = [line.removeprefix("$ ")]
        here = re.search(r"<<'(\w+)'$", line)
        while command[-1].endswith("\\") or (here and command[-1] != here[1]):
            command.append(next(lines))
        typed_commands.append("\n".join(command))
    return typed_commands


def commands(text: str) -> list[list[str]]:
    """Returns the words of each command in the `sh` blocks, with variables filled in."""
    words, variables = [], {}
    for line in "".join(blocks(text, "sh")).replace("\\\n", " ").splitlines():
        if assigned := re.fullmatch(r"(\w+)=(\S+)", line):
            variables[assigned[1]] = assigned[2]
        else:
            words.append(shlex.split(string.Template(line).substitute(variables)))
    return words
