"""Signals that end training: after the micro-step, with a checkpoint in mid-window.

    SIGTERM, SIGINT, SIGUSR1    exit codes 143, 130, 75

Slurm, Kubernetes and spot machines send one some time before they kill. A thread gets it
at once, also while the session computes: Python's own handlers wait until it returns.
The first is noted, and the next one ends the process there and then. Between two
trainings, and after one that failed, signals do what they did before.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time

import tensorflow as tf

_logger = logging.getLogger("tensorflow.estimator_accum")

# What shells make of a death by that signal; SIGUSR1, which is no failure: EX_TEMPFAIL.
EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 75}


class _Watch:
    """Handlers of this process, and what they have received.

    Attributes:
        received: The signal that is to end the training in progress, or None.
        is_kept: Whether the handlers stay when training has ended.
    """

    def __init__(self):
        self.received = self._coordinator = self._before = None
        self.is_kept = self._is_done = False

    @property
    def is_started(self) -> bool:
        """Whether the handlers are there."""
        return self._before is not None

    def start(self) -> None:
        """Sets the handlers; in the main thread."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        # Who starts a process to outlive a terminal has it ignore some.
        numbers = [n for n in EXIT_CODES if signal.getsignal(n) != signal.SIG_IGN]
        handlers = {n: signal.signal(n, self._in_main_thread) for n in numbers}
        self._before = descriptor, writer, handlers
        listen = threading.Thread(target=self._listen, args=(reader,), daemon=True)
        listen.start()

    def stop(self) -> None:
        """Sets what was before; in the main thread."""
        # Python calls its handlers some time after the signal: not those from before,
        # for one that is noted already.
        time.sleep(0)
        descriptor, writer, handlers = self._before
        for number, handler in handlers.items():
            if signal.getsignal(number) == self._in_main_thread:
                signal.signal(number, handler)
        signal.set_wakeup_fd(descriptor)
        writer.close()
        self._before, self.is_kept = None, False

    def begin(self, coordinator: tf.train.Coordinator) -> None:
        """From here on signals are for this training, until its coordinator stops."""
        self._coordinator = coordinator

    def exit_main_thread(self, trained: threading.Thread) -> None:
        """Ends the main thread, when the other one that has trained has ended."""
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
            "%s: training ends with a checkpoint, soon; a second signal ends it at once.",
            received.name,
        )

    def _in_main_thread(self, number: int, frame) -> None:
        """Python's handler, which comes when the main thread computes in Python."""
        if self._is_done:
            self._is_done = False
            self.stop()
            sys.exit(EXIT_CODES[number])
        if self.received is None and not self._is_training():
            self.stop()
            signal.raise_signal(number)


_watch = _Watch()


def watch_signals() -> None:
    """Lets training in another thread than the main one be stopped by signals.

    Call it in the main thread, before that training begins with the hooks of
    `make_accumulation_hooks(save_on_signal=True)`. Where the main thread itself trains,
    the hooks do it.

    Raises:
        ValueError: In another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "watch_signals must be called in the main thread: Python has signals "
            "nowhere else. Received: another thread. Call it before you start that."
        )
    if not _watch.is_started:
        _watch.start()
    _watch.is_kept = True


class SignalStop:
    """What a hook needs to stop one training when a signal has come.

    Args:
        stops_at_update: Whether the window is to be finished first.
    """

    def __init__(self, stops_at_update: bool):
        self.stops_at_update = stops_at_update

    def begin(self) -> None:
        """Before the session is made."""
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
                "signals end this run at once, without a checkpoint: it does not train "
                "in the main thread. Call estimator_accum.watch_signals() there before."
            )

    def open(self, coordinator: tf.train.Coordinator) -> None:
        """When there is something to save."""
        self._coordinator = coordinator
        _watch.begin(coordinator)

    @property
    def is_asked(self) -> bool:
        """Whether this process has got a signal."""
        return _watch.received is not None

    def close(self) -> None:
        """When training ends without a signal."""
        is_in_main_thread = self._thread is threading.main_thread()
        if is_in_main_thread and _watch.is_started and not _watch.is_kept:
            _watch.stop()

    def stop(self) -> None:
        """When it ends for one: lets `train` raise SystemExit, after every hook."""
        try:  # SIGUSR1's is for tasks of a cluster of which others have got a signal
            sys.exit(EXIT_CODES[_watch.received or signal.SIGUSR1])
        except SystemExit as stopped:
            self._coordinator.request_stop(stopped)
        if self._thread is not threading.main_thread() and self.is_asked:
            leave = threading.Thread(
                target=_watch.exit_main_thread, args=[self._thread]
            )
            leave.start()
        self.close()
