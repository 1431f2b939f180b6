"""What policies do with bad input: a clear error, or a row that says what happened."""

from __future__ import annotations

import pytest
import torch
from modules.policies.rows_helper import USER, fake_tokens, history_td, tokens_td
from tensordict import TensorDict, set_list_to_stack

from torchrl_llm.data import FinishReason
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.errors import ConfigError, DataError, MissingExtraError, OverlongError
from torchrl_llm.modules import Answer, FakeWrapper, TransformersWrapper, vLLMWrapper


def test_overlong_prompts_are_an_error_by_default():
    with pytest.raises(OverlongError, match=r"row 1 has 6 tokens.*on_overlong"):
        fake_tokens(max_length=6)(tokens_td([5], [5] * 6))


def test_overlong_prompts_can_be_dropped_and_counted():
    policy = fake_tokens([7], max_length=6, on_overlong="drop")
    out = policy(tokens_td([5], [5] * 6, [6]))
    responses = read_rows(out, ("tokens", "response"))
    assert [r.tolist() for r in responses] == [[7, 2], [], [7, 2]]
    assert out["tokens", "finish_reason"].tolist() == [0, int(FinishReason.ABORT), 0]
    assert policy.overlong_counts == {"dropped": 1, "truncated": 0}
    assert not read_rows(out, ("masks", "all_assistant_mask"))[1].any()


def test_prompts_may_be_held_shorter_than_the_context():
    policy = fake_tokens([7], on_overlong="drop", max_prompt_length=3)
    out = policy(tokens_td([1, 3, 4], [1, 3, 4, 5]))
    assert [row.shape[0] for row in read_rows(out, ("tokens", "response"))] == [2, 0]
    policy = fake_tokens([7], on_overlong="truncate", max_prompt_length=3)
    out = policy(tokens_td([1, 3, 4, 5]))
    assert read_rows(out, ("tokens", "prompt"))[0].tolist() == [3, 4, 5]
    policy = fake_tokens([7], max_prompt_length=3)
    with pytest.raises(OverlongError, match="max_prompt_length is 3"):
        policy(tokens_td([1, 3, 4, 5]))
    with pytest.raises(ConfigError, match="max_prompt_length must be at least 1"):
        fake_tokens([7], max_prompt_length=0)


def test_overlong_prompts_can_be_truncated_from_the_left_and_counted():
    policy = fake_tokens(
        [7], max_length=6, on_overlong="truncate", generate_kwargs={"max_new_tokens": 2}
    )
    out = policy(tokens_td([5], [3, 4, 5, 6, 7, 8, 9]))
    assert read_rows(out, ("tokens", "prompt"))[1].tolist() == [6, 7, 8, 9]
    assert policy.overlong_counts == {"dropped": 0, "truncated": 1}


def test_truncated_and_dropped_rows_work_in_history_mode(tokenizer):
    for choice in ("drop", "truncate"):
        policy = FakeWrapper(
            "ok", tokenizer=tokenizer, max_length=40, on_overlong=choice,
            generate_kwargs={"max_new_tokens": 10},
        )  # fmt: skip
        out = policy(history_td([USER], [{**USER, "content": "long " * 40}]))
        chats = out["history"].full.chats
        assert [len(chat) for chat in chats] == [2, 2]
        assert chats[1][-1]["content"] == ("" if choice == "drop" else "ok")


def test_an_empty_response_is_data(tokenizer):
    policy = FakeWrapper([Answer("", FinishReason.STOP)], tokenizer=tokenizer)
    out = policy(history_td([USER]))
    assert out["history"].full.chats[0][-1]["content"] == ""
    assert read_rows(out, ("tokens", "response"))[0].tolist() == [tokenizer.eos_token_id]


def test_an_empty_prompt_names_its_row():
    with pytest.raises(DataError, match="prompt 1 is empty"):
        fake_tokens()(tokens_td([5], []))


def test_a_missing_column_is_named(tokenizer):
    with pytest.raises(DataError, match=r"no column \('tokens', 'prompt'\)"):
        fake_tokens()(TensorDict(batch_size=[2]))
    with pytest.raises(DataError, match=r"no column \('history', 'prompt'\)"):
        FakeWrapper(tokenizer=tokenizer)(TensorDict(batch_size=[2]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_mode": "chat"}, "input_mode must be one of"),
        ({"input_mode": "history"}, "needs a tokenizer"),
        ({"template_kwargs": {"enable_thinking": True}}, "template_kwargs has no effect"),
        ({"generate": False, "return_log_probs": False}, "no effect with generate=False"),
        ({"num_samples": 2, "inplace": True}, "cannot go in place"),
        ({"num_samples": 2, "generate_kwargs": {"num_return_sequences": 3}}, "contradict"),
        ({"layout": torch.jagged}, "layout"),
        ({"on_overlong": "cut"}, "on_overlong must be one of"),
        ({"batching": False, "min_batch_size": 2}, "no effect"),
        ({"return_log_probs": True, "generate_kwargs": {"logprobs": False}}, "contradict"),
        ({"generate_kwargs": {"max_length": 4}}, "renamed to 'max_new_tokens'"),
    ],
)
def test_arguments_without_effect_or_sense_are_refused_at_construction(options, message):
    with pytest.raises(ConfigError, match=message):
        FakeWrapper(**{"vocab_size": 8, "eos_token_ids": (2,), "input_mode": "tokens", **options})


@pytest.mark.parametrize(
    "options", [{"chat_template_name": "qwen"}, {"tokenizer_kwargs": {"padding": "longest"}}]
)
def test_what_torchrl_takes_in_every_mode_is_taken_with_a_warning(options):
    with pytest.warns(UserWarning, match="has no effect with input_mode='tokens'"):
        policy = fake_tokens([7], **options)
    assert read_rows(policy(tokens_td([5])), ("tokens", "response"))[0].tolist() == [7, 2]


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="prefer_token"):
        fake_tokens(prefer_token=True)
    with pytest.raises(ConfigError, match="did you mean 'max_new_tokens'"):
        fake_tokens()(tokens_td([5]), max_new_token=3)
    with pytest.raises(ConfigError, match="fixed at construction"):
        fake_tokens()(tokens_td([5]), num_samples=3)
    with pytest.raises(ConfigError, match="did you mean 'top_k'"):
        fake_tokens(generate=False)(tokens_td([5]), topk=3)


def test_sampling_arguments_of_a_call_change_nothing_when_scoring():
    td = TensorDict(tokens=ragged_rows({"full": [torch.tensor([5, 6])]}), batch_size=[1])
    policy = fake_tokens(generate=False, inplace=False)
    out = policy(td, top_k=3, max_tokens=8, n=2, temperature=0.0)
    assert torch.equal(out["log_probs", "full"], policy(td)["log_probs", "full"])


def test_log_probs_can_be_left_out():
    policy = fake_tokens([7], return_log_probs=False)
    out = policy(tokens_td([5]))
    assert "log_probs" not in out.keys()
    assert all(key[0] != "log_probs" for key in policy.out_keys)


def test_special_tokens_can_be_left_out_of_the_text(tokenizer):
    policy = FakeWrapper("ok", tokenizer=tokenizer, generate_kwargs={"skip_special_tokens": True})
    assert list(policy(history_td([USER]))["text"].get("response")) == ["ok"]


def test_it_works_whatever_list_to_stack_says(tokenizer):
    for value in (True, False):
        with set_list_to_stack(value):
            policy = FakeWrapper("ok", tokenizer=tokenizer, input_mode="text")
            td = TensorDict(text=TensorDict(prompt=["a", "b"], batch_size=[2]), batch_size=[2])
            assert list(policy(td)["text"].get("response")) == ["ok<|im_end|>"] * 2


def test_the_vllm_policy_says_how_to_install_it():
    with pytest.raises((MissingExtraError, ConfigError), match=r"vLLM|vllm"):
        vLLMWrapper("a/model")


def test_arguments_of_the_tokenizer_are_used_and_other_padding_is_refused(make_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    td = TensorDict(text=TensorDict(prompt=["Hello"], batch_size=[1]), batch_size=[1])
    for options, first in (({}, False), ({"add_special_tokens": True}, True)):
        policy = FakeWrapper(
            "ok", tokenizer=tokenizer, input_mode="text", tokenizer_kwargs=options, inplace=False
        )
        assert (read_rows(policy(td), ("tokens", "prompt"))[0][0] == 1) == first
    with pytest.raises(ConfigError, match="pad_output"):
        FakeWrapper(
            tokenizer=tokenizer, input_mode="text", tokenizer_kwargs={"padding": "max_length"}
        )


def test_the_weights_are_registered_once(tokenizer, tiny_model):
    policy = TransformersWrapper(tiny_model, tokenizer=tokenizer)
    assert set(policy.state_dict()) == {f"model.{name}" for name in tiny_model.state_dict()}
