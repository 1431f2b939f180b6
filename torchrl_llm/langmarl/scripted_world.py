"""Scripted models in whose world the right advice can be found: for tests, examples and dry runs.

Each agent guesses until its policy has a sentence of its own in it (``ADVICE``). A task needs
some of the agents to know what they do, and is answered rightly if these do. The critic sees who
guessed; the optimizer turns what it says into advice, and keeps what a policy has already.

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
    """An agent: it knows what it does if its policy has its advice.

    Args:
        messages: its policy, and what it sees.
    """
    policy, seen = (message["content"] for message in messages[-2:])
    number, total = map(int, _AGENT.search(policy).groups())
    knows = _advice(number) in policy
    said = f"(agent {number} {'knew' if knows else 'guessed'})"
    if number < total:
        return f"Here is what I make of it. {said}"
    found = {int(k): word == "knew" for k, word in _SAID.findall(seen)} | {number: knows}
    question = next((q for q in _answers() if q in seen), None)
    # One task in eight needs nobody, one in eight all of the first three.
    needed = _hash(question or "")
    right = all(known for k, known in found.items() if needed >> (k - 1) % 3 & 1)
    answer = _answers()[question] if question and right else "I do not know"
    return f"{said}\nFINAL ANSWER: {answer}"


def critic(messages: Messages) -> str:
    """A critic: what it is asked for decides whether it writes of each agent or of all.

    Of all it names what worked and the first weak link, since that is where it stops.

    Args:
        messages: its instructions, with an episode.
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
    """An optimizer: advice that the policy has, or that the evaluation gives.

    Args:
        messages: its instructions, with a policy and an evaluation.
    """
    text = " ".join(message["content"] for message in messages)
    return " ".join(advice for advice in ADVICE if advice in text) or "Go on like this."


def noise(messages: Messages) -> str:
    """An optimizer whose advice helps nobody.

    Args:
        messages: are not read but for their hash.
    """
    words = ("Be", "bold", "and", "think", "of", "clouds", "rivers", "today")
    number = _hash(messages[-1]["content"])
    return " ".join(words[(number + 3 * place) % len(words)] for place in range(6)) + "."
