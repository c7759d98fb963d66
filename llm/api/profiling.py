"""`LLM.start_profile` and `stop_profile`: what torch.profiler sees between them, as a trace in a folder.

Owns `profiler_config` and the one profiler of an `LLM`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llm.api.host import Host
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


class Profiling:
    _profiler: profile | None = None
    _profiled_as = ""
    _profiler_config = ProfilerConfig()

    def start_profile(self: ProfilingHost, profile_prefix: str | None = None) -> None:
        """Record all that this thread computes until `stop_profile`, with `LLM(profiler_config=...)`.

        Args:
            profile_prefix: the beginning of the trace's file name.

        Raises:
            ValidationError: there is no `profiler_config`, or it is recording.
        """
        import torch

        self._open_engine()
        config = self._profiler_config
        if config.profiler is None:
            raise ValidationError(f"start_profile needs a folder: pass LLM({_HOW}).", parameter="profiler_config")
        if self._profiler is not None:
            raise ValidationError("a profile is being recorded; call stop_profile first.", parameter="profile_prefix")
        name = "profile" if profile_prefix is None else profile_prefix
        if not isinstance(name, str) or not name or Path(name).name != name:
            refuse("profile_prefix", profile_prefix, "the beginning of a file name, or None")
        self._profiled_as = f"{name}.{os.getpid()}.{time.time_ns()}.pt.trace.json"
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
        )
        self._profiler.start()

    def stop_profile(self: ProfilingHost) -> Path:
        """Write the trace into `torch_profiler_dir` and return its file, which https://ui.perfetto.dev shows.

        Raises:
            ValidationError: `start_profile` was not called. LLMError: the trace cannot be written.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise ValidationError("no profile is being recorded; call start_profile first.", parameter="profile_prefix")
        profiler.stop()
        config = self._profiler_config
        ending = ".gz" if config.torch_profiler_use_gzip else ""
        file = Path(os.path.expanduser(config.torch_profiler_dir)) / f"{self._profiled_as}{ending}"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            raise LLMError(f"the trace could not be written to {file}: {error}") from error
        return file


class ProfilingHost(Host, Protocol):
    _profiler: profile | None
    _profiled_as: str
    _profiler_config: ProfilerConfig
