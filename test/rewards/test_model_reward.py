"""A reward model in a folder as a part of the reward."""

import math
import pickle

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from torchrl_llm.data.text import ChatFormatter
from torchrl_llm.envs import ArithmeticEnv
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import FakeWrapper, load_model, load_reward_model, load_tokenizer
from torchrl_llm.recipes import load_config
from torchrl_llm.recipes.builders import make_train_env
from torchrl_llm.recipes.reward_config import add_components, check_components
from torchrl_llm.rewards import ModelReward

TEXTS = ["4", "It is 4, as 2 and 2 are 4.", "5", "I do not know"]


def chat(answer):
    return [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path, tokenizer = tmp_path_factory.mktemp("model"), load_tokenizer()
    load_reward_model(None, tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def expected(folder, texts):
    """What transformers makes of each conversation alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    formatter = ChatFormatter(load_tokenizer())
    ids = [formatter.encode_demonstration(chat(text)).token_ids for text in texts]
    with torch.no_grad():
        return [float(model(input_ids=row[None]).logits) for row in ids]


@pytest.mark.parametrize("token_budget", [1, 60, 16384])
def test_scores_are_those_of_transformers_whatever_the_budget(folder, token_budget):
    reward = ModelReward(folder, token_budget=token_budget)
    got = reward.score_chats([chat(text) for text in TEXTS])
    assert got == pytest.approx(expected(folder, TEXTS), abs=1e-5)
    assert len({round(value, 4) for value in got}) == len(TEXTS)


def test_tools_of_the_prompts_are_told_to_the_reward_model(folder):
    groups = {
        "env": {"dataset": "calculator"},
        "reward": {"components": {"model": {"name": folder}}},
    }
    for shows in (True, False):
        config = load_config({**groups, "model": {"show_tools": shows}})
        env = make_train_env(config, load_tokenizer(), seed=0)
        parts = [p for each in env.transform for p in getattr(each, "components", {}).values()]
        reward = next(part.scorer for part in parts if isinstance(part.scorer, ModelReward))
        schemas = env.tool_schemas
        env.close()
        assert reward.tools == (schemas if shows else None)
        formatter = ChatFormatter(load_tokenizer())
        talk = formatter.encode_demonstration(chat("4"), tools=schemas if shows else None)
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        with torch.no_grad():
            score = float(model(input_ids=talk.token_ids[None]).logits)
        assert reward.score_chats([chat("4")]) == pytest.approx([score], abs=1e-5)


def test_a_row_that_is_too_long_is_an_error_and_the_others_have_their_score(folder):
    reward = ModelReward(folder, max_seq_len=24)
    got = reward.score_chats([chat(TEXTS[0]), chat("4 " * 30)])
    assert got[0] == pytest.approx(expected(folder, TEXTS[:1])[0], abs=1e-5)
    assert isinstance(got[1], DataError)
    assert "which takes 24" in str(got[1])


def step(folder, answers, **settings):
    """Rows of a step of sums that are answered with these, scored by the task and the model."""
    env = ArithmeticEnv(num_envs=len(answers), shuffle=False)
    env = add_components(env, {"model": {"name": folder, **settings}})
    policy = FakeWrapper(answers, tokenizer=load_tokenizer())
    return env.step(policy(env.reset()))["next"]


def test_an_environment_adds_the_score_of_the_conversation(folder):
    out = step(folder, ["163", "7"])
    values = out["rewards", "model", "value"].flatten().tolist()
    formatter = ChatFormatter(load_tokenizer())
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for value, question, answer in zip(values, ["87+76", "85+81"], ["163", "7"], strict=True):
        talk = [
            {"role": "user", "content": f"What is {question}?"},
            {"role": "assistant", "content": answer},
        ]
        ids = formatter.encode_demonstration(talk).token_ids
        with torch.no_grad():
            score = float(model(input_ids=ids[None]).logits)
        assert value == pytest.approx(score, abs=1e-5)
    assert out["reward"].flatten().tolist() == pytest.approx([1 + values[0], values[1]])


def test_a_row_without_score_is_invalid_and_never_zero(folder):
    out = step(folder, ["163", "7 " * 30], max_seq_len=24)
    assert out["reward_valid"].flatten().tolist() == [True, False]
    assert math.isnan(out["rewards", "model", "value"].flatten()[1].item())
    assert "which takes 24" in list(out["rewards", "model", "error"])[1]


def test_a_score_that_is_not_finite_is_invalid(folder, tmp_path):
    tokenizer = load_tokenizer()
    model = load_reward_model(folder, tokenizer)
    model.score.weight.data.fill_(math.nan)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    out = step(str(tmp_path), ["163", "7"])
    assert not out["reward_valid"].any()
    assert "must be finite" in next(iter(out["rewards", "model", "error"]))


def test_it_goes_to_other_processes_by_its_name(folder):
    reward = ModelReward(folder)
    before = reward.score_chats([chat("4")])
    assert len(pickled := pickle.dumps(reward)) < 1000
    assert pickle.loads(pickled).score_chats([chat("4")]) == before


def test_settings_are_looked_at_before_weights_are_read(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "language").mkdir()
    load_model().save_pretrained(tmp_path / "language")
    with pytest.raises(ConfigError, match="no reward model but LlamaForCausalLM"):
        check_components({"model": {"name": str(tmp_path / "language")}})
    with pytest.raises(ConfigError, match="neither a folder"):
        check_components({"model": {"name": "no/such-model"}})
    with pytest.raises(ConfigError, match="token_budget"):
        check_components({"model": {"name": folder, "token_budget": 0}})


def test_a_folder_is_the_same_in_a_process_with_another_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    checked = check_components({"mine": {"type": "model", "name": ".", "weight": 0.5}})
    assert checked == {"mine": {"type": "model", "name": folder, "weight": 0.5}}
