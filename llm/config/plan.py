"""Decisions from numbers alone: KV cache size, lengths, batch sizes, dtypes. Each comes with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from llm.base.checks import refuse
from llm.config.engine import (
    CACHE_DTYPES,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    GIB,
    EngineArgs,
    SchedulerConfig,
)
from llm.errors import OutOfMemoryError

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
    args: EngineArgs, max_model_len: int, free_bytes: int, *, whole: bool = False
) -> tuple[SchedulerConfig, dict[str, str]]:
    """Batch sizes and their reasons. `whole`: a prompt longer than a step has one of its own.

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
    tokens = args.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
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
