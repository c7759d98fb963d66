"""GGUF's tensor names -> Hugging Face's, by architecture, and what the converter to GGUF did to the values.

llama.cpp rotates adjacent channels of llama's queries and keys (GPT-J's order), so its converter permutes their rows;
Gemma's norms are stored plus one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from llm.base.text import show
from llm.errors import UnsupportedModelError

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "token_embd_norm": "model.embedding_norm",  # LFM 2's name for the last norm
}
_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
_MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GPT_OSS_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_AROUND = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = _ATTENTION | _MLP | _PRE_NORMS
_PHI3 = _PRE_NORMS | {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_PLAIN_MLP = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GLM4 = (
    _ATTENTION
    | _PRE_NORMS
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_LFM2 = (
    {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
    | {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
    | {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
    | {"attn_output": "self_attn.out_proj", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    | {"ffn_gate": "feed_forward.w1", "ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3"}
)
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")
}
# Of Qwen 2, whose shared expert is a layer of one expert here; of DeepSeek, where it is a feed-forward.
_ONE_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.0.{part}_proj" for part in ("gate", "up", "down")}
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_LATENT = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d{1,5})\.([\w.]+)\.(weight|bias)", re.ASCII)
_OF_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.([\w.]+)\.(weight|bias)", re.ASCII)
_PART_OF_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.([\w.]+)", re.ASCII)
_AT_TOP = re.compile(r"(\w+)\.(weight|bias)", re.ASCII)
# Tensors whose Hugging Face's name has no "weight" or "bias".
_WHOLE = {"attn_sinks.weight": "self_attn.sinks", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
# Divisors of rotary frequencies, which the configuration takes up.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Family:
    """What an architecture of GGUF is here.

    Attributes:
        architecture: GGUF's name.
        model_type: as config.json has it; of experts, `WITH_EXPERTS` of metadata.py may say another.
        names: parts of the names of a layer's tensors.
        permuted: rows of queries and keys are in GPT-J's order.
        norm_offset: what the converter added to norms.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str]
    permuted: bool = False
    norm_offset: float = 0.0


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            Family("llama", "llama", _LLAMA | _EXPERTS, permuted=True),
            Family("qwen2", "qwen2", _LLAMA),
            Family(
                "qwen2moe",
                "qwen2_moe",
                _LLAMA | _EXPERTS | _ONE_SHARED | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
            ),
            Family("qwen3", "qwen3", _LLAMA | _QK_NORMS),
            Family("qwen3moe", "qwen3_moe", _LLAMA | _QK_NORMS | _EXPERTS),
            Family("olmoe", "olmoe", _LLAMA | _QK_NORMS | _EXPERTS),
            Family("deepseek2", "deepseek_v2", _LATENT | _MLP | _PRE_NORMS | _EXPERTS | _SHARED),
            Family("gpt-oss", "gpt_oss", _ATTENTION | _GPT_OSS_NORMS | _EXPERTS),
            Family("granite", "granite", _LLAMA, permuted=True),
            Family("granitemoe", "granitemoe", _LLAMA | _EXPERTS | _SHARED, permuted=True),
            Family("gemma", "gemma", _LLAMA, norm_offset=1.0),
            Family("gemma2", "gemma2", _ATTENTION | _MLP | _AROUND, norm_offset=1.0),
            Family("gemma3", "gemma3_text", _ATTENTION | _MLP | _AROUND | _QK_NORMS, norm_offset=1.0),
            Family(
                "phi2",
                "phi",
                _ATTENTION | _PLAIN_MLP | {"attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj"},
            ),
            Family("phi3", "phi3", _PHI3),
            Family("olmo2", "olmo2", _ATTENTION | _MLP | _POST | _QK_NORMS),
            Family("smollm3", "smollm3", _LLAMA, permuted=True),
            Family("starcoder2", "starcoder2", _ATTENTION | _PLAIN_MLP | _PRE_NORMS),
            Family("glm4", "glm4", _GLM4),
            Family("lfm2", "lfm2", _LFM2),
            Family("command-r", "cohere", _ATTENTION | _MLP | {"attn_norm": "input_layernorm"}),
            Family("cohere2", "cohere2", _ATTENTION | _MLP | {"attn_norm": "input_layernorm"}),
            Family("stablelm", "stablelm", _LLAMA),
            Family("seed_oss", "seed_oss", _ATTENTION | _MLP | _GPT_OSS_NORMS),
            Family("ernie4_5", "ernie4_5", _LLAMA),
            Family("arcee", "arcee", _ATTENTION | _PLAIN_MLP | _PRE_NORMS, permuted=True),
        )
    }
)


