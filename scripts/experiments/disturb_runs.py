"""Compares runs disturbed by signals, kills or full disks with undisturbed ones.

    python scripts/experiments/disturb_runs.py --output_dir=disturbed --signals=200
    unshare -rm python scripts/experiments/disturb_runs.py --output_dir=full --full_disks=50

bert, housing and images train in one process, cluster in two tasks of
`distributed.launch_local`. Each of them trains twice: undisturbed, and with SIGTERM,
SIGINT, SIGUSR1 or SIGKILL at random moments. SIGKILL hits a random task of the cluster,
whose launcher starts all tasks again; after any other signal the same command starts
again. Then:

    * weights and all else in the last checkpoints must be the same bit for bit;
    * train_metrics.csv must be the same except for its speeds;
    * a run that catches a signal must end with that signal's exit code, and its
      checkpoint must have every update of the metrics;
    * the same files must be left as in the undisturbed run.

A full disk is a tmpfs of random size (needs root, or `unshare -rm`): the program must
end with 0, or with 2 and one sentence, and must resume when there is room. Exit codes:
0; 1 if one of these conditions fails; 2 for invalid flags.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from bert_finetune.bert_config import BertConfig
from estimator_accum.programs.command_line import OneSentenceParser, exit_code_of
from estimator_accum.programs.folder import METRICS

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_CODES = {
    signal.SIGTERM: 143,
    signal.SIGINT: 130,
    signal.SIGUSR1: 75,
    signal.SIGKILL: -9,
}
_SIGNALS_OF_A_RUN = 6
_LONGEST_PAUSE_SECS = 1.0  # after the update at which a signal is due
_SHARE_WHILE_STARTING = 0.1  # of the signals: sent without waiting for training
_SECS_BETWEEN_LOOKS = 0.01
_CHANGING = re.compile(r"events\.out.*|model\.ckpt-.*|checkpoint|\d{10}")
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = ["the", "cat", "dog", "saw", "a", "bird", "that", "runs"]
_BERT = BertConfig(
    vocab_size=len(_SPECIAL + _WORDS),
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=32,
)


class _Program(NamedTuple):
    """A training program: Python arguments, and whether it starts more processes."""

    arguments: list[str]
    has_tasks: bool = False


class _Run(NamedTuple):
    """A program's run into a folder."""

    program: _Program
    folder: pathlib.Path
    log: pathlib.Path

    def start(self) -> subprocess.Popen:
        with self.log.open("w") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    *self.program.arguments,
                    f"--output_dir={self.folder}",
                ],
                cwd=_REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end(self, process: subprocess.Popen) -> tuple[int, str]:
        """Waits for the end; returns the exit code and the last start's output."""
        return process.wait(), self.log.read_text()

    def size_of_metrics(self) -> int:
        # Not by rglob, which fails where a folder of a checkpoint vanishes meanwhile.
        folders = [root for root, _, names in os.walk(self.folder) if METRICS in names]
        return sum(os.path.getsize(os.path.join(root, METRICS)) for root in folders)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder("output_dir", "a new folder", default="disturbed")
    names = ("bert", "housing", "images", "cluster")
    parser.add_argument(
        "--programs", nargs="+", choices=names, default=names, help="default: all"
    )
    parser.add_numbers(
        ("signals", 0, "number over all programs"),
        ("full_disks", 0, "number over all programs"),
        ("seed", 0, "random seed of the moments and the sizes"),
    )
    flags = parser.parse_args(arguments)
    # A shell ignores Ctrl-C in its background jobs, and their programs inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return exit_code_of(lambda: _disturb(flags))
    finally:
        signal.signal(signal.SIGINT, before)


