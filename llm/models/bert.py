"""BERT, RoBERTa, XLM-RoBERTa, DistilBERT, Nomic Embed's BERT and ModernBERT."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from llm.forward import ForwardBatch
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
        reader = reader.renamed(_DISTILBERT_KEYS)
        reader.ignore(*_WITHOUT_EFFECT)
        positions = d.LearnedPositions(reader.positive("max_position_embeddings", 512))
        return replace(_read_bert(reader, positions, ClassifierConfig("relu")), token_types=0)


_NOMIC_LAYER = {
    "attn.Wqkv": "self_attn.qkv_proj",
    "attn.out_proj": "self_attn.o_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "mlp.fc11": "mlp.up_proj",
    "mlp.fc12": "mlp.gate_proj",
    "mlp.fc2": "mlp.down_proj",
}
_NOMIC_AROUND = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "model.embed_norm",
}
# The keys of the published files -> transformers' keys.
_PUBLISHED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# Their keys of other arrangements, at the values that these models have.
_EXPECTED = {
    "activation_function": "swiglu",
    "rotary_emb_fraction": 1.0,
    "scale_attn_weights": True,
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm", "parallel_block", "causal"), False),
    **dict.fromkeys(("use_rms_norm", "rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx"), False),
}
_NOMIC_WITHOUT_EFFECT = (
    "n_positions max_trained_positions dense_seq_output fused_bias_fc fused_dropout_add_ln pad_vocab_size_multiple "
    "parallel_block_tied_norm reorder_and_upcast_attn rotary_emb_scale_base rotary_scaling_factor use_flash_attn "
    "use_xentropy"
).split()


class NomicBertModel(EncoderModel):
    """Nomic Embed: token types and a rope, norms in the residual stream, a gated feed-forward without biases."""

    renames = layer_renames(("nomic_bert.", ""), "encoder.layers", _NOMIC_LAYER, _NOMIC_AROUND)
    heads: ClassVar[Mapping[str, str]] = {
        "nomic_bert.pooler.dense": "head.dense",
        "pooler.dense": "head.dense",
        "classifier": "head.out",
    }
    other_heads = ("cls",)

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> EncoderConfig:
        reader = _as_transformers(reader)
        hidden, count = reader.positive("hidden_size"), reader.positive("num_attention_heads")
        norm = d.NormConfig(reader.positive_number("layer_norm_eps", 1e-12), d.LayerNorm)
        heads = d.Heads(count, count, reader.positive("head_dim", hidden // count))
        layer = d.LayerConfig(
            attention=d.AttentionConfig(heads, reader.rope(1000.0), causal=False),
            mlp=d.read_gated_mlp(reader),
            norms=d.NormedSums(norm),
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


def _as_transformers(reader: d.ConfigReader) -> d.ConfigReader:
    """A published config.json with transformers' keys; positions beyond the trained ones need a rope that is scaled."""
    if "n_embd" not in reader.raw:
        return reader
    for key, value in _EXPECTED.items():
        reader.expect(key, value)
    known = (*_EXPECTED, *_NOMIC_WITHOUT_EFFECT)
    raw = {_PUBLISHED.get(key, key): value for key, value in reader.raw.items() if key not in known}
    positions = min(reader.positive("n_positions", 2048), reader.positive("max_trained_positions", 2048))
    return d.ConfigReader({**raw, "max_position_embeddings": positions})


_MODERN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn.Wqkv": "self_attn.qkv_proj",
    "attn.Wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.Wi": "mlp.gate_up_proj",
    "mlp.Wo": "mlp.down_proj",
}
_MODERN_AROUND = {
    "embeddings.tok_embeddings": "model.embed_tokens",
    "embeddings.norm": "model.embed_norm",
    "final_norm": "model.norm",
}
_MODERN_WITHOUT_EFFECT = (
    "embedding_dropout decoder_bias deterministic_flash_attn sparse_prediction sparse_pred_ignore_index "
    "initializer_cutoff_factor cls_token_id tie_word_embeddings reference_compile repad_logits_with_grad"
).split()
_POOLING = {"cls": "CLS", "mean": "MEAN"}


