"""Signals that end training: after the micro-step, with a checkpoint in mid-window.

    SIGTERM, SIGINT, SIGUSR1    exit codes 143, 130, 75

Slurm, Kubernetes and spot machines send a signal some time before they kill. A thread
receives it immediately, even while the session computes: Python's own handlers would wait
until the session returns. The first signal is noted, and the next one ends the process
immediately. Between two trainings, and after one that failed, signals act as before.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

_logger = logging.getLogger("tensorflow.estimator_accum")

# 128 + signal, as shells report it; SIGUSR1 is not a failure and exits EX_TEMPFAIL.
EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: os.EX_TEMPFAIL}


class _Watch:
    """Signal handlers of this process, and the signal that they received.

    Attributes:
        received: The signal that ends the current training, or None.
        is_kept: Whether the handlers stay after training ends.
    """

    def __init__(self):
        self.received = self._coordinator = self._before = None
        self.is_kept = self._is_done = False

    @property
    def is_started(self) -> bool:
        """True while the handlers are installed."""
        return self._before is not None

    def start(self) -> None:
        """Installs the handlers; call it in the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        # A process that must outlive its terminal was started to ignore some signals.
        numbers = [n for n in EXIT_CODES if signal.getsignal(n) != signal.SIG_IGN]
        handlers = {n: signal.signal(n, self._in_main_thread) for n in numbers}
        self._before = descriptor, writer, handlers
        listen = threading.Thread(target=self._listen, args=(reader,), daemon=True)
        listen.start()

    def stop(self) -> None:
        """Restores the previous handlers; call it in the main thread."""
        # Python calls a handler some time after the signal: let it handle a noted one
        # now, before the previous handlers are back.
        time.sleep(0)
        descriptor, writer, handlers = self._before
        for number, handler in handlers.items():
            if signal.getsignal(number) == self._in_main_thread:
                signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
        writer.close()
        self._before, self.is_kept = None, False

    def begin(self, coordinator: tf.train.Coordinator) -> None:
        """Directs signals to this training, until its coordinator stops."""
        self._coordinator = coordinator

    def exit_main_thread(self, trained: threading.Thread) -> None:
        """Ends the main thread after the thread `trained` has ended."""
        trained.join()
        self._is_done = True
        os.kill(os.getpid(), self.received)

    def _is_training(self) -> bool:
        return self._coordinator is not None and not self._coordinator.should_stop()

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while content := reader.recv(1):
                number = content[0]
                if number in EXIT_CODES and self._is_training():
                    self._note(signal.Signals(number))

    def _note(self, received: signal.Signals) -> None:
        if self.received is not None:
            os._exit(EXIT_CODES[received])
        self.received = received
        _logger.warning(
            "%s: training saves a checkpoint and ends; a second signal, such as Ctrl-C, "
            "quits without saving.",
            received.name,
        )

    def _in_main_thread(self, number: int, frame) -> None:
        """Handles a signal in Python, as soon as the main thread runs Python code."""
        if self._is_done:
            self._is_done = False
            self.stop()
            sys.exit(EXIT_CODES[number])
        if self.received is None and not self._is_training():
            self.stop()
            signal.raise_signal(number)


_watch = _Watch()


def watch_signals() -> None:
    """Lets signals stop training that runs outside the main thread.

    Call it in the main thread, before that training begins with the hooks of
    `make_accumulation_hooks(save_on_signal=True)`. If the main thread itself trains,
    the hooks install the handlers.

    Raises:
        ValueError: If it is called in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "watch_signals must be called in the main thread: Python has signals "
            "nowhere else. Received: another thread. Call it before you start that."
        )
    if not _watch.is_started:
        _watch.start()
    _watch.is_kept = True


@contextlib.contextmanager
def exits_between_trainings() -> Iterator[None]:
    """Makes SIGTERM and SIGUSR1 end the `with` block with their exit codes.

    For the rest of a program that trains in parts, such as evaluations between them:
    its checkpoints are those of the trainings before, so there is nothing to save. The
    hooks handle the signals during training; SIGINT stays a KeyboardInterrupt. In any
    other thread than the main one, nothing changes.
    """

    def leave(number: int, frame) -> None:
        name = signal.Signals(number).name
        _logger.warning(
            "%s: the same command resumes from the last checkpoint, or begins anew if "
            "there is none.",
            name,
        )
        sys.exit(EXIT_CODES[number])

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGUSR1):
            if signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class SignalStop:
    """Stops one training for a hook when a signal arrives.

    Args:
        stops_at_update: Whether to finish the open window first.
    """

    def __init__(self, stops_at_update: bool):
        self.stops_at_update = stops_at_update

    def begin(self) -> None:
        """Installs the handlers; call it before the session is made."""
        self._thread = threading.current_thread()
        self._coordinator = None
        _watch.received = None
        if self._thread is threading.main_thread():
            if _watch.is_started and not _watch.is_kept:  # by training that failed
                _watch.stop()
            if not _watch.is_started:
                _watch.start()
        elif not _watch.is_started:
            _logger.warning(
                "signals end this run immediately, without a checkpoint: it does not train "
                "in the main thread. Call estimator_accum.watch_signals() there before."
            )

    def open(self, coordinator: tf.train.Coordinator) -> None:
        """Directs signals to this training; call it when there is something to save."""
        self._coordinator = coordinator
        _watch.begin(coordinator)

    @property
    def is_asked(self) -> bool:
        """True once this process has received a signal."""
        return _watch.received is not None

    def close(self) -> None:
        """Removes the handlers after training that ended without a signal."""
        is_in_main_thread = self._thread is threading.main_thread()
        if is_in_main_thread and _watch.is_started and not _watch.is_kept:
            _watch.stop()

    def stop(self) -> None:
        """Ends training after a signal: `train` raises SystemExit, after every hook."""
        try:  # SIGUSR1's code if only another task of the cluster received a signal
            sys.exit(EXIT_CODES[_watch.received or signal.SIGUSR1])
        except SystemExit as stopped:
            self._coordinator.request_stop(stopped)
        if self._thread is not threading.main_thread() and self.is_asked:
            leave = threading.Thread(
                target=_watch.exit_main_thread, args=[self._thread]
            )
            leave.start()
        self.close()
