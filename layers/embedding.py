"""The token embedding and the LM head, tied or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llm.quantization.base import EmbeddingMethodBase, QuantizationConfig
from llm.quantization.unquantized import UnquantizedEmbeddingMethod


class VocabParallelEmbedding(nn.Module):
    """A table [vocab_size, hidden_size] read by token id; `quant_method` stores it."""

    quant_kind = "embedding"
    is_lm_head = False

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        params_dtype: torch.dtype,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tied: bool = False,
    ) -> None:
        """`tied`: the table is also the LM head."""
        super().__init__()
        self.is_lm_head = self.is_lm_head or tied
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.prefix = prefix
        self.quant_method = self._resolve_method(quant_config)
        self.quant_method.create_weights(
            self, hidden_size, [vocab_size], hidden_size, vocab_size, params_dtype, weight_loader=self.weight_loader
        )

    def _resolve_method(self, quant_config: QuantizationConfig | None) -> EmbeddingMethodBase:
        method = quant_config.get_quant_method(self, self.prefix) if quant_config else None
        if method is None:
            return UnquantizedEmbeddingMethod()
        if not isinstance(method, EmbeddingMethodBase):
            raise TypeError(f"{self.prefix}: {type(method).__name__} is not an EmbeddingMethodBase")
        return method

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: Any = None) -> int:
        if getattr(param, "shard_slots", False) and loaded.numel() == 1:
            param.data.fill_(loaded.item())
            return param.numel()
        if param.shape != loaded.shape:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {list(param.shape)}")
        param.data.copy_(loaded)
        return loaded.numel()

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.quant_method.embedding(self, token_ids)


class ParallelLMHead(VocabParallelEmbedding):
    """The output projection hidden -> logits; tied models use their `VocabParallelEmbedding` in its place."""

    is_lm_head = True
