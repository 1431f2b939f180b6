"""A calculator agent of the OpenAI Agents SDK; it returns named numbers, one of them the reward."""

import re

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from agents.exceptions import AgentsException
from openai import AsyncOpenAI


@function_tool
def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
        expression: Such as (2+3)*4.
    """
    if not re.fullmatch(r"[\d\s+*/()-]{1,60}", expression) or "**" in expression:
        return "cannot be computed"
    return str(eval(expression))


async def run(row, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent(
            name="calculator",
            instructions="Use the calculator.",
            tools=[calculator],
            model=OpenAIChatCompletionsModel("policy", openai_client=client),
        )
        quiet = RunConfig(tracing_disabled=True)
        try:
            result = await Runner.run(agent, row["query"], max_turns=3, run_config=quiet)
        except AgentsException:  # too many turns, or a tool that is not there
            return {"reward": 0.0, "success": 0.0}
    numbers = re.findall(r"-?\d+", result.final_output)
    right = numbers[-1:] == [row["answer"]]
    called = any(item.type == "tool_call_item" for item in result.new_items)
    return {"reward": right + 0.1 * called, "success": right, "called": called}
