"""Loading as an equation: every tensor used, every parameter filled, shapes agree.

`weight_map.py` maps a tensor to its parameter; the parameter's `weight_loader` copies it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from llm.errors import CheckpointError
from llm.layers.mamba import DecayingLayer
from llm.loading.source import Tensors
from llm.loading.weight_map import Target, WeightMap, per_expert
from llm.progress import Bar
from llm.quantization.base import PackedLinearMethod, QuantizationConfig, QuantizeMethodBase
from llm.quantization.unquantized import widen

_NAMES_SHOWN = 5
_PROGRESS_DELAY_SECONDS = 2.0
_DUMMY_STD = 0.02
# Optional parameters that dummy weights fill. Without the other optional ones a layer takes its plain form.
_DUMMY_OPTIONAL = ("weight_scale", "bias")


def load_weights(
    model: nn.Module,
    checkpoint: Tensors,
    *,
    show_progress: bool,
    quant_config: QuantizationConfig | None = None,
    store_as: torch.dtype | None = None,
    pack_early: bool = False,
    part: str = "",
) -> dict[str, Target]:
    """Fill every parameter of `model` from the checkpoint, streamed file by file.

    Args:
        quant_config: knows other names of tensors, and which of them the model may lack.
        store_as: dtype of matrices that are not quantized; None: as the checkpoint stores them.
        pack_early: pack each layer when it is loaded, not all at the end.
        part: the dotted path of the module whose parameters are filled, and its layers packed, from a checkpoint of
            their tensors; "": all.

    Returns: checkpoint tensor -> its target, in the order of the checkpoint; those of experts of other ranks too.

    Raises:
        CheckpointError: names unused tensors, unfilled parameters, or shapes that disagree.
    """
    start = f"{part}." if part else ""
    parameters = {name: each for name, each in model.named_parameters() if name.startswith(start)}
    weight_map = WeightMap(model, quant_config.parameter_name if quant_config else lambda name: name)
    filled, sizes = dict.fromkeys(parameters, 0), {name: each.numel() for name, each in parameters.items()}
    packing = EarlyPacking(model, {weight_map.target(name).parameter for name in checkpoint.tensors})
    unexpected: list[str] = []
    aliases = _aliases(model, parameters)
    tied: dict[str, list[tuple[str, torch.Tensor]]] = {name: [] for name in aliases.values()}
    targets: dict[str, Target] = {}
    for name, tensor in _per_expert(_merged(model, checkpoint, show_progress), weight_map):
        target = weight_map.target(name)
        if target.parameter in parameters:
            tensor = _arranged(name, tensor, parameters[target.parameter], target, weight_map)
            if store_as is not None and not parameters[target.parameter].is_meta:  # meta: quantized on load
                tensor = _converted(name, tensor, store_as)
            targets[name] = target
            filled[target.parameter] += _copy(name, parameters[target.parameter], tensor, target.shard_id)
            if target.parameter in tied:
                tied[target.parameter].insert(0, (name, tensor))
            if pack_early and filled[target.parameter] == sizes[target.parameter]:
                packing.filled(target.parameter, filled)
        elif target.parameter in aliases:
            tied[aliases[target.parameter]].append((name, tensor))
        elif weight_map.on_another_rank(name):
            targets[name] = target
        elif not (weight_map.ignores(name) or _may_be_unused(name, tensor, quant_config)):
            unexpected.append(name)
    _check_complete(parameters, filled, sizes, unexpected, lambda name: _unfilled(name, weight_map, targets.values()))
    for copies in tied.values():
        _check_tied_copies(copies)
    process_weights(model.get_submodule(part), packing.packed)
    return targets


def _merged(model: nn.Module, checkpoint: Tensors, show_progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = _with_progress(checkpoint, show_progress)
    merge = getattr(model, "merge_weights", None)
    return tensors if merge is None else merge(tensors, checkpoint.tensors)


def _may_be_unused(name: str, tensor: torch.Tensor, config: QuantizationConfig | None) -> bool:
    return config is not None and (config.ignores(name) or (config.ignores_zeros(name) and not tensor.any()))


def load_dummy_weights(model: nn.Module, seed: int, *, pack_early: bool = False) -> None:
    """Random weights for benchmarks: normal with deviation 0.02, ones for norms; a function of name, seed and the kind
    of device, where they are drawn.

    For a quantized checkpoint, integers fit 4 bits, scales are positive and offsets 0. `pack_early` as in
    `load_weights`.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if _is_made(name, parameter)}
    packing, sizes = EarlyPacking(model, parameters), {name: each.numel() for name, each in parameters.items()}
    device = next((each.device for each in parameters.values() if not each.is_meta), torch.device("cpu"))
    for name, parameter in parameters.items():
        leaf = name.rpartition(".")[2]
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = _generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        is_elsewhere = not parameter.is_meta and parameter.device.type != generator.device.type
        filled = torch.empty_like(parameter, device=generator.device) if is_elsewhere else parameter
        _fill_dummy(filled, leaf, generator)
        if is_elsewhere:
            parameter.data.copy_(filled)
        parameter.elements_loaded = sizes[name]  # type: ignore[attr-defined]
        if pack_early:
            packing.filled(name, sizes)
    process_weights(model, packing.packed)


