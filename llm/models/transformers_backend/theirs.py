"""The type of transformers' objects and of what its modules are called with: each class has its own."""

from __future__ import annotations

from typing import Any, TypeAlias

Theirs: TypeAlias = Any
