"""vLLM's class names: `register_oot` of a plugin written for vLLM is keyed by them."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch

import llm.layers
import llm.models
from llm.base import custom_op as replacement
from llm.base.construction import constructing_for
from llm.base.custom_op import CustomOp, op_registry
from llm.config.compilation import CompilationConfig
from llm.errors import ValidationError
from llm.layers import rotary
from llm.layers.vision import MMEncoderAttention
from llm.platforms.cpu import CpuPlatform

for _package in (llm.layers, llm.models):
    for _module in pkgutil.walk_packages(_package.__path__, f"{_package.__name__}."):
        importlib.import_module(_module.name)


@pytest.fixture(autouse=True)
def no_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "op_registry_oot", {})


# The class that vLLM 0.33 registers under each name; a plugin's `register_oot` is keyed by it.
VLLM_CLASSES = dict(
    pair.split(":")
    for pair in (
        "silu_and_mul:SiluAndMul mul_and_silu:MulAndSilu fatrelu_and_mul:FatreluAndMul gelu_and_mul:GeluAndMul "
        "gelu_and_mul_sparse:GeluAndMulSparse gelu_new:NewGELU gelu_fast:FastGELU quick_gelu:QuickGELU "
        "relu2:ReLUSquaredActivation xielu:XIELU swigluoai_and_mul:SwigluOAIAndMul gelu:GELU gelu_tanh:GELUTanh "
        "silu_and_mul_with_clamp:SiluAndMulWithClamp swiglustep_and_mul:SwigluStepAndMul rms_norm:RMSNorm "
        "gemma_rms_norm:GemmaRMSNorm rms_norm_gated:RMSNormGated layer_norm:LayerNorm conv2d:Conv2dLayer "
        "conv3d:Conv3dLayer rotary_embedding:RotaryEmbeddingBase apply_rotary_emb:ApplyRotaryEmb "
        "dual_chunk_rotary_embedding:DualChunkRotaryEmbedding quant_fp8:QuantFP8 mm_encoder_attn:MMEncoderAttention "
        "mixer2_gated_rms_norm:Mixer2RMSNormGated replicated_linear:ReplicatedLinear "
        "column_parallel_linear:ColumnParallelLinear row_parallel_linear:RowParallelLinear "
        "vocab_parallel_embedding:VocabParallelEmbedding parallel_lm_head:ParallelLMHead "
        "logits_processor:LogitsProcessor rel_pos_attention:RelPosAttention qwen2_decoder:CustomQwen2Decoder "
        "fused_moe:FusedMoE gate_linear:GateLinear "
        "unquantized_fused_moe:UnquantizedFusedMoEMethod modular_fused_moe:FusedMoEModularMethod "
        "transformers_fused_moe:TransformersMoERunner "
        "multi_head_latent_attention:MultiHeadLatentAttentionWrapper grouped_topk:GroupedTopk "
        "short_conv:ShortConv mamba_mixer:MambaMixer mamba_mixer2:MambaMixer2 plamo2_mamba_mixer:Plamo2MambaMixer "
        "qwen_gated_delta_net_attention:QwenGatedDeltaNetAttention "
        "olmo_hybrid_gated_delta_net_attention:OlmoHybridGatedDeltaNetAttention "
        "kimi_gated_delta_net_attention:KimiGatedDeltaNetAttention"
    ).split()
)
OURS_ALONE = {"relu", "layer_norm_1p", "topk_router", "scaled_topk", "sparse_mixer"}


def test_every_operation_is_known_by_its_class_in_vllm() -> None:
    in_tree = {name: cls for name, cls in op_registry.items() if cls.__module__.startswith("llm.")}
    assert set(in_tree) == set(VLLM_CLASSES) | OURS_ALONE
    for name, vllm_name in VLLM_CLASSES.items():
        replacement.op_registry_oot.clear()
        theirs = type("Theirs", (in_tree[name],), {"__module__": __name__})
        CustomOp.register_oot(theirs, name=vllm_name)
        assert replacement.op_registry_oot == {in_tree[name].__name__: theirs}


@pytest.mark.parametrize("name", ["RoutedExperts", "YaRNScalingRotaryEmbedding"])
def test_a_class_of_vllm_that_is_not_here_cannot_be_replaced(name: str) -> None:
    with pytest.raises(ValidationError, match=f"there is no {name} to replace; ") as error:
        CustomOp.register_oot(name=name)(type("Theirs", (rotary.RotaryEmbedding,), {}))
    assert error.value.parameter == "name"


# Arguments without a default.
REQUIRED: dict[str, dict[str, Any]] = {
    "gelu_and_mul_sparse": {"activation_sparsity": 0.95},
    "silu_and_mul_with_clamp": {"swiglu_limit": 7.0},
    **{key: {"hidden_size": 8} for key in ("rms_norm", "gemma_rms_norm", "rms_norm_gated")},
    "layer_norm": {"dim": 8},
    "mixer2_gated_rms_norm": {"full_hidden_size": 8, "full_n_groups": 2},
    "rotary_embedding": {"head_size": 8, "rotary_dim": 8, "max_position_embeddings": 9},
    "dual_chunk_rotary_embedding": {
        **{"head_size": 8, "rotary_dim": 8, "max_position_embeddings": 9, "base": 1e4},
        **{"chunk_size": 4, "local_size": 1},
    },
    **{key: {"in_channels": 3, "out_channels": 4, "kernel_size": 2} for key in ("conv2d", "conv3d")},
    "quant_fp8": {"static": False},
    "grouped_topk": {"topk": 2, "renormalize": True},
    "mm_encoder_attn": {"num_heads": 2, "head_size": 4},
}
OPERATIONS = sorted(
    name for name in VLLM_CLASSES if issubclass(cls := op_registry[name], CustomOp) and not cls.is_layer
)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_can_be_enforced(name: str) -> None:
    """vLLM's keyword: on, whatever `custom_ops` says."""
    make: Any = op_registry[name]
    with constructing_for(CpuPlatform(), CompilationConfig.of({"custom_ops": ["none"]})):
        bindings = [make(**REQUIRED.get(name, {}), **more).binding for more in ({}, {"enforce_enable": True})]
    assert [binding.is_off for binding in bindings] == [True, False]
    assert ["enforced" in binding.reason for binding in bindings] == [False, True]


def test_attention_of_encoders_takes_vllms_arguments() -> None:
    op = MMEncoderAttention(
        num_heads=2, head_size=4, scale=0.5, num_kv_heads=2, prefix="visual", multimodal_config=None
    )
    x = torch.randn(1, 3, 8)
    assert torch.equal(op(x, x, x), MMEncoderAttention(2, 4, 0.5)(x, x, x))
