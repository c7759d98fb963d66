"""What an engine has done since it was built: `LLM.stats()`. Plain data.

Owns the names, and the text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

GIB = 1 << 30


@dataclass
class EngineStats:
    """Counts since the engine was built.

    Attributes:
        tokens: computed ones, of prompts and answers; drafts and what is computed again included.
        drafted_tokens, accepted_tokens: drafts that were verified, and how many of them were accepted.
        seconds: time in `step`, of which `model_seconds` in forward, LM head and sampler.
    """

    steps: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0


@dataclass
class LLMStats(EngineStats):
    """`EngineStats`, and the requests and the memory. A completion is a request.

    Attributes:
        running, waiting: requests now.
        ended: how many requests have ended, by `finish_reason`.
        prompt_tokens: of the requests that have ended, of which `cached_tokens` came from the prefix cache.
        preemptions: how often a request that has ended lost its blocks and was computed again.
        weight_bytes: of the loaded weights, in memory or in a file.
        kv_cache_bytes: reserved; memory is touched when it is used.
        kv_cache_used: share of its blocks that requests hold now; of its slots for states, if every layer is recurrent.
    """

    running: int = 0
    waiting: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    weight_bytes: int = 0
    kv_cache_bytes: int = 0
    kv_cache_used: float = 0.0

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{item.name:<18} {_shown(item.name, getattr(self, item.name))}" for item in fields(self))


def _shown(name: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {reason}" for reason, count in value.items()) or "none"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / GIB:.3f} GiB"
    if name == "kv_cache_used":
        return f"{value:.0%}"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