def family_of(architecture: object) -> Family:
    """Of general.architecture; raises `UnsupportedModelError` for one that is not here."""
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"general.architecture {show(architecture)} of this GGUF file is not supported (supported are "
            f"{', '.join(FAMILIES)}); use the model's safetensors, with quantization='q4_k' or another."
        )
    return family


def hugging_face_name(name: str, family: Family) -> str:
    """The name in a Hugging Face checkpoint; unchanged if it is not known, so that loading names it."""
    in_layer = _IN_LAYER.fullmatch(name)
    if in_layer is not None and in_layer[2] in family.names:
        return f"model.layers.{in_layer[1]}.{family.names[in_layer[2]]}.{in_layer[3]}"
    if in_layer is not None and (whole := f"{in_layer[2]}.{in_layer[3]}") in _WHOLE:
        return f"model.layers.{in_layer[1]}.{_WHOLE[whole]}"
    at_top = _AT_TOP.fullmatch(name)
    return f"{_TOP[at_top[1]]}.{at_top[2]}" if at_top is not None and at_top[1] in _TOP else name


def gguf_name(name: str, family: Family) -> str:
    """The inverse of `hugging_face_name`; "" where there is none."""
    in_layer = _OF_LAYER.fullmatch(name)
    ours = {theirs: mine for mine, theirs in (family.names if in_layer else _TOP).items()}
    if in_layer is not None and in_layer[2] in ours:
        return f"blk.{in_layer[1]}.{ours[in_layer[2]]}.{in_layer[3]}"
    path, _, last = name.rpartition(".")
    part = _PART_OF_LAYER.fullmatch(name)
    whole = {theirs: mine for mine, theirs in _WHOLE.items()}
    if part is not None and part[2] in whole:
        return f"blk.{part[1]}.{whole[part[2]]}"
    return f"{ours[path]}.{last}" if in_layer is None and path in ours else ""


def as_trained(name: str, tensor: torch.Tensor, family: Family, heads: int, kv_heads: int) -> torch.Tensor:
    """Undo the converter on the tensor `name` (Hugging Face's): floats, or raw rows uint8 [N, bytes]."""
    module = name.rpartition(".")[0]
    if family.permuted and module.endswith(("q_proj", "k_proj")):
        return _unpermuted(tensor, heads if module.endswith("q_proj") else kv_heads)
    if family.norm_offset and module.endswith("norm") and tensor.is_floating_point():
        return tensor.float() - family.norm_offset
    return tensor


def as_stored(name: str, tensor: torch.Tensor, family: Family, heads: int, kv_heads: int) -> torch.Tensor:
    """The inverse of `as_trained`: what the converter does to the tensor `name` (Hugging Face's)."""
    module = name.rpartition(".")[0]
    if family.permuted and module.endswith(("q_proj", "k_proj")):
        count = heads if module.endswith("q_proj") else kv_heads
        return tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
    if family.norm_offset and module.endswith("norm") and tensor.is_floating_point():
        return tensor.float() + family.norm_offset
    return tensor


def _unpermuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order [head, pair, half] -> [head, half, pair]."""
    if tensor.shape[0] % (2 * heads):
        return tensor  # of a shape that the loader refuses
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
