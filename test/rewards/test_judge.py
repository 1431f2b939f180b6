"""Judges: what they say is read, and what cannot be read is invalid."""

from __future__ import annotations

import pickle
import time

import pytest
from cases import cases
from chat_server import ChatHandler, chat_server

from torchrl_llm.envs import DatasetChatEnv
from torchrl_llm.envs.datasets.rows_env import RowsEnv
from torchrl_llm.errors import ConfigError, RewardError
from torchrl_llm.evaluation import evaluate
from torchrl_llm.modules import FakeWrapper, TransformersWrapper, load_tokenizer
from torchrl_llm.rewards import (
    Component,
    CompositeReward,
    EndpointTextModel,
    JudgeReward,
    Sample,
    WrapperTextModel,
    read_score,
    read_verdict,
)


def test_the_last_stated_score_is_read():
    for text, score, highest in cases(__file__)["scores"]:
        assert read_score(text) == (score, highest)


@pytest.mark.parametrize(
    "text",
    ["", "7", "Scores: 7", "score: seven", "underscore 7", "Score: ٧"]
    + ["Score: 7,5", "Score: 1e1", "Score: 1.2.3", "Score: N/A"],
)
def test_a_text_without_a_score_is_an_error(text):
    with pytest.raises(RewardError, match="stated no score"):
        read_score(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("VERDICT: CORRECT", 1.0),
        ("VERDICT: INCORRECT", 0.0),
        ("Verdict: **incorrect**.", 0.0),
        ("verdict: incorrect... no, verdict: correct", 1.0),
    ],
)
def test_incorrect_is_not_read_as_correct(text, value):
    assert read_verdict(text) == (value, 1.0)


@pytest.mark.parametrize("text", ["CORRECT", "verdict: correctly", "verdict: right", ""])
def test_a_text_without_a_verdict_is_an_error(text):
    with pytest.raises(RewardError, match="no verdict"):
        read_verdict(text)


