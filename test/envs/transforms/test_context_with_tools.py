"""Tools, context strategies and input modes together: all modes do the same, each token once."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from transformers import AutoTokenizer

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.data.ragged import read_rows
from torchrl_llm.data.replay_buffers import JoinTurns, ReplayBuffer
from torchrl_llm.envs.datasets import CalculatorEnv
from torchrl_llm.envs.transforms import SlidingWindow, TruncatedThinking
from torchrl_llm.modules import FakeWrapper

CALL = (
    '<think>hm</think>x<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n'
    "</tool_call>"
)
UNKNOWN = '<tool_call>\n{"name": "nope", "arguments": {"q": "<|im_start|>"}}\n</tool_call>'
ANSWERS = [CALL, CALL, "<answer>1</answer>", UNKNOWN, "half <tool_call>{", CALL]
STRATEGIES = {
    "none": lambda: None,
    "thoughts": TruncatedThinking,
    "window": lambda: SlidingWindow(1),
    "no_task": lambda: SlidingWindow(1, keep_task=False),
}


@pytest.fixture(scope="module")
def tokenizer():
    """The embedded model's, whose template knows tools."""
    return AutoTokenizer.from_pretrained(embedded_model_path())


def _walk(mode, strategy, tokenizer):
    """Prompts, rewards and ends of three steps, and the rows that were stepped."""
    env = CalculatorEnv(num_envs=3, input_mode=mode, tokenizer=tokenizer, seed=0, shuffle=False)
    if strategy is not None:
        env = env.append_transform(strategy)
    policy = FakeWrapper([*ANSWERS, *ANSWERS], tokenizer=tokenizer, input_mode=mode)
    td, running = env.reset(), torch.ones(3, 1, dtype=torch.bool)
    facts, rows = [], []
    for _ in range(3):
        td["_step"] = running
        stepped = env.step(policy(td))
        prompts = read_rows(stepped, ("tokens", "prompt"))
        moves = running.flatten().tolist()
        facts.append(
            [
                (ids.tolist(), reward.item(), done.item())
                for ids, reward, done, moved in zip(
                    prompts,
                    stepped["next", "reward"].flatten(),
                    stepped["next", "done"].flatten(),
                    moves,
                    strict=True,
                )
                if moved
            ]
        )
        steps = stepped.exclude("_step").unbind(0)
        rows += [row.clone() for row, moved in zip(steps, moves, strict=True) if moved]
        td, running = env.step_mdp(stepped), running & ~stepped["next", "done"]
    return facts, rows


@pytest.mark.parametrize("name", STRATEGIES)
def test_with_tools_all_modes_ask_the_same_and_train_each_token_once(name, tokenizer):
    expected = None
    for mode in ("history", "text", "tokens"):
        facts, rows = _walk(mode, STRATEGIES[name](), tokenizer)
        expected = expected or facts
        assert facts == expected
        buffer = ReplayBuffer(transform=JoinTurns())
        buffer.extend(rows)
        joined = [buffer[i] for i in range(len(buffer))]
        assert len(rows) > len(joined) >= 3
        trained = [r["tokens", "full"][r["trace", "mask_reason"] == 0].tolist() for r in joined]
        sampled = [row["tokens", "response"].tolist() for row in rows]
        assert sorted(chain(*trained)) == sorted(chain(*sampled))
        for row in rows:
            assert row["trace", "turn"].max() == row["turn"]
