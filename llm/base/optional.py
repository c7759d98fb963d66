"""Packages that only some features need."""

from __future__ import annotations

import importlib
from types import ModuleType

from llm.errors import MissingPackageError


def optional_package(name: str, extra: str) -> ModuleType:
    """The module `name`.

    Raises:
        MissingPackageError: its package is not installed; `extra` of this project brings it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise MissingPackageError(f"this needs {package}: pip install 'offline-llm[{extra}]', or {package}.") from error
