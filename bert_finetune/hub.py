"""Encoders of Hugging Face's hub, in the cache that its own library keeps.

`HF_ENDPOINT`, `HF_HUB_OFFLINE`, `HF_HOME` and `HF_TOKEN` have the meaning that
`huggingface_hub` gives them.
"""

import os
import pathlib
from collections.abc import Callable

import huggingface_hub

# HTTPError: requests' or httpx's, whichever this version of the library is built on.
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from bert_finetune.download import root_cause, sha256_of, wrong_checksum
from bert_finetune.hf_names import (
    CONFIG,
    OPTIONAL_FILES,
    TENSORS,
    TOKENIZER,
    VOCABULARY,
)
from estimator_accum.programs.command_line import FetchError

_FILES = f"{CONFIG}, {VOCABULARY} or {TOKENIZER}, and {TENSORS}"
_SHA256_DIGITS = 64
# RuntimeError: the hub's own transfer protocol, which is not written in Python.
_NETWORK_ERRORS = (HTTPError, OSError, RuntimeError)
_REFUSED = (
    "Other formats are refused: a pickle such as pytorch_model.bin can run any code "
    "while it is read."
)


def endpoint() -> str:
    """Returns the address of the hub."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def check_name(model: str) -> None:
    """Raises ValueError unless a model on the hub may have this name."""
    try:
        validate_repo_id(model)
    except HFValidationError as error:
        raise ValueError(
            _must_be_there(model, "which no model can be called")
        ) from error


def obtain(
    model: str, remedy: str, check_config: Callable[[pathlib.Path], object]
) -> pathlib.Path:
    """Returns a folder with the model's files, all of one commit.

    Args:
        model: Name on the hub, such as `bert-base-uncased`.
        remedy: Sentence for a model without `model.safetensors`.
        check_config: Function of `config.json`, called before the weights come, which
            raises ValueError for another model than a BERT.

    Raises:
        FetchError: If the hub is out of reach, or a download fails.
        ValueError: If there is no such model, or it lacks a file.
    """
    huggingface_hub.logging.set_verbosity_error()  # no lines about each attempt
    config = _obtain(model, CONFIG, "main", remedy)
    check_config(config)
    folder = config.parent
    has_vocabulary = _has(model, VOCABULARY, folder.name)
    files = [name for name in OPTIONAL_FILES if _has(model, name, folder.name)]
    if not has_vocabulary and TOKENIZER not in files:
        raise ValueError(_must_have_files(model, VOCABULARY, remedy))
    _obtain(model, TENSORS, folder.name, remedy)
    return folder


def _has(model: str, name: str, revision: str) -> bool:
    """Returns whether the model has a file, which is in the cache then."""
    cached = huggingface_hub.try_to_load_from_cache(model, name, revision=revision)
    if cached is not None and not isinstance(cached, str):  # known to be absent
        return False
    try:
        _obtain(model, name, revision)
    except EntryNotFoundError:
        return False
    return True


def _obtain(
    model: str, name: str, revision: str, remedy: str | None = None
) -> pathlib.Path:
    """Returns a file in the cache; raises EntryNotFoundError without a `remedy`."""
    try:
        path = _download(model, name, revision)
    except RepositoryNotFoundError as error:
        reason = "which is not there, or is for users who have logged in"
        raise ValueError(_must_be_there(model, reason)) from error
    except LocalEntryNotFoundError as error:  # neither on the hub nor in the cache
        raise _out_of_reach(model, error) from error
    except EntryNotFoundError as error:
        if remedy is None:
            raise
        raise ValueError(_must_have_files(model, name, remedy)) from error
    except _NETWORK_ERRORS as error:
        raise _out_of_reach(model, error) from error
    _check_sum(path)
    return path


def _download(model: str, name: str, revision: str) -> pathlib.Path:
    return pathlib.Path(
        huggingface_hub.hf_hub_download(
            model, name, revision=revision, endpoint=endpoint()
        )
    )


def _check_sum(path: pathlib.Path) -> None:
    """Verifies a large file, whose name in the cache is its published SHA-256."""
    content = path.resolve()
    if len(content.name) == _SHA256_DIGITS and sha256_of(content) != content.name:
        content.unlink()
        raise wrong_checksum(path.name, content.name)


def _out_of_reach(model: str, error: BaseException) -> FetchError:
    return FetchError(
        f"{model}, which --list does not show, could not be downloaded from "
        f"{endpoint()}: {root_cause(error)}. By hand: download {_FILES} from "
        f"{endpoint()}/{model} into a folder, and convert that with "
        "`estimator-accum import`."
    )


def _must_be_there(model: str, reason: str) -> str:
    return (
        "`--model` must be a name that --list shows, or the name of a BERT on "
        f"{endpoint()}. Received: {model}, {reason}. Check its spelling; for a private "
        "model set HF_TOKEN."
    )


def _must_have_files(model: str, name: str, remedy: str) -> str:
    is_weights = name == TENSORS
    return f"{endpoint()}/{model} must have {_FILES}. Received: no {name}. " + (
        f"{_REFUSED} {remedy}" if is_weights else "Use the name of a BERT."
    )
