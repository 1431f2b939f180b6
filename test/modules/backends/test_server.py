"""Weights for a server: what is paused, sent, echoed and claimed; against a fake control plane."""

from __future__ import annotations

import base64
import json

import pytest
import torch
from modules.backends.openai_server import VOCAB, ask, connect, hang_up, refuse, sleep

from torchrl_llm.errors import ConfigError, WeightUpdateError, WorkerError
from torchrl_llm.modules import VLLMServer
from torchrl_llm.modules.backends import BigramModel, FakeBackend
from torchrl_llm.weights import (
    CanaryCheck,
    DeltaWeights,
    EngineWeights,
    FileWeights,
)
from torchrl_llm.weights.fingerprint import weights_digest
from torchrl_llm.weights.weight_source import AdapterSource, DeltaSource, TensorSource

PLAN = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]


def weights_of(seed):
    return {name: p.detach() for name, p in BigramModel(VOCAB, seed=seed).named_parameters()}


def held(fake):
    return {name: p.detach().clone() for name, p in fake.backend.module.named_parameters()}


def control_calls(fake):
    paths = [path.partition("?")[0] for path, _ in fake.requests]
    calls = [path for path in paths if not path.startswith("/v1")]
    return [path for k, path in enumerate(calls) if path != calls[k - 1] or k == 0]


@pytest.mark.parametrize("through", ["requests", "folder"])
def test_weights_arrive_between_a_pause_and_a_resume_and_the_version_rises(
    serve, tmp_path, through
):
    fake, url = serve()
    backend = connect(url, exchange_dir=tmp_path if through == "folder" else None)
    assert backend.server.weight_version() is None
    assert ask(backend)[0].versions is None
    fake.requests.clear()
    new = weights_of(seed=7)
    [receipt] = backend.update_weights(TensorSource(new), version=3)
    assert [path for path in control_calls(fake) if path != "/collective_rpc"] == [
        path for path in PLAN if path != "/collective_rpc"
    ]
    assert receipt.digest == weights_digest(new)
    assert receipt.version == backend.version == backend.server.weight_version() == 3
    assert receipt.num_tensors == len(new)
    assert all(torch.equal(value, new[name]) for name, value in held(fake).items())
    assert ask(backend)[0].versions.tolist() == [3] * 4
    assert backend.counts_versions
    assert not fake.paused
    # Nothing is left behind on either side.
    assert list(tmp_path.iterdir()) == []
    assert not fake.worker.__dict__.get("_torchrl_llm_transfers")


def test_weights_larger_than_a_request_travel_in_pieces(serve, monkeypatch):
    monkeypatch.setattr("torchrl_llm.modules.backends.server._CHUNK_BYTES", 100)
    fake, url = serve()
    server = VLLMServer(url)
    new = weights_of(seed=7)
    server.update_weights(TensorSource(new), version=1)
    pieces = [
        body for _, body in fake.requests if body and body.get("method", "").endswith("chunk")
    ]
    assert len(pieces) > 20
    assert all(len(base64.b64decode(body["args"][2])) <= 100 for body in pieces)
    assert all(torch.equal(value, new[name]) for name, value in held(fake).items())


@pytest.mark.parametrize("in_flight", ["wait", "keep", "abort"])
def test_the_server_is_told_what_to_do_with_running_requests(serve, in_flight):
    fake, url = serve()
    VLLMServer(url, in_flight=in_flight).update_weights(TensorSource(weights_of(1)), version=1)
    assert f"/pause?mode={in_flight}" in [path for path, _ in fake.requests]


def test_a_delta_is_taken_on_its_base_alone(serve):
    fake, url = serve()
    server = VLLMServer(url)
    old, new = weights_of(1), weights_of(2)
    [name, *_] = new
    after = {**old, name: new[name]}
    digests = {"base": weights_digest(old), "result": weights_digest(after)}
    delta = DeltaSource({name: new[name]}, **digests)
    with pytest.raises(WeightUpdateError, match="send it all weights"):
        server.update_weights(delta, version=1)
    assert server.weight_version() is None
    server.update_weights(TensorSource(old), version=1)
    [receipt] = server.update_weights(delta, version=2)
    assert receipt.digest == digests["result"]
    assert all(torch.equal(value, after[name]) for name, value in held(fake).items())


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_leave_the_old_ones_their_version_and_no_pause(serve, change):
    fake, url = serve()
    backend = connect(url)
    backend.update_weights(TensorSource(weights_of(1)), version=1)
    before = held(fake)
    bad = weights_of(2)
    [name, *_] = bad
    if change == "missing":
        del bad[name]
    elif change == "unknown":
        bad["no.such.weight"] = torch.zeros(1)
    else:
        bad[name] = bad[name].repeat(2, 1)
    with pytest.raises(WeightUpdateError, match="1 of 1 workers"):
        backend.update_weights(TensorSource(bad), version=2)
    assert all(torch.equal(value, before[name]) for name, value in held(fake).items())
    assert backend.version == backend.server.weight_version() == 1
    assert not fake.paused


