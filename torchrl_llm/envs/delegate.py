"""Delegation: a tool with which a model gives a task to a sub-agent in a child episode.

The calls of all rows of a step open their child episodes together, in one batched environment that
the same policy answers. A child's last answer is the result of the call; the child's rows are
collected with its parent's rows.

Next: ``torchrl_llm.data.child_rows`` processes the rows of children.

Shape legend: ``B`` rows of the parents, ``N`` children of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase

from torchrl_llm._checked import Ge, checked
from torchrl_llm.data.child_rows import ChildRows
from torchrl_llm.data.column import Column
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.failures import Failure
from torchrl_llm.data.input_modes import message_text
from torchrl_llm.data.rollouts import split_batch
from torchrl_llm.envs.chat_env import ChatEnv
from torchrl_llm.envs.ids import IdCounter
from torchrl_llm.envs.layers import innermost, transforms_of
from torchrl_llm.envs.transforms.context_strategy import chat_env_of
from torchrl_llm.envs.transforms.episode_limits import StepCounter
from torchrl_llm.errors import ConfigError
from torchrl_llm.tools.tool import Tool
from torchrl_llm.tools.tool_call import ToolCall, ToolResult
from torchrl_llm.tools.tool_transform import Calls, ToolTransform, Turns

TrainedBy = Literal["parent", "own", "both"]
Policy = Callable[[TensorDictBase], TensorDictBase]
_OUT_OF_DEPTH = "Nobody was asked: tasks may be handed on {depth} deep, so solve this one yourself."
_RAN_OUT = "The sub-agent came to no answer in {turns} turns."


class TaskTool(Tool):
    """The tool that the model calls; :class:`Delegate` carries out the task.

    Args:
        name: name of the tool.
        argument: name of its argument, the task.
        description: description of the tool for the model.
    """

    def __init__(self, name: str, argument: str, description: str) -> None:
        self.name, self.argument, self.description = name, argument, description
        text = {"type": "string", "description": "what is to be done"}
        self.parameters = {"type": "object", "properties": {argument: text}, "required": [argument]}

    def run(self, call: ToolCall) -> str:
        """The task."""
        return str(call.args[self.argument])


@dataclass
class _Child:
    """One child episode: the calling row, and the result."""

    row: int
    task: Any
    child_id: int
    rows: list[TensorDict] = field(default_factory=list)
    below: list[ChildRows] = field(default_factory=list)
    answer: str = ""
    error: str = ""
    failure: Failure | None = None


class Delegate(ToolTransform):
    """A tool that delegates a task to a sub-agent.

    The code that calls the policy has to set it with :meth:`use_policy`, as
    :class:`~torchrl_llm.collectors.LLMCollector` and :func:`~torchrl_llm.evaluation.evaluate` do.
    If a child fails, gives no answer, or calls for a child beyond ``max_depth``, the result is a
    message about it.

    Args:
        make_env: function of ``N`` that makes the environment of the children, whose conversations
            begin with ``"query"``; by default a :class:`~torchrl_llm.envs.ChatEnv` of one answer.
        agent: agent of the children: any object with ``wrap(env)``, such as an
            :class:`~torchrl_llm.agents.Agent`.
        name: name of the tool, and of the sub-agent.
        argument: name of the tool's argument.
        description: description of the tool for the model.
        template: the child's first message, with ``{task}`` in it.
        system_prompt: system prompt of a child, in the default environment.
        max_turns: most turns of a child.
        max_depth: most levels of delegation; at 1 a child cannot delegate.
        trained_by: signal that trains the rows of a child. ``"parent"``: the return of its parent.
            ``"own"``: its own rewards, as a separate trajectory. ``"both"``: the sum.
        inherits_context: a child begins with the conversation of its parent, and the parent gets
            only the child's result (context folding); history mode only.
        kwargs: further arguments of :class:`~torchrl_llm.tools.ToolTransform`, such as
            ``max_calls`` of a turn and ``max_auxiliary_turns``.

    Raises:
        ConfigError: an invalid argument, or a template without ``{task}``; at the first call, no
            policy, or an environment of children that cannot be made.

    Example:
        >>> from torchrl_llm.data.history import History
        >>> from torchrl_llm.modules import FakeWrapper, load_tokenizer
        >>> env = ChatEnv(batch_size=(1,)).append_transform(Delegate())
        >>> policy = FakeWrapper("It is 4.", tokenizer=load_tokenizer())
        >>> delegates_of(env)[0].use_policy(policy)
        >>> td = env.reset(TensorDict({"query": ["What is 2+2?"]}, batch_size=(1,)))
        >>> call = {"function": {"name": "delegate", "arguments": {"task": "Add 2 and 2."}}}
        >>> turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        >>> td["history"].full = History.of([td["history"].prompt.chats[0] + [turn]])
        >>> env.step(td)["next", "history"].prompt.chats[0][-1]["content"]
        'It is 4.'
        >>> env.close()
    """

    @checked
    def __init__(
        self,
        make_env: Callable[[int], EnvBase] | None = None,
        *,
        agent: Any = None,
        name: str = "delegate",
        argument: str = "task",
        description: str = "Hands a task to an assistant and returns the answer.",
        template: str = "{task}",
        system_prompt: str | None = None,
        max_turns: Annotated[int, Ge(1)] = 8,
        max_depth: Annotated[int, Ge(1)] = 1,
        trained_by: TrainedBy = "parent",
        inherits_context: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__([TaskTool(name, argument, description)], **kwargs)
        if "{task}" not in template:
            raise ConfigError(f"the template must have {{task}} in it, got {template!r}")
        self._make_env, self._agent, self.name = make_env, agent, name
        self.template, self.system_prompt = template, system_prompt
        self.max_turns, self.max_depth, self.depth = max_turns, max_depth, 0
        self.trained_by, self.inherits_context = trained_by, inherits_context
        self._policy: Policy | None = None
        self._keeps_rows = False
        self._path = ""
        self._born: dict[int, list[ChildRows]] = {}
        self._children = IdCounter("child")
        self._before: TensorDictBase | None = None

    def use_policy(self, policy: Policy | None, *, keep_rows: bool = False) -> None:
        """Set the policy that answers children.

        Args:
            policy: tensordict to tensordict; ``None`` removes it.
            keep_rows: keep the rows of children until :meth:`take_rows`; otherwise they are
                discarded.
        """
        self._policy, self._keeps_rows = policy, keep_rows

    def take_rows(self) -> dict[int, list[ChildRows]]:
        """The rows of the children that have ended since the last call, by their parent's row."""
        born, self._born = self._born, {}
        return born

    # -- one step ---------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self._before = tensordict
        try:
            return super()._step(tensordict, next_tensordict)
        finally:
            self._before = None

    def _answer(self, calls: Sequence[Calls], turns: Turns) -> list[list[ToolResult]]:
        results = super()._answer(calls, turns)
        places = [
            (row, at)
            for row, found in enumerate(results)
            for at, result in enumerate(found)
            if result.ok and result.call.tool == self.name
        ]
        if not places:
            return results
        if self.depth >= self.max_depth:
            refused = _OUT_OF_DEPTH.format(depth=self.max_depth)
            for row, at in places:
                call = results[row][at].call
                results[row][at] = ToolResult(call, refused, error="TooDeep")
            return results
        children = [
            _Child(row, results[row][at].content, self._children.next_id()) for row, at in places
        ]
        self._run(children)
        for (row, at), child in zip(places, children, strict=True):
            answered = replace(
                results[row][at], content=child.answer, error=child.error, failure=child.failure
            )
            results[row][at] = answered
            if self._keeps_rows and child.rows:
                self._born.setdefault(row, []).extend([self._rows_of(child, turns), *child.below])
        return results

    def _run(self, children: Sequence[_Child]) -> None:
        if self._policy is None:
            raise ConfigError(
                f"{type(self).__name__} has no policy for its children: LLMCollector and evaluate "
                "set theirs; call use_policy(policy) if you step the environment yourself"
            )
        queries = [self._query(child) for child in children]
        env = self._env(len(children))
        try:
            self._play(env, queries, children)
        except ConfigError:
            raise
        except Exception as error:  # a child's failure is data
            for child in children:
                child.rows.clear()
                child.below.clear()
                child.answer, child.error = "The sub-agent failed.", type(error).__name__
                child.failure = Failure.of(error, f"tool {self.name!r}")
        finally:
            env.close()

    def _query(self, child: _Child) -> Any:
        text = self.template.format(task=child.task)
        if not self.inherits_context:
            return text
        base = chat_env_of(self)
        if base.mode.name != "history":
            raise ConfigError("inherits_context is for history mode, where conversations are kept")
        chat = self._before.get(("history", "prompt")).chats[child.row]
        return chat + [{"role": base.user_role, "content": text}]

    def _env(self, num: int) -> EnvBase:
        base = chat_env_of(self)
        if self._make_env is not None:
            env = self._make_env(num)
        else:
            env = ChatEnv(
                input_mode=base.input_mode,
                batch_size=(num,),
                system_prompt=None if self.inherits_context else self.system_prompt,
                tokenizer=base.tokenizer,
                template_kwargs=base.template_kwargs,
                worker_id=0,
            ).append_transform(StepCounter(max_steps=1))
        if self._agent is not None:
            env = self._agent.wrap(env)
        if env.batch_size.numel() != num:
            raise ConfigError(
                f"make_env({num}) made an environment of {env.batch_size.numel()} rows"
            )
        self._hand_on(env)
        return env

    def _hand_on(self, env: EnvBase) -> None:
        """Let children delegate up to the allowed depth; deeper ones get a message."""
        for each in delegates_of(env):
            each.depth, each.max_depth = self.depth + 1, self.max_depth
            each._path = f"{self._path}/{self.name}"
            each.use_policy(self._policy, keep_rows=self._keeps_rows)

    def _play(self, env: EnvBase, queries: Sequence[Any], children: Sequence[_Child]) -> None:
        size = len(children)
        td = env.reset(TensorDict({"query": Column.of(queries)}, batch_size=[size]))
        running = torch.ones(size, dtype=torch.bool)
        mode = _mode(env)
        for turn in range(self.max_turns):
            if turn:
                td.set("_step", running.unsqueeze(-1))
            td = env.step(self._policy(td))
            for delegate in delegates_of(env):
                for place, found in delegate.take_rows().items():
                    owner = children[place]
                    owner.below += [replace(each, parent_id=owner.child_id) for each in found]
            messages = mode.turns(td)
            over = td.get(("next", "done")).reshape(size, -1).any(-1)
            for place, row in enumerate(split_batch(td.exclude("_step"))):
                if running[place]:
                    children[place].rows.append(row)
                    self._note(children[place], row, messages[place])
            running = running & ~over
            if not running.any():
                break
            td = env.step_mdp(td)
        for place in running.nonzero().flatten().tolist():  # out of turns
            after = children[place].rows[-1]["next"]
            for name in {"done", "truncated"} & set(after.keys()):
                after.set(name, torch.ones_like(after.get(name)))

    def _note(self, child: _Child, row: TensorDict, message: Any) -> None:
        """Text of the child's last turn, or a note that it is no answer."""
        auxiliary = row.get(("next", "tools", "auxiliary"), None)
        cut = FinishReason(int(row.get(("tokens", "finish_reason")))).cut
        unfinished = message is None or cut or (auxiliary is not None and bool(auxiliary.any()))
        child.answer = "" if message is None else message_text(message)
        child.error = "NoAnswer" if unfinished or not child.answer.strip() else ""
        if child.error:
            child.answer = _RAN_OUT.format(turns=len(child.rows))

    def _rows_of(self, child: _Child, turns: Turns) -> ChildRows:
        parent = turns.sessions[child.row]
        return ChildRows(
            rows=child.rows,
            child_id=child.child_id,
            parent_id=-1 if parent is None else parent,
            depth=self.depth + 1,
            agent=f"{self._path}/{self.name}",
            trained_by=self.trained_by,
        )

    # -- resume -----------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """The counter of children."""
        return {"children": self._children.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`get_extra_state` was taken."""
        self._children.load_state_dict(state["children"])


def _mode(env: EnvBase) -> Any:
    base = innermost(env)
    if not isinstance(base, ChatEnv):
        raise ConfigError(f"children need a chat environment, got {type(base).__name__}")
    return base.mode


def delegates_of(env: EnvBase) -> list[Delegate]:
    """The transforms of an environment that delegate tasks.

    Args:
        env: an environment, with or without transforms.
    """
    return [each for each in transforms_of(env) if isinstance(each, Delegate)]
