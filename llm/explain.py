"""The implementation of each part of a loaded model, and why: `LLM.explain()` and `python -m llm explain`.

Nothing is decided here: every reason was recorded where the choice was made (`CustomOp.binding`,
`QuantizeMethodBase.reason`, `EngineConfig.reasons`).
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from llm.base.custom_op import CustomOp, PluggableLayer, replaced_class, replacement_reason
from llm.base.watch import patches_of
from llm.config.engine import EngineConfig
from llm.kernels.backend import OPERATIONS, Backend
from llm.layers.attention import AttentionBackend
from llm.output_formats import aligned, html_table
from llm.platforms.interface import Platform
from llm.plugins import plugin_of

if TYPE_CHECKING:
    from llm.quantization.base import QuantizeMethodBase

_UNQUANTIZED = "unquantized"
_EXPERT = re.compile(r"\.experts\.\d+\.")
HEADINGS = ("kind", "name", "count", "class", "runs", "why")
KINDS = (
    *("platform", "operation", "model", "model runner", "weights", "drafts"),
    *("attention", "CustomOp", "PluggableLayer", "quant method", "patch"),
)


@dataclass(frozen=True)
class Part:
    """One table row: identical parts of a model.

    Attributes:
        kind: one of `KINDS`.
        name: the registered name, or the class of the layers of a quant method.
        count: number of instances in the model.
        implementation: name of the class in use.
        runs: the bound method, or the quantization scheme.
        reason: why; for a quant method of a quantized model also the layers.
    """

    kind: str
    name: str
    count: int
    implementation: str
    runs: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """The parts of a loaded model. `str()` is a table; a notebook shows it as HTML.

    Attributes:
        parts: in the order of `KINDS`.
        unused: operations that `custom_ops` names but the model does not have.
    """

    parts: tuple[Part, ...]
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = aligned([HEADINGS, *(tuple(map(str, astuple(part))) for part in self.parts)])
        return "\n".join([*lines, *self._notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The HTML for Jupyter."""
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return f"{html_table(HEADINGS, map(astuple, self.parts))}{notes}"

    def _notes(self) -> list[str]:
        return [f"custom_ops names {', '.join(self.unused)}: this model has no such operation."] if self.unused else []


def explain_runner(
    runner_class: type,
    platform: Platform,
    backend: Backend,
    model: nn.Module,
    config: EngineConfig,
    offloaded: str = "",
) -> Explanation:
    """The platform, the operations that its backend has no kernel for, the model, the model runner's class, a file of
    weights, what drafts, and the parts of the model.

    `offloaded`: where the weights are, if a file has some.
    """
    reasons = config.reasons
    around: tuple[Part, ...] = (
        Part("platform", platform.name, 1, type(platform).__name__, platform.device_type, reasons["device"]),
        *_operations(backend),
        Part("model", config.model_config.model_type, 1, type(model).__name__, "forward", _origin(type(model))),
        Part("model runner", "model_runner", 1, runner_class.__name__, "execute", _origin(runner_class)),
    )
    if offloaded:
        folder = config.offload_config.offload_folder
        around += (Part("weights", "offload_weights", 1, "WeightFile", folder, offloaded),)
    drafts = config.speculative_config
    if drafts is not None:
        around += (Part("drafts", "speculative_config", 1, drafts.method, str(drafts), reasons["speculative_config"]),)
    explained = explain_model(model, config)
    return replace(explained, parts=around + explained.parts)


def _operations(backend: Backend) -> list[Part]:
    """Those that PyTorch computes."""
    if len(backend.lacks) == len(OPERATIONS):
        return [Part("operation", "all", len(OPERATIONS), backend.name, backend.source("linear"), backend.reason)]
    why = f"the {backend.name} backend has no kernel for it"
    return [Part("operation", name, 1, backend.name, backend.source(name), why) for name in backend.lacks]


