"""What a runner tells of its model: plain data, for `explain`, reports, calibration and saving.

Owns the questions that need the model's modules or weights. Nobody else looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm.engine.boundary import RunnerPlan
from llm.explain import Explanation, explain_runner
from llm.loading.weight_map import Target
from llm.platforms.interface import Platform
from llm.quantize.measure import LayerReport, layer_reports


class ModelInspection:
    """The base of `ModelRunner` that answers questions.

    Attributes:
        plan: what the model was built from.
        targets: where each tensor of the checkpoint went; empty for random weights.
    """

    platform: Platform
    plan: RunnerPlan
    model: Any
    targets: Mapping[str, Target]

    def describe(self) -> Explanation:
        """What the model computes with, and why."""
        return explain_runner(type(self), self.platform, self.model, self.plan.config)

    def layer_reports(self) -> list[LayerReport]:
        """Every layer with a weight, in the model's order."""
        return layer_reports(self.model, self.plan.config.model_config.weight_dtype)

    def save(self, path: str | Path, format: str) -> Path:
        """See `LLM.save_quantized`."""
        from llm.quantize.save import save_quantized

        return save_quantized(self.model, self.targets, self.plan.source.folder, self.plan.hf_config, path, format)
