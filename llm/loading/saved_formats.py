"""The formats that `save_quantized` writes: names and layouts of a quantized layer's tensors, and config.json's part.

The inverse of `quantization/formats`; GGUF's is in `gguf/save.py`. The written integers and scales are the ones
computed with, so a saved and loaded model gives the same answers; where scales are negative, the same values.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import nn

from llm.base.types import JsonObject
from llm.errors import LLMError, ValidationError, nearest
from llm.kernels.weight import dequantize
from llm.loading.weight_map import Target
from llm.quantization.base import QuantizeMethodBase
from llm.quantization.kv_cache import StaticCacheMethod, has_cache_scales, stored_scale
from llm.quantization.packing import doubled_fp4, nf4, pack_column_pairs, pack_fp4, pack_row_pairs, pack_to_int32
from llm.quantization.quantizer import IntegerWeight

_LM_HEAD = "lm_head"
# Of an `IntegerWeight`, what has a row for each output.
_BY_ROW = ("q", "scale", "zero", "minimum", "levels")
_WEIGHT_ONLY = ("W8A16", "W4A16", "W8A16_FP8")


@dataclass
class StoredLayer:
    """One module of a checkpoint: a shard of a fused layer, a whole layer, or a norm.

    Attributes:
        name: its name in the checkpoint.
        scheme: "" if it is not quantized.
        kind: "linear", "embedding", or "" for any other module.
        weight: the quantized weight; None: not quantized.
        floats: its other tensors by name, including an unquantized weight.
        is_tied: True for an embedding that is also the LM head.
    """

    name: str
    scheme: str
    kind: str
    weight: IntegerWeight | None
    floats: dict[str, torch.Tensor]
    is_tied: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.weight is not None


@dataclass
class HeldModule:
    """What a module of the model holds, in the order of its own rows.

    Attributes:
        path: of the module in the model.
        scheme: "" if it is not quantized.
        weight: its integers; None: it has none, or none that can be saved.
        floats: its parameters by name, in the checkpoint's layout.
    """

    path: str
    scheme: str
    weight: IntegerWeight | None
    floats: dict[str, torch.Tensor]

    def cpu(self) -> HeldModule:
        """The same in the host's memory."""
        weight = None if self.weight is None else copy(self.weight)
        for name, value in () if weight is None else vars(weight).items():
            if isinstance(value, torch.Tensor):
                setattr(weight, name, value.cpu())
        return HeldModule(self.path, self.scheme, weight, {name: value.cpu() for name, value in self.floats.items()})


def held(path: str, module: nn.Module) -> HeldModule:
    """What it holds now, or what this rank has of it."""
    method = getattr(module, "quant_method", None)
    scheme: str = getattr(method, "scheme", "")
    integers: Callable[[nn.Module], IntegerWeight] | None = getattr(method, "integers", None) if scheme else None
    weight = None if integers is None else integers(module)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    return HeldModule(path, scheme, weight, {name: _float_parameter(module, name) for name in names})


