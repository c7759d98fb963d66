"""What an LLM shows of itself: its HTML in a notebook, the tokens of each expert as a heat map, and a profile.

The markup is escaped text and inline styles, no script, nothing from elsewhere.
"""

from __future__ import annotations

import html
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from llm.base.checks import check_flag, refuse
from llm.config.engine import GIB, EngineConfig
from llm.engine.engine import Engine
from llm.engine.stats import LLMStats
from llm.errors import LLMError, ValidationError
from llm.platforms import select_platform
from llm.setup.calibrate import run_texts

if TYPE_CHECKING:
    import pandas
    from torch.profiler import profile

_CELL, _LABEL_WIDTH = 10, 260
_WIDTH = 480
_COLOURS = ("#3b6ea8", "#8fb3d9", "#e8e8e8")


@dataclass(frozen=True)
class ExpertLoad:
    """How many tokens went to each expert.

    Attributes:
        tokens: by the dotted path of each layer of experts, in the order of the experts.
    """

    tokens: dict[str, tuple[int, ...]]

    def imbalance(self, layer: str) -> float:
        """The tokens of the layer's busiest expert over those of its average one; 1: all have the same."""
        counts = self.tokens[layer]
        return max(counts) * len(counts) / max(1, sum(counts))

    def unused(self, layer: str) -> int:
        """How many experts of the layer no token went to."""
        return self.tokens[layer].count(0)

    def __str__(self) -> str:
        width = max(map(len, self.tokens))
        lines = [
            f"{layer.ljust(width)}  {self.imbalance(layer):9.2f}  {self.unused(layer):6}  {' '.join(map(str, counts))}"
            for layer, counts in self.tokens.items()
        ]
        return "\n".join([f"{'layer'.ljust(width)}  imbalance  unused  tokens of each expert", *lines])

    __repr__ = __str__

    def to_dataframe(self) -> pandas.DataFrame:
        """A pandas DataFrame: one row per layer, one column per expert."""
        try:
            import pandas
        except ImportError as error:
            raise LLMError("to_dataframe() needs pandas; pip install pandas.") from error
        return pandas.DataFrame.from_dict(self.tokens, orient="index")

    def _repr_html_(self) -> str:
        """An SVG heat map, one row per layer: the darker, the more tokens; experts without a token are red."""
        parts = []
        for row, (layer, counts) in enumerate(self.tokens.items()):
            top, most = row * (_CELL + 2), max(1, *counts)
            label = html.escape(f"{layer} ({self.imbalance(layer):.2f})")
            parts.append(f'<text x="0" y="{top + _CELL}" font-size="10">{label}</text>')
            for expert, count in enumerate(counts):
                shade = round(235 - 200 * count / most)
                colour = f"rgb({shade},{shade},255)" if count else "#e34a33"
                parts.append(
                    f'<rect x="{_LABEL_WIDTH + expert * _CELL}" y="{top}" width="{_CELL}" height="{_CELL}" '
                    f'fill="{colour}"><title>expert {expert}: {count} tokens</title></rect>'
                )
        width = _LABEL_WIDTH + _CELL * max(map(len, self.tokens.values()))
        height = len(self.tokens) * (_CELL + 2)
        size = f'width="{width}" height="{height}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" fill="currentColor" {size}>{"".join(parts)}</svg>'


def measure_load(engine: Engine, texts: Sequence[str]) -> ExpertLoad:
    """Run `texts` and count; `ValidationError` for a model without experts."""
    if isinstance(texts, str) or not texts:
        raise ValidationError(f"texts must be a list of texts, got {texts!r}.", parameter="texts", value=texts)
    engine.needs_model_here("expert_load")
    engine.runner.start_counting_experts()
    try:
        run_texts(engine, texts, "texts")
    finally:
        counts = engine.runner.stop_counting_experts()
    if not counts:
        raise ValidationError("this model has no layers of experts.", parameter="texts", value=None)
    return ExpertLoad({name: tuple(tokens) for name, tokens in counts.items()})


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


_HOW = "profiler_config={'profiler': 'torch', 'torch_profiler_dir': folder}"


@dataclass(frozen=True)
class ProfilerConfig:
    """vLLM's keys: the folder, what torch.profiler records, and whether the trace is compressed."""

    profiler: str | None = None
    torch_profiler_dir: str = ""
    torch_profiler_with_stack: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True

    def __post_init__(self) -> None:
        if self.profiler not in (None, "torch"):
            refuse("profiler_config['profiler']", self.profiler, "'torch'")
        if not isinstance(self.torch_profiler_dir, str | Path):
            refuse("profiler_config['torch_profiler_dir']", self.torch_profiler_dir, "a folder")
        if (self.profiler is None) != (not self.torch_profiler_dir):
            refuse("profiler_config", self, f"a dict with both, such as {_HOW}")
        for item in fields(self)[2:]:
            check_flag(f"profiler_config[{item.name!r}]", getattr(self, item.name))

    @classmethod
    def of(cls, given: object) -> ProfilerConfig:
        """From `LLM`'s argument: a dict, a `ProfilerConfig` or None."""
        if isinstance(given, cls):
            return given
        known = [item.name for item in fields(cls)]
        if not isinstance(given, Mapping | None) or not set(given or {}) <= set(known):
            refuse("profiler_config", given, f"None or a dict with keys of {', '.join(known)}")
        return cls(**(given or {}))


class Profiler:
    """What `start_profile` starts and `stop_profile` ends."""

    def __init__(self, given: object) -> None:
        self._config = ProfilerConfig.of(given)
        self._running: profile | None = None
        self._name = ""

    def start(self, prefix: str | None) -> None:
        import torch

        config = self._config
        if config.profiler is None:
            raise ValidationError(f"start_profile needs a folder: pass LLM({_HOW}).", parameter="profiler_config")
        if self._running is not None:
            raise ValidationError("a profile is being recorded; call stop_profile first.", parameter="profile_prefix")
        name = "profile" if prefix is None else prefix
        if not isinstance(name, str) or not name or Path(name).name != name:
            refuse("profile_prefix", prefix, "the beginning of a file name, or None")
        self._name = f"{name}.{os.getpid()}.{time.time_ns()}.pt.trace.json"
        self._running = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
        )
        self._running.start()

    def stop(self) -> Path:
        """Write the trace; returns its file."""
        profiler, self._running = self._running, None
        if profiler is None:
            raise ValidationError("no profile is being recorded; call start_profile first.", parameter="profile_prefix")
        profiler.stop()
        ending = ".gz" if self._config.torch_profiler_use_gzip else ""
        file = Path(os.path.expanduser(self._config.torch_profiler_dir)) / f"{self._name}{ending}"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            raise LLMError(f"the trace could not be written to {file}: {error}") from error
        return file
