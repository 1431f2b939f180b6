"""A small site on loopback, with pages that are kind, slow, huge and hostile."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

INDEX = """<title>Shop</title><h1>Welcome</h1><p>The secret number is 4711.</p>
<a id=two href=/two>second page</a> <a id=blank target=_blank href=/two>new window</a>
<a id=out href="{elsewhere}/stolen">elsewhere</a> <a id=file href="file:///etc/passwd">file</a>
<a id=hang href=/hang>slow</a> <a id=zip href=/zip>download</a> <a id=none href=/204>nothing</a>
<form action=/found><input name=q><button>go</button></form>
<img src="{elsewhere}/picture"><iframe src="{elsewhere}/frame"></iframe>
<script>
fetch("{elsewhere}/fetched").catch(() => 0);
new WebSocket("{elsewhere}/socket".replace("http", "ws"));
document.cookie = "seen=1";
</script>"""
LIAR = """<title>Liar</title>honest words<script>
const lie = () => "lie"; String.prototype.slice = lie;
Object.defineProperty(HTMLElement.prototype, "innerText", {get: lie});
</script>"""
LOOP = "<title>Loop</title>before<script>setTimeout(() => { for (;;); }, 300)</script>"


class Site:
    """Pages on a port of loopback; ``elsewhere`` is the same server under another name, or given.

    ``asked`` lists what was asked for under the other name.
    """

    def __init__(self, address="127.0.0.1", elsewhere=None):
        site, self.asked, self.over = self, [], threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                site.answer(self)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer((address, 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.host = f"{address}:{self.port}"
        self.url = f"http://{self.host}"
        self.elsewhere = elsewhere or f"http://localhost:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request):
        path = request.path.partition("?")[0]
        if request.headers["Host"] != self.host:
            self.asked.append(path)
        if path == "/hang":
            self.over.wait(120)
            return
        status, headers = 200, {"Content-Type": "text/html; charset=utf-8"}
        if path == "/redirect":
            status, headers = 302, {"Location": f"{self.elsewhere}/stolen"}
        elif path == "/204":
            status = 204
        elif path == "/zip":
            headers = {"Content-Type": "application/zip"}
        elif path == "/missing":
            status = 404
        body = {
            "/": INDEX.replace("{elsewhere}", self.elsewhere),
            "/two": "<title>Two</title>the second page",
            "/found": f"<title>Found</title>asked for {request.path}",
            "/loop": LOOP,
            "/liar": LIAR,
            "/huge": "<title>Huge</title><pre>" + "0123456789" * 1_000_000 + "</pre>",
            "/plain": "plain words",
            "/cookie": "<script>document.write('cookie: ' + document.cookie)</script>",
            "/stolen": "stolen",
        }.get(path, "nothing here" if status == 404 else "")
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body.encode())

    def close(self):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


def names_of_this_machine():
    """Names of the file of hosts, and the addresses by which others reach this machine."""
    lines = [line.partition("#")[0].split() for line in Path("/etc/hosts").read_text().splitlines()]
    names = {name for line in lines for name in line[1:] if not name.startswith("ip6-")}
    for family, far in ((socket.AF_INET, "192.0.2.77"), (socket.AF_INET6, "2001:db8::77")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((far, 9))  # nothing is sent
            except OSError:
                continue
            address = probe.getsockname()[0]
            names.add(f"[{address}]" if ":" in address else address)
    return names


def leads_to(monkeypatch, names):
    """Let names of this process lead to addresses, as those of a name server do."""
    ours = socket.getaddrinfo

    def lookup(host, *args, **kwargs):
        return ours(names.get(host, host), *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
