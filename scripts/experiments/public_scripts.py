"""Compares the weights of public scripts, split into micro-batches or unsplit.

Fetches ten training scripts and six models of TensorFlow 2, of fourteen public
repositories, from PyPI, in pinned versions with pinned hashes, into --work_dir, and
lets each train 20 updates: with whole batches, in 4 micro-batches, and with whole
batches whose examples are in reverse order, which shows what rounding does. Scripts
are TensorFlow 1 code, split by `estimator-accum run --micro_batches=4`; the models
are split by `keras.microbatch` or `microbatch_step`, one line of the driver. Their
texts stay as they are. Each is started by a driver in scripts/experiments/public, with a
small model and made-up data, without dropout. Prints a Markdown table; a difference is

    max |split - whole| / max |whole|

of one weight, and the largest is shown. "unsplit" is the share of the activations that
is computed on the whole batch. Weights whose gradient is zero but for rounding
are left out. Exit code 1 if a script fails, or a difference is above 2e-5.

With --errors=N memory runs out N times in all, in four scripts: at the begin or end of
some micro-batch, after which the batch is retried in twice as many. Then the weights
must be those of a run without errors split alike, to the bit.

    python scripts/experiments/public_scripts.py --work_dir=public
    python scripts/experiments/public_scripts.py --work_dir=public --errors=200
"""

import argparse
import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from typing import NamedTuple

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np

from estimator_accum.programs.command_line import (
    FetchError,
    OneSentenceParser,
    exit_code_of,
)

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_DRIVERS = pathlib.Path(__file__).resolve().parent / "public"
_BOUND = 2e-5
_UPDATES = 20
_DEADLINE_SECS = 900
_LINES = 15  # of a failing script's log
_MOST_ERRORS = 80  # of a script: 4 in each update halve 32 examples to 1
_DISTURBED = ("bert_classifier", "deepctr_wide_deep", "opennmt_transformer", "tfgan")

# Imports of the scripts beside TensorFlow.
_LIBRARIES = (
    "attrs==23.2.0",
    "cloudpickle==3.0.0",
    "decorator==5.1.1",
    "dm-tree==0.1.8",
    "gin-config==0.5.0",
    "pyyaml==6.0.2",
    "tensorflow-probability==0.23.0",
)


class Project(NamedTuple):
    """A public script.

    Attributes:
        script: Its repository, and the part of it that trains.
        package: Name and version of the package on PyPI.
        sha256: Checksum of the package.
        optimizer: Its optimizer.
        left_out: Elements whose gradient is zero, by patterns of weights' names.
        is_v2: Whether it is code of TensorFlow 2, which its driver splits.
    """

    script: str
    package: str
    sha256: str
    optimizer: str
    left_out: dict[str, slice]
    is_v2: bool = False


