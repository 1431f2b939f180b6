"""A server by URL: conformance against a fake one, and every way in which a server can fail."""

from __future__ import annotations

import time

import pytest
import torch
from conformance.backends import BackendConformance
from conformance.policies import WrapperConformance
from modules.backends.openai_server import FIVE, VOCAB, FakeServer, ask, connect, refuse

from torchrl_llm.data import FinishReason
from torchrl_llm.data.scoring import ScoreExtras, Support
from torchrl_llm.errors import BackendError, ConfigError, DataError, OverlongError, WorkerError
from torchrl_llm.modules import LLMWrapperBase, OpenAIBackend, SamplingParams


class TestOpenAIBackend(BackendConformance):
    @pytest.fixture(scope="class", autouse=True)
    def _serve(self, request):
        with FakeServer().running() as request.cls.url:
            yield

    def make_backend(self, max_length=None):
        return connect(self.url, max_length=max_length)


class URLWrapper(LLMWrapperBase):
    """A policy over a server."""

    def __init__(self, backend, *, tokenizer=None, **options):
        super().__init__(backend, tokenizer=tokenizer, **options)


class TestPolicyOverAServer(WrapperConformance):
    @pytest.fixture(scope="class", autouse=True)
    def _serve(self, request, tokenizer):
        fake = FakeServer(vocab_size=len(tokenizer), tokenizer=tokenizer)
        with fake.running() as request.cls.url:
            yield

    def make_policy(self, tokenizer, **options):
        url = self.url
        return URLWrapper(OpenAIBackend(url, tokenizer=tokenizer), tokenizer=tokenizer, **options)


# -- what is sent and read ------------------------------------------------------------------------


def test_every_field_that_shapes_sampling_is_said(serve):
    fake, url = serve()
    ask(connect(url), temperature=0.5, top_p=0.9, top_k=7, min_p=0.01, repetition_penalty=1.1)
    body = fake.requests[-1][1]
    wanted = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "min_tokens": 0,
        "max_tokens": 4,
        "stop_token_ids": [],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "prompt": [5],
        "model": "tiny",
    }
    assert {name: body[name] for name in wanted} == wanted


def test_end_ids_are_said_by_number_and_the_servers_own_are_refused(serve):
    fake, url = serve(own_ends=tuple(range(VOCAB)))
    with pytest.raises(BackendError, match="--generation-config vllm"):
        ask(connect(url))
    ask(connect(url, eos_token_ids=range(VOCAB)), ignore_eos=False)
    assert fake.requests[-1][1]["stop_token_ids"] == list(range(VOCAB))


def test_temperatures_that_a_server_would_change_are_refused(serve):
    _, url = serve()
    with pytest.raises(ConfigError, match=r"temperatures to 0\.01, got 0\.005"):
        ask(connect(url), temperature=0.005)


def test_native_arguments_reach_the_server_and_unknown_ones_do_not(serve):
    fake, url = serve()
    backend = connect(url)
    ask(backend, native={"structured_outputs": {"regex": "a*"}})
    assert fake.requests[-1][1]["structured_outputs"] == {"regex": "a*"}
    assert "prompt" not in backend.native_arguments


def test_responses_are_those_of_the_model_behind_the_server(serve):
    fake, url = serve()
    params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    [[got]] = connect(url).generate([FIVE], params)
    [[wanted]] = fake.backend.generate([FIVE], params)
    assert torch.equal(got.token_ids, wanted.token_ids)
    torch.testing.assert_close(got.log_probs, wanted.log_probs, atol=1e-6, rtol=0)


def test_greedy_log_probs_under_a_penalty_are_those_of_the_model_itself(serve):
    fake, url = serve()
    options = {"temperature": 0.0, "repetition_penalty": 3.0, "max_new_tokens": 6}
    [got] = ask(connect(url), **options)
    [wanted] = ask(fake.backend, **options)
    assert torch.equal(got.token_ids, wanted.token_ids)
    torch.testing.assert_close(got.log_probs, wanted.log_probs, atol=1e-6, rtol=0)


