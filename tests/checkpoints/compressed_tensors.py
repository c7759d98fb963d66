"""Checkpoints written by the compressed-tensors package itself: quantized, compressed and saved by its own code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


@torch.no_grad()
def compress(source: Path, target: Path, groups: Mapping[str, Any], ignore: list[str]) -> Any:
    """Quantize with the package and save; returns its model, which computes with fake-quantized weights and inputs."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    compressor = compressed(model, groups, ignore)
    model.save_pretrained(target)
    compressor.update_config(target)
    compressor.decompress_model(model)
    return model


def compressed(model: Any, groups: Mapping[str, Any], ignore: list[str]) -> Any:
    """The package's compressor, after it has compressed the linear layers of `model` in place."""
    import compressed_tensors.quantization as ct_quantization
    from compressed_tensors.compressors import ModelCompressor

    config = ct_quantization.QuantizationConfig.model_validate({"config_groups": groups, "ignore": ignore})
    ct_quantization.apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            continue
        fill_scales(module, scheme)
        module.quantization_status = ct_quantization.QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    return compressor


def fill_scales(module: Any, scheme: Any) -> None:
    """Min-max scales, by the package's own formula, for whatever strategy the scheme has."""
    import compressed_tensors.quantization as ct_quantization

    args, weight = scheme.weights, module.weight
    size = args.group_size if args.strategy == "group" else weight.shape[1]
    grouped = weight.view(weight.shape[0], -1, size)
    low, high = grouped.amin(-1), grouped.amax(-1)
    if args.strategy == "tensor":
        low, high = low.min().view(1), high.max().view(1)
    scale, zero = ct_quantization.utils.calculate_qparams(low, high, args)
    module.weight_scale.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.copy_(zero)
    if hasattr(module, "input_scale"):
        symmetric = scheme.input_activations.symmetric
        # Shards of a fused layer differ: vLLM and we join their ranges, so the comparison is exact where they agree.
        module.input_scale.fill_(0.04)
        if not symmetric:
            module.input_zero_point.fill_(-11)