class Scripted:
    """Answers by the words of the student; remembers what it was asked."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def __call__(self, conversations):
        self.asked.append([messages[-1]["content"] for messages in conversations])
        return [self.answer(messages[-1]["content"]) for messages in conversations]


def sample(response, query="Why?", answer="Because."):
    return Sample(response, answer=answer, columns={"query": query})


def test_the_judge_sees_question_reference_and_response_as_they_are():
    grader = Scripted(lambda text: "Score: 5")
    judge = JudgeReward(
        grader, "Q {query} A {answer} R {response} {{x}} {unknown }", system_prompt="Be fair."
    )
    assert judge.columns == ("query", "x")
    with pytest.raises(KeyError):
        judge.score_batch([sample("r")])
    judge = JudgeReward(grader, "Q {query} A {answer} R {response}", system_prompt="Be fair.")
    assert judge.score_batch([sample("{answer} {query} {nothing} \\1")]) == [0.5]
    assert grader.asked[-1] == ["Q Why? A Because. R {answer} {query} {nothing} \\1"]
    assert judge.conversation(sample("r"))[0] == ("system", "Be fair.")


def test_a_placeholder_may_be_any_column_of_the_users_rows():
    seen = []

    def grader(conversations):
        seen.extend(messages[-1]["content"] for messages in conversations)
        return ["Score: 10"] * len(conversations)

    rows = [{"question": "a?", "topic": "sums"}, {"question": "b?", "topic": "words"}]
    judge = JudgeReward(grader, "{topic}, {query}: {response}")
    env = RowsEnv(dataset=rows, reward=judge, num_envs=2, shuffle=False)
    policy = FakeWrapper(lambda prompt: "yes", tokenizer=load_tokenizer())
    assert evaluate(env, policy, num_prompts=2, max_turns=1).accuracy == 1
    assert sorted(seen) == ["sums, a?: yes", "words, b?: yes"]


def test_scores_are_brought_between_zero_and_one():
    words = {"a": "Score: 10", "b": "Score: 1/4", "c": "Score: 0"}
    judge = JudgeReward(lambda asked: [words[m[-1]["content"]] for m in asked], "{response}")
    assert judge.score_batch([sample(word) for word in "abc"]) == [1.0, 0.25, 0.0]


@pytest.mark.parametrize("text", ["Score: 11", "Score: -1", "Score: 1/0", "no idea", "Score: 9/4"])
def test_what_is_no_score_is_invalid_and_never_zero(text):
    judge = JudgeReward(lambda asked: [text] * len(asked), "{response}")
    (found,) = judge.score_batch([sample("r")])
    assert isinstance(found, Exception)


def test_a_judge_that_could_not_be_read_is_asked_again_and_only_for_those_rows():
    said = iter([["Score: 1", "hm"], ["Score: 2"]])
    asked = []

    def grader(conversations):
        asked.append(len(conversations))
        return next(said)

    judge = JudgeReward(grader, "{response}", retries=2)
    assert judge.score_batch([sample("a"), sample("b")]) == [0.1, 0.2]
    assert asked == [2, 1]


def test_equal_questions_are_asked_once_and_remembered_but_failures_are_not():
    grader = Scripted(lambda text: "hm" if "bad" in text else "Score: 3")
    judge = JudgeReward(grader, "{response}", retries=0)
    first = judge.score_batch([sample("good"), sample("bad"), sample("good")])
    assert [first[0], first[2]] == [0.3, 0.3]
    assert grader.asked == [["good", "bad"]]
    judge.score_batch([sample("good"), sample("bad")])
    assert grader.asked[1:] == [["bad"]]


def test_the_memory_has_a_limit_and_can_be_off():
    grader = Scripted(lambda text: "Score: 3")
    judge = JudgeReward(grader, "{response}", cache_size=1)
    judge.score_batch([sample("a"), sample("b")])
    judge.score_batch([sample("b"), sample("a")])
    assert grader.asked == [["a", "b"], ["a"]]
    judge = JudgeReward(grader, "{response}", cache_size=0)
    for _ in range(2):
        assert judge.score_batch([sample("z")]) == [0.3]
    assert grader.asked[2:] == [["z"], ["z"]]


def test_a_judge_that_raises_or_answers_too_little_fails_all_rows_it_was_asked():
    def raises(conversations):
        raise ConnectionError("gone")

    for grader, kind in ((raises, ConnectionError), (lambda conversations: [], RewardError)):
        found = JudgeReward(grader, "{response}").score_batch([sample("a"), sample("b")])
        assert [type(error) for error in found] == [kind, kind]


def test_a_prompt_that_does_not_show_the_response_is_refused():
    with pytest.raises(ConfigError, match=r"must show the judge the \{response\}"):
        JudgeReward(lambda asked: [], "How good is {answer}?")


def test_through_an_environment_a_failing_judge_is_invalid(answer):
    grader = Scripted(lambda text: "hm" if "odd" in text else "Score: 10")
    env = DatasetChatEnv(dataset=[{"query": "q", "answer": "a"}] * 2, num_envs=2)
    env = env.append_transform(CompositeReward({"judge": JudgeReward(grader)}))
    td = env.step(answer(env.reset(), "odd", "fine"))["next"]
    assert td["reward_valid"].tolist() == [False, True]
    assert td["reward"].flatten()[1] == 1.0
    assert td["rewards", "judge", "error"][0].startswith("RewardError: the judge stated no score")


# -- a model in this process ----------------------------------------------------------------------


def test_a_wrapper_in_history_mode_is_a_judge():
    from envs.fake_policy import AnsweringPolicy

    policy = AnsweringPolicy("history", lambda chat: f"Score: {len(chat[-1]['content'])}")
    judge = JudgeReward(
        WrapperTextModel(policy, batch_size=2), "{response}", system_prompt="Be fair."
    )
    assert judge.score_batch([sample("x" * n) for n in (1, 5, 10)]) == [0.1, 0.5, 1.0]


def test_a_real_model_as_the_judge_answers_and_nonsense_is_invalid(tokenizer, tiny_model):
    wrapper = TransformersWrapper(
        tiny_model,
        tokenizer=tokenizer,
        input_mode="history",
        generate=True,
        generate_kwargs={"max_new_tokens": 4},
    )
    judge = JudgeReward(WrapperTextModel(wrapper), "{response}", retries=0)
    found = judge.score_batch([sample("x"), sample("y")])
    # an untrained model states no score
    assert all(isinstance(error, RewardError) for error in found)


def test_a_wrapper_that_reads_no_conversations_is_refused(tokenizer):
    from envs.fake_policy import AnsweringPolicy

    with pytest.raises(ConfigError, match="input_mode='history'"):
        WrapperTextModel(AnsweringPolicy("text", tokenizer=tokenizer))


# -- a server -------------------------------------------------------------------------------------


class Server(ChatHandler):
    """Speaks chat completions; what the student wrote says how it behaves."""

    def reply(self, body):
        text, asked = body["messages"][-1]["content"], [each for *_, each in self.server.requests]
        if text == "slow":
            self.server.never.wait(20)
        reason = "length" if text == "long" else "stop"
        data = {"choices": [{"message": {"content": "Score: 8"}, "finish_reason": reason}]}
        if text == "nonsense":
            data = {"choices": []}
        status = {"broken": 500, "busy": 503 if asked.count(body) == 1 else 200}.get(text, 200)
        return status, data, {}


@pytest.fixture
def server():
    with chat_server(Server) as server:
        yield server


def url(server):
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


def test_a_server_is_asked_in_its_protocol(server):
    grader = EndpointTextModel(url(server), "judge", api_key="secret", options={"max_tokens": 9})
    judge = JudgeReward(grader, "{response}", system_prompt="Be fair.")
    assert judge.score_batch([sample("fine")]) == [0.8]
    ((path, key, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert key == "Bearer secret"
    assert body == {
        "model": "judge",
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "fine"},
        ],
    }
    grader.close()


def test_each_failure_of_a_server_stays_in_its_row(server):
    judge = JudgeReward(
        EndpointTextModel(url(server), "judge", timeout=60), "{response}", retries=0
    )
    texts = ["fine", "broken", "nonsense", "long", "busy"]
    found = judge.score_batch([sample(text) for text in texts])
    assert [found[0], found[4]] == [0.8, 0.8]
    assert [isinstance(error, Exception) for error in found[1:4]] == [True] * 3
    assert "500" in str(found[1])
    assert "without a text" in str(found[2])
    assert "limit of tokens" in str(found[3])


def test_a_server_that_does_not_answer_is_invalid_in_time_and_the_others_are_not(server):
    judge = JudgeReward(
        EndpointTextModel(url(server), "judge", timeout=0.5), "{response}", retries=0
    )
    start = time.monotonic()
    slow, fine = judge.score_batch([sample("slow"), sample("fine")])
    assert time.monotonic() - start < 2.5
    assert "no answer within 0.5 s" in str(slow)
    assert fine == 0.8


def test_a_server_that_is_not_there_is_invalid():
    judge = JudgeReward(
        EndpointTextModel("http://127.0.0.1:9", "judge", max_retries=0), "{response}", retries=0
    )
    (found,) = judge.score_batch([sample("x")])
    assert isinstance(found, Exception)


def test_a_judge_at_a_server_is_a_component_that_can_be_pickled(server, answer):
    judge = JudgeReward(EndpointTextModel(url(server), "judge"), "{response}")
    reward = CompositeReward({"judge": Component(judge, run="threads", timeout=60.0)})
    reward = pickle.loads(pickle.dumps(reward))
    env = DatasetChatEnv(dataset=[{"query": "q", "answer": "a"}]).append_transform(reward)
    assert env.step(answer(env.reset(), "fine"))["next", "reward"].item() == pytest.approx(0.8)


def test_impossible_endpoints_are_refused():
    for settings, message in (
        ({"url": "localhost:8000"}, "looks like http"),
        ({"options": {"stream": True}}, "'stream'"),
    ):
        with pytest.raises(ConfigError, match=message):
            EndpointTextModel(**{"url": "http://h:1", "model": "m", **settings})
