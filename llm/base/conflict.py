"""Warns if the unrelated PyPI package `llm` is installed in the same environment.

Both packages unpack into `site-packages/llm`, so the one installed last overwrites files of the other. Two callers:
`llm/__init__.py`, and `llm/models/__init__.py`, the first file of ours that runs if the other package was installed
last and has replaced `llm/__init__.py`.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

# Files of the other package that ours must never have.
FOREIGN_FILES = ("hookspecs.py", "embeddings_migrations.py", "default_plugins")
SITE_FOLDERS = frozenset({"site-packages", "dist-packages"})


def check() -> None:
    """Warn once if `find` finds the other package. Lists a few folders; reads no file."""
    found = find(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sys.path)
    if found is not None:
        # stacklevel stays 1: both callers then share one line, and Python shows the warning once.
        warnings.warn(message(found), UserWarning, stacklevel=1)


def find(package_dir: str, search_path: Sequence[str]) -> str | None:
    """Return where the other package was found, as a phrase for the warning, or None.

    Looks at its metadata beside `package_dir` and in the site folders of `search_path`, then at its files inside
    `package_dir`. The site folders matter for an editable install, whose package folder is not in any of them.
    """
    site_folders = [folder for folder in search_path if os.path.basename(os.path.normpath(folder)) in SITE_FOLDERS]
    for folder in dict.fromkeys([os.path.dirname(package_dir), *site_folders]):
        for name in _names_in(folder):
            if _is_foreign_metadata(name):
                return f"{name} in {folder}"
    for name in FOREIGN_FILES:
        if os.path.exists(os.path.join(package_dir, name)):
            return f"{name} in {package_dir}"
    return None


def message(found: str) -> str:
    """Return the warning: what was found, what it breaks, what to do."""
    return (
        f"The unrelated PyPI package `llm` ({found}) shares this environment with offline-llm; both are imported as "
        "`llm` and overwrite each other's files. Run `python -m pip uninstall -y llm offline-llm` and install "
        "offline-llm again, or keep the two in separate virtual environments."
    )


def _is_foreign_metadata(name: str) -> bool:
    """True for `llm-0.36.dist-info` and its like; false for `llm_plugin-1.0.dist-info` and `offline_llm-...`."""
    return name.startswith("llm-") and name[4:5].isdigit() and name.endswith((".dist-info", ".egg-info"))


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # sys.path may name folders that are absent, unreadable or zip files
        return []
