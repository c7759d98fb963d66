"""Qwen 3.5, the language model by itself: Qwen3-Next's layers without experts, with other projections."""

from __future__ import annotations

from typing import ClassVar

from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig, DecoderForCausalLM, GatedMLPConfig
from llm.models.decoder.part import PartConfig
from llm.models.qwen3_next import predicts_second_token, qwen_hybrid


class Qwen3_5ForCausalLM(DecoderForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **DecoderForCausalLM.packed_modules_mapping,
        "in_proj_ba": ["in_proj_b", "in_proj_a"],
    }
    renames: ClassVar[tuple[tuple[str, str], ...]] = (("model.layers.*.linear_attn", "model.layers.*.self_attn"),)

    @staticmethod
    def ignores_weight(name: str) -> bool:
        return predicts_second_token(name)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        ignore_second_token(reader)
        reader.expect("mlp_only_layers", [])
        mlp: PartConfig = GatedMLPConfig(
            reader.positive("intermediate_size", 12288), reader.string("hidden_act", "silu")
        )
        return qwen_hybrid(reader, "qwen", [mlp] * reader.positive("num_hidden_layers"), 4)


def ignore_second_token(reader: ConfigReader) -> None:
    """Keys of the layer that predicts a second token."""
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        reader.expect(key, reader.raw.get(key))
