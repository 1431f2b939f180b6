"""What the gateway costs: a call over HTTP beside one of the backend, and how full an engine stays.

    python test/benchmarks/bench_gateway.py

The first rows compare CPU time of this process: 64 tokens of the embedded model by a call of the
gateway (chat completions, its client is another process), and by ``backend.generate``, for one
client and for 16 at a time. The last figures are how full an engine is that takes 4 seconds for at
most 256 rows: 256 programs of two calls with a tool between them, on a plain client and on
OpenAI's, beside 256 rows of a ChatEnv that does the same with a tool of ours. Full is an engine
that always has 256 rows. The programs run on the same cores: what their clients take is part of it.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import compare, report

from torchrl_llm.agents import ProgramAgent
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.envs import CalculatorEnv
from torchrl_llm.gateway import Formatters, GatewaySession, PolicyEngine
from torchrl_llm.gateway.app import make_app
from torchrl_llm.gateway.server import GatewayServer
from torchrl_llm.modules import FakeWrapper, TransformersWrapper, load_model, load_tokenizer
from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.modules.backends.fake import FakeBackend

TOKENS, ROWS, CALL_S = 64, 256, 4.0
MESSAGES = [{"role": "user", "content": "What is 12+13?"}]
CLIENT = """
import http.client, json, sys, threading
port, calls, clients = map(int, sys.argv[1:4])
body = json.dumps({"model": "policy", "messages": json.loads(sys.argv[4])})
def run():
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for _ in range(calls // clients):
        connection.request("POST", "/v1/chat/completions", body, {"authorization": "Bearer k"})
        connection.getresponse().read()
threads = [threading.Thread(target=run) for _ in range(clients)]
[each.start() for each in threads], [each.join() for each in threads]
"""
TOOLS = """
import json
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {
    "type": "object", "properties": {"expression": {"type": "string"}}}}}]
def told(call):
    result = str(eval(json.loads(call["function"]["arguments"])["expression"]))
    return {"role": "tool", "tool_call_id": call["id"], "content": result}
"""
OPENAI = (
    TOOLS
    + """
async def run(row, client):
    messages, create = list(row["messages"]), client.chat.completions.create
    answer = await create(model="policy", messages=messages, tools=TOOLS)
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    messages.append(told(messages[-1]["tool_calls"][0]))
    await create(model="policy", messages=messages, tools=TOOLS)
"""
)
PLAIN = (
    TOOLS
    + """
import asyncio
async def run(row, base_url, api_key):
    host, port = base_url.split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    messages = list(row["messages"])
    for turn in range(2):
        body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\\r\\nhost: {host}\\r\\n"
        head += f"authorization: Bearer {api_key}\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n"
        writer.write(head.encode() + body)
        head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower().decode()
        size = int(head.partition("content-length: ")[2].split()[0])
        message = json.loads(await reader.readexactly(size))["choices"][0]["message"]
        if not turn:
            messages += [message, told(message["tool_calls"][0])]
    writer.close()
"""
)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+2"}}\n</tool_call>'


class SlowBackend(FakeBackend):
    """Takes as long for a call of one row as for one of all."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.answered = 0

    def generate(self, prompts, params):
        self.answered += len(prompts)
        time.sleep(CALL_S)
        return super().generate(prompts, params)


def costs(calls=64):
    tokenizer = load_tokenizer()
    arguments = {"max_new_tokens": TOKENS, "ignore_eos": True}
    policy = TransformersWrapper(load_model(), tokenizer=tokenizer, generate_kwargs=arguments)
    ids = policy.formatter.encode(MESSAGES).token_ids
    params = SamplingParams(**arguments)
    engine = PolicyEngine(policy)
    session = GatewaySession(engine, Formatters(tokenizer), max_answers=1000)
    rows = []
    with engine, GatewayServer(make_app(lambda key: session)) as server:
        for clients, aim in ((1, "<= 1.10"), (16, "none")):
            settings = [str(server.port), str(calls), str(clients), str(MESSAGES).replace("'", '"')]
            rows.append(
                compare(
                    f"{calls} calls of {TOKENS} tokens, {clients} at a time",
                    lambda words=settings: subprocess.run(
                        [sys.executable, "-c", CLIENT, *words], check=True
                    ),
                    lambda n=clients: [
                        policy.backend.generate([ids] * n, params) for _ in range(calls // n)
                    ],
                    aim=aim,
                    pairs=5,
                )
            )
    return rows


def fullness(make_env, waves=3):
    tokenizer = load_tokenizer()
    rule = lambda prompt: "4" if "tool" in prompt.rsplit("<|im_start|>", 2)[-2] else CALL  # noqa: E731
    backend = SlowBackend(rule, tokenizer=tokenizer)
    policy = FakeWrapper(backend, tokenizer=tokenizer)
    env = make_env(CalculatorEnv(num_envs=ROWS, tokenizer=tokenizer), policy)
    collector = LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, reset_at_each_iter=True
    )
    collector.rollout()  # processes and imports
    backend.answered, begun = 0, time.perf_counter()
    for _ in range(waves):
        collector.rollout()
    full = (time.perf_counter() - begun) / CALL_S * ROWS
    collector.shutdown()
    return backend.answered / full


def main() -> None:
    torch.set_num_threads(1)
    report(costs())
    rows = fullness(lambda env, policy: env)
    print(f"an engine with {ROWS} rows of a ChatEnv is full by {rows:.3f}")
    for name, text in (("a plain client", PLAIN), ("OpenAI's client", OPENAI)):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "program.py")
            path.write_text(text)
            agent = ProgramAgent(program=f"{path}:run")
            full = fullness(lambda env, policy, a=agent: a.wrap(env, policy, show_tools=False))
        print(f"with programs on {name}: {full:.3f}, ratio {full / rows:.3f}   aim >= 0.95")


if __name__ == "__main__":
    main()
