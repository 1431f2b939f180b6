"""Results that are printed have three decimals; their values keep all of theirs."""

from torchrl_llm.evaluation import Evaluation


def test_a_printed_evaluation_is_rounded_and_its_numbers_are_not():
    names = ["reward", "reward_std", "success", "invalid", "response_length", "truncated"]
    result = Evaluation(
        accuracy=0.6171875, num_prompts=128, at_k={"pass@2": 2 / 3}, **dict.fromkeys(names, 0.0)
    )
    assert repr(result).startswith("Evaluation(accuracy=0.617, reward=0.000, ")
    assert repr(result).endswith("num_prompts=128, shares={}, at_k={'pass@2': 0.667})")
    assert result.metrics()["eval/accuracy"] == 0.6171875
