"""A web server on this machine that publishes made-up files, for tests of fetching."""

import contextlib
import dataclasses
import http.server
import io
import threading
import zipfile


class LocalServer(http.server.ThreadingHTTPServer):
    """Serves `files` (path -> content); records the requested paths."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files = {}
        self.requests = []
        self.bytes_withheld = 0  # missing in every answer, but counted in its header


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
        files = tuple(dataclasses.replace(each, sha256=None) for each in source.files)
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
