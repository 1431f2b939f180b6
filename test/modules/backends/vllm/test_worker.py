"""A single engine of this process whose worker takes single weights from a group."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from modules.backends.vllm.engine_helper import SETTINGS

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.errors import ConfigError
from torchrl_llm.modules import (
    SamplingParams,
    TransformersBackend,
    load_model,
    load_tokenizer,
    make_vllm_worker,
    stateless_init_process_group,
)
from torchrl_llm.weights.transfer import free_port

pytest.importorskip("vllm")

from weights.without_gpu import install

pytestmark = pytest.mark.vllm


def test_single_weights_arrive_through_a_group():
    install()
    from torchrl_llm.modules.backends.vllm import VLLMBackend

    llm = make_vllm_worker(
        model_name=embedded_model_path(),
        make_ray_worker=False,
        worker_extension_cls="torchrl_llm.compat.vllm_group.vLLMWorker",
        **SETTINGS,
    )
    with pytest.raises(ConfigError, match="call init_weight_update_group"):
        llm.collective_rpc("update_weight", args=("x", "float32", (1,)))

    model, tokenizer = load_model(), load_tokenizer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    weights = dict(model.named_parameters())
    port = free_port()
    with ThreadPoolExecutor(1) as trainer:
        joining = trainer.submit(
            stateless_init_process_group, None, port, rank=0, world_size=2, device="cpu"
        )
        assert llm.collective_rpc("init_weight_update_group", args=(None, port, 1, 2)) == [1]
        group = joining.result(timeout=30)
        assert llm.collective_rpc("check_weights_changed") == [False]
        for name, weight in weights.items():
            sending = trainer.submit(group.broadcast, weight.detach().contiguous(), src=0)
            llm.collective_rpc("update_weight", args=(name, "float32", tuple(weight.shape)))
            sending.result(timeout=30)
    assert llm.collective_rpc("check_weights_changed") == [True]
    assert llm.collective_rpc("check_weights_changed") == [False]

    prompts = [torch.tensor(tokenizer(text)["input_ids"]) for text in ("12 + 34 =", "1 + 1")]
    params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    found = VLLMBackend(llm).generate(prompts, params)
    wanted = TransformersBackend(model, tokenizer=tokenizer).generate(prompts, params)
    for [a], [b] in zip(found, wanted, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=1e-5)