class FirstLayer(d.DecoderLayer):
    def __init__(self, layer: d.LayerConfig, norms: "FirstNorms", context: d.BuildContext, prefix: str) -> None:
        super().__init__(layer, context, prefix)
        self.post_attention_layernorm = norms.norm.build(context.hidden_size, context)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> d.Stream:
        attended = self.self_attn(hidden, batch)
        hidden, residual = self.post_attention_layernorm(attended, hidden)
        return self.mlp(hidden, batch), residual


@dataclass(frozen=True)
class FirstNorms(d.Norms):
    """`PreNorms` without the first one: the embedding has just been normalised."""

    layer = FirstLayer
    norm: d.NormConfig


class ModernBertModel(EncoderModel):
    """ModernBERT: norms before the parts, a gated feed-forward, some layers with a window and rope of their own."""

    packed_modules_mapping = d.NOTHING_PACKED
    renames = layer_renames(("model.", ""), "layers", _MODERN_LAYER, _MODERN_AROUND)
    heads: ClassVar[Mapping[str, str]] = {
        "head.dense": "head.dense",
        "head.norm": "head.norm",
        "classifier": "head.out",
    }
    token_heads = heads
    other_heads = ("decoder",)

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> EncoderConfig:
        hidden, count = reader.positive("hidden_size"), reader.positive("num_attention_heads")
        norm = d.NormConfig(
            reader.positive_number("norm_eps", 1e-5), d.LayerNorm, has_bias=reader.boolean("norm_bias", False)
        )
        bias = reader.boolean("attention_bias", False)
        mlp = d.GatedMLPConfig(
            reader.positive("intermediate_size"),
            reader.string("hidden_activation", "gelu"),
            reader.boolean("mlp_bias", False),
        )

        def layer(index: int, window: int | None, rope: d.RopeParameters) -> d.LayerConfig:
            heads = d.Heads(count, count, hidden // count)
            attention = d.AttentionConfig(heads, rope, window, qkv_bias=bias, out_bias=bias, causal=False)
            return d.LayerConfig(attention=attention, mlp=mlp, norms=d.PreNorms(norm) if index else FirstNorms(norm))

        layers = [layer(index, *kind) for index, kind in enumerate(_windows(reader))]
        classifier = ClassifierConfig(
            reader.string("classifier_activation", "gelu"), reader.boolean("classifier_bias", False), norm
        )
        pooling = reader.string("classifier_pooling", "cls")
        if pooling not in _POOLING:
            raise reader.error("classifier_pooling", pooling, "'cls' or 'mean'")
        for key in _MODERN_WITHOUT_EFFECT:
            reader.expect(key, reader.raw.get(key))
        config = EncoderConfig(
            vocab_size=reader.positive("vocab_size"),
            hidden_size=hidden,
            max_position_embeddings=reader.positive("max_position_embeddings", 8192),
            layers=tuple(layers),
            final_norm=norm,
            embedding_norm=norm,
            classifier=classifier,
            token_classifier=classifier,
            pooling_type=_POOLING[pooling],
        )
        reader.finish()
        return config


def _windows(reader: d.ConfigReader) -> list[tuple[int | None, d.RopeParameters]]:
    """(window, rope) of each layer: all tokens at every third, half of `local_attention` on each side elsewhere."""
    count, every = reader.positive("num_hidden_layers"), reader.positive("global_attn_every_n_layers", 3)
    window = reader.positive("local_attention", 128) // 2 + 1
    sees_all = [index % every == 0 for index in range(count)]
    kinds = reader.names("layer_types")
    if kinds is not None:
        if len(kinds) != count or set(kinds) - {"full_attention", "sliding_attention"}:
            raise reader.error("layer_types", kinds, f"{count} of 'full_attention' or 'sliding_attention'")
        sees_all = [kind == "full_attention" for kind in kinds]
    if "full_attention" in reader.raw.get("rope_parameters", {}):
        whole, local = reader.rope(160_000.0, "full_attention"), reader.rope(10_000.0, "sliding_attention")
        for key in ("global_rope_theta", "local_rope_theta"):
            reader.expect(key, reader.raw.get(key))
    else:
        whole, local = (
            d.RopeParameters(theta=reader.positive_number(key, default, above=1.0))
            for key, default in (("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0))
        )
    return [(None, whole) if is_all else (window, local) for is_all in sees_all]
