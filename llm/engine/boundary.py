"""What engine and runner exchange at start-up: plain data that can be pickled, so a runner can be another process.

Owns `RunnerPlan`, from which a runner builds its model, and `Loaded`, its answer. The data of a step are
`SchedulerOutput` and `RunnerOutput`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from llm.base.types import JsonObject
from llm.config.engine import EngineConfig
from llm.engine.pooler import PoolingPlan
from llm.forward import StateSpec
from llm.layers.parallel import TensorParallel
from llm.loading.source import ModelSource
from llm.models.interface import BuildOptions
from llm.sampling.logits_processors.interface import LogitsProcessor


@dataclass(frozen=True)
class RunnerPlan:
    """Everything a runner needs to build and load its model; made by `llm.startup.plan`.

    Attributes:
        platform: name of the platform to compute on, as `select_platform` takes it.
        model_class: see `llm.models.interface.CausalLM`.
        architecture: what `model_class.read_config` returned.
        hf_config: config.json without its quantization config.
        kv_cache_specs: this rank's part of each state of the model's layers.
        has_weights: False: do not load weights from `source`, make random ones.
        store_as: the type that float matrices are converted to; None: the checkpoint's.
        is_quantized: the checkpoint is quantized.
        logits_processors: custom ones, in order.
        rank, tp_size: this runner's place in a tensor-parallel group.
        device_index: which of the platform's devices it uses.
        pooling: what a pooling model makes of hidden states; None: the model generates.
        merge_lora: the folder of the adapter that is added to the weights; None: there is none.
        draft: the plan of the model that drafts tokens; None: there is none.
        head: that of a head with a checkpoint of its own; None: there is none.
    """

    config: EngineConfig
    platform: str
    source: ModelSource
    model_class: Any
    architecture: Any
    hf_config: JsonObject
    kv_cache_specs: tuple[StateSpec, ...]
    has_weights: bool = True
    store_as: torch.dtype | None = None
    is_quantized: bool = False
    show_progress: bool = False
    logits_processors: tuple[type[LogitsProcessor], ...] = ()
    rank: int = 0
    tp_size: int = 1
    device_index: int = 0
    draft: RunnerPlan | None = None
    head: DraftHeadPlan | None = None
    pooling: PoolingPlan | None = None
    merge_lora: Path | None = None

    def build_options(self, tp: TensorParallel) -> BuildOptions:
        model = self.config.model_config
        return BuildOptions(model.max_model_len, model.weight_dtype, self.config.quant_config, tp)


@dataclass(frozen=True)
class DraftHeadPlan:
    """A head that drafts from the model's hidden states; its own state is the last of the model's `kv_cache_specs`.

    Attributes:
        plan: from which it is built and loaded.
        taps: the layers of the model whose input it reads.
    """

    plan: RunnerPlan
    taps: tuple[int, ...]


@dataclass(frozen=True)
class Loaded:
    """A runner's report after loading its model.

    Attributes:
        varies: why answers may depend on the batch although the kernels are batch-invariant; None: they do not.
        held: what is told of how weights are held; "": nothing.
        seconds: time per phase, in order.
        offloaded: where the weights are, if a file has some of them; "": all are in memory.
    """

    varies: str | None = None
    held: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    offloaded: str = ""

    def applied_to(self, config: EngineConfig) -> EngineConfig:
        """The config, completed with what is known only after the model is built."""
        reasons = dict(config.reasons)
        if self.held:
            reasons["quantization"] = f"{reasons['quantization']}; {self.held}"
        if self.offloaded:
            reasons["resident_weight_bytes"] = self.offloaded
        if self.varies is None:
            return replace(config, reasons=reasons)
        reasons["invariant"], speculation = self.varies, config.speculative_config
        if speculation is not None and speculation.is_default:
            reasons["speculative_config"], speculation = "default; answers depend on the batch", None
        return replace(config, invariant=False, reasons=reasons, speculative_config=speculation)
