"""`LLM.start_profile` and `stop_profile`: what torch.profiler sees between them, as a trace in a folder.

An `LLM` has one `Profiler`, made of its `profiler_config`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from llm.base.checks import check_flag, refuse
from llm.errors import LLMError, ValidationError

if TYPE_CHECKING:
    from torch.profiler import profile

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