def test_other_bytes_than_were_sent_are_refused_by_the_worker(serve, monkeypatch):
    fake, url = serve()
    keep = fake.worker.torchrl_llm_chunk

    def flip(transfer, start, chunk):
        content = bytearray(base64.b64decode(chunk))
        content[-1] ^= 1
        return keep(transfer, start, base64.b64encode(bytes(content)).decode())

    monkeypatch.setattr(fake.worker, "torchrl_llm_chunk", flip, raising=False)
    before = held(fake)
    with pytest.raises(WeightUpdateError, match=r"arrived as .* was sent as"):
        VLLMServer(url).update_weights(TensorSource(weights_of(2)), version=1)
    assert all(torch.equal(value, before[name]) for name, value in held(fake).items())


def test_a_worker_that_echoes_another_digest_or_version_is_not_believed(serve, monkeypatch):
    fake, url = serve()
    load = fake.worker.torchrl_llm_load
    for lie in ({"digest": "0" * 32}, {"version": 0}):
        monkeypatch.setattr(
            fake.worker, "torchrl_llm_load", lambda order, lie=lie: load(order) | lie, raising=False
        )
        with pytest.raises(WeightUpdateError, match=r"worker 0 of .* has .* stays paused"):
            VLLMServer(url).update_weights(TensorSource(weights_of(2)), version=1)
        assert fake.version == "default"
        assert fake.paused
    monkeypatch.undo()
    VLLMServer(url).update_weights(TensorSource(weights_of(2)), version=2)
    assert not fake.paused


def test_workers_of_which_only_some_took_the_weights_stay_paused(serve):
    fake, url = serve()
    refusal = {"error": "WeightUpdateError: no"}
    load = fake.worker.torchrl_llm_load
    fake.answer = _second_worker(fake.answer, lambda order: [load(order), refusal])
    with pytest.raises(WeightUpdateError, match=r"1 of 2 workers .* no\. The server stays paused"):
        VLLMServer(url).update_weights(TensorSource(weights_of(2)), version=1)
    assert fake.paused
    fake.paused = False
    fake.answer = _second_worker(fake.answer, lambda order: [refusal, refusal])
    with pytest.raises(WeightUpdateError, match=r"2 of 2 workers .* no$"):
        VLLMServer(url).update_weights(TensorSource(weights_of(2)), version=1)
    assert not fake.paused


def _second_worker(answer, load):
    def two(path, body):
        if path == "/collective_rpc" and body["method"] == "torchrl_llm_load":
            return 200, {"results": load(*body["args"])}
        return answer(path, body)

    return two


def test_a_file_that_the_server_does_not_see_or_that_is_broken_is_named(serve, tmp_path):
    fake, _ = serve()
    order = {"version": 1, "kind": "full", "digest": "0", "path": str(tmp_path / "none")}
    answer = fake.worker.torchrl_llm_load(json.dumps(order))
    assert "exchange_dir must be a folder that client and server both see" in answer["error"]
    (tmp_path / "none").write_bytes(b"nonsense")
    assert "no safetensors file" in fake.worker.torchrl_llm_load(json.dumps(order))["error"]
    order = {"version": 1, "kind": "full", "digest": "0", "transfer": "never"}
    assert "no piece" in fake.worker.torchrl_llm_load(json.dumps(order))["error"]


def test_a_folder_that_is_not_there_is_an_error_before_anything_is_paused(serve, tmp_path):
    fake, url = serve()
    server = VLLMServer(url, exchange_dir=tmp_path / "none")
    with pytest.raises(WeightUpdateError, match="could not write"):
        server.update_weights(TensorSource(weights_of(1)), version=1)
    assert control_calls(fake) == []


def test_a_pause_that_takes_too_long_is_taken_back(serve, tmp_path):
    fake, url = serve()
    before = held(fake)
    fake.faults.append(sleep(30))
    server = VLLMServer(url, timeout_s=2, exchange_dir=tmp_path)
    with pytest.raises(WorkerError, match=r"/pause.*no answer within 2 s"):
        server.update_weights(TensorSource(weights_of(1)), version=1)
    assert fake.requests[-1][0] == "/resume"
    assert not fake.paused
    assert all(torch.equal(value, before[name]) for name, value in held(fake).items())


