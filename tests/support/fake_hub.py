"""A hub of models on this machine: a folder's files over the routes that `huggingface_hub` uses."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(name: str, folder: Path) -> Iterator[str]:
    """Serves the folder as the model `name`; yields the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, name, folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Hub(BaseHTTPRequestHandler):
    def __init__(self, name: str, folder: Path, *arguments: object) -> None:
        self._name = name
        self._folder = folder
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        api, content = f"/api/models/{self._name}", f"/{self._name}/resolve/{_COMMIT}/"
        if path == f"{api}/tree/{_COMMIT}":
            self._send(json.dumps(self._files()).encode())
        elif path.startswith(api):
            self._send(json.dumps({"id": self._name, "sha": _COMMIT}).encode())
        elif path.startswith(content):
            self._send((self._folder / path.removeprefix(content)).read_bytes())
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Writes nothing."""

    def _files(self) -> list[dict[str, object]]:
        return [
            {
                "type": "file",
                "path": file.name,
                "size": file.stat().st_size,
                "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
            }
            for file in sorted(self._folder.iterdir())
            if file.is_file()
        ]

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", _COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
