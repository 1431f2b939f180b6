"""Agents answered by vLLM's own server: the account of calls is what the server has counted."""

from __future__ import annotations

import re
import urllib.request

import pytest
from langmarl.world import written
from modules.backends.vllm_server import vllm_server

from torchrl_llm.assets import embedded_model_path
from torchrl_llm.langmarl import load_config, make_trainer

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


def counted(url, name):
    """What the server says of all requests so far."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        lines = re.findall(rf"^vllm:{name}_total\{{.*\}} (\S+)$", answer.read().decode(), re.M)
    return sum(map(float, lines))


def test_the_account_of_a_run_is_what_the_server_has_counted(tmp_path):
    path = str(embedded_model_path())
    with vllm_server(path, tmp_path, **{"max-model-len": "1024"}) as (url, _):
        actor = {"name": "embedded", "model_string": path, "base_url": f"{url}/v1"}
        actor |= {"max_tokens": 12, "extra_params": {"temperature": 0.7}, "timeout_s": 300.0}
        given = {"actor_llm": actor, "trajectories_per_iteration": 4, "num_agents": 1}
        config = load_config(written(tmp_path, **given))
        trainer = make_trainer(config)
        history = trainer.train(1)
        spent = trainer.log.account()["actor", "embedded"]
        trainer.close()
        assert (spent.calls, spent.failed, spent.estimated) == (4, 0, 0)
        assert spent.input_tokens == counted(url, "prompt_tokens") > 4 * 50
        assert spent.output_tokens == counted(url, "generation_tokens") > 0
        assert history[0]["num_episodes"] == len(history[0]["rewards"]) == 4