# Attention's weights do not change when all scores of a query grow by one number.
_KEYS = {"attention.*/key/bias$": slice(None)}
_BERT = (
    "bert-tensorflow==1.0.1",
    "3f35ada6769f91e88c69b11b24fde7ff2d61a9d8b3c2a29229c1fdaee50354a0",
    "AdamWeightDecay",
    _KEYS,
)
PROJECTS = {
    "bert_classifier": Project("google-research/bert: run_classifier.py", *_BERT),
    "bert_pretraining": Project("google-research/bert: run_pretraining.py", *_BERT),
    "albert_pretraining": Project(
        "google-research/albert: run_pretraining.py's model_fn",
        "albert-tensorflow==1.1",
        "36ba735b95112597484c082bfa019bbf5b2e513a63627dce4949fdc43a67ba22",
        "LAMB",
        _KEYS,
    ),
    "electra_finetuning": Project(
        "aub-mind/arabert (google-research/electra): run_finetuning.py's model_fn",
        "arabert==1.0.1",
        "4d8cb74cba070821cd727dd0e07b0de07728a8ffe5810b3be89da4bae3618e3c",
        "AdamWeightDecay, a rate for each layer",
        _KEYS,
    ),
    "bert_ner": Project(
        "macanv/BERT-BiLSTM-CRF-NER: bert_lstm_ner.py",
        "bert-base==0.0.9",
        "2a806924203ac4de32cb2201c00ed15b6ae31b3ea541400a86ada4a15acc681a",
        "AdamWeightDecay",
        _KEYS,
    ),
    "t2t_adafactor": Project(
        "tensorflow/tensor2tensor: adafactor.py",
        "tensor2tensor==1.15.7",
        "26ef986c2b9f45bdefa4218229f33f2992e4d9df84f8939d41481cdaa8444392",
        "Adafactor",
        {},
    ),
    "ranking_groupwise": Project(
        "tensorflow/ranking: make_groupwise_ranking_fn",
        "tensorflow-ranking==0.3.3",
        "a2ffbe242132d767150ca5bc8840c676764fcc7f34d7f7b198edba069583c8f0",
        "Adagrad",
        # A softmax over scores, likewise.
        {"group_score/dense_1/bias$": slice(None)},
    ),
    "deepctr_wide_deep": Project(
        "shenweichen/DeepCTR: WDLEstimator",
        "deepctr==0.9.3",
        "f28dc81c0aca2d61dff17ef53babe14f898bf314918661462b1f5f3a9e77f328",
        "Ftrl and Adagrad",
        {},
    ),
    "opennmt_transformer": Project(
        "OpenNMT/OpenNMT-tf: Runner, Transformer",
        "OpenNMT-tf==1.25.3",
        "21cbd041b91493663c35a7e3768478f83b99d9a2d1aca90d5396880505358413",
        "Adam",
        # Queries, keys and values of 16 units each; or keys and values.
        {
            "multi_head/conv1d/bias$": slice(16, 32),
            "multi_head/conv1d_1/bias$": slice(0, 16),
        },
    ),
    "tfgan": Project(
        "tensorflow/gan: gan_model, gan_loss",
        "tensorflow-gan==2.1.0",
        "a6869fc145c9df55bc337f255d7d27c2a36f5bed58507dde7bd9de5cfc2a9421",
        "Adam and Adam",
        {},
    ),
    "recommenders_retrieval": Project(
        "tensorflow/recommenders: Model, Retrieval",
        "tensorflow-recommenders==0.7.3",
        "aa1ec194a0259e4a0d6a06d913a2b33e018762b9b11ed4570764f522afe80193",
        "Adagrad",
        {},
        is_v2=True,
    ),
    "structured_adversarial": Project(
        "tensorflow/neural-structured-learning: AdversarialRegularization",
        "neural-structured-learning==1.4.0",
        "bdf98943f09a3e1aaad8f321d668fddb52663f2ca950046ca964a524d9464e2a",
        "Adam",
        {},
        is_v2=True,
    ),
    "orbit_trainer": Project(
        "tensorflow/models: Orbit's StandardTrainer, Controller",
        "tf-models-official==2.15.0",
        "0b0eb977f4c1cab49efa95b147a4391f9cb3ebf659aad4584603dbf61eaad739",
        "Adam",
        {},
        is_v2=True,
    ),
    "agents_dqn": Project(
        "tensorflow/agents: DqnAgent, Learner",
        "tf-agents==0.19.0",
        "ff27f3020c486746faff2046abea1fbd8b16fb93984ff685d8ee34a17f9f84f8",
        "Adam",
        {},
        is_v2=True,
    ),
    "similarity_contrastive": Project(
        "tensorflow/similarity: ContrastiveModel, SimCLRLoss",
        "tensorflow-similarity==0.17.1",
        "da5d27a699a8bc12d6292a01f39c9529d22700d95b8607bdec69c91168718331",
        "Adam",
        {},
        is_v2=True,
    ),
    "deepctr_deepfm": Project(
        "shenweichen/DeepCTR: DeepFM",
        "deepctr==0.9.3",
        "f28dc81c0aca2d61dff17ef53babe14f898bf314918661462b1f5f3a9e77f328",
        "Adam",
        {},
        is_v2=True,
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder("work_dir", "folder for packages and runs", required=True)
    parser.add_argument(
        "--scripts", default=",".join(PROJECTS), help="names, by commas (default: all)"
    )
    parser.add_argument(
        "--errors", type=int, metavar="N", help="errors of memory, in four scripts"
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: compare(flags))


def compare(flags: argparse.Namespace) -> int:
    """Prints the table; returns 1 if a script fails or a weight differs."""
    names = flags.scripts.split(",")
    unknown = [name for name in names if name not in PROJECTS]
    if unknown:
        raise ValueError(
            f"`--scripts` must be among {', '.join(PROJECTS)}. "
            f"Received: {', '.join(unknown)}. Leave it out for all of them."
        )
    if flags.errors is not None:
        names = [name for name in names if name in _DISTURBED]
        if not names or not 1 <= flags.errors <= _MOST_ERRORS * len(names):
            raise ValueError(
                f"`--errors` must be from 1 to {_MOST_ERRORS} for each of "
                f"{', '.join(_DISTURBED)} among `--scripts`. Received: {flags.errors}, "
                f"and {len(names)} of them. Use 200 with all of them."
            )
    work_dir = flags.work_dir.resolve()
    fetch(work_dir, {PROJECTS[name].package: PROJECTS[name].sha256 for name in names})
    versions = f"TensorFlow {importlib.metadata.version('tensorflow')}, Python "
    print(f"{versions}{platform.python_version()}, {datetime.date.today()}\n")
    if flags.errors is None:
        head = ["script", "optimizer", "in 4", "in reverse", "unsplit", "verdict"]
        rows = [_difference_row(name, work_dir) for name in names]
    else:
        head = ["script", "errors of memory", "same weights", "verdict"]
        shares = [
            flags.errors * (i + 1) // len(names) - flags.errors * i // len(names)
            for i in range(len(names))
        ]
        pairs = zip(names, shares, strict=True)
        rows = [_errors_row(name, work_dir, share) for name, share in pairs]
    for row in [head, ["---"] * len(head), *rows]:
        print(f"| {' | '.join(row)} |")
    return 0 if all(row[-1] == "yes" for row in rows) else 1


def fetch(work_dir: pathlib.Path, packages: dict[str, str]) -> None:
    """Fetches packages to `work_dir`: scripts without pip's traces, and libraries.

    Modules beside which pip has left its traces count as installed, and are not run as
    TensorFlow 1 code.

    Args:
        work_dir: The folder.
        packages: Package and version -> its checksum.

    Raises:
        FetchError: If a package cannot be fetched, or has another hash.
    """
    downloads = work_dir / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    listed = downloads / "requirements.txt"
    lines = (f"{name} --hash=sha256:{sha256}\n" for name, sha256 in packages.items())
    listed.write_text("".join(lines))
    whatever = ["--no-deps", "--only-binary=:all:", "--quiet"]
    _pip(
        *("download", "--require-hashes", "--ignore-requires-python", *whatever),
        *("--dest", downloads, "--requirement", listed),
    )
    shutil.rmtree(work_dir / "scripts", ignore_errors=True)
    for wheel in downloads.glob("*.whl"):
        extract(wheel, work_dir / "scripts")
    libraries = work_dir / "libraries"
    if not libraries.exists():
        _pip("install", *whatever, "--target", libraries, *_LIBRARIES)


def extract(wheel: pathlib.Path, folder: pathlib.Path) -> None:
    """Extracts a wheel's modules, and nothing else of it."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.partition("/")[0].endswith((".dist-info", ".data")):
                archive.extract(name, folder)


def _pip(*arguments) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FetchError(
            "Packages must be on PyPI with the hashes of this script. "
            f"Received: {done.stderr.strip()[-500:]}."
        )


def _difference_row(name: str, work_dir: pathlib.Path) -> list[str]:
    project, folder = PROJECTS[name], _new_folder(work_dir, name)
    row = [_title(project), project.optimizer]
    whole = _run(name, folder, "whole")
    cut = _run(name, folder, "cut", "--micro_batches=4")
    reverse = _run(name, folder, "reverse", driver_flags=["--in_reverse"])
    if whole is None or cut is None or reverse is None:
        return [*row, "-", "-", "-", "no"]
    ours, theirs = (
        largest_difference(run, whole, project.left_out) for run in (cut, reverse)
    )
    is_good = ours <= _BOUND and cut["steps"] == whole["steps"] == _UPDATES
    shares = re.findall(r"([\d.]+)% of the activations", _log(folder, "cut"))
    share = f"{shares[-1]} %" if shares else "-"
    return [*row, f"{ours:.1e}", f"{theirs:.1e}", share, "yes" if is_good else "no"]


def _errors_row(name: str, work_dir: pathlib.Path, errors: int) -> list[str]:
    folder = _new_folder(work_dir, name)
    flags = [f"--errors={errors}"]
    auto = "--micro_batches=auto"
    calm = _run(name, folder, "calm", auto, [*flags, "--without_errors"])
    disturbed = _run(name, folder, "disturbed", auto, flags)
    if calm is None or disturbed is None:
        return [_title(PROJECTS[name]), "-", "-", "no"]
    happened = re.findall(r"^errors: (\d+)$", _log(folder, "disturbed"), re.MULTILINE)
    is_same = calm.keys() == disturbed.keys() and all(
        calm[key].tobytes() == disturbed[key].tobytes() for key in calm
    )
    is_good = is_same and happened == [str(errors)]
    same = "to the bit" if is_same else "no"
    return [
        _title(PROJECTS[name]),
        ", ".join(happened),
        same,
        "yes" if is_good else "no",
    ]


def _title(project: Project) -> str:
    version = project.package.replace("==", " ")
    return f"{project.script} ({version})"


def _new_folder(work_dir: pathlib.Path, name: str) -> pathlib.Path:
    folder = work_dir / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _run(
    name: str,
    folder: pathlib.Path,
    run: str,
    micro_batches: str | None = None,
    driver_flags: list[str] = (),
) -> dict[str, np.ndarray] | None:
    """Runs a script's driver.

    Args:
        name: Name of the driver.
        folder: Folder for its output.
        run: Name of the run.
        micro_batches: Flag of `estimator-accum run`, or of a driver of TensorFlow 2;
            None trains whole batches.
        driver_flags: Flags of the driver.

    Returns:
        The trained weights, and "steps"; None if the run failed, which is reported.
    """
    last = folder / f"{run}.npz"
    trainer = ["estimator_accum.compat", "--v1"]
    if micro_batches is not None:
        trainer = ["estimator_accum", "run", "--v1", micro_batches]
    trainer = ["-m", *trainer]
    if PROJECTS[name].is_v2:
        trainer = []
        driver_flags = [*driver_flags, *([micro_batches] if micro_batches else [])]
    command = [
        *(sys.executable, *trainer),
        str(_DRIVERS / f"{name}.py"),
        f"--output_dir={folder / run}",
        f"--first_weights={folder / 'first.npz'}",
        f"--last_weights={last}",
        *driver_flags,
    ]
    code = _run_program(command, folder / f"{run}.log")
    if code == 0 and last.exists():
        print(f"{name}: {run}", file=sys.stderr, flush=True)
        return dict(np.load(last))
    lines = _log(folder, run).splitlines()[-_LINES:]
    print(f"{name}: {run} ended with {code}:", *lines, sep="\n", file=sys.stderr)
    return None


def _run_program(command: list[str], log: pathlib.Path) -> int | str:
    """Runs a command in the scripts' environment; returns its exit code, or why none."""
    work_dir = log.parents[2]
    path = [_REPOSITORY, work_dir / "scripts", work_dir / "libraries"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONHASHSEED": "0",  # a script numbers its labels as a set lists them
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(_DEADLINE_SECS)
        except subprocess.TimeoutExpired:
            return f"nothing in {_DEADLINE_SECS} secs"
        finally:
            process.kill()
            process.wait()


def _log(folder: pathlib.Path, run: str) -> str:
    return (folder / f"{run}.log").read_text(errors="replace")


def largest_difference(values: dict, expected: dict, left_out: dict) -> float:
    """Returns the largest relative difference of a weight.

    Args:
        values: Weights by name.
        expected: Weights by name, to compare with.
        left_out: Elements to leave out, by patterns of names.

    Raises:
        ValueError: If the names differ.
    """
    if values.keys() != expected.keys():
        names = sorted(values.keys() ^ expected.keys())
        raise ValueError(f"Both must have the same weights. Received: {names}.")
    largest = 0.0
    for name, value in expected.items():
        if name == "steps":
            continue
        difference = np.abs(values[name] - value)
        for pattern, elements in left_out.items():
            if re.search(pattern, name):
                difference[elements] = 0
        scale = np.abs(value).max()
        if difference.max() > 0:
            largest = max(largest, float(difference.max() / scale))
    return largest


if __name__ == "__main__":
    sys.exit(main())
