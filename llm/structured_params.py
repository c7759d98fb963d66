"""`StructuredOutputsParams`: the form of an answer, under vLLM's names. `llm/sampling/structured` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llm.base.checks import refuse
from llm.base.names import known_fields
from llm.config.elsewhere import STRUCTURED


@known_fields(STRUCTURED)
@dataclass
class StructuredOutputsParams:
    """A constraint on the output: exactly one of `json` (a schema, as dict or text), `regex`, `choice`, `grammar`,
    `json_object` or `structural_tag` (`{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`: free text in
    which each beginning is followed by JSON of its schema and its end; or `{"format": {"type": ...}}`, xgrammar's
    formats: tag, triggered_tags, tags_with_separator, sequence, or, json_schema, regex, const_string, any_text). The
    other fields are settings of these, as in vLLM.

    JSON has no whitespace, whatever `disable_any_whitespace` says. `\\d`, `\\w` and `\\s` match ASCII only. Needs
    llguidance. `CompletionOutput.structured` holds the outcome.
    """

    json: str | Mapping[str, object] | None = None
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