def joined(parts: Sequence[HeldModule], module: nn.Module, whole: nn.Module) -> HeldModule:
    """What one process would hold, of the parts of all ranks.

    Args:
        module: of one of the ranks. whole: as one process has it; its tensors may be on the meta device.
    """
    first = parts[0]
    rows_of_all: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = getattr(module, "rows_of_all", None)

    def rows(name: str, each: Sequence[torch.Tensor]) -> torch.Tensor:
        if rows_of_all is not None:
            return rows_of_all(each)
        length = len(whole.get_parameter(name)) if each[0].dim() else 0
        if not length or len(each[0]) == length:  # every rank has all of it
            return each[0]
        return torch.cat(list(each[:: len(each) * len(each[0]) // length]))  # of heads, which ranks may share

    weight = None if first.weight is None else copy(first.weight)
    for name in _BY_ROW:
        if getattr(weight, name, None) is not None:
            setattr(weight, name, rows(name, [getattr(part.weight, name) for part in parts]))
    floats = {name: rows(name, [part.floats[name] for part in parts]) for name in first.floats}
    return HeldModule(first.path, first.scheme, weight, floats)


def stored_layers(
    model: nn.Module, targets: Mapping[str, Target], hold: Callable[[str], HeldModule] | None = None
) -> list[StoredLayer]:
    """The modules of the checkpoint that `model` was loaded from, with what they hold now, in their order.

    Args:
        targets: where each tensor of the checkpoint went.
        hold: what the module at a path holds; None: `held` of it.
    """
    if not targets:
        raise LLMError("the model has random weights (load_format='dummy'); there is no checkpoint to save it as.")
    modules = dict(model.named_modules())
    hold = hold or (lambda path: held(path, modules[path]))
    transposed = tuple(getattr(model, "transposed_weights", ()))
    found: dict[str, StoredLayer] = {}
    for name, target in targets.items():
        module_name, _, last = name.rpartition(".")
        path, _, parameter = target.parameter.rpartition(".")
        module = modules[path]
        if transposed and any(target.parameter.endswith(f".{ending}") for ending in transposed):
            raise LLMError(
                f"{name} is stored transposed in this model family, and neither format has a form for that; it "
                "cannot be saved quantized."
            )
        method = getattr(module, "quant_method", None)
        now = hold(path)
        if isinstance(method, StaticCacheMethod):
            found.setdefault(module_name, StoredLayer(module_name, method.scheme, "", None, {}))
            found[module_name].floats[last] = stored_scale(name, now.floats[parameter])
            continue
        if module_name not in found:
            has_bias = f"{module_name}.bias" in targets
            found[module_name] = _stored_layer(module_name, module, now, target.shard_id, has_bias)
        layer = found[module_name]
        if parameter in now.floats and not (layer.is_quantized and last != "bias"):
            layer.floats[last] = rows_of(module, now.floats[parameter], target.shard_id)
    return list(found.values())


def _float_parameter(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter in the checkpoint's layout: a packed weight is unpacked."""
    packed = getattr(module, "packed_weight", None)
    return packed.unpack() if name == "weight" and packed is not None else getattr(module, name).data


def _stored_layer(
    name: str, module: nn.Module, now: HeldModule, shard_id: str | int | None, has_bias: bool
) -> StoredLayer:
    kind = getattr(module, "quant_kind", "")
    if not now.scheme:
        return StoredLayer(name, "", kind, None, {})
    if now.weight is None:
        raise LLMError(f"{name} computes as {now.scheme}, which cannot be saved.")
    whole = now.weight
    scheme = now.scheme if whole.levels is None else "W8A8_DYNAMIC"
    whole = whole.as_eight_bits()
    weight = replace(whole, q=rows_of(module, whole.q, shard_id), scale=rows_of(module, whole.scale, shard_id))
    if whole.zero is not None:
        weight.zero = rows_of(module, whole.zero, shard_id)
    if whole.minimum is not None:
        weight.minimum = rows_of(module, whole.minimum, shard_id)
    is_tied = kind == "embedding" and getattr(module, "is_lm_head", False) and name != _LM_HEAD
    layer = StoredLayer(name, scheme, kind, weight, {}, is_tied)
    if "bias" in now.floats:
        bias = rows_of(module, now.floats["bias"], shard_id)
        # A layer without a bias has a zero bias if its format stores a bias among the integers.
        if has_bias or bias.any():
            layer.floats["bias"] = bias
    return layer


def with_positive_scales(layer: StoredLayer) -> StoredLayer:
    """The same values: a group whose scale is negative, which only GGUF's programs expect, is counted backwards.

    (q - zero) * scale = (q' - zero') * -scale with q' = -1 - q and zero' = -1 - zero, which have as many bits. Q4_0 has
    such scales, for the largest value of a group becomes -8.
    """
    weight = layer.weight
    if weight is None or weight.minimum is not None or not bool((weight.scale < 0).any()):
        return layer
    backwards = weight.scale < 0
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    each = backwards.repeat_interleave(weight.group_size, dim=1)
    q, zero = torch.where(each, -1 - weight.q, weight.q), torch.where(backwards, -1 - zero, zero)
    return replace(layer, weight=replace(weight, q=q, scale=weight.scale.abs(), zero=zero))


def _has_minima(name: str, format: str) -> LLMError:
    """For a weight that a format has no form for."""
    return LLMError(f"{name} has minima, which {format} has no form for; save it as 'gguf'.")


def read_weight(model: nn.Module, targets: Mapping[str, Target], name: str) -> torch.Tensor:
    """A tensor of the checkpoint as the model has it now, a copy on the CPU; a matrix as float32 values.

    Raises:
        ValidationError: there is none of this name, or its value is not kept.
    """
    target = targets.get(name)
    if target is None:
        raise ValidationError(f"the checkpoint has no tensor {name!r}.{nearest(name, targets)}", parameter="weights")
    path, _, last = target.parameter.rpartition(".")
    module = model.get_submodule(path)
    method: QuantizeMethodBase | None = getattr(module, "quant_method", None)
    own = dict(module.named_parameters(recurse=False))
    if last == "weight" and method is not None:
        whole = method.dequantize_weight(module)
    elif last in own:
        whole = own[last].data
    else:
        raise ValidationError(
            f"{name} was packed with others when it was loaded; read {name.rpartition('.')[0]}.weight, the values that "
            "they stand for.",
            parameter="weights",
            value=name,
        )
    found = rows_of(module, whole, target.shard_id)
    transposed = any(target.parameter.endswith(f".{ending}") for ending in getattr(model, "transposed_weights", ()))
    return (found.t() if transposed else found).detach().to("cpu", copy=True)


def rows_of(module: nn.Module, tensor: torch.Tensor, shard_id: str | int | None) -> torch.Tensor:
    """The output channels of one shard of a fused layer's tensor, in the checkpoint's order; None: all."""
    if shard_id is None:
        as_stored_together = getattr(module, "as_stored_together", None)
        return tensor if as_stored_together is None else as_stored_together(tensor)
    shard_ids: tuple[str | int, ...] = getattr(module, "shard_ids", ())
    sizes: list[int] = getattr(module, "output_sizes", [])
    index = shard_ids.index(shard_id)
    start = sum(sizes[:index])
    rows = tensor[start : start + sizes[index]]
    as_stored = getattr(module, "as_stored", None)
    return rows if as_stored is None else as_stored(rows, shard_id)


class Writer(ABC):
    """Writes a format; constructed with all layers. Raises `LLMError` for what the format has no form for."""

    file_stem = "model"

    def __init__(self, hf_config: Mapping[str, object], layers: list[StoredLayer]) -> None:
        self._hf_config = hf_config
        self._layers = layers

    @abstractmethod
    def json_files(self) -> JsonObject:
        """File name -> content."""

    def tensors(self, layer: StoredLayer) -> dict[str, torch.Tensor]:
        """Tensor name in the checkpoint -> value."""
        parts = dict(layer.floats)
        if layer.weight is not None:
            parts |= self._quantized(layer, layer.weight)
        return {f"{layer.name}.{part}": tensor for part, tensor in parts.items()}

    def _quantized(self, layer: StoredLayer, weight: IntegerWeight) -> dict[str, torch.Tensor]:
        """The tensors of a weight, by the last parts of their names."""
        raise NotImplementedError


class CompressedTensorsWriter(Writer):
    """int-quantized for layers with quantized activations; pack-quantized, float-quantized and mxfp4-pack-quantized for
    weight-only layers.

    transformers and vLLM cannot tie quantized modules. So a tied table is written twice, and config.json says that it
    is not tied: as an integer LM head, and as a float32 embedding of the dequantized values (transformers 5 cannot load
    a quantized one). For a smaller file do not quantize the table (`lm_head=None`), or save as "modelslim".
    """

    def json_files(self) -> JsonObject:
        config = dict(self._hf_config)
        if any(layer.is_tied for layer in self._layers):
            config["tie_word_embeddings"] = False
        groups: dict[str, JsonObject] = {}
        for layer in self._layers:
            for name, group in self._groups(layer):
                same = next((known for known in groups.values() if {**known, "targets": []} == group), None)
                if same is None:
                    same = groups[f"group_{len(groups)}"] = {**group}
                same["targets"] = [*same["targets"], name]
        formats = {group["format"] for group in groups.values()}
        rotations = self._rotations()
        section: JsonObject = {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [layer.name for layer in self._layers if layer.kind == "linear" and not layer.is_quantized],
            "kv_cache_scheme": self._cache_scheme(),
            "global_compression_ratio": None,
        }
        if rotations:
            section["transform_config"] = {"config_groups": rotations}
        return {"config.json": config | {"quantization_config": section}}

    def _rotations(self) -> JsonObject:
        """compressed-tensors' description of the layers that multiply rotated inputs by rotated weights."""
        targets: dict[int, list[str]] = {}
        for layer in self._layers:
            for name, _ in self._groups(layer):
                if layer.weight is not None and layer.weight.rotation:
                    targets.setdefault(layer.weight.rotation, []).append(name)
        return {
            f"rotation_{block}": {
                "type": "hadamard",
                "head_dim": block,
                "apply": [
                    {"targets": names, "location": "weight_input", "inverse": True},
                    {"targets": names, "location": "input"},
                ],
            }
            for block, names in targets.items()
        }

    def _cache_scheme(self) -> JsonObject | None:
        scaled = [layer for layer in self._layers if has_cache_scales(layer.floats)]
        if not scaled:
            return None
        by_head = any(item.numel() > 1 for layer in scaled for item in layer.floats.values())
        kind = {"type": "float" if "float8" in scaled[0].scheme else "int", "num_bits": 8, "symmetric": True}
        return {**kind, "dynamic": False, "strategy": "attn_head" if by_head else "tensor"}

    def tensors(self, layer: StoredLayer) -> dict[str, torch.Tensor]:
        if layer.weight is None:
            return super().tensors(layer)
        found = {f"{layer.name}.weight": layer.weight.dequantize()} if _is_table(layer) else {}
        for name, group in self._groups(layer):
            parts = {**layer.floats, **_compressed(layer.weight, group)}
            found |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        return found

    def _groups(self, layer: StoredLayer) -> list[tuple[str, JsonObject]]:
        """(module name, its group without targets); [] if the layer is written as floats."""
        if layer.weight is None or (_is_table(layer) and not layer.is_tied):
            return []
        return [(_LM_HEAD if layer.is_tied else layer.name, _group(layer.name, layer.scheme, layer.weight))]


def _is_table(layer: StoredLayer) -> bool:
    return layer.kind == "embedding" and layer.name != _LM_HEAD


def _group(name: str, scheme: str, weight: IntegerWeight) -> JsonObject:
    if weight.minimum is not None:
        raise _has_minima(name, "compressed-tensors")
    grouped = weight.scale.shape[1] > 1
    stored, kind = _format(name, weight, scheme in _WEIGHT_ONLY)
    weights: JsonObject = {
        "num_bits": weight.bits,
        "type": kind,
        "symmetric": weight.zero is None,
        "strategy": "group" if grouped else "channel",
        "group_size": weight.group_size if grouped else None,
        "dynamic": False,
    }
    if weight.columns is not None:
        weights["actorder"] = "group"
    if grouped and stored == "float-quantized":  # the last block of a row may be shorter
        weights |= {"strategy": "block", "group_size": None, "block_structure": [1, weight.group_size]}
    inputs: JsonObject | None = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    if scheme == "W8A8":
        inputs = {
            "num_bits": 8,
            "type": "int",
            "symmetric": not weight.input_offset,
            "strategy": "tensor",
            "dynamic": False,
        }
    elif scheme in _WEIGHT_ONLY:
        inputs = None
    return {
        "targets": [],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": stored,
    }


def _format(name: str, weight: IntegerWeight, weight_only: bool) -> tuple[str, str]:
    """(format, type of the values); LLMError where no format has the weight's values exactly."""
    if weight.q.is_floating_point():
        return "float-quantized", "float"
    if weight.table is None:
        return "pack-quantized" if weight_only else "int-quantized", "int"
    fraction, _ = torch.frexp(weight.scale)
    if weight.group_size != 32 or not torch.equal(weight.table, doubled_fp4()) or not (fraction == 0.5).all():
        raise LLMError(
            f"{name} holds values of a table, which compressed-tensors has a form for if they are 4-bit floats in "
            "groups of 32 with powers of two as scales; NF4 is saved as 'bitsandbytes'."
        )
    return "mxfp4-pack-quantized", "float"


def _compressed(weight: IntegerWeight, group: JsonObject) -> dict[str, torch.Tensor]:
    if group["format"] == "mxfp4-pack-quantized":
        exponents = torch.frexp(2 * weight.scale)[1] + 126  # the scale that is halved for a doubled table
        return {"weight_packed": pack_fp4(weight.q + 8), "weight_scale": exponents.to(torch.uint8)}
    parts: dict[str, torch.Tensor] = {"weight_scale": weight.scale}
    q = weight.q
    if weight.columns is not None:
        place = weight.columns.long().argsort()  # of each input among the columns of q
        q, parts["weight_g_idx"] = q[:, place], (place // weight.group_size).to(torch.int32)
    if group["format"] == "pack-quantized":
        parts["weight_packed"] = pack_to_int32(q, weight.bits)
        parts["weight_shape"] = torch.tensor(weight.q.shape)
        if weight.zero is not None:
            parts["weight_zero_point"] = pack_to_int32(weight.zero.to(torch.int8), weight.bits, dim=0)
        return parts
    parts["weight"] = q
    if weight.zero is not None:
        parts["weight_zero_point"] = weight.zero.to(torch.int8)
    if weight.input_scale is not None:
        parts["input_scale"] = torch.tensor([weight.input_scale])
        if weight.input_offset:
            parts["input_zero_point"] = torch.tensor([weight.input_offset], dtype=torch.int8)
    return parts


class ModelSlimWriter(Writer):
    """ModelSlim 1.0.0: int4 in row pairs, of W4A16 with one scale per row in column pairs; W8A8 with quant_bias."""

    file_stem = "quant_model_weights"

    def __init__(self, hf_config: Mapping[str, object], layers: list[StoredLayer]) -> None:
        super().__init__(hf_config, layers)
        self._group_size = self._common_group_size()

    def json_files(self) -> JsonObject:
        types: JsonObject = {
            "model_quant_type": next(layer.scheme for layer in self._layers if layer.is_quantized),
            "version": "1.0.0",
            "group_size": self._group_size,
        }
        for layer in self._layers:
            for name in self.tensors(layer):
                is_float = layer.weight is None or name.endswith(".bias")
                # W8A8_MIX computes as dynamic here and keeps no static scales.
                scheme = "W8A8_DYNAMIC" if layer.scheme == "W8A8_MIX" else layer.scheme
                types[name] = "FLOAT" if is_float else scheme
        return {"config.json": dict(self._hf_config), "quant_model_description.json": types}

    def _common_group_size(self) -> int:
        sizes = set()
        for layer in self._layers:
            if layer.scheme == "W8A16_FP8":
                raise LLMError(
                    f"{layer.name} is {layer.scheme}, for which ModelSlim has no published layout; save as "
                    "'compressed-tensors'."
                )
            if layer.weight is not None and layer.scheme in ("W4A8_DYNAMIC", "W4A16"):
                sizes.add(layer.weight.group_size if layer.weight.scale.shape[1] > 1 else 0)
        if len(sizes) > 1:
            raise LLMError(
                f"int4 layers have groups of {sorted(sizes)} (0: one per row), and ModelSlim knows one size for all; "
                "quantize with one group_size, or save as 'compressed-tensors'."
            )
        return sizes.pop() if sizes else 0

    def _quantized(self, layer: StoredLayer, weight: IntegerWeight) -> dict[str, torch.Tensor]:
        others = {"minima": weight.minimum, "an order of columns": weight.columns, "a table": weight.table}
        for what, part in others.items():
            if part is not None:
                raise LLMError(
                    f"{layer.name} has {what}, which ModelSlim has no form for; leave `format` out, or use 'gguf'."
                )
        grouped = layer.scheme != "W4A8_DYNAMIC" and weight.scale.shape[1] > 1
        if layer.scheme != "W4A16" and (grouped or weight.zero is not None):
            raise LLMError(
                f"{layer.name}: ModelSlim has no form for {layer.scheme} with groups or zero points; "
                "quantization={'scheme': ..., 'symmetric': True} leaves zero points out."
            )
        if layer.scheme == "W4A8_DYNAMIC":
            return _two_levels(layer.name, weight)
        if layer.scheme == "W4A16":
            return _weight_only_int4(layer.name, weight)
        if layer.scheme == "W8A8":
            return _static(weight, layer.floats.get("bias"))
        return {"weight": weight.q, "weight_scale": weight.scale, "weight_offset": torch.zeros_like(weight.scale)}


def _static(weight: IntegerWeight, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    scale = torch.tensor(weight.input_scale, dtype=torch.float32)
    deq = scale * weight.scale[:, 0]
    sums = weight.q.sum(dim=1, dtype=torch.int64)
    whole = -weight.input_offset * sums.double()
    if bias is not None:
        whole += bias.double() / deq.double()
    return {
        "weight": weight.q,
        "input_scale": scale.view(1),
        "input_offset": torch.tensor([float(weight.input_offset)]),
        "quant_bias": torch.round(whole).to(torch.int32),
        "deq_scale": deq,
    }


def _weight_only_int4(name: str, weight: IntegerWeight) -> dict[str, torch.Tensor]:
    grouped = weight.scale.shape[1] > 1
    if weight.q.shape[0 if grouped else 1] % 2:
        raise LLMError(f"{name} is {list(weight.q.shape)}; ModelSlim packs int4 in pairs.")
    offset = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero.float()
    packed = pack_row_pairs(weight.q) if grouped else pack_column_pairs(weight.q)
    return {"weight": packed, "weight_scale": weight.scale, "weight_offset": offset}


def _two_levels(name: str, weight: IntegerWeight) -> dict[str, torch.Tensor]:
    """Two levels of scales. The first is a power of two, so their product is exactly the scale computed with."""
    if weight.q.shape[0] % 2:
        raise LLMError(f"{name} has {weight.q.shape[0]} rows; ModelSlim packs int4 in pairs of rows.")
    total = 8 * dequantize(weight.q, weight.scale, None, weight.group_size).double().sum(dim=1, keepdim=True)
    parts = {"weight": pack_row_pairs(weight.q), "scale_bias": total.float()}
    if weight.scale.shape[1] == 1:
        return {**parts, "weight_scale": weight.scale, "weight_offset": torch.zeros_like(weight.scale)}
    first = torch.exp2(torch.floor(torch.log2(weight.scale.amax(dim=1, keepdim=True))))
    return {
        **parts,
        "weight_scale": first,
        "weight_offset": torch.zeros_like(first),
        "weight_scale_second": weight.scale / first,
        "weight_offset_second": torch.zeros_like(weight.scale),
    }


_SCHEMES = ("W4A16", "W8A16")


class GPTQWriter(Writer):
    """GPTQ, for layers with float activations.

    Zero points are of version 2 where there are any, which stores them as they are; else of version 1, which vLLM's
    kernels expect. Scales are float16 where that is exact, else float32. Embeddings and the LM head are written as the
    floats they stand for, with which the answers are the same.
    """

    def __init__(self, hf_config: Mapping[str, object], layers: list[StoredLayer]) -> None:
        super().__init__(hf_config, layers)
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

    def _quantized(self, layer: StoredLayer, weight: IntegerWeight) -> dict[str, torch.Tensor]:
        if not _is_packed(layer):
            return {"weight": weight.dequantize()}
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
        raise _has_minima(name, "GPTQ")
    rows, columns = weight.q.shape
    if rows * weight.bits % 32 or columns * weight.bits % 32:
        raise LLMError(
            f"{name} is [{rows}, {columns}], and {weight.bits}-bit values of it do not fill words of 32 bits."
        )
    return weight.bits, -1 if weight.group_size >= columns else weight.group_size


def _exactly(name: str) -> str:
    return f"{re.escape(name)}$"


_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class BitsAndBytesWriter(Writer):
    """bitsandbytes' NF4 layers, as transformers saves them, without double quantization.

    Embeddings and the LM head are written as the floats they stand for, with which the answers are the same.
    """

    def __init__(self, hf_config: Mapping[str, object], layers: list[StoredLayer]) -> None:
        super().__init__(hf_config, layers)
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

    def _quantized(self, layer: StoredLayer, weight: IntegerWeight) -> dict[str, torch.Tensor]:
        return _packed(weight) if _is_packed(layer) else {"weight": weight.dequantize()}


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
