"""Packages that only some features need, and transformers without its progress bars."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def quiet() -> Iterator[None]:
    """Disable transformers' progress bars."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
