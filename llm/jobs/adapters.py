"""Which adapter a row of a job has: `lora_modules` and `lora_request` of `LLM.run`.

Owns the names that rows give. A row of a batch names its adapter as `model`, as for vLLM's server; a plain row in the
column `lora_name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llm.base.checks import refuse
from llm.base.text import show
from llm.errors import ValidationError, nearest
from llm.inputs import LoRARequest

COLUMN = "lora_name"


@dataclass(frozen=True)
class JobAdapters:
    """The adapters of a job.

    Attributes:
        modules: by the name that a row gives; {}: rows name none.
        every: the adapter of all rows; None: none.
        base: names of the model itself.
    """

    modules: Mapping[str, LoRARequest] = field(default_factory=dict)
    every: LoRARequest | None = None
    base: tuple[str, ...] = ()

    @classmethod
    def of(cls, lora_modules: object, lora_request: object, base: tuple[str, ...]) -> JobAdapters:
        """From the arguments of `LLM.run`.

        Raises:
            ValidationError: one is wrong, or both are given.
        """
        if lora_request is not None and not isinstance(lora_request, LoRARequest):
            refuse(
                "lora_request", lora_request, "one LoRARequest for all rows, or None; rows name those of lora_modules"
            )
        if lora_request is not None and lora_modules:
            refuse("lora_request", lora_request.lora_name, "None where lora_modules is given")
        if not isinstance(lora_modules, Mapping | None):
            refuse("lora_modules", lora_modules, "a dict from the names of adapters to their folders, or None")
        modules = {}
        for number, (name, path) in enumerate((lora_modules or {}).items(), 1):
            if not isinstance(name, str) or not isinstance(path, str | Path) or name in base:
                refuse("lora_modules", {name: path}, "names, none of them the model's, and folders of adapters")
            modules[name] = LoRARequest(name, number, str(path))
        return cls(modules, lora_request, base)

    def all(self) -> list[LoRARequest]:
        return [*self.modules.values(), *([] if self.every is None else [self.every])]

    def named(self, name: object, field: str) -> LoRARequest | None:
        """The adapter of a row that gives this name; None: it has none.

        Raises:
            ValidationError: there is no adapter of that name.
        """
        if not self.modules:
            return self.every
        if name is None or name == "" or name in self.base:
            return None
        if not isinstance(name, str) or name not in self.modules:
            known = [*self.base[:1], *self.modules]
            raise ValidationError(
                f"{field} must be the model, {self.base[0]!r}, or one of lora_modules, "
                f"{', '.join(map(repr, self.modules))}; got {show(name)}.{nearest(str(name), known)}",
                parameter=field,
                value=name,
            )
        return self.modules[name]