@pytest.mark.parametrize("kind", ["files", "delta", "all"])
def test_every_updater_of_engines_reaches_a_server(serve, tmp_path, kind):
    fake, url = serve()
    backend = connect(url)
    trained = FakeBackend(vocab_size=VOCAB, eos_token_ids=(2,), seed=9)
    options = {"model": trained.module, "canary": CanaryCheck(trained, tolerance=1e-4)}
    if kind == "files":
        updater = FileWeights(backend, folder=tmp_path, **options)
    else:
        updater = {"delta": DeltaWeights, "all": EngineWeights}[kind](backend, **options)
    for version in (1, 2, 3):
        with torch.no_grad():
            trained.module.head.mul_(1.5)
        updater.push_weights()
        assert backend.server.weight_version() == version
        wanted = dict(trained.module.named_parameters())
        assert all(torch.equal(value, wanted[name]) for name, value in held(fake).items())
    if kind == "files":
        updater.close()


def test_a_canary_finds_a_server_that_did_nothing_with_the_weights(serve, monkeypatch):
    fake, url = serve()
    engine = fake.worker.model_runner.get_model()
    monkeypatch.setattr(engine, "load_weights", lambda weights: {name for name, _ in weights})
    trained = FakeBackend(vocab_size=VOCAB, eos_token_ids=(2,), seed=9)
    updater = EngineWeights(connect(url), model=trained.module, canary=CanaryCheck(trained))
    with pytest.raises(WeightUpdateError, match="the engine does not compute with version 1"):
        updater.push_weights()


def test_adapters_are_refused(serve):
    _, url = serve()
    with pytest.raises(ConfigError, match="send the adapter merged"):
        VLLMServer(url).update_weights(AdapterSource({}, config={}), version=1)


def test_servers_without_the_means_say_how_to_start_one(serve):
    _, url = serve(dev_mode=False)
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        VLLMServer(url).update_weights(TensorSource(weights_of(1)), version=1)
    fake, url = serve()
    fake.worker = object()
    with pytest.raises(WorkerError, match="--worker-extension-cls torchrl_llm"):
        VLLMServer(url).update_weights(TensorSource(weights_of(1)), version=1)
    assert not fake.paused


def test_an_order_that_came_twice_is_carried_out_once(serve):
    fake, url = serve()
    server = VLLMServer(url)
    old, new = weights_of(1), weights_of(2)
    server.update_weights(TensorSource(old), version=1)
    load, answers = fake.worker.torchrl_llm_load, []

    def twice(order):
        answers.extend([load(order), load(order)])
        return answers[-1:]

    fake.answer = _second_worker(fake.answer, twice)
    delta = DeltaSource(new, base=weights_digest(old), result=weights_digest(new))
    server.update_weights(delta, version=2)
    assert answers[0] == answers[1]
    assert fake.version == "2"


def test_a_connection_that_breaks_while_weights_travel_is_taken_up_again(serve):
    fake, url = serve()
    fake.faults.extend([hang_up, None, hang_up, None, hang_up])
    new = weights_of(4)
    VLLMServer(url).update_weights(TensorSource(new), version=1)
    assert all(torch.equal(value, new[name]) for name, value in held(fake).items())
    assert fake.version == "1"


def test_a_prefix_cache_that_stays_is_an_error_and_the_version_is_not_claimed(serve, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    fake, url = serve()
    answer = fake.answer

    def stays(path, body):
        if path.startswith("/reset_prefix_cache"):
            return 200, {"success": False}
        return answer(path, body)

    monkeypatch.setattr(fake, "answer", stays)
    with pytest.raises(WeightUpdateError, match=r"did not drop its prefix cache.*stays paused"):
        VLLMServer(url).update_weights(TensorSource(weights_of(1)), version=1)
    assert fake.version == "default"
    assert fake.paused


def test_health_pauses_and_settings(serve):
    fake, url = serve()
    server = VLLMServer(url)
    assert server.is_healthy()
    server.pause()
    assert server.is_paused()
    server.resume()
    assert not server.is_paused()
    fake.faults.append(refuse(500))
    assert not server.is_healthy()
    with pytest.raises(ConfigError, match="in_flight must be one of"):
        VLLMServer(url, in_flight="drop")
    with pytest.raises(ConfigError, match="api_key has no effect"):
        VLLMServer(server._http, api_key="x")
