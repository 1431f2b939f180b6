"""The decoder that replays a CUDA graph is the plain one, and leaves the device fit for work."""

from __future__ import annotations

import threading

import pytest
import torch
from conformance.backends import flatten
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_llm.modules import SamplingParams, TransformersBackend
from torchrl_llm.modules.backends import static_decoder
from torchrl_llm.modules.backends.cuda_graph import GraphRecorder
from torchrl_llm.modules.backends.sampling import draw, sampling_log_probs

pytestmark = pytest.mark.gpu

PROMPTS = [torch.tensor(ids) for ids in ([5, 6, 7, 8], [9], [10, 11], [5, 6, 7, 8], [3] * 9)]


def generated(model, decode, prompts=PROMPTS, **params):
    backend = TransformersBackend(model, eos_token_ids=(2,), decode=decode)
    params = SamplingParams(**{"max_new_tokens": 40, "num_samples": 2, "seed": 3, **params})
    groups = backend.generate(prompts, params)
    assert backend._decoders._can_record
    return flatten(groups)


def check(model, **params):
    plain, graph = (generated(model, decode, **params) for decode in ("plain", "graph"))
    for expected, got in zip(plain, graph, strict=True):
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(got.log_probs, expected.log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "ignore_eos": True},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_the_graph_gives_the_tokens_of_the_plain_decoder(make_tiny_model, device, params):
    check(make_tiny_model().to(device), **params)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt2"])
def test_it_does_in_every_family(device, family):
    sizes = {
        "vocab_size": 60,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family != "gpt2":
        sizes |= {"num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    check(model.eval().to(device))


def test_it_does_when_the_cache_grows_and_rows_leave(make_tiny_model, device, monkeypatch):
    monkeypatch.setattr(static_decoder, "_LEAST_ROOM", 8)
    monkeypatch.setattr(static_decoder, "_ALIGNED", 8)
    monkeypatch.setattr(static_decoder, "_COMPACT_ABOVE_BYTES", 0)
    check(make_tiny_model().to(device), max_new_tokens=80, num_samples=4)


def test_weights_that_changed_between_two_calls_are_seen(make_tiny_model, device):
    model = make_tiny_model().to(device)
    backend = TransformersBackend(model, decode="graph")
    params = SamplingParams(max_new_tokens=20, seed=1)
    before = [c.token_ids.tolist() for c in flatten(backend.generate(PROMPTS, params))]
    other = make_tiny_model(seed=1).to(device)
    with torch.no_grad():
        for own, new in zip(model.parameters(), other.parameters(), strict=True):
            own.copy_(new)
    after = [c.token_ids.tolist() for c in flatten(backend.generate(PROMPTS, params))]
    expected = TransformersBackend(other, decode="plain").generate(PROMPTS, params)
    assert after == [c.token_ids.tolist() for c in flatten(expected)]
    assert before != after


def test_bfloat16_log_probs_are_those_of_scoring(make_tiny_model, device):
    model = make_tiny_model(initializer_range=0.05).to(device, torch.bfloat16)
    completions = generated(model, "graph", ignore_eos=True)
    rows = [p for p in PROMPTS for _ in range(2)]
    ids = [torch.cat([p, c.token_ids]) for p, c in zip(rows, completions, strict=True)]
    select = [torch.arange(len(i)) >= len(p) for i, p in zip(ids, rows, strict=True)]
    with torch.no_grad():
        scores = TransformersBackend(model).token_scores(ids, select).log_probs.cpu()
    sampled = torch.cat([c.log_probs for c in completions])
    torch.testing.assert_close(sampled, scores, atol=0.1, rtol=0.02)


def test_autocast_over_float32_weights_is_close_to_the_plain_decoder(make_tiny_model, device):
    model = make_tiny_model(initializer_range=0.05).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        plain, graph = (
            generated(model, decode, temperature=0.0, max_new_tokens=2, num_samples=1)
            for decode in ("plain", "graph")
        )
    for expected, got in zip(plain, graph, strict=True):
        torch.testing.assert_close(got.log_probs[:1], expected.log_probs[:1], atol=0.1, rtol=0)


def test_calls_do_not_pile_up_memory(make_tiny_model, device):
    if device.type != "cuda":
        pytest.skip("counts memory of the GPU")
    backend = TransformersBackend(make_tiny_model().to(device), decode="graph")
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    for _ in range(2):
        backend.generate(PROMPTS, params)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(5):
        backend.generate(PROMPTS, params)
    assert torch.cuda.memory_allocated() <= allocated
    assert torch.cuda.memory_reserved() <= reserved


def test_other_threads_may_work_while_a_graph_is_recorded(make_tiny_model, device):
    backend = TransformersBackend(make_tiny_model().to(device), decode="graph")
    stop, errors = threading.Event(), []

    def work_all_the_time():
        generator = torch.Generator(device)
        try:
            while not stop.is_set():
                numbers = torch.rand(100, 100, device=device, generator=generator)
                assert numbers.mm(numbers).sum().item() > 0
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work_all_the_time)
    thread.start()
    try:
        for _ in range(5):
            backend.generate(PROMPTS, SamplingParams(max_new_tokens=20))
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert backend._decoders._can_record


def test_after_a_recording_that_failed_the_device_works(make_tiny_model, device, told):
    if device.type != "cuda":
        pytest.skip("CPUs record nothing")
    model = make_tiny_model().to(device)
    recorder = GraphRecorder(device)
    weight = torch.ones(4, device=device)

    def waits():
        return weight * weight.sum().item()

    with pytest.raises(RuntimeError):
        recorder(waits)
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    torch.manual_seed(0)
    torch.rand(10, device=device)  # refused while torch thinks that a recording goes on
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.testing.assert_close(recorder(lambda: weight + 1)(), weight + 1)
    check(model)


def test_a_model_that_cannot_be_recorded_goes_on_without_and_says_so_once(
    make_tiny_model, device, told, monkeypatch
):
    if device.type != "cuda":
        pytest.skip("CPUs record nothing")
    model = make_tiny_model().to(device)
    # What the trial does not see.
    monkeypatch.setattr(static_decoder, "why_not_static", lambda *args: None)
    forward = model.model.norm.forward
    model.model.norm.forward = lambda states: (
        forward(states) * float(states.numel() > 0) + float(states.sum().isnan())
    )
    backend = TransformersBackend(model)
    params = SamplingParams(max_new_tokens=20, seed=4)
    expected = TransformersBackend(model, decode="plain").generate(PROMPTS, params)
    for _ in range(2):
        got = backend.generate(PROMPTS, params)
        assert [c.token_ids.tolist() for c in flatten(got)] == [
            c.token_ids.tolist() for c in flatten(expected)
        ]
    assert len(told) == 1
    assert "without a CUDA graph" in told[0]


def test_draws_are_allowed_with_deterministic_algorithms(device):
    torch.use_deterministic_algorithms(True)
    try:
        params = SamplingParams(max_new_tokens=1, top_p=0.7)
        log_probs = sampling_log_probs(torch.randn(5, 1000, device=device), params)
        first, again = (draw(log_probs, torch.Generator(device).manual_seed(0)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, again)
