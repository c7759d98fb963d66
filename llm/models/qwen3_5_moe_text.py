"""Qwen 3.5 with experts, the language model by itself."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.decoder.part import PartConfig
from llm.models.qwen3_5_text import Qwen3_5ForCausalLM, ignore_second_token
from llm.models.qwen3_next import SHARED_EXPERT_OF_MTP, qwen_hybrid
from llm.models.reading_experts import qwen_experts


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        *Qwen3_5ForCausalLM.renames,
        ("model.layers.*.mlp.shared_expert", "model.layers.*.mlp.shared_experts.0"),
        *SHARED_EXPERT_OF_MTP,
    )

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_second_token(reader)
        reader.expect("mlp_only_layers", [])
        mlp: PartConfig = qwen_experts(reader, 256, 8)
        return qwen_hybrid(reader, "qwen", [mlp] * reader.positive("num_hidden_layers"))
