"""The engine's configuration, `llm.config.VllmConfig` and its parts, under vLLM's names.

The public names load on first use, so that `llm.config.env` can be read before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from llm.base.vllm_paths import missing_name

if TYPE_CHECKING:
    from llm.config.compilation import CompilationConfig as CompilationConfig
    from llm.config.compilation import CompilationMode as CompilationMode
    from llm.config.engine import CacheConfig as CacheConfig
    from llm.config.engine import DeviceConfig as DeviceConfig
    from llm.config.engine import EngineConfig as EngineConfig
    from llm.config.engine import LLMArgs as LLMArgs
    from llm.config.engine import LoadConfig as LoadConfig
    from llm.config.engine import ModelConfig as ModelConfig
    from llm.config.engine import MultiModalConfig as MultiModalConfig
    from llm.config.engine import ObservabilityConfig as ObservabilityConfig
    from llm.config.engine import ParallelConfig as ParallelConfig
    from llm.config.engine import PoolerConfig as PoolerConfig
    from llm.config.engine import ReasoningConfig as ReasoningConfig
    from llm.config.engine import SchedulerConfig as SchedulerConfig
    from llm.config.engine import SpeculativeConfig as SpeculativeConfig
    from llm.config.engine import StructuredOutputsConfig as StructuredOutputsConfig
    from llm.config.engine import VllmConfig as VllmConfig

_PUBLIC = {
    "compilation": ("CompilationConfig", "CompilationMode"),
    "engine": (
        *("CacheConfig", "DeviceConfig", "EngineConfig", "LLMArgs", "LoadConfig", "ModelConfig"),
        *("MultiModalConfig", "ObservabilityConfig", "ParallelConfig", "PoolerConfig", "ReasoningConfig"),
        *("SchedulerConfig", "SpeculativeConfig", "StructuredOutputsConfig", "VllmConfig"),
    ),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = list(_MODULES)


if not TYPE_CHECKING:  # or mypy would take any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise missing_name(__name__, name)
        return getattr(importlib.import_module(f"llm.config.{_MODULES[name]}"), name)
