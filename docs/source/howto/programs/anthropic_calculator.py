"""A calculator agent on Anthropic's client; it returns a number, which is the reward."""

import re

from anthropic import AsyncAnthropic

TOOL = {
    "name": "calculator",
    "description": "Computes an arithmetic expression exactly.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "Such as (2+3)*4."}},
        "required": ["expression"],
    },
}


def calculate(expression):
    if not re.fullmatch(r"[\d\s+*/()-]{1,60}", expression) or "**" in expression:
        return "cannot be computed"
    try:
        return str(eval(expression))
    except (SyntaxError, TypeError, ArithmeticError):
        return "cannot be computed"


async def run(row, base_url, api_key):
    messages = [{"role": "user", "content": row["query"]}]
    request = {"model": "policy", "max_tokens": 128, "system": "Use the calculator."}
    url = base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=url, api_key=api_key) as client:
        for _ in range(3):
            answer = await client.messages.create(messages=messages, tools=[TOOL], **request)
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": calculate(str(call.input.get("expression", ""))),
                }
                for call in calls
            ]
            messages.append({"role": "assistant", "content": answer.content})
            messages.append({"role": "user", "content": results})
    text = "".join(block.text for block in answer.content if block.type == "text")
    return float(re.findall(r"-?\d+", text)[-1:] == [row["answer"]])
