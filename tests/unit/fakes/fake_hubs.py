"""Both hubs on loopback, enough for their real client libraries, and every way to misbehave.

Hugging Face: `/api/models/ID[/revision/REV][?blobs]`, `/api/models/ID/tree/REV`, and
`HEAD|GET /ID/resolve/REV/PATH`, which sends large files on to a "CDN" (another host name, as the
real one), with ETag, X-Linked-ETag, X-Linked-Size and X-Repo-Commit.
ModelScope: `/api/v1/models/ID/repo/files`, `/revisions` and `/repo?Revision=&FilePath=`; a revision
that is not there is answered 200 with an empty listing, and small files ignore Range, as the real
one does.

A `Hub` counts every body byte it sent, by path, and keeps every request that it got.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

REPO = "owner/model"
PIECE = 16 << 10
SMALL = 2048  # smaller files are in git, larger ones are in large-file storage


def commit_of(files: dict[str, bytes]) -> str:
    """A commit's name, from its content."""
    whole = b"".join(
        k.encode() + b"\0" + hashlib.sha1(v).digest() for k, v in sorted(files.items())
    )
    return hashlib.sha1(whole).hexdigest()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Trouble:
    """How the bytes of one file go wrong; `times`: for so many requests, then never again."""

    kind: str  # cut, flip, short, long, page, 404, 401, 403, 500, 416, held, gzip
    after: int = 0  # bytes
    times: int = 10**9


