"""bitsandbytes checkpoints of NF4 layers, as transformers saves them: the inverse of
`quantization/formats/bitsandbytes.py`, without double quantization.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from llm.base.types import JsonObject
from llm.errors import LLMError
from llm.quantization.packing import nf4
from llm.quantization.quantizer import IntegerWeight
from llm.quantize.formats import StoredLayer

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class BitsAndBytesWriter:
    """Embeddings and the LM head are written as the floats they stand for, with which the answers are the same."""

    file_stem = "model"

    def __init__(self, hf_config: Mapping[str, object], layers: list[StoredLayer]) -> None:
        self._hf_config = hf_config
        self._layers = layers
        packed = [layer for layer in layers if _is_packed(layer)]
        if not packed:
            raise LLMError("no linear layer is quantized, and bitsandbytes stores no others.")
        for layer in packed:
            _check(layer)

    def json_files(self) -> JsonObject:
        left = [layer.name for layer in self._layers if layer.kind == "linear" and not _is_packed(layer)]
        section: JsonObject = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "float32",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head", *left],
        }
        return {"config.json": {**self._hf_config, "quantization_config": section}}

    def tensors(self, layer: StoredLayer) -> dict[str, torch.Tensor]:
        parts = dict(layer.floats)
        if layer.weight is not None:
            parts |= _packed(layer.weight) if _is_packed(layer) else {"weight": layer.weight.dequantize()}
        return {f"{layer.name}.{part}": tensor for part, tensor in parts.items()}


def _is_packed(layer: StoredLayer) -> bool:
    return layer.kind == "linear" and layer.weight is not None


def _check(layer: StoredLayer) -> None:
    weight = layer.weight
    if weight is None or weight.table is None or not torch.equal(weight.table, nf4()):
        raise LLMError(
            f"{layer.name} computes as {layer.scheme} without NF4's table, and only NF4 is written for bitsandbytes; "
            "save as 'compressed-tensors'."
        )
    if weight.group_size not in _BLOCKS:
        known = ", ".join(map(str, _BLOCKS))
        raise LLMError(f"{layer.name} has groups of {weight.group_size}; bitsandbytes has blocks of {known}.")


def _packed(weight: IntegerWeight) -> dict[str, torch.Tensor]:
    """Two codes in a byte, the first in the high nibble; all rows are one run, and blocks end with rows."""
    codes = (weight.q + 8).to(torch.uint8).flatten()
    state = {
        "quant_type": "nf4",
        "blocksize": weight.group_size,
        "dtype": "float32",
        "shape": list(weight.q.shape),
    }
    text = json.dumps(state).encode()
    return {
        "weight": (codes[0::2] << 4 | codes[1::2])[:, None],
        "weight.absmax": weight.scale.flatten(),
        "weight.quant_map": nf4(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(text), dtype=torch.uint8),
    }