def _generator(device: torch.device) -> torch.Generator:
    """The device's; the host's where the device has none."""
    try:
        return torch.Generator(device)
    except RuntimeError:
        return torch.Generator()


def _is_made(name: str, parameter: nn.Parameter) -> bool:
    return not getattr(parameter, "optional", False) or name.rpartition(".")[2] in _DUMMY_OPTIONAL


def _fill_dummy(parameter: torch.Tensor, leaf: str, generator: torch.Generator) -> None:
    """A weight that is quantized on load is a meta tensor: it is filled through its loader, as from a file."""
    if parameter.is_meta:
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device=generator.device)
        loader: Callable[..., int] = getattr(parameter, "weight_loader", copy_whole)
        loader(parameter, data.normal_(0.0, _DUMMY_STD, generator=generator), None)
    elif parameter.dtype == torch.uint8:
        # Two codes of 4 bits, and exponents counted from 127.
        parameter.data.random_(*((118, 122) if "scale" in leaf else (0, 256)), generator=generator)
    elif not parameter.is_floating_point():
        parameter.data.random_(-8, 8, generator=generator)
    elif parameter.dtype.itemsize == 1:
        values = torch.empty(parameter.shape, device=generator.device).normal_(generator=generator)
        parameter.data.copy_(values.abs() if "scale" in leaf else values)
    elif parameter.dim() == 1 and leaf == "weight":
        parameter.data.fill_(1.0)
    elif "scale" in leaf:
        parameter.data.fill_(_DUMMY_STD)
    elif "offset" in leaf:
        parameter.data.zero_()
    else:
        parameter.data.normal_(0.0, _DUMMY_STD, generator=generator)


def process_weights(model: nn.Module, packed: Collection[nn.Module] = ()) -> None:
    """Call `process_weights_after_loading` of every layer but those `packed`; it packs weights for the kernel."""
    for module in model.modules():
        method: QuantizeMethodBase | None = getattr(module, "quant_method", None)
        if method is not None and module not in packed:
            method.process_weights_after_loading(module)
    weights_changed(model)


def weights_changed(model: nn.Module) -> None:
    """Let the layers compute again what they keep of their parameters' values."""
    for module in model.modules():
        if isinstance(module, DecayingLayer):
            module.weights_changed()