@dataclass
class Hub:
    """What the hub holds, how it errs, and what it was asked."""

    files: dict[str, bytes]
    branch: str = "main"
    repo: str = REPO
    trouble: dict[str, Trouble] = field(default_factory=dict)
    hashes: bool = True  # whether the listing tells checksums
    sizes: bool = True  # whether the listing tells sizes
    lengths: bool = True  # whether answers carry a Content-Length (otherwise: chunks)
    ranges: bool = True
    heeds_if_range: bool = True
    etags: dict[str, str] = field(default_factory=dict)
    listing_status: int = 200
    wants: str | None = None  # the only token that is let in
    at_commit: dict[str, dict[str, bytes]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    on_listing: Any = None  # called after each listing
    url: str = ""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.go_on = threading.Event()  # what is "held" waits for it
        self.sending = 0
        self.commit(self.files)

    def commit(self, files: dict[str, bytes]) -> str:
        """Move the branch to these files."""
        self.files = files
        name = commit_of(files)
        self.at_commit[name] = dict(files)
        return name

    @property
    def head(self) -> str:
        return commit_of(self.files)

    def tree(self, revision: str | None) -> dict[str, bytes] | None:
        if revision in (None, "", self.branch):
            return self.files
        return self.at_commit.get(str(revision))

    def struck(self, path: str) -> Trouble | None:
        with self.lock:
            trouble = self.trouble.get(path)
            if trouble is None or trouble.times <= 0:
                return None
            trouble.times -= 1
            return trouble

    def bodies(self) -> int:
        return sum(self.sent.values())

    def quiet(self) -> None:
        """Wait until no body is on its way, so that `sent` is final."""
        limit = time.monotonic() + 60
        while self.sending:
            assert time.monotonic() < limit, "a body is still being sent"
            time.sleep(0.005)

    def requests(self, part: str) -> list[dict[str, str]]:
        """Headers of the requests whose address holds `part`."""
        return [headers for _, path, headers in self.asked if part in path]

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # clients that are killed hang up; that is what the tests are about

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, pattern: str, *values: object) -> None:
        pass

    # -- answers -----------------------------------------------------------------------------

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value: Any, status: int = 200, **headers: str) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        path = unquote(url.path)
        with self.hub.lock:
            self.hub.asked.append((self.command, self.path, dict(self.headers)))
        if path.startswith("/cdn/"):
            commit, _, name = path.removeprefix("/cdn/").partition("/")
            self.body(name, self.hub.at_commit[commit][name], large=True)
        elif path == "/":
            self.answer(200)
        elif self.locked():
            pass
        elif path.startswith("/api/v1/"):
            self.modelscope(path, query)
        elif path.startswith("/api/models/"):
            self.huggingface(path, query)
        elif "/resolve/" in path:
            self.resolve(url.path)
        else:
            self.answer(404)

    def locked(self) -> bool:
        hub = self.hub
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if hub.wants is None or given == hub.wants:
            return False
        said = "Invalid credentials in Authorization header" if given else "Access is restricted"
        self.json({"error": said, "Message": said}, 401, X_Error_Message=said)
        return True

    # -- Hugging Face ------------------------------------------------------------------------

    def huggingface(self, path: str, query: dict[str, str]) -> None:
        hub, rest = self.hub, path.removeprefix("/api/models/")
        if not rest.startswith(hub.repo):
            self.json({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            return
        if hub.listing_status != 200:
            self.json({"error": "no"}, hub.listing_status)
            return
        kind, _, revision = rest.removeprefix(hub.repo).strip("/").partition("/")
        files = hub.tree(revision or None)
        if files is None:
            self.json({"error": "Invalid rev id"}, 404, X_Error_Code="RevisionNotFound")
            return
        entries = [self.entry(name, data) for name, data in files.items()]
        if kind == "tree":
            self.json([{"type": "file", "path": e.pop("rfilename"), **e} for e in entries])
            return
        if "blobs" not in query:
            entries = [{"rfilename": e["rfilename"]} for e in entries]
        self.json(
            {"id": hub.repo, "modelId": hub.repo, "sha": commit_of(files), "siblings": entries}
        )
        if hub.on_listing:
            hub.on_listing()

    def entry(self, name: str, data: bytes) -> dict[str, Any]:
        made: dict[str, Any] = {"rfilename": name}
        if self.hub.sizes:
            made["size"] = len(data)
        if not self.hub.hashes:
            return made
        made["blobId"] = git_sha1(data)
        if len(data) > SMALL:
            digest = hashlib.sha256(data).hexdigest()
            made["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
        return made

    def resolve(self, path: str) -> None:
        hub = self.hub
        _, _, after = path.partition("/resolve/")
        revision, _, quoted = after.partition("/")
        name, files = unquote(quoted), hub.tree(unquote(revision))
        if files is None or name not in files:
            code = "RevisionNotFound" if files is None else "EntryNotFound"
            self.answer(404, X_Error_Code=code)
            return
        data, commit = files[name], commit_of(files)
        if self.refuses(name):
            return
        if len(data) <= SMALL:
            self.body(name, data, large=False, X_Repo_Commit=commit)
            return
        self.answer(
            302,
            Location=f"http://localhost:{hub.port}/cdn/{commit}/{quote(name)}?signature=s3cret",
            ETag=f'"{hashlib.sha256(data).hexdigest()}"',
            X_Linked_ETag=f'"{hashlib.sha256(data).hexdigest()}"',
            X_Linked_Size=str(len(data)),
            X_Repo_Commit=commit,
        )

    # -- ModelScope --------------------------------------------------------------------------

    def modelscope(self, path: str, query: dict[str, str]) -> None:
        hub = self.hub
        prefix = f"/api/v1/models/{hub.repo}"
        if not path.startswith(prefix):
            self.json({"Code": 10010205001, "Message": "not found", "Success": False}, 404)
        elif path == f"{prefix}/revisions":
            self.data({"RevisionMap": {"Branches": [{"Revision": "master"}], "Tags": []}})
        elif path == f"{prefix}/repo/files":
            if hub.listing_status != 200:
                self.json({"Code": 1, "Message": "no", "Success": False}, hub.listing_status)
                return
            revision = query.get("Revision")
            files = hub.tree(None if revision == "master" else revision)
            self.data({"Files": files and self.entries(files), "LatestCommitter": None})
            if hub.on_listing:
                hub.on_listing()
        elif path == f"{prefix}/repo":
            revision, name = query.get("Revision"), query.get("FilePath", "")
            files = hub.tree(None if revision == "master" else revision)
            if files is None or name not in files:
                self.json({"Code": 10990101007, "Message": "no such file", "Success": False}, 404)
            elif self.refuses(name):
                pass
            elif len(files[name]) > SMALL:
                where = (
                    f"http://localhost:{hub.port}/cdn/{commit_of(files)}/{quote(name)}?sig=s3cret"
                )
                self.answer(302, Location=where)
            else:
                self.body(name, files[name], large=False, ranges=False)
        else:
            self.json({"Code": 1, "Message": "no such address", "Success": False}, 404)

    def data(self, value: Any) -> None:
        self.json({"Code": 200, "Data": value, "Message": "success", "Success": True})

    def entries(self, files: dict[str, bytes]) -> list[dict[str, Any]]:
        folders = sorted({n.rpartition("/")[0] for n in files} - {""})
        rows: list[dict[str, Any]] = [
            {"Path": name, "Name": name, "Type": "tree", "Size": 0} for name in folders
        ]
        for number, (name, data) in enumerate(files.items()):
            rows.append(
                {
                    "Path": name,
                    "Name": name.rpartition("/")[2],
                    "Type": "blob",
                    **({"Size": len(data)} if self.hub.sizes else {}),
                    **({"Sha256": hashlib.sha256(data).hexdigest()} if self.hub.hashes else {}),
                    "IsLFS": len(data) > SMALL,
                    "Revision": commit_of(files),
                    "CommittedDate": 1_790_000_000 + number,
                }
            )
        return rows

    # -- bytes -------------------------------------------------------------------------------

    def refuses(self, name: str) -> bool:
        """Troubles of the hub itself, before any redirect."""
        trouble = self.hub.trouble.get(name)
        if trouble is None or not trouble.kind.isdecimal() or trouble.kind == "416":
            return False
        if self.hub.struck(name) is None:
            return False
        self.answer(int(trouble.kind), b"no", Retry_After="0")
        return True

    def body(
        self, name: str, data: bytes, *, large: bool, ranges: bool = True, **headers: str
    ) -> None:
        hub = self.hub
        etag = hub.etags.get(name, f'"{hashlib.md5(data).hexdigest()}"')
        asked = self.headers.get("Range", "") if ranges and hub.ranges else ""
        if hub.heeds_if_range and self.headers.get("If-Range", etag) != etag:
            asked = ""
        trouble = hub.struck(name)
        kind = trouble.kind if trouble else ""
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        if asked and (start >= len(data) or kind == "416"):
            self.answer(416, Content_Range=f"bytes */{len(data)}")
            return
        if kind == "page":
            self.page()
            return
        if kind == "flip":
            spoiled = bytearray(data)
            spoiled[trouble.after] ^= 1
            data = bytes(spoiled)
        if kind == "short":
            data = data[: trouble.after]
        if kind == "long":
            data += b"x" * trouble.after
        self.send_response(206 if asked else 200)
        self.send_header("ETag", etag)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if kind == "gzip":
            self.send_header("Content-Encoding", "gzip")
        body = data[start:]
        chunked = not hub.lengths
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        with hub.lock:
            hub.sending += 1
        try:
            self.pieces(name, body, trouble, chunked)
        finally:
            with hub.lock:
                hub.sending -= 1

    def page(self) -> None:
        """A sign-in page; without `lengths` in chunks, as such pages mostly come."""
        page, told = b"<!DOCTYPE html><html>Sign in</html>", "text/html; charset=utf-8"
        if self.hub.lengths:
            self.answer(200, page, Content_Type=told)
            return
        self.send_response(200)
        self.send_header("Content-Type", told)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(page), page))

    def pieces(self, name: str, body: bytes, trouble: Trouble | None, chunked: bool) -> None:
        kind = trouble.kind if trouble else ""
        limit = trouble.after if trouble and kind in ("cut", "held") else len(body)
        for position in range(0, len(body), PIECE):
            if kind == "held" and position >= limit:
                self.hub.go_on.wait(60)
            piece = body[position : min(position + PIECE, limit if kind == "cut" else len(body))]
            if piece:
                self.piece(name, piece, chunked)
            if kind == "cut" and position + PIECE >= limit:
                self.close_connection = True
                self.connection.close()
                return
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def piece(self, name: str, piece: bytes, chunked: bool) -> None:
        head = b"%x\r\n" % len(piece) if chunked else b""
        try:
            self.wfile.write(head + piece + (b"\r\n" if chunked else b""))
            self.wfile.flush()
        except OSError:
            self.close_connection = True
            raise
        with self.hub.lock:
            self.hub.sent[name] += len(piece)
