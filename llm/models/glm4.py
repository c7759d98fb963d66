"""GLM-4-0414: GLM-4 with post-norms on both parts too."""

from __future__ import annotations

from typing import ClassVar

from llm.models.decoder import NormConfig, Norms, PreAndPostNorms
from llm.models.glm import GlmForCausalLM

_LAYER = "model.layers.*"


class Glm4ForCausalLM(GlmForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        (f"{_LAYER}.post_self_attn_layernorm", f"{_LAYER}.post_attention_layernorm"),
        (f"{_LAYER}.post_attention_layernorm", f"{_LAYER}.pre_feedforward_layernorm"),
        (f"{_LAYER}.post_mlp_layernorm", f"{_LAYER}.post_feedforward_layernorm"),
    )

    @classmethod
    def norms(cls, norm: NormConfig) -> Norms:
        return PreAndPostNorms(norm)
