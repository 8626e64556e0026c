"""Process group of a command, which may be a script around the program that trains.

A signal goes to the command alone, which may forward it. A shell that the signal ends
does not: then the processes that it waited for get the signal here, once.
"""

import os
import pathlib
import signal

# Signals that end a command, and the time between two looks at its processes.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SECS_BETWEEN_LOOKS = 0.2
_ENDED = "ZX"  # states of a process: zombie, dead


def is_running(group: int) -> bool:
    """Returns whether a process of the group runs; zombies do not."""
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has ended
            continue
        state, _, its_group, *_ = text.rpartition(")")[2].split()
        if int(its_group) == group and state not in _ENDED:
            return True
    return False


def send_signal(group: int, number: int) -> None:
    """Sends a signal to all processes of the group, if there are any."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass
