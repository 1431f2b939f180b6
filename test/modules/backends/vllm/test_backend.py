"""The vLLM backend on a real engine: conformance, and what only it does."""

from __future__ import annotations

import copy
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from conformance.backends import BackendConformance, flatten, prompts
from modules.backends.vllm.engine_helper import shared_tiny, small_engine
from waiting import in_threads, wait_until

from torchrl_llm.data import FinishReason
from torchrl_llm.data.scoring import ScoreExtras
from torchrl_llm.errors import BackendError, ConfigError, DataError, OverlongError
from torchrl_llm.modules import SamplingParams, TransformersBackend, load_model

pytest.importorskip("vllm")
from torchrl_llm.modules.backends.vllm import VLLMBackend

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def tiny(make_tiny_model, tokenizer):
    return shared_tiny(make_tiny_model, tokenizer)


@pytest.fixture(scope="module")
def engine(tiny):
    return tiny[0]


@pytest.fixture(scope="module")
def backend(engine):
    return VLLMBackend(engine)


@pytest.fixture(scope="module")
def transformers(tiny, tokenizer):
    return TransformersBackend(tiny[1], tokenizer=tokenizer)


class TestVLLMBackend(BackendConformance):
    @pytest.fixture(autouse=True)
    def _engine(self, engine):
        self._engine = engine

    def make_backend(self, **options):
        return VLLMBackend(self._engine, **options)


# -- the same as transformers ---------------------------------------------------------------------


def many_prompts(count=24):
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, 60, (count,), generator=generator).tolist()
    return [torch.randint(3, 292, (size,), generator=generator) for size in sizes]


def test_greedy_ids_and_log_probs_are_those_of_transformers(backend, transformers):
    params = SamplingParams(max_new_tokens=24, temperature=0)
    ours = flatten(backend.generate(many_prompts(), params))
    theirs = flatten(transformers.generate(many_prompts(), params))
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason == b.finish_reason
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_log_probs_entropies_and_supports_are_those_of_transformers(
    backend, transformers, temperature
):
    params = SamplingParams(
        max_new_tokens=12, temperature=temperature, top_k=7, record_support=True, seed=1
    )
    rows, select, supports, sampled = [], [], [], []
    for prompt, [done] in zip(
        many_prompts(8), backend.generate(many_prompts(8), params), strict=True
    ):
        rows.append(torch.cat([prompt, done.token_ids]))
        select.append(torch.arange(len(rows[-1])) >= len(prompt))
        supports.append(done.support)
        sampled.append(done.log_probs)
    extras = ScoreExtras(support=supports[0].join(supports))
    with torch.no_grad():
        theirs = transformers.token_scores(
            rows, select, temperature=temperature, entropy=True, extras=extras
        )
    ours = backend.token_scores(rows, select, temperature=temperature, entropy=True, extras=extras)
    torch.testing.assert_close(torch.cat(sampled), theirs.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=2e-5, rtol=0)


def test_logits_are_those_of_transformers_but_for_their_norm(backend, transformers):
    rows = prompts()[:3]
    with torch.no_grad():
        theirs = transformers.logits(rows).log_softmax(-1)
    ours = backend.logits(rows)
    assert ours.shape == theirs.shape == (3, 4, 292)
    for row, ids in enumerate(rows):
        torch.testing.assert_close(
            ours[row, : len(ids)], theirs[row, : len(ids)], atol=2e-5, rtol=0
        )


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.7}, {"logit_bias": {9: 4.0}}])
def test_greedy_log_probs_are_the_models_also_under_penalties(backend, transformers, options):
    native = {name: value for name, value in options.items() if name == "logit_bias"}
    common = {name: value for name, value in options.items() if name not in native}
    params = SamplingParams(max_new_tokens=9, temperature=0, native=native, **common)
    completions = flatten(backend.generate(prompts(), params))
    rows = [torch.cat([p, c.token_ids]) for p, c in zip(prompts(), completions, strict=True)]
    select = [torch.arange(len(r)) >= len(p) for r, p in zip(rows, prompts(), strict=True)]
    with torch.no_grad():
        wanted = transformers.token_scores(rows, select).log_probs
    found = torch.cat([c.log_probs for c in completions])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    if not native:
        theirs = flatten(transformers.generate(prompts(), params))
        assert [c.token_ids.tolist() for c in theirs] == [c.token_ids.tolist() for c in completions]


