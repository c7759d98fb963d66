"""The methods of `LLM` that load and unload logits processors between calls.

Owns keeping the loaded classes of the preprocessor and the runner the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm.api.host import Host
from llm.errors import ValidationError
from llm.sampling.logits_processors.interface import LogitsProcessor
from llm.sampling.logits_processors.loading import load_logits_processor, qualified_name


class Processors:
    def add_logits_processor(self: Host, processor: type[LogitsProcessor] | str) -> None:
        """Load a logits processor, a class or `"module:Class"`, for the following calls.

        It replaces a loaded class with the same module and name, so a notebook can redefine a class and add it again. A
        suspended stream continues with the new one. Raises as `LLM(logits_processors=...)`.
        """
        added = load_logits_processor(processor)
        with self._exclusive():
            self._begin()
            current = list(self._preprocessor.logits_processors)
            names = [qualified_name(kind) for kind in current]
            if qualified_name(added) in names:
                current[names.index(qualified_name(added))] = added
            else:
                current.append(added)
            _set(self, current)

    def remove_logits_processor(self: Host, processor: type[LogitsProcessor] | str) -> None:
        """Unload a logits processor, given by name or class; raises `ValidationError` if it is not loaded."""
        with self._exclusive():
            self._begin()
            current = self._preprocessor.logits_processors
            name = processor if isinstance(processor, str) else qualified_name(processor)
            kept = [kind for kind in current if qualified_name(kind) != name]
            if len(kept) == len(current):
                loaded = ", ".join(map(qualified_name, current)) or "none"
                raise ValidationError(
                    f"{name} is not loaded; loaded are: {loaded}.", parameter="processor", value=processor
                )
            _set(self, kept)

    @property
    def logits_processors(self: Host) -> list[type[LogitsProcessor]]:
        """The loaded classes, in the order they are applied."""
        self._open_engine()
        return list(self._preprocessor.logits_processors)


def _set(llm: Host, classes: Sequence[type[LogitsProcessor]]) -> None:
    llm._open_engine().runner.set_processors(classes)
    llm._preprocessor.logits_processors = classes
