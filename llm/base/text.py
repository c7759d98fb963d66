"""How messages show values from files and calls: escaped, and always short."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable

_SHOWN = 200


class _Short(reprlib.Repr):
    """`repr` in bounded time and length; nothing it shows breaks a line."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 4, _SHOWN, 60, _SHOWN
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = 16

    def repr_int(self, x: int, level: int) -> str:
        """Short form for huge integers, which Python refuses to convert to digits."""
        return super().repr_int(x, level) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"


_short = _Short()


def show(value: object) -> str:
    """`repr(value)`, clipped and safe to print; the name of the type if its `repr` raises."""
    return clip(_short.repr(value), 2 * _SHOWN)


def list_names(names: Iterable[str], limit: int = 8) -> str:
    """Return "'a', 'b' and 5 more (7 in all)": at most `limit` names, each safe to print."""
    names = list(names)
    shown = ", ".join(quote(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more ({len(names)} in all)"


def quote(name: object) -> str:
    """A name from a file, quoted and safe to print."""
    return f"'{clip(str(name), 100)}'"


def clip(text: str, limit: int = _SHOWN) -> str:
    """Make text from a file safe to print: no control characters, not too long."""
    printable = "".join(char if char.isprintable() else "?" for char in text[:limit])
    return printable if len(text) <= limit else f"{printable}..."
