"""Pairs of calculator answers, with the errors that the embedded model makes.

It guesses without the tool, or has the tool add what was to be multiplied or subtracted.
"""

import json
import random

from torchrl_llm.envs.datasets.number_tasks import calculator_problem, calculator_problems


def write_pairs(path, number, *, seed=0):
    """A JSON-lines file of pairs for the first problems to train on."""
    draw = random.Random(seed)
    numbers = calculator_problems("train")[:number].tolist()
    with path.open("w") as file:
        for problem in map(calculator_problem, numbers):
            file.write(json.dumps(pair(problem, draw)) + "\n")
    return path


def pair(problem, draw):
    """The row of a problem: who asks the tool the right thing, against who does not."""
    first, second = (int(word) for word in problem["expression"].replace("*", "-").split("-"))
    wrong = _turns(f"{first}+{second}", str(first + second))
    guess = [{"role": "assistant", "content": str(draw.randint(10, 9999))}]
    return {
        "prompt": [
            {"role": "system", "content": "Use the calculator."},
            {"role": "user", "content": problem["query"]},
        ],
        "chosen": _turns(problem["expression"], problem["answer"]),
        "rejected": guess if draw.random() < 0.5 else wrong,
    }


def _turns(expression, result):
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]
