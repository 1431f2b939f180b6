"""What every backend must do, as a mixin.

A new backend is tested by ten lines: a class that derives from :class:`BackendConformance` and
builds the backend, and one that derives from :class:`conformance.policies.WrapperConformance` and
builds the policy.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from torchrl_llm.data import FinishReason
from torchrl_llm.data.scoring import ScoreExtras, Support
from torchrl_llm.errors import DataError, OverlongError, TokenizerError
from torchrl_llm.modules.backends import SamplingParams
from torchrl_llm.modules.backends.backend_port import Backend
from torchrl_llm.modules.backends.local_backend import LocalBackend

PROMPTS = [[5, 6, 7, 8], [9], [10, 11], [5, 6, 7, 8]]


def prompts():
    return [torch.tensor(ids) for ids in PROMPTS]


def flatten(groups):
    return [completion for group in groups for completion in group]


class BackendConformance:
    """Needs ``make_backend(max_length=None)``: a backend that samples and follows no script."""

    def make_backend(self, **options):
        raise NotImplementedError

    @pytest.fixture
    def backend(self):
        return self.make_backend()

    def rescored(self, backend, groups, params, **options):
        """Log-probs of the sampled tokens by ``token_scores``, row after row."""
        sequences, select = [], []
        for prompt, group in zip(prompts(), groups, strict=True):
            for completion in group:
                whole = torch.cat([prompt, completion.token_ids])
                sequences.append(whole)
                select.append(torch.arange(len(whole)) >= len(prompt))
        with torch.no_grad():
            return backend.token_scores(
                sequences, select, temperature=params.scoring_temperature, **options
            )

    @pytest.mark.parametrize(("temperature", "num_samples"), [(1.0, 3), (0.6, 1), (0.0, 3)])
    def test_scores_of_sampled_tokens_are_their_sampled_log_probs(
        self, backend, temperature, num_samples
    ):
        params = SamplingParams(max_new_tokens=9, temperature=temperature, num_samples=num_samples)
        groups = backend.generate(prompts(), params)
        sampled = torch.cat([c.log_probs for c in flatten(groups)])
        scores = self.rescored(backend, groups, params)
        assert scores.log_probs.dtype == torch.float32
        torch.testing.assert_close(scores.log_probs.cpu(), sampled, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize(
        "truncation",
        [
            {"top_k": 3},
            {"top_p": 0.7, "temperature": 0.6},
            {"min_p": 0.2, "temperature": 0.6},
            {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
        ],
        ids=str,
    )
    def test_scores_on_the_recorded_support_are_the_sampled_log_probs(self, backend, truncation):
        if not backend.records_support:
            pytest.skip("this backend cannot tell which ids it kept")
        params = SamplingParams(max_new_tokens=9, num_samples=2, record_support=True, **truncation)
        groups = backend.generate(prompts(), params)
        completions = flatten(groups)
        for completion in completions:
            ids, counts = completion.support
            assert ids.dtype == counts.dtype == torch.int32
            assert counts.shape == completion.token_ids.shape
            assert (counts >= 1).all()
            drawn = completion.token_ids.repeat_interleave(counts)
            owner = torch.arange(len(counts)).repeat_interleave(counts)
            # Each sampled token is one of its kept ids.
            assert owner[ids == drawn].tolist() == list(range(len(counts)))
        support = Support.join([completion.support for completion in completions])
        sampled = torch.cat([c.log_probs for c in completions])
        whole = self.rescored(backend, groups, params)
        scores = self.rescored(backend, groups, params, extras=ScoreExtras(support=support))
        torch.testing.assert_close(scores.log_probs.cpu(), sampled, atol=1e-5, rtol=1e-5)
        # Without the support the ratio of the unchanged policy is off.
        assert (whole.log_probs.cpu() - sampled).min() < -0.01

    def test_a_support_is_recorded_only_where_something_was_cut(self, backend):
        if not backend.records_support:
            pytest.skip("this backend cannot tell which ids it kept")
        for settings in ({}, {"temperature": 0.0, "top_k": 3}):
            params = SamplingParams(max_new_tokens=4, record_support=True, **settings)
            for completion in flatten(backend.generate(prompts(), params)):
                assert completion.support.token_ids.shape == (0,)
                assert completion.support.counts.tolist() == [0] * len(completion.token_ids)
        params = SamplingParams(max_new_tokens=4, top_k=3)
        assert all(c.support is None for c in flatten(backend.generate(prompts(), params)))

    def test_every_prompt_gets_its_samples_in_order(self, backend):
        groups = backend.generate(prompts(), SamplingParams(max_new_tokens=3, num_samples=2))
        assert [len(group) for group in groups] == [2, 2, 2, 2]
        for completion in flatten(groups):
            assert completion.token_ids.dtype == torch.int64
            assert completion.log_probs.dtype == torch.float32
            assert completion.token_ids.shape == completion.log_probs.shape
            assert 1 <= len(completion.token_ids) <= 3
            assert isinstance(completion.finish_reason, FinishReason)

    def test_samples_of_one_prompt_differ(self, backend):
        params = SamplingParams(max_new_tokens=8, num_samples=8, ignore_eos=True)
        [group] = backend.generate(prompts()[:1], params)
        assert len({tuple(c.token_ids.tolist()) for c in group}) > 1

    def test_greedy_answers_depend_on_the_prompt_alone(self, backend):
        params = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
        together = flatten(backend.generate(prompts(), params))
        alone = [backend.generate([p], params)[0][0] for p in prompts()]
        for a, b in zip(together, alone, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=1e-5)

    def test_a_seed_repeats_and_leaves_the_global_generator_alone(self, backend):
        params = SamplingParams(max_new_tokens=8, seed=3, ignore_eos=True)
        before = torch.get_rng_state()
        first = flatten(backend.generate(prompts(), params))
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(5)
        second = flatten(backend.generate(prompts(), params))
        assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in second]

    def test_the_global_generator_repeats_bit_for_bit(self, backend):
        params = SamplingParams(max_new_tokens=8)
        state = torch.get_rng_state()
        first = flatten(backend.generate(prompts(), params))
        torch.set_rng_state(state)
        second = flatten(backend.generate(prompts(), params))
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)
            assert torch.equal(a.log_probs, b.log_probs)

    def test_a_cancelled_prompt_ends_early_and_leaves_the_others_as_they_are(self, backend):
        if type(backend).generate_cancellable is Backend.generate_cancellable:
            pytest.skip("this backend cannot cancel")
        params = SamplingParams(max_new_tokens=40, seed=3, num_samples=2, ignore_eos=True)
        asked = itertools.count()
        cancelled = [lambda: False, lambda: next(asked) > 10, lambda: False, lambda: False]
        plain = flatten(backend.generate(prompts(), params))
        found = flatten(backend.generate_cancellable(prompts(), params, cancelled))
        rounding = 0.0 if isinstance(backend, LocalBackend) else 1e-5
        for row, (cut, whole) in enumerate(zip(found, plain, strict=True)):
            size = len(cut.token_ids)
            if row in (2, 3):
                assert cut.finish_reason == FinishReason.ABORT
                assert 1 <= size <= 20
            else:
                assert cut.finish_reason == FinishReason.LENGTH
                assert size == 40
            assert torch.equal(cut.token_ids, whole.token_ids[:size])
            torch.testing.assert_close(
                cut.log_probs, whole.log_probs[:size], atol=rounding, rtol=rounding
            )

    def test_a_call_whose_prompts_are_all_cancelled_ends_at_once(self, backend):
        if type(backend).generate_cancellable is Backend.generate_cancellable:
            pytest.skip("this backend cannot cancel")
        params = SamplingParams(max_new_tokens=40, num_samples=2, ignore_eos=True)
        for completion in flatten(
            backend.generate_cancellable(prompts(), params, [lambda: True] * 4)
        ):
            assert completion.finish_reason == FinishReason.ABORT
            assert len(completion.token_ids) == len(completion.log_probs) <= 8

    def test_length_ends_a_response_that_nothing_else_ended(self, backend):
        params = SamplingParams(max_new_tokens=5, ignore_eos=True)
        for completion in flatten(backend.generate(prompts(), params)):
            assert len(completion.token_ids) == 5
            assert completion.finish_reason == FinishReason.LENGTH

    def test_a_stop_id_ends_a_response_and_stays_in_it(self, backend):
        ends = tuple(range(backend.vocab_size))
        for allowed in (5, 1):  # as the last allowed token it is a stop too
            params = SamplingParams(max_new_tokens=allowed, stop_token_ids=ends)
            for completion in flatten(backend.generate(prompts(), params)):
                assert len(completion.token_ids) == 1
                assert completion.finish_reason == FinishReason.STOP

    def test_responses_end_at_the_first_end_id_only(self, backend):
        half = tuple(range(0, backend.vocab_size, 2))
        params = SamplingParams(max_new_tokens=12, stop_token_ids=half, num_samples=4)
        for completion in flatten(backend.generate(prompts(), params)):
            ended = torch.isin(completion.token_ids, torch.tensor(half))
            assert not ended[:-1].any()
            assert bool(ended[-1]) == (completion.finish_reason == FinishReason.STOP)

    def test_top_k_of_one_takes_the_most_probable_token_with_certainty(self, backend):
        greedy = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
        top = SamplingParams(max_new_tokens=6, top_k=1, ignore_eos=True)
        wanted = flatten(backend.generate(prompts(), greedy))
        for a, b in zip(flatten(backend.generate(prompts(), top)), wanted, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            # The log-prob is that of the distribution that was sampled: one token is left.
            assert a.log_probs.abs().max() < 1e-6

    def test_prompts_that_no_model_takes_are_refused_by_row(self, backend):
        params, good = SamplingParams(max_new_tokens=1), torch.tensor([5])
        with pytest.raises(DataError, match="prompt 1 is empty"):
            backend.generate([good, torch.zeros(0, dtype=torch.int64)], params)
        for bad_id in (-1, 10**6):
            rows = [good, torch.tensor([6, bad_id])]
            with pytest.raises(TokenizerError, match=f"row 1 holds the token id {bad_id}"):
                backend.generate(rows, params)
            with pytest.raises(TokenizerError, match="row 1"):
                backend.token_scores(rows, [torch.zeros(len(row)).bool() for row in rows])
        for bad in (good.int(), torch.tensor([5.0]), torch.tensor([[5, 6]]), [5, 6]):
            with pytest.raises(DataError, match=r"row 1 .* int64"):
                backend.generate([good, bad], params)

    def test_the_context_bounds_a_response_and_refuses_what_fills_it(self):
        backend = self.make_backend(max_length=6)
        params = SamplingParams(max_new_tokens=50, ignore_eos=True)
        groups = backend.generate(prompts(), params)
        assert [len(c.token_ids) for c in flatten(groups)] == [2, 5, 4, 2]
        assert all(c.finish_reason == FinishReason.LENGTH for c in flatten(groups))
        with pytest.raises(OverlongError, match="prompt 0 has 6 tokens"):
            backend.generate([torch.arange(5, 11)], params)

    def test_scores_are_flat_in_row_major_order_with_a_temperature_a_row(self, backend):
        sequences = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
        select = [torch.tensor([False, True, True]), torch.tensor([False, True])]
        both = backend.token_scores(
            sequences, select, temperature=torch.tensor([1.0, 2.0]), entropy=True
        )
        assert both.log_probs.shape == both.entropy.shape == (3,)
        for row, where in ((0, slice(0, 2)), (1, slice(2, 3))):
            one = backend.token_scores(
                sequences[row : row + 1], select[row : row + 1], temperature=row + 1.0, entropy=True
            )
            torch.testing.assert_close(one.log_probs, both.log_probs[where], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(one.entropy, both.entropy[where], atol=1e-5, rtol=1e-5)

    def test_rows_of_one_token_are_scored_to_nothing_and_rows_without_prefix_refused(self, backend):
        one = torch.tensor([5])
        with pytest.raises(DataError, match="first token"):
            backend.token_scores([torch.tensor([5, 6])], [torch.tensor([True, True])])
        assert backend.token_scores([one], [torch.tensor([False])]).log_probs.shape == (0,)
        with pytest.raises(DataError, match="row 1 is empty"):
            backend.token_scores([one, one[:0]], [torch.tensor([False]), one[:0].bool()])

    def test_scores_have_gradients_where_they_are_enabled(self, backend):
        if backend.module is None:
            pytest.skip("this backend holds no weights")
        sequences = [torch.tensor([5, 6, 7])]
        select = [torch.tensor([False, True, True])]
        scores = backend.token_scores(sequences, select)
        scores.log_probs.sum().backward()
        grads = [p.grad for p in backend.module.parameters() if p.grad is not None]
        assert any(grad.abs().sum() > 0 for grad in grads)
        backend.module.zero_grad()
        with torch.no_grad():
            assert not backend.token_scores(sequences, select).log_probs.requires_grad
