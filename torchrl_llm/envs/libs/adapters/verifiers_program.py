"""Program that plays environments written for verifiers (0.4), under a Python that has it.

It does not import torchrl_llm, and torchrl_llm does not import it. As a script it lists the tasks
of an environment as rows; as a program, ``verifiers_program.py:run``, it plays one of them with the
gateway as its model, and returns the environment's rewards.

Next: :mod:`torchrl_llm.envs.datasets.verifiers_env` is the task that has these rows.
"""

import asyncio
import json
import os
import sys
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

import verifiers.v1 as vf
from openai import APIStatusError, AsyncOpenAI, omit
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.utils.loaders import (
    default_harness_id,
    load_environment,
    load_taskset,
    resolve_env_config,
)

__all__ = ["ChatHarness", "run"]

_MODEL = "policy"
_served = {}
_open = AsyncExitStack()  # never closed: the servers end with the process


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A chat with tools in this process; the harness of verifiers starts a Python per segment."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Chat until an answer calls no tool; a rejected request ends like a failed process."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        try:
            await self._chat(ctx.model, endpoint, secret, mcp_urls, messages)
        except APIStatusError as error:
            failed = not is_context_overflow(error)
            return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=str(error))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _chat(self, model, endpoint, secret, mcp_urls, messages):
        timeout = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None)
            await stack.enter_async_context(client)
            tools, names, servers = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                reply = await client.chat.completions.create(
                    model=model, messages=messages, tools=tools or omit
                )
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return
                for call in message.tool_calls:
                    said = await _called(call.function, names, servers)
                    result = {"tool_call_id": call.id, "content": said}
                    messages.append({"role": "tool", **result})


async def _called(function, names, servers):
    """The result of a tool, or the reason why it cannot be called."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    if function.name not in names or not isinstance(arguments, dict):
        return f"error: call one of {', '.join(names)} with an object of arguments"
    return await call_mcp(servers, names, function.name, arguments)


def environment_config(name, arguments):
    """The configuration of an environment, whose agents chat in this process if they may."""
    block = {**arguments, "taskset": {**arguments.get("taskset", {}), "id": name}}
    here = {"harness": {"id": Path(__file__).stem}, "runtime": {"type": "subprocess"}}
    if default_harness_id(name) == "bash":  # the agent has no harness of its own
        for role, agent in agent_config_fields(resolve_env_config(block)).items():
            if agent.harness is None:
                block[role] = {**here, **block.get(role, {})}
    return resolve_env_config(block)


async def _serve(name, arguments):
    environment = load_environment(environment_config(name, arguments))
    await _open.enter_async_context(environment.serving())
    return environment


async def run(row, base_url, api_key):
    """Play the task of a row.

    Args:
        row: a row with ``task``, as the script has written it.
        base_url: URL of the gateway.
        api_key: key of the session.

    Returns:
        ``"reward"``, and by name each weighted reward and each metric.

    Raises:
        RuntimeError: the rollout has failed, or several agents have used the gateway.
    """
    asked = json.loads(row["task"])
    key = json.dumps([asked["id"], asked["args"]], sort_keys=True)
    if key not in _served:
        _served[key] = asyncio.ensure_future(_serve(asked["id"], asked["args"]))
    environment = await asyncio.shield(_served[key])
    kind = type(environment.taskset).task_type()
    data = kind.data_type().model_validate(asked["data"])
    # Verifiers reads keys from the environment; processes that it starts do not inherit this name.
    variable = f"GATEWAY_API_KEY_{uuid.uuid4().hex}"
    os.environ[variable] = api_key
    try:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        context = vf.ModelContext(model=_MODEL, client=client)
        task = kind(data, environment.config.taskset.task)
        return _outcome(await environment.run_episode(task, context), base_url)
    finally:
        del os.environ[variable]


def _outcome(episode, base_url):
    """The rewards of an episode without errors."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        ends = [trace.stop_condition for trace in episode.traces]
        told = f"{errors[-1].type}: {errors[-1].message}" if errors else f"it ended with {ends}"
        raise RuntimeError(f"the rollout failed: {told}")
    played = [each for each in episode.traces if each.agent.config.client.base_url == base_url]
    if len(played) != 1:
        names = [each.agent.name for each in played]
        raise RuntimeError(
            f"one agent can be the policy, once a rollout, got {names}: give the others a client "
            "of their own in the arguments of the environment"
        )
    (trace,) = played
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    rewards = {name: each.value for name, each in trace.rewards.items() if each is not None}
    return {**metrics, **rewards, "reward": trace.reward}


def list_rows(name, arguments, num_rows):
    """The tasks of an environment.

    Args:
        name: name of the environment.
        arguments: arguments of its configuration.
        num_rows: number of tasks, from the first on; ``None`` for all.
    """
    tasks = load_taskset(environment_config(name, arguments).taskset)
    tasks = tasks if num_rows is None else tasks.take(num_rows)
    if not tasks.bounded:
        raise ValueError(f"{name} makes tasks without end; num_rows says how many")
    for task in tasks:
        data = task.data.model_dump(mode="json", exclude_none=True)
        query = task.data.prompt_text or task.data.name or f"task {task.data.idx}"
        yield {"query": query, "task": json.dumps({"id": name, "args": arguments, "data": data})}


if __name__ == "__main__":
    request, target = json.loads(sys.argv[1]), Path(sys.argv[2])
    try:
        target.write_text("".join(json.dumps(row) + "\n" for row in list_rows(**request)))
    except Exception as error:  # an environment may raise anything
        raise SystemExit(f"{type(error).__name__}: {error}") from None
