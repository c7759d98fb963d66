"""The decisions that need only numbers: memory, lengths, batch sizes, types. Each comes with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from llm.base.checks import refuse
from llm.base.errors import OutOfMemoryError
from llm.config.engine import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DTYPES,
    GIB,
    EngineArgs,
    SchedulerConfig,
)

_BYTES_PER_ID = 4


@dataclass(frozen=True)
class MemoryPlan:
    """What the KV budget allows. `num_blocks` as in `CacheConfig`; `reasons` by field name."""

    max_model_len: int
    num_blocks: int
    kv_cache_memory_bytes: int
    reasons: dict[str, str]


def plan_memory(
    *,
    bytes_per_token: int,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int | None,
    longest: int,
    requested_bytes: int | None,
    free_bytes: int,
) -> MemoryPlan:
    """Choose the KV budget and, when `max_model_len` is None, the longest sequence that fits it.

    Args:
        bytes_per_token: of all layers together.
        longest: the most positions the model was made for.
        requested_bytes: `kv_cache_memory_bytes`, or None.
        free_bytes: what is free once the weights are loaded.

    Raises:
        ValidationError: `max_model_len` is beyond what the model was made for.
        OutOfMemoryError: not even one sequence fits; says what would.
    """
    if max_model_len is not None and max_model_len > longest:
        refuse("max_model_len", max_model_len, f"at most {longest}, what the model was made for")
    block_bytes = bytes_per_token * block_size
    per_sequence = -(-(max_model_len or longest) // block_size)
    useful = max_num_seqs * per_sequence * block_bytes
    budget, reason = _kv_budget(requested_bytes, useful, free_bytes)
    num_blocks = min(budget, useful) // block_bytes
    least = 1 if max_model_len is None else per_sequence
    if num_blocks < least:
        what = f"one block ({block_size} tokens)" if max_model_len is None else f"max_model_len={max_model_len}"
        holds = least * block_bytes
        within_reach = requested_bytes is not None or holds <= free_bytes
        smaller = ", or lower block_size" if block_size > DEFAULT_BLOCK_SIZE and max_model_len is None else ""
        raise OutOfMemoryError(
            f"a sequence of {what} needs {holds} bytes of KV cache and the budget is {budget} ({reason}); "
            f"{_what_would_fit(num_blocks * block_size, holds if within_reach else None)}{smaller}."
        )
    reasons = {
        "kv_cache_memory_bytes": f"{reason}; memory is touched when used",
        "num_blocks": f"{block_bytes:,} bytes each",
    }
    if max_model_len is not None:
        reasons["max_model_len"] = "asked for"
        return MemoryPlan(max_model_len, num_blocks, num_blocks * block_bytes, reasons)
    fitted = min(longest, num_blocks * block_size)
    reasons["max_model_len"] = (
        "what the model was made for"
        if fitted == longest
        else f"the KV budget holds no longer sequence; the model was made for {longest}"
    )
    return MemoryPlan(fitted, num_blocks, num_blocks * block_bytes, reasons)


def _kv_budget(requested: int | None, useful: int, free: int) -> tuple[int, str]:
    if requested is not None:
        return requested, "asked for"
    if useful <= free // 2:
        return useful, "all that max_num_seqs sequences of max_model_len can use"
    return free // 2, f"half of the {free / GIB:.2f} GiB that are free beside the weights"


def _what_would_fit(tokens: int, holds: int | None) -> str:
    """`tokens`: the longest sequence that fits; `holds`: the budget that would be enough, None: more than is free."""
    ways = [f"max_model_len={tokens} would fit"] if tokens else []
    ways.append("free memory" if holds is None else f"kv_cache_memory_bytes={holds} would be enough")
    return ", or ".join(ways)


def plan_scheduler(args: EngineArgs, max_model_len: int, free_bytes: int) -> tuple[SchedulerConfig, dict[str, str]]:
    """Batch sizes and their reasons.

    Raises:
        ValidationError: whole prompts would not fit a step.
        OutOfMemoryError: the token ids of so many rows, which are kept, would not fit `free_bytes`.
    """
    row_bytes = _BYTES_PER_ID * max_model_len
    if args.max_num_seqs is not None and args.max_num_seqs * row_bytes > free_bytes:
        raise OutOfMemoryError(
            f"max_num_seqs={args.max_num_seqs} rows of {max_model_len} token ids need "
            f"{args.max_num_seqs * row_bytes} bytes and {free_bytes} are free; lower it."
        )
    reasons = {name: args.why(name) for name in ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill")}
    tokens = args.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    if not args.enable_chunked_prefill and tokens < max_model_len:
        if args.max_num_batched_tokens is not None:
            right = f"at least max_model_len ({max_model_len}) when enable_chunked_prefill=False"
            refuse("max_num_batched_tokens", tokens, right)
        tokens = max_model_len
        reasons["max_num_batched_tokens"] = "max_model_len, for enable_chunked_prefill=False"
    config = SchedulerConfig(args.max_num_seqs or DEFAULT_MAX_NUM_SEQS, tokens, args.enable_chunked_prefill)
    return config, reasons


def resolve_dtype(
    name: str, value: Any, auto: torch.dtype, allowed: tuple[torch.dtype, ...]
) -> tuple[torch.dtype, str]:
    """A dtype given as "auto", a name or a torch.dtype -> (dtype, reason); raises `ValidationError`."""
    if value == "auto":
        return auto, "auto"
    known = {**DTYPES, "float": torch.float32, "half": torch.float16}
    dtype = value if isinstance(value, torch.dtype) else known.get(value)
    if dtype not in allowed:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in allowed))
        refuse(name, value, f"'auto' or one of {names}")
    return dtype, "asked for"
