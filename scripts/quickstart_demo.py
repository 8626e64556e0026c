"""Trains with a batch that does not fit in memory: unsplit, then in micro-batches.

    ./scripts/quickstart

runs this script in its own environment. It makes up sentences and fine-tunes a small BERT
on them by `estimator-accum train`, in batches of 1,024:

    unsplit, with too little memory for TensorFlow's tensors: out of memory
    in 4 micro-batches of 256, with the same memory
    unsplit, with enough memory, to compare

and draws losses and memory. The second run starts while the first one waits for memory.
The folder is made anew each time.
"""

import contextlib
import csv
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
from typing import NamedTuple

from bert_finetune.demo_data import MAX_SEQ_LENGTH, write_demo_data
from estimator_accum.programs.command_line import (
    OneSentenceParser,
    aligned,
    exit_code_of,
)
from estimator_accum.programs.folder import METRICS
from estimator_accum.programs.lock import locked

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_PLOT, _DATA = "loss.png", "data"
_BATCH = 1024
_LIMIT = 60  # MB of tensors
_COMPARED = 10  # losses; then they fall, and rounding grows
EPOCHS = 10


class Run(NamedTuple):
    """One run of the demo.

    Attributes:
        label: Name in the table and in the picture.
        steps: K.
        limit: Memory for tensors [MB]; None for as much as the machine has.
    """

    label: str
    steps: int
    limit: int | None


RUNS = {  # by folder; the first one runs out of memory
    "out_of_memory": Run("1,024 unsplit", 1, _LIMIT),
    "with_accumulation": Run("256 x 4", 4, _LIMIT),
    "without_accumulation": Run("1,024 unsplit", 1, None),
}


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns 0 or the exit code of the part that failed."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder(
        "output_dir",
        "a new folder, or that of a demo before (default: %(default)s)",
        default=_REPOSITORY / "demo",
    )
    flags = parser.parse_args(arguments)
    try:
        return exit_code_of(lambda: run_demo(flags.output_dir))
    except subprocess.CalledProcessError as error:  # the part has printed the reason
        return error.returncode


def run_demo(output_dir: pathlib.Path) -> None:
    """Makes the data, fine-tunes, prints the table, draws losses and memory.

    Args:
        output_dir: A new folder, or that of an earlier demo, whose files are replaced.

    Raises:
        ValueError: If the folder has other files, or another demo writes there.
    """
    ours = [_DATA, _PLOT, *RUNS]
    others = {path.name for path in output_dir.glob("[!.]*")} - set(ours)
    if others or output_dir.is_file():
        held = f" with {', '.join(sorted(others))}" if others else ", a file"
        raise ValueError(
            "`--output_dir` must be new, empty, or the folder of a demo before. "
            f"Received: {output_dir}{held}. Name another."
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    with locked(output_dir):
        for path in (output_dir / name for name in ours):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        write_demo_data(output_dir / _DATA)
        results = _train_all(output_dir)
        print(f"\n{results_text(results)}\n\nplot: ", end="", flush=True)
        _draw(output_dir, results)
        print(output_dir / _PLOT)


def _train_all(output_dir: pathlib.Path) -> dict[str, "Result"]:
    """Returns the results by folder, without the run that is out of memory."""
    failing, under_limit, without_limit = RUNS
    pipes = {"stderr": subprocess.PIPE}
    with (
        _running(output_dir, failing, **pipes) as fails,
        # TensorFlow waits ten seconds for memory before it fails: a processor is free.
        _running(output_dir, under_limit, **pipes) as trains,
    ):
        _expect_out_of_memory(failing, fails)
        results = {under_limit: _result(output_dir, under_limit, trains)}
    with _running(output_dir, without_limit) as trains:
        results[without_limit] = _result(output_dir, without_limit, trains)
    return results


def _expect_out_of_memory(folder: str, process: subprocess.Popen) -> None:
    """Shows that TensorFlow runs out of memory for the unsplit batch."""
    try:
        _ended(folder, process)
    except subprocess.CalledProcessError as error:
        if "OOM when allocating" not in error.stderr:
            raise
    else:
        raise ValueError(
            f"{RUNS[folder].label} must not fit in {_LIMIT} MB. Received: a training "
            "that did. Report this, with the versions of Python and TensorFlow."
        )


def _ended(folder: str, process: subprocess.Popen) -> str:
    """Prints the lines of a run when it has ended; returns its table."""
    label, _, limit = RUNS[folder]
    where = "enough memory" if limit is None else f"{limit} MB for tensors"
    print(f"==> {label}, with {where}", file=sys.stderr, flush=True)
    table, lines = process.communicate()
    print(lines or "", end="", file=sys.stderr, flush=True)
    if code := process.returncode:
        raise subprocess.CalledProcessError(code, process.args, table, lines or "")
    return table


@contextlib.contextmanager
def _running(output_dir: pathlib.Path, folder: str, **streams):
    """Context with a process that fine-tunes; it ends with the context."""
    # TensorFlow's best-fit allocator counts and limits the memory of tensors; without
    # oneDNN, which has its own.
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        # Without a GPU, TensorFlow's import logs errors about CUDA below level 3.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
    }
    if (limit := RUNS[folder].limit) is not None:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit)
    streams |= {"env": environment, "text": True, "stdout": subprocess.PIPE}
    with subprocess.Popen(command(output_dir, folder), **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def command(output_dir: pathlib.Path, folder: str) -> list[str]:
    """Returns the command line of a run: `estimator-accum train` with its flags."""
    data = output_dir / _DATA
    flags = [
        "--task_name=CoLA",
        "--do_train=true",
        f"--data_dir={data}",
        f"--vocab_file={data / 'vocab.txt'}",
        f"--bert_config_file={data / 'bert_config.json'}",
        f"--max_seq_length={MAX_SEQ_LENGTH}",
        f"--effective_batch_size={_BATCH}",
        f"--gradient_accumulation_steps={RUNS[folder].steps}",
        "--learning_rate=1e-3",
        f"--num_train_epochs={EPOCHS}",
        "--dropout=false",  # random numbers differ between 4 x 256 and 1,024 examples
        f"--output_dir={output_dir / folder}",
    ]
    return [sys.executable, "-m", "estimator_accum", "train", *flags]


class Result(NamedTuple):
    """Result of a run that has trained.

    Attributes:
        megabytes: Peak of the model [MB].
        speed: Median of the updates per second.
        losses: Loss of each update.
    """

    megabytes: float
    speed: float
    losses: list[float]


def _result(output_dir: pathlib.Path, folder: str, process: subprocess.Popen) -> Result:
    table = _ended(folder, process)
    peak = re.search(r"^peak of the model +([0-9.]+) MB$", table, re.MULTILINE)
    with open(output_dir / folder / METRICS, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["examples_per_sec"]) for row in rows]
    losses = [float(row["loss"]) for row in rows]
    return Result(float(peak[1]), statistics.median(rates) / _BATCH, losses)