def test_a_stop_string_keeps_the_same_tokens_as_transformers(backend, transformers, tokenizer):
    plain = SamplingParams(max_new_tokens=24, temperature=0, ignore_eos=True)
    answers = flatten(transformers.generate(many_prompts(6), plain))
    texts = [tokenizer.decode(c.token_ids[3:7]) for c in answers]
    stops = tuple(t for t in texts if "\ufffd" not in t)[:3] + ("<|im_end|>",)
    params = SamplingParams(max_new_tokens=24, temperature=0, ignore_eos=True, stop=stops)
    ours = flatten(backend.generate(many_prompts(6), params))
    theirs = flatten(transformers.generate(many_prompts(6), params))
    assert FinishReason.STOP in [c.finish_reason for c in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason == b.finish_reason


@pytest.mark.slow
def test_a_float32_head_does_not_round_logits_to_bfloat16():
    ids = torch.arange(5, 60)
    backend = VLLMBackend(small_engine(dtype="bfloat16", enable_fp32_lm_head=True))
    found = backend.logits([ids])[0, -1]
    with torch.no_grad():
        coarse = load_model(dtype="bfloat16")(ids[None]).logits[0, -1].float().log_softmax(-1)
        exact = load_model()(ids[None]).logits[0, -1].log_softmax(-1)
    # 8 bits of mantissa leave few values for 279 ids; float32 tells them all apart.
    assert len(coarse.unique()) < 140
    assert len(found.unique()) > 270
    assert (found - exact).abs().mean() < 0.1


def test_what_ends_a_response_is_what_ends_it_for_transformers(backend, transformers):
    assert backend.eos_token_ids == transformers.eos_token_ids == (2, 9)


# -- random numbers -------------------------------------------------------------------------------


def test_an_engine_never_touches_the_global_generator(backend):
    before = torch.get_rng_state()
    for params in (
        SamplingParams(max_new_tokens=8, temperature=0),
        SamplingParams(max_new_tokens=8, seed=1, top_k=5),
        SamplingParams(max_new_tokens=8, seed=1, top_p=0.5, temperature=0.7),
    ):
        backend.generate(prompts(), params)
        assert torch.equal(torch.get_rng_state(), before)
    unseeded = VLLMBackend(backend.engine, seeded=False)
    unseeded.generate(prompts(), SamplingParams(max_new_tokens=8))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seeded_answer_does_not_depend_on_its_company(backend):
    params = SamplingParams(max_new_tokens=12, seed=11, ignore_eos=True)
    [alone] = flatten(backend.generate(prompts()[:1], params))
    together = flatten(backend.generate([prompts()[0], *many_prompts(20)], params))[0]
    assert alone.token_ids.tolist() == together.token_ids.tolist()


def test_what_is_sampled_has_the_frequencies_of_its_probabilities(backend):
    params = SamplingParams(max_new_tokens=1, num_samples=2000, ignore_eos=True)
    [group] = backend.generate([torch.tensor([5, 6, 7])], params)
    ids = torch.cat([c.token_ids for c in group])
    counts = torch.bincount(ids, minlength=292).float()
    probs = backend.logits([torch.tensor([5, 6, 7])])[0, -1].exp()
    top = probs.topk(5).indices
    expected, spread = 2000 * probs[top], (2000 * probs[top] * (1 - probs[top])).sqrt()
    assert ((counts[top] - expected).abs() < 4 * spread + 1).all()


# -- arguments ------------------------------------------------------------------------------------


def test_structured_outputs_are_passed_through(backend, tokenizer):
    prompt = torch.tensor(tokenizer("What is the sum of 3 and 4?")["input_ids"])
    for constraint, allowed in (
        ({"choice": ["72", "46"]}, {"72", "46"}),
        ({"regex": "[0-9]{2}"}, {f"{n:02d}" for n in range(100)}),
    ):
        params = SamplingParams(max_new_tokens=8, native={"structured_outputs": constraint})
        assert params.truncates_support
        [group] = backend.generate([prompt], params)
        *ids, end = group[0].token_ids.tolist()
        assert end in backend.eos_token_ids
        assert tokenizer.decode(ids) in allowed


def test_native_arguments_reach_the_engine(backend):
    allowed = SamplingParams(max_new_tokens=20, native={"allowed_token_ids": [7, 8]})
    [[completion]] = backend.generate(prompts()[:1], allowed)
    assert set(completion.token_ids.tolist()) <= {7, 8}
    ends = tuple(range(292))
    least = SamplingParams(max_new_tokens=9, stop_token_ids=ends[:290], native={"min_tokens": 4})
    [[completion]] = backend.generate(prompts()[:1], least)
    assert len(completion.token_ids) >= 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.001}, r"temperatures from 0.01 to 2.0"),
        ({"temperature": 3.0}, r"temperatures from 0.01 to 2.0"),
        ({"native": {"bad_words": [3]}}, r"bad_words\[0\] must be str, got 3"),
        ({"native": {"structured_outputs": {"json": "{"}}}, "rejected"),
        ({"native": {"structured_outputs": {"jsn": "{}"}}}, r"has no \['jsn'\]"),
        ({"native": {"allowed_token_ids": [10**6]}}, "rejected a request"),
    ],
)
def test_what_vllm_cannot_do_is_the_callers_error_and_harms_nobody(backend, options, message):
    with pytest.raises(ConfigError, match=message):
        backend.generate(prompts(), SamplingParams(max_new_tokens=3, **options))
    assert backend.num_unfinished == 0
    assert len(flatten(backend.generate(prompts(), SamplingParams(max_new_tokens=3)))) == 4


