"""The ``language`` environment: agents answer one after another, and the last answer counts.

The agents share a pool of messages: each sees the task and the answers of earlier agents. An
episode has one row per agent in :class:`MessagePoolEnv`, so that the same rollouts train texts and
weights; the actors of all episodes are called in one batch. :class:`LanguageEnvironment` is the
interface that :func:`torchrl_llm.langmarl.make_env` creates.

Next: :mod:`torchrl_llm.langmarl.language_tasks` loads the tasks and scores answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from torchrl_llm._registry import register
from torchrl_llm.collectors import LLMCollector
from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import History
from torchrl_llm.data.input_modes import message_text
from torchrl_llm.data.rollouts import row_list
from torchrl_llm.data.row_files import MappedRows
from torchrl_llm.envs.actions import BareAction
from torchrl_llm.envs.players import (
    Episode,
    EpisodeReaction,
    MultiAgentChatEnv,
    Opening,
    PlayersTransform,
)
from torchrl_llm.envs.world import Reaction
from torchrl_llm.errors import BackendError
from torchrl_llm.langmarl import calls
from torchrl_llm.langmarl.calls import Asked, CallLog
from torchrl_llm.langmarl.config import LanguageTaskConfig
from torchrl_llm.langmarl.environment import BaseEnvironment, Episodes, Trajectory
from torchrl_llm.langmarl.language_policy import LanguagePolicy, LanguagePrompts, split_policy
from torchrl_llm.langmarl.language_tasks import (
    Scorer,
    final_request,
    load_tasks,
    make_scorer,
    task_text,
)
from torchrl_llm.langmarl.llm_client import LLMClient
from torchrl_llm.langmarl.text_credit import episode_of

ERROR_KEY = "call_error"


@dataclass(frozen=True, kw_only=True)
class Passed(Reaction):
    """A reaction with the resulting pool of messages.

    Args:
        pool: the answers so far, as JSON.
    """

    pool: str


class MessagePool(PlayersTransform):
    """Lets agents answer in order; the last answer is scored.

    In addition to the keys of every :class:`~torchrl_llm.envs.players.PlayersTransform`, it writes
    ``"task"`` and ``"pool"``, the task and the answers so far as JSON, and ``"episode"``, the
    number of the episode as text. All rows of an episode get the episode's reward.

    Args:
        agents: names, in the order of their answers.
        score: function from tasks and last answers to a score or an exception for each.
    """

    COLUMNS = ("task", "pool", "episode")

    def __init__(self, agents: Sequence[str], score: Scorer, **kwargs: Any) -> None:
        super().__init__(agents, BareAction("answer", "an answer"), accept_cut=True, **kwargs)
        self.score = score

    def open(self, row: Mapping[str, Any]) -> Opening:
        """Show the first agent the task."""
        columns = {"task": row["task"], "pool": "[]", "episode": str(row.get("episode", 0))}
        task = json.loads(row["task"])
        return Opening({self.players[0]: self.prompt(task, [], self.players[0])}, columns)

    def prompt(self, task: Mapping[str, Any], pool: Sequence[str], agent: str) -> str:
        """Prompt of an agent.

        Args:
            task: the task.
            pool: the answers of the agents before it.
            agent: its name.
        """
        parts = [f"Task:\n{task_text(task)}"]
        parts += [f"{name} wrote:\n{text}" for name, text in zip(self.players, pool, strict=False)]
        if agent == self.players[-1]:
            parts.append(final_request(task))
        return "\n\n".join(parts)

    def react_together(
        self, td: TensorDictBase, episodes: Sequence[Episode]
    ) -> list[EpisodeReaction]:
        """Pass an answer to the next agent, or score the last one."""
        tasks, pools = td.get("task").tolist(), td.get("pool").tolist()
        errors = td.get(ERROR_KEY, None)
        errors = [""] * len(tasks) if errors is None else errors.tolist()
        reactions: list[EpisodeReaction] = []
        last: dict[int, tuple[Mapping[str, Any], str]] = {}
        for place, episode in enumerate(episodes):
            [(agent, turn)] = episode.turns.items()
            if errors[turn.row]:
                failed = BackendError(f"{agent} was not answered: {errors[turn.row]}")
                reactions.append(EpisodeReaction(players={}, error=failed))
                continue
            task, text = json.loads(tasks[turn.row]), message_text(self.answer(turn))
            pool = [*json.loads(pools[turn.row]), text]
            if len(pool) == len(self.players):
                last[place] = task, text
            reactions.append(self._passed(task, pool))
        scores = self.score(list(last.values())) if last else []
        for place, score in zip(last, scores, strict=True):
            reactions[place] = _scored(reactions[place], score)
        return reactions

    def _passed(self, task: Mapping[str, Any], pool: Sequence[str]) -> EpisodeReaction:
        """Extend the pool, and show it to the next agent, if there is one."""
        following = self.players[len(pool) : len(pool) + 1]
        told = dict.fromkeys(self.players, Passed(observation="", pool=json.dumps(pool)))
        for agent in following:
            told[agent] = replace(told[agent], observation=self.prompt(task, pool, agent))
        return EpisodeReaction(players=told, active=following)

    def write(
        self, td: TensorDictBase, next_td: TensorDictBase, reactions: Sequence[Reaction | None]
    ) -> None:
        """Write the pool of each episode."""
        pools = td.get("pool").tolist()
        for row, reaction in enumerate(reactions):
            if isinstance(reaction, Passed):
                pools[row] = reaction.pool
        next_td.set("pool", Column.of(pools))


def _scored(reaction: EpisodeReaction, score: float | Exception) -> EpisodeReaction:
    """The end of an episode, with its reward for all rows, or with an error."""
    if isinstance(score, Exception):
        return replace(reaction, error=score)
    ended = {"reward": score, "success": score >= 1, "terminated": True}
    players = {name: replace(each, **ended) for name, each in reaction.players.items()}
    return replace(reaction, players=players)


class MessagePoolEnv(MultiAgentChatEnv):
    r"""An environment in which agents answer one after another, with a row per agent.

    Args:
        tasks: tasks of the episodes, with the fields of their types, see
            :mod:`torchrl_llm.langmarl.language_tasks`.
        agents: names, in the order of their answers.
        score: see :class:`MessagePool`.
        kwargs: further arguments of :class:`~torchrl_llm.envs.players.MultiAgentChatEnv`.

    Example:
        >>> task = {"task_type": "qa", "question": "What is 2 + 2?", "answer": "4"}
        >>> env = MessagePoolEnv([task], ["solver", "checker"], score=lambda rows: [0.0])
        >>> td = env.reset()
        >>> td["active"].flatten().tolist(), td["history"].prompt[0, -1].content
        ([True, False], 'Task:\nWhat is 2 + 2?')
    """

    MAX_STEPS = None

    def __init__(
        self,
        tasks: Sequence[Mapping[str, Any]],
        agents: Sequence[str],
        score: Scorer,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            MessagePool(agents, score), MappedRows(list(enumerate(tasks)), _row), **kwargs
        )


def _row(numbered: tuple[int, Mapping[str, Any]]) -> dict[str, Any]:
    number, task = numbered
    return {"query": "", "task": json.dumps(task), "episode": str(number)}


class TextActors(TensorDictModuleBase):
    """Policy for conversations that uses a :class:`~torchrl_llm.rewards.TextModel`.

    It reads ``("history", "prompt")`` and writes ``("history", "full")``, ``("tokens",
    "finish_reason")``, ``("tokens", "response_length")``, and ``"call_error"``, a text with the
    error of a row without an answer. There are no token ids. Rows that ``"_step"`` excludes are
    skipped.

    Args:
        asked: the model.
        log: journal of the calls.
        keys: function from ``"episode"``, ``"agent"`` and ``"turn"`` of a row to the key of its
            call.
    """

    in_keys = [("history", "prompt")]  # noqa: RUF012
    out_keys = [("history", "full"), ERROR_KEY]  # noqa: RUF012

    def __init__(self, asked: Asked, log: CallLog, keys: Callable[[str, str, int], str]) -> None:
        super().__init__()
        self._asked, self._log, self._keys = asked, log, keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Answer the rows.

        Raises:
            BudgetUsedUp: the budget is used up.
        """
        chats = tensordict["history"].prompt.chats
        size, steps = len(chats), tensordict.get("_step", None)
        acts = [True] * size if steps is None else steps.reshape(size, -1).any(-1).tolist()
        rows = [row for row in range(size) if acts[row]]
        names = (tensordict.get("episode").tolist(), tensordict.get("agent").tolist())
        turns = tensordict.get("turn").tolist()
        answers = self._log.ask(
            self._asked,
            "actor",
            [self._keys(names[0][row], names[1][row], turns[row]) for row in rows],
            [tuple(_sent(message) for message in chats[row]) for row in rows],
        )
        errors, lengths = [""] * size, torch.zeros(size, dtype=torch.int64)
        reasons = torch.full((size,), int(FinishReason.ABORT), dtype=torch.int8)
        for row, answer in zip(rows, answers, strict=True):
            failed = isinstance(answer, Exception)
            text = "" if failed else answer.text
            chats[row] = chats[row] + [{"role": "assistant", "content": text}]
            if failed:
                errors[row] = f"{type(answer).__name__}: {answer}"
                continue
            cut = answer.finish_reason == "length"
            reasons[row] = int(FinishReason.LENGTH if cut else FinishReason.STOP)
            lengths[row] = answer.usage.output_tokens
        tensordict.set(("history", "full"), History.of(chats))
        tensordict.set(("tokens", "finish_reason"), reasons)
        tensordict.set(("tokens", "response_length"), lengths)
        return tensordict.set(ERROR_KEY, Column.of(errors))


