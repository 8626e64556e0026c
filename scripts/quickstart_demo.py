"""Fine-tunes a small BERT with gradient accumulation and without, and compares.

    ./scripts/quickstart

runs this script in its own environment. It makes up sentences, runs
`estimator-accum train` twice, with 8 examples x 4 micro-steps and with 32 examples at
once, and draws both losses. The folder is made anew each time, with the same result.
"""

import os
import pathlib
import shutil
import subprocess
import sys

from bert_finetune.demo_data import MAX_SEQ_LENGTH, write_demo_data
from estimator_accum.programs.command_line import OneSentenceParser, exit_code_of
from estimator_accum.programs.lock import locked

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_PLOT, _DATA = "loss.png", "data"
# Folder -> (name in table and plot, micro-batch [examples], K)
RUNS = {
    "with_accumulation": ("with accumulation (8 x 4)", 8, 4),
    "without_accumulation": ("without (32)", 32, 1),
}
EPOCHS = 8


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
    """Makes the data, fine-tunes twice, prints the metrics and draws the losses.

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
        for folder, (label, micro_batch_size, steps) in RUNS.items():
            print(f"==> fine-tuning {label}", file=sys.stderr, flush=True)
            _train(output_dir / _DATA, output_dir / folder, micro_batch_size, steps)
        print(f"\n{results_table(output_dir)}\n\nplot: ", end="", flush=True)
        _draw(output_dir)


def _train(data: pathlib.Path, folder: pathlib.Path, size: int, steps: int) -> None:
    flags = [
        "--task_name=CoLA",
        "--do_train=true",
        "--do_eval=true",
        f"--data_dir={data}",
        f"--vocab_file={data / 'vocab.txt'}",
        f"--bert_config_file={data / 'bert_config.json'}",
        f"--max_seq_length={MAX_SEQ_LENGTH}",
        f"--train_batch_size={size}",
        f"--gradient_accumulation_steps={steps}",
        "--learning_rate=4e-4",
        f"--num_train_epochs={EPOCHS}",
        "--dropout=false",  # random numbers differ between 4 x 8 and 32 examples
        "--eval_batch_size=100",
        f"--output_dir={folder}",
    ]
    command = [sys.executable, "-m", "estimator_accum", "train", *flags]
    # Without a GPU, TensorFlow's import logs errors about CUDA below level 3.
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3"} | os.environ
    subprocess.run(command, check=True, env=environment)


def results_table(output_dir: pathlib.Path) -> str:
    """Returns the metrics of both runs as lines of text."""
    row = "{:<25}  {:>15}  {:>7}  {:>13}  {:>5}".format
    lines = [row("run", "effective batch", "updates", "eval accuracy", "MCC")]
    for folder, (label, size, steps) in RUNS.items():
        text = (output_dir / folder / "eval_results.txt").read_text(encoding="utf-8")
        found = dict(line.split(" = ") for line in text.splitlines())
        accuracy = f"{float(found['eval_accuracy']):.3f}"
        correlation = f"{float(found['matthews_correlation']):.3f}"
        lines.append(
            row(label, size * steps, found["update_step"], accuracy, correlation)
        )
    return "\n".join(lines)


def _draw(output_dir: pathlib.Path) -> None:
    from estimator_accum.programs.plots import (
        plot_loss,  # slow, and not for --help
    )

    labels = [label for label, *_ in RUNS.values()]
    plot_loss([output_dir / folder for folder in RUNS], labels, output_dir / _PLOT)


if __name__ == "__main__":
    sys.exit(main())
