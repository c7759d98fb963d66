"""Classes of vLLM that scripts import without using them; using one raises an error that says what to do instead.

Owns the classes; `llm.config.elsewhere` has the messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from llm.base.errors import LLMError
from llm.config.elsewhere import STAND_INS


class _StandIn(type):
    """Calling the class, or asking it for a method such as `from_engine_args`, raises `LLMError`."""

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise LLMError(f"there is no {cls.__name__} here; {STAND_INS[cls.__name__]}.")

    if not TYPE_CHECKING:  # or mypy would take any name

        def __getattr__(cls, name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            raise LLMError(f"there is no {cls.__name__}.{name} here; {STAND_INS[cls.__name__]}.")


class PoolingParams(metaclass=_StandIn):
    """The parameters of embeddings and scores."""
