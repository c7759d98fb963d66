"""`import llm` is light, its public names resolve, and a foreign `llm` in the same environment is announced."""

from __future__ import annotations

import ast
import gc
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import llm
from llm.base import conflict

ROOT = Path(__file__).resolve().parent.parent


def modules_after(code: str) -> set[str]:
    """Return the modules that `code` adds to a fresh interpreter."""
    script = f"import sys; before = set(sys.modules)\n{code}\nprint(sorted(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(ast.literal_eval(result.stdout))


def third_party(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"llm"}


def test_import_llm_loads_the_standard_library_only() -> None:
    loaded = modules_after("import llm")
    assert third_party(loaded) == set()  # no torch, transformers, numpy or tokenizers
    ours = {name for name in loaded if name.startswith("llm")}
    assert ours == {"llm", "llm.base", "llm.base.conflict", "llm.base.vllm_paths"}


def test_the_check_sees_third_party_modules() -> None:
    assert "hypothesis" in third_party(modules_after("import llm, hypothesis"))


def test_sampling_params_are_plain_data() -> None:
    assert "torch" not in modules_after("from llm import SamplingParams; SamplingParams(temperature=0.0)")


def test_main_names_import() -> None:
    loaded = modules_after("from llm import LLM, SamplingParams")
    assert {"llm.llm", "llm.sampling_params"} <= loaded


@pytest.mark.parametrize("name", llm.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(llm, name) is not None
    assert name in dir(llm)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_name_leaves_the_garbage_collector_as_it_was(enabled: bool) -> None:
    llm.__dict__.pop("LLM", None)
    (gc.enable if enabled else gc.disable)()
    try:
        assert llm.LLM and gc.isenabled() == enabled
        with pytest.raises(AttributeError):
            llm.NO_SUCH_NAME  # noqa: B018
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_an_unknown_name_raises_naming_it() -> None:
    with pytest.raises(AttributeError, match="'no_such_name'"):
        llm.no_such_name  # noqa: B018
    with pytest.raises(ImportError, match="no_such_name"):
        from llm import no_such_name  # noqa: F401


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package folder of an installation with no conflict: our metadata, and that of the other package's plugins."""
    site = tmp_path / "site-packages"
    for name in ("llm", "offline_llm-0.1.0.dist-info", "llm_cluster-1.0.dist-info", "llm-cluster-1.0.dist-info"):
        (site / name).mkdir(parents=True)
    return site / "llm"


def test_no_conflict(installed: Path) -> None:
    assert conflict.find(str(installed), [str(installed.parent), "", "/no/such/folder", sys.executable]) is None


@pytest.mark.parametrize("name", ["llm-0.36.dist-info", "llm-1.0a2.dist-info", "llm-0.3-py3.11.egg-info"])
def test_metadata_beside_the_package_is_found(installed: Path, name: str) -> None:
    (installed.parent / name).mkdir()
    assert conflict.find(str(installed), []) == f"{name} in {installed.parent}"


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages", "site-packages/"])
def test_metadata_elsewhere_on_the_path_is_found(installed: Path, tmp_path: Path, folder: str) -> None:
    # An editable install: the package folder is in a source tree, the other package in the site folder.
    (tmp_path / "other" / folder / "llm-0.36.dist-info").mkdir(parents=True)
    assert conflict.find(str(installed), [f"{tmp_path}/other/{folder}"]) == (
        f"llm-0.36.dist-info in {tmp_path}/other/{folder}"
    )


@pytest.mark.parametrize("name", conflict.FOREIGN_FILES)
def test_files_of_the_other_package_inside_ours_are_found(installed: Path, name: str) -> None:
    (installed / name).touch()
    assert conflict.find(str(installed), []) == f"{name} in {installed}"
    assert not (Path(llm.__file__).parent / name).exists()


def test_the_warning_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflict, "find", lambda *_: "llm-0.36.dist-info in /site-packages")
    with pytest.warns(UserWarning, match=r"unrelated.*llm-0\.36.*uninstall -y llm offline-llm.*separate virtual"):
        conflict.check()


def test_the_warning_is_shown_once_by_both_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflict, "find", lambda *_: "anything")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            conflict.check()
    assert len(shown) == 1


def test_importing_llm_warns(tmp_path: Path) -> None:
    (tmp_path / "site-packages" / "llm-0.36.dist-info").mkdir(parents=True)
    code = f"import sys; sys.path.append({str(tmp_path / 'site-packages')!r}); import llm"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr.count("The unrelated PyPI package `llm`") == 1


def test_the_other_package_installed_last_warns_through_the_models(tmp_path: Path) -> None:
    # Its __init__.py has replaced ours and imports `.models`: a module there, our package here.
    package = tmp_path / "llm"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("from .models import EmbeddingModel\n")
    (package / "hookspecs.py").touch()
    (package / "base").mkdir()
    for name in ("base/__init__.py", "base/conflict.py", "models/__init__.py"):
        shutil.copy(ROOT / "llm" / name, package / name)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", "import llm"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "EmbeddingModel" in result.stderr.splitlines()[-1]
    assert result.stderr.count("The unrelated PyPI package `llm`") == 1
