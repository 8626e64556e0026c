"""What the scripts' command lines share: one sentence for an error, an exit code."""

import argparse
import sys
from collections.abc import Callable


class FetchError(Exception):
    """A file could not be had, or is not what was published: exit code 1."""


class OneSentenceParser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one sentence, without usage."""

    def error(self, message: str):
        """Leaves with exit code 2."""
        self.exit(2, f"{self.prog}: {message}. Try --help.\n")


def exit_code_of(action: Callable[[], int | None]) -> int:
    """Runs a script's action; its error becomes one sentence on stderr.

    Returns:
        What the action returns, 0 for None; 1 (nothing to fetch from, or something else
        came) or 2 (bad flags).
    """
    try:
        return action() or 0
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    except (TypeError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
