"""Adapters in PEFT's layout, random, for tests; and transformers' model with the same sums in its weights.

`tests/loading/peft_adapters.py` compares with PEFT itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    model: torch.nn.Module,
    folder: Path,
    targets: Sequence[str] = LINEAR,
    *,
    rank: int = 4,
    alpha: float = 6.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """An adapter of the modules of a transformers model whose path ends with one of `targets`."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        own = config.get("rank_pattern", {}).get(name.rpartition(".")[2], rank)
        is_table = isinstance(module, torch.nn.Embedding)
        # Conv1D of transformers stores [K, N].
        is_turned = is_table or type(module).__name__ == "Conv1D"
        rows, columns = reversed(module.weight.shape) if is_turned else module.weight.shape
        parts = ("lora_embedding_A", "lora_embedding_B") if is_table else ("lora_A.weight", "lora_B.weight")
        for part, shape in zip(parts, ((own, columns), (rows, own)), strict=True):
            values = torch.randn(shape, generator=generator) * (0.3 if is_table else 1.0) / shape[1] ** 0.5
            tensors[f"base_model.model.{name}.{part}"] = values.to(dtype)
        if is_table or name == "lm_head":  # as PEFT does
            tensors[f"base_model.model.{name}.base_layer.weight"] = module.weight.detach().clone()
    whole = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def add_adapter(model: torch.nn.Module, folder: Path, scales: Mapping[str, float] | None = None) -> None:
    """W += scale * B A in float32, in place. `scales`: by the end of a module's path, where it is not alpha / r."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for name, down in tensors.items():
        table, linear = name.endswith("lora_embedding_A"), name.endswith("lora_A.weight")
        if not table and not linear:
            continue
        end = "lora_embedding_A" if table else "lora_A.weight"
        up = tensors[name.removesuffix(end) + end.replace("_A", "_B")]
        path = name.removeprefix("base_model.model.").removesuffix(f".{end}")
        own = [value for end, value in (scales or {}).items() if path.endswith(end)]
        scale = own[0] if own else config["lora_alpha"] / config["r"]
        delta = scale * (up.double() @ down.double())
        weight = modules[path].weight
        is_turned = table or type(modules[path]).__name__ == "Conv1D"
        weight += (delta.t() if is_turned else delta).to(weight.dtype)
