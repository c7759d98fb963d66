"""`structural_tag`: free text in which a beginning, such as `<f>`, is followed by JSON of a schema and by an end.

Owns reading vLLM's first form, `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, as one of the second,
`{"format": {...}}`, which is `tag_format.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from llm.base.types import JsonObject
from llm.sampling.structured.messages import first_line, unusable
from llm.sampling.structured.schema import check_size
from llm.sampling.structured.tag_format import read_format

_FORM = "it must be {'structures': [{'begin': ..., 'schema': ..., 'end': ...}], 'triggers': [...]} or {'format': ...}"


def read_tags(value: object, disable_additional_properties: bool) -> JsonObject:
    """The format, or the structures as one; raises `ValidationError` if the value has another form."""
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
    given = [text for text in triggers if isinstance(text, str) and text]
    tags = [_read_tag(item, given) for item in structures]
    used = dict.fromkeys(next(text for text in given if tag["begin"].startswith(text)) for tag in tags)
    return read_format({"type": "triggered_tags", "triggers": list(used), "tags": tags}, disable_additional_properties)


def _read_tag(item: object, triggers: list[str]) -> JsonObject:
    """The structure as a tag of a format."""
    begin = item.get("begin") if isinstance(item, Mapping) else None
    end = item.get("end") if isinstance(item, Mapping) else None
    if not isinstance(item, Mapping) or not isinstance(begin, str) or not isinstance(end, str) or "schema" not in item:
        raise unusable("structural_tag", item, _FORM)
    if not begin.startswith(tuple(triggers)):
        raise unusable("structural_tag", item, f"{begin!r} starts with none of the triggers")
    if not isinstance(item["schema"], dict):
        raise unusable("structural_tag", item, "a schema is a JSON object")
    content = {"type": "json_schema", "json_schema": item["schema"]}
    return {"type": "tag", "begin": begin, "content": content, "end": end}
