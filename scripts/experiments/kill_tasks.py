"""Kills random tasks of a cluster repeatedly, and compares with an undisturbed run.

    python scripts/experiments/kill_tasks.py --output_dir=kills --kills=20

Trains twice with `distributed.launch_local`: undisturbed, and with `kill -9` of a
random task at random moments, its start included. Then the weights and all else in the
checkpoints must be the same bit for bit, and train_metrics.csv must be the same except
for its speeds; each example of each epoch must have been used once, in the same updates
of both runs; no process may be left. Exit codes: 0; 1 if one of these conditions fails;
2 for invalid flags.
"""

import argparse
import collections
import itertools
import json
import os
import pathlib
import random
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from distributed.local_clusters import launched
from estimator_accum.runs.command_line import OneSentenceParser, exit_code_of
from estimator_accum.runs.metrics_file import METRICS, last_update

_EFFECTIVE_BATCH = 200
_STEPS = 2  # micro-steps per update
_LONGEST_PAUSE_SECS = 3.0  # after the update at which a kill is due
_SHARE_WHILE_STARTING = 0.3  # of the kills: done without waiting for training
_DEADLINE_SECS = 600  # without a new update
_SECS_BETWEEN_LOOKS = 0.02


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder(
        "output_dir", "a new folder (default: %(default)s)", default="kills"
    )
    parser.add_folder("data_dir", "MNIST's files; generated digits if not given")
    parser.add_numbers(
        ("kills", 20, "how many"),
        ("workers", 2, "tasks that train"),
        ("train_updates", 3000, "optimizer updates"),
        ("save_checkpoints_updates", 20, "updates between checkpoints"),
        ("seed", 0, "of the moments and the tasks"),
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: compare(flags))


