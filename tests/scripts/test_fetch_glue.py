"""Fetching GLUE: files, checksums, and error messages."""

import functools
import re

import pytest

from bert_finetune import download, fetch_glue, receiving
from bert_finetune.tasks import TASKS, get_task, read_examples
from estimator_accum.runs.command_line import FetchError
from tests.helpers import running
from tests.helpers.local_server import (
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

_KINDS = ("matched", "mismatched")


@pytest.fixture
def no_checksums(monkeypatch):
    """Removes the checksums, which made-up files cannot have."""
    forget_checksums(monkeypatch, fetch_glue.SOURCES)


@pytest.fixture
def flags(server, tmp_path):
    return [f"--base_url={server.url}/", f"--data_dir={tmp_path / 'glue'}"]


@pytest.fixture
def glue(call, flags, no_checksums):
    """Runs fetch_glue against the server."""
    return functools.partial(call, fetch_glue.main, *flags)


@pytest.fixture
def refused(refusal, flags):
    """Runs fetch_glue, which must fail with this code and message and leave nothing."""

    def run(code, pattern, *more):
        assert re.search(pattern, refusal(fetch_glue.main, *flags, *more, code=code))

    return run


def test_glue_zip_becomes_the_tasks_folder(glue, server, tmp_path):
    server.files["/glue/data/CoLA.zip"] = make_zip(_COLA, "CoLA/")
    done = glue("--tasks=cola")
    assert (done.returncode, done.stderr) == (0, "")
    assert "CoLA: Warstadt et al. 2018; research use; https://nyu-mll" in done.stdout
    assert content_of(tmp_path / "glue" / "CoLA") == _COLA
    assert [path.name for path in (tmp_path / "glue").iterdir()] == ["CoLA"]
    folder = tmp_path / "glue" / "CoLA"
    examples = read_examples(get_task("cola"), folder, "train.tsv", labelled=True)
    assert [example.label for example in examples] == [1, 0]
    done = glue("--tasks=CoLA")
    assert done.output == f"CoLA: already in {tmp_path / 'glue' / 'CoLA'}\n"
    assert server.requests == ["/glue/data/CoLA.zip"]


def test_every_task_is_fetched_from_its_own_address(glue, server, tmp_path):
    zips = {"QQP": "QQP-clean.zip", "QNLI": "QNLIv2.zip"}
    for name in ("CoLA", "SST-2", "QQP", "MNLI", "QNLI", "RTE", "WNLI"):
        task = get_task(name)
        names = [task.train_file, *task.dev_files.values(), *task.test_files.values()]
        files = {file: f"{file} of {name}" for file in names}
        zip_name = zips.get(name, f"{name}.zip")
        server.files[f"/glue/data/{zip_name}"] = make_zip(files, f"{name}/")
    _serve_mrpc(server)
    assert glue().returncode == 0
    folders = {path.name for path in (tmp_path / "glue").iterdir()}
    assert folders == {task.name for task in TASKS}
    pairs = [f"{part}_{kind}" for part in ("dev", "test") for kind in _KINDS]
    names = {f"{name}.tsv" for name in ["train", *pairs]}
    assert set(content_of(tmp_path / "glue" / "MNLI")) == names


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


def test_mrpc_is_split_as_glue_splits_it(glue, server, tmp_path):
    _serve_mrpc(server)
    assert "MRPC: Dolan and Brockett 2005; Micro" in glue("--tasks=MRPC").stdout
    assert content_of(tmp_path / "glue" / "MRPC") == {
        "train.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        '1\t10\t11\tIt "fell.\tIt sank.\n1\t30\t31\tIt rose.\tIt flew.\n',
        "dev.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        "0\t20\t21\tIt fell.\tIt rose.\n",
        "test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        "0\t40\t41\tIt is.\tIt was.\n1\t50\t51\tIt is.\tIt is not.\n",
    }


def test_incomplete_folder_is_left_alone(refused, server, tmp_path):
    folder = tmp_path / "glue" / "CoLA"
    folder.mkdir(parents=True)
    (folder / "train.tsv").write_text("mine")
    sentence = "must hold .* not exist. Received: one without dev.tsv, test.tsv. Remove"
    refused(2, sentence, "--tasks=CoLA")
    assert server.requests == []


def test_other_checksum_than_the_published_one_is_refused(refused, server):
    server.files["/glue/data/CoLA.zip"] = make_zip(_COLA, "CoLA/")
    sentence = r"/CoLA.zip must have the SHA-256 f212fcd832b8\w{52}\. Received: \w{64}"
    refused(1, sentence, "--tasks=CoLA")


def _without_dev(_):
    files = {name: text for name, text in _COLA.items() if name != "dev.tsv"}
    return make_zip(files, "CoLA/")


_UNDAMAGED = r"CoLA\.zip must be an undamaged zip file\. Received: "
_NO_ZIP = f"{_UNDAMAGED}File is not a zip file"
_INCOMPLETE = "hold train.tsv, dev.tsv, test.tsv in .*: a zip file without dev.tsv."


@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (lambda whole: whole.replace(b"boat.", b"goat."), f"{_UNDAMAGED}Bad CRC-32"),
        (lambda whole: whole[:-40], _NO_ZIP),
        (lambda _: b"<html>Please log in.</html>", _NO_ZIP),
        (_without_dev, _INCOMPLETE),
    ],
)
def test_damaged_zip_leaves_nothing(refused, no_checksums, server, damage, pattern):
    server.files["/glue/data/CoLA.zip"] = damage(make_zip(_COLA, "CoLA/"))
    refused(1, pattern, "--tasks=CoLA")


