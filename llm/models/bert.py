"""BERT: learned positions and token types, norms in the residual stream, a plain feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llm.layers.norm import LayerNorm
from llm.models.config_reader import ConfigReader
from llm.models.decoder import (
    AttentionConfig,
    Heads,
    LayerConfig,
    LearnedPositions,
    NormConfig,
    NormedSums,
    PlainMLPConfig,
)
from llm.models.encoder import ClassifierConfig, EncoderConfig, EncoderModel, layer_renames

LAYER: Mapping[str, str] = {
    "attention.self": "self_attn",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "input_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_attention_layernorm",
}
AROUND: Mapping[str, str] = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.position_embeddings": "model.embed_positions",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "model.embed_norm",
}
# Keys of the first config.json files, about a head that was never published.
_OLD = (
    "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type "
    "output_past gradient_checkpointing"
).split()

TANH = ClassifierConfig("tanh")


class BertModel(EncoderModel):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["query", "key", "value"]}
    renames: ClassVar[tuple[tuple[str, str], ...]] = layer_renames(("bert.", ""), "encoder.layer", LAYER, AROUND)
    ignored_weights: ClassVar[tuple[str, ...]] = ("embeddings.position_ids",)
    heads: ClassVar[Mapping[str, str]] = {
        "bert.pooler.dense": "head.dense",
        "pooler.dense": "head.dense",
        "classifier": "head.out",
    }
    other_heads: ClassVar[tuple[str, ...]] = ("cls",)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> EncoderConfig:
        return read_bert(reader, LearnedPositions(reader.positive("max_position_embeddings", 512)))


def read_bert(reader: ConfigReader, positions: LearnedPositions, classifier: ClassifierConfig = TANH) -> EncoderConfig:
    """The config of BERT and of what differs from it in positions and classifier alone."""
    hidden, count = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    norm = NormConfig(reader.positive_number("layer_norm_eps", 1e-12), LayerNorm)
    reader.expect("position_embedding_type", "absolute")
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", *_OLD):
        reader.expect(key, reader.raw.get(key))
    layer = LayerConfig(
        attention=AttentionConfig(Heads(count, count, hidden // count), qkv_bias=True, out_bias=True, causal=False),
        mlp=PlainMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "gelu"), bias=True),
        norms=NormedSums(norm),
    )
    reader.boolean("tie_word_embeddings", True)  # of the head that predicts masked tokens
    config = EncoderConfig(
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=positions.rows - positions.offset,
        layers=(layer,) * reader.positive("num_hidden_layers"),
        final_norm=None,
        learned_positions=positions,
        embedding_norm=norm,
        token_types=reader.positive("type_vocab_size", 2),
        classifier=classifier,
    )
    reader.finish()
    return config
