import re

from torchrl_llm.rewards import JudgeReward

PROMPT = """Question: {query}
Reference: {answer}
Answer: {response}

How close is the answer to the reference? End with "Score: N", N from 0 to 10."""


def teacher(conversations):
    """Stands in for a language model: one text per conversation."""
    return [grade(messages[-1]["content"]) for messages in conversations]


def grade(text):
    found = re.search(r"Reference: (\d+)\nAnswer: (\d+)\n", text)
    if found is None:
        return "This is no number. Score: 0"
    off = abs(int(found[1]) - int(found[2]))
    return f"It is {off} off. Score: {10 if off == 0 else max(0, 6 - off)}"


judge = JudgeReward(teacher, PROMPT)


def exactly(response, answer):
    return response.strip() == answer
