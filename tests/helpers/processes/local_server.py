"""A web server on this machine that publishes made-up files, for tests of fetching."""

import contextlib
import dataclasses
import hashlib
import http.server
import io
import threading
import zipfile


class LocalServer(http.server.ThreadingHTTPServer):
    """Serves `files` (path -> content); records the requested paths.

    `headers` go with every answer, beside an ETag, and `errors` are the answers to the
    next requests.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files = {}
        self.requests = []
        self.bytes_withheld = 0  # missing in every answer, but counted in its header
        self.headers = {}
        self.errors = []


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        content = self._start_answer()
        self.wfile.write(content[: max(0, len(content) - self.server.bytes_withheld)])

    def do_HEAD(self):
        self._start_answer()

    def _start_answer(self) -> bytes:
        """Sends the header; returns the body that a GET sends after it."""
        server = self.server
        server.requests.append(self.path)
        content = server.files.get(self.path)
        if server.errors or content is None:
            return self._end_header(server.errors.pop(0) if server.errors else 404, b"")
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self._end_header(200, content, ETag=etag)

    def _end_header(self, code: int, content: bytes, **headers: str) -> bytes:
        self.send_response(code)
        headers["Content-Length"] = str(len(content))
        for name, value in {**self.server.headers, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        return content

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def running_server():
    with LocalServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def forget_checksums(monkeypatch, sources: dict) -> None:
    """Removes the checksums of `sources`, which made-up files cannot have."""
    for name, source in sources.items():
        files = tuple(dataclasses.replace(file, sha256=None) for file in source.files)
        monkeypatch.setitem(sources, name, dataclasses.replace(source, files=files))


def make_zip(files, folder=""):
    """Returns a zip like the publishers', which has other files too."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:  # uncompressed, so easy to damage
        archive.writestr(f"__MACOSX/{folder}._train.tsv", "rubbish")
        archive.writestr("../escaped.tsv", "rubbish")
        for name, text in files.items():
            archive.writestr(f"{folder}{name}", text)
            archive.writestr(f"{folder}original/{name}", "rubbish")
    return content.getvalue()


def content_of(folder):
    """Returns the files of a folder: name -> text."""
    return {path.name: path.read_text() for path in folder.iterdir()}
