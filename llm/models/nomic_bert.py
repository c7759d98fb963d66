"""Nomic Embed's BERT: token types and a rope, norms in the residual stream, a gated feed-forward without biases."""

from collections.abc import Mapping
from typing import ClassVar

from llm.models import decoder as d
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
_WITHOUT_EFFECT = (
    "n_positions max_trained_positions dense_seq_output fused_bias_fc fused_dropout_add_ln pad_vocab_size_multiple "
    "parallel_block_tied_norm reorder_and_upcast_attn rotary_emb_scale_base rotary_scaling_factor use_flash_attn "
    "use_xentropy"
).split()


class NomicBertModel(EncoderModel):
    renames = layer_renames(("nomic_bert.", ""), "encoder.layers", _LAYER, _AROUND)
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
    known = (*_EXPECTED, *_WITHOUT_EFFECT)
    raw = {_PUBLISHED.get(key, key): value for key, value in reader.raw.items() if key not in known}
    positions = min(reader.positive("n_positions", 2048), reader.positive("max_trained_positions", 2048))
    return d.ConfigReader({**raw, "max_position_embeddings": positions})
