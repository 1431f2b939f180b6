"""Agents against the same transforms by hand, and players who share episodes against single ones.

    python test/benchmarks/bench_agents.py

The model is scripted, so that what is timed is ours: environment, transforms, conversation, and
columns. Both sides play the same turns. Memory is that of a collected batch, in bytes a token: what
an episode costs besides its tokens shows as a ratio above 1 of many short episodes to fewer.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import warnings

from harness import compare, peak_memory, report

from torchrl_llm.agents import LastRequest, ReActAgent
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.envs import CalculatorEnv
from torchrl_llm.envs.datasets.task_env import insert_tools
from torchrl_llm.envs.games import PrisonersDilemmaEnv
from torchrl_llm.modules import FakeWrapper, load_tokenizer
from torchrl_llm.tools import ToolTransform

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

ROWS, GAMES, ROUNDS = 64, 32, 4
CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 4}}\n</tool_call>'


def double(number: int) -> int:
    """Double a number.

    Args:
        number: the number.
    """
    return 2 * number


def wave(env, answers, tokenizer):
    """A function that plays all rows of an environment to their end."""
    collector = LLMCollector(
        env,
        policy=FakeWrapper(answers, tokenizer=tokenizer),
        yield_completed_trajectories=True,
        reset_at_each_iter=True,
    )
    batches = iter(collector)
    return lambda: next(batches)


def answered(tokenizer):
    """A call of each row, then an answer of each."""
    return [CALL] * ROWS + ["8"] * ROWS


def by_agent():
    tokenizer = load_tokenizer()
    env = ReActAgent(tools=[double], max_auxiliary_turns=2).wrap(CalculatorEnv(num_envs=ROWS))
    return wave(env, answered(tokenizer), tokenizer)


def by_hand():
    tokenizer = load_tokenizer()
    env = insert_tools(CalculatorEnv(num_envs=ROWS), ToolTransform([double], max_auxiliary_turns=2))
    env.append_transform(LastRequest(2))
    return wave(env, answered(tokenizer), tokenizer)


def dilemma(games, **options):
    env = PrisonersDilemmaEnv(num_rounds=ROUNDS, actions="bare", num_envs=games, **options)
    return wave(env, "defect", load_tokenizer())


def two_players():
    return dilemma(2 * GAMES)


def two_environments():
    both = [dilemma(GAMES, seats={seat: "random"}) for seat in ("B", "A")]
    return lambda: [play() for play in both]


def few_episodes():
    return dilemma(2 * 100)


def many_episodes():
    return dilemma(2 * 400)


def main() -> None:
    rows = [
        compare("an agent's wrap : the same by hand", by_agent(), by_hand(), aim="<= 1.02"),
        compare(
            "two players : two environments of one",
            two_players(),
            two_environments(),
            aim="<= 1.2",
        ),
    ]
    few, many = peak_memory(few_episodes)[0], peak_memory(many_episodes)[0]
    report(rows)
    print(f"memory of 400 episodes of {2 * ROUNDS} turns: {many:.0f} MiB, of 100: {few:.0f} MiB")
    print(f"bytes an episode, 400 to 100: {(many / 400) / (few / 100):.2f} (aim <= 1.1)")


if __name__ == "__main__":
    main()
