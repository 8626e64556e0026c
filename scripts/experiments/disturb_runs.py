"""Interrupts runs by signals and full disks, and compares with an undisturbed run.

    python scripts/experiments/disturb_runs.py --output_dir=disturbed --signals=200
    unshare -rm python scripts/experiments/disturb_runs.py --output_dir=full --full_disks=50

Each of the three programs trains twice: undisturbed, and with SIGTERM, SIGINT, SIGUSR1
or SIGKILL at random moments; after each signal the same command starts again. Then:

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
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from estimator_accum.runs.command_line import OneSentenceParser, exit_code_of

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_PROGRAMS = ("bert", "housing", "images")
_METRICS = "train_metrics.csv"
_CODES = {
    signal.SIGTERM: 143,
    signal.SIGINT: 130,
    signal.SIGUSR1: 75,
    signal.SIGKILL: -9,
}
_LONGEST_PAUSE_SECS = 1.0  # after the update at which a signal is due
_SHARE_WHILE_STARTING = 0.1  # of the signals: sent without waiting for training
_SECS_BETWEEN_LOOKS = 0.01
_CHANGING = re.compile(r"events\.out.*|model\.ckpt-.*|checkpoint|\d{10}")
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = ["the", "cat", "dog", "saw", "a", "bird", "that", "runs"]


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder("output_dir", "a new folder", default="disturbed")
    parser.add_argument(
        "--programs",
        nargs="+",
        choices=_PROGRAMS,
        default=_PROGRAMS,
        help="which (default: all)",
    )
    parser.add_numbers(
        ("signals", 0, "over all programs"),
        ("full_disks", 0, "over all programs"),
        ("seed", 0, "of the moments and the sizes"),
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
    known = _commands(folder)
    commands = {name: known[name] for name in flags.programs}
    for place, (name, command) in enumerate(commands.items()):
        quiet = folder / name / "quiet"
        code, said = _run([*command, f"--output_dir={quiet}"])
        if code:
            raise ValueError(f"{name} must train undisturbed. Received: {said[-500:]}")
        signals, disks = (
            count // len(commands) + (place < count % len(commands))
            for count in (flags.signals, flags.full_disks)
        )
        if signals:
            faults += _stop_by_signals(name, command, quiet, signals, random_)
        for number in range(disks):
            faults += _fill_disk(name, command, quiet, number, random_)
        print(f"{name}: {signals} signals, {disks} full disks", flush=True)
    for fault in faults:
        print(f"FAULT {fault}")
    print(
        f"{flags.signals} signals, {flags.full_disks} full disks, {len(faults)} faults"
    )
    return int(bool(faults))


def _commands(folder: pathlib.Path) -> dict[str, list[str]]:
    data = folder / "data"
    data.mkdir()
    vocabulary = [*_SPECIAL, *_WORDS]
    (data / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    (data / "bert_config.json").write_text(
        f'{{"vocab_size": {len(vocabulary)}, "hidden_size": 16, "hidden_act": "gelu", '
        '"num_hidden_layers": 1, "hidden_dropout_prob": 0.1, "initializer_range": 0.02, '
        '"attention_probs_dropout_prob": 0.1, '
        '"num_attention_heads": 2, "intermediate_size": 32, "type_vocab_size": 2, '
        '"max_position_embeddings": 32}'
    )
    words = random.Random(0)
    for name, count in (("train", 2000), ("dev", 20)):
        rows = (
            f"x\t{i % 2}\t\t{' '.join(words.choices(_WORDS, k=6))}\n"
            for i in range(count)
        )
        (data / f"{name}.tsv").write_text("".join(rows))
    bert = [
        "bert_finetune/run_classifier.py",
        *("--task_name=CoLA", "--do_train=true", "--dropout=false"),
        *(f"--data_dir={data}", f"--vocab_file={data / 'vocab.txt'}"),
        f"--bert_config_file={data / 'bert_config.json'}",
        *("--max_seq_length=16", "--train_batch_size=4", "--num_train_epochs=4"),
        *("--gradient_accumulation_steps=4", "--save_checkpoints_steps=400"),
    ]
    housing = ["-m", "housing_example.main", "--train_updates=1500"]
    images = ["-m", "distributed.main", "--train_updates=400"]
    images.append("--save_checkpoints_updates=100")
    arguments = zip(_PROGRAMS, (bert, housing, images), strict=True)
    return {name: [sys.executable, *each] for name, each in arguments}


def _run(command: list[str]) -> tuple[int, str]:
    done = subprocess.run(
        command, cwd=_REPOSITORY, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def _stop_by_signals(name, command, quiet, count: int, random_) -> list[str]:
    """Trains until `count` signals have been sent; returns the faults found."""
    faults, round_ = [], 0
    while count > 0:
        round_ += 1
        folder = quiet.with_name(f"stopped-{round_}")
        folder.mkdir()
        for _ in range(min(count, 6)):
            number = random_.choice(list(_CODES))
            code, said, is_training = _stop(command, folder, number, random_)
            if code is None:  # the program ended before the signal
                break
            count -= 1
            what = f"{name}: {number.name} in {folder}"
            if is_training and code != _CODES[number]:
                faults.append(f"{what} ended with {code}: {said[-300:]}")
            if is_training and number != signal.SIGKILL and _is_behind(folder):
                faults.append(f"{what} would repeat a finished update")
        code, said = _run([*command, f"--output_dir={folder}"])
        if code:
            faults.append(f"{name} after signals ended with {code}: {said[-300:]}")
        faults += _differences(quiet, folder)
    return faults


def _stop(command, folder: pathlib.Path, number: signal.Signals, random_):
    """Starts the program, sends a signal; returns (code, stderr, whether it trained).

    The code is None if the program ended before the signal was sent.
    """
    before = _rows(folder)
    waits = random_.random() > _SHARE_WHILE_STARTING
    pause_secs = random_.uniform(0, _LONGEST_PAUSE_SECS * (1 if waits else 8))
    with (folder.parent / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            [*command, f"--output_dir={folder}"],
            cwd=_REPOSITORY,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        while waits and process.poll() is None and _rows(folder) == before:
            time.sleep(_SECS_BETWEEN_LOOKS)
        time.sleep(pause_secs)
        has_ended = process.poll() is not None
        process.send_signal(number)
        code = process.wait()
        stderr.seek(0)
        said = stderr.read()
    is_training = waits and "saved at update" in said or number == signal.SIGKILL
    return (None if has_ended else code), said, is_training


def _rows(folder: pathlib.Path) -> int:
    # Not by rglob, which fails where a folder of a checkpoint vanishes meanwhile.
    folders = [root for root, _, names in os.walk(folder) if _METRICS in names]
    return sum(os.path.getsize(os.path.join(root, _METRICS)) for root in folders)


def _is_behind(folder: pathlib.Path) -> bool:
    """Returns whether the metrics have an update that the checkpoint lacks."""
    import tensorflow as tf  # slow, and not needed for --help

    for path in folder.rglob(_METRICS):
        last = path.read_text().splitlines()[-1].partition(",")[0]
        saved = tf.train.load_variable(str(path.parent), "update_step")
        if last != "update_step" and int(last) > int(saved):
            return True
    return False


def _differences(quiet: pathlib.Path, folder: pathlib.Path) -> list[str]:
    import tensorflow as tf

    faults = []
    if _names(quiet) != _names(folder):
        faults.append(f"{folder} holds {sorted(_names(quiet) ^ _names(folder))}")
    for path in quiet.rglob(_METRICS):
        other = folder / path.relative_to(quiet)
        texts = [
            re.sub(r",[^,\n]*\n", "\n", each.read_text()) for each in (path, other)
        ]
        if texts[0] != texts[1]:
            faults.append(f"{other} is not {path}")
        ours, theirs = (
            tf.train.load_checkpoint(str(each.parent)) for each in (other, path)
        )
        for name in theirs.get_variable_to_shape_map():
            if ours.get_tensor(name).tobytes() != theirs.get_tensor(name).tobytes():
                faults.append(f"{name} in {other.parent}")
    return faults


def _names(folder: pathlib.Path) -> set[str]:
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {name for name in names if not _CHANGING.search(name)}


def _fill_disk(name, command, quiet, number: int, random_) -> list[str]:
    """Trains on a disk that is too small, then on a larger one."""
    mount = quiet.with_name(f"disk-{number}")
    mount.mkdir()
    size = sum(path.stat().st_size for path in quiet.rglob("*") if path.is_file())
    pages = random_.randrange(1, 2 * size // 4096)
    _call("mount", "-t", "tmpfs", "-o", f"size={pages * 4096}", "tmpfs", mount)
    try:
        folder, faults = mount / "output", []
        code, said = _run([*command, f"--output_dir={folder}"])
        lines = said.strip().splitlines() or [""]
        what = f"{name} on {pages} pages"
        if code not in (0, 2) or "Traceback" in said:
            faults.append(f"{what} ended with {code}: {said[-500:]}")
        if code == 2 and "must have room" not in lines[-1]:
            faults.append(f"{what} said {lines[-1]}")
        litter = [
            str(p) for p in folder.rglob("*") if re.search(r"_temp|tmp|part", p.name)
        ]
        if litter:
            faults.append(f"{what} left {litter}")
        _call("mount", "-o", f"remount,size={4 * size + (64 << 20)}", mount)
        code, said = _run([*command, f"--output_dir={folder}"])
        if code:
            faults.append(f"{what}, then more, ended with {code}: {said[-500:]}")
            return faults
        return faults + _differences(quiet, folder)
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
