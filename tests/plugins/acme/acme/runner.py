"""The model runner: puts a number into each step's context, and counts the steps."""

from __future__ import annotations

import torch

from llm.forward import ForwardBatch
from llm.runner.model_runner import ModelRunner


class AcmeModelRunner(ModelRunner):
    steps = 0

    def place_model(self, model):
        self.placed = sum(1 for _ in model.parameters())  # nothing moves: the Acme One's memory is the CPU's
        return super().place_model(model)

    def extend_context(self, batch: ForwardBatch, plan) -> None:
        batch.extensions["acme"] = sum(plan.num_scheduled_tokens.values())

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.steps += 1
        return super().forward(batch)