def test_an_engine_that_gives_too_few_log_probs_says_what_to_do(engine, monkeypatch):
    monkeypatch.setattr(engine.llm_engine.model_config, "max_logprobs", 4)
    backend = VLLMBackend(engine)
    wide = SamplingParams(max_new_tokens=3, top_p=0.999, record_support=True)
    with pytest.raises(DataError, match=r"smaller top_k, or build the engine with max_logprobs=-1"):
        backend.generate(prompts(), wide)
    narrow = SamplingParams(max_new_tokens=3, top_k=2, record_support=True)
    assert flatten(backend.generate(prompts(), narrow))[0].support.counts.tolist() == [2] * 3
    with pytest.raises(ConfigError, match=r"all 292 ids, and the engine gives 4"):
        backend.token_scores([torch.tensor([5, 6])], [torch.tensor([False, True])], temperature=0.5)


def test_rows_that_fill_the_context_are_scored_and_longer_ones_refused(engine, transformers):
    backend = VLLMBackend(engine)
    assert backend.max_length == 511
    ids = torch.arange(511) % 280 + 3
    [[done]] = backend.generate([ids[:510]], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert len(done.token_ids) == 1
    select = torch.arange(511) >= 1
    found = backend.token_scores([ids], [select]).log_probs
    with torch.no_grad():
        wanted = transformers.token_scores([ids], [select]).log_probs
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    longer = torch.cat([ids, ids[:1]])
    with pytest.raises(OverlongError, match="512 tokens to score and the engine reads at most 511"):
        backend.token_scores([longer], [torch.arange(512) >= 1])
    # What is not selected at the end does not have to be read.
    assert len(backend.token_scores([longer], [torch.arange(512) == 3]).log_probs) == 1


def test_engines_that_would_record_something_else_are_refused(engine, monkeypatch):
    config = engine.llm_engine.model_config
    with pytest.raises(ConfigError, match="needs an engine with max_model_len=513"):
        VLLMBackend(engine, max_length=512)
    with pytest.raises(ConfigError, match="no effect on an engine that exists"):
        VLLMBackend(engine, dtype="float32")
    with pytest.raises(ConfigError, match=r"takes a vllm.LLM or a model's name, got int"):
        VLLMBackend(3)
    monkeypatch.setattr(config, "logprobs_mode", "raw_logprobs")
    with pytest.raises(ConfigError, match="logprobs_mode='processed_logprobs'"):
        VLLMBackend(engine)
    monkeypatch.setattr(config, "logprobs_mode", "processed_logprobs")
    monkeypatch.setattr(config, "generation_config", "auto")
    with pytest.raises(ConfigError, match="generation_config='vllm'"):
        VLLMBackend(engine)


def test_hidden_states_are_out_of_reach(backend):
    with pytest.raises(ConfigError, match="no hidden states"):
        backend.token_scores(
            [torch.tensor([5, 6])], [torch.tensor([False, True])], extras=ScoreExtras(values=True)
        )


def test_copies_and_pickles_share_the_engine_within_the_process(backend):
    assert copy.deepcopy(backend) is backend
    assert pickle.loads(pickle.dumps(backend)) is backend


# -- many callers ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_thousand_requests_from_64_threads_reach_their_own_callers(backend):
    numbers = list(range(1000))
    asked = [torch.tensor([5, 3 + n % 280, 3 + n // 280]) for n in numbers]
    params = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
    wanted = [group[0].token_ids.tolist() for group in backend.generate(asked, params)]
    found, lock = {}, threading.Lock()

    def ask():
        while True:
            with lock:
                if not numbers:
                    return
                n = numbers.pop()
            [[done]] = backend.generate([asked[n]], params)
            found[n] = done.token_ids.tolist()

    assert in_threads(*[ask] * 64, seconds=120) == [None] * 64
    assert [found[n] for n in range(1000)] == wanted
    assert len({tuple(ids) for ids in wanted}) > 500
    assert backend.num_unfinished == 0


# -- weights in flight ----------------------------------------------------------------------------


def sampling_thread(backend, params, out):
    thread = threading.Thread(target=lambda: out.extend(backend.generate(prompts(), params)))
    thread.start()
    return thread


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3}], ids=str)
def test_an_update_in_flight_shows_in_the_versions_of_one_response(engine, options):
    backend = VLLMBackend(engine, in_flight="keep")
    out, params = [], SamplingParams(max_new_tokens=120, ignore_eos=True, **options)
    alone = flatten(backend.generate(prompts(), params))
    start = backend.status().steps
    thread = sampling_thread(backend, params, out)
    wait_until(lambda: backend.status().steps > start + 20)
    with backend.exclusive():
        backend.weights_changed(backend.version + 5)
    thread.join(60)
    for done, same in zip(flatten(out), alone, strict=True):
        first, last = int(done.versions[0]), int(done.versions[-1])
        assert last == backend.version == first + 5
        assert done.versions.tolist() == sorted(done.versions.tolist())
        # The weights were the same ones, so nothing but the number may change.
        assert done.token_ids.tolist() == same.token_ids.tolist()
        torch.testing.assert_close(done.log_probs, same.log_probs, atol=1e-5, rtol=1e-5)


def test_an_update_may_abort_what_runs_and_its_callers_get_what_there_is(engine):
    backend = VLLMBackend(engine, in_flight="abort")
    out, params = [], SamplingParams(max_new_tokens=120, temperature=0, ignore_eos=True)
    start = backend.status().steps
    thread = sampling_thread(backend, params, out)
    wait_until(lambda: backend.status().steps > start + 20)
    with backend.exclusive():
        backend.weights_changed(backend.version + 1)
    thread.join(60)
    for done in flatten(out):
        assert done.finish_reason == FinishReason.ABORT
        assert 10 < len(done.token_ids) < 120
        assert len(done.log_probs) == len(done.versions) == len(done.token_ids)
        assert (done.versions < backend.version).all()


def test_rows_whose_scoring_an_update_aborted_are_scored_again(engine, monkeypatch):
    backend = VLLMBackend(engine, in_flight="abort")
    rows, select = many_prompts(12), [torch.arange(len(row)) >= 1 for row in many_prompts(12)]
    wanted = backend.token_scores(rows, select).log_probs
    run, aborted = backend._run, []

    def first_runs_are_aborted(requests):
        outputs = run(requests)
        if len(aborted) < 3:
            aborted.append(len(requests))
            for output in outputs[::2]:
                output.outputs[0].finish_reason = "abort"
                output.prompt_logprobs = None
        return outputs

    monkeypatch.setattr(backend, "_run", first_runs_are_aborted)
    again = backend.token_scores(rows, select).log_probs
    torch.testing.assert_close(again, wanted, atol=1e-5, rtol=1e-5)
    assert aborted == [12, 6, 3]
    monkeypatch.setattr(backend, "_run", lambda requests: [aborted_output() for _ in requests])
    with pytest.raises(BackendError, match="aborted 12 rows that were being scored 5 times"):
        backend.token_scores(rows, select)


def aborted_output():
    return SimpleNamespace(outputs=[SimpleNamespace(finish_reason="abort")])


def test_an_update_may_wait_for_what_runs(engine):
    backend = VLLMBackend(engine)
    out, params = [], SamplingParams(max_new_tokens=120, temperature=0, ignore_eos=True)
    start = backend.status().steps
    thread = sampling_thread(backend, params, out)
    wait_until(lambda: backend.status().steps > start + 20)
    with backend.exclusive():
        assert backend.num_unfinished == 0
        backend.weights_changed(backend.version + 1)
    thread.join(60)
    for done in flatten(out):
        assert len(done.token_ids) == 120
        assert (done.versions == backend.version - 1).all()


def test_nothing_is_sampled_or_scored_while_the_engine_sleeps(engine):
    backend, twin = VLLMBackend(engine), VLLMBackend(engine)
    backend.sleep()
    try:
        for asleep in (backend, twin):
            with pytest.raises(BackendError, match=r"asleep; call wake\(\)"):
                asleep.generate(prompts(), SamplingParams(max_new_tokens=1))
            with pytest.raises(BackendError, match=r"asleep; call wake\(\)"):
                asleep.token_scores([torch.tensor([5, 6])], [torch.tensor([False, True])])
        with pytest.raises(BackendError, match="no room for weights"):
            backend.weights_changed(9)
    finally:
        backend.wake()
    assert len(flatten(twin.generate(prompts(), SamplingParams(max_new_tokens=1)))) == 4
