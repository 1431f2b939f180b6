"""A calculator agent on OpenAI's client; it returns nothing, so the task's reward scores it."""

import json
import re

from openai import AsyncOpenAI

TOOL = {
    "name": "calculator",
    "description": "Computes an arithmetic expression exactly.",
    "parameters": {
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
    messages = [{"role": "system", "content": "Use the calculator."}]
    messages.append({"role": "user", "content": row["query"]})
    tools = [{"type": "function", "function": TOOL}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=tools
            )
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                expression = json.loads(call.function.arguments).get("expression", "")
                result = {"tool_call_id": call.id, "content": calculate(str(expression))}
                messages.append({"role": "tool", **result})
