"""A model hub on this machine: as much of its protocol as the ordinary client needs to read and push repositories.

Files are served from ``root/models/OWNER/NAME`` and ``root/datasets/OWNER/NAME``, and pushed to there. What a client
asked for is kept in ``requests`` as ``(method, path, status)``, what it pushed in ``pushes`` as ``(message, paths)``.
"""

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_API = re.compile(r"/api/(?P<type>models|datasets)/(?P<repo>[^/]+/[^/]+)(?:/(?P<verb>[a-z-]+)/(?P<rest>.+))?")
_FILE = re.compile(r"(?:/(?P<type>datasets))?/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class Hub(ThreadingHTTPServer):
    """Serves repositories below a directory, from a thread, while it is used as a context manager."""

    daemon_threads = True

    def __init__(self, root):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = Path(root)
        self.requests = []
        self.pushes = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self.shutdown()
        self._thread.join()
        self.server_close()

    def served(self, method="GET"):
        """Paths of files that were sent."""
        return [path for asked, path, status in self.requests if asked == method and status == 200]


def commit_of(repo):
    """The only commit that a repository has."""
    return hashlib.sha1(repo.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer()

    do_HEAD = do_GET

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        self._answer(self.rfile.read(length))

    def log_message(self, *args):
        pass

    def _answer(self, body=None):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._send_json(None, {"errors": [], "warnings": []})
        elif match := _API.fullmatch(path):
            self._answer_api(body, **match.groupdict())
        elif match := _FILE.fullmatch(path):
            self._answer_file(**match.groupdict())
        else:
            self._send(404, b"", error="EntryNotFound")

    def _folder(self, type, repo, revision):
        """The directory of a repository; if there is none, the client has been told so."""
        folder = self.server.root / (type or "models") / repo
        if not folder.is_dir():
            self._send(404, b"", error="RepoNotFound")
        elif revision not in ("main", commit_of(repo)):
            self._send(404, b"", error="RevisionNotFound")
        else:
            return folder
        return None

    def _create(self, asked):
        repo = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
        (self.server.root / "models" / repo).mkdir(parents=True, exist_ok=True)
        self._send_json(repo, {"url": f"{self.server.url}/{repo}"})

    def _commit(self, folder, repo, body):
        """Takes the files of a push; none of them goes by way of large file storage."""
        lines = [json.loads(line) for line in body.splitlines()]
        files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
        assert len(files) == len(lines) - 1, "only added files are understood"
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(base64.b64decode(content))
        self.server.pushes.append((lines[0]["value"]["summary"], sorted(files)))
        url = f"{self.server.url}/{repo}/commit/{commit_of(repo)}"
        self._send_json(repo, {"commitUrl": url, "commitOid": commit_of(repo)})

    def _answer_api(self, body, type, repo, verb, rest):
        revision, _, inner = (rest or "main").partition("/")
        folder = self._folder(type, repo, revision)
        if folder is None:
            return
        if verb in (None, "revision"):
            siblings = [
                {"rfilename": entry["path"]} for entry in _tree(folder, folder, True) if entry["type"] == "file"
            ]
            info = {"id": repo, "sha": commit_of(repo), "private": False, "tags": [], "siblings": siblings}
            self._send_json(repo, info)
        elif verb == "tree" and (folder / inner).is_dir():
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            recursive = query.get("recursive", ["false"])[0].lower() == "true"
            self._send_json(repo, _tree(folder, folder / inner, recursive))
        elif verb == "preupload":
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            self._send_json(repo, {"files": [{"path": f["path"], **modes} for f in json.loads(body)["files"]]})
        elif verb == "commit":
            self._commit(folder, repo, body)
        elif verb == "paths-info" and body is not None:
            form = urllib.parse.parse_qs(body.decode())
            paths = [folder / path for path in form.get("paths", [])]
            self._send_json(repo, [_entry(folder, path) for path in paths if path.exists()])
        else:
            self._send(404, b"", error="EntryNotFound", repo=repo)

    def _answer_file(self, type, repo, revision, file):
        folder = self._folder(type, repo, revision)
        if folder is None:
            return
        if not (folder / file).is_file():
            self._send(404, b"", error="EntryNotFound", repo=repo)
            return
        content = (folder / file).read_bytes()
        self._send(200, content, repo=repo, etag=hashlib.sha1(content).hexdigest())

    def _send_json(self, repo, value):
        self._send(200, json.dumps(value).encode(), repo=repo, kind="application/json")

    def _send(self, status, content, error=None, repo=None, etag=None, kind="application/octet-stream"):
        self.server.requests.append((self.command, self.path, status))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if error is not None:
            self.send_header("X-Error-Code", error)
        if repo is not None:
            self.send_header("X-Repo-Commit", commit_of(repo))
        if etag is not None:
            self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _tree(folder, start, recursive):
    paths = start.rglob("*") if recursive else start.iterdir()
    return [_entry(folder, path) for path in sorted(paths)]


def _entry(folder, path):
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
    content = path.read_bytes()
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
