"""The interface that a model class implements.

A user's model implements it and is passed to `register_model`; it need not be built from `decoder/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from llm.forward import ForwardBatch, StateSpec
from llm.layers.parallel import SINGLE, TensorParallel
from llm.models.config_reader import ConfigReader
from llm.quantization.base import QuantizationConfig

# (from, to) pairs of leading path segments.
Renames = tuple[tuple[str, str], ...]
# One expert's part of a stacked tensor -> (name, tensor) of each weight that it holds.
Cut = Callable[[torch.Tensor], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class BuildOptions:
    """How a model is built.

    Attributes:
        max_model_len: the largest number of positions; rotary tables have this length.
        params_dtype: storage type of unquantized weights.
        quant_config: picks quant methods per layer; None: unquantized.
        tp: which of the ranks that share the model this one is.
    """

    max_model_len: int
    params_dtype: torch.dtype
    quant_config: QuantizationConfig | None = None
    tp: TensorParallel = SINGLE


class CausalLM(Protocol):
    """A decoder-only language model, an `nn.Module`.

    Class attributes, as data:
        packed_modules_mapping: fused module name -> the checkpoint's names, in order of the layer's shard ids.
        renames: (from, to) pairs of leading path segments, checkpoint -> model; "*" matches one segment; the first
            match is used.
        ignored_weights: trailing path segments of tensors that a checkpoint may have and the model does not use.
        further_renames (optional): the same of one model, after those of its class.
        left_out (optional): leading path segments of tensors of parts that are not built, such as a vision tower.
        stacked_weights (optional): trailing path segments of tensors that hold all experts' weights, along dimension 0
            -> the function that cuts one expert's part into (name after the expert's number, tensor).
        rename_weight, ignores_weight (optional): functions of a checkpoint's name, in place of `renames` and beside
            `ignored_weights`, for names that only the built model knows.
        merge_weights (optional): (tensors of a checkpoint, all of its names) -> tensors, some made of several.
        varies (optional): why answers may depend on the batch, whatever the layers are; None: they need not.
        declines (optional): config.json -> why transformers' code computes this model by default; None: it need not.
        transposed_weights (optional): trailing path segments of parameters that the checkpoint stores transposed.
    """

    packed_modules_mapping: ClassVar[dict[str, list[str]]]
    renames: ClassVar[Renames]
    ignored_weights: ClassVar[tuple[str, ...]]

    @classmethod
    def read_config(cls, reader: ConfigReader) -> Any:
        """Read config.json; must end with `reader.finish()`."""

    @classmethod
    def kv_cache_specs(cls, config: Any, dtype: torch.dtype, tp: TensorParallel = SINGLE) -> Sequence[StateSpec]:
        """The specs of the layers' states on one rank, in the order of `ForwardBatch.states`.

        A layer has one entry per state, none if it has no state.
        """

    def __init__(self, config: Any, options: BuildOptions) -> None: ...

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [N] -> float32 [N, H]."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """-> hidden states float32 [N, H] after the final norm. No `.item()`, no Python branch on tensor values."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [L, H] -> float32 [L, vocab]."""
