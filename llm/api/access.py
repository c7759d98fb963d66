"""The methods of `LLM` by which scripts for vLLM access the model.

Owns the methods and `Worker`, the argument of a callable passed to `collective_rpc`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from llm.api.host import Host
from llm.base.checks import known_names
from llm.config.engine import EngineConfig
from llm.errors import ValidationError, nearest

R = TypeVar("R")


@dataclass(frozen=True)
class Worker:
    """Stands in for vLLM's worker: there is one, in this process."""

    model: torch.nn.Module
    vllm_config: EngineConfig
    rank: int = 0
    local_rank: int = 0

    @property
    def device(self) -> torch.device:
        return self.vllm_config.device_config.device

    @property
    def model_runner(self) -> Worker:
        """In vLLM the model is an attribute of the worker's runner: `worker.model_runner.model`."""
        return self

    def get_model(self) -> torch.nn.Module:
        return self.model


class Access:
    @known_names("LLM.apply_model")
    def apply_model(self: Host, func: Callable[[torch.nn.Module], R]) -> list[R]:
        """[func(model)]; `func` may read and change the model.

        Packed weights are not in the checkpoint's layout. The prefix cache and recorded steps are dropped, because the
        model may have changed.

        Raises:
            EngineBusyError: called from inside a call.
            ValidationError: `func` is not callable, or a stream is suspended, whose answer could change midway.
        """
        if not callable(func):
            raise ValidationError(
                f"func must be a callable that takes the model, got {type(func).__name__}.",
                parameter="func",
                value=func,
            )
        with self._exclusive():
            engine = self._begin()
            if engine.scheduler.has_unfinished():
                raise ValidationError(
                    "the model cannot be changed while a stream is suspended; end the stream first.", parameter="func"
                )
            try:
                return [engine.runner.apply_model(func)]
            finally:
                engine.scheduler.blocks.reset_prefix_cache()
                self._may_have_changed = True

    @known_names("LLM.collective_rpc")
    def collective_rpc(
        self: Host,
        method: str | Callable[..., R],
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> list[R]:
        """[method(worker, *args, **kwargs)] with the only `Worker`; its `get_model()` returns the model.

        Args:
            method: a callable, or the name of one of the worker's methods.
            timeout: None only, because the call runs in this process.
        """
        if timeout is not None:
            raise ValidationError(
                f"timeout must be None, as the call is in this process, got {timeout!r}.",
                parameter="timeout",
                value=timeout,
            )
        function = _worker_method(method) if isinstance(method, str) else method
        if not callable(function):
            raise ValidationError(
                f"method must be a callable that takes the worker, got {type(method).__name__}.",
                parameter="method",
                value=method,
            )
        config = self._open_engine().config
        return Access.apply_model(self, lambda model: function(Worker(model, config), *args, **(kwargs or {})))


def _worker_method(name: str) -> Callable[..., R]:
    found: Callable[..., R] | None = getattr(Worker, name, None) if not name.startswith("_") else None
    if not callable(found):
        raise ValidationError(
            f"the worker has no method {name!r}; pass a callable that takes the worker, whose get_model() is the model."
            f"{nearest(name, ['get_model'])}",
            parameter="method",
            value=name,
        )
    return found
