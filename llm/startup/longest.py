"""The longest sequence that a model takes, where neither the user nor the KV cache says less.

Owns the choice: the checkpoint's maximum, or as many positions as have room for their rotary tables. These are filled
at start-up, so positions that nobody will use cost time and memory: ten million of heads with 128 channels 5 GB.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm.config.engine import EngineArgs
from llm.forward import KVCacheSpec, StateSpec
from llm.startup.source import ReadModel

# The tables may take 1 / this of the free memory, and always so many bytes.
_SHARE, _LEAST_BYTES = 128, 16 << 20
_BYTES = 4  # of a number of a table


def longest_sequence(args: EngineArgs, model: ReadModel, specs: Sequence[StateSpec], free: int) -> tuple[int, str]:
    """(positions, what limits them). With `max_model_len` given, the model's maximum."""
    longest: int = model.architecture.max_position_embeddings
    limit = None if model.pooling is None else model.pooling.modules.max_seq_length
    if limit is not None:  # sentence-transformers' files say so
        longest = min(longest, limit)
    channels = max((spec.head_size for spec in specs if isinstance(spec, KVCacheSpec)), default=0)
    table = _BYTES * channels * len(getattr(model.architecture, "ropes", ()))
    fitting = longest if args.max_model_len is not None or not table else max(free // _SHARE, _LEAST_BYTES) // table
    if fitting >= longest:
        return longest, "the model's maximum"
    return fitting, f"what rotary tables in 1/{_SHARE} of the free memory hold (the model's maximum is {longest})"
