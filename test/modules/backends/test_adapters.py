"""Adapters of PEFT: those that learn a prompt are refused, the others say what the model says."""

from __future__ import annotations

import pytest
import torch
from modules.backends.model_zoo import VOCAB, build
from transformers import AutoModelForCausalLM

from torchrl_llm.errors import CheckpointError, ConfigError
from torchrl_llm.modules import SamplingParams, TransformersBackend
from torchrl_llm.modules.backends import CausalScorer
from torchrl_llm.modules.weight_files import published_weights
from torchrl_llm.trainers.checkpoint import save_pretrained

peft = pytest.importorskip("peft", reason='needs peft: pip install -e ".[test]"')

PROMPTS = {
    "prefix tuning": (peft.PrefixTuningConfig, "PREFIX_TUNING"),
    "prompt tuning": (peft.PromptTuningConfig, "PROMPT_TUNING"),
    "P-tuning": (peft.PromptEncoderConfig, "P_TUNING"),
}
LORA = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rank-stabilized": {"use_rslora": True},
    "with a bias": {"lora_bias": True},
    "tied head": {"target_modules": ["lm_head", "q_proj"]},
    "tied embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "saved head": {"modules_to_save": ["lm_head"]},
}
UNTIED = {"tied head", "tied embedding", "saved head"}
NOT_LORA = {
    "OFT": peft.OFTConfig(target_modules=["q_proj"], oft_block_size=4),
    "HRA": peft.HRAConfig(target_modules=["q_proj"]),
    "LoHa": peft.LoHaConfig(target_modules=["q_proj"]),
    "LoKr": peft.LoKrConfig(target_modules=["q_proj"]),
    "FourierFT": peft.FourierFTConfig(target_modules=["q_proj"], n_frequency=9),
    "IA3": peft.IA3Config(target_modules=["q_proj", "up_proj"], feedforward_modules=["up_proj"]),
}


def adapted(family, config):
    torch.manual_seed(1)
    model = peft.get_peft_model(build(family), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("kind", PROMPTS)
def test_an_adapter_that_learns_a_prompt_is_refused_whatever_makes_the_logits(kind):
    cls, name = PROMPTS[kind]
    model = peft.get_peft_model(build("llama"), cls(task_type="CAUSAL_LM", num_virtual_tokens=3))
    refused = rf"'default' is {name}, which learns a prompt.*LoRA"
    scorer = CausalScorer(build("llama"))
    for make in (
        lambda: CausalScorer(model),
        lambda: CausalScorer(model, full_logits=True),
        lambda: TransformersBackend(model),
        lambda: TransformersBackend(model, full_logits=True),
        lambda: TransformersBackend(model, scorer=scorer),
    ):
        with pytest.raises(ConfigError, match=refused) as refusal:
            make()
        assert "full_logits" not in str(refusal.value)
    with pytest.raises(CheckpointError, match=rf"{name}. cannot be merged"):
        published_weights(model)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("DoRA", "tied head") else pytest.param(kind, marks=pytest.mark.full)
        for kind in LORA
    ],
)
def test_lora_of_every_kind_is_sampled_scored_and_saved_as_it_is(tmp_path, tokenizer, kind):
    config = {"target_modules": ["q_proj", "v_proj"], "r": 2, **LORA[kind]}
    model = adapted("qwen2 tied", peft.LoraConfig(init_lora_weights=False, **config))
    backend = TransformersBackend(model, eos_token_ids=(2,))
    prompts = [torch.tensor(ids) for ids in ([5, 6, 7], [9])]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    for prompt, [completion] in zip(prompts, backend.generate(prompts, params), strict=True):
        row = torch.cat([prompt, completion.token_ids])
        expected = logits(model, row[None])[0].log_softmax(-1)[len(prompt) - 1 : -1]
        expected = expected.gather(-1, completion.token_ids[:, None])[:, 0]
        torch.testing.assert_close(completion.log_probs, expected, atol=1e-4, rtol=0)
        with torch.no_grad():
            scores = backend.token_scores([row], [torch.arange(len(row)) >= len(prompt)])
        torch.testing.assert_close(scores.log_probs, expected, atol=1e-4, rtol=0)
    save_pretrained(tmp_path, model, tokenizer)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.arange(3, VOCAB)[None]
    torch.testing.assert_close(logits(saved, ids), logits(model, ids), atol=1e-3, rtol=0)
    assert saved.config.tie_word_embeddings is (kind not in UNTIED)
    # Loaders that tie whatever the file holds lose nothing.
    saved.tie_weights()
    torch.testing.assert_close(logits(saved, ids), logits(model, ids), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", NOT_LORA)
def test_another_adapter_is_saved_as_peft_merges_it(kind):
    model = adapted("llama", NOT_LORA[kind])
    saved = build("llama").eval()
    saved.load_state_dict({name: part.make() for name, part in published_weights(model).items()})
    ids = torch.arange(3, VOCAB)[None]
    torch.testing.assert_close(logits(saved, ids), logits(model, ids), atol=1e-4, rtol=0)
    with model.disable_adapter():
        assert (logits(saved, ids) - logits(model, ids)).abs().max() > 1e-2