def test_missing_page_names_address_and_what_to_do(refused, server):
    address = f"{server.url}/glue/data/CoLA.zip"
    by_hand = f"By hand: download {address} anywhere and run .* --archive CoLA.zip"
    said = f"{address} could not be downloaded: HTTP Error 404: Not Found. {by_hand}"
    refused(1, said, "--tasks=CoLA")


def test_without_a_network_the_sentence_names_every_file(refused):
    with LocalServer() as closed:
        url = f"--base_url={closed.url}"
    files = "msr_paraphrase_train.txt msr_paraphrase_test.txt mrpc_dev_ids.tsv."
    refused(1, f"could not be .*refused.* --archive {files}", "--tasks=MRPC", url)


_COLA_ZIP = make_zip(_COLA, "CoLA/")


@pytest.fixture
def cut_off(glue, server, tmp_path):
    """A download whose first bytes have arrived: (what was said, unfinished file)."""
    server.files["/glue/data/CoLA.zip"] = _COLA_ZIP
    server.bytes_withheld = len(_COLA_ZIP) - 100
    done = glue("--tasks=CoLA")
    assert done.returncode == 1
    server.bytes_withheld = 0
    (part,) = (tmp_path / "glue" / ".CoLA.part").iterdir()
    return done, part


def test_download_that_ends_early_is_resumed_by_the_same_command(
    glue, server, tmp_path, cut_off
):
    done, part = cut_off
    size = part.stat().st_size
    assert part.read_bytes() == _COLA_ZIP[:size]
    assert f"it ended after {size} of {len(_COLA_ZIP)} bytes. The same" in done.stderr
    assert f"command resumes after {size} bytes. By hand: " in done.stderr
    before = len(server.requests)
    assert glue("--tasks=CoLA").returncode == 0
    assert len(server.requests) == before + 1
    assert server.ranges[-1] == f"bytes={size}-"
    assert content_of(tmp_path / "glue" / "CoLA") == _COLA
    assert [path.name for path in (tmp_path / "glue").iterdir()] == ["CoLA"]


@pytest.mark.parametrize("is_whole_only", [True, False])
def test_what_cannot_be_resumed_is_downloaded_from_the_start(
    server, tmp_path, is_whole_only
):
    server.files["/file"] = b"content"
    server.is_whole_only = is_whole_only
    path = tmp_path / "file"
    path.write_bytes(b"other" if is_whole_only else b"another content")
    receiving.receive(f"{server.url}/file", path, "")
    assert path.read_bytes() == b"content"


def test_what_had_arrived_stays_after_ctrl_c(glue, server, tmp_path, monkeypatch):
    class Interrupted(receiving.tqdm):
        def update(self, n=1):
            raise KeyboardInterrupt

    server.files["/glue/data/CoLA.zip"] = _COLA_ZIP
    monkeypatch.setattr(receiving, "tqdm", Interrupted)
    done = glue("--tasks=CoLA")
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")
    (part,) = (tmp_path / "glue" / ".CoLA.part").iterdir()
    assert part.read_bytes() == _COLA_ZIP


def test_what_had_arrived_goes_when_the_files_come_from_disk(glue, tmp_path, cut_off):
    archive = tmp_path / "CoLA.zip"
    archive.write_bytes(_COLA_ZIP)
    assert glue("--tasks=CoLA", f"--archive={archive}").returncode == 0
    assert [path.name for path in (tmp_path / "glue").iterdir()] == ["CoLA"]


