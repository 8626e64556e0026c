"""Fetches made-up archives: `made_up_archives.py glue|mnist --their=flags`."""

import dataclasses
import sys

from bert_finetune import fetch_glue
from scripts import fetch_mnist


def _without_checksums(files):
    return tuple(dataclasses.replace(file, sha256=None) for file in files)


if __name__ == "__main__":
    which, *flags = sys.argv[1:]
    fetch_mnist.FILES = _without_checksums(fetch_mnist.FILES)
    for name, source in fetch_glue.SOURCES.items():
        files = _without_checksums(source.files)
        fetch_glue.SOURCES[name] = dataclasses.replace(source, files=files)
    sys.exit({"glue": fetch_glue, "mnist": fetch_mnist}[which].main(flags))
