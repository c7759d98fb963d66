"""How often recurrent states are copied for prefix caching, and why; `llm.config.plan` owns the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from llm.base.checks import refuse
from llm.config.engine import DEFAULT_BLOCK_SIZE, EngineArgs
from llm.config.plan import MemoryPlan, choose_snapshot_interval
from llm.forward import StateSpec


def snapshot_interval(args: EngineArgs, specs: Sequence[StateSpec], model_impl: str) -> int:
    """Tokens between two snapshots of recurrent states; 0: prefixes are not shared, or there are no such states.

    transformers' code takes none: some of it computes a prompt's further chunks token by token.
    """
    block_size = args.block_size or DEFAULT_BLOCK_SIZE
    if args.mamba_block_size is not None and args.mamba_block_size % block_size:
        refuse("mamba_block_size", args.mamba_block_size, f"a multiple of block_size={block_size}")
    per_request = sum(spec.bytes_per_request() for spec in specs)
    if not args.enable_prefix_caching or not per_request or model_impl == "transformers":
        return 0
    per_token = sum(spec.bytes_per_token() for spec in specs)
    return args.mamba_block_size or choose_snapshot_interval(per_token, per_request, block_size)


def snapshot_reasons(args: EngineArgs, memory: MemoryPlan, model_impl: str) -> dict[str, str]:
    """Field name of `CacheConfig` -> why it has its value."""
    if not memory.num_state_slots:
        none = "no layer keeps a recurrent state"
        return {"num_state_snapshots": none, "mamba_block_size": none}
    if not memory.mamba_block_size:
        on_theirs = "transformers' code computes a prompt's further chunks slowly: recurrent states are not copied"
        on_ours = "no sequence is long enough for a copy of its recurrent states, or there is no room for one"
        why = on_theirs if model_impl == "transformers" else on_ours
        return {"enable_prefix_caching": why if args.enable_prefix_caching else "asked for"}
    why = "asked for" if args.mamba_block_size else "by the memory that a copy of the states takes"
    return {
        "enable_prefix_caching": f"{args.why('enable_prefix_caching')}; up to a multiple of mamba_block_size tokens",
        "num_state_snapshots": "what sequences can use, or what memory is left; touched when used",
        "mamba_block_size": f"tokens between copies of the recurrent states; {why}",
    }