def _sent(message: Mapping[str, Any]) -> dict[str, str]:
    return {"role": message["role"], "content": message_text(message)}


@register("environments", "language")
class LanguageEnvironment(BaseEnvironment):
    """Agents that answer one after another, on tasks of a benchmark or your own.

    Args:
        config: the training configuration.

    Raises:
        ConfigError: ``task_type`` is unknown, or the score needs a judge and there is none.
        DataError: the file of the tasks is missing or malformed; the message names the line.
    """

    ENV_NAME = "language"
    CREDIT_FORMAT = "json"
    CONFIG_CLASS = LanguageTaskConfig

    def __init__(self, config: LanguageTaskConfig) -> None:
        super().__init__(config)
        self._tasks = load_tasks(config)
        limit = min(config.get_actor_llm().concurrency, config.episode_generation_workers)
        self.actor = LLMClient(replace(config.get_actor_llm(), concurrency=limit))
        self.score = make_scorer(config)

    def tasks(self) -> list[dict[str, Any]]:
        """The tasks of the benchmark."""
        return self._tasks

    def default_policies(self) -> dict[str, str]:
        """A role description for each agent."""
        return {name: self._card(k) for k, name in enumerate(self.agent_names, 1)}

    def _card(self, number: int) -> str:
        total = self.config.num_agents
        sees = "the task" + (f" and what {number - 1} before you wrote" if number > 1 else "")
        reads = (
            "Your answer is the final one."
            if number == total
            else (f"Agent {number + 1} reads what you write and goes on from there.")
        )
        return (
            f"You are agent {number} of {total}, who work on a task one after another. You see "
            f"{sees}. {reads} Be accurate, keep what is right, mend what is wrong, and be brief."
        )

    def task_context(self, task: dict[str, Any]) -> str:
        """Description of a task for the optimizer; the question comes first."""
        if task.get("task_type") != "qa":
            return task_text(task)
        return "\n\n".join(filter(None, (str(task["question"]), str(task.get("context", "")))))

    def critic_prompt_vars(self, trajectory: Trajectory) -> dict[str, str]:
        """The type of the tasks."""
        return {"task_type": self.config.task_type}

    # -- episodes ---------------------------------------------------------------------------------

    def collect_batch(self, policies: dict[str, str], episodes: Episodes) -> list[Trajectory]:
        """Play episodes together: the actors of all episodes are called in one batch.

        Args:
            policies: the text of each agent.
            episodes: the episodes to play.
        """
        names = self.agent_names
        env = MessagePoolEnv(
            episodes.tasks,
            names,
            lambda rows: self.score(rows, episodes.log, episodes.prefix),
            num_envs=len(names) * len(episodes.tasks),
            shuffle=False,
        )
        texts = {name: LanguagePolicy(*split_policy(policies[name])) for name in names}
        env.append_transform(LanguagePrompts(texts))

        def key(episode: str, agent: str, turn: int) -> str:
            return episodes.key("actor", episodes.numbers[int(episode)], f"{agent}/{turn}")

        collector = LLMCollector(
            env,
            policy=TextActors(self.actor.asked, episodes.log, key),
            yield_completed_trajectories=True,
            reset_at_each_iter=True,
        )
        try:
            rows = row_list(next(iter(collector)))
        finally:
            collector.shutdown()
        by_episode: dict[int, list[TensorDictBase]] = {}
        for row in rows:
            by_episode.setdefault(int(row["episode"]), []).append(row)
        found = [
            episode_of(by_episode[place], number) for place, number in enumerate(episodes.numbers)
        ]
        for trajectory in found:
            episodes.on_done(trajectory)
        return found

    def collect_trajectory(self, policies: dict[str, str], task: dict[str, Any]) -> Trajectory:
        """Play one episode; its calls are recorded in the caller's scope, if there is one."""
        log, prefix = calls.current()
        [trajectory] = self.collect_batch(policies, Episodes([(0, task)], log, prefix))
        return trajectory

    def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode manually, without models; returns the first agent's observation."""
        self._by_hand = (task, [])
        return {self.agent_names[0]: self._pool().prompt(task, [], self.agent_names[0])}

    def step(self, agent_id: str, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Step the agent whose turn it is; the observation is the next agent's."""
        task, pool = self._by_hand
        expected = self.agent_names[len(pool)]
        if agent_id != expected:
            raise ValueError(f"it is the turn of {expected!r}, got {agent_id!r}")
        pool.append(action)
        if len(pool) < len(self.agent_names):
            following = self.agent_names[len(pool)]
            return self._pool().prompt(task, pool, following), 0.0, False, {"next": following}
        [score] = self.score([(task, action)], *calls.current())
        if isinstance(score, Exception):
            raise score
        return "", score, True, {}

    def _pool(self) -> MessagePool:
        return MessagePool(self.agent_names, lambda rows: [])
