"""A model of the plugin's own: a llama whose output shows that it was this class that computed."""

from __future__ import annotations

import torch

from llm.models.llama import LlamaForCausalLM


class AcmeForCausalLM(LlamaForCausalLM):
    """Always answers with token 7."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros_like(super().compute_logits(hidden))
        logits[:, 7] = 1.0
        return logits
