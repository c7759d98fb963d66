"""Names and modules that code for vLLM imports and this package does not have: the error says what to do instead.

Owns raising the errors. The tables are in `llm.config.elsewhere`, which is imported only if something is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn


def missing_name(module: str, name: str) -> Exception:
    """The error for a module's `__getattr__`: an ImportError that says what to do instead, or an AttributeError."""
    from llm.config.elsewhere import MODULES, NAMES

    instead = NAMES.get(name) or MODULES.get(f"{module}.{name}")
    if instead is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ImportError(f"{module} has no {name}; {instead}.", name=module)


def missing_names(module: str) -> Callable[[str], NoReturn]:
    """A `__getattr__` for `module`. Hide it from type checkers: with it, mypy accepts any name of the module."""

    def __getattr__(name: str) -> NoReturn:
        raise missing_name(module, name)

    return __getattr__


class _MissingModules:
    """The last finder on sys.meta_path: reached if no other finds the module."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: object = None) -> None:
        if not fullname.startswith("llm."):
            return
        from llm.config.elsewhere import MODULES

        parent = fullname.rpartition(".")[0]
        instead = MODULES.get(fullname) or MODULES.get(f"{parent}.*")
        if instead is not None:
            raise ModuleNotFoundError(f"there is no {fullname}; {instead}.", name=fullname)


def explain_missing_modules() -> None:
    """Install the finder that raises for imports of modules in the table; called once, by `llm/__init__.py`."""
    if _MissingModules not in sys.meta_path:
        sys.meta_path.append(_MissingModules)
