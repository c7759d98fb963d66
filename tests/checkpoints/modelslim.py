"""Writes ModelSlim checkpoints from the formulas of the format, and computes each layer's expected output in float64.

Shares no code with what it tests: packing and arithmetic are implemented again here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@dataclass
class ModelSlimFolder:
    """The options of a ModelSlim checkpoint.

    Attributes:
        types: checkpoint module name -> type.
        version: "1.0.0" is the second generation: packed int4, other file names.
        group_size: of W4A8's second level; 0: per channel.
        int64_deq_scale: the storage form of float16 models.
        extra: further entries of the description.
        drop: names of tensors left out of the weights and, unless `keep_described`, of the description.
    """

    types: Callable[[str], str]
    version: str = "1.0.0"
    group_size: int = 0
    int64_deq_scale: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    drop: Callable[[str], bool] = lambda name: False
    keep_described: bool = False


def write_modelslim(source: Path, target: Path, how: ModelSlimFolder) -> Tensors:
    """Quantize the folder `source` into `target`; returns the tensors written."""
    target.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, target / name)
    config = json.loads((target / "config.json").read_text())
    if how.version != "1.0.0":
        config["quantize"] = "w8a8"
    (target / "config.json").write_text(json.dumps(config))
    written: Tensors = {}
    description: dict[str, Any] = {"model_quant_type": "W8A8", "version": how.version, "group_size": how.group_size}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, last = name.rpartition(".")
        kind = how.types(module) if last == "weight" and tensor.dim() == 2 else "FLOAT"
        parts = {"weight": tensor} if kind == "FLOAT" else quantized_parts(kind, tensor, module, how)
        if last != "weight":
            parts = {last: tensor}
        for part, value in parts.items():
            full = f"{module}.{part}"
            if not how.drop(full):
                written[full] = value.contiguous()
            if not how.drop(full) or how.keep_described:
                description[full] = kind
    add_quant_biases(written, description)
    description |= how.extra
    new = how.version == "1.0.0"
    (target / "quant_model_description.json").write_text(json.dumps(description))
    save_file(written, target / ("quant_model_weights.safetensors" if new else "quant_model_weight_w8a8.safetensors"))
    return written


def quantized_parts(kind: str, weight: torch.Tensor, module: str, how: ModelSlimFolder) -> Tensors:
    weight = weight.double()
    if kind in ("W8A8_DYNAMIC", "W8A16", "W8A8", "W8A8S", "W8A8_MIX"):
        scale = weight.abs().amax(1, keepdim=True) / 127
        parts = {
            "weight": torch.round(weight / scale).clamp(-128, 127).to(torch.int8),
            "weight_scale": scale.float(),
            "weight_offset": torch.zeros_like(scale).float(),
        }
        if kind in ("W8A8", "W8A8S", "W8A8_MIX"):
            # q, k and v, and gate and up, share their input: ModelSlim gives them one scale.
            first = "qkv" if module.split(".")[-1][0] in "qkv" else "mlp"
            parts["input_scale"] = torch.tensor([0.03 if first == "qkv" else 0.017])
            parts["input_offset"] = torch.tensor([-9.0 if first == "qkv" else 5.0])
            deq = (parts["input_scale"] * parts["weight_scale"][:, 0]).float()
            parts["deq_scale"] = deq.view(torch.int32).long() & 0xFFFFFFFF if how.int64_deq_scale else deq
        if kind in ("W8A8", "W8A8S") and how.version == "1.0.0":
            del parts["weight_scale"], parts["weight_offset"]
        return parts
    if kind == "W4A16":
        return weight_only_parts(weight, how)
    if kind != "W4A8_DYNAMIC":
        raise ValueError(kind)
    return two_level_parts(weight, how)


def weight_only_parts(weight: torch.Tensor, how: ModelSlimFolder) -> Tensors:
    """Asymmetric, as msmodelslim writes it: (q - offset) * scale, with int4 in pairs."""
    rows, columns = weight.shape
    grouped = weight.view(rows, -1, how.group_size or columns)
    low, high = grouped.amin(2, keepdim=True).clamp(max=0), grouped.amax(2, keepdim=True).clamp(min=0)
    scale = (high - low) / 15
    offset = torch.round(-8 - low / scale)
    q = (torch.round(grouped / scale) + offset).clamp(-8, 7).view(rows, columns).to(torch.int16)
    parts = {"weight_scale": scale[..., 0].float(), "weight_offset": offset[..., 0].float()}
    if how.version == "1.0.0":
        pairs = (q[0::2], q[1::2]) if how.group_size else (q[:, 0::2], q[:, 1::2])
        packed = (pairs[0] & 15) | ((pairs[1] & 15) << 4)
        q = torch.where(packed > 127, packed - 256, packed)
    return {"weight": q.to(torch.int8), **parts}


def two_level_parts(weight: torch.Tensor, how: ModelSlimFolder) -> Tensors:
    rows, columns = weight.shape
    if how.group_size:
        first = weight.abs().amax(1, keepdim=True) / 119
        grouped = torch.round(weight / first).view(rows, -1, how.group_size)
        second = (grouped.abs().amax(2, keepdim=True) / 7).clamp_min(1e-3)
        q = torch.round(grouped / second).clamp(-8, 7).view(rows, columns).to(torch.int8)
        parts = {"weight_scale": first.float(), "weight_scale_second": second[..., 0].float()}
        parts["weight_offset_second"] = torch.zeros_like(parts["weight_scale_second"])
    else:
        first = weight.abs().amax(1, keepdim=True) / 7
        q = torch.round(weight / first).clamp(-8, 7).to(torch.int8)
        parts = {"weight_scale": first.float()}
    parts["weight_offset"] = torch.zeros_like(parts["weight_scale"])
    if how.version != "1.0.0":
        return {"weight": q, **parts}
    low, high = q[0::2].to(torch.int16) & 15, q[1::2].to(torch.int16) & 15
    packed = low | (high << 4)
    parts["weight"] = torch.where(packed > 127, packed - 256, packed).to(torch.int8)
    real = float_weight({**parts, "weight": q}, "W4A8_DYNAMIC", "")
    slices = 16 if columns % 16 == 0 and rows < columns else 1
    parts["scale_bias"] = 8 * real.view(rows, slices, -1).sum(2).float()
    return parts


def add_quant_biases(written: Tensors, description: dict[str, Any]) -> None:
    """quant_bias = round(bias / deq_scale - input_offset * sum_k w): the layer's bias moves into it."""
    for name, kind in list(description.items()):
        module, _, last = name.rpartition(".")
        if last != "weight" or kind not in ("W8A8", "W8A8S", "W8A8_MIX") or name not in written:
            continue
        deq = deq_scale({part: written.get(f"{module}.{part}") for part in ("deq_scale",)})
        bias = written.get(f"{module}.bias")
        sums = written[name].double().sum(1)
        whole = -written[f"{module}.input_offset"].double() * sums + (0 if bias is None else bias.double() / deq)
        written[f"{module}.quant_bias"] = torch.round(whole).to(torch.int32)
        description[f"{module}.quant_bias"] = kind


