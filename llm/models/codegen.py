"""CodeGen: GPT-J with one tensor of queries, values and keys, in four parts as it was trained on four devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from typing import ClassVar

import torch

from llm.errors import CheckpointError
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.gptj import GPTJForCausalLM
from llm.models.interface import BuildOptions

_FUSED = ".attn.qkv_proj."
_PARTS = 4


class CodeGenForCausalLM(GPTJForCausalLM):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    renames: ClassVar[tuple[tuple[str, str], ...]] = (
        ("transformer.h.*.attn.qkv_proj", "model.layers.*.self_attn.qkv_proj"),
        *GPTJForCausalLM.renames,
    )
    # Causal masks that old checkpoints carry as tensors.
    ignored_weights: ClassVar[tuple[str, ...]] = ("attn.causal_mask", "attn.embed_positions")

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        reader.ignore("n_ctx")  # `n_positions` is the longest sequence
        return super().read_config(reader)

    def __init__(self, config: DecoderConfig, options: BuildOptions) -> None:
        super().__init__(config, options)
        self.merge_weights = partial(_in_order)


def _in_order(
    tensors: Iterator[tuple[str, torch.Tensor]], names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors, the fused ones with all queries, all keys, all values."""
    for name, tensor in tensors:
        yield name, _separated(name, tensor) if _FUSED in name else tensor


def _separated(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not name.endswith(".weight") or tensor.dim() != 2 or tensor.shape[0] % (3 * _PARTS):
        raise CheckpointError(
            f"tensor {name} has shape {list(tensor.shape)}: of CodeGen's fused tensors only weights [3 * hidden_size, "
            f"hidden_size] are read; load a checkpoint that is not quantized, and quantize it with quantization=."
        )
    queries, values, keys = tensor.unflatten(0, (_PARTS, 3, -1)).unbind(1)
    return torch.cat([part.flatten(0, 1) for part in (queries, keys, values)])