def results_text(results: dict[str, Result]) -> str:
    """Returns memory, speed and loss of all runs as lines of text."""
    table = [["batch", "memory limit", "memory of the model", "updates/s", "last loss"]]
    for folder, (label, _, limit) in RUNS.items():
        numbers = ["out of memory", "", ""]
        if folder in results:
            megabytes, speed, losses = results[folder]
            numbers = [f"{megabytes:.1f} MB", f"{speed:.2f}", f"{losses[-1]:.4f}"]
        limited = "none" if limit is None else f"{limit} MB"
        table.append([label, limited, *numbers])
    ours, theirs = results.values()
    share = 1 - ours.megabytes / theirs.megabytes
    time = theirs.speed / ours.speed - 1
    cost = f"cost {time:.0%} more time" if time > 0 else f"took {-time:.0%} less time"
    pairs = list(zip(ours.losses, theirs.losses, strict=True))[:_COMPARED]
    apart = max(abs(one - other) for one, other in pairs)
    return (
        f"{aligned(table)}\n\nK = 4 saved {share:.0%} of the model's memory and {cost}. "
        f"The first {len(pairs)} losses\ndiffer by at most {apart:.1e}, by rounding."
    )


def _draw(output_dir: pathlib.Path, results: dict[str, Result]) -> None:
    """Draws the losses on the left, the memory of the model on the right."""
    # Slow to import, and not needed for --help.
    from matplotlib.figure import Figure

    from estimator_accum.programs import plots

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    labels = ["4 micro-batches of 256", "1,024 unsplit"]
    for number, (label, result) in enumerate(
        zip(labels, results.values(), strict=True)
    ):
        color, updates = plots.COLORS[number], range(1, len(result.losses) + 1)
        style = {
            "linewidth": (5.0, 2.2)[number],
            "linestyle": ("-", (0, (3, 1.5)))[number],
        }
        left.plot(updates, result.losses, color=color, label=label, **style)
        bar = right.bar([label], [result.megabytes], 0.6, color=color)
        right.bar_label(bar, [f"{result.megabytes:.0f} MB"], padding=3)
    left.set(title="The same loss", xlabel="updates", ylabel="training loss")
    right.set(title="Less memory", ylabel="memory of the model [MB]")
    style = {"color": "0.3", "linewidth": 1.2, "linestyle": (0, (4, 3))}
    right.axhline(_LIMIT, **style)
    right.annotate(
        f"memory limit: {_LIMIT} MB",
        (0.02, _LIMIT),
        (0, 4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
    )
    right.margins(0.15, 0.2)
    left.legend(frameon=False, handlelength=3.5)
    for axes in (left, right):
        plots.decorate(axes)
    figure.suptitle(
        "A small BERT, batches of 1,024 examples", fontsize=15, fontweight="bold"
    )
    plots.save(figure, output_dir / _PLOT)


if __name__ == "__main__":
    sys.exit(main())
