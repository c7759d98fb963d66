"""A logits processor that fails where a request asks for it."""

from __future__ import annotations

import torch

from llm.sampling_params import SamplingParams
from llm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor


class Raises(LogitsProcessor):
    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
        self._fails = False

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Any are fine."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        for _, params, _, _ in batch_update.added if batch_update else ():
            self._fails |= bool(params is not None and (params.extra_args or {}).get("fails"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._fails:
            self._fails = False
            raise RuntimeError("no luck")
        return logits
