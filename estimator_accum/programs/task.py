"""Runs a command as one task of a cluster whose operator starts every task.

    estimator-accum task --workers=4 --addresses=digits-node-0-{}.digits:2222 \\
        python -m distributed.main --output_dir=/shared/output

Tells the command its cluster: `TF_CONFIG` names a worker at each address, in which {}
stands for the numbers from 0 on, and this task by the variable JOB_COMPLETION_INDEX of a
Kubernetes job. Without --addresses the environment stays as it is. Signals are forwarded
to the command, which saves then. The exit code is the command's, or 128 + the number of
the signal that ended it; 75, after the loss of another task, becomes --lost_task_code.
Needs no TensorFlow.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from estimator_accum.programs import groups
from estimator_accum.programs.cluster import EXIT_AGAIN, Cluster
from estimator_accum.programs.command_line import (
    OneSentenceParser,
    command_of,
    exit_code_of,
)

_INDEX = "JOB_COMPLETION_INDEX"


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(
        __doc__,
        prog="estimator-accum task",
        usage="%(prog)s [--workers=N --addresses=HOST-{}:PORT] [--lost_task_code=N] "
        "command ...",
        allow_abbrev=False,
    )
    parser.add_numbers(
        ("workers", 1, "Number of tasks that train."),
        ("lost_task_code", EXIT_AGAIN, "Exit code when another task was lost."),
    )
    parser.add_argument(
        "--addresses",
        metavar="HOST-{}:PORT",
        help="address of each task, with {} for its number (default: keep TF_CONFIG)",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="command of this task, with its flags"
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _run(flags), parser.prog)


def _run(flags: argparse.Namespace) -> int:
    command = command_of(flags)
    environment = dict(os.environ)
    if flags.addresses is not None:
        environment["TF_CONFIG"] = tf_config(flags.addresses, flags.workers, os.environ)
    code = run_and_forward_signals(command, environment)
    return flags.lost_task_code if code == EXIT_AGAIN else code


def tf_config(addresses: str, workers: int, environment: Mapping[str, str]) -> str:
    """Returns the `TF_CONFIG` of this task.

    Args:
        addresses: Address of each task, host:port, with {} for its number.
        workers: Number of tasks, >= 1.
        environment: Environment variables; JOB_COMPLETION_INDEX is this task's number.

    Raises:
        ValueError: If the addresses do not differ, or the number is not below `workers`.
    """
    if "{}" not in addresses:
        raise ValueError(
            "`--addresses` must contain {} for the number of a task. Received: "
            f"{addresses}. Use, for example, digits-node-0-{{}}.digits:2222"
        )
    index = environment.get(_INDEX, "none")
    if not (index.isascii() and index.isdecimal() and int(index) < workers):
        raise ValueError(
            f"`{_INDEX}` must be a number below --workers={workers}. Received: {index}. "
            "Kubernetes sets it for jobs with completionMode: Indexed."
        )
    nodes = tuple(addresses.replace("{}", str(number)) for number in range(workers))
    cluster = Cluster(workers=nodes, task_type="worker", task_index=int(index))
    return cluster.tf_config()


def run_and_forward_signals(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Runs a command to its end; returns its exit code, 128 + N after signal N.

    After a signal that ends it, such as a shell, the end is that of all processes of its
    group, which get the signal; a second one kills them.
    """
    signal.pthread_sigmask(
        signal.SIG_BLOCK, groups.SIGNALS
    )  # until a process can get them
    process = subprocess.Popen(
        command,
        env=env,
        start_new_session=True,  # Ctrl-C reaches the command once, from here
        # The mask would be inherited. Safe: this process has no threads.
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, groups.SIGNALS),  # noqa: PLW1509
    )
    received = []

    def forward(number: int, frame) -> None:
        received.append(number)
        if process.returncode is None:
            process.send_signal(number)
        else:
            groups.send_signal(process.pid, signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in groups.SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, groups.SIGNALS)
    try:
        code = process.wait()
        if received and code < 0:  # else the command has passed it on, or not at will
            groups.send_signal(process.pid, received[-1])
            while groups.is_running(process.pid):
                time.sleep(groups.SECS_BETWEEN_LOOKS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
