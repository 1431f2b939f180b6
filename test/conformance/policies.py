"""What every policy must do whatever its backend, as a mixin; see :mod:`conformance.backends`."""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from waiting import in_threads

from torchrl_llm.data import Chat, ChatHistory, MaskReason, Source
from torchrl_llm.data.enums import FinishReason
from torchrl_llm.data.history import History
from torchrl_llm.data.ragged import lazy_rows, pad_rows, ragged_rows, read_rows
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules.policies.row_blocks import flat_blocks, tensor_rows

MODES = ["history", "text", "tokens"]
# Each mode, padding and number of samples, and most pairs of them.
SAMPLED = [
    ("history", False, None),
    ("history", True, 3),
    ("text", True, 1),
    ("text", False, 3),
    ("tokens", True, None),
    ("tokens", False, 3),
]
REST = [c for c in itertools.product(MODES, [False, True], [None, 1, 3]) if c not in SAMPLED]


class WrapperConformance:
    """Needs ``make_policy(**options)``: a policy that samples, with the shared ``tokenizer``."""

    CHATS = ("Hi", "How are you?", "Hi", "What is the sum of 3 and 4?")

    def make_policy(self, tokenizer, **options):
        raise NotImplementedError

    def inputs(self, policy, chats=CHATS):
        rows = [Chat([{"role": "user", "content": text}]) for text in chats]
        size = [len(rows)]
        if policy.input_mode == "history":
            history = ChatHistory(prompt=History.of(rows), batch_size=size)
            return TensorDict(history=history, batch_size=size)
        texts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in chats]
        if policy.input_mode == "text":
            return TensorDict(text=TensorDict(prompt=texts, batch_size=size), batch_size=size)
        ids = [torch.tensor(self.ids(policy, text)) for text in texts]
        return TensorDict(tokens=ragged_rows({"prompt": ids}), batch_size=size)

    def ids(self, policy, text):
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    @pytest.fixture(autouse=True)
    def _keep_tokenizer(self, tokenizer):
        self._tokenizer = tokenizer

    def make(self, tokenizer, **options):
        options.setdefault("generate_kwargs", {"max_new_tokens": 7})
        return self.make_policy(tokenizer, **options)

    def test_a_dense_batch_of_two_dimensions_is_written_with_torchrls_names(self, tokenizer):
        shared = {"max_tokens": 7, "temperature": 0.0}
        policy = self.make(tokenizer, generate_kwargs=shared)
        flat = policy(self.inputs(policy))
        td = self.inputs(policy).view(2, 2)
        assert policy(td) is td
        scorer = self.make(tokenizer, generate=False, generate_kwargs=shared)
        scored = scorer(td.copy())
        for key in (("tokens", "full"), ("tokens", "response"), ("log_probs", "full")):
            rows = read_rows(flat, key)
            for found in (td, scored) if key != ("log_probs", "full") else (td,):
                got = tensor_rows(flat_blocks(found), key)
                assert all(torch.equal(a, b) for a, b in zip(got, rows, strict=True))
        prompts = read_rows(flat, ("tokens", "prompt"))
        sampled = read_rows(flat, ("log_probs", "full"))
        again = tensor_rows(flat_blocks(scored), ("log_probs", "full"))
        for prompt, a, b in zip(prompts, again, sampled, strict=True):
            torch.testing.assert_close(a[len(prompt) :], b[len(prompt) :], atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("input_mode", MODES)
    def test_rows_that_are_not_stepped_get_an_empty_answer(self, tokenizer, input_mode):
        greedy = {"max_new_tokens": 7, "temperature": 0.0}
        policy = self.make(tokenizer, input_mode=input_mode, generate_kwargs=greedy)
        whole = policy(self.inputs(policy))
        steps = torch.tensor([[True], [False], [False], [True]])
        out = policy(self.inputs(policy).set("_step", steps))
        answers = read_rows(out, ("tokens", "response"))
        expected = read_rows(whole, ("tokens", "response"))
        assert answers[0].tolist() == expected[0].tolist()
        assert answers[3].tolist() == expected[3].tolist()
        for row in (1, 2):
            assert answers[row].numel() == 0
            prompt, full = (read_rows(out, ("tokens", name))[row] for name in ("prompt", "full"))
            assert full.tolist() == prompt.tolist()
            assert out["tokens", "finish_reason"][row] == FinishReason.ABORT

    @pytest.mark.parametrize(
        ("input_mode", "pad_output", "num_samples"),
        [*SAMPLED, *(pytest.param(*case, marks=pytest.mark.full) for case in REST)],
    )
    def test_log_probs_of_what_was_generated_are_the_sampled_ones(
        self, tokenizer, input_mode, pad_output, num_samples
    ):
        policy = self.make(
            tokenizer, input_mode=input_mode, pad_output=pad_output, num_samples=num_samples
        )
        out = policy(self.inputs(policy))
        assert out.batch_size == ((4,) if num_samples is None else (4, num_samples))
        scorer = policy.get_new_version(generate=False, inplace=False)
        assert scorer.in_keys == [(input_mode, "full")]
        with torch.no_grad():
            scored = scorer(out)
        assert scored.batch_size == out.batch_size
        rows = [out] if num_samples is None else out.unbind(0)
        again = [scored] if num_samples is None else scored.unbind(0)
        for a, b in zip(rows, again, strict=True):
            for sampled, rescored, mask, same, ids, same_ids in zip(
                read_rows(a, ("log_probs", "full")),
                read_rows(b, ("log_probs", "full")),
                read_rows(a, ("masks", "all_assistant_mask")),
                read_rows(b, ("masks", "all_assistant_mask")),
                read_rows(a, ("tokens", "full")),
                read_rows(b, ("tokens", "full")),
                strict=True,
            ):
                assert mask.any()
                assert torch.equal(ids, same_ids)
                assert torch.equal(mask, same)
                assert (sampled[~mask] == 0).all()
                torch.testing.assert_close(sampled[mask], rescored[mask], atol=1e-5, rtol=1e-5)
                assert rescored[0] == 0

    @pytest.mark.parametrize(
        ("input_mode", "pad_output"), [("history", True), ("text", False), ("tokens", True)]
    )
    def test_log_probs_under_truncation_are_the_sampled_ones_where_the_support_is_recorded(
        self, tokenizer, input_mode, pad_output
    ):
        kwargs = {"max_new_tokens": 7, "top_p": 0.8, "temperature": 0.7, "record_support": True}
        policy = self.make(
            tokenizer, input_mode=input_mode, pad_output=pad_output, generate_kwargs=kwargs
        )
        if not policy.backend.records_support:
            pytest.skip("this backend cannot tell which ids it kept")
        out = policy(self.inputs(policy))
        assert out["tokens", "truncated_support"].tolist() == [False] * 4
        mask_key = ("masks", "all_assistant_mask")
        masks = read_rows(out, mask_key)
        for counts, mask in zip(read_rows(out, ("support", "counts")), masks, strict=True):
            assert counts.dtype == torch.int32
            assert (counts[~mask] == 0).all()
            assert (counts[mask] > 0).all()
        key = ("log_probs", "full")
        ids, sampled = (
            out[name] if pad_output else pad_rows(read_rows(out, name), 0)
            for name in (("tokens", "full"), key)
        )
        pairs = []
        with torch.no_grad():
            dist = policy.get_dist(out, mask_key=mask_key, padding_side="right")
            pairs += [(policy.log_prob(out, mask_key), sampled), (dist.log_prob(ids), sampled)]
            for options in ({}, {"batching": True, "batching_timeout": 0.0}):
                scorer = policy.get_new_version(generate=False, inplace=False, **options)
                scored = zip(read_rows(scorer(out), key), masks, strict=True)
                scored = [row.where(mask, 0.0) for row, mask in scored]
                pairs += zip(scored, read_rows(out, key), strict=True)
        for log_probs, wanted in pairs:
            torch.testing.assert_close(log_probs.cpu(), wanted, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(
        ("input_mode", "generate", "record_support"),
        [
            ("history", True, False),
            ("history", False, True),
            ("text", True, True),
            ("text", False, False),
            ("tokens", True, True),
            ("tokens", False, False),
        ],
    )
    def test_exactly_the_declared_keys_are_written(
        self, tokenizer, input_mode, generate, record_support
    ):
        kwargs = {"max_new_tokens": 7, "record_support": record_support}
        policy = self.make(tokenizer, input_mode=input_mode, inplace=False, generate_kwargs=kwargs)
        out = policy(self.inputs(policy))
        if not generate:
            policy = policy.get_new_version(generate=False)
            out = policy(out)
        written = set()
        for key in out.keys(True):
            if isinstance(key, tuple) and key[-1] != "messages":
                written.add(key)
        assert written == set(policy.out_keys)

    @pytest.mark.parametrize("input_mode", MODES)
    def test_rows_hold_every_token_with_its_provenance(self, tokenizer, input_mode):
        policy = self.make(tokenizer, input_mode=input_mode, policy_version=5)
        td = self.inputs(policy)
        out = policy(td)
        assert out is td
        columns = [("tokens", "prompt"), ("tokens", "response"), ("tokens", "full")]
        columns += [("log_probs", "response"), ("log_probs", "full")]
        columns += [("trace", name) for name in ("source", "turn", "policy_version", "mask_reason")]
        for values in zip(*(read_rows(out, key) for key in columns), strict=True):
            prompt, response, full, sampled, log_probs, source, turn, version, reason = values
            assert torch.equal(full, torch.cat([prompt, response]))
            assert torch.equal(log_probs[len(prompt) :], sampled)
            assert (log_probs[: len(prompt)] == 0).all()
            assert (source[len(prompt) :] == Source.SAMPLED).all()
            assert not (source[: len(prompt)] == Source.SAMPLED).any()
            assert turn.tolist() == [-1] * len(prompt) + [0] * len(response)
            assert version.tolist() == [-1] * len(prompt) + [5] * len(response)
            expected = [int(MaskReason.NOT_SAMPLED)] * len(prompt) + [0] * len(response)
            assert reason.tolist() == expected
        reasons = out["tokens", "finish_reason"]
        assert reasons.dtype == torch.int8
        assert reasons.shape == (4,)
        assert out["tokens", "temperature"].tolist() == [1.0] * 4
        assert out["tokens", "truncated_support"].tolist() == [False] * 4

    @pytest.mark.parametrize("input_mode", MODES)
    def test_padded_columns_hold_the_ragged_rows(self, tokenizer, input_mode):
        ragged = self.make(
            tokenizer, input_mode=input_mode, generate_kwargs={"seed": 1, "max_new_tokens": 9}
        )
        dense = ragged.get_new_version(pad_output=True)
        a, b = ragged(self.inputs(ragged)), dense(self.inputs(dense))
        for node in ("tokens", "masks", "log_probs", "trace"):
            assert not a[node].padded, node
            assert b[node].padded, node
        pad = tokenizer.pad_token_id
        prompts = [row.numel() for row in read_rows(a, ("tokens", "prompt"))]
        for key, value in (
            (("tokens", "full"), pad),
            (("log_probs", "full"), 0.0),
            (("masks", "all_attention_mask"), False),
            (("masks", "all_assistant_mask"), False),
            (("trace", "source"), -1),
        ):
            rows = read_rows(a, key)
            left = [row[:cut] for row, cut in zip(rows, prompts, strict=True)]
            right = [row[cut:] for row, cut in zip(rows, prompts, strict=True)]
            wanted = [pad_rows(left, value, side="left"), pad_rows(right, value)]
            assert torch.equal(b[key], torch.cat(wanted, -1)), key
            for part, half in zip(("prompt", "response"), wanted, strict=True):
                if key == ("tokens", "full"):
                    assert torch.equal(b["tokens", part], half), part
        assert torch.equal(b["log_probs", "response"], b["log_probs", "full"][:, max(prompts) :])

    def test_text_and_history_are_views_of_the_ids(self, tokenizer):
        policy = self.make(tokenizer)
        out = policy(self.inputs(policy))
        texts = {part: list(out["text"].get(part)) for part in ("prompt", "response", "full")}
        for row, ids in enumerate(read_rows(out, ("tokens", "full"))):
            assert texts["full"][row] == tokenizer.decode(ids, skip_special_tokens=False)
            assert texts["full"][row].startswith(texts["prompt"][row])
        whole, answers = out["history"].full.chats, out["history"].response.chats
        for chat, answer, ids in zip(
            whole, answers, read_rows(out, ("tokens", "full")), strict=True
        ):
            assert chat[-1] == answer[0]
            assert chat[-1]["role"] == "assistant"
            assert torch.equal(chat.record.token_ids, ids)
            assert chat.record.num_messages == len(chat) == 2

    @pytest.mark.parametrize("input_mode", MODES)
    def test_a_single_row_and_more_dimensions_keep_their_shape(self, tokenizer, input_mode):
        policy = self.make(tokenizer, input_mode=input_mode, inplace=False)
        td = self.inputs(policy)
        assert policy(td[0]).batch_size == ()
        grid = LazyStackedTensorDict(td[:2], td[2:], stack_dim=0)
        out = policy(grid)
        assert out.batch_size == (2, 2)
        assert len(read_rows(out[1], ("tokens", "full"))) == 2

    @pytest.mark.parametrize("input_mode", MODES)
    def test_rows_of_a_buffer_are_scored_as_the_batch_they_came_from(self, tokenizer, input_mode):
        policy = self.make(tokenizer, input_mode=input_mode)
        out = policy(self.inputs(policy))
        scorer = policy.get_new_version(generate=False)
        with torch.no_grad():
            rows = scorer(lazy_rows(list(out.clone().unbind(0))))
            batch = scorer(out)
        for a, b in zip(
            read_rows(rows, ("log_probs", "full")),
            read_rows(batch, ("log_probs", "full")),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)

    @pytest.mark.parametrize("inplace", [True, "empty", False])
    def test_the_output_goes_where_inplace_says(self, tokenizer, inplace):
        policy = self.make(tokenizer, inplace=inplace)
        td = self.inputs(policy).set("other", torch.ones(4))
        out = policy(td)
        assert (out is td) == (inplace is True)
        assert ("other" in out.keys()) == (inplace is True)
        assert "tokens" in out.keys()

    def test_a_given_output_is_written_to(self, tokenizer):
        policy = self.make(tokenizer)
        out = TensorDict(batch_size=[4])
        td = self.inputs(policy)
        assert policy(td, tensordict_out=out) is out
        assert "tokens" in out.keys()
        assert "tokens" not in td.keys()

    def test_arguments_of_a_call_are_for_that_call(self, tokenizer):
        policy = self.make(tokenizer, input_mode="tokens", inplace=False)
        options = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 0.5}
        out = policy(self.inputs(policy), **options)
        assert [len(row) for row in read_rows(out, ("tokens", "response"))] == [2] * 4
        assert out["tokens", "temperature"].tolist() == [0.5] * 4
        plain = policy(self.inputs(policy), ignore_eos=True)
        assert [len(row) for row in read_rows(plain, ("tokens", "response"))] == [7] * 4

    def test_scoring_uses_the_temperature_that_each_row_was_sampled_at(self, tokenizer):
        policy = self.make(
            tokenizer,
            input_mode="tokens",
            generate_kwargs={"temperature": 0.5, "max_new_tokens": 4},
        )
        out = policy(self.inputs(policy))
        log_probs = policy.log_prob(out, mask_key=("masks", "all_assistant_mask"))
        wanted = pad_rows(read_rows(out, ("log_probs", "full")), 0.0)
        torch.testing.assert_close(log_probs, wanted, atol=1e-5, rtol=1e-5)
        dist = policy.get_dist(out, mask_key=("masks", "all_assistant_mask"), padding_side="right")
        ids = pad_rows(read_rows(out, ("tokens", "full")), 0)
        torch.testing.assert_close(dist.log_prob(ids), wanted, atol=1e-5, rtol=1e-5)

    def test_num_samples_inside_an_environment_names_the_primer(self, tokenizer):
        policy = self.make(tokenizer, num_samples=2)
        td = self.inputs(policy).set("done", torch.zeros(4, 1, dtype=torch.bool))
        with pytest.raises(ConfigError, match=r"DataLoadingPrimer\(repeats=n\)"):
            policy(td)

    def test_samples_share_their_group_and_have_everything_else_of_their_own(self, tokenizer):
        policy = self.make(tokenizer, num_samples=3)
        td = self.inputs(policy).set("group_id", torch.tensor([4, 5, 6, 7]))
        out = policy(td)
        assert out["group_id"].tolist() == [[4] * 3, [5] * 3, [6] * 3, [7] * 3]
        assert out["tokens", "finish_reason"].shape == (4, 3)
        chats = out[1]["history"].full.chats
        assert [chat[0]["content"] for chat in chats] == ["How are you?"] * 3
        responses = read_rows(out[1], ("tokens", "response"))
        for chat, ids in zip(chats, responses, strict=True):
            assert torch.equal(chat.record.token_ids[-len(ids) :], ids)

    def test_a_policy_survives_pickling_and_copying(self, tokenizer):
        policy = self.make(
            tokenizer, batching=True, generate_kwargs={"max_new_tokens": 3, "seed": 0}
        )
        wanted = read_rows(policy(self.inputs(policy)), ("tokens", "full"))
        for twin in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):
            got = read_rows(twin(self.inputs(twin)), ("tokens", "full"))
            assert [r.tolist() for r in got] == [r.tolist() for r in wanted]
            assert getattr(twin, "model", None) is twin.backend.module

    def test_threads_share_a_policy(self, tokenizer):
        policy = self.make(
            tokenizer, min_batch_size=4, batching_timeout=5.0, generate_kwargs={"max_new_tokens": 4}
        )
        texts = [f"question {k}" for k in range(4)]

        def ask(text):
            return policy(self.inputs(policy, chats=(text,)))

        outputs = in_threads(*(partial(ask, text) for text in texts))
        for text, out in zip(texts, outputs, strict=True):
            assert out["history"].full.chats[0][0]["content"] == text
