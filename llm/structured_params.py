"""`StructuredOutputsParams`: the form of an answer, under vLLM's names. `llm/sampling/structured` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from llm.base.checks import refuse
from llm.base.names import known_fields
from llm.config.elsewhere import STRUCTURED


class Model(Protocol):
    """What is used of a pydantic model, the class."""

    @classmethod
    def model_json_schema(cls) -> dict[str, object]: ...
    @classmethod
    def model_validate_json(cls, json_data: str) -> object: ...


@known_fields(STRUCTURED)
@dataclass
class StructuredOutputsParams:
    """A constraint on the output: exactly one of `json` (a schema, as dict or text, or a pydantic model), `regex`,
    `choice`, `grammar`, `json_object` or `structural_tag` (`{"structures": [{"begin", "schema", "end"}], "triggers":
    [...]}`: free text in which each beginning is followed by JSON of its schema and its end; or `{"format": {"type":
    ...}}`, xgrammar's formats: tag, triggered_tags, tags_with_separator, sequence, or, json_schema, regex,
    const_string, any_text). The other fields are settings of these, as in vLLM.

    JSON has no whitespace, whatever `disable_any_whitespace` says. `\\d`, `\\w` and `\\s` match ASCII only. Needs
    llguidance. `CompletionOutput.structured` holds the outcome, and `CompletionOutput.parsed` a JSON answer as data.

    Of a pydantic model the field `json` has the schema, and `disable_additional_properties` is True: answers have the
    model's fields alone, unless it says `extra="allow"`. They are parsed by the model.
    """

    json: str | Mapping[str, object] | type[Model] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, object] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            refuse("structured_outputs", given, f"given exactly one of {', '.join(kinds)}")
        self._model: type[Model] | None = None
        if isinstance(self.json, type):
            if not hasattr(self.json, "model_json_schema"):
                refuse("json", self.json.__name__, "a schema, or a pydantic model")
            self._model = self.json if hasattr(self.json, "model_validate_json") else None
            self.json = self.json.model_json_schema()
            self.disable_additional_properties = True

    def parse(self, text: str) -> object:
        """A complete answer as data: an instance of the pydantic model, or what `json.loads` gives.

        None where the model's own validators refuse it, and of constraints other than JSON.
        """
        if self.json is None and self.json_object is None:
            return None
        try:
            return json.loads(text) if self._model is None else self._model.model_validate_json(text)
        except (ValueError, RecursionError):  # a pydantic ValidationError is a ValueError
            return None

    def __getstate__(self) -> dict[str, object]:
        """Without the model, which another process may not be able to import."""
        return {**vars(self), "_model": None}
