"""Fine-tunes a small BERT with gradient accumulation and without, and compares.

    ./scripts/quickstart

runs this script in its own environment. It generates the data, runs
`estimator-accum train` twice, with 8 examples x 4 micro-steps and with 32
examples at once, and draws both losses. The folder is created anew each time, with the
same result.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from estimator_accum.runs.command_line import OneSentenceParser, exit_code_of

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_PLOT = "loss.png"
_DATA = "data"


class Run(NamedTuple):
    """One of the two runs.

    Attributes:
        folder: Name of its `--output_dir` inside the demo's folder.
        label: Name in table and plot.
        micro_batch_size: `--train_batch_size` [examples].
        gradient_accumulation_steps: K [micro-steps per update].
    """

    folder: str
    label: str
    micro_batch_size: int
    gradient_accumulation_steps: int


RUNS = (
    Run("with_accumulation", "with accumulation (8 x 4)", 8, 4),
    Run("without_accumulation", "without (32)", 32, 1),
)


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
    """Generates the data, fine-tunes twice, prints the metrics and draws the losses.

    Args:
        output_dir: A new folder, or that of an earlier demo, whose files are replaced.

    Raises:
        ValueError: If the folder has other files, or another demo writes there.
    """
    _check_output_dir(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    with _locked(output_dir):
        _clear(output_dir)
        _step("generating a corpus and pre-training a small BERT on it (20 seconds)")
        _call("-m", "scripts.make_demo_data", f"--output_dir={output_dir / _DATA}")
        for run in RUNS:
            _step(f"fine-tuning {run.label}")
            flags = _training_flags(run, output_dir)
            _call("-m", "estimator_accum", "train", *flags)
        _step("drawing the losses")
        _call(
            *("-m", "estimator_accum", "plot"),
            f"--output_dirs={','.join(run.folder for run in RUNS)}",
            f"--labels={','.join(run.label for run in RUNS)}",
            f"--plot={_PLOT}",
            cwd=output_dir,
            stdout=subprocess.DEVNULL,
        )
        print(f"\n{results_table(output_dir)}")
        print(f"\nplot: {output_dir / _PLOT}")


def results_table(output_dir: pathlib.Path) -> str:
    """Returns the metrics of both runs as lines of text."""
    lines = [("run", "effective batch", "updates", "eval accuracy", "MCC")]
    for run in RUNS:
        results = _read_results(output_dir / run.folder / "eval_results.txt")
        lines.append(
            (
                run.label,
                str(run.micro_batch_size * run.gradient_accumulation_steps),
                results["update_step"],
                f"{float(results['eval_accuracy']):.3f}",
                f"{float(results['matthews_correlation']):.3f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{line[0]:<{widths[0]}}  "
        + "  ".join(
            f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)
        )
        for line in lines
    )


def _training_flags(run: Run, output_dir: pathlib.Path) -> list[str]:
    data = output_dir / _DATA
    return [
        "--task_name=CoLA",
        "--do_train=true",
        "--do_eval=true",
        f"--data_dir={data}",
        f"--vocab_file={data / 'vocab.txt'}",
        f"--bert_config_file={data / 'bert_config.json'}",
        f"--init_checkpoint={data / 'bert_model.ckpt'}",
        "--max_seq_length=32",
        f"--train_batch_size={run.micro_batch_size}",
        f"--gradient_accumulation_steps={run.gradient_accumulation_steps}",
        "--learning_rate=3e-4",
        "--num_train_epochs=5",
        "--dropout=false",  # random numbers differ between 4 x 8 and 32 examples
        "--eval_batch_size=100",
        f"--output_dir={output_dir / run.folder}",
    ]


def _read_results(path: pathlib.Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(line.split(" = ") for line in lines)


def _check_output_dir(output_dir: pathlib.Path) -> None:
    if output_dir.exists() and not output_dir.is_dir():
        raise ValueError(
            f"`--output_dir` must be a folder. Received: {output_dir}, a file. "
            "Name another."
        )
    others = {path.name for path in output_dir.glob("[!.]*")} - set(_entries())
    if others:
        raise ValueError(
            "`--output_dir` must be new, empty, or the folder of a demo before. "
            f"Received: {output_dir} with {', '.join(sorted(others))}. Name another."
        )


def _entries() -> list[str]:
    return [_DATA, _PLOT, *(run.folder for run in RUNS)]


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Keeps a second demo out of the folder; the lock ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"`--output_dir` must not be in use. Received: {folder}, where another "
            "demo is running. Name another, or wait."
        ) from error
    else:
        yield
    finally:
        os.close(descriptor)


def _clear(output_dir: pathlib.Path) -> None:
    left_by_a_kill = output_dir.glob(f".{_DATA}.*.part")
    for path in [*left_by_a_kill, *(output_dir / name for name in _entries())]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _call(*arguments: str, **options) -> None:
    command = [sys.executable, *arguments]
    # Without a GPU, TensorFlow's import logs errors about CUDA below level 3.
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3"} | os.environ
    subprocess.run(command, check=True, env=environment, **options)


def _step(text: str) -> None:
    print(f"==> {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
