"""A server that speaks what vLLM's speaks, over a bigram model, with faults on order."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch

from torchrl_llm.modules.backends import FakeBackend, OpenAIBackend, SamplingParams
from torchrl_llm.modules.backends.sampling import sampling_log_probs
from torchrl_llm.weights import vllm_extension

VOCAB = 40
FIVE = torch.tensor([5])


def connect(url, **options):
    """A backend of a fake server."""
    options = {"vocab_size": VOCAB, "eos_token_ids": (2,), "timeout_s": 10.0, **options}
    return OpenAIBackend(url, **options)


def ask(backend, *, prompt=FIVE, **options):
    """The responses to one prompt."""
    options = {"max_new_tokens": 4, "ignore_eos": True, **options}
    [completions] = backend.generate([prompt], SamplingParams(**options))
    return completions


class FakeServer:
    """Answers as vLLM 0.32 does; ``faults`` holds what the next requests meet instead.

    Attributes:
        faults: callables that take the request handler and return whether they answered it.
        requests: paths and bodies so far.
        keys: headers of authorization so far.
    """

    def __init__(self, *, vocab_size=VOCAB, max_length=4096, tokenizer=None, **options):
        self.backend = FakeBackend(
            vocab_size=vocab_size, eos_token_ids=(), max_length=max_length, tokenizer=tokenizer
        )
        self.options = {"processed": True, "max_logprobs": -1, "models": ["tiny"], **options}
        self.max_length = max_length
        self.faults = deque()
        self.requests = []
        self.keys = set()
        self.connections = 0
        self.busy = self.most_busy = 0
        self.version, self.paused = "default", False
        self.worker = Worker(self.backend.module)
        self.lock = threading.Lock()
        self.ended = threading.Event()

    # -- /v1/completions --------------------------------------------------------------------------

    def complete(self, body):
        if isinstance(body["prompt"], str):
            ids = self.backend.tokenizer.encode(body["prompt"], add_special_tokens=False)
            found = {"prompt_token_ids": ids} if self.options.get("returns_ids", True) else {}
            return 200, {"choices": [{"text": "", **found}]}
        prompt = torch.tensor(body["prompt"])
        with self.lock:
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
        try:
            time.sleep(self.options.get("work_s", 0.0))
            if len(prompt) + body["max_tokens"] > self.max_length:
                return 400, {"error": {"message": "longer than the maximum model length"}}
            return 200, {"choices": [self.choice(body, prompt)]}
        finally:
            with self.lock:
                self.busy -= 1

    def choice(self, body, prompt):
        ends = tuple(body.get("stop_token_ids", ())) + self.options.get("own_ends", ())
        params = SamplingParams(
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=body["top_k"],
            min_p=body["min_p"],
            repetition_penalty=body["repetition_penalty"],
            stop=tuple(body.get("stop", ())),
            stop_token_ids=ends,
            seed=body.get("seed"),
            ignore_eos=body["ignore_eos"],
        )
        [[found]] = self.backend.generate([prompt], params)
        ids = found.token_ids.tolist()
        log_probs = found.log_probs
        allowed = body.get("allowed_token_ids")
        if allowed is not None:
            assert len(allowed) == 1
            ids, log_probs = allowed * len(ids), torch.zeros(len(ids))
            found = found._replace(token_ids=torch.tensor(ids))
        if not self.options["processed"] or (params.greedy and params.repetition_penalty != 1):
            log_probs = self.distributions(torch.cat([prompt, found.token_ids]))
            log_probs = log_probs[len(prompt) - 1 :].gather(1, found.token_ids[:, None])[:, 0]
        choice = {
            "text": "...",
            "finish_reason": ("stop", "length")[int(found.finish_reason)],
            "stop_reason": ids[-1] if ids[-1] in ends else (body.get("stop") or [None])[0],
            "token_ids": ids,
            "prompt_token_ids": prompt.tolist(),
            "logprobs": None,
            "prompt_logprobs": None,
        }
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": log_probs.tolist()}
        if body.get("return_tokens_as_token_ids"):
            rows = self.distributions(torch.cat([prompt, found.token_ids]))[len(prompt) - 1 : -1]
            if not params.greedy:
                rows = sampling_log_probs(rows, params).clamp_min(-9999.0)
            count = body["logprobs"] if body["logprobs"] != -1 else rows.shape[1]
            tops = [
                body.get("logprob_token_ids") or row.topk(count).indices.tolist() for row in rows
            ]
            choice["logprobs"]["top_logprobs"] = [
                self.limited({f"token_id:{token}": row[token] for token in top})
                for row, top in zip(rows.tolist(), tops, strict=True)
            ]
        if body.get("prompt_logprobs") is not None:
            rows = self.distributions(prompt)[:-1]
            asked = body["prompt_logprobs"]
            choice["prompt_logprobs"] = [
                None,
                *(
                    self.limited(
                        {
                            str(token): {"logprob": row[token]}
                            for token in (range(len(row)) if asked == -1 else [own])
                        }
                    )
                    for row, own in zip(rows.tolist(), prompt[1:].tolist(), strict=True)
                ),
            ]
        return choice

    def distributions(self, ids):
        with torch.no_grad():
            return self.backend.logits([ids])[0].float().log_softmax(-1)

    def limited(self, entries):
        most = self.options["max_logprobs"]
        return entries if most == -1 else dict(list(entries.items())[:most])

    # -- the control plane ------------------------------------------------------------------------

    def control(self, path, body):
        name = path.partition("?")[0]
        if not self.options.get("dev_mode", True):
            return 404, {"detail": "Not Found"}
        if name == "/pause":
            self.paused = path.partition("mode=")[2]
        elif name == "/resume":
            self.paused = False
        elif name == "/is_paused":
            return 200, {"is_paused": bool(self.paused)}
        elif name == "/update_weight_version":
            self.version = body["new_version"]
        elif name == "/weight_info":
            return 200, {"weight_version": self.version}
        elif name == "/reset_prefix_cache":
            assert self.paused
        elif name == "/collective_rpc":
            try:
                return 200, {"results": [getattr(self.worker, body["method"])(*body["args"])]}
            except Exception:
                return 500, {"error": {"message": "Call to collective_rpc method failed:"}}
        else:
            return 404, {"detail": "Not Found"}
        return 200, {"success": True}

    def answer(self, path, body):
        if path == "/v1/models":
            more = self.options.get("card", {"max_model_len": self.max_length})
            cards = [{"id": model, **more} for model in self.options["models"]]
            return 200, {"data": cards}
        if path == "/health":
            return 200, ""
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/v1/chat/completions":
            return self.options["chat"](body)
        return self.control(path, body)

    @contextmanager
    def running(self):
        """The address, as long as the context lasts."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            fake = self
            disable_nagle_algorithm = True

            def setup(self):
                fake.connections += 1
                super().setup()

            def handle_one_request(self):
                try:
                    super().handle_one_request()
                except ConnectionError:
                    self.close_connection = True

            def do_POST(self):
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size)) if size else None
                with fake.lock:
                    fake.requests.append((self.path, body))
                    fake.keys.add(self.headers.get("Authorization"))
                    fault = fake.faults.popleft() if fake.faults else None
                if fault is not None and fault(self):
                    return
                self.send(*fake.answer(self.path, body))

            do_GET = do_POST

            def send(self, status, data, headers=()):
                content = data.encode() if isinstance(data, str) else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        server = Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            self.ended.set()
            server.shutdown()
            server.server_close()
            thread.join(10)