def _with_progress(checkpoint: Tensors, show: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors, with a progress bar in bytes once loading takes two seconds."""
    bar = Bar(
        total=checkpoint.total_bytes,
        unit="B",
        unit_scale=True,
        desc="Loading weights",
        disable=not show,
        delay=_PROGRESS_DELAY_SECONDS,
        leave=False,
    )
    with bar:
        for name, tensor in checkpoint.stream():
            yield name, tensor
            bar.update(tensor.nbytes)


def _per_expert(
    tensors: Iterator[tuple[str, torch.Tensor]], weight_map: WeightMap
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield from per_expert(name, tensor, weight_map)


def stored_as(dtype: torch.dtype, dim: int, asked: torch.dtype | None) -> torch.dtype:
    """The dtype in memory of a tensor that is not quantized: a float matrix takes `asked`."""
    return asked if asked is not None and _is_wide(dtype) and dim >= 2 else dtype


def _is_wide(dtype: torch.dtype) -> bool:
    """A float of at least 16 bits: 8 bits are codes, which mean something only with their scales."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _converted(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float matrix as `dtype`. Vectors stay as stored: they are small, and rounding them costs the most accuracy."""
    return rounded(name, tensor, stored_as(tensor.dtype, tensor.dim(), dtype))


def rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as `dtype`. Raises `CheckpointError` where finite values are beyond its range."""
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.to(dtype)
    if not converted.isfinite().all() and tensor.isfinite().all():
        raise CheckpointError(
            f"tensor {name} has values beyond the range of {_shown(dtype)}; use dtype='bfloat16' or 'auto'."
        )
    return converted


def _arranged(
    name: str, tensor: torch.Tensor, parameter: nn.Parameter, target: Target, weight_map: WeightMap
) -> torch.Tensor:
    """The tensor with its rows in the parameter's order; weights that are quantized on load need it as well."""
    if weight_map.transposed(target.parameter):
        tensor = tensor.t()
    restack, dim = weight_map.restacking(target), getattr(parameter, "output_dim", None)
    if restack is None or dim is None:
        return tensor
    try:
        return restack(tensor, dim)
    except ValueError as error:
        raise CheckpointError(f"tensor {name} {error}.") from error


def _copy(name: str, parameter: nn.Parameter, tensor: torch.Tensor, shard_id: str | int | None) -> int:
    # Weights keep the stored dtype: a wider tensor (often float32 norms) widens its parameter.
    if _is_wide(parameter.dtype) and _is_wide(tensor.dtype):
        wider = torch.promote_types(parameter.dtype, tensor.dtype)
        if wider != parameter.dtype:
            widen(parameter, wider)
    elif parameter.dtype != tensor.dtype:
        if not getattr(parameter, "any_dtype", False) or tensor.is_complex():
            raise CheckpointError(
                f"tensor {name} is stored as {_shown(tensor.dtype)}, the model needs {_shown(parameter.dtype)}."
            )
        if not getattr(parameter, "is_packed", False):
            _check_fits(name, parameter.dtype, tensor)
    loader = getattr(parameter, "weight_loader", copy_whole)
    try:
        return loader(parameter, tensor, shard_id)
    except ValueError as error:
        raise CheckpointError(f"tensor {name} {error}.") from error


def _check_fits(name: str, dtype: torch.dtype, tensor: torch.Tensor) -> None:
    """Refuse values that an integer parameter cannot hold, which a cast would change silently."""
    if dtype.is_floating_point or dtype is torch.bool or not tensor.numel():
        return
    values, limits = tensor.double(), torch.iinfo(dtype)
    if not (values.isfinite().all() and (values == values.round()).all()):
        raise CheckpointError(f"tensor {name} has values that are not whole; the model needs {_shown(dtype)}.")
    if values.min() < limits.min or values.max() > limits.max:
        raise CheckpointError(f"tensor {name} has values beyond the range of {_shown(dtype)}, which the model needs.")


def copy_whole(parameter: nn.Parameter, tensor: torch.Tensor, shard_id: str | int | None = None) -> int:
    """The weight loader of parameters that declare none; raises ValueError if shapes differ."""
    if parameter.shape != tensor.shape:
        raise ValueError(f"has shape {list(tensor.shape)}, the model needs {list(parameter.shape)}")
    parameter.data.copy_(tensor)
    return tensor.numel()


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aliases(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Other name of a shared parameter (such as "lm_head.weight" of a tied model) -> its name in `parameters`."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: names[id(each)] for name, each in every if name not in parameters and id(each) in names}


def _check_tied_copies(copies: list[tuple[str, torch.Tensor]]) -> None:
    """Some tied checkpoints store the embedding again as the LM head: allowed if the two are bit-identical."""
    for name, tensor in copies[1:]:
        if not torch.equal(copies[0][1], tensor):
            raise CheckpointError(
                f"tensor {name} differs from the embedding that config.json ties it to; if the model is not tied, pass "
                "hf_overrides={'tie_word_embeddings': False}."
            )


def _check_complete(
    parameters: Mapping[str, nn.Parameter],
    filled: Mapping[str, int],
    sizes: Mapping[str, int],
    unexpected: list[str],
    unfilled: Callable[[str], list[str]],
) -> None:
    """Set `elements_loaded` of every parameter; raise `CheckpointError` unless each was filled exactly once.

    `unfilled` says what of a parameter is missing.
    """
    for name, parameter in parameters.items():
        parameter.elements_loaded = filled[name]  # type: ignore[attr-defined]
    absent = {name for name, count in filled.items() if not count and getattr(parameters[name], "optional", False)}
    short = [name for name, count in filled.items() if count < sizes[name] and name not in absent]
    missing = [part for name in short for part in unfilled(name)]
    twice = [name for name, count in filled.items() if count > sizes[name]]
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("tensors that the model does not have", unexpected),
            ("parameters that no tensor fills", missing),
            ("parameters filled more than once", twice),
        )
        if names
    ]
    if problems:
        raise CheckpointError(f"the checkpoint does not match the architecture; {'; '.join(problems)}.")


