"""The static decoder: token by token the plain one, in tensors that a CUDA graph may hold.

A graph knows Python's values of its recording only. Here ``make_fx`` stands in for it: it records
torch's operations on the same tensors, and replays them without the model's Python.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conformance.backends import BackendConformance, flatten
from modules.backends.model_zoo import build
from modules.backends.test_transformers import gpt2
from torch.fx.experimental.proxy_tensor import make_fx

from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import SamplingParams, TransformersBackend
from torchrl_llm.modules.backends import static_decoder
from torchrl_llm.modules.backends.causal_decoder import CausalDecoder
from torchrl_llm.modules.backends.static_decoder import StaticDecoder, why_not_static

PROMPTS = [torch.tensor(ids) for ids in ([5, 6, 7, 8], [9], [10, 11], [5, 6, 7, 8], [3] * 9)]
FAMILIES = {
    **{name: {} for name in ("llama", "qwen3", "gpt_neox", "cohere", "phi3", "olmo2")},
    **{name: {"sliding_window": 64} for name in ("gemma2", "mistral window")},
    "gemma2 eager": {"sliding_window": 64, "attn_implementation": "eager"},
}


class TestBackendWithTheStaticDecoder(BackendConformance):
    @pytest.fixture(autouse=True)
    def _model(self, tiny_model):
        self.model = tiny_model

    def make_backend(self, **options):
        return TransformersBackend(self.model, decode="graph", **options)


class Recorder:
    """Stands in for ``GraphRecorder``: runs a step once, then records it."""

    def __init__(self, device):
        self.device, self.batches = device, []

    def __call__(self, step):
        self.batches.append(step().shape[0])
        return make_fx(lambda: step())()


@pytest.fixture
def recorders(monkeypatch):
    """Record on a CPU; a list of all recorders that are made."""
    made = []
    monkeypatch.setattr(static_decoder, "_RECORDED_ON", "cpu")
    monkeypatch.setattr(
        static_decoder, "GraphRecorder", lambda device: made.append(Recorder(device)) or made[-1]
    )
    return made


@pytest.fixture
def small_rooms(monkeypatch):
    """Caches that are full after a few tokens."""
    monkeypatch.setattr(static_decoder, "_LEAST_ROOM", 4)
    monkeypatch.setattr(static_decoder, "_ALIGNED", 4)


def both(model, prompts=PROMPTS, *, fields=None, tokenizer=None, max_length=None, **params):
    """Completions of both decoders, checked to be the same; those of the static one."""
    params = SamplingParams(**{"max_new_tokens": 20, "num_samples": 2, "seed": 3, **params})
    plain, static = (
        TransformersBackend(
            model, tokenizer=tokenizer, max_length=max_length, eos_token_ids=(2,), decode=decode
        ).generate(prompts, params)
        for decode in ("plain", "graph")
    )
    for expected, got in zip(flatten(plain), flatten(static), strict=True):
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert got.finish_reason == expected.finish_reason
        torch.testing.assert_close(got.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    return flatten(static)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.6, "ignore_eos": True},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1, "num_samples": 1},
        {"repetition_penalty": 1.5},
        {"native": {"suppress_tokens": [7, 8]}},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_tokens_and_log_probs_are_those_of_the_plain_decoder(tiny_model, small_rooms, params):
    both(tiny_model, **params)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_decodes_as_its_plain_decoder(name, small_rooms, recorders):
    both(build(name.removesuffix(" eager"), **FAMILIES[name]), max_new_tokens=16)
    assert len(recorders) == 1


def test_learned_positions_end_with_the_context(recorders):
    completions = both(gpt2(), max_new_tokens=80, ignore_eos=True)  # 64 positions
    assert {len(c.token_ids) for c in completions} == {60, 63, 62, 55}


def test_max_length_ends_rows_of_different_prompts_at_different_steps(tiny_model, recorders):
    completions = both(tiny_model, max_length=12, ignore_eos=True)
    assert [len(c.token_ids) for c in completions[::2]] == [8, 11, 10, 8, 3]


def test_a_stop_string_ends_a_row(tiny_model, tokenizer):
    text = tokenizer.decode(both(tiny_model, ignore_eos=True)[0].token_ids[2:4])
    both(tiny_model, tokenizer=tokenizer, stop=(text,), ignore_eos=True)


def test_room_doubles_and_each_new_room_is_recorded(tiny_model, small_rooms, recorders):
    # 9 tokens of the longest prompt, 18 places (20 aligned), then 40: the limit of 9 + 31.
    both(tiny_model, max_new_tokens=31, ignore_eos=True)
    assert recorders[0].batches == [10, 10]


def test_half_of_the_rows_leave_a_large_cache(tiny_model, recorders, monkeypatch):
    lengths = {"max_length": 20, "ignore_eos": True, "num_samples": 1}
    prompts = [torch.tensor([4] * n) for n in (17, 16, 10, 4, 2)]  # 3, 4, 10, 16 and 18 tokens
    both(tiny_model, prompts, **lengths)
    assert recorders[0].batches == [5]
    monkeypatch.setattr(static_decoder, "_COMPACT_ABOVE_BYTES", 0)
    both(tiny_model, prompts, **lengths)
    # Two of five rows are less than half, and of those two the last is one half.
    assert recorders[1].batches == [5, 2, 1]


def test_lora_adapters_decode_as_in_the_plain_decoder(make_tiny_model, recorders):
    peft = pytest.importorskip("peft", reason='needs peft: pip install -e ".[test]"')
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_tiny_model(), config)
    adapted = both(model)
    with model.disable_adapter():
        plain = both(model)
    assert [c.token_ids.tolist() for c in adapted] != [c.token_ids.tolist() for c in plain]


def test_weights_may_change_in_place_or_be_replaced_between_two_calls(make_tiny_model, recorders):
    model = make_tiny_model()
    backend = TransformersBackend(model, decode="graph")
    params = SamplingParams(max_new_tokens=20, seed=1)
    other = TransformersBackend(make_tiny_model(seed=1)).generate(PROMPTS, params)
    backend.generate(PROMPTS, params)
    with torch.no_grad():
        for own, new in zip(model.parameters(), make_tiny_model(seed=1).parameters(), strict=True):
            own.copy_(new)
    assert [g[0].token_ids.tolist() for g in backend.generate(PROMPTS, params)] == [
        g[0].token_ids.tolist() for g in other
    ]
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight * 2)
    assert both(model)


def test_log_probs_of_bfloat16_weights_are_those_of_scoring(make_tiny_model):
    model = make_tiny_model().bfloat16()
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    backend = TransformersBackend(model, decode="graph")
    [[completion]] = backend.generate(PROMPTS[:1], params)
    ids = torch.cat([PROMPTS[0], completion.token_ids])
    with torch.no_grad():
        scores = backend.token_scores([ids], [torch.arange(len(ids)) >= 4]).log_probs
    torch.testing.assert_close(completion.log_probs, scores, atol=0.2, rtol=0.05)


def test_on_a_cpu_auto_is_plain_and_on_a_gpu_short_responses_are(
    tiny_model, recorders, monkeypatch
):
    backend = TransformersBackend(tiny_model)
    backend.generate(PROMPTS, SamplingParams(max_new_tokens=15))
    assert not recorders
    backend.generate(PROMPTS, SamplingParams(max_new_tokens=16))
    assert len(recorders) == 1
    monkeypatch.setattr(static_decoder, "_RECORDED_ON", "cuda")
    backend.generate(PROMPTS, SamplingParams(max_new_tokens=16))
    assert len(recorders[0].batches) == 1


def test_in_another_thread_auto_is_plain_as_a_trainer_may_run_next_to_it(tiny_model, recorders):
    params = SamplingParams(max_new_tokens=16)
    for decode, number in (("auto", 0), ("graph", 1)):
        backend = TransformersBackend(tiny_model, decode=decode)
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(backend.generate, PROMPTS, params).result()
        assert len(recorders) == number


def test_a_context_beyond_a_sliding_window_is_plain(recorders):
    model = build("mistral", sliding_window=25)
    both(model, max_new_tokens=16)  # 9 + 16
    assert len(recorders) == 1
    both(model, max_new_tokens=17)
    assert len(recorders) == 1


def takes(model):
    return frozenset(inspect.signature(model.forward).parameters)


def test_models_that_cannot_say_why(tiny_model):
    assert why_not_static(tiny_model, takes(tiny_model)) is None
    flex = build("llama", attn_implementation="flex_attention")
    assert "'flex_attention' takes no mask" in why_not_static(flex, takes(flex))
    bloom = build("bloom")
    assert "BloomForCausalLM takes no static cache" in why_not_static(bloom, takes(bloom))
    hybrid = build("lfm2")
    assert "caches more than keys and values" in why_not_static(hybrid, takes(hybrid))


def test_a_model_that_reads_its_tensors_on_the_host_is_refused():
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = build("llama", rope_parameters=scaled, max_position_embeddings=64)
    assert "waits for the device" in why_not_static(model, takes(model))


def test_a_mask_among_the_indices_waits_and_whole_numbers_do_not():
    x = torch.arange(4)
    with static_decoder._OnDevice():
        assert x[torch.tensor([2, 1])].sum() is not None
        with pytest.raises(RuntimeError, match="waits for the device"):
            x[x > 1]
        with pytest.raises(RuntimeError, match="waits for the device"):
            x.max().item()


@pytest.mark.parametrize("flaw", ["mask", "length"])
def test_a_model_that_would_give_other_logits_is_refused(make_tiny_model, flaw):
    model = make_tiny_model()
    forward = model.model.forward

    def ignores_the_mask(*, attention_mask=None, past_key_values=None, **settings):
        if attention_mask is not None and attention_mask.dim() == 4:
            attention_mask = torch.zeros_like(attention_mask)
        return forward(attention_mask=attention_mask, past_key_values=past_key_values, **settings)

    def counts_the_cache(*, position_ids=None, past_key_values=None, **settings):
        if past_key_values is not None:
            position_ids = position_ids + past_key_values.get_seq_length() % 2
        return forward(position_ids=position_ids, past_key_values=past_key_values, **settings)

    model.model.forward = {"mask": ignores_the_mask, "length": counts_the_cache}[flaw]
    assert "different logits" in why_not_static(model, takes(model))


def test_graph_mode_refuses_such_a_model_and_auto_warns_once(recorders, told):
    model = build("bloom")
    params = SamplingParams(max_new_tokens=16)
    with pytest.raises(ConfigError, match="takes no static cache"):
        TransformersBackend(model, decode="graph").generate(PROMPTS, params)
    backend = TransformersBackend(model)
    for _ in range(2):
        assert backend.generate(PROMPTS, params)
    assert len(told) == 1
    assert "BloomForCausalLM takes no static cache" in told[0]
    assert not recorders


def test_a_recording_that_fails_is_one_warning_and_the_same_tokens(tiny_model, monkeypatch, told):
    calls = []

    class Failing(Recorder):
        def __call__(self, step):
            calls.append(step())
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(static_decoder, "_RECORDED_ON", "cpu")
    monkeypatch.setattr(static_decoder, "GraphRecorder", Failing)
    params = SamplingParams(max_new_tokens=20, seed=4)
    backend = TransformersBackend(tiny_model)
    expected = TransformersBackend(tiny_model, decode="plain").generate(PROMPTS, params)
    for _ in range(2):
        got = backend.generate(PROMPTS, params)
        assert [g[0].token_ids.tolist() for g in got] == [g[0].token_ids.tolist() for g in expected]
    assert len(calls) == 1
    assert len(told) == 1
    assert "operation not permitted when stream is capturing" in told[0]


def test_sharing_a_configuration_does_no_harm_while_a_step_runs(make_tiny_model):
    model = make_tiny_model()
    ids = torch.tensor([[5, 6, 7], [0, 8, 9]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    model.config._attn_implementation = static_decoder.GROUPED
    got = model(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(got, expected)


def test_threads_that_share_a_configuration_sample_as_alone(make_tiny_model):
    model = make_tiny_model()
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    expected = [
        a.token_ids.tolist() for [a] in TransformersBackend(model).generate(PROMPTS, params)
    ]
    backends = [TransformersBackend(model, decode="graph") for _ in range(2)]

    def sample(backend):
        found = []
        for _ in range(5):
            found.append([a.token_ids.tolist() for [a] in backend.generate(PROMPTS, params)])
            assert TransformersBackend(model).layouts == layouts
        return found

    layouts, interval = TransformersBackend(model).layouts, sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(sample, backends))
    finally:
        sys.setswitchinterval(interval)
    assert found == [[expected] * 5] * 2
    assert model.config._attn_implementation == "sdpa"


def test_the_attention_is_given_back_after_an_error(make_tiny_model, monkeypatch):
    model = make_tiny_model()
    seen = []

    def failing(*args):
        seen.append(model.config._attn_implementation)
        raise RuntimeError("planted")

    decoder = CausalDecoder(model, PROMPTS[:1], None, 4, takes=takes(model))
    decoder.prefill(torch.tensor([0]))
    static = StaticDecoder(decoder, 4, lambda step: step)
    monkeypatch.setattr(decoder, "forward", failing)
    with pytest.raises(RuntimeError, match="planted"):
        static.advance(torch.tensor([3]))
    assert seen == [static_decoder.GROUPED]
    assert model.config._attn_implementation == "sdpa"


def test_the_cache_is_freed_with_the_call(tiny_model, monkeypatch):
    made = []
    real = StaticDecoder.__init__

    def noted(self, *args):
        real(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(StaticDecoder, "__init__", noted)
    backend = TransformersBackend(tiny_model, decode="graph")
    gc.disable()
    try:
        backend.generate(PROMPTS, SamplingParams(max_new_tokens=4))
        assert [each() for each in made] == [None, None]  # one of them tried the model out
    finally:
        gc.enable()


def test_copies_and_pickles_leave_the_recorder_behind(make_tiny_model, recorders):
    backend = TransformersBackend(make_tiny_model(), decode="graph")
    params = SamplingParams(max_new_tokens=20, seed=1)
    expected = backend.generate(PROMPTS, params)[0][0].token_ids.tolist()
    for other in (copy.deepcopy(backend), pickle.loads(pickle.dumps(backend))):
        assert not other._decoders._recorders
        assert other.generate(PROMPTS, params)[0][0].token_ids.tolist() == expected
    assert len(recorders) == 3


def test_another_mode_is_refused(tiny_model):
    with pytest.raises(
        ConfigError, match="decode must be one of 'auto', 'plain', 'graph', got 'fast'"
    ):
        TransformersBackend(tiny_model, decode="fast")