def test_stop_strings_end_at_the_same_token_as_elsewhere(serve, tokenizer):
    fake, url = serve(vocab_size=len(tokenizer), tokenizer=tokenizer)
    backend = OpenAIBackend(url, tokenizer=tokenizer)
    [free] = ask(backend, max_new_tokens=12, temperature=0.0)
    stop = tokenizer.decode(free.token_ids[3:4])
    [got] = ask(backend, max_new_tokens=12, temperature=0.0, stop=(stop,))
    [wanted] = ask(fake.backend, max_new_tokens=12, temperature=0.0, stop=(stop,))
    assert got.finish_reason == wanted.finish_reason == FinishReason.STOP
    assert torch.equal(got.token_ids, wanted.token_ids)


def test_log_probs_of_another_distribution_than_was_sampled_are_refused(serve):
    _, url = serve(processed=False)
    backend = connect(url)
    ask(backend)  # at temperature 1 both are the same
    ask(backend, temperature=0.0)
    for options in ({"temperature": 0.5}, {"top_k": 3}, {"native": {"min_tokens": 2}}):
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            ask(backend, **options)


def test_a_server_that_reads_other_ids_than_were_sent_is_refused_or_warned_about(serve):
    fake, url = serve()

    def encodes_anew(handler):
        _, data = fake.complete(fake.requests[-1][1])
        data["choices"][0]["prompt_token_ids"] = [1, 5]
        handler.send(200, data)
        return True

    fake.faults.extend([None, encodes_anew, None, encodes_anew])
    with pytest.raises(BackendError, match="read 2 ids where 1 were sent"):
        ask(connect(url))
    with pytest.warns(UserWarning, match="encodes prompts again"):
        [found] = ask(connect(url, on_other_prompt="warn"))
    assert len(found.token_ids) == 4


def change(**fields):
    """A fault: a choice with other fields."""

    def fault(handler):
        fake = handler.fake
        _, data = fake.complete(fake.requests[-1][1])
        data["choices"][0].update(fields)
        handler.send(200, data)
        return True

    return fault


UNTRAINABLE = [
    ({"token_ids": None}, ConfigError, "return_token_ids"),
    ({"prompt_token_ids": None}, ConfigError, "return_token_ids"),
    ({"token_ids": [1, 2, 3]}, BackendError, "3 ids and 4 log-probs"),
    ({"logprobs": None}, BackendError, "4 ids and 0 log-probs"),
    ({"token_ids": [1, 2, 3, VOCAB]}, BackendError, f"sampled the id {VOCAB}"),
    ({"logprobs": {"token_logprobs": [-1.0, None, -1.0, -1.0]}}, BackendError, "not finite"),
    ({"logprobs": {"token_logprobs": [-1.0, float("nan")] * 2}}, BackendError, "not finite"),
    ({"finish_reason": "stop", "stop_reason": None}, BackendError, "ended with 'stop'"),
    ({"finish_reason": "error"}, BackendError, "ended with 'error'"),
]


def test_answers_that_cannot_be_trained_on_are_refused(serve):
    fake, url = serve()
    backend = connect(url)
    for fields, error, match in UNTRAINABLE:
        fake.faults.append(change(**fields))
        with pytest.raises(error, match=match):
            ask(backend)


def test_answers_of_another_form_are_refused(serve):
    fake, url = serve()
    backend = connect(url)
    for answer in ("", "<html>hello</html>", '{"choices": []}', "[]", "null"):
        fake.faults.append(refuse(200, data=answer))
        with pytest.raises(BackendError, match="not one completion"):
            ask(backend)


