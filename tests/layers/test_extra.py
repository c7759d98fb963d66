"""Operations that no model here uses are in `layers/extra`, and those that one uses are not."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import llm.layers
from llm.base.custom_op import op_registry

ROOT = Path(__file__).resolve().parent.parent.parent
for _module in pkgutil.walk_packages(llm.layers.__path__, "llm.layers."):
    importlib.import_module(_module.name)

# Other layers build these; models name only those.
INSIDE = {
    *("FusedMoEModularMethod", "GroupedTopk", "TopKRouter", "UnquantizedFusedMoEMethod"),
    "Mixer2RMSNormGated",
}


def unused(models: str) -> set[str]:
    """Registered classes that the text of all models does not name."""
    classes = {cls.__name__ for cls in op_registry.values() if cls.__module__.startswith("llm.")}
    return {name for name in classes if not re.search(rf"\b{name}\b", models)}


def test_an_operation_is_in_extra_where_no_model_uses_it() -> None:
    models = "\n".join(path.read_text("utf-8") for path in (ROOT / "llm" / "models").rglob("*.py"))
    extra = {cls.__name__ for cls in op_registry.values() if cls.__module__.startswith("llm.layers.extra.")}
    assert unused(models) - INSIDE == extra
    assert unused(models.replace("NewGELU", "")) - INSIDE - extra == {"NewGELU"}
