"""ModernBERT: norms before the parts, a gated feed-forward, and layers that see a window of both sides, each with its
own rope."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from llm.forward import ForwardBatch
from llm.models import decoder as d
from llm.models.encoder import ClassifierConfig, EncoderConfig, EncoderModel, layer_renames

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn.Wqkv": "self_attn.qkv_proj",
    "attn.Wo": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.Wi": "mlp.gate_up_proj",
    "mlp.Wo": "mlp.down_proj",
}
_AROUND = {
    "embeddings.tok_embeddings": "model.embed_tokens",
    "embeddings.norm": "model.embed_norm",
    "final_norm": "model.norm",
}
_WITHOUT_EFFECT = (
    "embedding_dropout decoder_bias deterministic_flash_attn sparse_prediction sparse_pred_ignore_index "
    "initializer_cutoff_factor cls_token_id tie_word_embeddings reference_compile repad_logits_with_grad"
).split()
_POOLING = {"cls": "CLS", "mean": "MEAN"}


@dataclass(frozen=True)
class FirstNorms(d.Norms):
    """`PreNorms` without the first one: the embedding has just been normalised."""

    norm: d.NormConfig

    def build(self, layer: d.LayerConfig, context: d.BuildContext, prefix: str) -> d.DecoderLayer:
        return FirstLayer(layer, self.norm, context, prefix)


class FirstLayer(d.DecoderLayer):
    def __init__(self, layer: d.LayerConfig, norm: d.NormConfig, context: d.BuildContext, prefix: str) -> None:
        super().__init__(layer, context, prefix)
        self.post_attention_layernorm = norm.build(context.hidden_size, context)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> d.Stream:
        attended = self.self_attn(hidden, batch)
        hidden, residual = self.post_attention_layernorm(attended, hidden)
        return self.mlp(hidden, batch), residual


class ModernBertModel(EncoderModel):
    packed_modules_mapping = d.NOTHING_PACKED
    renames = layer_renames(("model.", ""), "layers", _LAYER, _AROUND)
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
        for key in _WITHOUT_EFFECT:
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
