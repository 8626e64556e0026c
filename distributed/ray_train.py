"""Trains a program of this project on the workers of Ray Train.

    python -m distributed.ray_train --num_workers=2 distributed.main --output_dir=digits

The program's own flags follow its name. If a worker is lost, Ray starts all of them
again, and they resume from the last checkpoint in --output_dir, which all nodes must
share. Ray gets each checkpoint, with the metrics of its update, and keeps the last 5 in
the folder `ray` in --output_dir. A script of its own calls `make_trainer`, or adds the
hook of distributed/ray_worker.py to its training. Exit codes: 0; 1 if training has
failed; 2 for invalid flags, or without Ray.
"""

import argparse
import importlib
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # can be run from any folder
    sys.path[0] = str(_ROOT)

from absl import flags as absl_flags

from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.command_line import (
    OneSentenceParser,
    aligned,
    count,
    exit_code_of,
)
from estimator_accum.programs.flag_values import read_settings_of
from estimator_accum.programs.folder import make_run_folder
from estimator_accum.programs.lock import locked
from estimator_accum.programs.program import asks_for_help, quiet_import
from estimator_accum.programs.sentences import sentence
from estimator_accum.programs.settings import RunSettings

if TYPE_CHECKING:
    from ray.train.tensorflow import TensorflowTrainer

PROGRAMS = ("distributed.main", "housing_example.main", "bert_finetune.run_classifier")
_QUESTIONS = {"--print_config", "--version"}  # to which the program has an answer
_STRATEGY = "multi_worker"
_CHECKPOINTS = 5  # as Estimator keeps


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(
        __doc__,
        prog="python -m distributed.ray_train",
        usage="%(prog)s [--num_workers=N] [--max_failures=N] [--use_gpu] program ...",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--num_workers",
        type=count,
        default=2,
        metavar="N",
        help="Number of workers, each with a CPU of Ray's (default: %(default)d)",
    )
    parser.add_numbers(
        ("max_failures", 3, "Restarts of all workers before giving up; -1: no limit.")
    )
    parser.add_argument("--use_gpu", action="store_true", help="Give each worker a GPU")
    parser.add_argument("program", choices=PROGRAMS, help="module of the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its flags")
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _train(flags), parser.prog)


def _train(flags: argparse.Namespace) -> None:
    if asks_for_help(flags.arguments) or not _QUESTIONS.isdisjoint(flags.arguments):
        importlib.import_module(flags.program).main([flags.program, *flags.arguments])
        return
    workers = ("localhost",) * flags.num_workers  # Ray will know the addresses
    settings, _ = _read(flags.program, flags.arguments, [len(workers)])
    with quiet_import(flags.arguments):
        import tensorflow as tf
        from ray import train
    # Ray retries errors of workers, so that all is checked here first. Workers need the
    # GPUs: with --use_gpu each sees one, as this process one CPU, else all of a machine.
    if flags.use_gpu:
        tf.config.set_visible_devices([], "GPU")
    for gpu in tf.config.get_visible_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    cluster = Cluster(workers=workers, task_type="worker")
    program = importlib.import_module(flags.program).PROGRAM
    program.prepare(settings, cluster, [flags.program, *flags.arguments])
    make_run_folder(settings.output_dir)
    with locked(settings.output_dir):  # refuses a folder in use
        pass  # a worker locks it later
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of workers on this machine
    trainer = make_trainer(
        flags.program,
        flags.arguments,
        train.ScalingConfig(num_workers=flags.num_workers, use_gpu=flags.use_gpu),
        run_config=train.RunConfig(
            name="ray",
            storage_path=os.path.abspath(settings.output_dir),
            failure_config=train.FailureConfig(max_failures=flags.max_failures),
            checkpoint_config=train.CheckpointConfig(num_to_keep=_CHECKPOINTS),
        ),
    )
    result = trainer.fit()
    rows = [[name, f"{value:g}"] for name, value in (result.metrics or {}).items()]
    if rows:
        print(aligned(rows, numbers=False))
    if result.checkpoint:
        print(f"checkpoint: {result.checkpoint.path}")


def make_trainer(
    program: str,
    arguments: Sequence[str],
    scaling_config: Any,
    **options: Any,
) -> "TensorflowTrainer":
    """Returns Ray's trainer of a program; its `fit()` trains.

    Args:
        program: Module of the program, one of `PROGRAMS`.
        arguments: Its flags.
        scaling_config: Ray's `ScalingConfig`, with the number of workers, or with the
            least and the largest one.
        **options: Further arguments of `TensorflowTrainer`, such as `run_config`.

    Raises:
        ValueError: If the flags do not fit these workers; the message is one sentence.

    Example:
        trainer = make_trainer(
            "distributed.main",
            ["--output_dir=/shared/digits"],
            ScalingConfig(num_workers=2),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
        )
        result = trainer.fit()
    """
    sizes = scaling_config.num_workers
    first, last = sizes if isinstance(sizes, tuple) else (sizes, sizes)
    if not 1 <= first <= last:
        raise ValueError(
            "`num_workers` must be an integer >= 1, or the least and the largest one. "
            f"Received: {sizes}. ScalingConfig(num_workers=2) has two workers."
        )
    settings, verbosity = _read(program, arguments, range(first, last + 1))
    with quiet_import(arguments):
        from ray.train.tensorflow import TensorflowTrainer

        from distributed.ray_worker import WatchedConfig, train_program
    values = settings.as_flags() | {"verbosity": verbosity}
    values["output_dir"] = os.path.abspath(settings.output_dir)  # not the worker's
    config = {
        "program": program,
        "arguments": [f"--{name}={value}" for name, value in values.items()],
    }
    return TensorflowTrainer(
        train_program,
        train_loop_config=config,
        scaling_config=scaling_config,
        tensorflow_config=WatchedConfig(),
        **options,
    )


def _read(
    name: str, arguments: Sequence[str], sizes: Sequence[int]
) -> tuple[RunSettings, int]:
    """Returns the settings of a program, for all numbers of workers; and its verbosity."""
    program = importlib.import_module(name).PROGRAM
    values = program.flags()
    argv = [name, f"--strategy={_STRATEGY}", *arguments]
    try:
        settings = read_settings_of(program.settings, values, argv)
        for size in sizes:
            settings.batches(size)
    except (absl_flags.Error, ValueError, TypeError) as error:
        raise ValueError(sentence(error, values)) from error
    if settings.strategy != _STRATEGY:
        raise ValueError(
            f"`--strategy` must be {_STRATEGY} under Ray, which describes such a "
            f"cluster. Received: {settings.strategy}. Leave it out."
        )
    return settings, values.verbosity


if __name__ == "__main__":
    sys.exit(main())
