"""offline-llm: run language models in your own process.

The public names load on first use, so `import llm` costs milliseconds and does not import torch.
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import TYPE_CHECKING

from llm.base import conflict, vllm_paths

__version__ = "0.1.0"

if TYPE_CHECKING:
    from llm.async_llm import AsyncLLM as AsyncLLM
    from llm.config.engine_args import AsyncEngineArgs as AsyncEngineArgs
    from llm.config.engine_args import EngineArgs as EngineArgs
    from llm.engine.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
    from llm.errors import ArgumentError as ArgumentError
    from llm.errors import CheckpointError as CheckpointError
    from llm.errors import EmptyPromptError as EmptyPromptError
    from llm.errors import EngineBusyError as EngineBusyError
    from llm.errors import EngineClosedError as EngineClosedError
    from llm.errors import GenerationInterrupted as GenerationInterrupted
    from llm.errors import JobError as JobError
    from llm.errors import JobInterrupted as JobInterrupted
    from llm.errors import LLMError as LLMError
    from llm.errors import LogitsProcessorError as LogitsProcessorError
    from llm.errors import MissingPackageError as MissingPackageError
    from llm.errors import OutOfMemoryError as OutOfMemoryError
    from llm.errors import PluginError as PluginError
    from llm.errors import PromptTooLongError as PromptTooLongError
    from llm.errors import RowError as RowError
    from llm.errors import SamplingError as SamplingError
    from llm.errors import TokenOutOfRangeError as TokenOutOfRangeError
    from llm.errors import UnsupportedModelError as UnsupportedModelError
    from llm.errors import ValidationError as ValidationError
    from llm.inputs import PromptType as PromptType
    from llm.inputs import TextPrompt as TextPrompt
    from llm.inputs import TokensPrompt as TokensPrompt
    from llm.inside.capture import Capture as Capture
    from llm.inside.control_vector import ControlVector as ControlVector
    from llm.inside.intervention import Intervention as Intervention
    from llm.llm import LLM as LLM
    from llm.llm_engine import LLMEngine as LLMEngine
    from llm.models.registry import ModelRegistry as ModelRegistry
    from llm.models.registry import register_model as register_model
    from llm.outputs import BeamSearchOutput as BeamSearchOutput
    from llm.outputs import BeamSearchSequence as BeamSearchSequence
    from llm.outputs import ChoiceOutput as ChoiceOutput
    from llm.outputs import ClassificationOutput as ClassificationOutput
    from llm.outputs import ClassificationRequestOutput as ClassificationRequestOutput
    from llm.outputs import CompletionOutput as CompletionOutput
    from llm.outputs import EmbeddingOutput as EmbeddingOutput
    from llm.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from llm.outputs import LoglikelihoodOutput as LoglikelihoodOutput
    from llm.outputs import Logprob as Logprob
    from llm.outputs import PerplexityOutput as PerplexityOutput
    from llm.outputs import PoolingOutput as PoolingOutput
    from llm.outputs import PoolingRequestOutput as PoolingRequestOutput
    from llm.outputs import PoolingRequestOutputs as PoolingRequestOutputs
    from llm.outputs import RequestOutput as RequestOutput
    from llm.outputs import RequestOutputs as RequestOutputs
    from llm.outputs import ScoringOutput as ScoringOutput
    from llm.outputs import ScoringRequestOutput as ScoringRequestOutput
    from llm.outputs import StructuredOutcome as StructuredOutcome
    from llm.outputs import ToolCall as ToolCall
    from llm.pooling_params import PoolerConfig as PoolerConfig
    from llm.pooling_params import PoolingParams as PoolingParams
    from llm.sampling_params import BeamSearchParams as BeamSearchParams
    from llm.sampling_params import RequestOutputKind as RequestOutputKind
    from llm.sampling_params import SamplingParams as SamplingParams
    from llm.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from llm.tools.serve.server import serve as serve

# Public name -> the module that defines it.
_PUBLIC = {
    "LLM": "llm.llm",
    "Capture": "llm.inside.capture",
    "Intervention": "llm.inside.intervention",
    "ControlVector": "llm.inside.control_vector",
    "SamplingParams": "llm.sampling_params",
    "BeamSearchParams": "llm.sampling_params",
    "BeamSearchOutput": "llm.outputs",
    "BeamSearchSequence": "llm.outputs",
    "RequestOutputKind": "llm.sampling_params",
    "StructuredOutputsParams": "llm.sampling_params",
    "RequestOutput": "llm.outputs",
    "RequestOutputs": "llm.outputs",
    "ChoiceOutput": "llm.outputs",
    "CompletionOutput": "llm.outputs",
    "Logprob": "llm.outputs",
    "LoglikelihoodOutput": "llm.outputs",
    "PerplexityOutput": "llm.outputs",
    "StructuredOutcome": "llm.outputs",
    "ToolCall": "llm.outputs",
    "PromptType": "llm.inputs",
    "TextPrompt": "llm.inputs",
    "TokensPrompt": "llm.inputs",
    "ModelRegistry": "llm.models.registry",
    "register_model": "llm.models.registry",
    "EngineArgs": "llm.config.engine_args",
    "LLMEngine": "llm.llm_engine",
    "AsyncLLM": "llm.async_llm",
    "AsyncLLMEngine": "llm.engine.async_llm_engine",
    "AsyncEngineArgs": "llm.config.engine_args",
    "PoolingParams": "llm.pooling_params",
    "PoolerConfig": "llm.pooling_params",
    "ClassificationOutput": "llm.outputs",
    "ClassificationRequestOutput": "llm.outputs",
    "EmbeddingOutput": "llm.outputs",
    "EmbeddingRequestOutput": "llm.outputs",
    "PoolingOutput": "llm.outputs",
    "PoolingRequestOutput": "llm.outputs",
    "PoolingRequestOutputs": "llm.outputs",
    "ScoringOutput": "llm.outputs",
    "ScoringRequestOutput": "llm.outputs",
    "LLMError": "llm.errors",
    "ValidationError": "llm.errors",
    "PromptTooLongError": "llm.errors",
    "EmptyPromptError": "llm.errors",
    "TokenOutOfRangeError": "llm.errors",
    "RowError": "llm.errors",
    "JobError": "llm.errors",
    "EngineClosedError": "llm.errors",
    "GenerationInterrupted": "llm.errors",
    "JobInterrupted": "llm.errors",
    "CheckpointError": "llm.errors",
    "UnsupportedModelError": "llm.errors",
    "OutOfMemoryError": "llm.errors",
    "MissingPackageError": "llm.errors",
    "PluginError": "llm.errors",
    "LogitsProcessorError": "llm.errors",
    "SamplingError": "llm.errors",
    "WorkerDiedError": "llm.errors",
    "RankError": "llm.errors",
    "EngineBusyError": "llm.errors",
    "ArgumentError": "llm.errors",
    "serve": "llm.tools.serve.server",
}

__all__ = [*_PUBLIC, "__version__"]


def _tell_of_limit(error: BaseException) -> None:
    """Raise ImportError with the limit of the address space, if there is one that PyTorch cannot be loaded in."""
    from llm.base import system

    limit = system.address_limits().get("-v")
    if limit is not None and "torch" not in sys.modules:
        raise ImportError(
            f"PyTorch cannot be loaded ({str(error) or type(error).__name__}): `ulimit -v` allows this process {limit} "
            "bytes of addresses, and PyTorch's libraries alone take more than 600,000,000; raise or lift the limit.",
            name="torch",
        ) from error


conflict.check()
vllm_paths.install()

if not TYPE_CHECKING:  # or mypy would take any name

    def __getattr__(name: str) -> object:
        if name not in _PUBLIC:
            raise vllm_paths.missing_name(__name__, name)
        # A full collection amid the imports takes 60 ms, over PyTorch's objects, and finds nothing.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            value = getattr(importlib.import_module(_PUBLIC[name]), name)
        except (ImportError, MemoryError) as error:
            _tell_of_limit(error)
            raise
        finally:
            if was_enabled:
                gc.enable()
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