def test_what_was_aborted_at_the_server_comes_back_as_far_as_it_came(serve):
    fake, url = serve()
    backend = connect(url)
    fields = {"token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.0, -2.0]}}
    fake.faults.append(change(finish_reason="abort", **fields))
    [found] = ask(backend)
    assert found.finish_reason == FinishReason.ABORT
    assert found.token_ids.tolist() == [7, 8]
    assert found.log_probs.tolist() == [-1.0, -2.0]


# -- scoring --------------------------------------------------------------------------------------


@pytest.mark.parametrize("heat", [1.0, 0.7])
def test_a_row_that_fills_the_context_is_scored_to_its_last_token(serve, heat):
    fake, url = serve(max_length=6)
    ids, mask = torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([False] + [True] * 5)
    got = connect(url).token_scores([ids], [mask], temperature=heat)
    wanted = fake.backend.token_scores([ids], [mask], temperature=heat)
    torch.testing.assert_close(got.log_probs, wanted.log_probs.detach(), atol=1e-5, rtol=1e-5)
    with pytest.raises(OverlongError, match="row 0 has 7 tokens"):
        connect(url).token_scores([torch.arange(5, 12)], [torch.tensor([False] * 7)])


def test_scores_on_a_given_support_are_those_of_the_model(serve):
    fake, url = serve()
    ids = torch.tensor([5, 6, 7])
    mask = torch.tensor([False, True, True])
    extras = ScoreExtras(support=Support(torch.tensor([6, 9]), torch.tensor([2, 0])))
    got = connect(url).token_scores([ids], [mask], extras=extras)
    wanted = fake.backend.token_scores([ids], [mask], extras=extras)
    torch.testing.assert_close(got.log_probs, wanted.log_probs.detach(), atol=1e-5, rtol=1e-5)


def test_what_needs_the_whole_vocabulary_says_how_to_start_the_server(serve):
    _, url = serve(max_logprobs=20)
    backend = connect(url)
    rows = [torch.tensor([5, 6])], [torch.tensor([False, True])]
    assert backend.token_scores(*rows).log_probs.shape == (1,)
    with pytest.raises(ConfigError, match=r"20 of 40 ids.*--max-logprobs -1"):
        backend.token_scores(*rows, entropy=True)


def test_a_server_that_cannot_score_is_found_out(serve):
    fake, url = serve()
    backend = connect(url)
    fake.faults.append(change(prompt_logprobs=None))
    with pytest.raises(BackendError, match="no prompt_logprobs"):
        backend.token_scores([torch.tensor([5, 6])], [torch.tensor([False, True])])


def test_hidden_states_are_out_of_reach(serve):
    _, url = serve()
    with pytest.raises(ConfigError, match="log-probs alone"):
        connect(url).token_scores([FIVE], [torch.tensor([False])], extras=ScoreExtras(states=True))


def test_kept_ids_that_were_not_all_named_are_refused(serve):
    fake, url = serve(max_logprobs=2)
    backend = connect(url)
    ask(backend, record_support=True, top_k=2)
    assert fake.requests[-1][1]["logprobs"] == 2
    with pytest.raises(DataError, match=r"the 2 kept ids .* --max-logprobs -1"):
        ask(backend, record_support=True, top_p=0.99)


# -- construction ---------------------------------------------------------------------------------


def test_the_only_model_is_taken_and_one_of_several_must_be_named(serve):
    _, url = serve(models=["a", "b"])
    assert connect(f"{url}/v1/", model="b").model_name == "b"
    with pytest.raises(ConfigError, match=r"\['a', 'b'\]; model= must name one"):
        connect(url)
    with pytest.raises(ConfigError, match="'c' is not one"):
        connect(url, model="c")


def test_a_server_that_is_not_there_is_an_error_within_the_limit():
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"no answer (in|within)"):
        connect("http://127.0.0.1:9", start_timeout_s=0.6)
    assert time.monotonic() - start < 2


def test_a_server_that_comes_up_late_is_waited_for(serve):
    fake, url = serve()
    fake.faults.extend([refuse(503)] * 2)
    assert connect(url).model_name == "tiny"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"vocab_size": None}, "without a tokenizer"),
        ({"max_retries": -1}, "max_retries must be at least 0"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        connect("http://127.0.0.1:9", start_timeout_s=0.1, **options)


def test_addresses_that_are_none_are_refused():
    for url in ("localhost:80", "ftp://a", "http://", "http://a:b", "http://a?x=1"):
        with pytest.raises(ConfigError, match="looks like http://host:8000"):
            connect(url)


def test_the_key_is_sent_and_a_refusal_asks_for_it(serve):
    fake, url = serve()
    seen = []
    fake.faults.append(lambda handler: seen.append(handler.headers["Authorization"]))
    backend = connect(url, api_key="secret")
    assert seen == ["Bearer secret"]
    fake.faults.append(refuse(401, data='{"error": "Unauthorized"}'))
    with pytest.raises(ConfigError, match=r"401: Unauthorized.*api_key"):
        ask(backend)
    assert "secret" not in repr(backend)


def test_redirections_are_refused(serve):
    fake, url = serve()
    fake.faults.append(refuse(307))
    with pytest.raises(ConfigError, match="redirection"):
        connect(url)
