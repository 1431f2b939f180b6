"""The Transformers backend: conformance over model families, and what only it does."""

from __future__ import annotations

import itertools

import pytest
import torch
from conformance.backends import BackendConformance, flatten, prompts
from conformance.policies import WrapperConformance
from modules.backends.model_zoo import build

from torchrl_llm.data import FinishReason
from torchrl_llm.errors import BackendError, ConfigError
from torchrl_llm.modules import SamplingParams, TransformersBackend, TransformersWrapper
from torchrl_llm.modules.backends import CausalScorer, sampling_mode


class TestQwen(BackendConformance):
    @pytest.fixture(autouse=True)
    def _model(self, tiny_model):
        self.model = tiny_model

    def make_backend(self, **options):
        return TransformersBackend(self.model, **options)


def gpt2():
    return build("gpt2", n_positions=64, eos_token_id=2, bos_token_id=2)


class TestGPT2WithDropoutInTrainingMode(BackendConformance):
    """Learned positions, its own argument order, and a module that the trainer left in training."""

    def make_backend(self, **options):
        return TransformersBackend(gpt2().train(), **options)

    def test_scores_are_flat_in_row_major_order_with_a_temperature_a_row(self, backend):
        with torch.no_grad():  # with gradients the trainer's dropout is on
            super().test_scores_are_flat_in_row_major_order_with_a_temperature_a_row(backend)


class TestMistralWithSlidingWindow(BackendConformance):
    def make_backend(self, **options):
        return TransformersBackend(build("mistral window", sliding_window=4), **options)


class TestTransformersWrapper(WrapperConformance):
    @pytest.fixture(autouse=True)
    def _model(self, tiny_model):
        self.model = tiny_model

    def make_policy(self, tokenizer, **options):
        return TransformersWrapper(self.model, tokenizer=tokenizer, **options)


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].double()


def test_a_cancelled_row_changes_no_bit_of_its_neighbours_whoever_ends_meanwhile(tiny_model):
    backend = TransformersBackend(tiny_model)
    rows = [torch.arange(1 + row % 5) + 3 for row in range(16)]
    ends = tuple(range(0, backend.vocab_size, 12))
    params = SamplingParams(max_new_tokens=60, seed=1, stop_token_ids=ends)
    asked = itertools.count()
    cancelled = [lambda: False] * 16
    cancelled[3] = lambda: next(asked) >= 2
    plain = flatten(backend.generate(rows, params))
    found = flatten(backend.generate_cancellable(rows, params, cancelled))
    assert found[3].finish_reason == FinishReason.ABORT
    assert len(found[3].token_ids) == 3 < len(plain[3].token_ids)
    assert len({len(each.token_ids) for each in plain}) > 5  # rows leave again and again
    for row in {*range(16)} - {3}:
        assert torch.equal(found[row].token_ids, plain[row].token_ids)
        assert torch.equal(found[row].log_probs, plain[row].log_probs)
        assert found[row].finish_reason == plain[row].finish_reason


def test_packed_rows_have_the_scores_that_were_sampled(tiny_model):
    suite = TestQwen()
    suite.model = tiny_model
    backend = TransformersBackend(tiny_model, layout="packed")
    suite.test_scores_of_sampled_tokens_are_their_sampled_log_probs(backend, 0.6, 3)
    suite.test_scores_on_the_recorded_support_are_the_sampled_log_probs(backend, {"top_k": 3})


def test_greedy_agrees_with_a_loop_over_the_whole_model(tiny_model):
    backend = TransformersBackend(tiny_model)
    params = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
    for prompt, group in zip(prompts(), backend.generate(prompts(), params), strict=True):
        ids = prompt.tolist()
        for token, log_prob in zip(*map(torch.Tensor.tolist, group[0][:2]), strict=True):
            log_probs = logits_of(tiny_model, ids)[-1].log_softmax(-1)
            assert token == int(log_probs.argmax())
            assert log_prob == pytest.approx(float(log_probs[token]), abs=1e-5)
            ids.append(token)


def test_equal_prompts_are_read_by_the_model_once(tiny_model):
    backend = TransformersBackend(tiny_model)
    seen = []
    hook = tiny_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with hook:
        params = SamplingParams(max_new_tokens=3, num_samples=2, ignore_eos=True)
        backend.generate([torch.tensor([5, 6, 7])] * 4 + [torch.tensor([8, 9])], params)
    assert seen == [(2, 3), (10, 1), (10, 1)]


def test_rows_that_have_ended_leave_the_batch(tiny_model):
    backend = TransformersBackend(tiny_model)
    sizes = []
    hook = tiny_model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    with hook:
        ends = tuple(range(0, 292, 3))
        params = SamplingParams(max_new_tokens=30, stop_token_ids=ends, num_samples=16)
        groups = backend.generate(prompts(), params)
    assert sizes[1] <= 64
    assert sizes == sizes[:1] + sorted(sizes[1:], reverse=True)
    assert sizes[-1] < 16
    assert {c.finish_reason for c in flatten(groups)} == {FinishReason.STOP}


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    ],
)
def test_sampled_log_probs_are_those_of_transformers_warpers(tiny_model, fields):
    """transformers' own processors, applied by hand to the whole model's logits."""
    from transformers.generation import logits_process as lp

    backend = TransformersBackend(tiny_model)
    params = SamplingParams(max_new_tokens=5, num_samples=4, ignore_eos=True, **fields)
    processors = lp.LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(lp.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        processors.append(lp.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(lp.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(lp.TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(lp.MinPLogitsWarper(params.min_p))
    for prompt, group in zip(prompts(), backend.generate(prompts(), params), strict=True):
        for completion in group:
            ids = prompt.tolist()
            for token, log_prob in zip(*map(torch.Tensor.tolist, completion[:2]), strict=True):
                scores = processors(torch.tensor([ids]), logits_of(tiny_model, ids)[-1:].float())
                assert log_prob == pytest.approx(float(scores.log_softmax(-1)[0, token]), abs=1e-4)
                ids.append(token)


def test_nothing_comes_from_the_generation_config(make_tiny_model):
    model = make_tiny_model()
    model.generation_config.update(do_sample=True, top_k=1, temperature=0.1, max_new_tokens=2)
    params = SamplingParams(max_new_tokens=8, num_samples=16, ignore_eos=True)
    [group] = TransformersBackend(model).generate([torch.tensor([5])], params)
    assert len({tuple(c.token_ids.tolist()) for c in group}) > 1
    assert {len(c.token_ids) for c in group} == {8}


def test_draws_follow_the_distribution(tiny_model):
    """Frequencies of 4,000 draws against the model's probabilities, 5 standard errors."""
    params = SamplingParams(max_new_tokens=1, num_samples=4000)
    [group] = TransformersBackend(tiny_model).generate([torch.tensor([5, 6])], params)
    drawn = torch.bincount(torch.cat([c.token_ids for c in group]), minlength=292) / 4000
    probs = logits_of(tiny_model, [5, 6])[-1].softmax(-1)
    assert ((drawn - probs).abs() < 5 * (probs * (1 - probs) / 4000).sqrt() + 1e-3).all()


def test_stop_strings_end_a_response_with_all_its_ids(tiny_model, tokenizer):
    backend = TransformersBackend(tiny_model, tokenizer=tokenizer)
    free = SamplingParams(max_new_tokens=12, seed=1, ignore_eos=True)
    [whole] = backend.generate([torch.tensor([5])], free)[0]
    stop = tokenizer.decode(whole.token_ids[4:6])
    params = SamplingParams(max_new_tokens=12, seed=1, ignore_eos=True, stop=(stop,))
    [cut] = backend.generate([torch.tensor([5])], params)[0]
    assert cut.finish_reason == FinishReason.STOP
    assert cut.token_ids.tolist() == whole.token_ids[: len(cut.token_ids)].tolist()
    assert stop in tokenizer.decode(cut.token_ids)
    assert stop not in tokenizer.decode(cut.token_ids[:-1])
    with pytest.raises(ConfigError, match="stop strings need a tokenizer"):
        TransformersBackend(tiny_model).generate([torch.tensor([5])], params)


def test_native_arguments_reach_the_logits(tiny_model):
    backend = TransformersBackend(tiny_model)
    [probable] = backend.generate(
        [torch.tensor([5])], SamplingParams(max_new_tokens=1, temperature=0)
    )[0]
    banned = probable.token_ids.tolist()
    params = SamplingParams(
        max_new_tokens=6, num_samples=8, ignore_eos=True, native={"suppress_tokens": banned}
    )
    assert params.truncates_support
    [group] = backend.generate([torch.tensor([5])], params)
    assert not any(torch.isin(c.token_ids, probable.token_ids).any() for c in group)


def test_min_new_tokens_holds_the_end_back(tiny_model):
    ends = tuple(range(3, 292))
    backend = TransformersBackend(tiny_model, eos_token_ids=ends)
    params = SamplingParams(max_new_tokens=9, native={"min_new_tokens": 4})
    for completion in flatten(backend.generate(prompts(), params)):
        assert not torch.isin(completion.token_ids[:4], torch.tensor(ends)).any()


def test_broken_weights_are_an_error_of_the_backend(make_tiny_model):
    model = make_tiny_model()
    backend = TransformersBackend(model)
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(BackendError, match="not finite"):
        backend.generate([torch.tensor([5])], SamplingParams(max_new_tokens=2))


def test_end_ids_are_those_of_tokenizer_and_model_together(make_tiny_model, make_tokenizer):
    model = make_tiny_model(eos_token_id=1)
    tokenizer = make_tokenizer(eos="<|im_end|>")
    model.generation_config.eos_token_id = [1, 7]
    assert TransformersBackend(model, tokenizer=tokenizer).eos_token_ids == (1, 2, 7)


def test_sampling_mode_puts_every_flag_back():
    model = gpt2().train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]

    def fail():
        with sampling_mode(model):
            assert not any(module.training for module in model.modules())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert [module.training for module in model.modules()] == before


def test_gradient_checkpointing_does_not_reach_sampling(make_tiny_model):
    model = make_tiny_model().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    backend = TransformersBackend(model)
    params = SamplingParams(max_new_tokens=5, temperature=0, ignore_eos=True)
    got = flatten(backend.generate(prompts(), params))
    wanted = flatten(TransformersBackend(make_tiny_model()).generate(prompts(), params))
    assert [c.token_ids.tolist() for c in got] == [c.token_ids.tolist() for c in wanted]
    assert model.training


def test_a_given_scorer_is_used(tiny_model):
    scorer = CausalScorer(tiny_model, full_logits=True)
    assert TransformersBackend(tiny_model, scorer=scorer).scorer is scorer


def test_lora_models_sample_and_score(make_tiny_model):
    peft = pytest.importorskip("peft", reason='needs peft: pip install -e ".[test]"')
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_tiny_model(), config)
    backend = TransformersBackend(model)
    params = SamplingParams(max_new_tokens=5)
    groups = backend.generate(prompts(), params)
    with torch.no_grad():
        for prompt, [completion] in zip(prompts(), groups, strict=True):
            ids = torch.cat([prompt, completion.token_ids])
            scores = backend.token_scores([ids], [torch.arange(len(ids)) >= len(prompt)])
            torch.testing.assert_close(scores.log_probs, completion.log_probs, atol=1e-5, rtol=1e-5)
