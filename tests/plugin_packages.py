"""Plugins for tests: packages made up on the spot, and those in `tests/plugins/` as pip installs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from embedded import ROOT, python

from llm import plugins


def install(site: Path, package: str, code: str, **entries: str) -> None:
    """What pip leaves: a module, and metadata with entry points ("platform" or "general", then name = object)."""
    module = package.replace("-", "_")
    (site / f"{module}.py").write_text(code)
    folder = site / f"{module}-0.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.5\n")
    groups: dict[str, list[str]] = {}
    for key, value in entries.items():
        kind, _, name = key.partition("__")
        groups.setdefault(kind, []).append(f"{name} = {module}:{value}")
    text = [f"[llm.{kind}]\n" + "\n".join(lines) for kind, lines in groups.items()]
    (folder / "entry_points.txt").write_text("\n".join(text))
    plugins._scan.cache_clear()


PLATFORM = """
from llm.platforms.cpu import CpuPlatform
calls = []
class Gadget(CpuPlatform):
    {version}
    def pre_register_and_update(self): calls.append(1)
class NoPlatform: ...
def there(): return {path!r}
"""


def install_platform(site: Path, package: str, path: Any = None, version: str = "contract_version = 1") -> None:
    """A package with one platform plugin, a CPU by another name; `version`: lines of its class's body."""
    module = package.replace("-", "_")
    code = PLATFORM.format(version=version, path=path or f"{module}.Gadget")
    install(site, package, code, **{f"platform_plugins__{module}": "there"})


def pip_install(source: Path, target: Path, *names: str) -> None:
    """Packages of `tests/plugins/`, copied to `source`, installed into the folder `target`."""
    for name in names:
        shutil.copytree(ROOT / "tests" / "plugins" / name, source / name)
    offline = ["--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "--quiet"]
    packages = [str(source / name) for name in names]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(target), *packages]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]


def in_plugin_process(installed: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`code` in an interpreter of its own that sees the packages in `installed`; of plugins it may load acme."""
    path = f"import sys; sys.path.append({str(installed)!r})\n"
    return python("-c", path + code, env={"LLM_PLUGINS": "acme", **environment})
