"""CustomOp: an operation whose forward is bound once, at construction, to the best kernel for the platform.

Owns the registry of in-tree operations and the binding. `forward_native` is plain PyTorch and the definition that every
other `forward_*` is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import nn

from llm.errors import LLMError
from llm.platforms.interface import Platform

T = TypeVar("T", bound=type)

op_registry: dict[str, type[CustomOp]] = {}

# The platform that models under construction compute on. The one exception to "no module state": it is set only
# inside `constructing_for`, and a constructor reads it once.
_platform: ContextVar[Platform | None] = ContextVar("llm_construction_platform", default=None)


@contextmanager
def constructing_for(platform: Platform) -> Iterator[None]:
    """Operations constructed inside this context are bound to `platform`; outside of it, to `forward_native`."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


class CustomOp(nn.Module):
    """Base of operations with more than one implementation; bound when constructed, see `constructing_for`."""

    name: str = ""

    def __init__(self) -> None:
        super().__init__()
        self._forward_method: Callable[..., Any] = self.dispatch_forward(_platform.get())

    @classmethod
    def register(cls, name: str) -> Callable[[T], T]:
        """Class decorator: make the operation known as `name`, e.g. "rms_norm"; a name taken raises `LLMError`."""

        def decorate(op_cls: T) -> T:
            if name in op_registry:
                raise LLMError(f"an operation named {name!r} is already registered: {op_registry[name].__name__}")
            op_cls.name = name  # type: ignore[attr-defined]
            op_registry[name] = op_cls
            return op_cls

        return decorate

    def dispatch_forward(self, platform: Platform | None) -> Callable[..., Any]:
        """The method to run: the platform's own when the class has it, else `forward_native`."""
        key = "native" if platform is None else platform.dispatch_key
        return getattr(self, f"forward_{key}", self.forward_native)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_method(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError
