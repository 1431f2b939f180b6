"""What policies do beyond conformance: several turns, odd tokenizers, named defects."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from modules.backends.model_zoo import build
from modules.policies.rows_helper import USER, fake_tokens, follow, history_td, tokens_td
from tensordict import TensorDict
from waiting import in_threads

from torchrl_llm.data import Chat, ChatHistory, FinishReason, MaskReason, Source
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import ragged_rows, read_rows
from torchrl_llm.errors import ConfigError, DataError
from torchrl_llm.modules import Answer, FakeWrapper, TransformersWrapper
from torchrl_llm.modules.backends import FakeBackend, SamplingParams

# -- several turns --------------------------------------------------------------------------------


def test_defect_02_sampled_ids_are_an_exact_prefix_of_every_later_turn(tokenizer, tiny_model):
    policy = TransformersWrapper(
        tiny_model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 24}
    )
    first = policy(history_td([USER], [{**USER, "content": "  def f():\n    pass\n"}]))
    before = read_rows(first, ("tokens", "full"))
    second = policy(follow(first, {"role": "user", "content": "And now?"}))
    for old, prompt, full in zip(
        before,
        read_rows(second, ("tokens", "prompt")),
        read_rows(second, ("tokens", "full")),
        strict=True,
    ):
        assert torch.equal(prompt[: len(old)], old)
        assert torch.equal(full[: len(prompt)], prompt)


def test_later_turns_keep_provenance_and_log_probs_of_earlier_ones(tokenizer):
    policy = FakeWrapper(["one", "two"], tokenizer=tokenizer)
    first = policy(history_td([USER]))
    policy.policy_version = 7
    second = policy(follow(first, {"role": "user", "content": "And now?"}))
    names = ("source", "turn", "policy_version")
    source, turn, version = (read_rows(second, ("trace", name))[0] for name in names)
    [log_probs] = read_rows(second, ("log_probs", "full"))
    [old] = read_rows(first, ("log_probs", "full"))
    assert torch.equal(log_probs[: len(old)], old)
    sampled = source == Source.SAMPLED
    assert turn[sampled].tolist() == sorted(turn[sampled].tolist())
    pairs = zip(turn[sampled].tolist(), version[sampled].tolist(), strict=True)
    assert set(pairs) == {(0, 0), (1, 7)}
    [mask] = read_rows(second, ("masks", "all_assistant_mask"))
    assert torch.equal(mask, sampled)
    scorer = policy.get_new_version(generate=False)
    [again] = read_rows(scorer(second), ("log_probs", "full"))
    torch.testing.assert_close(again[sampled], log_probs[sampled], atol=1e-5, rtol=1e-5)


def test_a_response_that_was_cut_is_continued_not_answered(tokenizer):
    policy = FakeWrapper([Answer("one ", FinishReason.LENGTH), "two"], tokenizer=tokenizer)
    first = policy(history_td([USER]))
    assert first["tokens", "finish_reason"].tolist() == [FinishReason.LENGTH]
    second = policy(follow(first))
    [chat] = second["history"].full.chats
    assert [m["role"] for m in chat] == ["user", "assistant"]
    assert chat[-1]["content"] == "one two"
    assert chat.record.num_messages == 2
    [turn] = read_rows(second, ("trace", "turn"))
    assert set(turn[turn >= 0].tolist()) == {0}
    assert torch.equal(
        read_rows(second, ("tokens", "prompt"))[0], read_rows(first, ("tokens", "full"))[0]
    )


def test_text_that_goes_on_behind_known_ids_keeps_them(tokenizer):
    policy = FakeWrapper(["one", "two"], tokenizer=tokenizer, input_mode="text")
    first = policy(TensorDict(text=TensorDict(prompt=["Hello"], batch_size=[1]), batch_size=[1]))
    [ids] = read_rows(first, ("tokens", "full"))
    [said] = first["text"].get("full")
    following = TensorDict(
        text=TensorDict(prompt=[said + "\n<|im_start|>user\nok"], batch_size=[1]),
        tokens=ragged_rows({"prompt": [ids]}),
        trace=first["trace"],
        batch_size=[1],
    )
    following["log_probs"] = ragged_rows({"prompt": read_rows(first, ("log_probs", "full"))})
    second = policy(following)
    [prompt] = read_rows(second, ("tokens", "prompt"))
    assert torch.equal(prompt[: len(ids)], ids)
    assert tokenizer.decode(prompt) == said + "\n<|im_start|>user\nok"
    [reason] = read_rows(second, ("trace", "mask_reason"))
    [mask] = read_rows(second, ("masks", "all_assistant_mask"))
    assert (reason[mask] == MaskReason.TRAINED).all()


def test_text_that_was_rewritten_is_encoded_anew(tokenizer):
    policy = FakeWrapper(["one"], tokenizer=tokenizer, input_mode="text")
    td = TensorDict(
        text=TensorDict(prompt=["Hello"], batch_size=[1]),
        tokens=ragged_rows({"prompt": [torch.tensor([5, 6, 7])]}),
        batch_size=[1],
    )
    [prompt] = read_rows(policy(td), ("tokens", "prompt"))
    assert prompt.tolist() == tokenizer("Hello")["input_ids"]


def test_earlier_turns_without_log_probs_are_marked_invalid():
    policy = fake_tokens([[7], [8]])
    first = policy(tokens_td([5, 6]))
    td = TensorDict(
        tokens=ragged_rows({"prompt": read_rows(first, ("tokens", "full"))}),
        trace=first["trace"],
        batch_size=[1],
    )
    [reason] = read_rows(policy(td), ("trace", "mask_reason"))
    none, invalid = int(MaskReason.NOT_SAMPLED), int(MaskReason.INVALID)
    assert reason.tolist() == [none, none, invalid, invalid, 0, 0]


def test_prefer_tokens_false_encodes_every_turn_again(tokenizer):
    policy = FakeWrapper(["a  b", "two"], tokenizer=tokenizer, prefer_tokens=False)
    second = policy(follow(policy(history_td([USER])), USER))
    assert (read_rows(second, ("trace", "turn"))[0] >= 0).sum() == 4  # "two" and its end
    assert set(read_rows(second, ("trace", "turn"))[0].tolist()) == {-1, 0}


def test_tool_calls_are_a_finish_reason(tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    policy = FakeWrapper([call, "plain"], tokenizer=tokenizer, chat_template_name="qwen")
    out = policy(history_td([USER], [USER]))
    reasons = out["tokens", "finish_reason"].tolist()
    assert reasons == [FinishReason.TOOL_CALLS, FinishReason.STOP]
    assert out["history"].full.chats[0][-1]["tool_calls"]


# -- pads, ends, widths ---------------------------------------------------------------------------


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("input_mode", ["history", "tokens"])
def test_defect_01_a_pad_that_equals_eos_takes_nothing_from_a_response(
    make_tokenizer, pad_output, input_mode
):
    tokenizer = make_tokenizer(eos="<|im_end|>", pad="<|im_end|>")
    eos = tokenizer.eos_token_id
    policy = FakeWrapper(
        [[50, 51, eos], [50, 51, 52, 53, eos]],
        tokenizer=tokenizer,
        input_mode=input_mode,
        pad_output=pad_output,
    )
    td = history_td([USER], [USER]) if input_mode == "history" else tokens_td([5], [6, 7])
    out = policy(td)
    lengths = [3, 5]
    masks = read_rows(out, ("masks", "all_assistant_mask"))
    scores = read_rows(out, ("log_probs", "full"))
    full = read_rows(out, ("tokens", "full"))
    for mask, score, ids, length in zip(masks, scores, full, lengths, strict=True):
        assert mask.sum() == length
        assert ids[mask].tolist()[-1] == eos
        assert (score[mask] < 0).all()
    assert out["tokens", "finish_reason"].tolist() == [FinishReason.STOP] * 2
    if input_mode == "history":
        assert all(chat[-1].get("is_complete", True) for chat in out["history"].full.chats)
        assert list(out["text"].get("response")) == [
            tokenizer.decode([50, 51, eos]),
            tokenizer.decode([50, 51, 52, 53, eos]),
        ]


def test_defect_13_text_of_padded_ragged_prompts_is_that_of_their_ids(tokenizer):
    policy = FakeWrapper(["short", "a longer answer"], tokenizer=tokenizer, pad_output=True)
    out = policy(history_td([{**USER, "content": "Hi " * 9}], [USER]))
    assert list(out["text"].get("response")) == ["short<|im_end|>", "a longer answer<|im_end|>"]
    assert not any("<|endoftext|>" in text for text in out["text"].get("full"))


def test_defect_14_the_pad_id_is_the_tokenizers_even_if_it_adds_a_first_token(make_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    bos = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    assert tokenizer(tokenizer.pad_token)["input_ids"][0] == bos
    policy = FakeWrapper(["a", "a longer one"], tokenizer=tokenizer, pad_output=True)
    out = policy(history_td([USER], [USER]))
    assert policy.pad_token_id == tokenizer.pad_token_id
    assert out["tokens", "full"][0, -1] == tokenizer.pad_token_id
    # Nor does the tokenizer's first token stand twice in a rendered prompt.
    assert out["tokens", "prompt"][0].tolist().count(bos) == 2


def test_a_tokenizer_without_pad_pads_with_eos(make_tokenizer):
    tokenizer = make_tokenizer(pad=None)
    policy = FakeWrapper(["a", "a longer one"], tokenizer=tokenizer, pad_output=True)
    out = policy(history_td([USER], [USER]))
    assert out["tokens", "full"][0, -1] == tokenizer.eos_token_id
    assert out["masks", "all_attention_mask"].sum(1).tolist() == [
        len(chat.record.token_ids) for chat in out["history"].full.chats
    ]


def test_padded_prompts_are_read_through_their_mask():
    policy = fake_tokens([7], inplace=False)
    td = TensorDict(
        tokens=TensorDict(prompt=torch.tensor([[0, 5], [5, 6]]), batch_size=[2]),
        attention_mask=torch.tensor([[0, 1], [1, 1]]),
        batch_size=[2],
    )
    prompts = read_rows(policy(td), ("tokens", "prompt"))
    assert [row.tolist() for row in prompts] == [[5], [5, 6]]


# -- versions, distributions ----------------------------------------------------------------------


def test_defect_04_a_new_version_reads_what_it_needs_and_keeps_its_settings(tokenizer):
    policy = FakeWrapper(
        tokenizer=tokenizer,
        history_key="talk",
        min_batch_size=2,
        batching_timeout=0.5,
        generate_kwargs={"max_new_tokens": 3},
        policy_version=4,
    )
    scorer = policy.get_new_version(generate=False)
    assert policy.in_keys == [("talk", "prompt")]
    assert scorer.in_keys == [("talk", "full")]
    state = scorer.get_batching_state()
    assert (state["batching"], state["min_batch_size"], state["timeout_s"]) == (True, 2, 0.5)
    assert scorer.backend is policy.backend
    assert scorer.model is policy.model
    assert scorer.policy_version == 4
    texts = policy.get_new_version(input_mode="text")
    assert texts.in_keys == [("text", "prompt")]
    named = policy.get_new_version(input_key=("chat", "start"))
    assert named.in_keys == [("chat", "start")]


def test_defect_12_log_probs_are_those_of_the_distribution_that_was_sampled(tiny_model):
    sampling = {"temperature": 0.01, "top_k": 5, "max_new_tokens": 8, "ignore_eos": True}
    policy = TransformersWrapper(tiny_model, input_mode="tokens", generate_kwargs=sampling)
    out = policy(tokens_td([5, 6], [7]))
    sampled = torch.cat(read_rows(out, ("log_probs", "response")))
    assert sampled.mean() > -0.1  # at temperature 1 these tokens have about -3 nats
    assert out["tokens", "truncated_support"].tolist() == [True, True]
    assert out["tokens", "temperature"].tolist() == pytest.approx([0.01, 0.01])


TRUNCATED = {"top_k": 3, "max_new_tokens": 4, "ignore_eos": True, "record_support": True}


def test_kept_ids_of_earlier_turns_stay_with_their_tokens(tokenizer):
    policy = FakeWrapper(tokenizer=tokenizer, generate_kwargs=TRUNCATED)
    first = policy(history_td([USER]))
    second = policy(follow(first, {"role": "user", "content": "And now?"}))
    counts = read_rows(second, ("support", "counts"))[0]
    mask = read_rows(second, ("masks", "all_assistant_mask"))[0]
    assert counts.shape == mask.shape
    assert counts.tolist() == [3 if own else 0 for own in mask]
    assert mask.sum() == 8
    reasons = read_rows(second, ("trace", "mask_reason"))[0]
    assert (reasons[mask] == MaskReason.TRAINED).all()
    log_probs = policy.log_prob(second, ("masks", "all_assistant_mask"))[0]
    torch.testing.assert_close(log_probs, read_rows(second, ("log_probs", "full"))[0])


def test_earlier_turns_whose_kept_ids_did_not_travel_are_marked_off_support():
    policy = fake_tokens(generate_kwargs=TRUNCATED)
    first = policy(tokens_td([5, 6]))
    full = read_rows(first, ("tokens", "full"))
    log_probs = ragged_rows({"prompt": read_rows(first, ("log_probs", "full"))})
    td = TensorDict(
        tokens=ragged_rows({"prompt": full}),
        log_probs=log_probs,
        trace=first["trace"],
        batch_size=[1],
    )
    second = policy(td)
    trained, off = int(MaskReason.TRAINED), int(MaskReason.OFF_SUPPORT)
    reasons = read_rows(second, ("trace", "mask_reason"))[0].tolist()
    assert reasons == [1, 1] + [off] * 4 + [trained] * 4


def test_what_changes_the_logits_cannot_be_recorded_as_a_support():
    with pytest.raises(ConfigError, match=r"record_support records .*repetition_penalty"):
        fake_tokens(generate_kwargs={**TRUNCATED, "repetition_penalty": 1.1})
    with pytest.raises(ConfigError, match=r"typical_p"):
        SamplingParams(max_new_tokens=1, record_support=True, native={"typical_p": 0.9})
    policy = fake_tokens(generate_kwargs={"top_k": 3})
    with pytest.raises(ConfigError, match="record_support shapes the output"):
        policy(tokens_td([5]), record_support=True)


def test_a_backend_that_cannot_record_a_support_says_so():
    class Blind(FakeBackend):
        records_support = False

    backend = Blind(vocab_size=8, eos_token_ids=(2,))
    with pytest.raises(ConfigError, match="Blind cannot tell which ids it kept"):
        fake_tokens(backend, generate_kwargs=TRUNCATED)


def test_kept_ids_of_other_tokens_are_refused(tokenizer):
    policy = FakeWrapper(tokenizer=tokenizer, generate_kwargs=TRUNCATED)
    out = policy(history_td([USER]))
    out["support"] = ragged_rows(
        {"token_ids": [torch.zeros(0).int()], "counts": [torch.zeros(2).int()]}
    )
    with pytest.raises(DataError, match="recorded for other tokens"):
        policy.get_new_version(generate=False)(out)


def test_defect_17_distribution_and_full_log_probs_are_there_without_further_arguments(tokenizer):
    policy = FakeWrapper(tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4})
    out = policy(history_td([USER], [{**USER, "content": "How are you?"}]))
    assert ("log_probs", "full") in out.keys(True)
    dist = policy.get_dist(out)
    longest = max(len(row) for row in read_rows(out, ("tokens", "full")))
    assert dist.logits.shape == (2, longest, len(tokenizer))
    assert dist.entropy()[0, 0] == 0
    with pytest.raises(DataError, match="no mask"):
        policy.get_dist(out, mask_key="missing")
    kept = TensorDict()
    same = policy.get_dist(out, kept, as_padded_tensor=True, padding_side="right")
    torch.testing.assert_close(kept["logits"].log_softmax(-1), same.logits)
    short = min(range(2), key=lambda row: len(read_rows(out, ("tokens", "full"))[row]))
    size = len(read_rows(out, ("tokens", "full"))[short])
    assert not dist.mask[short, : longest - size + 1].any()
    torch.testing.assert_close(dist.logits[short, longest - size :], same.logits[short, :size])
    with pytest.raises(ConfigError, match="padding_side must be one of"):
        policy.get_dist(out, padding_side="middle")


def test_a_distribution_needs_no_masks_in_the_rows(tokenizer):
    policy = FakeWrapper(["an answer"], tokenizer=tokenizer)
    out = policy(history_td([USER]))
    for kind in ("assistant", "attention"):
        key = ("masks", f"all_{kind}_mask")
        dist = policy.get_dist(out.select(("history", "full")), mask_key=key)
        assert torch.equal(dist.mask[0, 1:], read_rows(out, key)[0][1:])


@pytest.mark.parametrize("mode", ["history", "text"])
def test_scoring_returns_the_conversation_and_the_text_that_it_scored(tokenizer, mode):
    policy = FakeWrapper(["an answer"], tokenizer=tokenizer, input_mode="history")
    given = policy(history_td([USER], [{**USER, "content": "More"}]))
    scorer = policy.get_new_version(generate=False, inplace=False, input_mode=mode)
    assert [scorer.return_text, scorer.return_history] == [True, mode == "history"]
    out = scorer(given.select("history", "text"))
    assert list(out["text"].get("full")) == list(given["text"].get("full"))
    if mode == "history":
        assert out["history"].full.chats == given["history"].full.chats
    with pytest.raises(TypeError, match="has no argument 'pad_side'"):
        policy.get_dist(out, pad_side="left")


def test_defect_18_models_with_another_argument_order_are_scored():
    model = build("gpt2", eos_token_id=2)
    policy = TransformersWrapper(model, input_mode="tokens", generate_kwargs={"max_new_tokens": 4})
    out = policy(tokens_td([5, 6], [7]))
    with torch.no_grad():
        scored = policy.get_new_version(generate=False, inplace=False)(out)
    for a, b in zip(
        read_rows(out, ("log_probs", "response")),
        read_rows(scored, ("log_probs", "full")),
        strict=True,
    ):
        torch.testing.assert_close(a, b[-len(a) :], atol=1e-5, rtol=1e-5)


def test_defect_31_a_group_of_repeats_is_encoded_once_and_text_is_never_encoded(
    tokenizer, monkeypatch
):
    policy = FakeWrapper(["a"], tokenizer=tokenizer)
    calls = []
    encode = policy.formatter.encode_batch
    monkeypatch.setattr(
        policy.formatter,
        "encode_batch",
        lambda chats, **kw: calls.append(len(chats)) or encode(chats, **kw),
    )
    policy(history_td(*([USER],) * 8, *([{**USER, "content": "Other"}],) * 8))
    assert calls == [2]


def test_defect_32_known_rows_are_scored_without_encoding(tokenizer, monkeypatch):
    policy = FakeWrapper(["a"], tokenizer=tokenizer)
    out = policy(history_td([USER], [USER]))
    scorer = policy.get_new_version(generate=False)

    def refuse(chats, **options):
        assert not list(chats), "encoded again"
        return []

    monkeypatch.setattr(scorer.formatter, "encode_batch", refuse)
    scorer(out)


def test_demonstrations_are_scored_with_their_end_of_turn_in_the_mask(tokenizer):
    chat = Chat([USER, {"role": "assistant", "content": "Hello"}])
    td = TensorDict(history=ChatHistory(full=History.of([chat]), batch_size=[1]), batch_size=[1])
    out = FakeWrapper(tokenizer=tokenizer, generate=False)(td)
    [ids], [mask] = (
        read_rows(out, ("tokens", "full")),
        read_rows(out, ("masks", "all_assistant_mask")),
    )
    assert tokenizer.decode(ids[mask]) == "Hello<|im_end|>"
    assert "trace" not in out.keys()


def test_batching_keeps_errors_and_arguments_with_their_caller():

    policy = fake_tokens(min_batch_size=2, batching_timeout=0.3)

    def ask(prompt, most):
        out = policy(tokens_td(prompt), ignore_eos=True, max_new_tokens=most)
        return len(read_rows(out, ("tokens", "response"))[0])

    calls = [([5], 3), ([6], 5), ([7], 3), ([99], 3), ([], 3)]
    *lengths, bad, empty = in_threads(*(partial(ask, *call) for call in calls))
    assert lengths == [3, 5, 3]
    assert (type(bad).__name__, type(empty).__name__) == ("TokenizerError", "DataError")
