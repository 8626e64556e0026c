"""The steps that all programs that train take.

Needs no TensorFlow until the flags are read, because its import takes seconds.
"""

import contextlib
import dataclasses
import importlib
import logging
import os
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import NoReturn

from absl import flags

from estimator_accum import __version__
from estimator_accum.compat import enable_estimator, prefer_keras_2
from estimator_accum.programs.cluster import STRATEGIES, Cluster
from estimator_accum.programs.flag_values import (
    define_program_flags,
    help_text,
    read_settings_of,
)
from estimator_accum.programs.folder import make_run_folder
from estimator_accum.programs.launchers import read_cluster_of
from estimator_accum.programs.sentences import sentence
from estimator_accum.programs.settings import RunSettings, config_text

_logger = logging.getLogger("tensorflow.estimator_accum")

_WANTS_ALL = re.compile(r"\s--?(v|verbosity)[= ]\d")


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that trains in an output folder, by its differences from others.

    Attributes:
        name: Command that starts it, with which its messages and `--help` begin.
        description: Beginning of `--help`.
        settings: Its class of `RunSettings`. The same package has a module `inputs`
            with `read(settings, cluster)`, which reads and checks what it can without
            TensorFlow, and writes nothing; and a module `jobs` with `prepare(inputs)`,
            which checks everything else and writes nothing, and `execute(job)`, which
            returns what is to be printed.
        advice: Remedy for gradients that are not finite.
        may_evaluate: Whether a task of a cluster may be an evaluator.
    """

    name: str
    description: str
    settings: type[RunSettings]
    advice: str
    may_evaluate: bool = False

    @property
    def room(self) -> str:
        """Package of the program."""
        return self.settings.__module__.rpartition(".")[0]

    def flags(self) -> flags.FlagValues:
        """Returns all flags of the program, which nothing has parsed yet."""
        return define_program_flags(self.settings)

    def run(self, argv: Sequence[str]) -> None:
        """Checks everything first, then runs the jobs of this task.

        Exit codes are those of `ending.ended_in_words`, 2 for what is refused, and 130 for
        Ctrl-C before the jobs.
        """
        escape_what_stdout_lacks()
        values = self.flags()
        if asks_for_help(argv):
            show(
                f"usage: {self.name} [--flags]\n\n{self.description}\n{help_text(values)}"
            )
            return
        if "--version" in argv[1:]:
            show(f"estimator-accum {__version__}")
            return
        try:
            settings, cluster = self.read(values, argv)
        except (flags.Error, ValueError, TypeError) as error:
            self._refuse(sentence(error, values))
        if values.print_config:
            show(config_text(settings))
            return
        folder = settings.output_dir
        try:
            set_verbosity(values.verbosity, self.room)
            if cluster.is_server:
                self._serve(cluster, argv)
            jobs, job = self.prepare(settings, cluster, argv)
            make_run_folder(folder)
        except (ImportError, ValueError, TypeError, OSError) as error:
            self._refuse(sentence(error, values))
        except KeyboardInterrupt:
            self._refuse("stopped by Ctrl-C", 128 + signal.SIGINT)
        from estimator_accum.programs.ending import ended_in_words
        from estimator_accum.programs.lock import locked

        with (
            ended_in_words(self.name, folder, self.advice, cluster),
            locked(folder, cluster.is_chief and settings.is_training),
        ):
            results = jobs.execute(job)
        if results:
            print(results.rstrip("\n"))

    def read(self, values, argv: Sequence[str]) -> tuple[RunSettings, Cluster]:
        """Returns the settings of the command line, and the cluster.

        Args:
            values: Result of `flags`.
            argv: The command line.

        Raises:
            absl.flags.Error: If a flag does not fit.
            ValueError: If the flags or the cluster do not fit.
        """
        settings = read_settings_of(self.settings, values, argv)
        cluster = read_cluster_of(
            settings.strategy, os.environ, may_evaluate=self.may_evaluate
        )
        # TensorFlow alone knows the devices of a strategy that the user chose.
        if settings.is_training and settings.strategy == type(settings).strategy:
            settings.batches(cluster.num_workers)
        return settings, cluster

    def prepare(self, settings: RunSettings, cluster: Cluster, argv: Sequence[str]):
        """Reads all inputs, then imports TensorFlow; returns `jobs`, and the job.

        Args:
            settings: Settings of `read`.
            cluster: Cluster of `read`.
            argv: The command line.
        """
        is_chosen = settings.strategy != type(settings).strategy
        if is_chosen and settings.strategy in STRATEGIES[2:] and cluster.is_alone:
            _logger.info("no other task is in the environment: training alone")
        reader = importlib.import_module(f"{self.room}.inputs")
        inputs = reader.read(settings, cluster)
        prefer_keras_2()
        with quiet_import(argv[1:]):  # of TensorFlow: seconds
            from estimator_accum.programs.strategies import make_session_config

            jobs = importlib.import_module(f"{self.room}.jobs")
        enable_estimator()
        make_session_config(settings, None)  # refuses a slow precision
        return jobs, jobs.prepare(inputs)

    def _serve(self, cluster: Cluster, argv: Sequence[str]) -> NoReturn:
        """Holds variables for the workers; only a signal ends it."""
        with quiet_import(argv[1:]):
            from estimator_accum.programs.ending import ended_in_words
            from estimator_accum.programs.servers import serve
        with ended_in_words(self.name, "", self.advice, cluster):
            serve(cluster)

    def _refuse(self, reason: str, code: int = 2) -> NoReturn:
        print(f"{self.name}: {reason}", file=sys.stderr)
        sys.exit(code)


@contextlib.contextmanager
def quiet_import(arguments: Sequence[str]) -> Iterator[None]:
    """Hides the stderr output of the `with` block, which imports TensorFlow.

    Newer TensorFlow versions log from C++ before they read TF_CPP_MIN_LOG_LEVEL. A
    failing import shows all output, and so does `--verbosity=0` or more.

    Args:
        arguments: The command line, without the program's name.
    """
    if _WANTS_ALL.search(f" {' '.join(arguments)}"):
        yield
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
    _open_what_is_closed()
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        except Exception:
            held_back.seek(0)
            os.write(stderr, held_back.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


def _open_what_is_closed() -> None:
    """Opens closed standard streams, as some daemons have them, on `os.devnull`.

    Otherwise the next file that is opened would become the standard output.
    """
    for stream, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            if getattr(sys, stream) is None:
                opened = open(number, "w" if number else "r")  # noqa: SIM115, kept
                setattr(sys, stream, opened)


def set_verbosity(verbosity: int, *programs: str) -> None:
    """Shows the programs' own log lines always, TensorFlow's from verbosity 0.

    Args:
        verbosity: Value of `--verbosity`; below 0, TensorFlow logs only errors.
        programs: Names of loggers below `tensorflow`.
    """
    tensorflow_level = logging.INFO if verbosity >= 0 else logging.ERROR
    logging.getLogger("tensorflow").setLevel(tensorflow_level)
    # The programs say more about their batches and their end.
    logging.getLogger("tensorflow.estimator_accum.summary").disabled = True
    if verbosity < 0:
        warnings.filterwarnings("ignore", "To make it possible to preserve tf.data")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("estimator_accum", *programs):
        logger = logging.getLogger(f"tensorflow.{name}")
        logger.setLevel(logging.INFO)
        logger.handlers[:] = [handler]
        logger.propagate = False


def show(text: str) -> None:
    """Prints text for a reader who may leave early, such as `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_stdout()


def escape_what_stdout_lacks() -> None:
    """Lets the standard output escape characters that its encoding lacks.

    The standard error does so by itself.
    """
    if hasattr(sys.stdout, "reconfigure"):
        with contextlib.suppress(OSError):  # no position: a pipe in a file's place
            sys.stdout.reconfigure(errors="backslashreplace")


def discard_stdout() -> None:
    """Sends the rest of the standard output nowhere, since its reader has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def asks_for_help(argv: Sequence[str]) -> bool:
    """Returns whether the command line has --help in one of its forms."""
    return bool({"-h", "--help", "--helpfull"} & set(argv))
