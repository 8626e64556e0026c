"""Fetching published files: GLUE, BERT's zips, MNIST; damage, attempts, messages."""

import hashlib
import pathlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from bert_finetune import download, fetch_bert, fetch_glue
from bert_finetune.tasks import TASKS, get_task, read_examples
from scripts import fetch_mnist
from tests.helpers.processes import running
from tests.helpers.processes.local_server import (
    LocalServer,
    content_of,
    forget_checksums,
    make_zip,
)

pytestmark = pytest.mark.once
_COLA = {
    "train.tsv": "x\t1\t\tThe book.\nx\t0\t*\tBook the.\n",
    "dev.tsv": "x\t1\t\tThe boat.\n",
    "test.tsv": "index\tsentence\n0\tThe cook.\n",
}
_COLA_ZIP = make_zip(_COLA, "CoLA/")
_BERT = {"bert_config.json": "{}", "vocab.txt": "[PAD]\n"}
_BERT |= {f"bert_model.ckpt.{end}": end for end in ("index", "data-00000-of-00001")}
_TINY = "uncased_L-2_H-128_A-2"
_MNIST = {file.name: f"content of {file.name}" for file in fetch_mnist.FILES}
_KINDS = ("matched", "mismatched")


class Fetcher(NamedTuple):
    """One fetching program, and the files that a made-up server publishes for it.

    Attributes:
        main: Its entry.
        flags: Flags with which it fetches everything into `folder`.
        published: Addresses -> contents.
        folder: Where the files go.
        files: Names in the folder -> contents.
        terms: Words of the terms that it prints.
    """

    main: Callable
    flags: list[str]
    published: dict[str, bytes]
    folder: pathlib.Path
    files: dict[str, str]
    terms: str


@pytest.fixture
def fetchers(server, tmp_path, monkeypatch) -> dict[str, Fetcher]:
    """The three programs; the checksums of made-up files replace the published ones."""
    forget_checksums(monkeypatch, fetch_glue.SOURCES)
    sums = [hashlib.sha256(content.encode()).hexdigest() for content in _MNIST.values()]
    files = zip(fetch_mnist.FILES, sums, strict=True)
    monkeypatch.setattr(
        fetch_mnist,
        "FILES",
        tuple(replace(file, sha256=checksum) for file, checksum in files),
    )
    url, new = f"--base_url={server.url}", tmp_path / "new"
    return {
        "glue": Fetcher(
            fetch_glue.main,
            [f"{url}/", f"--data_dir={new}", "--tasks=cola"],
            {"/glue/data/CoLA.zip": _COLA_ZIP},
            new / "CoLA",
            _COLA,
            "CoLA: Warstadt et al. 2018; research use; https://nyu-mll",
        ),
        "bert": Fetcher(
            fetch_bert.main,
            [url, f"--output_dir={new}", f"--model={_TINY}"],
            {f"/2020_02_20/{_TINY}.zip": make_zip(_BERT, f"{_TINY}/")},
            new / _TINY,
            _BERT,
            f"{_TINY}: Google Research; Apache 2.0",
        ),
        "mnist": Fetcher(
            fetch_mnist.main,
            [url, f"--data_dir={new / 'mnist'}"],
            {f"/{name}": text.encode() for name, text in _MNIST.items()},
            new / "mnist",
            _MNIST,
            "MNIST: LeCun et al. 1998",
        ),
    }


@pytest.fixture(params=["glue", "bert", "mnist"])
def fetcher(fetchers, request) -> Fetcher:
    return fetchers[request.param]


@pytest.fixture
def glue(fetchers, call, server) -> Callable[..., running.Done]:
    """Fetches CoLA, which the server publishes."""
    server.files |= fetchers["glue"].published
    return lambda *more: call(fetchers["glue"].main, *fetchers["glue"].flags, *more)


