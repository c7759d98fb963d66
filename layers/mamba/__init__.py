"""Recurrent mixers, which keep a state of a fixed size per request."""

from llm.layers.mamba.mamba_mixer import MambaMixer
from llm.layers.mamba.mamba_mixer2 import MambaMixer2
from llm.layers.mamba.parameters import MambaBase
from llm.layers.mamba.plamo2_mixer import Plamo2MambaMixer

__all__ = ["MambaBase", "MambaMixer", "MambaMixer2", "Plamo2MambaMixer"]