def _disturb(flags: argparse.Namespace) -> int:
    folder = flags.output_dir.resolve()
    if folder.exists() or not flags.signals + flags.full_disks:
        raise ValueError(
            "`--output_dir` must be new, and `--signals` or `--full_disks` above 0. "
            f"Received: {folder}, {flags.signals} and {flags.full_disks}."
        )
    folder.mkdir(parents=True)
    random_, faults = random.Random(flags.seed), []
    programs = _programs(folder)
    for place, name in enumerate(flags.programs):
        (folder / name).mkdir()
        quiet = _Run(programs[name], folder / name / "quiet", folder / name / "log")
        code, said = quiet.end(quiet.start())
        if code:
            raise ValueError(f"{name} must train undisturbed. Received: {said[-500:]}")
        signals, disks = (
            count // len(flags.programs) + (place < count % len(flags.programs))
            for count in (flags.signals, flags.full_disks)
        )
        faults += _send_signals(quiet, signals, random_)
        for number in range(disks):
            faults += _fill_disk(quiet, number, random_)
        print(f"{name}: {signals} signals, {disks} full disks", flush=True)
    for fault in faults:
        print(f"FAULT {fault}")
    print(
        f"{flags.signals} signals, {flags.full_disks} full disks, {len(faults)} faults"
    )
    return int(bool(faults))


def _programs(folder: pathlib.Path) -> dict[str, _Program]:
    """Writes the data that a tiny BERT trains on; returns the programs."""
    data = folder / "data"
    data.mkdir()
    (data / "vocab.txt").write_text("\n".join(_SPECIAL + _WORDS) + "\n")
    (data / "bert_config.json").write_text(json.dumps(dataclasses.asdict(_BERT)))
    words = random.Random(0)
    for name, count in (("train", 2000), ("dev", 20)):
        rows = (
            f"x\t{i % 2}\t\t{' '.join(words.choices(_WORDS, k=6))}\n"
            for i in range(count)
        )
        (data / f"{name}.tsv").write_text("".join(rows))
    bert = [
        *("-m", "bert_finetune.run_classifier", "--task_name=CoLA", "--do_train=true"),
        *(f"--data_dir={data}", f"--vocab_file={data / 'vocab.txt'}"),
        f"--bert_config_file={data / 'bert_config.json'}",
        *("--max_seq_length=16", "--train_batch_size=4", "--num_train_epochs=4"),
        *("--gradient_accumulation_steps=4", "--save_checkpoints_steps=400"),
    ]
    updates = ["--train_updates=400", "--save_checkpoints_updates=100"]
    cluster = ["--workers=2", "--gradient_accumulation_steps=2", "--max_restarts=99"]
    return {
        "bert": _Program(bert),
        "housing": _Program(["-m", "housing_example.main", "--train_updates=1500"]),
        "images": _Program(["-m", "distributed.main", *updates]),
        "cluster": _Program(
            ["-m", "distributed.launch_local", *updates, *cluster], has_tasks=True
        ),
    }


def _send_signals(quiet: _Run, count: int, random_: random.Random) -> list[str]:
    """Trains until `count` signals have been sent; returns the faults found."""
    faults, round_ = [], 0
    while count > 0:
        round_ += 1
        run = quiet._replace(folder=quiet.folder.with_name(f"disturbed-{round_}"))
        sent, new_faults = _train_disturbed(run, min(count, _SIGNALS_OF_A_RUN), random_)
        count -= sent
        faults += new_faults + _differences(quiet.folder, run.folder)
    return faults


def _train_disturbed(run: _Run, count: int, random_) -> tuple[int, list[str]]:
    """Trains to the end; returns how many signals were sent, and the faults."""
    faults, sent, process = [], 0, None
    for _ in range(count):
        process = process or run.start()
        number = random_.choice(list(_CODES))
        waits = random_.random() > _SHARE_WHILE_STARTING
        before = run.size_of_metrics()
        while waits and process.poll() is None and run.size_of_metrics() == before:
            time.sleep(_SECS_BETWEEN_LOOKS)
        time.sleep(random_.uniform(0, _LONGEST_PAUSE_SECS * (1 if waits else 8)))
        is_of_task = run.program.has_tasks and number == signal.SIGKILL
        victims = _tasks(process.pid) if is_of_task else [process.pid]
        if process.poll() is not None:  # it has trained to its end
            break
        if not victims:  # between two starts of all tasks
            continue
        os.kill(random_.choice(victims), number)
        sent += 1
        if is_of_task:
            continue
        code, said = run.end(process)
        process = None
        what = f"{number.name} in {run.folder}"
        is_killed = number == signal.SIGKILL
        if waits and (is_killed or "saved at update" in said):
            if code != _CODES[number]:
                faults.append(f"{what} ended with {code}: {said[-300:]}")
            if not is_killed and _is_behind(run.folder):
                faults.append(f"{what} would repeat a finished update")
    process = process or run.start()
    code, said = run.end(process)
    if code:
        faults.append(f"{run.folder} after signals ended with {code}: {said[-300:]}")
    return sent, faults


