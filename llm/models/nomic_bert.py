"""Nomic Embed's BERT: token types and a rope, norms in the residual stream, a gated feed-forward without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llm.layers.norm import LayerNorm
from llm.models.config_reader import ConfigReader
from llm.models.decoder import AttentionConfig, GatedMLPConfig, Heads, LayerConfig, NormConfig, NormedSums
from llm.models.encoder import ClassifierConfig, EncoderConfig, EncoderModel, layer_renames

_LAYER = {
    "attn.Wqkv": "self_attn.qkv_proj",
    "attn.out_proj": "self_attn.o_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "mlp.fc11": "mlp.up_proj",
    "mlp.fc12": "mlp.gate_proj",
    "mlp.fc2": "mlp.down_proj",
}
_AROUND = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "embed_norm",
}


class NomicBertModel(EncoderModel):
    renames: ClassVar[tuple[tuple[str, str], ...]] = layer_renames(
        ("nomic_bert.", ""), "encoder.layers", _LAYER, _AROUND
    )
    heads: ClassVar[Mapping[str, str]] = {
        "nomic_bert.pooler.dense": "head.dense",
        "pooler.dense": "head.dense",
        "classifier": "head.out",
    }
    other_heads: ClassVar[tuple[str, ...]] = ("cls",)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> EncoderConfig:
        hidden, count = reader.positive("hidden_size"), reader.positive("num_attention_heads")
        norm = NormConfig(reader.positive_number("layer_norm_eps", 1e-12), LayerNorm)
        heads = Heads(count, count, reader.positive("head_dim", hidden // count))
        layer = LayerConfig(
            attention=AttentionConfig(heads, reader.rope(1000.0), causal=False),
            mlp=GatedMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "silu")),
            norms=NormedSums(norm),
        )
        for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "tie_word_embeddings"):
            reader.expect(key, reader.raw.get(key))
        config = EncoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            max_position_embeddings=reader.positive("max_position_embeddings", 2048),
            layers=(layer,) * reader.positive("num_hidden_layers"),
            final_norm=None,
            embedding_norm=norm,
            token_types=reader.positive("type_vocab_size", 2),
            classifier=ClassifierConfig("tanh"),
        )
        reader.finish()
        return config
