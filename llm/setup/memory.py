"""What weights, caches, states and adapters take, and the lengths and batch sizes that follow.

Arithmetic on numbers and shapes, before anything is read or built. Each decision comes with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llm.base.checks import refuse
from llm.base.construction import constructing_for
from llm.config.engine import (
    CACHE_DTYPES,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_SEQS,
    GIB,
    LLMArgs,
    LoRAConfig,
    SchedulerConfig,
)
from llm.engine.boundary import ModelCost, RunnerPlan
from llm.errors import OutOfMemoryError, ValidationError
from llm.layers.parallel import SINGLE, TensorParallel
from llm.loading.adapters.folder import AdapterFolder
from llm.loading.checkpoint import TensorInfo
from llm.loading.loader import stored_as
from llm.loading.resolve import resolve_folder
from llm.models.decoder import DecoderConfig, LatentAttentionConfig
from llm.platforms import Platform
from llm.quantization.base import QuantizationConfig
from llm.quantization.on_load import RECIPES, OnlineConfig
from llm.quantization.schemes import IntegerMethod
from llm.quantization.storage import StreamedStorage
from llm.runner.inspection import count_model
from llm.setup.model_folder import ReadModel

# Bytes that a process plans with where the one that started it has looked at the memory.
ANY_MEMORY = 1 << 60
_BYTES_PER_ID = 4
# Beside offloaded weights: what loading and computing need at once, besides copies of the largest tensor.
_LEAST_HEADROOM = 128 << 20
# The part of a KV cache that is too small for all sequences that snapshots of recurrent states get: 1 / this.
_SNAPSHOT_SHARE = 8
# Tokens between two snapshots.
_LEAST_INTERVAL, _LARGEST_INTERVAL = 128, 1024


@dataclass(frozen=True)
class MemoryPlan:
    """The KV cache that fits. Numbers of blocks, slots and snapshots as in `CacheConfig`; `reasons` by field name."""

    max_model_len: int
    num_blocks: int
    num_state_slots: int
    kv_cache_memory_bytes: int
    reasons: dict[str, str]
    num_state_snapshots: int = 0
    mamba_block_size: int = 0


def plan_memory(
    *,
    bytes_per_token: int,
    bytes_per_request: int = 0,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int | None,
    longest: int,
    longest_reason: str = "the model's maximum",
    requested_bytes: int | None,
    free_bytes: int,
    snapshot_interval: int = 0,
) -> MemoryPlan:
    """Choose the size of the KV cache and, when `max_model_len` is None, the longest sequence that fits it.

    Args:
        bytes_per_token, bytes_per_request: KV cache of one token, recurrent states of one request, in all layers.
        longest, longest_reason: the most positions, and what limits them.
        requested_bytes: `kv_cache_memory_bytes`, or None.
        free_bytes: memory that is free once the weights are loaded.
        snapshot_interval: tokens between two snapshots of recurrent states; 0: there are none.

    Raises:
        ValidationError: `max_model_len` exceeds `longest`.
        OutOfMemoryError: not even one sequence fits; the message says what would.
    """
    if max_model_len is not None and max_model_len > longest:
        refuse("max_model_len", max_model_len, f"at most {longest}, {longest_reason}")
    block_bytes = bytes_per_token * block_size
    per_sequence = -(-(max_model_len or longest) // block_size) if block_bytes else 0
    useful = max_num_seqs * (per_sequence * block_bytes + bytes_per_request)
    budget, reason = _kv_budget(requested_bytes, useful, free_bytes)
    least = min(1, per_sequence) if max_model_len is None else per_sequence
    needed = least * block_bytes + bytes_per_request
    share = min(budget, useful) - _for_snapshots(budget, useful, needed, snapshot_interval, max_model_len or longest)
    slots = _state_slots(bytes_per_request, max_num_seqs, share, useful, least * block_bytes)
    num_blocks = max(0, share - slots * bytes_per_request) // block_bytes if block_bytes else 0
    if num_blocks < least or slots * bytes_per_request > budget:
        what = f"one block ({block_size} tokens)" if max_model_len is None else f"max_model_len={max_model_len}"
        reach = needed if requested_bytes is not None or needed <= free_bytes else None
        smaller = ", or lower block_size" if block_size > DEFAULT_BLOCK_SIZE and max_model_len is None else ""
        raise OutOfMemoryError(
            f"a sequence of {what if block_bytes else 'any length'} needs {needed} bytes of KV cache and the budget is "
            f"{budget} ({reason}); {_what_would_fit(num_blocks * block_size, reach)}{smaller}."
        )
    held = num_blocks * block_size if block_bytes else longest
    fitted, why = _sequence_length(max_model_len, longest, held, longest_reason)
    reasons = _memory_reasons(reason, why, block_bytes, bytes_per_request if slots else 0)
    plan = MemoryPlan(fitted, num_blocks, slots, num_blocks * block_bytes + slots * bytes_per_request, reasons)
    return _with_snapshots(plan, bytes_per_request, snapshot_interval, requested_bytes or free_bytes // 2)


def _memory_reasons(budget: str, length: str, block_bytes: int, slot_bytes: int) -> dict[str, str]:
    return {
        "kv_cache_memory_bytes": f"{budget}; memory is touched when used",
        "max_model_len": length,
        "num_blocks": f"{block_bytes:,} bytes each" if block_bytes else "no layer keeps a state of each token",
        "num_state_slots": f"{slot_bytes:,} bytes each" if slot_bytes else "no layer keeps a recurrent state",
    }


def _for_snapshots(budget: int, useful: int, needed: int, interval: int, longest: int) -> int:
    """Bytes to leave to snapshots where `budget` is not enough for all sequences; `needed` are one sequence's."""
    if budget >= useful or not 0 < interval <= longest:
        return 0
    return min(budget // _SNAPSHOT_SHARE, max(0, budget - needed))


def _with_snapshots(plan: MemoryPlan, bytes_per_request: int, interval: int, most: int) -> MemoryPlan:
    """With as many snapshots as the sequences can use, or as fit into `most` bytes with the rest."""
    if not interval or not plan.num_state_slots:
        return plan
    useful = plan.num_state_slots * (plan.max_model_len // interval)
    count = min(useful, max(0, most - plan.kv_cache_memory_bytes) // bytes_per_request)
    bytes_of_all = plan.kv_cache_memory_bytes + count * bytes_per_request
    return replace(
        plan, num_state_snapshots=count, mamba_block_size=interval if count else 0, kv_cache_memory_bytes=bytes_of_all
    )


def choose_snapshot_interval(bytes_per_token: int, bytes_per_request: int, block_size: int) -> int:
    """Tokens between two snapshots of recurrent states: as many as take the same memory in the KV cache, within
    bounds. A prompt is computed in chunks that end at snapshots, and very short chunks are slow."""
    blocks = -(-_LEAST_INTERVAL // block_size)
    while 2 * blocks * block_size <= _LARGEST_INTERVAL and blocks * block_size * bytes_per_token < bytes_per_request:
        blocks *= 2
    return blocks * block_size


def resident_weight_bytes(free: int, kv_cache: int, largest: int) -> int:
    """Bytes of offloaded weights that may stay in memory.

    Besides the KV cache, room is left for pages of the file, for a step's activations, and for the largest tensor
    while it is loaded: its float form and what it becomes.
    """
    return max(0, free - kv_cache - 2 * largest - max(free // 8, _LEAST_HEADROOM))


def _state_slots(bytes_per_request: int, max_num_seqs: int, budget: int, useful: int, for_blocks: int) -> int:
    """One per sequence if everything fits, else as many as half of the budget holds, one at least.

    `for_blocks`: bytes that the blocks of the shortest cache need; 0 for a model without blocks.
    """
    if not bytes_per_request or budget >= useful:
        return max_num_seqs if bytes_per_request else 0
    share = min(budget // 2, budget - for_blocks) if for_blocks else budget
    return min(max_num_seqs, max(1, share // bytes_per_request))


def _sequence_length(max_model_len: int | None, longest: int, tokens: int, reason: str) -> tuple[int, str]:
    """(max_model_len, reason) when the KV cache holds `tokens`."""
    if max_model_len is not None:
        return max_model_len, "asked for"
    if tokens >= longest:
        return longest, reason
    return tokens, f"the KV cache holds no longer sequence; {reason} is {longest}"


def _kv_budget(requested: int | None, useful: int, free: int) -> tuple[int, str]:
    if requested is not None:
        return requested, "asked for"
    if useful <= free // 2:
        return useful, "all that max_num_seqs sequences of max_model_len can use"
    return free // 2, f"half of the {free / GIB:.2f} GiB that are free beside the weights"


def _what_would_fit(tokens: int, needed: int | None) -> str:
    """`tokens`: the longest sequence that fits. `needed`: the bytes of the shortest, None: more than is free."""
    ways = [f"max_model_len={tokens} would fit"] if tokens else []
    ways.append("free memory" if needed is None else f"kv_cache_memory_bytes={needed} would be enough")
    return ", or ".join(ways)


def plan_scheduler(
    args: LLMArgs, max_model_len: int, free_bytes: int, *, batched_tokens: int, whole: bool = False
) -> tuple[SchedulerConfig, dict[str, str]]:
    """Batch sizes and their reasons.

    Args:
        batched_tokens: the most tokens of a step where none are asked for.
        whole: a prompt longer than a step has one of its own.

    Raises:
        ValidationError: a whole prompt does not fit a step, with chunked prefill off.
        OutOfMemoryError: the token ids of `max_num_seqs` batch rows, which are kept, do not fit `free_bytes`.
    """
    row_bytes = _BYTES_PER_ID * max_model_len
    if args.max_num_seqs is not None and args.max_num_seqs * row_bytes > free_bytes:
        raise OutOfMemoryError(
            f"max_num_seqs={args.max_num_seqs} rows of {max_model_len} token ids need "
            f"{args.max_num_seqs * row_bytes} bytes and {free_bytes} are free; lower it."
        )
    named = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "scheduling_policy")
    reasons = {name: args.why(name) for name in named}
    tokens = args.max_num_batched_tokens or batched_tokens
    if whole:
        reasons["enable_chunked_prefill"] = "tokens see those after them"
    elif not args.enable_chunked_prefill and tokens < max_model_len:
        if args.max_num_batched_tokens is not None:
            right = f"at least max_model_len ({max_model_len}) when enable_chunked_prefill=False"
            refuse("max_num_batched_tokens", tokens, right)
        tokens = max_model_len
        reasons["max_num_batched_tokens"] = "max_model_len, for enable_chunked_prefill=False"
    config = SchedulerConfig(
        args.max_num_seqs or DEFAULT_MAX_NUM_SEQS, tokens, args.enable_chunked_prefill, args.scheduling_policy
    )
    return config, reasons


def resolve_dtype(
    name: str, value: object, auto: torch.dtype, allowed: tuple[torch.dtype, ...]
) -> tuple[torch.dtype, str]:
    """(dtype, reason) of a dtype given as "auto", a name or a torch.dtype; raises `ValidationError`."""
    if value == "auto":
        return auto, "auto"
    known = {**CACHE_DTYPES, "float": torch.float32, "half": torch.float16}
    dtype = known.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        name_of = {kind: name for name, kind in reversed(CACHE_DTYPES.items())}
        names = ", ".join(sorted({name_of.get(kind) or str(kind).removeprefix("torch.") for kind in allowed}))
        refuse(name, value, f"'auto' or one of {names}")
    return dtype, "asked for"


# Rows that are packed for a layer's bytes per row; a multiple of every kernel's tile.
_ROWS = 64


class ModelSizes:
    """Bytes of a rank's weights of an unquantized checkpoint, as they are or quantized while they are read."""

    def __init__(self, plan: RunnerPlan, platform: Platform, tp: TensorParallel) -> None:
        self._plan = plan
        self._platform = platform
        options = replace(plan.build_options(tp), quant_config=None)
        with torch.device("meta"), self._constructing():
            self._model: nn.Module = plan.model_class(plan.architecture, options)
        self._sampled: dict[tuple[object, ...], tuple[float, int]] = {}

    def cost(self) -> ModelCost:
        """Of the model as it is stored."""
        return count_model(self._model, self._plan.config.cache_config.kv_cache_dtype, self._plan.kv_cache_specs)

    def by_scheme(self) -> dict[str, int]:
        """Bytes by the names of `quantization=`; "none": as they are stored."""
        found = {"none": self.weight_bytes(None)}
        for name in RECIPES:
            if name != "w8a8_static":  # takes what w8a8 takes, and needs texts
                found[name] = self.weight_bytes(OnlineConfig.parse(name))
        return found

    def weight_bytes(self, config: QuantizationConfig | None) -> int:
        """Raises `ValidationError` for a layer that the config cannot quantize."""
        if config is not None:
            config.packed_modules_mapping = getattr(self._plan.model_class, "packed_modules_mapping", {})
            with torch.device("meta"), self._constructing():
                options = replace(self._plan.build_options(SINGLE), quant_config=config)
                config.share_bits(lambda: self._plan.model_class(self._plan.architecture, options))
        total = 0
        counted: set[int] = set()
        with self._constructing():
            for name, module in self._model.named_modules():
                own = [item for item in module.parameters(recurse=False) if id(item) not in counted]
                counted.update(map(id, own))
                kind = getattr(module, "quant_kind", "")
                method = None
                if config is not None and kind and own:
                    method = config.get_quant_method(module, getattr(module, "prefix", "") or name)
                if isinstance(method, IntegerMethod) and isinstance(method.storage, StreamedStorage):
                    total += self._packed(method, method.storage, own[0])
                    total += self._floats(own[1:], getattr(module, "bias", None))
                else:
                    packs = kind and getattr(getattr(module, "quant_method", None), "packs", False)
                    total += self._floats(own, getattr(module, "bias", None) if packs else None)
        return total

    def _floats(self, parameters: list[nn.Parameter], bias: nn.Parameter | None) -> int:
        """As the loader stores them: matrices in the type asked for, the bias of a packed matrix in float32."""
        return sum(
            item.numel() * (4 if item is bias else stored_as(item.dtype, item.dim(), self._plan.store_as).itemsize)
            for item in parameters
        )

    def _packed(self, method: IntegerMethod, storage: StreamedStorage, weight: torch.Tensor) -> int:
        rows, columns = weight.shape
        key = (method.scheme, type(storage), storage.bits, storage.group_size, columns, min(rows, _ROWS))
        if key not in self._sampled:
            self._sampled[key] = _sample(method, min(rows, _ROWS), columns, self._plan.config.model_config.weight_dtype)
        per_row, once = self._sampled[key]
        return round(per_row * rows) + once

    def _constructing(self) -> AbstractContextManager[None]:
        return constructing_for(self._platform, self._plan.config.compilation_config)


def _sample(method: IntegerMethod, rows: int, columns: int, dtype: torch.dtype) -> tuple[float, int]:
    """(bytes per row, bytes whatever the rows) of a packed weight of random rows."""
    layer: Any = nn.Module()
    method.create_weights(layer, columns, [rows], columns, rows, torch.float32, weight_loader=_loaded_elsewhere)
    # In the checkpoint's type: scales that are exact in 16 bits are held in 16.
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer.weight.weight_loader(layer.weight, values)
    parts = {name: part.nbytes for name, part in layer.packed_weight.memory().items() if part is not None}
    once = parts.pop("weight_table", 0) + parts.pop("weight_columns", 0)
    return sum(parts.values()) / rows, once


def _loaded_elsewhere(param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
    raise ValidationError("this storage is filled by another loader.")


# --- What is held beside the weights. ---

_NAME = ".kv_b_proj."
_FLOAT32 = 4


def widened_bytes(architecture: object, tensors: Mapping[str, TensorInfo]) -> int:
    """It is held as float32 (`llm.layers.latent_attention`): so much more than what the file has of it."""
    if not isinstance(architecture, DecoderConfig):
        return 0
    parts = [layer.attention for layer in architecture.layers if isinstance(layer.attention, LatentAttentionConfig)]
    stored = {name: info for name, info in tensors.items() if _NAME in name}
    if all(info.dtype.is_floating_point and info.dtype.itemsize > 1 for info in stored.values()):
        return 0
    values = sum(part.kv_lora_rank * part.heads * (part.qk_nope_head_dim + part.v_head_dim) for part in parts)
    return max(0, values * _FLOAT32 - sum(info.nbytes for info in stored.values()))


_BYTES = 4  # of an element: adapters are usually stored as float32


def plan_adapters(
    args: LLMArgs, model: ReadModel, platform: Platform, free: int | None
) -> tuple[LoRAConfig | None, int]:
    """The adapters that rows can have (None: `enable_lora` is off), and what they leave of the free memory,
    of which there are `free` bytes, or what the platform says.

    As many matrices as the checkpoint has, each with two of its sides by the largest rank. Those of experts come on
    top: few adapters have them, and they would be most of the sum. In a checkpoint that packs its integers, a matrix
    may have more channels than its tensor shows.
    """
    free = platform.memory_free() if free is None else free
    if not args.enable_lora:
        return None, free
    shapes: list[tuple[int, ...]] = []
    if model.has_weights:
        tensors = model.source.tensors().tensors
        shapes = [info.shape for name, info in tensors.items() if len(info.shape) == 2 and ".experts." not in name]
    sides = sum(rows + columns for rows, columns in shapes)
    needed = args.max_loras * args.max_lora_rank * sides * _BYTES
    if needed > free:
        raise OutOfMemoryError(
            f"max_loras={args.max_loras} adapters of rank {args.max_lora_rank} take up to {needed} bytes and {free} "
            "are free; lower max_loras or max_lora_rank."
        )
    return LoRAConfig(args.max_loras, args.max_lora_rank, needed), free - needed


def merged_adapter(args: LLMArgs, model: ReadModel) -> Path | None:
    """The folder of `merge_lora`, whose files are read once, before memory is allocated."""
    if args.merge_lora is None:
        return None
    if not model.has_weights:
        refuse("merge_lora", str(args.merge_lora), "None with load_format='dummy', which has no weights to add to")
    folder = resolve_folder(args.merge_lora, weights=False, argument="merge_lora")
    AdapterFolder(folder).close()
    return folder


def adapter_reasons(args: LLMArgs, model: ReadModel) -> dict[str, str]:
    """Field name of `LoRAConfig` -> why it has its value."""
    if not args.enable_lora:
        return {"lora_config": args.why("enable_lora")}
    most = "at most, by the checkpoint's tensors but those of experts; taken when an adapter is first used"
    return {
        "max_loras": args.why("max_loras"),
        "max_lora_rank": args.why("max_lora_rank"),
        "lora_memory_bytes": most if model.has_weights else "unknown: random weights",
    }
