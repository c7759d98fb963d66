"""Which backend a platform has: layers, quantization methods and the runner all get theirs here."""

from __future__ import annotations

from typing import Any

from llm.base.construction import construction
from llm.kernels.backend import Backend
from llm.kernels.reference.backend import REFERENCE
from llm.platforms.interface import Platform
from llm.plugins import load_class


def backend_for(platform: Platform | None) -> Backend:
    """The backend of `platform`, compiling its kernels if necessary; None: the definitions in PyTorch."""
    if platform is None:
        return REFERENCE
    cls: Any = load_class(
        platform.get_backend_cls(), Backend, f"{type(platform).__name__}.get_backend_cls", platform.plugin
    )
    return cls.of(platform)


def backend_of_construction() -> Backend:
    """The backend of the model under construction. Layers and quantization methods keep it, or operations of it."""
    return backend_for(construction().platform)