@pytest.mark.parametrize(
    ("errors", "requests"), [([503, 429, 500], 4), ([503] * 4, 4), ([403], 1)]
)
def test_errors_that_may_pass_are_tried_again_three_times(
    glue, server, tmp_path, errors, requests
):
    server.files["/glue/data/CoLA.zip"] = _COLA_ZIP
    is_fetched = len(errors) < requests
    server.errors = list(errors)
    assert glue("--tasks=CoLA").returncode == (0 if is_fetched else 1)
    assert len(server.requests) == requests
    assert list(tmp_path.rglob("*.tsv")) or not is_fetched
    assert (tmp_path / "glue").exists() == is_fetched


def test_pauses_grow_between_attempts(monkeypatch, tmp_path):
    pauses = []
    monkeypatch.setattr(receiving.time, "sleep", pauses.append)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with LocalServer() as closed:
        url = f"{closed.url}/file"
    with pytest.raises(FetchError, match=r"refused.*\. By hand\.$"):
        receiving.receive(url, tmp_path / "file", "By hand.")
    assert pauses == [1, 2, 4]


def test_two_processes_do_not_fetch_the_same_files(glue, refused, tmp_path):
    with download.staging_folder(tmp_path / "glue" / "CoLA"):
        refused(2, r"\.CoLA\.part must be of one process .*\. Wait", "--tasks=CoLA")


def test_failure_keeps_what_was_complete(glue, server, tmp_path):
    server.files["/glue/data/CoLA.zip"] = make_zip(_COLA, "CoLA/")
    assert glue("--tasks=CoLA,RTE").returncode == 1
    assert [path.name for path in (tmp_path / "glue").iterdir()] == ["CoLA"]


def test_archive_replaces_the_network(glue, server, tmp_path):
    archive = tmp_path / "from a friend.zip"
    archive.write_bytes(make_zip(_COLA, "CoLA/"))
    assert glue("--tasks=CoLA", "--archive", archive).returncode == 0
    assert content_of(tmp_path / "glue" / "CoLA") == _COLA
    assert archive.exists()
    assert server.requests == []


def test_archives_of_mrpc_are_recognized_by_name(glue, refused, server, tmp_path):
    _serve_mrpc(server)
    paths = []
    for address in sorted(server.files):
        paths.append(tmp_path / address.rpartition("/")[2])
        paths[-1].write_bytes(server.files[address])
    sentence = "`--archive` must name msr_paraphrase_train.txt and "
    refused(2, sentence, "--tasks=MRPC", "--archive", *paths[:2])
    assert glue("--tasks=MRPC", "--archive", *paths).returncode == 0
    assert server.requests == []


def test_damaged_archive_is_the_users_mistake(refused, no_checksums, tmp_path):
    archive = tmp_path / "CoLA.zip"
    archive.write_bytes(b"no zip")
    refused(2, _UNDAMAGED, "--tasks=CoLA", f"--archive={archive}")


def test_archive_of_another_checksum_is_refused(refused, server, tmp_path):
    archive = tmp_path / "CoLA.zip"
    archive.write_bytes(make_zip(_COLA, "CoLA/"))
    address = f"{server.url}/glue/data/CoLA.zip"
    said = rf"what is published at {address}, .* f212\w{{60}}\. Rec.* with \w{{64}}\."
    refused(2, said, "--tasks=CoLA", f"--archive={archive}")


@pytest.mark.parametrize("name", ["glue", "bert"])
def test_misspelt_flag_leaves_with_code_2_and_one_sentence(name):
    done = running.run("-m", "estimator_accum", "fetch", name, "--lisst")
    assert done.returncode == 2
    sentence = f"fetch_{name}.py: unrecognized arguments: --lisst. Try --help.\n"
    assert done.stderr == sentence


def test_list_of_glue_shows_official_addresses_and_terms(call):
    stdout = call(fetch_glue.main, "--list").stdout
    for task in TASKS:
        assert f"{task.name}: {fetch_glue.SOURCES[task.name].terms}\n" in stdout
    assert "https://dl.fbaipublicfiles.com/glue/data/QNLIv2.zip" in stdout
    assert stdout.count("https://dl.fbaipublicfiles.com/") == 10


def test_every_glue_file_has_a_checksum():
    assert set(fetch_glue.SOURCES) == {task.name for task in TASKS}
    for source in fetch_glue.SOURCES.values():
        for file in source.files:
            assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
