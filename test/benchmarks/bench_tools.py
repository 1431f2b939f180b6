"""Tool calls of a batch beside the same calls one after another.

64 calls, one a conversation, that sleep 50 ms (threads), and 64 that compute (processes), through
``ToolExecutor``; then a whole step of ``ToolTransform`` with a tool that takes no time, beside that
of ``ChatEnv`` alone.

    python test/benchmarks/bench_tools.py
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import time
from pathlib import Path

from tensordict import TensorDict

from torchrl_llm.data.history import History
from torchrl_llm.envs import ChatEnv
from torchrl_llm.tools import (
    FunctionTool,
    HermesParser,
    ProcessTool,
    ToolCall,
    ToolExecutor,
    ToolTransform,
)

sys.path.insert(0, str(Path(__file__).parent))
from tools_of_bench import add, compute, sleep

ROWS, ROUNDS = 64, 3


def seconds(function):
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def ratio(name, tool, args):
    """How much faster the executor is than a loop, as the median of some rounds."""
    call = ToolCall(name, args)
    executor = ToolExecutor([tool], timeout=120)
    batch = [[call]] * ROWS
    executor.run(batch)
    one = {"sleep": sleep, "compute": compute}[name]
    found = []
    for _ in range(ROUNDS):
        together = seconds(lambda: executor.run(batch))
        alone = seconds(lambda: [one(**args) for _ in range(ROWS)])
        found.append((alone / together, alone, together))
    executor.close()
    _, alone, together = sorted(found)[ROUNDS // 2]
    quotient = statistics.median(q for q, _, _ in found)
    print(f"{name:8s} one by one {alone:6.2f} s   at once {together:6.2f} s   {quotient:5.2f} x")


def step_cost():
    """Milliseconds of a step of 64 rows with a call each, and of a step without tools."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    cost = {}
    for name in ("bare", "tools"):
        env = ChatEnv(batch_size=(ROWS,))
        if name == "tools":
            env = env.append_transform(ToolTransform([add], HermesParser()))
        td = env.reset(TensorDict({"query": ["?"] * ROWS}, batch_size=(ROWS,)))
        turn = [{"role": "assistant", "content": call}]
        td["history"].full = History.of([chat + turn for chat in td["history"].prompt.chats])
        env.step(td.clone())
        times = [seconds(lambda e=env, t=td: e.step(t.clone())) for _ in range(20)]
        cost[name] = 1000 * statistics.median(times)
        env.close()
    more = (cost["tools"] - cost["bare"]) / ROWS
    print(
        f"a step   bare {cost['bare']:.2f} ms   tools {cost['tools']:.2f} ms   {more:.3f} ms a call"
    )


if __name__ == "__main__":
    ratio("sleep", FunctionTool(sleep), {"seconds": 0.05})
    ratio("compute", ProcessTool(compute), {"rounds": 150_000})
    step_cost()
