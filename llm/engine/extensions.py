"""What start-up asks of plugins and of the registries, so that `build.py` reads as the order of start-up.

Owns no registry. Everything here runs before memory is allocated.
"""

from __future__ import annotations

import importlib
import pkgutil

import llm.layers
from llm.compilation import CompilationConfig
from llm.layers.custom_op import check_registered, op_registry


def check_operations(compilation: CompilationConfig) -> None:
    """Raise `ValidationError` when `custom_ops` names what is no operation, in this package or a plugin."""
    if any(name not in op_registry for name in compilation.mentioned):
        # The operation may be in a module that this model does not import.
        for module in pkgutil.walk_packages(llm.layers.__path__, "llm.layers."):
            importlib.import_module(module.name)
    check_registered(compilation)
