"""vLLM's class names: `register_oot` of a plugin written for vLLM is keyed by them."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import llm.layers
from llm.base import replacement
from llm.base.custom_op import CustomOp
from llm.base.errors import ValidationError
from llm.base.replacement import op_registry
from llm.layers import rotary

for _module in pkgutil.walk_packages(llm.layers.__path__, "llm.layers."):
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
        "logits_processor:LogitsProcessor rel_pos_attention:RelPosAttention"
    ).split()
)
OURS_ALONE = {"relu"}


def test_every_operation_is_known_by_its_class_in_vllm() -> None:
    in_tree = {name: cls for name, cls in op_registry.items() if cls.__module__.startswith("llm.")}
    assert set(in_tree) == set(VLLM_CLASSES) | OURS_ALONE
    for name, vllm_name in VLLM_CLASSES.items():
        replacement.op_registry_oot.clear()
        theirs = type("Theirs", (in_tree[name],), {"__module__": __name__})
        CustomOp.register_oot(theirs, name=vllm_name)
        assert replacement.op_registry_oot == {in_tree[name].__name__: theirs}


@pytest.mark.parametrize("name", ["FusedMoE", "YaRNScalingRotaryEmbedding"])
def test_a_class_of_vllm_that_is_not_here_cannot_be_replaced(name: str) -> None:
    with pytest.raises(ValidationError, match=f"there is no {name} to replace; ") as error:
        CustomOp.register_oot(name=name)(type("Theirs", (rotary.RotaryEmbedding,), {}))
    assert error.value.parameter == "name"
