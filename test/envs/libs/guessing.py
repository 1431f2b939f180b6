"""The guessing game of ``guessing_server.py`` behind a server of our own with the same protocol."""

from __future__ import annotations

import json
import threading
import time
from http import HTTPStatus

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response
from websockets.sync.server import serve

SCHEMA = {
    "action": {
        "type": "object",
        "properties": {
            "metadata": {"type": "object"},
            "guess": {"type": "integer", "title": "Guess"},
        },
        "required": ["guess"],
    },
    "observation": {},
    "state": {},
}


class GuessingServer:
    """Serves until it is closed; ``url`` says where."""

    def __init__(self, max_sessions=64):
        self.max_sessions = max_sessions
        self.open = set()
        self._lock = threading.Lock()
        self._server = serve(self._handle, "127.0.0.1", 0, process_request=self._http)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"

    @staticmethod
    def _http(connection, request):
        if request.path == "/ws":
            return None
        body = json.dumps(SCHEMA).encode()
        found = request.path == "/schema"
        status = HTTPStatus.OK if found else HTTPStatus.NOT_FOUND
        headers = Headers({"Content-Length": str(len(body)), "Connection": "close"})
        return Response(status.value, status.phrase, headers, body)

    def _handle(self, connection):
        with self._lock:
            full = len(self.open) >= self.max_sessions
            if not full:
                self.open.add(connection)
        if full:
            data = {"message": "too many", "code": "CAPACITY_REACHED"}
            connection.send(json.dumps({"type": "error", "data": data}))
            return
        episode = {"number": 0, "step_count": 0, "episode_id": None}
        try:
            for raw in connection:
                message = json.loads(raw)
                if message["type"] == "close":
                    break
                reply = self._reply(connection, message, episode)
                connection.send(json.dumps(reply) if isinstance(reply, dict) else reply)
        except ConnectionClosed:
            pass
        finally:
            self.open.discard(connection)

    def _reply(self, connection, message, episode):
        if message["type"] == "reset":
            options = message["data"]
            episode.update(number=(options.get("seed") or 0) % 10, step_count=0)
            return _observation("Guess a number from 0 to 9.", None, False)
        if message["type"] == "state":
            return {"type": "state", "data": {"step_count": episode["step_count"]}}
        guess = message["data"].get("guess")
        if not isinstance(guess, int):
            errors = [{"loc": ["guess"], "msg": "Input should be a valid integer"}]
            return _error("Invalid message", "VALIDATION_ERROR", errors=errors)
        episode["step_count"] += 1
        if guess == 13:
            return _error("thirteen!", "EXECUTION_ERROR")
        if guess == 99:
            time.sleep(5)
        if guess == 666:
            connection.close()
        if guess == 1000:
            return "this is no JSON"
        if guess == 1001:
            return {"type": "poem", "data": {}}
        if guess == 1002:
            return _observation("not a number", float("nan"), False)
        if guess == 1003:
            return {"type": "observation", "data": {"observation": "text", "done": False}}
        right = guess == episode["number"]
        hint = "Right." if right else "Higher." if guess < episode["number"] else "Lower."
        return _observation(hint, 1.0 if right else -0.25, right)

    def close(self):
        self._server.shutdown()
        for connection in list(self.open):
            connection.close()
        self._thread.join(5)


def _observation(hint, reward, done):
    data = {"observation": {"hint": hint}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def _error(text, code, **more):
    return {"type": "error", "data": {"message": text, "code": code, **more}}