def explain_model(model: nn.Module, config: EngineConfig) -> Explanation:
    """The parts of `model`; tied and shared modules count once."""
    found: dict[tuple[str, str, str, str, str], list[str]] = {}
    for path, module in model.named_modules():
        for described in _describe(module):
            found.setdefault(described, []).append(path)
    is_quantized = any(kind == "quant method" and runs != _UNQUANTIZED for kind, _, _, runs, _ in found)
    parts = []
    for (kind, name, cls, runs, reason), paths in found.items():
        where = f"; {paths_in_short(paths)}" if is_quantized and kind == "quant method" else ""
        parts.append(Part(kind, name, len(paths), cls, runs, reason + where))
    patches = Counter((name, *_function(found)) for name, found in patches_of(model.modules()))
    parts += [
        Part("patch", name, count, what, "in every step", f"{of}; steps are not recorded")
        for (name, what, of), count in patches.items()
    ]
    parts.sort(key=lambda part: (KINDS.index(part.kind), part.name, part.implementation))
    present = {part.name for part in parts}
    unused = tuple(name for name in config.compilation_config.mentioned if name not in present)
    return Explanation(tuple(parts), unused)


def paths_in_short(paths: Sequence[str]) -> str:
    """Join dotted paths that differ in their first number: "l.0.mlp", "l.1.mlp" -> "l.0-1.mlp".

    The number of an expert becomes a *.
    """
    alike: dict[str, list[int]] = {}
    for path in dict.fromkeys(_EXPERT.sub(".experts.*.", path) for path in paths):
        segments = path.split(".")
        place = next((place for place, segment in enumerate(segments) if segment.isdecimal()), None)
        if place is None:
            alike[path] = []
        else:
            key = ".".join([*segments[:place], "{}", *segments[place + 1 :]])
            alike.setdefault(key, []).append(int(segments[place]))
    return ", ".join(key.format(_ranges(numbers)) if numbers else key for key, numbers in alike.items())


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 -> "1-3,7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _describe(module: nn.Module) -> Iterator[tuple[str, str, str, str, str]]:
    """(kind, name, class, runs, reason) of a module and of its quant method."""
    cls = type(module)
    if isinstance(module, CustomOp):
        yield "CustomOp", _name(cls), cls.__name__, module.binding.method, module.binding.reason
    elif isinstance(module, PluggableLayer):
        runs = "forward_oot" if cls.forward is getattr(cls, "forward_oot", None) else module.called_by
        why = replacement_reason(cls) if replaced_class(cls) else "in-tree"
        yield "PluggableLayer", _name(cls), cls.__name__, runs, why
    backend = getattr(module, "backend", None)
    if isinstance(backend, AttentionBackend):
        yield "attention", cls.__name__, type(backend).__name__, "attend", backend.reason
    method = getattr(module, "quant_method", None)
    if method is not None:
        yield "quant method", cls.__name__, type(method).__name__, _scheme(method), _quant_reason(method)


def _origin(cls: type) -> str:
    """The origin of a class: a plugin, this package, or its module."""
    plugin = plugin_of(cls)
    return f"plugin {plugin}" if plugin else "in-tree" if cls.__module__.startswith("llm.") else cls.__module__


def _function(found: object) -> tuple[str, str]:
    """The name of a function, and the module whose code it is."""
    module = getattr(found, "__globals__", {}).get("__name__") or getattr(found, "__module__", "")
    return getattr(found, "__qualname__", type(found).__name__), f"set by {module}" if module else "set by hand"


def _name(cls: type) -> str:
    """The registered name, inherited if need be; else the name of the class, or of the class that it replaces."""
    registered: str = getattr(cls, "name", "")
    return registered or (replaced_class(cls) or cls).__name__


def _scheme(method: QuantizeMethodBase) -> str:
    return getattr(method, "scheme", "") or _UNQUANTIZED


def _quant_reason(method: QuantizeMethodBase) -> str:
    known = (getattr(method, name, "") for name in ("reason", "source", "kernel"))
    return ", ".join(item for item in known if item) or "no quantization asked for"
