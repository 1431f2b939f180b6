"""Tiny causal models of many families, built with plain transformers; see ``test_model_zoo.py``."""

from __future__ import annotations

import torch
import transformers

VOCAB = 61
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "num_key_value_heads": 4,
}  # fmt: skip
_DELTA = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_ROPE = {"rope_theta": 10000.0}


def _gpt(**more):
    return {
        "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512,
        "initializer_range": 0.2, **more,
    }  # fmt: skip


# Name: configuration class, its arguments, and False where these are all.
FAMILIES = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2 tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2 window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "llama": ("LlamaConfig", {}),
    "llama mqa": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama dynamic": (
        "LlamaConfig",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **_ROPE},
        },
    ),
    "llama yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                **_ROPE,
            }
        },
    ),
    "llama llama3": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                **_ROPE,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral window": ("MistralConfig", {"sliding_window": 16}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
    ),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 16}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 16, "sliding_window_pattern": 2}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.5,
        },
    ),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    ),
    "granite hybrid": (
        "GraniteMoeHybridConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 24,
            "position_embedding_type": "nope",
            **_MAMBA,
        },
    ),
    "granite hybrid rope": (
        "GraniteMoeHybridConfig",
        {
            "num_local_experts": 0,
            "layer_types": ["mamba", "attention"],
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
            **_MAMBA,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", {**_EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 8}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_ROUTED, **_LATENT, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**_ROUTED, **_LATENT, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 24},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **_EXPERTS},
    ),
    "jamba": (
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
        },
    ),
    "bamba": ("BambaConfig", {"attn_layer_indices": [1], **_MAMBA}),
    "falcon_h1": ("FalconH1Config", {"head_dim": 8, "mamba_d_ssm": 64, **_MAMBA}),
    "olmo_hybrid": ("OlmoHybridConfig", {**_DELTA, "head_dim": 8}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "head_dim": 8,
            **_LATENT,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_token": 2,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_experts": 4,
            "moe_intermediate_size": 24,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "M*-",
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
            "attention_hidden_size": 64,
        },
    ),
    "zaya": ("ZayaConfig", {}),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {
            "num_hidden_layers": 3,
            "lru_width": 32,
            "attention_window_size": 16,
            "head_dim": 8,
            "w_init_variance_scale": 4.0,
        },
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": ["linear_attention", "full_attention"],
            "block_size": 4,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "stablelm": ("StableLmConfig", {}),
    "glm": ("GlmConfig", {"head_dim": 8}),
    "glm4": ("Glm4Config", {"head_dim": 8}),
    "glm4_moe": ("Glm4MoeConfig", {"head_dim": 8, **_ROUTED, "first_k_dense_replace": 1}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**_ROUTED, **_LATENT, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "smollm3": ("SmolLM3Config", {}),
    "nemotron": ("NemotronConfig", {}),
    "persimmon": ("PersimmonConfig", {}),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 16,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 16, "sliding_window_pattern": 2}),
    "ministral": ("MinistralConfig", {"sliding_window": 16, "head_dim": 8}),
    "ministral3": ("Ministral3Config", {"sliding_window": None, "head_dim": 8}),
    "helium": ("HeliumConfig", {"head_dim": 8}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 8}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 8}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {"head_dim": 8}),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "apertus": ("ApertusConfig", {}),
    "arcee": ("ArceeConfig", {}),
    "dots1": (
        "Dots1Config",
        {"head_dim": 8, **_ROUTED, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "phimoe": (
        "PhimoeConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "afmoe": (
        "AfmoeConfig",
        {"head_dim": 8, **_EXPERTS, "num_dense_layers": 1, "sliding_window": 16},
    ),
    "vaultgemma": (
        "VaultGemmaConfig",
        {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": None,
            "altup_num_inputs": 2,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 8,
        },
    ),
    "cwm": ("CwmConfig", {"head_dim": 8, "sliding_window": 16}),
    "doge": ("DogeConfig", {}),
    "diffllama": ("DiffLlamaConfig", {}),
    "bitnet": ("BitNetConfig", {}),
    "minicpm3": ("MiniCPM3Config", {**_LATENT}),
    "youtu": ("YoutuConfig", {**_LATENT}),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "jais2": ("Jais2Config", {"head_dim": 8}),
    "hyperclovax": ("HyperCLOVAXConfig", {"attention_multiplier": 0.3}),
    "nanochat": ("NanoChatConfig", {"head_dim": 8}),
    "mimo_v2_flash": ("MiMoV2FlashConfig", {}),
    "solar_open": ("SolarOpenConfig", {"head_dim": 8, **_ROUTED}),
    "exaone_moe": ("ExaoneMoeConfig", {"head_dim": 8, **_EXPERTS, "sliding_window": 16}),
    "jetmoe": (
        "JetMoeConfig",
        {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "modernbert-decoder": ("ModernBertDecoderConfig", {"local_attention": 16}),
    "hrm_text": ("HrmTextConfig", {}),
    "laguna": ("LagunaConfig", {}),
    "mellum": ("MellumConfig", {"head_dim": 8, **_EXPERTS}),
    "deepseek_v32": (
        "DeepseekV32Config",
        {
            **_ROUTED,
            **_LATENT,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 256,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {
            **_ROUTED,
            **_LATENT,
            "first_k_dense_replace": 1,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 256,
        },
    ),
    "hy_v3": ("HYV3Config", {}),
    "gpt2": ("GPT2Config", _gpt(), False),
    "gpt2 inverse": ("GPT2Config", _gpt(scale_attn_by_inverse_layer_idx=True), False),
    "gpt_bigcode": ("GPTBigCodeConfig", _gpt(multi_query=True), False),
    "gptj": ("GPTJConfig", _gpt(rotary_dim=4), False),
    "codegen": ("CodeGenConfig", _gpt(rotary_dim=4, n_ctx=512), False),
    "ctrl": ("CTRLConfig", _gpt(dff=48), False),
    "openai-gpt": ("OpenAIGPTConfig", _gpt(), False),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "attention_types": [[["global", "local"], 1]],
            "num_heads": 4,
            "window_size": 16,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
        },
        False,
    ),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_neox_japanese": ("GPTNeoXJapaneseConfig", {}),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "ffn_dim": 48,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
            "init_std": 0.2,
            "word_embed_proj_dim": 32,
        },
        False,
    ),
    "bloom": (
        "BloomConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "n_layer": 2,
            "n_head": 4,
            "initializer_range": 0.2,
        },
        False,
    ),
    "mpt": (
        "MptConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 128,
            "initializer_range": 0.2,
        },
        False,
    ),
    "falcon": ("FalconConfig", {"alibi": False, "num_kv_heads": None}),
    "falcon alibi": (
        "FalconConfig",
        {
            "alibi": True,
            "multi_query": False,
            "new_decoder_architecture": False,
            "num_kv_heads": None,
        },
    ),
    "falcon new": (
        "FalconConfig",
        {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "git": (
        "GitConfig",
        {
            **{k: v for k, v in _SIZES.items() if k != "num_key_value_heads"},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
        },
        False,
    ),
    "biogpt": ("BioGptConfig", {}),
    "xglm": (
        "XGLMConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 512,
            "init_std": 0.2,
        },
        False,
    ),
    "bert decoder": ("BertConfig", {"is_decoder": True}),
    "bert": ("BertConfig", {}),
    "roberta decoder": ("RobertaConfig", {"is_decoder": True}),
    "electra decoder": ("ElectraConfig", {"is_decoder": True, "embedding_size": 32}),
    "rembert decoder": (
        "RemBertConfig",
        {"is_decoder": True, "input_embedding_size": 32, "output_embedding_size": 32},
    ),
    "roformer decoder": ("RoFormerConfig", {"is_decoder": True, "embedding_size": 32}),
    "bert-generation decoder": ("BertGenerationConfig", {"is_decoder": True}),
    "big_bird decoder": ("BigBirdConfig", {"is_decoder": True, "attention_type": "original_full"}),
    "megatron-bert decoder": ("MegatronBertConfig", {"is_decoder": True}),
    "xlm-roberta decoder": ("XLMRobertaConfig", {"is_decoder": True}),
    "xlm-roberta-xl decoder": ("XLMRobertaXLConfig", {"is_decoder": True}),
    "roc_bert decoder": (
        "RoCBertConfig",
        {"is_decoder": True, "enable_pronunciation": False, "enable_shape": False},
    ),
    "data2vec-text decoder": ("Data2VecTextConfig", {"is_decoder": True}),
    "camembert decoder": ("CamembertConfig", {"is_decoder": True}),
    "ernie decoder": ("ErnieConfig", {"is_decoder": True}),
    "xmod decoder": (
        "XmodConfig",
        {"is_decoder": True, "languages": ["en_XX"], "default_language": "en_XX"},
    ),
    "xlnet": (
        "XLNetConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "n_layer": 2,
            "n_head": 4,
            "d_inner": 48,
            "initializer_range": 0.2,
        },
        False,
    ),
    "xlm": (
        "XLMConfig",
        {
            "vocab_size": VOCAB,
            "emb_dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "causal": True,
            "embed_init_std": 0.2,
            "init_std": 0.2,
            "pad_index": 0,
        },
        False,
    ),
    "reformer": (
        "ReformerConfig",
        {
            "vocab_size": VOCAB,
            "is_decoder": True,
            "hidden_size": 32,
            "attn_layers": ["local", "local"],
            "num_attention_heads": 4,
            "attention_head_size": 8,
            "axial_pos_embds": False,
            "max_position_embeddings": 512,
            "local_attn_chunk_length": 8,
            "feed_forward_size": 48,
        },
        False,
    ),
    "cpmant": (
        "CpmAntConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "dim_head": 8,
            "dim_ff": 48,
            "num_hidden_layers": 2,
            "prompt_length": 4,
        },
        False,
    ),
    "prophetnet": (
        "ProphetNetConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "encoder_ffn_dim": 48,
            "num_encoder_layers": 1,
            "num_encoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "num_decoder_layers": 2,
            "num_decoder_attention_heads": 4,
            "init_std": 0.2,
            "is_decoder": True,
            "is_encoder_decoder": False,
            "add_cross_attention": False,
        },
        False,
    ),
    "mamba": (
        "MambaConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
        False,
    ),
}
_BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_ffn_dim": 48,
    "decoder_attention_heads": 4,
    "encoder_layers": 1,
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "max_position_embeddings": 512,
    "init_std": 0.2,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}
for _name, _class in {
    "bart": "BartConfig",
    "mbart": "MBartConfig",
    "mvp": "MvpConfig",
    "pegasus": "PegasusConfig",
    "plbart": "PLBartConfig",
    "marian": "MarianConfig",
    "blenderbot": "BlenderbotConfig",
    "blenderbot-small": "BlenderbotSmallConfig",
    "trocr": "TrOCRConfig",
    "bigbird_pegasus": "BigBirdPegasusConfig",
}.items():
    FAMILIES[_name] = (
        _class,
        {
            **_BART,
            **({"decoder_vocab_size": VOCAB, "pad_token_id": 0} if _name == "marian" else {}),
        },
        False,
    )


def build(name, **settings):
    """The model of a family, random weights, in eval mode."""
    class_name, own, *alone = FAMILIES[name]
    own = {**({} if alone else _SIZES), **own, **settings}
    torch.manual_seed(0)
    config = getattr(transformers, class_name)(**own)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are zeros and ones otherwise
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model
