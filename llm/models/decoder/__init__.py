"""A decoder made of parts, onto which a family maps its config.json.

`config.py` is the config of the whole model, `layer.py` joins parts and norms to a layer, `attention.py`, `latent.py`,
`mamba.py`, `mlp.py` and `moe.py` are parts, `part.py` is the interface of a part, `model.py` runs the layers,
`reading.py` reads the keys that families share.
"""

from llm.models.decoder.alibi import alibi_slopes
from llm.models.decoder.attention import AttentionConfig, Heads, QueryScale
from llm.models.decoder.config import DecoderConfig, LearnedPositions
from llm.models.decoder.latent import LatentAttentionConfig, read_latent_attention
from llm.models.decoder.layer import (
    LayerConfig,
    MixerLayer,
    NormedSums,
    Norms,
    OnePart,
    ParallelNorms,
    PostNorms,
    PreAndPostNorms,
    PreNorms,
    ScaledPreNorms,
)
from llm.models.decoder.mamba import (
    Mamba2Config,
    MambaConfig,
    read_activation,
    read_mamba2,
    read_mixers,
    read_step_limits,
)
from llm.models.decoder.mlp import GatedMLPConfig, PlainMLPConfig
from llm.models.decoder.model import DecoderForCausalLM
from llm.models.decoder.moe import MoEConfig
from llm.models.decoder.part import BuildContext, NormConfig, PartConfig
from llm.models.decoder.reading import (
    layer_windows,
    longest_sequence,
    read_decoder,
    read_heads,
    read_layer_norm,
    read_rms_norm,
    windows_by_pattern,
)

__all__ = [
    "AttentionConfig",
    "BuildContext",
    "DecoderConfig",
    "DecoderForCausalLM",
    "GatedMLPConfig",
    "Heads",
    "LatentAttentionConfig",
    "LayerConfig",
    "LearnedPositions",
    "Mamba2Config",
    "MambaConfig",
    "MixerLayer",
    "MoEConfig",
    "NormConfig",
    "NormedSums",
    "Norms",
    "OnePart",
    "ParallelNorms",
    "PartConfig",
    "PlainMLPConfig",
    "PostNorms",
    "PreAndPostNorms",
    "PreNorms",
    "QueryScale",
    "ScaledPreNorms",
    "alibi_slopes",
    "layer_windows",
    "longest_sequence",
    "read_activation",
    "read_decoder",
    "read_heads",
    "read_latent_attention",
    "read_layer_norm",
    "read_mamba2",
    "read_mixers",
    "read_rms_norm",
    "read_step_limits",
    "windows_by_pattern",
]
