"""The end of a program that trains: an exit code, with one sentence on an error."""

import contextlib
import itertools
import os
import pathlib
import socket
import sys
import threading
import traceback
from collections.abc import Iterator

import tensorflow as tf

from estimator_accum.core.nonfinite import what_was_not_finite
from estimator_accum.microbatch.count import is_out_of_memory
from estimator_accum.programs.cluster import EXIT_AGAIN, Cluster
from estimator_accum.programs.disk import is_of_full_disk, remove_unfinished
from estimator_accum.programs.folder import OtherRunError
from estimator_accum.programs.lock import LockedFolderError, NoLockError
from estimator_accum.programs.progress import DamagedCheckpointError
from estimator_accum.programs.watchdog import LostTaskError

_INTERRUPTED = 130
_ALONE = Cluster()
_NO_SERVER = "Could not start gRPC server"  # of TensorFlow; the address is in no error


@contextlib.contextmanager
def ended_in_words(
    program: str, output_dir: str, advice: str, cluster: Cluster = _ALONE
) -> Iterator[None]:
    """Ends the process if the `with` block fails; for signals, `train` itself ends it.

    Exit codes: 2 for an error that the user can fix; 75 when another task was lost, or,
    in a cluster, when the folder or the port is not free yet, so that launchers start the
    tasks again; 130 for Ctrl-C outside training; 1 with a traceback for any other error.

    Args:
        program: Name of the program, with which the sentence begins.
        output_dir: The folder that the run writes to; "" for a process without one.
        advice: Remedy for gradients that are not finite.
        cluster: The tasks of the run.
    """
    show = threading.excepthook

    def show_others(failed) -> None:
        # TensorFlow's event writer fails in its thread, then in the main thread too.
        if not is_of_full_disk(failed.exc_value):
            show(failed)

    threading.excepthook = show_others
    try:
        yield
        return
    except KeyboardInterrupt:
        code, sentence = _INTERRUPTED, _stopped(output_dir)
    except LostTaskError as error:
        code, sentence = EXIT_AGAIN, " ".join(str(error).split())
    except Exception as error:  # noqa: BLE001, whatever it is
        code, sentence = 2, _sentence(error, output_dir, advice)
        if not cluster.is_alone:
            if isinstance(error, LockedFolderError):  # of tasks that have to end yet
                code = EXIT_AGAIN
            if _NO_SERVER in str(error):
                code, sentence = _no_port(cluster)
        if sentence is None:
            code = 1
            traceback.print_exc()
    finally:
        threading.excepthook = show
    if sentence is not None:
        print(f"{program}: {sentence}", file=sys.stderr)
    if cluster.is_alone:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # TensorFlow's threads would keep the process alive


def _no_port(cluster: Cluster) -> tuple[int, str]:
    """Returns the exit code and sentence of a task that cannot take its address."""
    port = cluster.address.rpartition(":")[2]
    try:
        with socket.socket() as server:
            server.bind(("", int(port)))
    except PermissionError:
        return 2, (
            "The port of a task must be one that its user may open. Received: "
            f"{cluster.address} of {cluster.name}, and port {port} is for privileged "
            "users. Give the task a port of 1024 or above, in the addresses of all tasks."
        )
    except OSError:  # another process, as TensorFlow has found
        pass
    return EXIT_AGAIN, (
        "The address of a task must be free on its machine. Received: "
        f"{cluster.address} of {cluster.name}, whose port another process uses. End that "
        "process, or give the task another port, and start all tasks again."
    )


def _stopped(output_dir: str) -> str:
    """Returns the sentence about a run that Ctrl-C ended outside training."""
    if not output_dir:  # a parameter server saves nothing
        return "stopped."
    # In a program that trains several models, each has a folder in this one.
    if any(pathlib.Path(output_dir).rglob("model.ckpt-*.index")):
        return (
            "stopped. The same command resumes from the last checkpoint in "
            f"{output_dir}."
        )
    return (
        f"stopped before the first checkpoint: nothing is saved in {output_dir}, and the "
        "same command begins anew."
    )


def _reason(message: str) -> str:
    """Returns the line of TensorFlow's message that the failed operation has written."""
    lines = message.splitlines()
    for line, following in itertools.pairwise(lines):
        if following.strip().startswith("[["):  # the operation's name
            return line.strip().rstrip(".")
    return lines[0].rstrip(".") if lines else "an error without a text"


def _sentence(error: Exception, output_dir: str, advice: str) -> str | None:
    """Returns a sentence for an error that the user can fix; None for any other."""
    ours = LockedFolderError | NoLockError | OtherRunError | DamagedCheckpointError
    if isinstance(error, ours):
        return str(error)
    if is_of_full_disk(error):
        latest = remove_unfinished(output_dir)
        reason = error.strerror if isinstance(error, OSError) else "no room is left"
        again = "begins anew: no checkpoint is there"
        if latest:
            again = f"resumes: {latest} is the last checkpoint"
        return (
            f"The disk of {output_dir} must have room for checkpoints and results. "
            f"Received: {reason}. Free some, and the same command {again}."
        )
    if is_out_of_memory(error):
        lines = (line.strip() for line in str(error).splitlines() if "OOM" in line)
        return (
            "A batch must fit in memory. Received: "
            f"{next(lines, type(error).__name__)}. Use smaller batches; "
            "--micro_batch_size=auto finds the size of those that train."
        )
    if isinstance(error, ValueError) and is_out_of_memory(error.__cause__):
        return " ".join(str(error).split())  # "auto" has no finer split
    damage = tf.errors.DataLossError, tf.errors.OutOfRangeError  # a short file
    if isinstance(error, damage) and "RestoreV2" in str(error):
        return (
            "Checkpoints must be whole. Received: "
            f"{_reason(error.message)}. If it is the last one of "
            f"{output_dir}, name an older one as model_checkpoint_path in "
            f"{pathlib.Path(output_dir, 'checkpoint')}, or use another --output_dir."
        )
    if isinstance(error, tf.errors.InvalidArgumentError):
        received = what_was_not_finite(error)
        if received is not None:
            return f"Gradients must be finite. Received: {received}. {advice}"
    return None