def deq_scale(parts: Mapping[str, Any]) -> torch.Tensor:
    stored = parts["deq_scale"]
    return stored.double() if stored.is_floating_point() else stored.to(torch.int32).view(torch.float32).double()


def float_weight(parts: Mapping[str, torch.Tensor], kind: str, version: str) -> torch.Tensor:
    """The weight in float64 that a layer's tensors represent."""
    q = parts["weight"].double()
    if kind == "W4A8_DYNAMIC" and version == "1.0.0":
        byte = parts["weight"].to(torch.int16) & 255
        q = torch.stack((byte & 15, byte >> 4), 1).flatten(0, 1)
        q = torch.where(q > 7, q - 16, q).double()
    if kind == "W4A16":
        byte = parts["weight"].to(torch.int16) & 255
        scale, offset = parts["weight_scale"].double(), parts["weight_offset"].double()
        if version == "1.0.0":
            q = torch.stack((byte & 15, byte >> 4), 1 if scale.shape[1] > 1 else 2)
            q = q.flatten(0, 1) if scale.shape[1] > 1 else q.flatten(1)
            q = torch.where(q > 7, q - 16, q).double()
        size = q.shape[1] // scale.shape[1]
        return (q - offset.repeat_interleave(size, 1)) * scale.repeat_interleave(size, 1)
    real = q * parts["weight_scale"].double()
    if "weight_scale_second" in parts:
        second = parts["weight_scale_second"].double()
        real = real * second.repeat_interleave(q.shape[1] // second.shape[1], 1)
    return real


def expected_output(parts: Mapping[str, torch.Tensor], kind: str, version: str, x: torch.Tensor) -> torch.Tensor:
    """The output of one module for float32 x [M, K], in float64, with activations quantized as the format defines; of
    4-bit weights in groups each group has a scale of its own, not each row."""
    bias = parts["bias"].double() if "bias" in parts else 0.0
    if kind in ("W8A8", "W8A8S"):
        xq = (torch.round(x / parts["input_scale"]) + parts["input_offset"]).clamp(-128, 127).double()
        return (xq @ parts["weight"].double().t() + parts["quant_bias"].double()) * deq_scale(parts)
    weight = float_weight(parts, kind, version)
    if kind in ("FLOAT", "W8A16", "W4A16"):
        return x.double() @ weight.t() + bias
    groups = x.unflatten(1, (parts["weight_scale_second"].shape[1] if "weight_scale_second" in parts else 1, -1))
    scale = groups.abs().amax(2, keepdim=True) / 127
    return (torch.round(groups / scale).double() * scale.double()).flatten(1) @ weight.t() + bias
