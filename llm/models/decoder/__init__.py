"""A decoder made of parts, onto which a family maps its config.json: `from llm.models import decoder as d`.

`config.py` is the config of the whole model and reads the keys that families share, `layer.py` joins parts and norms to
a layer, `attention.py`, `latent.py`, `recurrent.py`, `mlp.py` and `moe.py` are parts, `shared_kv.py` and `per_layer.py`
are what layers share, `part.py` is the interface of a part, `model.py` runs the layers, `multi_token.py` drafts.
"""

from llm.layers.linear_attention import DeltaHeads
from llm.layers.norm import GemmaRMSNorm, LayerNorm, LayerNorm1P
from llm.layers.rotary import RopeParameters
from llm.models.config_reader import ConfigReader
from llm.models.decoder.attention import AttentionConfig, Heads, QueryScale, alibi_slopes, check_rope
from llm.models.decoder.config import (
    DecoderConfig,
    LearnedPositions,
    layer_windows,
    longest_sequence,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_heads,
    read_layer_norm,
    read_plain_mlp,
    read_rms_norm,
    uniform_decoder,
    windows_by_pattern,
    with_windows,
)
from llm.models.decoder.latent import LatentAttentionConfig, read_latent_attention
from llm.models.decoder.layer import (
    DecoderLayer,
    LayerConfig,
    MixerLayer,
    NormedSums,
    Norms,
    OnePart,
    ParallelNorms,
    PostNorms,
    PreAndPostNormLayer,
    PreAndPostNorms,
    PreNormLayer,
    PreNorms,
    ScaledPreNorms,
    Stream,
    add_norm,
)
from llm.models.decoder.mlp import GatedMLPConfig, PlainMLPConfig
from llm.models.decoder.model import NOTHING_PACKED, QKV_PACKED, DecoderForCausalLM
from llm.models.decoder.moe import (
    W1_W2_W3,
    MoEConfig,
    down,
    gate_and_up,
    ignore_training,
    layers_with_experts,
    read_experts,
    sparse_layers,
)
from llm.models.decoder.multi_token import MultiTokenConfig
from llm.models.decoder.part import BuildContext, NormConfig, PartConfig
from llm.models.decoder.per_layer import Factor, PerLayerEmbedding, PerLayerGate, PerLayerInputs
from llm.models.decoder.recurrent import (
    GatedDeltaConfig,
    Mamba2Config,
    MambaConfig,
    Plamo2MambaConfig,
    ShortConvConfig,
    attending_layers,
    read_activation,
    read_mamba2,
    read_mixers,
    read_step_limits,
)
from llm.models.decoder.shared_kv import SharedKVConfig, connect_shared, read_shared
from llm.models.interface import BuildOptions, Cut, Renames

__all__ = [
    "NOTHING_PACKED",
    "QKV_PACKED",
    "W1_W2_W3",
    "AttentionConfig",
    "BuildContext",
    "BuildOptions",
    "ConfigReader",
    "Cut",
    "DecoderConfig",
    "DecoderForCausalLM",
    "DecoderLayer",
    "DeltaHeads",
    "Factor",
    "GatedDeltaConfig",
    "GatedMLPConfig",
    "GemmaRMSNorm",
    "Heads",
    "LatentAttentionConfig",
    "LayerConfig",
    "LayerNorm",
    "LayerNorm1P",
    "LearnedPositions",
    "Mamba2Config",
    "MambaConfig",
    "MixerLayer",
    "MoEConfig",
    "MultiTokenConfig",
    "NormConfig",
    "NormedSums",
    "Norms",
    "OnePart",
    "ParallelNorms",
    "PartConfig",
    "PerLayerEmbedding",
    "PerLayerGate",
    "PerLayerInputs",
    "PlainMLPConfig",
    "Plamo2MambaConfig",
    "PostNorms",
    "PreAndPostNormLayer",
    "PreAndPostNorms",
    "PreNormLayer",
    "PreNorms",
    "QueryScale",
    "Renames",
    "RopeParameters",
    "ScaledPreNorms",
    "SharedKVConfig",
    "ShortConvConfig",
    "Stream",
    "add_norm",
    "alibi_slopes",
    "attending_layers",
    "check_rope",
    "connect_shared",
    "down",
    "gate_and_up",
    "ignore_training",
    "layer_windows",
    "layers_with_experts",
    "longest_sequence",
    "read_activation",
    "read_attention",
    "read_decoder",
    "read_experts",
    "read_gated_mlp",
    "read_heads",
    "read_latent_attention",
    "read_layer_norm",
    "read_mamba2",
    "read_mixers",
    "read_plain_mlp",
    "read_rms_norm",
    "read_shared",
    "read_step_limits",
    "sparse_layers",
    "uniform_decoder",
    "windows_by_pattern",
    "with_windows",
]
