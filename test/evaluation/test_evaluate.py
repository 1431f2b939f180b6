import pytest

from torchrl_llm.data import FinishReason
from torchrl_llm.envs import (
    DatasetChatEnv,
    GSM8KEnv,
    IFEvalEnv,
    RewardParser,
    RewardScore,
    TaskEnv,
)
from torchrl_llm.errors import ConfigError
from torchrl_llm.evaluation import evaluate
from torchrl_llm.modules import Answer, FakeWrapper

ROWS = [{"query": f"number {n}", "answer": str(n)} for n in range(7)]


class Exact(RewardParser):
    def score(self, response, answer):
        if response == "crash":
            raise ValueError("no number")
        right = response == answer
        return RewardScore(float(right), success=right, has_answer=response != "wait")


class Numbers(TaskEnv):
    def make_reward(self):
        return Exact()


def number_in(prompt):
    return int(prompt.rpartition("number ")[2].split("<")[0])


def env(num_envs=3, **kwargs):
    return Numbers(dataset=ROWS, shuffle=False, num_envs=num_envs, **kwargs)


def test_accuracy_counts_the_first_prompts_once_each(tokenizer):
    # 0..6 answered right where even: 0, 2, 4, 6 of seven.
    policy = FakeWrapper(lambda prompt: str(number_in(prompt) // 2 * 2), tokenizer=tokenizer)
    result = evaluate(env(), policy, num_prompts=7)
    assert result.num_prompts == 7
    assert result.accuracy == pytest.approx(4 / 7)
    assert result.reward == pytest.approx(4 / 7)
    assert result.invalid == 0.0
    assert result.metrics()["eval/accuracy"] == result.accuracy


def test_a_second_evaluation_sees_the_same_prompts(tokenizer):
    policy = FakeWrapper(lambda prompt: str(min(number_in(prompt), 1)), tokenizer=tokenizer)
    task = env()
    assert evaluate(task, policy, num_prompts=4) == evaluate(task, policy, num_prompts=4)


def test_a_reward_that_fails_is_neither_right_nor_a_zero(tokenizer):
    policy = FakeWrapper(
        lambda prompt: "crash" if number_in(prompt) == 0 else str(number_in(prompt)),
        tokenizer=tokenizer,
    )
    result = evaluate(env(), policy, num_prompts=4)
    assert (result.accuracy, result.invalid) == (0.75, 0.25)
    assert result.reward == 1.0  # over the three that have one


def test_cut_responses_and_lengths_are_reported(tokenizer):
    cut = Answer([70, 71, 72], FinishReason.LENGTH)
    policy = FakeWrapper(cut, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 3})
    result = evaluate(env(), policy, num_prompts=3)
    assert (result.truncated, result.response_length, result.accuracy) == (1.0, 3.0, 0.0)


def test_cut_answers_are_scored_as_the_published_procedures_do(tokenizer):
    said = {"commas": "No comma here, but", "hello": "Hello there", "eggs": "So it is 18 eg"}
    rows = [
        {"key": n, "prompt": name, "kwargs": [{}], "instruction_id_list": ["punctuation:no_comma"]}
        for n, name in enumerate(("commas", "hello"))
    ]
    ifeval = IFEvalEnv(dataset=rows, scored_part="response", num_envs=2, shuffle=False)
    eggs = [{"question": "eggs", "answer": "#### 18"}]
    gsm8k = GSM8KEnv(dataset=eggs, answer_format="flexible-extract", num_envs=1)
    for env, num_prompts, accuracy in ((ifeval, 2, 0.5), (gsm8k, 1, 1.0)):
        policy = FakeWrapper(
            lambda prompt: Answer(next(said[k] for k in said if k in prompt), FinishReason.LENGTH),
            tokenizer=tokenizer,
        )
        result = evaluate(env, policy, num_prompts=num_prompts)
        assert (result.accuracy, result.truncated, result.invalid) == (accuracy, 1.0, 0.0)


def test_conversations_are_given_as_text(tokenizer):
    policy = FakeWrapper("5", tokenizer=tokenizer)
    result = evaluate(env(), policy, num_prompts=3, num_shown=2)
    assert result.conversations == (
        "user: number 0\nassistant: 5\n-> wrong",
        "user: number 1\nassistant: 5\n-> wrong",
    )


def test_rows_that_have_ended_keep_their_result_while_others_go_on(tokenizer):
    # Row 0 answers at once and rightly, row 1 waits a turn and is then right too.
    def answer(prompt):
        if "number 0" in prompt:
            return "0"
        return "1" if "wait" in prompt else "wait"

    policy = FakeWrapper(answer, tokenizer=tokenizer)
    task = env(num_envs=2, max_steps=3)
    assert evaluate(task, policy, num_prompts=2, max_turns=3).accuracy == 1.0
    assert evaluate(task, policy, num_prompts=2, max_turns=1).accuracy == 0.5


def test_an_environment_without_reward_is_a_clear_error(tokenizer):
    bare = DatasetChatEnv(dataset=ROWS, num_envs=2)
    with pytest.raises(ConfigError, match="append a RewardParser"):
        evaluate(bare, FakeWrapper("5", tokenizer=tokenizer), num_prompts=2)


@pytest.mark.parametrize("num_envs", [2, 3, 10])
def test_each_prompt_is_asked_once_where_the_data_has_fewer_than_wanted(
    tokenizer, warned, num_envs
):
    asked, answers = [], []

    def answer(prompt):
        asked.append(number_in(prompt))
        return "0"

    task = Numbers(dataset=ROWS[:3], shuffle=False, num_envs=num_envs)
    policy = FakeWrapper(answer, tokenizer=tokenizer)
    result = evaluate(
        task, policy, num_prompts=10, on_answer=lambda row, _: answers.append(row["answer"])
    )
    assert (asked, answers) == ([0, 1, 2], ["0", "1", "2"])
    assert result.accuracy == pytest.approx(1 / 3)
    assert result.num_prompts == result.metrics()["eval/num_prompts"] == 3
    assert "num_prompts=10 is more than the data has: its 3 prompts" in warned[0]
    # Also the next time.
    assert evaluate(task, policy, num_prompts=3).num_prompts == 3


def test_samples_of_a_prompt_are_counted_as_such(tokenizer):
    policy = FakeWrapper("1", tokenizer=tokenizer)
    task = Numbers(dataset=ROWS[:3], shuffle=False, num_envs=4, repeats=2)
    result = evaluate(task, policy, num_prompts=12)
    assert (result.num_prompts, result.accuracy) == (6, pytest.approx(1 / 3))


def test_rows_that_come_from_a_stream_end_where_it_ends(tokenizer):
    class Stream:
        def __iter__(self):
            return iter(ROWS[:3])

    task = Numbers.from_dataloader(Stream(), batch_size=(2,), compute_reward=True, max_steps=1)
    policy = FakeWrapper("1", tokenizer=tokenizer)
    assert evaluate(task, policy, num_prompts=9).num_prompts == 3


def test_reward_deviation_and_success_are_over_the_valid_prompts(tokenizer):
    # Four prompts: one fails, two are right, one is wrong.
    answers = {0: "crash", 1: "1", 2: "2", 3: "9"}
    policy = FakeWrapper(lambda prompt: answers[number_in(prompt)], tokenizer=tokenizer)
    metrics = evaluate(env(), policy, num_prompts=4).metrics()
    assert metrics["eval/accuracy"] == 0.5
    assert metrics["eval/success"] == metrics["eval/reward"] == pytest.approx(2 / 3)
    assert metrics["eval/reward_std"] == pytest.approx((2 / 9) ** 0.5)  # of 1, 1 and 0


def test_large_rewards_have_a_mean(tokenizer):
    class Large(Exact):
        def score(self, response, answer):
            return RewardScore(3e38, success=True)

    class LargeNumbers(TaskEnv):
        def make_reward(self):
            return Large()

    task = LargeNumbers(dataset=ROWS, shuffle=False, num_envs=3)
    result = evaluate(task, FakeWrapper("1", tokenizer=tokenizer), num_prompts=3)
    assert result.reward == pytest.approx(3e38)  # their sum, 9e38, is infinite in float32
    assert result.reward_std == pytest.approx(0.0, abs=1e31)
