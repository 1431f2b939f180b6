"""A hub of one process: the few addresses that a client calls to make a repository and commit."""

import base64
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

TOKEN = "hf_secretsecretsecretsecretsecret"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Say nothing."""

    def _body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status, content=None):
        body = json.dumps({} if content is None else content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self._answer(404)

    def do_PUT(self):
        self.server.seen.blobs[self.path.rpartition("/")[2]] = self._body()
        self._answer(200)

    def do_POST(self):
        seen, body = self.server.seen, self._body()
        host = f"http://127.0.0.1:{self.server.server_port}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials"})
        elif self.path == "/api/repos/create":
            made = json.loads(body)
            if made["organization"] != "ann":
                self._answer(403, {"error": "Forbidden"})
                return
            seen.created.append(made)
            self._answer(200, {"url": f"{host}/{made['organization']}/{made['name']}"})
        elif self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path.startswith("/api/models/ann/adder/branch/"):
            branch = self.path.rpartition("/branch/")[2]
            self._answer(409 if branch in seen.branches else 200)
            seen.branches.add(branch)
        elif re.fullmatch("/api/models/ann/adder/preupload/[^/]+", self.path):
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif self.path == "/ann/adder.git/info/lfs/objects/batch":
            objects = [
                {
                    "oid": each["oid"],
                    "size": each["size"],
                    "actions": {"upload": {"href": f"{host}/lfs/{each['oid']}"}},
                }
                for each in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif re.fullmatch("/api/models/ann/adder/commit/[^/]+", self.path):
            if (branch := self.path.rpartition("/")[2]) not in seen.branches:
                self._answer(404, {"error": f"no branch {branch}"})
                return
            seen.committed_to.append(branch)
            commit = {}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    commit[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    commit[value["path"]] = seen.blobs[value["oid"]]
            seen.commits.append(commit)
            self._answer(200, {"commitUrl": f"{host}/ann/adder/commit/0", "commitOid": "0"})
        else:
            self._answer(404, {"error": self.path})


@contextmanager
def serve():
    """The hub, with ``address`` and what arrived: ``created``, ``commits`` and ``blobs``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    server.seen = SimpleNamespace(
        address=address, created=[], commits=[], blobs={}, branches={"main"}, committed_to=[]
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(address, token=TOKEN):
    """Variables for a process whose hub this is."""
    return {
        "HF_ENDPOINT": address,
        "HF_TOKEN": token,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",  # whose protocol is not spoken here
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
