"""Plugins: packages that extend this one through entry points. (The rest of this file comes with the host contract.)"""

from __future__ import annotations


def plugin_of(cls: type) -> str | None:
    """The name of the plugin whose package defines `cls`, None when no plugin's does."""
    return None
