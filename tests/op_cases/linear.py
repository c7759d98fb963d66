"""Linear layers, embeddings and logits, at world size one (test_parallel_layers.py has the shards).

Their weights are stored in each type; activations are float32, as everywhere on a CPU, so that is what goes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from llm.layers.embedding import LogitsLayer, ParallelLMHead, VocabParallelEmbedding
from llm.layers.linear import ColumnParallelLinear, LinearBase, ReplicatedLinear, RowParallelLinear
from op_cases.base import Case, Inputs, normal

K, N, VOCAB = 45, 38, 21


def rows_of(width: int) -> Callable[[int, torch.dtype, torch.Generator], Inputs]:
    def make(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return (normal(rows, width, dtype=torch.float32, generator=generator),)

    return make


def linear_reference(op: Any, x: torch.Tensor) -> Any:
    """torch.nn.functional.linear."""
    bias = None if op.bias is None else op.bias.double()
    return nn.functional.linear(x, op.weight.double(), bias)


def linear(layer: Callable[..., LinearBase], **more: Any) -> Case:
    def build(dtype: torch.dtype) -> nn.Module:
        return layer(K, N, params_dtype=dtype, return_bias=False, **more)

    return Case(build, rows_of(K), linear_reference, 1e-5, torch.float32)


def token_ids(rows: int, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return (torch.randint(0, VOCAB, (rows,), generator=generator),)


def embedding_reference(op: Any, ids: torch.Tensor) -> torch.Tensor:
    """torch.nn.functional.one_hot, multiplied."""
    return nn.functional.one_hot(ids, op.weight.shape[0]).double() @ op.weight.double()


def padded_reference(op: Any, ids: torch.Tensor) -> torch.Tensor:
    """Rows behind the padding of the original ids (15 -> 16) follow one place later."""
    return embedding_reference(op, ids + (ids >= 15))


def embedding(reference: Callable[..., Any], **more: Any) -> Case:
    def build(dtype: torch.dtype) -> nn.Module:
        return VocabParallelEmbedding(VOCAB, K, params_dtype=dtype, **{"padding_size": 1, **more})

    return Case(build, token_ids, reference, returns=torch.float32)


class HeadedLogits(nn.Module):
    """A LogitsLayer and the head it reads, to be called like an op of one input."""

    def __init__(self, dtype: torch.dtype, bias: bool, **arguments: Any) -> None:
        super().__init__()
        self.head = ParallelLMHead(VOCAB, K, bias, params_dtype=dtype, padding_size=1)
        self.processor = LogitsLayer(VOCAB, **arguments)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.processor(self.head, hidden)


class Head(ParallelLMHead):
    """An LM head called as its `LogitsLayer` calls it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, hidden, self.bias)


def logits_reference(op: Any, hidden: torch.Tensor) -> torch.Tensor:
    processor = op.processor
    logits = hidden @ op.head.weight.double().T
    if op.head.bias is not None:
        logits = logits + op.head.bias.double()
    logits = logits[:, : processor.org_vocab_size]
    if processor.soft_cap is not None:
        logits = processor.soft_cap * torch.tanh(logits / processor.soft_cap)
    return logits * processor.scale


def logits(bias: bool = False, **arguments: Any) -> Case:
    return Case(lambda dtype: HeadedLogits(dtype, bias, **arguments), rows_of(K), logits_reference, 1e-5, torch.float32)


LINEAR: dict[str, list[Case]] = {
    "replicated_linear": [linear(ReplicatedLinear), linear(ReplicatedLinear, bias=False)],
    "column_parallel_linear": [linear(ColumnParallelLinear, gather_output=True)],
    "row_parallel_linear": [linear(RowParallelLinear), linear(RowParallelLinear, input_is_parallel=False, bias=False)],
    "vocab_parallel_embedding": [
        embedding(embedding_reference),
        embedding(padded_reference, org_num_embeddings=15, padding_size=4),
    ],
    "parallel_lm_head": [
        Case(lambda dtype: Head(N, K, True, params_dtype=dtype), rows_of(K), linear_reference, 1e-5, torch.float32)
    ],
    "logits_processor": [
        logits(),
        logits(bias=True, scale=0.125, soft_cap=5.0),
        logits(org_vocab_size=VOCAB - 3),
    ],
}
