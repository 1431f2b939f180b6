"""A calculator agent of smolagents that writes Python: each turn runs, its output is read."""

import re

from smolagents import CodeAgent, OpenAIModel, tool

# Smolagents' own prompt has 10,000 characters; this one fits a small model.
PROMPT = """Use the calculator. Write Python between <code> and </code>:
<code>print(calculator("(2+3)*4"))</code> computes, <code>final_answer(20)</code> answers."""


@tool
def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
        expression: Such as (2+3)*4.
    """
    if not re.fullmatch(r"[\d\s+*/()-]{1,60}", expression) or "**" in expression:
        return "cannot be computed"
    return str(eval(expression))


def run(row, base_url, api_key):
    model = OpenAIModel("policy", api_base=base_url, api_key=api_key)
    agent = CodeAgent(tools=[calculator], model=model, max_steps=3, verbosity_level=-1)
    agent.prompt_templates["system_prompt"] = PROMPT
    agent.memory.system_prompt.system_prompt = PROMPT
    answer = agent.run(row["query"])
    return float(str(answer).strip() == row["answer"])
