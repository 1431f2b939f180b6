"""Quantizes weights to four or eight bits; LoRA adapters are trained over them.

bitsandbytes quantizes to four bits (NF4, with quantized scales, arXiv:2305.14314). torchao
quantizes only the weights to eight bits. Embeddings, head and norms keep their dtype. Without
torchao, bitsandbytes quantizes to eight bits (LLM.int8(), arXiv:2208.07339). On a GPU, LLM.int8()
rounds activations too. Its separate treatment of outliers is turned off, because with it a token
would depend on the other rows of its batch.

Quantized weights are never merged with an adapter, because rounding the sum again would give a
different model.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_llm._imports import require

Bits = Literal["4bit", "8bit"]

_PACKAGES = {"4bit": ("bitsandbytes",), "8bit": ("torchao", "bitsandbytes")}
_BLOCK, _SCALE_BLOCK = 64, 256
# The 16 values of NF4, the 256 of its scales, and their mean, all in float32.
_TABLES = 4 * (16 + 256 + 1)


def package_of(bits: Bits) -> str:
    """Return the package that quantizes.

    Args:
        bits: ``"4bit"`` or ``"8bit"``.

    Raises:
        MissingExtraError: no package is installed.
    """
    names = _PACKAGES[bits]
    found = next((name for name in names if importlib.util.find_spec(name)), names[0])
    require(found, extra="quantization", feature=f"quantization={bits}")
    return found


def loading_options(bits: Bits, dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    """Return arguments of ``from_pretrained`` that quantize weights as they are read.

    Args:
        bits: ``"4bit"`` or ``"8bit"``.
        dtype: dtype of products, and of weights that are not quantized.
        device: device of the model.

    Raises:
        MissingExtraError: no package for it is installed.
    """
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if package_of(bits) == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        how = TorchAoConfig(Int8WeightOnlyConfig())
    elif bits == "8bit":
        how = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    else:
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return {"quantization_config": how, "device_map": {"": str(device)}}


def prepare(model: nn.Module) -> nn.Module:
    """Make a newly quantized model compute the same results in sampling and in training.

    Args:
        model: changed in place.
    """
    for part in model.modules():
        if hasattr(part, "support_avx512bf16_for_cpu"):
            # bitsandbytes would repack weights at the first forward without gradient.
            part.support_avx512bf16_for_cpu = False
        elif type(part) is nn.Linear and hasattr(part.weight, "qdata"):
            part.__class__ = _FrozenLinear
    return model


class _FrozenLinear(nn.Linear):
    """A layer of quantized weights that keeps no full-precision copy for the backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        out = _FrozenProduct.apply(input, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        ctx.weight, ctx.dtype = weight, input.dtype
        return F.linear(input, weight.dequantize(input.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return (gradient @ ctx.weight.dequantize(gradient.dtype)).to(ctx.dtype), None


def is_quantized(model: nn.Module) -> bool:
    """Return whether a model, or one within its wrappers, has quantized weights.

    Args:
        model: any module.
    """
    return any(getattr(part, "is_quantized", False) for part in model.modules())


def weight_bytes(model: nn.Module, bits: Bits | None) -> int:
    """Return the bytes of a model's weights after quantization; adapters are not quantized.

    Args:
        model: a model that is not quantized, for example without weight values.
        bits: ``None`` for weights without quantization.

    Example:
        >>> layer = nn.ModuleList([nn.Linear(256, 256, bias=False)])
        >>> weight_bytes(layer, None), weight_bytes(layer, "8bit"), weight_bytes(layer, "4bit")
        (262144, 66560, 34900)
    """
    sizes = {id(p): p.numel() * p.element_size() for p in model.parameters()}
    if bits is not None:
        sizes |= {id(weight): _packed(weight, bits) for weight in quantized_weights(model)}
    return sum(sizes.values())


def quantized_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights to quantize: of all linear layers except head and adapters.

    Args:
        model: a model that is not quantized.
    """
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    head = getattr(find_head(), "weight", None)
    linear = ((n, part) for n, part in model.named_modules() if type(part) is nn.Linear)
    return [part.weight for n, part in linear if part.weight is not head and ".lora_" not in n]


def _packed(weight: Tensor, bits: Bits) -> int:
    number = weight.numel()
    if bits == "8bit":
        return number + 4 * weight.shape[0]
    scales = -(-number // _BLOCK)
    return number // 2 + scales + 4 * -(-scales // _SCALE_BLOCK) + _TABLES