def _tasks(launcher: int) -> list[int]:
    """Returns the ids of a launcher's tasks, each of which leads a session."""
    ids = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            facts = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        state, parent, _, session = facts[:4]
        if int(parent) == launcher and session == path.parent.name and state != "Z":
            ids.append(int(session))
    return sorted(ids)


def _is_behind(folder: pathlib.Path) -> bool:
    """Returns whether the metrics have an update that the checkpoint lacks."""
    import tensorflow as tf  # slow, and not needed for --help

    for path in folder.rglob(METRICS):
        last = path.read_text().splitlines()[-1].partition(",")[0]
        saved = tf.train.load_variable(str(path.parent), "update_step")
        if last != "update_step" and int(last) > int(saved):
            return True
    return False


def _differences(quiet: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Returns how a run's files, metrics and variables differ from the quiet run's."""
    import tensorflow as tf

    faults = []
    if _names(quiet) != _names(folder):
        faults.append(f"{folder} holds {sorted(_names(quiet) ^ _names(folder))}")
    for path in quiet.rglob(METRICS):
        other = folder / path.relative_to(quiet)
        texts = [
            re.sub(r",[^,\n]*\n", "\n", file.read_text()) for file in (path, other)
        ]
        if texts[0] != texts[1]:
            faults.append(f"{other} is not {path}")
        ours, theirs = (
            tf.train.load_checkpoint(str(file.parent)) for file in (other, path)
        )
        for name in theirs.get_variable_to_shape_map():
            if ours.get_tensor(name).tobytes() != theirs.get_tensor(name).tobytes():
                faults.append(f"{name} in {other.parent}")
    return faults


def _names(folder: pathlib.Path) -> set[str]:
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {name for name in names if not _CHANGING.search(name)}


def _fill_disk(quiet: _Run, number: int, random_: random.Random) -> list[str]:
    """Trains on a disk that is too small, then on a larger one."""
    mount = quiet.folder.with_name(f"disk-{number}")
    mount.mkdir()
    files = [path for path in quiet.folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    pages = random_.randrange(1, 2 * size // 4096)
    what = f"{quiet.folder.parent.name} on {pages} pages"
    _call("mount", "-t", "tmpfs", "-o", f"size={pages * 4096}", "tmpfs", mount)
    try:
        run, faults = quiet._replace(folder=mount / "output"), []
        code, said = run.end(run.start())
        if code not in (0, 2) or "Traceback" in said:
            faults.append(f"{what} ended with {code}: {said[-500:]}")
        if code == 2 and "must have room" not in said:
            faults.append(f"{what} said {said[-500:]}")
        litter = [
            str(path)
            for path in run.folder.rglob("*")
            if re.search(r"_temp|tmp|part", path.name)
        ]
        if litter:
            faults.append(f"{what} left {litter}")
        _call("mount", "-o", f"remount,size={4 * size + (64 << 20)}", mount)
        code, said = run.end(run.start())
        if code:
            faults.append(f"{what}, then more, ended with {code}: {said[-500:]}")
            return faults
        return faults + _differences(quiet.folder, run.folder)
    finally:
        _call("umount", mount)


def _call(*command) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(
            "Disks must be mountable, by root or under `unshare -rm`. "
            f"Received: {done.stderr.strip()}."
        )


if __name__ == "__main__":
    sys.exit(main())
