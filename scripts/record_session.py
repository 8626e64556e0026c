"""Records docs/first_five_minutes.md: runs its commands and writes what they print.

    python scripts/record_session.py --output=docs/first_five_minutes.md

clones this repository into a temporary folder and runs there what a new user would run,
quickstart included, which installs TensorFlow: about five minutes. Of the output, paths,
sizes and speeds are replaced, so that the page depends on the machine as little as
possible. Exit codes: 0; 1 if a command fails; 2 for invalid flags.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(_REPOSITORY)

from estimator_accum.runs.command_line import OneSentenceParser, exit_code_of

_URL = "https://example.com/estimator-accum.git"  # stands for this repository
_INTRODUCTION = """\
# The first five minutes

A recorded session on two cores without a GPU: what is typed, and what it prints.
`https://example.com` stands for where you have the repository from, and `...` for what
differs from one machine to another. `python scripts/record_session.py` writes this page.
"""


class Step(NamedTuple):
    """A section of the page.

    Attributes:
        heading: Its heading.
        text: What the reader should know before the commands.
        commands: What is typed, in order; one may have several lines.
    """

    heading: str
    text: str
    commands: tuple[str, ...]


_WRITE_DATA = """\
cat >own_data.py <<'END'
import itertools, pathlib, random

people = "mother", "father", "brother", "sister", "queen", "king"
actions = "blames", "admires", "praises", "thanks", "mentions"
rows = [
    f"own\\t{int('mother' in (first, last))}\\t\\tThe {first} {action} the {last}."
    for first, last, action in itertools.product(people, people, actions)
]
random.Random(0).shuffle(rows)
folder = pathlib.Path("own")
folder.mkdir()
(folder / "train.tsv").write_text("\\n".join(rows[30:]) + "\\n")
(folder / "dev.tsv").write_text("\\n".join(rows[:30]) + "\\n")
END"""
_TRAIN = """\
estimator-accum train --task_name=CoLA --do_train=true --do_eval=true \\
    --data_dir=own --output_dir=own_output --vocab_file=demo/data/vocab.txt \\
    --bert_config_file=demo/data/bert_config.json \\
    --init_checkpoint=demo/data/bert_model.ckpt --max_seq_length=32 \\
    --train_batch_size=8 --gradient_accumulation_steps=4 \\
    --learning_rate=1e-3 --num_train_epochs=12"""
_PLOT = "estimator-accum plot --output_dirs=demo/with_accumulation --plot=run.png"
STEPS = (
    Step(
        "Clone and try",
        "The quickstart makes an environment, `.venv`, pre-trains a small BERT on "
        "generated\nsentences, and fine-tunes it with accumulation and without.",
        (
            f"git clone --quiet {_URL}",
            "cd estimator-accum",
            "./scripts/quickstart",
        ),
    ),
    Step(
        "Look at the runs",
        "The quickstart's own picture is `demo/loss.png`. Any runs can be drawn, and "
        "their\nnumbers are in a table:",
        (
            ". .venv/bin/activate",
            _PLOT,
            "head -n 3 demo/with_accumulation/train_metrics.csv",
        ),
    ),
    Step(
        "Your own data",
        "The task CoLA reads any sentences with a label, 0 or 1, in four columns: "
        "source, label,\nan unused one, sentence. Here a sentence is labelled 1 if it "
        "mentions the mother.",
        (
            _WRITE_DATA,
            "python own_data.py",
            "head -n 3 own/train.tsv",
            _TRAIN,
            "estimator-accum plot --output_dirs=own_output --plot=own.png",
        ),
    ),
    Step(
        "Stop and resume",
        "The same command resumes where the run was stopped. Here it has nothing left "
        "to train,\nand evaluates again. From here on: [BERT on GLUE](bert.md), "
        "[your own model_fn](model_fn.md).",
        (_TRAIN,),
    ),
)
# What differs from one machine to another, and what takes its place.
_CHANGING = (
    (r"\S+ [kMGT]?B are free", "... are free"),
    (r" \(/.*/python[\d.]*\)", " (...)"),
    (
        r"^((?:examples per second|peak memory|disk used) +)[\d,.]+(?: [kMGT]?B)?$",
        r"\1...",
    ),
    (r"^((?:\d[^,\n]*,){6})\d[^,\n]*$", r"\1..."),  # a row of train_metrics.csv
)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=_REPOSITORY / "docs" / "first_five_minutes.md",
        help="the page (default: %(default)s)",
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _write(flags.output))


def _write(path: pathlib.Path) -> None:
    page = record()
    path.write_text(page)


def record() -> str:
    """Runs the commands in a temporary folder; returns the page."""
    with tempfile.TemporaryDirectory() as home:
        outputs = iter(_run([each for step in STEPS for each in step.commands], home))
    page = [_INTRODUCTION]
    for step in STEPS:
        blocks = (f"$ {command}\n{next(outputs)}" for command in step.commands)
        session = "".join(blocks)
        page.append(f"## {step.heading}\n\n{step.text}\n\n```console\n{session}```\n")
    return "\n".join(page)


def _run(commands: list[str], home: str) -> list[str]:
    """Returns what each command prints, in one shell; raises OSError if one fails."""
    end = "== end of a command =="
    script = "".join(f"{command}\necho '{end}'\n" for command in commands)
    script = script.replace(_URL, f"{_REPOSITORY} estimator-accum")
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=home,
        env=os.environ | {"HOME": home, "PIP_CACHE_DIR": f"{home}/.cache"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OSError(done.returncode, f"a command failed:\n{done.stdout}")
    *outputs, _ = done.stdout.split(f"{end}\n")
    return [without_what_changes(each, home) for each in outputs]


def without_what_changes(output: str, home: str) -> str:
    """Returns the output with `~` for the home folder, and `...` for other changes."""
    output = output.replace(os.path.realpath(home), "~").replace(home, "~")
    for pattern, replacement in _CHANGING:
        output = re.sub(pattern, replacement, output, flags=re.MULTILINE)
    return output


if __name__ == "__main__":
    sys.exit(main())
