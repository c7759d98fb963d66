"""An `LLM` as HTML for notebooks: what it is, what it takes of the memory, how long start-up took.

Owns the markup: escaped text, inline styles, no script, nothing from elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Mapping

from llm.config.engine import GIB, EngineConfig
from llm.engine.stats import LLMStats
from llm.platforms import select_platform

_WIDTH = 480
_COLOURS = ("#3b6ea8", "#8fb3d9", "#e8e8e8")


def llm_as_html(config: EngineConfig, stats: LLMStats, startup: Mapping[str, float]) -> str:
    model = config.model_config
    facts = {
        "architecture": f"{model.architecture}, {model.model_impl}",
        "weights": str(model.weight_dtype).removeprefix("torch."),
        "quantization": str(model.quantization),
        "max_model_len": f"{model.max_model_len:,}",
        "batch-invariant": f"{config.invariant} ({config.reasons.get('invariant', '')})",
    }
    rows = "".join(f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>" for name, value in facts.items())
    return (
        f"<div><b>LLM {_text(model.model)}</b><table>{rows}</table>{_memory(config, stats)}{_phases(startup)}"
        f"<p>{stats.running} requests running, {stats.waiting} waiting, {sum(stats.ended.values())} ended</p></div>"
    )


def _memory(config: EngineConfig, stats: LLMStats) -> str:
    """The memory of the device, in proportion. The KV cache is reserved; memory is touched when it is used."""
    total = max(1, select_platform(config.device)[0].memory_total())
    in_memory = stats.weight_bytes
    if config.offload_config.offload_weights:
        in_memory = min(in_memory, config.offload_config.resident_weight_bytes)
    parts = {"weights": in_memory, f"KV cache, {stats.kv_cache_used:.0%} in use": stats.kv_cache_bytes}
    parts["the rest"] = max(0, total - sum(parts.values()))
    bar = "".join(
        f'<span style="display:inline-block;height:14px;width:{_WIDTH * size / total:.1f}px;background:{colour}" '
        f'title="{_text(name)}: {size / GIB:.2f} GiB"></span>'
        for (name, size), colour in zip(parts.items(), _COLOURS, strict=True)
    )
    shown = ", ".join(f"{_text(name)} {size / GIB:.2f} GiB" for name, size in parts.items())
    return f'<p>memory: {shown}<br><span style="white-space:nowrap">{bar}</span></p>'


def _phases(startup: Mapping[str, float]) -> str:
    longest = max([1e-9, *startup.values()])
    rows = "".join(
        f'<tr><td>{_text(name)}</td><td>{seconds:.2f} s</td><td><span style="display:inline-block;height:10px;'
        f'width:{_WIDTH / 2 * seconds / longest:.1f}px;background:{_COLOURS[0]}"></span></td></tr>'
        for name, seconds in startup.items()
    )
    return f"<p>start-up: {sum(startup.values()):.2f} s</p><table>{rows}</table>"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
