"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from llm.models import decoder as d
from llm.models.encoder import ClassifierConfig, EncoderConfig, EncoderModel, layer_renames

_LAYER: Mapping[str, str] = {
    "attention.self": "self_attn",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "input_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_attention_layernorm",
}
_AROUND: Mapping[str, str] = {
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

_TANH = ClassifierConfig("tanh")


class BertModel(EncoderModel):
    """BERT: learned positions and token types, norms in the residual stream, a plain feed-forward."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["query", "key", "value"]}
    renames = layer_renames(("bert.", ""), "encoder.layer", _LAYER, _AROUND)
    ignored_weights = ("embeddings.position_ids",)
    heads: ClassVar[Mapping[str, str]] = {
        "bert.pooler.dense": "head.dense",
        "pooler.dense": "head.dense",
        "classifier": "head.out",
    }
    other_heads: ClassVar[tuple[str, ...]] = ("cls",)

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> EncoderConfig:
        return _read_bert(reader, d.LearnedPositions(reader.positive("max_position_embeddings", 512)))


def _read_bert(
    reader: d.ConfigReader, positions: d.LearnedPositions, classifier: ClassifierConfig = _TANH
) -> EncoderConfig:
    """The config of BERT and of what differs from it in positions and classifier alone."""
    hidden, count = reader.positive("hidden_size"), reader.positive("num_attention_heads")
    norm = d.NormConfig(reader.positive_number("layer_norm_eps", 1e-12), d.LayerNorm)
    reader.expect("position_embedding_type", "absolute")
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", *_OLD):
        reader.expect(key, reader.raw.get(key))
    layer = d.LayerConfig(
        attention=d.AttentionConfig(d.Heads(count, count, hidden // count), qkv_bias=True, out_bias=True, causal=False),
        mlp=d.PlainMLPConfig(reader.positive("intermediate_size"), reader.string("hidden_act", "gelu"), bias=True),
        norms=d.NormedSums(norm),
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


class RobertaModel(BertModel):
    """RoBERTa and XLM-RoBERTa: BERT whose positions start behind the padding token's id."""

    renames = layer_renames(("roberta.", ""), "encoder.layer", _LAYER, _AROUND)
    heads: ClassVar[Mapping[str, str]] = {"classifier.dense": "head.dense", "classifier.out_proj": "head.out"}
    other_heads = ("lm_head", "pooler", "roberta.pooler")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> EncoderConfig:
        rows, first = reader.positive("max_position_embeddings", 514), reader.integer("pad_token_id", 1) + 1
        if not 0 < first < rows:
            raise reader.error("pad_token_id", first - 1, "a row of the table of positions")
        return _read_bert(reader, d.LearnedPositions(rows, first))


_DISTILBERT_LAYER = {
    "attention.out_lin": "self_attn.o_proj",
    "attention": "self_attn",
    "sa_layer_norm": "input_layernorm",
    "ffn.lin1": "mlp.up_proj",
    "ffn.lin2": "mlp.down_proj",
    "output_layer_norm": "post_attention_layernorm",
}
# DistilBERT's keys -> BERT's.
_DISTILBERT_KEYS = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
_WITHOUT_EFFECT = ("dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_")


class DistilBertModel(BertModel):
    """DistilBERT: BERT without token types."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_lin", "k_lin", "v_lin"]}
    renames = layer_renames(("distilbert.", ""), "transformer.layer", _DISTILBERT_LAYER, _AROUND)
    heads: ClassVar[Mapping[str, str]] = {"pre_classifier": "head.dense", "classifier": "head.out"}
    other_heads = ("vocab_transform", "vocab_layer_norm", "vocab_projector")

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> EncoderConfig:
        raw = {_DISTILBERT_KEYS.get(key, key): value for key, value in reader.raw.items() if key not in _WITHOUT_EFFECT}
        rows = reader.positive("max_position_embeddings", 512)
        raw.pop("max_position_embeddings", None)
        config = _read_bert(
            d.ConfigReader({**raw, "type_vocab_size": 2}), d.LearnedPositions(rows), ClassifierConfig("relu")
        )
        return replace(config, token_types=0)
