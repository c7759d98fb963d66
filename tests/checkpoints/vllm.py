"""The checkpoints of vLLM's recorded answers: writing them again, and checking that they are the same.

`tests/fixtures/make_vllm_fixtures.py` recorded the answers; the tests rebuild the same weights from
their seeds and compare fingerprints before they compare anything else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import TinyModel, write_checkpoint

from llm.llm import EMBEDDED_MODEL

FIXTURES = Path(__file__).parents[1] / "fixtures"
# vLLM's attention on a CPU takes a head_dim of 32 and up. The vocabulary is that of the embedded model's tokenizer.
_SIZES: Mapping[str, Any] = {
    "vocab_size": 2304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
VLLM_MODELS: dict[str, TinyModel] = {
    "llama": TinyModel("LlamaConfig", _SIZES, seed=33),
    "qwen3-tied": TinyModel("Qwen3Config", {**_SIZES, "tie_word_embeddings": True, "num_key_value_heads": 1}, seed=38),
}
# Quantized by `quantize_w8a8`. Where sizes are multiples of 16 and 32 and the processor has AMX, vLLM takes a kernel
# that refuses float32 activations; these sizes are not.
W8A8 = "llama-w8a8"
_W8A8_MODEL = TinyModel("LlamaConfig", {**_SIZES, "hidden_size": 72}, seed=23)
FINGERPRINT_TOLERANCE = 1e-5


def write_vllm_checkpoint(name: str, folder: Path) -> Path:
    """Write one of `VLLM_MODELS`, or `W8A8`, with the embedded model's tokenizer. Returns `folder`."""
    write_checkpoint(_W8A8_MODEL if name == W8A8 else VLLM_MODELS[name], folder)
    if name == W8A8:
        quantize_w8a8(folder)
    for path in EMBEDDED_MODEL.glob("tokenizer*.json"):
        shutil.copy(path, folder / path.name)
    return folder


def fingerprint(folder: Path) -> dict[str, list[float]]:
    """Tensor name -> [sum, sum of absolute values, dot with 1..n scaled by n], in float64: equal for equal weights."""
    tensors = load_file(folder / "model.safetensors")
    return {name: _moments(tensor.double().flatten()) for name, tensor in sorted(tensors.items())}


def same_fingerprint(ours: Mapping[str, list[float]], recorded: Mapping[str, list[float]]) -> bool:
    """Whether they agree but for the last bits, in which processors may differ."""
    if set(ours) != set(recorded):
        return False
    pairs = [
        (left, right, max(1.0, recorded[name][1]))
        for name in ours
        for left, right in zip(ours[name], recorded[name], strict=True)
    ]
    return all(abs(left - right) <= FINGERPRINT_TOLERANCE * scale for left, right, scale in pairs)


def quantize_w8a8(folder: Path) -> None:
    """Turn a float32 checkpoint into compressed-tensors int-quantized W8A8: int8 per output channel, dynamic per token.

    Weight scale of a row: its largest magnitude / 127; rounding to nearest, ties to even. Linear layers of the decoder
    only; the embedding and the LM head stay float32.
    """
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if name.endswith("_proj.weight"):
            scale = (tensor.abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-8)
            tensors[name] = (tensor / scale).round().clamp(-127, 127).to(torch.int8)
            tensors[name.removesuffix("weight") + "weight_scale"] = scale
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = _QUANTIZATION_CONFIG
    (folder / "config.json").write_text(json.dumps(config, indent=1))


_INT8: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "group_size": None,
    "actorder": None,
    "block_structure": None,
    "observer_kwargs": {},
}
_QUANTIZATION_CONFIG: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False, "observer": "minmax"},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True, "observer": None},
            "output_activations": None,
        }
    },
}


def _moments(values: torch.Tensor) -> list[float]:
    ramp = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
    return [float(values.sum()), float(values.abs().sum()), float(values @ ramp)]


@lru_cache
def fixture(name: str) -> dict[str, Any]:
    """What vLLM answered with the checkpoint `name`."""
    saved: dict[str, Any] = json.loads((FIXTURES / f"vllm_{name}.json").read_text())
    return saved
