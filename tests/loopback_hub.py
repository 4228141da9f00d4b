"""A model hub on 127.0.0.1 that serves saved models as revisions, as far as huggingface_hub and transformers ask."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class LoopbackHub:
    """Serves folders until its ``with`` block ends.

    Attributes:
        repositories: by hub id, the folder of every revision by name; ``main`` among them.
        tags: revisions that are listed as tags, not as branches.
        url: where it listens; the value of ``HF_ENDPOINT``.
        requests: (method, path) of every request so far.
    """

    def __init__(self, repositories: Mapping[str, Mapping[str, Path]], tags: tuple[str, ...] = ()) -> None:
        self.repositories = repositories
        self.tags = tags
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> LoopbackHub:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def commit(self, repository: str, revision: str) -> str | None:
        """What a revision points at: 40 hexadecimal digits made of its name; None where there is no such revision."""
        names = self.repositories[repository]
        by_commit = {hashlib.sha1(f"{repository}@{name}".encode()).hexdigest(): name for name in names}
        if revision in by_commit:
            return revision
        return next((commit for commit, name in by_commit.items() if name == revision), None)

    def folder(self, repository: str, revision: str) -> Path:
        """Of a revision by name or by commit."""
        names = self.repositories[repository]
        return next(
            folder for name, folder in names.items() if revision in (name, self.commit(repository, name) or name)
        )

    def downloads(self, name: str = "") -> list[str]:
        """Paths of the files that were sent whole and end in ``name``."""
        return [
            path for method, path in self.requests if method == "GET" and "/resolve/" in path and path.endswith(name)
        ]


def serve_in_this_process(monkeypatch, hub: LoopbackHub, cache: Path) -> None:
    """Point huggingface_hub and transformers, imported already, at a hub and at a cache of its own.

    They read their environment once, when imported; their functions read these constants at every call.
    """
    from huggingface_hub import constants, file_download
    from transformers.utils import hub as transformers_hub

    values = {
        "ENDPOINT": hub.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        # Of transformers 4; transformers 5 keeps one client, which keeps the address that it was made with.
        "TRANSFORMERS_CACHE": str(cache),
        "_hf_api": None,
    }
    for module in (constants, file_download, transformers_hub):
        for name in values.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, values[name])


def _handler(hub: LoopbackHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        # Of HTTP/1.0, the default: no connection stays open, so that a hub that has ended is a network that is down.
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            if path.startswith("/api/models/"):
                self._api(path.removeprefix("/api/models/"))
            elif "/resolve/" in path:
                repository, _, rest = path.strip("/").partition("/resolve/")
                self._file(repository, rest)
            else:
                self._send(404, b"{}")

        def _api(self, path: str) -> None:
            repository = next((one for one in hub.repositories if path == one or path.startswith(f"{one}/")), None)
            if repository is None:
                return self._missing("RepoNotFound", 401)
            what, _, rest = path.removeprefix(repository).strip("/").partition("/")
            if what == "refs":
                return self._json(self._refs(repository))
            revision = rest.split("/")[0] or "main"
            commit = hub.commit(repository, revision)
            if commit is None:
                return self._missing("RevisionNotFound", 404)
            files = sorted(file for file in hub.folder(repository, commit).iterdir() if file.is_file())
            if what == "tree":
                return self._json(
                    [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": ""} for f in files]
                )
            siblings = [{"rfilename": file.name} for file in files]
            return self._json(
                {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings, "tags": []}
            )

        def _refs(self, repository: str) -> dict[str, list[dict[str, str | None]]]:
            found: dict[str, list[dict[str, str | None]]] = {"branches": [], "tags": [], "converts": []}
            for name in hub.repositories[repository]:
                kind, prefix = ("tags", "refs/tags") if name in hub.tags else ("branches", "refs/heads")
                found[kind].append(
                    {"name": name, "ref": f"{prefix}/{name}", "targetCommit": hub.commit(repository, name)}
                )
            return found

        def _file(self, repository: str, rest: str) -> None:
            if repository not in hub.repositories:
                return self._missing("RepoNotFound", 401)
            revision, _, name = rest.rpartition("/")
            commit = hub.commit(repository, revision)
            if commit is None:
                return self._missing("RevisionNotFound", 404)
            file = hub.folder(repository, commit) / name
            if not file.is_file():
                return self._missing("EntryNotFound", 404, {"X-Repo-Commit": commit})
            content = file.read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            return self._send(200, content, {"X-Repo-Commit": commit, "ETag": f'"{tag}"'})

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _missing(self, code: str, status: int, headers: Mapping[str, str] | None = None) -> None:
            self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

        def _send(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """The tests print nothing."""

    return Handler
