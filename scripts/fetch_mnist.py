"""Downloads MNIST's four files: 60,000 images of digits to train, 10,000 to test.

    python scripts/fetch_mnist.py --data_dir mnist

creates the folder mnist, ready for `--data_dir=mnist` of distributed/main.py. Downloads
are verified, the folder appears only when it is complete, and an existing one is not
changed. Exit codes: 0; 1 if a download fails or is damaged; 2 for invalid flags.
"""

import argparse
import pathlib
import shutil
import sys

from bert_finetune import download
from bert_finetune.download import RemoteFile
from estimator_accum.programs.command_line import exit_code_of

# The copy that tensorflow/datasets downloads.
OFFICIAL_URL = "https://storage.googleapis.com/cvdf-datasets/mnist"
TERMS = "MNIST: LeCun et al. 1998; http://yann.lecun.com/exdb/mnist/"

# The checksums are those on record in tensorflow/datasets (url_checksums/mnist.txt).
FILES = tuple(
    RemoteFile(f"{OFFICIAL_URL}/{name}-ubyte.gz", sha256)
    for name, sha256 in (
        (
            "train-images-idx3",
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        (
            "train-labels-idx1",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        (
            "t10k-images-idx3",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        (
            "t10k-labels-idx1",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    )
)


def main(argv: list[str] | None = None) -> int:
    """Fetches the files and returns the exit code."""
    parser = download.make_parser(__doc__, OFFICIAL_URL, "the four files")
    parser.add_argument("--data_dir", type=pathlib.Path, help="folder of the files")
    args = parser.parse_args(argv)
    return exit_code_of(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    files = download.on_mirror(FILES, OFFICIAL_URL, args.base_url)
    if args.list:
        print(TERMS, *(f"    {file.url}" for file in files), sep="\n")
        return
    if args.data_dir is None:
        raise ValueError(
            "`--data_dir` must name a folder. Received: none. Use --data_dir=mnist, "
            "or --list to see what there is."
        )
    names = [file.name for file in files]
    if download.is_complete(args.data_dir, names):
        print(f"MNIST: already in {args.data_dir}")
        return
    print(TERMS)
    with download.staging_folder(args.data_dir) as staging:
        for path in download.obtain(files, args.archive, staging):
            shutil.copyfile(path, staging / "content" / path.name)
    print(f"MNIST: {', '.join(names)} in {args.data_dir}")


if __name__ == "__main__":
    sys.exit(main())