def test_published_files_become_the_folder(fetcher, call, server, tmp_path):
    server.files |= fetcher.published
    done = call(fetcher.main, *fetcher.flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert fetcher.terms in done.stdout
    assert content_of(fetcher.folder) == fetcher.files
    assert [*fetcher.folder.parent.iterdir()] == [fetcher.folder]
    (tmp_path / "usual").touch()  # pooch's temporary files are the user's alone
    paths = [tmp_path / "usual", *fetcher.folder.iterdir()]
    assert len({path.stat().st_mode for path in paths}) == 1
    again = call(fetcher.main, *fetcher.flags)
    assert f": already in {fetcher.folder}\n" in again.stdout
    assert len(server.requests) == len(fetcher.published)


def test_files_from_disk_need_no_network(fetcher, call, refusal, server, tmp_path):
    (tmp_path / "by_hand").mkdir()
    paths = []
    for address, content in fetcher.published.items():
        paths.append(tmp_path / "by_hand" / address.rpartition("/")[2])
        paths[-1].write_bytes(content)
    missing = refusal(fetcher.main, *fetcher.flags, "--archive", *paths, "no")
    assert "`--archive` must name " in missing
    done = call(fetcher.main, *fetcher.flags, "--archive", *paths)
    assert (done.returncode, done.stderr) == (0, "")
    assert content_of(fetcher.folder) == fetcher.files
    assert all(path.exists() for path in paths) and server.requests == []


def _without_a_file(whole: bytes) -> bytes:
    files = _BERT if b"vocab" in whole else _COLA
    return make_zip(dict(list(files.items())[1:]))


_ZIPS, _UNDAMAGED = ("glue", "bert"), r"\.zip must be an undamaged zip file\. Received:"


@pytest.mark.parametrize(
    ("names", "damage", "pattern"),
    [
        (
            ("glue", "bert", "mnist"),
            None,
            "could not be .*: 404 .*By hand: .* --archive ",
        ),
        (("mnist",), lambda data: data + b"!", r"must have the SHA-256 \w+\. Received"),
        (("glue",), lambda data: data.replace(b"boat.", b"goat."), "Bad CRC-32"),
        (_ZIPS, lambda data: data[:-40], f"{_UNDAMAGED} File is not a zip"),
        (_ZIPS, lambda _: b"<html>Log in.</html>", f"{_UNDAMAGED} File is not a zip"),
        (_ZIPS, _without_a_file, "must hold .* in .*: a zip file without "),
    ],
)
def test_damage_leaves_nothing(fetchers, refusal, server, names, damage, pattern):
    for name in names:
        main, flags, published, *_ = fetchers[name]
        *whole, (address, last) = published.items()
        server.files = dict(whole) | ({address: damage(last)} if damage else {})
        assert re.search(pattern, refusal(main, *flags, code=1)), name


@pytest.mark.parametrize("name", _ZIPS)
def test_a_damaged_file_from_disk_is_the_users_mistake(
    fetchers, refusal, tmp_path, name
):
    (tmp_path / "some.zip").write_bytes(b"no zip")
    flags = [*fetchers[name].flags, f"--archive={tmp_path / 'some.zip'}"]
    assert re.search(_UNDAMAGED, refusal(fetchers[name].main, *flags))


def test_without_a_network_the_sentence_names_every_file(fetcher, refusal):
    with LocalServer() as closed:
        flags = [*fetcher.flags, f"--base_url={closed.url}"]
    names = " ".join(address.rpartition("/")[2] for address in fetcher.published)
    said = refusal(fetcher.main, *flags, code=1)
    assert re.search(rf"could not be .*refused.* --archive {names}\.", said)


def test_a_missing_package_is_named(fetcher, refusal, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    said = refusal(fetcher.main, *fetcher.flags)
    assert "pooch must be installed. Received: none. Run pip install 'estim" in said


def test_an_incomplete_folder_is_left_alone(fetcher, refusal, server):
    fetcher.folder.mkdir(parents=True)
    first, *others = fetcher.files
    (fetcher.folder / first).write_text("mine")
    said = refusal(fetcher.main, *fetcher.flags)
    assert f"or not exist. Received: one without {', '.join(others)}. R" in said
    assert server.requests == []


@pytest.mark.parametrize(
    ("main", "address", "count"),
    [
        (fetch_glue.main, "https://dl.fbaipublicfiles.com/", 11),
        (fetch_bert.main, "https://storage.googleapis.com/bert_models/", 33),
        (fetch_mnist.main, "https://storage.googleapis.com/cvdf-datasets/mnist/", 4),
    ],
)
def test_list_shows_official_addresses(call, main, address, count):
    addresses = re.findall(rf"{address}\S+", call(main, "--list").stdout)
    assert len(addresses) == len(set(addresses)) == count


def test_every_file_with_a_published_checksum_has_it():
    assert set(fetch_glue.SOURCES) == {task.name for task in TASKS}
    files = [file for source in fetch_glue.SOURCES.values() for file in source.files]
    for file in [*files, *fetch_mnist.FILES]:
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)


@pytest.mark.parametrize("from_disk", [False, True])
def test_another_checksum_than_the_published_one_is_refused(
    refusal, server, tmp_path, from_disk
):
    whole, flags = make_zip(_COLA, "CoLA/"), [f"--base_url={server.url}"]
    server.files["/glue/data/CoLA.zip"] = whole
    (tmp_path / "CoLA.zip").write_bytes(whole)
    flags += [f"--archive={tmp_path / 'CoLA.zip'}"] * from_disk
    flags += [f"--data_dir={tmp_path / 'new'}", "--tasks=CoLA"]
    said = refusal(fetch_glue.main, *flags, code=2 if from_disk else 1)
    received = r".*\w{64}" if from_disk else "another one"
    assert re.search(
        rf"the SHA-256 f212fcd832b8\w{{52}}\. Received: {received}\.", said
    )


def test_published_test_files_of_mnist_have_the_checksums(real_data):
    for file in fetch_mnist.FILES[2:]:
        content = (real_data / "mnist" / file.name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == file.sha256


@pytest.mark.parametrize("name", ["glue", "bert"])
def test_misspelt_flag_leaves_with_code_2_and_one_sentence(name):
    done = running.run("-m", "estimator_accum", "fetch", name, "--lisst")
    assert done.returncode == 2
    assert done.stderr == (
        f"estimator-accum fetch {name}: Flags must be those of --help. Received: "
        "--lisst. Did you mean --list?\n"
    )


@pytest.mark.parametrize(
    ("main", "flags", "sentence"),
    [
        (fetch_bert, "", "`--model` must be a .* name. Received: none. Use --list"),
        (fetch_bert, "--model=a/b/c --output_dir=a", "`--model` must be a .*: a/b/c,"),
        (fetch_bert, "--model=b --output_dir=a --archive=c", "`--archive` .*ived: b. "),
        (fetch_bert, f"--model={_TINY}", "`--output_dir` must name a fold"),
        (fetch_glue, "--tasks=CoLA", "`--data_dir` must name a folder. Rec.*: none"),
        (fetch_glue, "--tasks=CoLA --data_dir=file/a", ".*file.*': Not a directory"),
        (fetch_glue, "--tasks=ax", "`--tasks` must be one of CoLA, .*: 'ax'."),
        (fetch_glue, "--data_dir=a --archive=b", "be for one task. R.*: 9 tasks"),
        (fetch_glue, "--base_url=ftp://a", "`--base_url` must be an http.*'ftp:"),
        (fetch_mnist, "", "`--data_dir` must name a folder. Received: none. "),
    ],
)
def test_an_unfit_flag_is_refused(
    main, flags, sentence, tmp_path, monkeypatch, refusal
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert re.search(sentence, refusal(main.main, *flags.split()))


# GLUE's tasks


def test_every_task_is_fetched_from_its_own_address(fetchers, call, server, tmp_path):
    zips = {"QQP": "QQP-clean.zip", "QNLI": "QNLIv2.zip"}
    for name in sorted({task.name for task in TASKS} - {"MRPC"}):
        task = get_task(name)
        names = [task.train_file, *task.dev_files.values(), *task.test_files.values()]
        files = {file: f"{file} of {name}" for file in names}
        zip_name = zips.get(name, f"{name}.zip")
        server.files[f"/glue/data/{zip_name}"] = make_zip(files, f"{name}/")
    _serve_mrpc(server)
    flags = [f"--base_url={server.url}", f"--data_dir={tmp_path / 'glue'}"]
    assert call(fetch_glue.main, *flags).returncode == 0
    folders = {path.name for path in (tmp_path / "glue").iterdir()}
    assert folders == {task.name for task in TASKS}
    pairs = [f"{part}_{kind}" for part in ("dev", "test") for kind in _KINDS]
    names = {f"{name}.tsv" for name in ["train", *pairs]}
    assert set(content_of(tmp_path / "glue" / "MNLI")) == names
    assert content_of(tmp_path / "glue" / "MRPC") == {
        "train.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        '1\t10\t11\tIt "fell.\tIt sank.\n1\t30\t31\tIt rose.\tIt flew.\n',
        "dev.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        "0\t20\t21\tIt fell.\tIt rose.\n",
        "test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        "0\t40\t41\tIt is.\tIt was.\n1\t50\t51\tIt is.\tIt is not.\n",
    }


def _serve_mrpc(server):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    server.files["/senteval/senteval_data/msr_paraphrase_train.txt"] = (
        f'{header}1\t10\t11\tIt "fell.\tIt sank.\r\n0\t20\t21\tIt fell.\tIt rose.\r\n'
        "1\t30\t31\tIt rose.\tIt flew.\r\n"
    ).encode()
    server.files["/senteval/senteval_data/msr_paraphrase_test.txt"] = (
        f"{header}1\t40\t41\tIt is.\tIt was.\r\n0\t50\t51\tIt is.\tIt is not.\r\n"
    ).encode()
    server.files["/glue/data/mrpc_dev_ids.tsv"] = b"20\t21\n99\t98\n"


def test_a_fetched_task_can_be_read_and_a_failure_keeps_it(glue, fetchers):
    folder = fetchers["glue"].folder
    assert glue("--tasks=CoLA,RTE").returncode == 1
    assert [path.name for path in folder.parent.iterdir()] == ["CoLA"]
    examples = read_examples(get_task("cola"), folder, "train.tsv", labelled=True)
    assert [example.label for example in examples] == [1, 0]


# Downloads that fail


def test_nothing_is_left_of_a_download_that_ends_early(glue, fetchers, server):
    server.bytes_withheld = len(_COLA_ZIP) - 100
    assert re.search("could not be downloaded: .*100 bytes read", glue().stderr)
    assert not fetchers["glue"].folder.parent.exists()


def test_a_process_that_was_killed_leaves_nothing_in_the_way(glue, fetchers):
    left = fetchers["glue"].folder.parent / ".CoLA.part" / "content"
    left.mkdir(parents=True)
    (left / "train.tsv").touch()
    assert glue().returncode == 0
    assert [*fetchers["glue"].folder.parent.iterdir()] == [fetchers["glue"].folder]


@pytest.mark.parametrize("errors", [[503, 429, 500], [503] * 4])
def test_a_failed_download_is_tried_again_three_times(glue, fetchers, server, errors):
    is_fetched = len(errors) < 4
    server.errors = list(errors)
    assert glue().returncode == (0 if is_fetched else 1)
    assert len(server.requests) == 4
    assert fetchers["glue"].folder.parent.exists() == is_fetched


def test_ctrl_c_ends_a_download_without_a_rest(glue, fetchers, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("pooch.HTTPDownloader.__call__", interrupt)
    done = glue()
    assert (done.returncode, done.stderr) == (
        130,
        "estimator-accum fetch glue: stopped by Ctrl-C\n",
    )
    assert not fetchers["glue"].folder.parent.exists()


def test_two_processes_do_not_fetch_the_same_files(fetcher, refusal):
    with download.staging_folder(fetcher.folder):
        said = refusal(fetcher.main, *fetcher.flags)
        assert re.search(
            r"of one run at a time\. .*\.part, in which .* since .*\. Wait", said
        )
