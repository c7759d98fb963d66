"""GPTQ checkpoints of layers with float activations: the inverse of `quantization/formats/gptq.py`.

Zero points are of version 2 where there are any, which stores them as they are; else of version 1, which vLLM's kernels
expect. Scales are float16 where that is exact, else float32.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch

from llm.base.types import JsonObject
from llm.errors import LLMError
from llm.quantization.packing import pack_to_int32
from llm.quantization.quantizer import IntegerWeight
from llm.quantize.formats import StoredLayer, without_form

_SCHEMES = ("W4A16", "W8A16")


class GPTQWriter:
    """Embeddings and the LM head are written as the floats they stand for, with which the answers are the same."""

    file_stem = "model"

    def __init__(self, hf_config: Mapping[str, object], layers: list[StoredLayer]) -> None:
        self._hf_config = hf_config
        self._layers = layers
        self._forms = {layer.name: _form(layer.name, layer) for layer in layers if _is_packed(layer)}
        if not self._forms:
            raise LLMError("no linear layer is quantized, and GPTQ stores no others.")
        weights = [layer.weight for layer in layers if layer.weight is not None and _is_packed(layer)]
        self._is_symmetric = all(weight.zero is None for weight in weights)
        self._scattered = any(weight.columns is not None for weight in weights)

    def json_files(self) -> JsonObject:
        bits, size = Counter(self._forms.values()).most_common(1)[0][0]
        rules: JsonObject = {}
        for layer in self._layers:
            if layer.kind == "linear" and not _is_packed(layer):
                rules[f"-:{_exactly(layer.name)}"] = {}
            elif self._forms.get(layer.name, (bits, size)) != (bits, size):
                own = self._forms[layer.name]
                rules[f"+:{_exactly(layer.name)}"] = {"bits": own[0], "group_size": own[1]}
        section: JsonObject = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": size,
            "desc_act": self._scattered,
            "sym": self._is_symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq" if self._is_symmetric else "gptq_v2",
            "pack_dtype": "int32",
        }
        if rules:
            section["dynamic"] = rules
        return {"config.json": {**self._hf_config, "quantization_config": section}}

    def tensors(self, layer: StoredLayer) -> dict[str, torch.Tensor]:
        parts = dict(layer.floats)
        if layer.weight is not None:
            packed = _is_packed(layer)
            parts |= self._packed(layer, layer.weight) if packed else {"weight": layer.weight.dequantize()}
        return {f"{layer.name}.{part}": tensor for part, tensor in parts.items()}

    def _packed(self, layer: StoredLayer, weight: IntegerWeight) -> dict[str, torch.Tensor]:
        bits = self._forms[layer.name][0]
        columns = torch.arange(weight.q.shape[1])
        # Of each input, its place among the columns of q.
        place = columns if weight.columns is None else weight.columns.long().argsort()
        zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
        stored = zero.to(torch.int8) - int(self._is_symmetric)
        half = weight.scale.half()
        return {
            "qweight": pack_to_int32(weight.q[:, place].t(), bits, dim=0),
            "qzeros": pack_to_int32(stored.t(), bits),
            "scales": (half if torch.equal(half.float(), weight.scale) else weight.scale).t(),
            "g_idx": (place // weight.group_size).int(),
        }


def _is_packed(layer: StoredLayer) -> bool:
    return layer.kind == "linear" and layer.weight is not None


def _form(name: str, layer: StoredLayer) -> tuple[int, int]:
    """(bits, group size) of a layer; LLMError where GPTQ cannot store it."""
    weight = layer.weight
    if weight is None or layer.scheme not in _SCHEMES or weight.table is not None:
        what = layer.scheme if weight is None or weight.table is None else f"{layer.scheme} of a table of values"
        raise LLMError(
            f"{name} computes as {what}, and GPTQ stores integers for {' and '.join(_SCHEMES)} alone; save as "
            "'compressed-tensors'."
        )
    if weight.minimum is not None:
        raise without_form(name, "minima", "GPTQ")
    rows, columns = weight.q.shape
    if rows * weight.bits % 32 or columns * weight.bits % 32:
        raise LLMError(
            f"{name} is [{rows}, {columns}], and {weight.bits}-bit values of it do not fill words of 32 bits."
        )
    return weight.bits, -1 if weight.group_size >= columns else weight.group_size


def _exactly(name: str) -> str:
    return f"{re.escape(name)}$"
