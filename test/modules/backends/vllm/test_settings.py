"""Before an engine is built: versions, environment, options, and a process left as it was."""

from __future__ import annotations

import importlib
import random
import sys
from importlib import metadata

import numpy as np
import pytest
import torch

from torchrl_llm.errors import ConfigError, MissingExtraError, ResourceError
from torchrl_llm.modules import vLLMWrapper
from torchrl_llm.modules.backends.server import EXTENSION
from torchrl_llm.modules.backends.vllm import build, engine_arguments
from torchrl_llm.modules.backends.vllm.build import PRIVATE_NAMES, prepare_vllm, undisturbed

NAMES = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND")


@pytest.mark.parametrize("found", ["0.31.2", "0.33.0", "1.0"])
def test_untested_versions_are_refused_before_anything_is_imported(monkeypatch, found):
    monkeypatch.setattr(metadata, "version", lambda name: found)
    monkeypatch.setattr(build, "require", lambda *a, **k: pytest.fail("vLLM was imported"))
    with pytest.raises(ConfigError, match=rf"supports vLLM 0.32, and {found} is installed"):
        prepare_vllm("vLLMWrapper")


def test_without_vllm_the_extra_is_named(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in NAMES:
        monkeypatch.setenv(name, build._ENVIRONMENT[name])
    with pytest.raises(MissingExtraError, match=r'pip install "torchrl_llm\[vllm\]"'):
        prepare_vllm("vLLMWrapper")
    with pytest.raises(MissingExtraError, match="vLLMWrapper needs the package 'vllm'"):
        vLLMWrapper("a/model")


@pytest.mark.parametrize(("name", "value"), [(NAMES[0], "1"), (NAMES[1], "0-3")])
def test_an_environment_that_says_otherwise_is_named(monkeypatch, name, value):
    monkeypatch.setattr(metadata, "version", lambda _: "0.32.0")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"needs {name}=.*the environment says '{value}'"):
        prepare_vllm("vLLMWrapper")


def test_a_process_is_as_before_whatever_an_engine_did_to_it():
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    wanted = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads

    def build_and_fail():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads + 1)
        torch.set_num_threads = print
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError), undisturbed():
        build_and_fail()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == wanted
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.set_num_threads is set_threads
    assert torch.get_num_threads() == threads


# -- options of an engine -------------------------------------------------------------------------


def test_engines_report_what_was_sampled_and_take_nothing_from_a_generation_config():
    found = engine_arguments("m")
    assert found["generation_config"] == "vllm"
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["max_logprobs"] == -1
    assert found["async_scheduling"] is False
    assert not {"max_model_len", "gpu_memory_utilization", "hf_overrides"} & found.keys()


def test_options_reach_the_engine_under_its_own_names():
    found = engine_arguments(
        "m",
        num_devices=4,
        max_model_len=64,
        gpu_memory_utilization=0.4,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_fp32_lm_head=True,
        hf_overrides={"rope_theta": 1.0},
        max_num_seqs=7,
    )
    assert found["tensor_parallel_size"] == 4
    assert (found["max_model_len"], found["gpu_memory_utilization"]) == (64, 0.4)
    assert (found["enforce_eager"], found["enable_prefix_caching"]) == (True, False)
    assert found["hf_overrides"] == {"rope_theta": 1.0, "head_dtype": "float32"}
    assert found["max_num_seqs"] == 7


def test_on_the_cpu_an_engine_is_eager_in_this_process_and_takes_a_bounded_cache():
    found = engine_arguments("m", cpu=True)
    assert found["enforce_eager"] is True
    assert found["distributed_executor_backend"] == "uni"
    assert found["kv_cache_memory_bytes"] == 1 << 30
    assert "kv_cache_memory_bytes" not in engine_arguments(
        "m", cpu=True, gpu_memory_utilization=0.2
    )
    assert engine_arguments("m", cpu=True, kv_cache_memory_bytes=5)["kv_cache_memory_bytes"] == 5


@pytest.mark.parametrize("cpu", [False, True])
def test_an_engine_over_two_devices_has_processes_that_take_weights_also_inside_ray(cpu):
    found = engine_arguments("m", num_devices=2, cpu=cpu)
    assert found["distributed_executor_backend"] == "mp"
    assert found["worker_extension_cls"] == EXTENSION
    assert "worker_extension_cls" not in engine_arguments("m", cpu=cpu)


def test_too_few_gpus_are_said_before_anything_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ResourceError, match="needs 8 GPUs, but this machine has 2"):
        build._check_devices(8, cpu=False)
    build._check_devices(2, cpu=False)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("(2.0 GiB KV cache is needed, which is larger than ...", ResourceError),
        ("Free memory on device cuda:0 (3/80 GiB) is less than desired", ResourceError),
        ("CUDA out of memory. Tried to allocate 2 GiB", ResourceError),
        ("Unknown dtype: 'flat8'", ConfigError),
    ],
)
def test_a_failed_start_tells_memory_from_settings(text, kind):
    found = build._explained(ValueError(text), {"model": "m"})
    assert type(found) is kind
    assert text in str(found)
    assert "'m'" in str(found)


# -- with vLLM ------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_private_names_of_vllm_are_where_they_were(name):
    pytest.importorskip("vllm")
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:]:
            found = getattr(found, part)
        return
    raise AssertionError(name)


@pytest.mark.vllm
def test_bad_options_are_named_before_an_engine_starts():
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match="no option 'max_num_seq'; did you mean 'max_num_seqs'"):
        build.build_engine(max_num_seq=3)


@pytest.mark.vllm
def test_a_cache_too_small_for_the_context_says_how_much_is_needed():
    pytest.importorskip("vllm")
    with pytest.raises(ResourceError, match=r"max seq len \(2048\).*GiB KV cache is needed"):
        build.build_engine(dtype="float32", max_model_len=2048, kv_cache_memory_bytes=1 << 20)


@pytest.mark.vllm
def test_a_model_that_does_not_exist_is_a_setting(tmp_path):
    pytest.importorskip("vllm")
    with pytest.raises(ConfigError, match="vLLM built no engine for"):
        build.build_engine(tmp_path)
