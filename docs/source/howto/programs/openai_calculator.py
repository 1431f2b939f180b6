"""A calculator agent on OpenAI's client; it returns nothing, so the task's reward scores it."""

import json
import re

from openai import AsyncOpenAI

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOL = {"name": "calculator", "description": "Computes exactly.", "parameters": PARAMETERS}
CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="none")  # one for all rollouts


def calculate(expression):
    if not re.fullmatch(r"[\d\s+*/()-]{1,60}", str(expression)) or "**" in expression:
        return "cannot be computed"
    try:
        return str(eval(expression))
    except (SyntaxError, TypeError, ArithmeticError):
        return "cannot be computed"


async def run(row, base_url, api_key):
    ask = CLIENT.with_options(base_url=base_url, api_key=api_key).chat.completions.create
    messages, tools = list(row["messages"]), [{"type": "function", "function": TOOL}]
    for _ in range(3):
        answer = await ask(model="policy", messages=messages, tools=tools)
        messages.append(answer.choices[0].message)
        for call in messages[-1].tool_calls or ():
            result = calculate(json.loads(call.function.arguments).get("expression", ""))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if messages[-1] is answer.choices[0].message:
            break
