"""`structural_tag`: free text in which a beginning, such as `<f>`, is followed by JSON of a schema and by an end.

Owns reading vLLM's first form, `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and its grammar; the
second, `{"format": {...}}`, is `tag_format.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType

from llm.base.types import JsonObject
from llm.sampling.structured.messages import first_line, unusable
from llm.sampling.structured.schema import check_size, read_schema
from llm.sampling.structured.tag_format import format_grammar, read_format

_FORM = "it must be {'structures': [{'begin': ..., 'schema': ..., 'end': ...}], 'triggers': [...]} or {'format': ...}"


def read_tags(value: object, disable_additional_properties: bool) -> list[JsonObject] | JsonObject:
    """[{"trigger", "begin", "schema", "end"}], or a format; raises `ValidationError` if the value has another form."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise unusable("structural_tag", value, f"it is no JSON ({first_line(error)})") from error
    check_size("structural_tag", parsed)
    if not isinstance(parsed, Mapping):
        raise unusable("structural_tag", value, _FORM)
    if "format" in parsed:
        return read_format(parsed["format"], disable_additional_properties)
    structures, triggers = parsed.get("structures"), parsed.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        raise unusable("structural_tag", value, _FORM)
    return [_read_tag(item, triggers, disable_additional_properties) for item in structures]


def _read_tag(item: object, triggers: list[object], disable_additional_properties: bool) -> JsonObject:
    begin = item.get("begin") if isinstance(item, Mapping) else None
    end = item.get("end") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or not isinstance(begin, str) or not isinstance(end, str) or "schema" not in item:
        raise unusable("structural_tag", item, _FORM)
    trigger = next((text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), None)
    if trigger is None:
        raise unusable("structural_tag", item, f"{begin!r} starts with none of the triggers")
    schema = read_schema(item["schema"], disable_additional_properties)
    if not isinstance(schema, dict):
        raise unusable("structural_tag", item, "a schema is a JSON object")
    return {"trigger": trigger, "begin": begin, "schema": schema, "end": end}


def tags_grammar(
    llguidance: ModuleType,
    tags: list[JsonObject] | JsonObject,
    settings: JsonObject,
    special_tokens: Mapping[str, int],
) -> str:
    """The tags, or the format, in llguidance's form.

    Args:
        settings: of the JSON's form.
        special_tokens: name -> id; triggers among them are tokens, all others are text.
    """
    if isinstance(tags, dict):
        return llguidance.grammar_from("lark", format_grammar(tags, settings, special_tokens))
    made = [
        llguidance.StructTag(
            trigger=tag["trigger"],
            begin=tag["begin"],
            grammar={**tag["schema"], "x-guidance": settings},
            end=tag["end"],
        )
        for tag in tags
    ]
    are_tokens = all(tag["trigger"] in special_tokens for tag in tags)
    grammar: str = llguidance.StructTag.to_grammar(made, assume_special=are_tokens)
    return llguidance.grammar_from("grammar", grammar)
