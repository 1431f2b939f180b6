"""A server by URL, against vLLM's own on loopback: conformance, weights, threads, kill -9."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from conformance.backends import BackendConformance, flatten, prompts
from modules.backends.vllm_server import kill, vllm_server
from recipes.script import run_alone
from recipes.test_evaluate import SCRIPT as EVALUATE
from recipes.test_evaluate import answers
from waiting import in_threads

from torchrl_llm.data import FinishReason
from torchrl_llm.errors import BackendError, WeightUpdateError, WorkerError
from torchrl_llm.modules import OpenAIBackend, SamplingParams, TransformersBackend, vLLMWrapper
from torchrl_llm.weights import CanaryCheck, DeltaWeights, EngineWeights
from torchrl_llm.weights.weight_source import TensorSource

pytest.importorskip("vllm")

# A server starts in 45 s on two quiet cores, and in minutes on busy ones.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

VOCAB = 292
# Logits of moderate size: those of the shared tiny model are so large that float32 alone moves
# log-probs at a temperature of 0.6 by more than 1e-5.
MODEL = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_tiny_model, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(**MODEL).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with vllm_server(folder, tmp_path_factory.mktemp("server")) as found:
        yield found


@pytest.fixture(scope="module")
def url(server):
    return server[0]


@pytest.fixture
def trained(make_tiny_model, tokenizer):
    """A model of its own for each test, and its log-probs."""
    model = make_tiny_model(**MODEL)
    return TransformersBackend(model, tokenizer=tokenizer)


def connect(url, tokenizer, **options):
    return OpenAIBackend(url, tokenizer=tokenizer, timeout_s=60.0, **options)


class TestOpenAIBackendOnVLLM(BackendConformance):
    @pytest.fixture(autouse=True)
    def _server(self, url, tokenizer):
        self._make = lambda **options: connect(url, tokenizer, **options)

    def make_backend(self, **options):
        return self._make(**options)

    def test_the_global_generator_repeats_bit_for_bit(self, backend):
        # Requests meet in other batches each time, which moves the last bits of a log-prob.
        params = SamplingParams(max_new_tokens=8)
        state = torch.get_rng_state()
        first = flatten(backend.generate(prompts(), params))
        torch.set_rng_state(state)
        second = flatten(backend.generate(prompts(), params))
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)
            torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=1e-5)


def test_the_evaluation_script_has_the_answers_of_this_process_by_ids_and_by_chat(
    url, folder, tmp_path, monkeypatch, capfd
):
    settings = ["tasks=[arithmetic]", "eval.num_prompts=12", "inference_model.max_tokens=16"]
    server = f"inference_model.url={url}"
    ways = {
        "here": [f"model.name={folder}"],
        "ids": [server, f"model.name={folder}"],
        "root": [server],  # vLLM says where its model is
        "chat": [server, "inference_model.protocol=chat"],
    }
    found = {}
    for name, more in ways.items():
        run_alone(monkeypatch, EVALUATE, tmp_path / name, *settings, *more)
        found[name] = answers(tmp_path / name, "arithmetic")
    said = capfd.readouterr().err
    assert said.count("is asked by token ids") == 2
    assert said.count("is asked by chat completions") == 1
    assert len(found["here"]) == 12
    assert found["ids"] == found["root"] == found["here"]
    # This model writes halves of characters, which vLLM leaves out of a text.
    for chat, here in zip(found["chat"], found["here"], strict=True):
        texts = [record["messages"][-1].pop("content") for record in (chat, here)]
        assert texts[0].replace("\ufffd", "") == texts[1].replace("\ufffd", "")
        assert {**chat, "messages": []} == {**here, "messages": []}


def assert_same(backend, trained, *, atol=1e-5):
    """Greedily the same ids, and the same log-probs of them, as the trained model."""
    params = SamplingParams(max_new_tokens=12, temperature=0)
    ours = flatten(backend.generate(prompts(), params))
    theirs = flatten(trained.generate(prompts(), params))
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason == b.finish_reason
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=atol, rtol=1e-5)


def test_penalties_and_stop_strings_choose_the_same_tokens_as_transformers(url, trained, tokenizer):
    backend = connect(url, tokenizer)
    backend.update_weights(TensorSource(dict(trained.module.named_parameters())), version=1)
    assert_same(backend, trained)
    free = trained.generate(prompts(), SamplingParams(max_new_tokens=12, temperature=0))
    texts = {tokenizer.decode(c.token_ids[4:5]) for c in flatten(free)}
    stops = {text for text in texts if "\ufffd" not in text}  # no half of a character
    assert stops
    for options in (
        {"repetition_penalty": 1.7},
        {"stop": tuple(stops)},
        {"stop_token_ids": (int(free[0][0].token_ids[3]),)},
    ):
        params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True, **options)
        ours, theirs = (flatten(b.generate(prompts(), params)) for b in (backend, trained))
        for a, b in zip(ours, theirs, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist(), options
            assert a.finish_reason == b.finish_reason
            torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=1e-5)


def test_a_row_that_fills_the_context_is_scored_to_its_last_token(url, trained, tokenizer):
    backend = connect(url, tokenizer)
    backend.update_weights(TensorSource(dict(trained.module.named_parameters())), version=1)
    ids = torch.randint(3, VOCAB, (backend.max_length,))
    mask = torch.arange(len(ids)) > 0
    with torch.no_grad():
        wanted = trained.token_scores([ids], [mask]).log_probs
    got = backend.token_scores([ids], [mask]).log_probs
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_a_grammar_binds_what_is_sampled(url, tokenizer):
    params = SamplingParams(
        max_new_tokens=8, num_samples=4, native={"structured_outputs": {"regex": "(12|34)+ = 46"}}
    )
    [found] = connect(url, tokenizer).generate(prompts()[:1], params)
    for completion in found:
        text = tokenizer.decode(completion.token_ids)
        assert set(text.replace("<|im_end|>", "")) <= set("1234 =6")
        assert text.startswith(("12", "34"))


def train_step(trained, optimizer):
    rows = torch.randint(3, VOCAB, (2, 24))
    select = [torch.arange(24) > 0] * 2
    optimizer.zero_grad()
    trained.token_scores(list(rows), select).log_probs.mean().neg().backward()
    optimizer.step()


@pytest.mark.parametrize("path", ["requests", "folder", "delta"])
def test_after_each_of_ten_steps_the_server_computes_with_the_new_weights(
    url, trained, tokenizer, tmp_path, path
):
    backend = connect(url, tokenizer, exchange_dir=tmp_path if path == "folder" else None)
    canary = CanaryCheck(trained, tolerance=1e-4)
    kind = DeltaWeights if path == "delta" else EngineWeights
    updater = kind(backend, model=trained.module, canary=canary)
    model = trained.module
    if path == "delta":
        # Only a part is trained, so that there is something to leave out.
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1" in name)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0
    )
    updater.push_weights()
    for step in range(10):
        train_step(trained, optimizer)
        updater.push_weights()
        assert updater.receipts[0].version == step + 2
        assert_same(backend, trained)
    assert backend.server.weight_version() == backend.version == 11
    if path == "delta":
        assert 0 < updater.receipts[0].num_tensors < len(list(model.parameters()))
    [[found]] = backend.generate(prompts()[:1], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert found.versions.tolist() == [11] * 4


def test_weights_that_do_not_fit_leave_the_server_as_it_was(url, trained, tokenizer):
    backend = connect(url, tokenizer)
    weights = {name: value.detach() for name, value in trained.module.named_parameters()}
    backend.update_weights(TensorSource(weights), version=5)
    scaled = {name: 2 * value for name, value in weights.items()}
    scaled.popitem()
    with pytest.raises(WeightUpdateError, match="1 of 1 workers"):
        backend.update_weights(TensorSource(scaled), version=6)
    assert backend.server.weight_version() == 5
    assert_same(backend, trained)


@pytest.mark.parametrize("in_flight", ["wait", "keep", "abort"])
def test_requests_under_way_are_finished_kept_or_cut_off_by_an_update(
    url, trained, tokenizer, in_flight
):
    backend = connect(url, tokenizer, in_flight=in_flight)
    source = TensorSource(dict(trained.module.named_parameters()))
    params = SamplingParams(max_new_tokens=240, ignore_eos=True, num_samples=16)
    # How fast the server is, and so when the update meets the requests, is not known beforehand.
    for version, pause_s in enumerate((0.3, 0.1, 0.03, 0.01), start=1):
        backend.update_weights(source, version=2 * version - 1)
        found = []
        thread = threading.Thread(
            target=lambda found=found: found.extend(backend.generate(prompts()[1:2], params))
        )
        thread.start()
        time.sleep(pause_s)
        backend.update_weights(source, version=2 * version)
        thread.join(60)
        [group] = found
        assert len(group) == 16
        cut = [c for c in group if c.finish_reason == FinishReason.ABORT]
        for completion in group:
            # The version of a request is that from before it, so never newer than the truth.
            assert (completion.versions >= 2 * version - 1).all()
            assert completion.versions.shape == completion.token_ids.shape
            aborted = completion.finish_reason == FinishReason.ABORT
            assert (len(completion.token_ids) < 240) == aborted
        if cut or in_flight != "abort":
            break
    assert bool(cut) == (in_flight == "abort")
    [[after]] = backend.generate(prompts()[:1], SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert after.versions.tolist() == [2 * version] * 3


def test_a_policy_over_a_url_answers_chats(url, tokenizer):
    from tensordict import TensorDict

    from torchrl_llm.data import Chat, ChatHistory
    from torchrl_llm.data.history import History
    from torchrl_llm.data.ragged import read_rows

    policy = vLLMWrapper(url, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6})
    chats = History.of([Chat([{"role": "user", "content": text}]) for text in ("Hi", "Hello")])
    history = ChatHistory(prompt=chats, batch_size=[2])
    out = policy(TensorDict(history=history, batch_size=[2]))
    scorer = policy.get_new_version(generate=False, inplace=False)
    rows = (("log_probs", "full"), ("masks", "all_assistant_mask"))
    for a, b, mask in zip(
        read_rows(out, rows[0]),
        read_rows(scorer(out), rows[0]),
        read_rows(out, rows[1]),
        strict=True,
    ):
        assert mask.any()
        torch.testing.assert_close(a[mask], b[mask], atol=1e-5, rtol=1e-5)


def test_a_thousand_requests_from_64_threads_return_to_their_own_caller(url, tokenizer):
    backend = connect(url, tokenizer)

    def work(number):
        for token in (3 + (number * 16 + k) % 280 for k in range(16)):
            only = {"allowed_token_ids": [token]}
            one = SamplingParams(max_new_tokens=2, ignore_eos=True, native=only)
            [[found]] = backend.generate([torch.tensor([token])], one)
            assert found.token_ids.tolist() == [token] * 2

    made = in_threads(*(partial(work, number) for number in range(64)), seconds=120)
    assert made == [None] * 64


def test_a_server_that_is_killed_is_an_error_or_aborted_rows_in_bounded_time(
    server, tokenizer, trained
):
    # The last test of this file, for it takes the server away.
    url, process = server
    backend = connect(url, tokenizer, max_retries=1)
    lenient = connect(url, tokenizer, max_retries=1, on_failure="abort")
    params = SamplingParams(max_new_tokens=240, ignore_eos=True, num_samples=16)
    results = {}

    def ask(name, which):
        try:
            results[name] = which.generate(prompts()[1:2], params)
        except BackendError as error:
            results[name] = error

    threads = [
        threading.Thread(target=ask, args=(name, which))
        for name, which in (("strict", backend), ("lenient", lenient))
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    kill(process)
    start = time.monotonic()
    for thread in threads:
        thread.join(100)
    assert time.monotonic() - start < 60  # the limit of a call
    assert isinstance(results["strict"], WorkerError)
    reasons = {c.finish_reason for c in results["lenient"][0]}
    assert FinishReason.ABORT in reasons
    assert reasons <= {FinishReason.ABORT, FinishReason.LENGTH}  # what was whole by then
    assert not backend.server.is_healthy()
    source = TensorSource(dict(trained.module.named_parameters()))
    with pytest.raises(WorkerError, match="Connection"):
        backend.update_weights(source, version=99)
    assert backend.version is None
