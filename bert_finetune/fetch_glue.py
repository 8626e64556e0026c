"""Downloads GLUE's tasks from their official addresses.

    estimator-accum fetch glue --data_dir glue --tasks CoLA,MRPC

creates glue/CoLA and glue/MRPC in GLUE's own layout, ready for `--data_dir=glue/CoLA`
of `estimator-accum train`. Downloads are verified, a folder appears only when it is
complete, and an existing one is not changed. Exit codes: 0; 1 if a download fails or is
damaged; 2 for invalid flags.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from bert_finetune import download
from bert_finetune.download import RemoteFile
from bert_finetune.tasks import TASKS, Task, get_task
from estimator_accum.programs.command_line import exit_code_of

_NAME = "estimator-accum fetch glue"
OFFICIAL_URL = "https://dl.fbaipublicfiles.com"
_MRPC_COLUMNS = "#1 ID\t#2 ID\t#1 String\t#2 String\n"


@dataclass(frozen=True)
class Source:
    """Source files of one task.

    Attributes:
        files: One zip in GLUE's layout; for MRPC its training and test sentences and
            the ids that GLUE moves from the former to the dev set.
        terms: Origin, terms of use and home page, in one line.
    """

    files: tuple[RemoteFile, ...]
    terms: str


def _zip(name: str, sha256: str, terms: str) -> Source:
    return Source((RemoteFile(f"{OFFICIAL_URL}/glue/data/{name}", sha256),), terms)


# The checksums are those on record in tensorflow/datasets (url_checksums/glue.txt) and
# huggingface/datasets (glue/dataset_infos.json).
SOURCES = {
    "CoLA": _zip(
        "CoLA.zip",
        "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff",
        "Warstadt et al. 2018; research use; https://nyu-mll.github.io/CoLA/",
    ),
    "SST-2": _zip(
        "SST-2.zip",
        "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",
        "Socher et al. 2013; terms on https://nlp.stanford.edu/sentiment/",
    ),
    "MRPC": Source(
        (
            RemoteFile(
                f"{OFFICIAL_URL}/senteval/senteval_data/msr_paraphrase_train.txt",
                "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
            ),
            RemoteFile(
                f"{OFFICIAL_URL}/senteval/senteval_data/msr_paraphrase_test.txt",
                "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
            ),
            RemoteFile(
                f"{OFFICIAL_URL}/glue/data/mrpc_dev_ids.tsv",
                "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7",
            ),
        ),
        "Dolan and Brockett 2005; Microsoft's licence; "
        "https://www.microsoft.com/en-us/download/details.aspx?id=52398",
    ),
    "QQP": _zip(
        "QQP-clean.zip",
        "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0",
        "Quora 2017; non-commercial use under Quora's terms of service; "
        "https://data.quora.com/First-Quora-Dataset-Release-Question-Pairs",
    ),
    "STS-B": _zip(
        "STS-B.zip",
        "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85",
        "Cer et al. 2017; terms on http://ixa2.si.ehu.eus/stswiki/",
    ),
    "MNLI": _zip(
        "MNLI.zip",
        "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633",
        "Williams et al. 2018; licence of the Open American National Corpus, fiction "
        "under others; https://cims.nyu.edu/~sbowman/multinli/",
    ),
    "QNLI": _zip(
        "QNLIv2.zip",
        "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5",
        "Rajpurkar et al. 2016 (SQuAD); CC BY-SA 4.0; "
        "https://rajpurkar.github.io/SQuAD-explorer/",
    ),
    "RTE": _zip(
        "RTE.zip",
        "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee",
        "Dagan et al. 2006 and three later challenges; terms on "
        "https://aclweb.org/aclwiki/Recognizing_Textual_Entailment",
    ),
    "WNLI": _zip(
        "WNLI.zip",
        "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46",
        "Levesque et al. 2012; CC BY 4.0; "
        "https://cs.nyu.edu/~davise/papers/WinogradSchemas/WS.html",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Fetches the tasks of the flags and returns the exit code."""
    args = _parse(argv)
    return exit_code_of(lambda: _run(args), _NAME)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = download.make_parser(__doc__, OFFICIAL_URL, "files of one task", _NAME)
    parser.add_argument(
        "--data_dir",
        type=pathlib.Path,
        help="folder that gets one folder for each task",
    )
    parser.add_argument(
        "--tasks",
        default="all",
        help=f"comma-separated: {','.join(SOURCES)}, or all (default: %(default)s)",
    )
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> None:
    tasks = list(TASKS)
    if args.tasks != "all":
        tasks = [get_task(name, "--tasks") for name in args.tasks.split(",")]
    if args.list:
        for task in tasks:
            print(f"{task.name}: {SOURCES[task.name].terms}")
            for file in _files(task, args.base_url):
                print(f"    {file.url}")
        return
    if args.data_dir is None:
        raise ValueError(
            "`--data_dir` must name a folder. Received: none. Use --data_dir=glue, "
            "or --list to see all tasks."
        )
    if args.archive and len(tasks) != 1:
        raise ValueError(
            f"`--archive` must be for one task. Received: {len(tasks)} tasks. "
            f"Name one: --tasks={tasks[0].name}."
        )
    for task in tasks:
        _fetch(task, args.data_dir / task.name, args.archive, args.base_url)


def _files(task: Task, base_url: str) -> list[RemoteFile]:
    return download.on_mirror(SOURCES[task.name].files, OFFICIAL_URL, base_url)


def _fetch(
    task: Task, destination: pathlib.Path, archive: list[pathlib.Path], base_url: str
) -> None:
    names = [task.train_file, *task.dev_files.values(), *task.test_files.values()]
    if download.is_complete(destination, names):
        print(f"{task.name}: already in {destination}")
        return
    print(f"{task.name}: {SOURCES[task.name].terms}")
    with download.staging_folder(destination) as staging:
        paths = download.obtain(_files(task, base_url), archive, staging)
        content = staging / "content"
        if task.name == "MRPC":
            _write_mrpc(*paths, content)
        else:
            download.unpack(paths[0], names, content, is_own=bool(archive))
    print(f"{task.name}: {', '.join(names)} in {destination}")


def _write_mrpc(
    train: pathlib.Path, test: pathlib.Path, dev_ids: pathlib.Path, folder: pathlib.Path
) -> None:
    """Splits Microsoft's training file as GLUE does, and hides the test labels."""
    dev_pairs = {tuple(line.split("\t")) for line in _lines(dev_ids)}
    with (
        (folder / "train.tsv").open("w", encoding="utf-8", newline="\n") as train_file,
        (folder / "dev.tsv").open("w", encoding="utf-8", newline="\n") as dev_file,
        (folder / "test.tsv").open("w", encoding="utf-8", newline="\n") as test_file,
    ):
        train_file.write(f"Quality\t{_MRPC_COLUMNS}")
        dev_file.write(f"Quality\t{_MRPC_COLUMNS}")
        for line in list(_lines(train))[1:]:
            is_dev = tuple(line.split("\t")[1:3]) in dev_pairs
            (dev_file if is_dev else train_file).write(f"{line}\n")
        test_file.write(f"index\t{_MRPC_COLUMNS}")
        for index, line in enumerate(list(_lines(test))[1:]):
            _, _, columns = line.partition("\t")
            test_file.write(f"{index}\t{columns}\n")


def _lines(path: pathlib.Path) -> Iterator[str]:
    for line in path.read_bytes().decode("utf-8-sig").split("\n"):
        if line := line.rstrip("\r"):
            yield line


if __name__ == "__main__":
    sys.exit(main())