def compare(flags: argparse.Namespace) -> int:
    """Trains undisturbed and disturbed, compares both runs; returns the exit code."""
    _check(flags)
    quiet, killed = flags.output_dir / "undisturbed", flags.output_dir / "killed"
    start = time.monotonic()
    _train(flags, quiet, [])
    quiet_secs = time.monotonic() - start
    random_ = random.Random(flags.seed)
    # The last quarter is left for the updates that the last kill makes necessary again.
    moments = sorted(random_.sample(range(flags.train_updates * 3 // 4), flags.kills))
    start = time.monotonic()
    victims = _train(flags, killed, moments, random_)
    print(f"undisturbed: {quiet_secs:.0f} s", end="; ")
    print(f"with {len(victims)} kills: {time.monotonic() - start:.0f} s")
    for name, times in sorted(collections.Counter(victims).items()):
        print(f"  {name}: killed {times} times")
    checks = _is_same(quiet, killed), _is_told_alike(quiet, killed)
    return int(not all([*checks, _are_used_once(flags, quiet, killed)]))


def _check(flags: argparse.Namespace) -> None:
    if flags.output_dir.exists() and any(flags.output_dir.iterdir()):
        raise ValueError(
            "`--output_dir` must be new or empty. "
            f"Received: {flags.output_dir}. Use another one."
        )
    if not 1 <= flags.kills <= flags.train_updates * 3 // 4:
        raise ValueError(
            "`--kills` must be an integer >= 1 and at most three quarters of "
            f"--train_updates. Received: {flags.kills}. Use more updates."
        )


def _train(flags, folder: pathlib.Path, moments, random_=None) -> list[str]:
    """Runs a cluster to its end; returns the tasks that were killed."""
    print(f"==> {folder.name}", flush=True)
    folder.mkdir(parents=True)
    with launched(
        folder,
        workers=flags.workers,
        effective_batch_size=_EFFECTIVE_BATCH,
        gradient_accumulation_steps=_STEPS,
        train_updates=flags.train_updates,
        save_checkpoints_updates=flags.save_checkpoints_updates,
        max_restarts=flags.kills,
        data_dir=flags.data_dir,
        log_examples=True,
    ) as launcher:
        victims = [_kill(launcher, folder, at, random_) for at in moments]
        code = launcher.wait()
    left = _tasks(folder)
    if code or left:
        raise ValueError(
            f"{folder} must be a run that ends with 0, and leaves no process. Received: "
            f"exit code {code}, processes {left}. See {folder / 'log'}."
        )
    return victims


def _kill(launcher, folder: pathlib.Path, update: int, random_) -> str:
    """Kills a task some time after update `update`; returns the task's name."""
    pause_secs = random_.uniform(0, _LONGEST_PAUSE_SECS)
    if random_.random() > _SHARE_WHILE_STARTING:
        before = last_update(folder)
        _wait(launcher, folder, lambda: last_update(folder) != before)
    _wait(launcher, folder, lambda: last_update(folder) >= update)
    time.sleep(pause_secs)
    while True:
        _wait(launcher, folder, lambda: _tasks(folder))
        tasks = _tasks(folder)
        pid = random_.choice(sorted(tasks, key=tasks.get))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # the launcher has ended it first
            continue
        print(f"killed {tasks[pid]} after update {last_update(folder)}", flush=True)
        return tasks[pid]


def _wait(launcher, folder: pathlib.Path, condition) -> None:
    end = time.monotonic() + _DEADLINE_SECS
    while not condition():
        if launcher.poll() is not None or time.monotonic() > end:
            raise ValueError(
                "`--train_updates` must leave time for all kills. Received: a run that "
                f"ended, or hung, after update {last_update(folder)} before the last "
                f"one. See {folder / 'log'}, or use more updates."
            )
        time.sleep(_SECS_BETWEEN_LOOKS)


def _tasks(folder: pathlib.Path) -> dict[int, str]:
    """Returns the names of the run's tasks by their process ids."""
    found = {}
    words = (b"main.py\0", f"--output_dir={folder}\0".encode())
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            if not all(word in command for word in words):
                continue
            variables = (path / "environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        [config] = [v[10:] for v in variables if v.startswith(b"TF_CONFIG=")] or [b""]
        if config:
            task = json.loads(config)["task"]
            found[int(path.name)] = f"{task['type']} {task['index']}"
    return found


def _is_same(quiet: pathlib.Path, killed: pathlib.Path) -> bool:
    """Compares all variables of the last checkpoints, bit for bit."""
    import tensorflow as tf  # slow, and not needed for --help

    ours, theirs = (tf.train.load_checkpoint(str(f)) for f in (killed, quiet))
    names = theirs.get_variable_to_shape_map()
    is_same = ours.get_variable_to_shape_map() == names and all(
        ours.get_tensor(name).tobytes() == theirs.get_tensor(name).tobytes()
        for name in names
    )
    print(f"{len(names)} variables, bit for bit the same: {_word(is_same)}")
    return is_same


def _is_told_alike(quiet: pathlib.Path, killed: pathlib.Path) -> bool:
    """Compares the metrics of every update: losses, norms, rates, but not the speed."""
    ours, theirs = (_metrics_but_speed(folder) for folder in (killed, quiet))
    print(f"{len(theirs) - 1} rows of {METRICS}, the same: {_word(ours == theirs)}")
    return ours == theirs


def _metrics_but_speed(folder: pathlib.Path) -> list[str]:
    lines = (folder / METRICS).read_text().splitlines()
    return [line.rpartition(",")[0] for line in lines]


def _are_used_once(flags, quiet: pathlib.Path, killed: pathlib.Path) -> bool:
    """Compares each update's examples; checks that an epoch uses each example once."""
    from distributed.input_pipeline import load_examples

    ours, theirs = _used(flags, killed), _used(flags, quiet)
    size = len(load_examples(flags.data_dir)[0].labels)
    stream = list(itertools.chain.from_iterable(ours))
    epochs = [stream[first : first + size] for first in range(0, len(stream), size)]
    is_once = len(stream) == flags.train_updates * _EFFECTIVE_BATCH and all(
        len(set(epoch)) == len(epoch) for epoch in epochs
    )
    print(
        f"{len(stream):,} examples in {len(stream) / size:g} epochs of {size:,}, each "
        f"once an epoch: {_word(is_once)}; in the undisturbed run's updates: "
        f"{_word(ours == theirs)}"
    )
    return is_once and ours == theirs


def _used(flags, folder: pathlib.Path) -> list[list[int]]:
    """Returns the examples of each micro-step, of all workers, that the weights kept.

    A task that resumes from a checkpoint logs the micro-steps after it again; its
    earlier lines for them are discarded, as are the weights that they produced.
    """
    logs, num_lines = [], 0
    for rank in range(flags.workers):
        lines = (folder / f"examples-{rank}.log").read_text().splitlines()
        rows = [list(map(int, line.split())) for line in lines]
        num_lines += len(lines)
        logs.append({micro_step: numbers for micro_step, *numbers in rows})
    micro_steps = range(1, flags.train_updates * _STEPS + 1)
    again = num_lines - len(micro_steps) * flags.workers
    print(f"{folder.name}: {again:,} micro-steps of one worker were repeated")
    return [
        [number for log in logs for number in log.get(micro_step, [])]
        for micro_step in micro_steps
    ]


def _word(is_so: bool) -> str:
    return "yes" if is_so else "NO"


if __name__ == "__main__":
    sys.exit(main())
