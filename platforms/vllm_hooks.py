"""Hooks of platforms that were written for vLLM: arguments by their names there, and a config to change in place.

What a hook sets reaches `LLMArgs`, or is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from llm.config.compilation import CompilationConfig
from llm.config.engine import LLMArgs
from llm.errors import PluginError
from llm.platforms.interface import Platform

# Section -> its attributes, which are arguments of the same name.
_SECTIONS = {
    "model_config": ("model", "dtype", "quantization", "max_model_len", "seed", "enforce_eager"),
    "cache_config": ("block_size", "enable_prefix_caching"),
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
}
_AUTO = "auto"


class _Section(SimpleNamespace):
    """A part of the config; only what is there can be set."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in vars(self):
            raise PluginError(
                f"a platform sets {name!r}, which is not in its config; there are {', '.join(vars(self))}"
            )
        super().__setattr__(name, value)


class VllmConfigView(_Section):
    """What `check_and_update_config(vllm_config)` reads and changes, before anything is decided; None: not given.

    Attributes:
        parallel_config: `worker_cls`, "auto" or the class path of an `llm.runner.model_runner.ModelRunner`; one device.
        compilation_config: `custom_ops` (a list), `mode` and `backend`.
        model_config, cache_config, scheduler_config: arguments of `LLM`.
    """

    def __init__(self, args: LLMArgs, platform: Platform) -> None:
        compilation = CompilationConfig.of(
            args.compilation_config,
            default_backend=platform.simple_compile_backend,
            enforce_eager=args.enforce_eager,
        )
        sections = {
            name: _Section(**{item: getattr(args, item) for item in items}) for name, items in _SECTIONS.items()
        }
        super().__init__(
            **sections,
            parallel_config=_Section(worker_cls=_AUTO, tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1),
            compilation_config=_Section(
                custom_ops=list(compilation.custom_ops), mode=compilation.mode, backend=compilation.backend
            ),
        )
        self.__dict__["_before"] = dict(vars(self.compilation_config), custom_ops=list(compilation.custom_ops))

    def updated(self, args: LLMArgs) -> LLMArgs:
        """The arguments with what was set."""
        now = {item: getattr(getattr(self, name), item) for name, items in _SECTIONS.items() for item in items}
        changed = {item: value for item, value in now.items() if value != getattr(args, item)}
        compilation = dict(vars(self.compilation_config))
        if compilation != self.__dict__["_before"]:
            changed["compilation_config"] = compilation
        parallel = self.parallel_config
        if (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size) != (1, 1, 1):
            raise PluginError("a platform sets several devices, and an LLM runs on one")
        return replace(args, **changed)


def update_config(platform: Platform, args: LLMArgs) -> object:
    """What `check_and_update_config` makes of the arguments."""
    hook: Callable[..., object] = platform.check_and_update_config
    if "vllm_config" not in inspect.signature(hook).parameters:
        return hook(args)
    view = VllmConfigView(args, platform)
    answer = hook(view)
    if answer is not None:
        return answer
    chosen = view.parallel_config.worker_cls
    platform.worker_cls = "" if chosen == _AUTO else chosen
    return view.updated(args)


def called_by_name(function: Callable[..., Any], known: Mapping[str, object]) -> Any:
    """Call with those of the known arguments that it takes; `PluginError` if it needs another."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return function(**known)
    needs = [item.name for item in parameters if item.default is item.empty and item.kind is not item.VAR_POSITIONAL]
    unknown = [name for name in needs if name not in known]
    if unknown:
        raise PluginError(f"{function.__qualname__} asks for {', '.join(unknown)}; known are {', '.join(known)}")
    return function(**{item.name: known[item.name] for item in parameters if item.name in known})
