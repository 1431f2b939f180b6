"""Servers of chat completions that behave as a test says; what they were asked is kept."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ChatHandler(BaseHTTPRequestHandler):
    """Keeps each request; a subclass says what is answered."""

    protocol_version = "HTTP/1.1"

    def reply(self, body):
        """Status, content (bytes, or what becomes JSON) and further headers."""
        raise NotImplementedError

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers.get("Authorization"), body))
        status, content, headers = self.reply(body)
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextmanager
def chat_server(handler):
    """Serve on loopback; ``never`` is set at the end, for those who wait."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *args: None  # clients that gave up
    server.requests, server.never = [], threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.never.set()
        server.shutdown()
        server.server_close()
