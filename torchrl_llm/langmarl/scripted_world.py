"""Scripted models with a known correct advice: for tests, examples and dry runs.

Each agent guesses until its policy contains a specific sentence (``ADVICE``). A task depends on
some of the agents, and is answered correctly if none of these agents guesses. The critic reports
who guessed; the optimizer turns this into advice, and keeps the advice that a policy already has.

Configurations name them: ``scripted:torchrl_llm.langmarl.scripted_world:actor``.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path

from torchrl_llm.rewards.text_models import Messages

ADVICE = (
    "Quote the words that settle the question.",
    "Check each number against its source.",
    "Write the answer and nothing else.",
)
_AGENT = re.compile(r"You are agent (\d+) of (\d+)")
_SAID = re.compile(r"\(agent (\d+) (guessed|knew)\)")
_TASKS = Path(__file__).parents[1] / "sota" / "langmarl" / "data" / "qa.jsonl"


@cache
def _answers() -> dict[str, str]:
    lines = _TASKS.read_text(encoding="utf-8").splitlines()
    return {task["question"]: str(task["answer"]) for task in map(json.loads, lines)}


def _hash(text: str) -> int:
    return hashlib.blake2b(text.encode(), digest_size=4).digest()[0]


def _advice(agent: int) -> str:
    return ADVICE[(agent - 1) % len(ADVICE)]


def actor(messages: Messages) -> str:
    """An agent that does not guess if its policy contains its advice.

    Args:
        messages: its policy and its observation.
    """
    policy, seen = (message["content"] for message in messages[-2:])
    number, total = map(int, _AGENT.search(policy).groups())
    knows = _advice(number) in policy
    said = f"(agent {number} {'knew' if knows else 'guessed'})"
    if number < total:
        return f"Here is what I make of it. {said}"
    found = {int(k): word == "knew" for k, word in _SAID.findall(seen)} | {number: knows}
    question = next((q for q in _answers() if q in seen), None)
    # One task in eight depends on no agent, one in eight on all of the first three.
    needed = _hash(question or "")
    right = all(known for k, known in found.items() if needed >> (k - 1) % 3 & 1)
    answer = _answers()[question] if question and right else "I do not know"
    return f"{said}\nFINAL ANSWER: {answer}"


def critic(messages: Messages) -> str:
    """A critic that writes about each agent or about all, depending on its instructions.

    About all, it names what worked and only the first agent that guessed.

    Args:
        messages: the critic's instructions, with an episode.
    """
    text = messages[-1]["content"]
    found = {int(k): word == "knew" for k, word in _SAID.findall(text)}
    told = {
        k: f"It worked: {_advice(k)}" if knew else f"It was a guess. {_advice(k)}"
        for k, knew in sorted(found.items())
    }
    if "JSON" in text or "JSON" in messages[0]["content"]:
        named = {f"agent_{k}": {"contribution": said} for k, said in told.items()}
        return f"```json\n{json.dumps(named)}\n```"
    weak = next((k for k, knew in sorted(found.items()) if not knew), 0)
    return " ".join(said for k, said in told.items() if found[k] or k == weak)


def optimizer(messages: Messages) -> str:
    """An optimizer that writes the advice of the policy and of the evaluation.

    Args:
        messages: the optimizer's instructions, with a policy and an evaluation.
    """
    text = " ".join(message["content"] for message in messages)
    return " ".join(advice for advice in ADVICE if advice in text) or "Go on like this."


def noise(messages: Messages) -> str:
    """An optimizer with useless advice.

    Args:
        messages: only their hash is used.
    """
    words = ("Be", "bold", "and", "think", "of", "clouds", "rivers", "today")
    number = _hash(messages[-1]["content"])
    return " ".join(words[(number + 3 * place) % len(words)] for place in range(6)) + "."
