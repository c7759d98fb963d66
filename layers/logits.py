"""From hidden states to logits."""

from __future__ import annotations

import torch

from llm.base.custom_op import PluggableLayer
from llm.errors import ValidationError
from llm.kernels.select import backend_of_construction
from llm.layers.embedding import VocabParallelEmbedding


@PluggableLayer.register("logits_processor")
class LogitsLayer(PluggableLayer):
    """hidden [L, H] -> float32 logits [L, org_vocab_size], through the LM head's quant method, without padding.

    vLLM calls this class LogitsProcessor, the name that it also uses for `llm.sampling.logits_processors`.

    Args:
        vocab_size: ids of the LM head, added ones included.
        org_vocab_size: number of logits to return; None: all.
        scale: factor on the logits, after the cap.
        logits_as_input: `hidden` already is the logits; only cap and scale are applied.
        soft_cap: logits become soft_cap * tanh(logits / soft_cap); None: no cap.
    """

    vllm_name = "LogitsProcessor"

    def __init__(
        self,
        vocab_size: int,
        org_vocab_size: int | None = None,
        scale: float = 1.0,
        logits_as_input: bool = False,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.org_vocab_size = vocab_size if org_vocab_size is None else org_vocab_size
        if not 0 < self.org_vocab_size <= vocab_size:
            raise ValidationError(
                f"org_vocab_size={org_vocab_size} must be from 1 to vocab_size={vocab_size}.",
                parameter="org_vocab_size",
                value=org_vocab_size,
            )
        self.scale = scale
        self.logits_as_input = logits_as_input
        self.soft_cap = soft_cap
        backend = backend_of_construction()
        self._soft_cap, self._scale = backend.op("soft_cap"), backend.op("scale")

    def forward(
        self, lm_head: VocabParallelEmbedding, hidden: torch.Tensor, embedding_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`embedding_bias`: added to this rank's logits; None: the bias of `lm_head`, if it has one."""
        if self.logits_as_input:
            logits = hidden.to(torch.float32, copy=True)
        else:
            bias = lm_head.bias if embedding_bias is None else embedding_bias
            logits = self._of_ids(lm_head, lm_head.logits(hidden, bias))
        if self.soft_cap is not None:
            logits = self._soft_cap(logits.contiguous(), self.soft_cap)
        if self.scale != 1.0:
            logits = self._scale(logits.contiguous(), self.scale)
        return logits

    def _of_ids(self, lm_head: VocabParallelEmbedding, own: torch.Tensor) -> torch.Tensor:
        """This rank's logits -> the logits of all ranks, one column per id."""
        if not lm_head.is_plain:
            own = lm_head.tp.all_gather(own)[..., lm_head.logit_columns]
        return own[..., : self.org_vocab_size] if self.org_vocab_size < own.shape[-1] else own
