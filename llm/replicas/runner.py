"""The runner over replicas: what the model is asked is asked of them, and what needs it in this process is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

from llm.engine.boundary import CachePart, Captured, LayerReport, Loaded, ModelCost, ProfileRow, RunnerPlan
from llm.engine.step import RunnerOutput, SchedulerOutput
from llm.errors import ValidationError
from llm.explain import Explanation
from llm.inside.names import Site
from llm.loading.source import ModelSource
from llm.quantization.on_load import ActivationStatistics
from llm.replicas.processes import Replicas
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling.logits_processors.pipeline import qualified_name

R = TypeVar("R")


class ReplicaRunner:
    """A `Runner`: queries go to one replica, changes are made in all. What is of one process is refused."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._cost: ModelCost | None = None

    # --- Life cycle. ---

    def load(self, plan: RunnerPlan) -> Loaded:
        raise RuntimeError("llm.replicas.start loads replicas")

    def close(self) -> None:
        self._replicas.close()

    # --- Steps. ---

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        raise RuntimeError("replicas plan their own steps")

    def set_drafting(self, is_on: bool) -> None:
        refuse_replicated("measuring drafts")

    def force_answer(self, answer: Sequence[int]) -> None:
        refuse_replicated("forcing an answer")

    def set_processors(self, classes: Sequence[type[LogitsProcessor]]) -> None:
        self._replicas.call_all("set_processors", *map(importable_name, classes))

    def end_call(self) -> None:
        """Nothing: a replica ends its own calls."""

    def reset(self) -> None:
        self._replicas.reset()

    # --- Rows of its caches, between steps. ---

    def cache_parts(self) -> list[CachePart]:
        refuse_replicated("save_prefix_cache")

    def read_cache(self, part: int, rows: Sequence[int]) -> torch.Tensor:
        refuse_replicated("save_prefix_cache")

    def write_cache(self, part: int, rows: Sequence[int], values: torch.Tensor) -> None:
        refuse_replicated("prefix_cache")

    # --- Queries about the model. ---

    def check_adapter(self, path: str) -> str:
        return str(self._replicas.call("check_adapter", str(path)))

    def describe(self) -> Explanation:
        found = self._replicas.call("describe")
        if not isinstance(found, Explanation):
            raise RuntimeError("a replica has described itself by something else")
        return found

    def layer_reports(self) -> list[LayerReport]:
        found = self._replicas.call("layer_reports")
        return found if isinstance(found, list) else []

    def save(self, path: str | Path, format: str) -> Path:
        return Path(str(self._replicas.call("save", str(Path(path).absolute()), format)))

    def cost(self) -> ModelCost:
        if self._cost is None:
            found = self._replicas.call("cost")
            if not isinstance(found, ModelCost):
                raise RuntimeError("a replica has reported another cost")
            self._cost = found
        return self._cost

    def sites(self) -> dict[str, Site]:
        refuse_replicated("looking inside the model (sites, capture, interventions)")

    def weight_names(self) -> list[str]:
        refuse_replicated("weights")

    def read_weight(self, name: str) -> torch.Tensor:
        refuse_replicated("weights")

    def replace_weights(self, source: ModelSource) -> None:
        refuse_replicated("update_weights")

    def sleep(self, level: int) -> None:
        refuse_replicated("sleep")

    def wake_up(self) -> None:
        refuse_replicated("wake_up")

    def apply_model(self, function: Callable[[torch.nn.Module], R]) -> R:
        refuse_replicated("apply_model")

    def start_profile(self) -> None:
        refuse_replicated("a profile")

    def stop_profile(self) -> list[ProfileRow]:
        refuse_replicated("a profile")

    # --- Inputs and outputs of its layers. ---

    def start_observing(self) -> None:
        refuse_replicated("watching the layers")

    def stop_observing(self) -> dict[str, ActivationStatistics]:
        refuse_replicated("watching the layers")

    def start_counting_experts(self) -> None:
        refuse_replicated("expert_load")

    def stop_counting_experts(self) -> dict[str, list[int]]:
        refuse_replicated("expert_load")

    def start_capturing(self, names: Sequence[str], limit_bytes: int) -> list[str]:
        refuse_replicated("watching the layers")

    def take_captured(self) -> Captured:
        refuse_replicated("watching the layers")

    def stop_capturing(self) -> None:
        refuse_replicated("watching the layers")

    def layer_noise(self, captured: Captured) -> dict[str, tuple[float, float]]:
        refuse_replicated("quantization_report")


def importable_name(kind: type[LogitsProcessor]) -> str:
    """The "module:Class" by which a replica finds a class; raises `ValidationError` for one that it cannot import."""
    module, _, name = qualified_name(kind).partition(":")
    if module == "__main__" or "<locals>" in name:
        raise ValidationError(
            f"a replica cannot import {kind.__qualname__} from {module}: move the class into a module, or use "
            "data_parallel_size=1.",
            parameter="logits_processors",
            value=kind,
        )
    return f"{module}:{name}"


def refuse_replicated(what: str) -> NoReturn:
    raise ValidationError(
        f"{what} needs the model in this process, and replicas have it: open LLM(..., data_parallel_size=1) for it.",
        parameter="data_parallel_size",
    )