def _unfilled(name: str, weight_map: WeightMap, targets: Collection[Target]) -> list[str]:
    """The shards of a fused parameter that no tensor filled, or the parameter itself."""
    found = {target.shard_id for target in targets if target.parameter == name}
    parts = weight_map.parts(name) if found else {}
    return [part for shard_id, part in parts.items() if shard_id not in found] or [name]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


@dataclass(eq=False)
class _Layer:
    """A layer, its parameters by name, and the names of those that are not filled yet."""

    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    awaited: set[str]


class EarlyPacking:
    """Calls `process_weights_after_loading` of each layer when its last parameter is filled.

    Other layers than those with a packed GEMM may read more than their own parameters, and wait for the end of loading.

    Args:
        expected: names of parameters that will be filled; those that are not optional need not be among them.

    Attributes:
        packed: the layers that were packed.
    """

    def __init__(self, model: nn.Module, expected: Collection[str]) -> None:
        self.packed: set[nn.Module] = set()
        self._layers: dict[str, _Layer] = {}
        for path, module in model.named_modules():
            if isinstance(getattr(module, "quant_method", None), PackedLinearMethod):
                own = {f"{path}.{leaf}": parameter for leaf, parameter in module.named_parameters(recurse=False)}
                awaited = {
                    name for name, each in own.items() if name in expected or not getattr(each, "optional", False)
                }
                self._layers |= dict.fromkeys(own, _Layer(module, own, awaited))

    def filled(self, name: str, elements: Mapping[str, int]) -> None:
        """The parameter `name` is filled; `elements`: how many of each are loaded."""
        layer = self._layers.get(name)
        if layer is None or name not in layer.awaited:
            return
        layer.awaited.remove(name)
        if layer.awaited:
            return
        for own, parameter in layer.parameters.items():
            parameter.elements_loaded = elements.get(own, 0)  # type: ignore[attr-defined]
        layer.module.quant_method.process_weights_after_loading(layer.module)  # type: ignore[operator, union-attr]
        self.packed.add(layer.module)
        left = set(map(id, layer.module.parameters(recurse=False)))
        for parameter in layer.parameters.values():
            if id(parameter) not in left and not parameter.is_meta:
                parameter.data = parameter.data.new_empty(0)  # the loader refers to it until the end
