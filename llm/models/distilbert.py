"""DistilBERT: BERT without token types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from llm.models.bert import AROUND, BertModel, read_bert
from llm.models.config_reader import ConfigReader
from llm.models.decoder import LearnedPositions
from llm.models.encoder import ClassifierConfig, EncoderConfig, layer_renames

_LAYER = {
    "attention.out_lin": "self_attn.o_proj",
    "attention": "self_attn",
    "sa_layer_norm": "input_layernorm",
    "ffn.lin1": "mlp.up_proj",
    "ffn.lin2": "mlp.down_proj",
    "output_layer_norm": "post_attention_layernorm",
}
# DistilBERT's keys -> BERT's.
_KEYS = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
_WITHOUT_EFFECT = ("dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_")


class DistilBertModel(BertModel):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_lin", "k_lin", "v_lin"]}
    renames: ClassVar[tuple[tuple[str, str], ...]] = layer_renames(
        ("distilbert.", ""), "transformer.layer", _LAYER, AROUND
    )
    heads: ClassVar[Mapping[str, str]] = {"pre_classifier": "head.dense", "classifier": "head.out"}
    other_heads: ClassVar[tuple[str, ...]] = ("vocab_transform", "vocab_layer_norm", "vocab_projector")

    @classmethod
    def read_config(cls, reader: ConfigReader) -> EncoderConfig:
        raw = {_KEYS.get(key, key): value for key, value in reader.raw.items() if key not in _WITHOUT_EFFECT}
        rows = reader.positive("max_position_embeddings", 512)
        raw.pop("max_position_embeddings", None)
        config = read_bert(
            ConfigReader({**raw, "type_vocab_size": 2}), LearnedPositions(rows), ClassifierConfig("relu")
        )
        return replace(config, token_types=0)
