"""A client that does to its conversations what clients do, and a model that knows the template.

:class:`Client` makes the calls of one session at random: turns, results of tools, edits,
compaction, branches, several answers at once, retries, changed tools, sub-agents, and calls that it
gives up.
:class:`ScriptedEngine` answers them with texts whose ids are no canonical split.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from data.text import scenarios

from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.record import TokenRecord
from torchrl_llm.errors import TemplateError
from torchrl_llm.gateway.calls import Answer, Call, RefusedCallError
from torchrl_llm.gateway.session import Engine, EngineLimits, Formatters, GatewaySession, Pending

WEATHER = scenarios.TOOLS[0]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
TOOL_SETS = [(), (WEATHER,), (WEATHER, ADD), (ADD,)]
WORDS = [
    "sunny",
    "rain ",
    " in Paris",
    "\n",
    "?",
    "12",
    "é",
    "  odd",
    "x = 1\n",
    "— so",
    "日本",
    ".",
]
STOPS = ["END", "\n\nObs", "sun"]


def words(rng: random.Random, most: int = 6) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(1, most)))


# -- the model ------------------------------------------------------------------------------------


def scattered(rng: random.Random, tokenizer: Any, ids: list[int]) -> list[int]:
    """Other ids of the same text: some ordinary tokens become those of their bytes."""
    special = set(tokenizer.get_added_vocab().values())
    out: list[int] = []
    for token, spelled in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        if token in special or len(spelled) == 1 or rng.random() < 0.5:
            out.append(token)
        else:
            out += tokenizer.convert_tokens_to_ids(list(spelled))
    return out


def turn_of(rng: random.Random, specimen: Any, tools: tuple) -> dict[str, Any]:
    """What the model is going to say."""
    message: dict[str, Any] = {"role": "assistant", "content": words(rng)}
    if specimen.reasoning and rng.random() < 0.5:
        message["reasoning_content"] = words(rng).strip() or "so"
    if tools and rng.random() < 0.6:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": f"abcdef12{k}",
                "function": {
                    "name": "add",
                    "arguments": {"a": rng.randint(0, 99), "b": words(rng)},
                },
            }
            for k in range(rng.randint(1, 2))
        ]
        message["content"] = message["content"].strip() if rng.random() < 0.3 else ""
    return message


@dataclass(eq=False)
class Sampled:
    """What the engine was asked and has answered."""

    pending: Pending
    record: TokenRecord


class ScriptedEngine(Engine):
    """Answers as a model that knows the template would, in ids of its own."""

    def __init__(self, specimen: Any, tokenizer: Any, rng: random.Random, **limits: Any) -> None:
        self.specimen, self.tokenizer, self.rng = specimen, tokenizer, rng
        self.limits = EngineLimits(
            **{
                "longest_prompt": 6000,
                "max_new_tokens": 200,
                "vocab_size": len(tokenizer),
                **limits,
            }
        )
        self.formatters = Formatters(tokenizer)
        self.sampled: list[Sampled] = []
        self.waiting: list[Pending] = []
        self.withdrawn = 0
        self.tools: tuple = ()

    def submit(self, pending: Pending) -> None:
        self.waiting.append(pending)
        asyncio.get_running_loop().call_soon(self.work)

    def withdraw(self, pending: Pending) -> None:
        self.withdrawn += 1
        if pending in self.waiting:
            self.waiting.remove(pending)

    def work(self) -> None:
        """Answer those that wait, the oldest first."""
        waiting, self.waiting = self.waiting, []
        for pending in waiting:
            self.answer(pending)

    def answer(self, pending: Pending) -> None:
        prompt = pending.chat.record
        ids, reason = self.response(pending)
        log_probs = torch.tensor([-self.rng.random() for _ in ids])
        record = prompt.respond(torch.tensor(ids, dtype=torch.int64), log_probs, 3, reason)
        self.sampled.append(Sampled(pending, record))
        pending.resolve(record)

    def response(self, pending: Pending) -> tuple[list[int], FinishReason]:
        rng, sampling = self.rng, pending.sampling
        formatter = self.formatters.get(self.tools)
        turn = turn_of(rng, self.specimen, self.tools)
        if pending.chat.record.continues:
            body, closer = scenarios.plain_ids(formatter, words(rng)), True
        else:
            try:
                body = scenarios.sampled_ids(formatter, list(pending.chat), turn)
            except TemplateError:
                body = scenarios.plain_ids(formatter, words(rng))
        body = scattered(rng, self.tokenizer, body)
        terminal = formatter.probe.terminal
        closer = terminal[-1] if "tool_calls" in turn else terminal[0] if terminal else None
        ids = body + (list(closer.ids) if closer else [self.tokenizer.eos_token_id])
        stops = sampling.get("stop", ())
        if stops and rng.random() < 0.5:
            ids = body + scattered(rng, self.tokenizer, scenarios.plain_ids(formatter, stops[0]))
        most = min(sampling.get("max_new_tokens", 200), self.limits.max_new_tokens)
        for n in range(1, min(most, len(ids)) + 1) if stops else ():
            text = self.tokenizer.decode(ids[:n])
            if any(stop in text for stop in stops):
                return ids[:n], FinishReason.STOP
        return ids[:most], FinishReason.STOP if len(ids) <= most else FinishReason.LENGTH


# -- the client -----------------------------------------------------------------------------------


@dataclass
class Conversation:
    """What a client holds: its messages, how the last answer ended, and its tools."""

    messages: list[dict[str, Any]]
    tools: tuple = ()
    finish: FinishReason | None = None
    clean: bool = True


@dataclass
class Asked:
    """A call, and what came of it."""

    call: Call
    answers: list[Answer] | None
    clean: bool
    continues: bool = False
    records: list[Sampled] = field(default_factory=list)


class Client:
    """One program's calls, at random.

    ``asked`` holds them in order; ``clean`` says that the client has sent back what it was given.
    """

    def __init__(self, engine: ScriptedEngine, session: GatewaySession, rng: random.Random) -> None:
        self.engine, self.session, self.rng = engine, session, rng
        self.specimen = engine.specimen
        self.held: list[Conversation] = []
        self.asked: list[Asked] = []
        self.refused = 0
        self.temperatures: tuple[float, ...] = ()

    async def run(self, steps: int) -> None:
        moves = [
            self.begin,
            self.go_on,
            self.go_on,
            self.go_on,
            self.go_on,
            self.edit,
            self.compact,
        ]
        moves += [self.branch, self.retry, self.other_tools, self.leave, self.several, self.cut]
        await self.begin()
        for _ in range(steps):
            await self.rng.choice(moves)()

    # -- moves ------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """A conversation of its own, perhaps of a sub-agent."""
        messages = []
        if self.specimen.system and self.rng.random() < 0.6:
            messages.append({"role": "system", "content": self.rng.choice(["Be kind.", "Sub."])})
        messages.append({"role": "user", "content": words(self.rng)})
        tools = self.rng.choice(TOOL_SETS) if self.specimen.tools else ()
        await self.ask(Conversation(messages, tools))

    async def go_on(self) -> None:
        held = self.rng.choice(self.held[-2:])
        if held.messages[-1]["role"] == "assistant":
            await self.ask(self.longer(held))

    def longer(self, held: Conversation) -> Conversation:
        more = [{"role": "user", "content": words(self.rng)}]
        calls = held.messages[-1].get("tool_calls")
        if calls:
            more = [
                {
                    "role": "tool",
                    "name": call["function"]["name"],
                    "tool_call_id": call["id"],
                    "content": words(self.rng),
                }
                for call in calls
            ]
        return Conversation([*held.messages, *more], held.tools, None, held.clean)

    async def edit(self) -> None:
        """Change the content of an earlier message."""
        held = self.rng.choice(self.held)
        longer = self.longer(held) if held.messages[-1]["role"] == "assistant" else held
        messages = [dict(message) for message in longer.messages]
        at = self.rng.randrange(len(messages))
        messages[at]["content"] = words(self.rng) + " edited"
        await self.ask(Conversation(messages, longer.tools, None, longer.clean))

    async def compact(self) -> None:
        """Begin again from a summary."""
        held = self.rng.choice(self.held)
        lead = [message for message in held.messages[:1] if message["role"] == "system"]
        told = {"role": "user", "content": "So far: " + words(self.rng)}
        await self.ask(Conversation([*lead, told], held.tools))

    async def branch(self) -> None:
        """Two calls at once that go on from the same answer."""
        held = self.rng.choice(self.held)
        if held.messages[-1]["role"] == "assistant":
            await asyncio.gather(self.ask(self.longer(held)), self.ask(self.longer(held)))

    async def retry(self) -> None:
        """The same prompt again."""
        asked = self.rng.choice(self.asked)
        if asked.call.messages[-1]["role"] != "assistant":
            again = Conversation(list(asked.call.messages), asked.call.tools, None, asked.clean)
            await self.ask(again)

    async def other_tools(self) -> None:
        held = self.rng.choice(self.held)
        if self.specimen.tools and held.messages[-1]["role"] == "assistant":
            longer = self.longer(held)
            longer.tools = self.rng.choice(TOOL_SETS)
            await self.ask(longer)

    async def leave(self) -> None:
        """Go away, before or while the model answers."""
        held = self.rng.choice(self.held)
        if held.messages[-1]["role"] == "assistant":
            longer = self.longer(held)
            self.engine.tools = longer.tools
            call = Call(messages=tuple(longer.messages), tools=longer.tools)
            task = asyncio.ensure_future(self.session.answer(call))
            for _ in range(self.rng.randint(0, 2)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])

    async def several(self) -> None:
        held = self.rng.choice(self.held)
        if held.messages[-1]["role"] == "assistant":
            await self.ask(self.longer(held), num_samples=self.rng.randint(2, 3))

    async def cut(self) -> None:
        """Go on with an answer that was cut, without a message between."""
        for held in reversed(self.held):
            if held.finish == FinishReason.LENGTH and held.messages[-1]["content"]:
                await self.ask(held, continues=True)
                return

    # -- one call ---------------------------------------------------------------------------------

    async def ask(self, held: Conversation, num_samples: int = 1, continues: bool = False) -> None:
        sampling: dict[str, Any] = {}
        if self.rng.random() < 0.3:
            sampling["max_new_tokens"] = self.rng.randint(1, 30)
        if self.rng.random() < 0.3:
            sampling["stop"] = (self.rng.choice(STOPS),)
        if self.temperatures:
            sampling["temperature"] = self.rng.choice(self.temperatures)
        call = Call(
            messages=tuple(held.messages),
            tools=held.tools,
            sampling=sampling,
            num_samples=num_samples,
        )
        self.engine.tools = held.tools
        asked = Asked(call, None, held.clean, continues)
        self.asked.append(asked)
        try:
            asked.answers = await self.session.answer(call)
        except RefusedCallError:
            self.refused += 1
            return
        for answer in asked.answers:
            whole = torch.cat([answer.prompt_ids, answer.token_ids])
            asked.records += [
                sampled
                for sampled in self.engine.sampled
                if torch.equal(sampled.record.token_ids, whole)
                and torch.equal(
                    sampled.record.log_probs[-len(answer.log_probs) :], answer.log_probs
                )
            ]
        for answer in asked.answers:
            self.take(held, answer, sampling.get("stop", ()), continues)

    def take(self, held: Conversation, answer: Answer, stops: Any, continues: bool) -> None:
        """Keep an answer, in one of the forms in which clients do."""
        message, kind = dict(answer.message), self.rng.random()
        if kind < 0.3:
            message.pop("reasoning_content", None)
        if stops and kind < 0.15 and "tool_calls" not in message:
            text = self.engine.tokenizer.decode(answer.token_ids)
            message["content"] += stops[0] if text.endswith(stops[0]) else ""
        messages = list(held.messages)
        if continues:  # the two are one message
            begun = messages.pop()
            message["content"] = begun["content"] + message["content"]
            message = {**begun, **message}
        ids = torch.cat([answer.prompt_ids, answer.token_ids])
        said = self.engine.tokenizer.decode(ids)
        written = reference_text(
            self, [*messages, message], held.tools, add_generation_prompt=False
        )
        cut = answer.finish_reason == FinishReason.LENGTH
        cut = cut or any(stop in said[-100:] for stop in stops)
        clean = held.clean and not cut and written.startswith(said)
        self.held.append(
            Conversation([*messages, message], held.tools, answer.finish_reason, clean)
        )


def reference_text(client: Client, messages: Any, tools: tuple, **ends: bool) -> str:
    """What ``transformers`` writes for the messages that the client has sent."""
    messages = [dict(message) for message in messages]
    for message in messages:
        thought = message.pop("reasoning_content", None)
        if thought is not None and client.specimen.reasoning:
            message[client.specimen.reasoning] = thought
    return client.engine.tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, **ends
    )