class Worker(vllm_extension.WeightReceiver):
    """A worker whose model is a plain module."""

    def __init__(self, module):
        engine = EngineModel(module)
        self.model_runner = SimpleNamespace(get_model=lambda: engine)


class EngineModel(torch.nn.Module):
    """Takes weights by name, as the models of vLLM do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def named_parameters(self):
        return self.module.named_parameters()

    def load_weights(self, weights):
        own, loaded = dict(self.named_parameters()), set()
        for name, value in weights:
            own[name].data.copy_(value)
            loaded.add(name)
        return loaded


def refuse(status, *, headers=(), data="busy"):
    """A fault: an answer with this status."""

    def fault(handler):
        handler.send(status, data, headers)
        return True

    return fault


def hang_up(handler):
    """A fault: the connection ends before there is an answer."""
    handler.close_connection = True
    handler.connection.close()
    return True


def sleep(seconds):
    """A fault: the answer comes late."""

    def fault(handler):
        # Whoever still sleeps when the server ends must not compute anything afterwards.
        if handler.fake.ended.wait(seconds):
            handler.close_connection = True
            return True
        return False

    return fault


def drip(seconds):
    """A fault: an answer whose bytes come one by one."""

    def fault(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(int(seconds / 0.05)):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
        handler.close_connection = True
        return True

    return fault
