"""Imports TensorFlow without its greetings."""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

_WANTS_ALL = re.compile(r"\s--?(v|verbosity)[= ]\d")


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Drops what is written to stderr inside, where TensorFlow is imported.

    Newer TensorFlows greet from C++ before they have read TF_CPP_MIN_LOG_LEVEL. An
    import that fails shows all of it, and so does `--verbosity=0` or more.
    """
    if _WANTS_ALL.search(f" {' '.join(sys.argv[1:])}"):
        yield
        return
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            yield
        except BaseException:
            held_back.seek(0)
            os.write(stderr, held_back.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
