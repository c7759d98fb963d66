"""What adapters take, planned before anything is built."""

from __future__ import annotations

from pathlib import Path

from llm.base.checks import refuse
from llm.config.engine import EngineArgs
from llm.config.parts import LoRAConfig
from llm.errors import OutOfMemoryError
from llm.loading.adapters.folder import AdapterFolder
from llm.loading.resolve import resolve_folder
from llm.platforms import Platform
from llm.startup.source import ReadModel

_BYTES = 4  # of an element: adapters are usually stored as float32


def plan_adapters(
    args: EngineArgs, model: ReadModel, platform: Platform, free: int | None
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


def merged_adapter(args: EngineArgs, model: ReadModel) -> Path | None:
    """The folder of `merge_lora`, whose files are read once, before memory is allocated."""
    if args.merge_lora is None:
        return None
    if not model.has_weights:
        refuse("merge_lora", str(args.merge_lora), "None with load_format='dummy', which has no weights to add to")
    folder = resolve_folder(args.merge_lora, weights=False, argument="merge_lora")
    AdapterFolder(folder).close()
    return folder


def adapter_reasons(args: EngineArgs, model: ReadModel) -> dict[str, str]:
    """Field name of `LoRAConfig` -> why it has its value."""
    if not args.enable_lora:
        return {"lora_config": args.why("enable_lora")}
    most = "at most, by the checkpoint's tensors but those of experts; taken when an adapter is first used"
    return {
        "max_loras": args.why("max_loras"),
        "max_lora_rank": args.why("max_lora_rank"),
        "lora_memory_bytes": most if model.has_weights else "unknown: random weights",
    }
