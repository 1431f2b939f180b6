"""The reward of sums: is the last number of the response the right one?"""

from __future__ import annotations

import re
from typing import Any

from torchrl_llm.rewards.reward_parser import RewardParser, RewardScore

# ASCII digits only: the answer is compared as it is written.
_NUMBER = re.compile(r"-?[0-9]+")


class ArithmeticRewardParser(RewardParser):
    """1.0 where the last whole number of the response is the answer, digit for digit; else 0.0.

    A model that explains itself ("37+85 is 122.") is understood; leading zeros are not.

    Example:
        >>> reward = ArithmeticRewardParser()
        >>> reward.score("37+85 is 122.", "122").reward, reward.score("0122", "122").reward
        (1.0, 0.0)
    """

    def score(self, response: str, answer: Any) -> RewardScore:
        """Compare the last number of ``response`` with ``answer``.

        Args:
            response: what the model wrote.
            answer: the sum, as a string or an int.
        """
        numbers = _NUMBER.findall(response)
        right = bool(numbers) and numbers[-1] == str(answer)
        return RewardScore(float(right), success=right, has_answer=bool(numbers))
