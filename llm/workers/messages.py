"""Messages as bytes: plain data and the classes of a schema, without pickle, so that reading one runs no code.

A message is a kind, a text, and a body. Its bytes are two numbers of 8 bytes, the sizes of what follows: a header in
JSON, and buffers with the bytes of arrays, tensors and byte strings, which the header names by their order. Numbers
arrive as they were sent, to the bit.
"""

from __future__ import annotations

import builtins
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llm import errors
from llm.base.types import JsonObject
from llm.errors import LLMError, ValidationError

if TYPE_CHECKING:
    import torch

PREFIX_BYTES = 16
_PLAIN = frozenset({bool, int, float, str, type(None)})
_COLLECTIONS: dict[str, type[tuple[object, ...]] | type[set[object]] | type[frozenset[object]]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


class Message(NamedTuple):
    kind: str
    body: object


class Schema:
    """The classes that may be in a message, each with the attributes that are sent, in order.

    Args:
        kinds: dataclasses, of which all fields are sent, and enums.
        others: class -> the attributes that are sent. An object is made from them without calling its constructor.
    """

    def __init__(self, kinds: Iterable[type] = (), others: Mapping[type, Sequence[str]] | None = None) -> None:
        self.kinds: dict[str, tuple[type, tuple[str, ...]]] = {}
        for kind in kinds:
            names = () if issubclass(kind, Enum) else tuple(item.name for item in dataclasses.fields(kind))  # type: ignore[arg-type]
            self.kinds[kind.__name__] = kind, names
        for kind, given in (others or {}).items():
            self.kinds[kind.__name__] = kind, tuple(given)

    def described(self) -> dict[str, list[str]]:
        """Class -> what is sent of it: what both ends must agree on."""
        return {name: list(attributes) for name, (_, attributes) in sorted(self.kinds.items())}

    def encode(self, kind: str, body: object = None) -> bytes:
        """A message's bytes, a copy of all that is in the body.

        Raises:
            ValidationError: the body has an object of a class that is not of the schema.
        """
        writer = _Writer(self)
        written = writer.write(body)
        sizes = [len(buffer) for buffer in writer.buffers]
        header = json.dumps([kind, sizes, written], separators=(",", ":")).encode()
        prefix = len(header).to_bytes(8, "little") + sum(sizes).to_bytes(8, "little")
        return b"".join((prefix, header, *writer.buffers))

    def decode(self, header: memoryview, buffers: memoryview) -> Message:
        kind, sizes, written = json.loads(bytes(header))
        return Message(kind, _Reader(self, sizes, buffers).read(written))


def sizes_of(prefix: bytes | bytearray) -> tuple[int, int]:
    """Bytes of the header, and of the buffers, by the first `PREFIX_BYTES` bytes of a message."""
    return int.from_bytes(prefix[:8], "little"), int.from_bytes(prefix[8:PREFIX_BYTES], "little")


class _Writer:
    """Makes JSON of a value: what JSON has not is a dict with one key that begins with "$"."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self.buffers: list[memoryview] = []

    def write(self, value: object) -> object:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, list) and kind is list:
            return value if _PLAIN.issuperset(map(type, value)) else self._all(value)
        if isinstance(value, dict) and kind is dict:
            if all(type(key) is str and key[:1] != "$" for key in value):
                return {key: self.write(item) for key, item in value.items()}
            return {"$dict": [[self.write(key), self.write(item)] for key, item in value.items()]}
        if isinstance(value, Counter):
            return {"$counter": [[self.write(key), count] for key, count in value.items()]}
        if isinstance(value, tuple) and kind is tuple:
            return {"$tuple": self._all(value)}
        if isinstance(value, set | frozenset):
            return {f"${kind.__name__}": self._all(value)}
        if isinstance(value, bytes | bytearray | memoryview):
            return {"$bytes": self._buffer(memoryview(value).cast("B"))}
        if isinstance(value, np.generic):
            return {"$number": self.write(np.asarray(value))}
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return {"$array": [value.dtype.str, list(value.shape), self._buffer(flat.data)]}
        if "torch" in sys.modules:  # where it is not loaded, as in a worker that needs none, nothing is a tensor
            import torch

            if isinstance(value, torch.Tensor):
                return {"$tensor": self._tensor(value)}
            if isinstance(value, torch.dtype):
                return {"$dtype": _name(value)}
        if isinstance(value, PurePath):
            return {"$path": str(value)}
        if isinstance(value, BaseException):
            return {"$error": self._error(value)}
        if self._schema.kinds.get(kind.__name__, (None,))[0] is kind:
            if isinstance(value, Enum):
                return {"$" + kind.__name__: value.name}
            names = self._schema.kinds[kind.__name__][1]
            return {"$" + kind.__name__: [self.write(getattr(value, name)) for name in names]}
        raise ValidationError(
            f"{kind.__module__}.{kind.__qualname__} cannot be sent to a worker process: a message has plain data.",
            value=value,
        )

    def _all(self, values: Iterable[object]) -> list[object]:
        return [self.write(value) for value in values]

    def _buffer(self, data: memoryview) -> int:
        self.buffers.append(data)
        return len(self.buffers) - 1

    def _tensor(self, tensor: torch.Tensor) -> list[object]:
        import torch

        flat = tensor.detach().cpu().contiguous().reshape(-1)
        bits = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        return [_name(tensor.dtype), list(tensor.shape), self._buffer(bits.data)]

    def _error(self, error: BaseException) -> list[object]:
        """Its class, where it is one of Python's or of `llm.errors`, its words, and what is plain of its attributes."""
        own = {}
        for name, value in vars(error).items():
            try:
                own[name] = self.write(value)
            except ValidationError:
                continue  # such as the prompt of a `ValidationError`
        name, text = type(error).__name__, str(error)
        known = _error_class(name) is type(error)
        return [name if known else "LLMError", text if known else f"{name}: {text}", own]


class _Reader:
    def __init__(self, schema: Schema, sizes: Sequence[int], buffers: memoryview) -> None:
        self._schema = schema
        self._buffers = []
        start = 0
        for size in sizes:
            self._buffers.append(buffers[start : start + size])
            start += size

    def read(self, written: object) -> object:
        if isinstance(written, list):
            return written if _PLAIN.issuperset(map(type, written)) else self._all(written)
        if not isinstance(written, dict):
            return written
        name = next(iter(written), "")
        if len(written) != 1 or not name.startswith("$"):
            return {key: self.read(item) for key, item in written.items()}
        return self._special(name[1:], written)

    def _special(self, name: str, written: JsonObject) -> object:
        content = written["$" + name]
        if name == "dict":
            return {self.read(key): self.read(item) for key, item in content}
        if name == "counter":
            return Counter({self.read(key): count for key, count in content})
        if name in _COLLECTIONS:
            return _COLLECTIONS[name](self._all(content))
        if name == "bytes":
            return bytes(self._buffers[content])
        if name == "number":
            return self._array(*content["$array"])[()]
        if name == "array":
            return self._array(*content)
        if name == "tensor":
            return self._tensor(*content)
        if name == "dtype":
            import torch

            return getattr(torch, content)
        if name == "path":
            return Path(content)
        if name == "error":
            return self._error(*content)
        kind, names = self._schema.kinds[name]
        if issubclass(kind, Enum):
            return kind[content]
        made = kind.__new__(kind)
        # Also of a frozen class.
        vars(made).update({key: self.read(item) for key, item in zip(names, content, strict=True)})
        return made

    def _all(self, written: Iterable[object]) -> list[object]:
        return [self.read(item) for item in written]

    def _array(self, dtype: str, shape: Sequence[int], index: int) -> np.ndarray:
        # A copy: it owns its bytes, and may be written.
        return np.frombuffer(self._buffers[index], np.dtype(dtype)).reshape(tuple(shape)).copy()

    def _tensor(self, dtype: str, shape: Sequence[int], index: int) -> torch.Tensor:
        import torch

        kind: torch.dtype = getattr(torch, dtype)
        data = bytearray(self._buffers[index])
        if not data:
            return torch.empty(tuple(shape), dtype=kind)
        return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(tuple(shape))

    def _error(self, name: str, text: str, own: JsonObject) -> BaseException:
        kind = _error_class(name) or LLMError
        made = kind.__new__(kind, text)
        made.args = (text,)
        vars(made).update({key: self.read(item) for key, item in own.items()})
        return made


def _error_class(name: str) -> type[BaseException] | None:
    for module in (errors, builtins):
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
