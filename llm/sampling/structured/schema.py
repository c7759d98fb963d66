"""Reads the JSON schema of a request into plain data that llguidance and `json_schema.py` take alike.

Owns the limits of its size, and its rewriting: patterns in ASCII classes, closed objects, keywords that say nothing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction

from llm.errors import ValidationError
from llm.sampling.structured.messages import first_line, unusable
from llm.sampling.structured.regex import ascii_classes

_DEEPEST = 127  # nested lists and dicts; llguidance reads no more
_MOST_VALUES = 500_000
_LARGEST_WHOLE = 10**40  # written with all its digits though it was given with a point or an exponent
_OF_DATA = frozenset({"const", "enum", "default", "examples", "example"})  # their values are no schemas
_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def read_schema(given: object, closed: bool) -> object:
    """The schema as Python objects, from a dict, JSON text or a pydantic model.

    Args:
        closed: objects allow no additional properties unless the schema says so.

    Raises:
        ValidationError: it is not JSON, or too large.
    """
    if hasattr(given, "model_json_schema"):
        given = given.model_json_schema()
    if not isinstance(given, str):
        check_size("json", given)
    try:
        schema = json.loads(given if isinstance(given, str) else json.dumps(given), parse_float=_number)
    except (TypeError, ValueError) as error:
        raise unusable("json", given, f"it is not JSON ({first_line(error)})") from error
    except RecursionError:
        raise _too_deep("json") from None
    check_size("json", schema)
    if not isinstance(schema, dict | bool):
        raise unusable("json", given, "a schema is a JSON object")
    return _rewritten(schema, closed)


def _number(text: str) -> int | float:
    """A number with a point or an exponent; a whole one is an integer, for they are equal (1.0, 1e20, -0.0)."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is out of range")
    exact = Decimal(text)
    return int(exact) if abs(exact) < _LARGEST_WHOLE and exact == exact.to_integral_value() else value


def check_numbers(schema: object, why: str) -> None:
    """Refuse integers that llguidance, which reads them as floats, would write as others; `why` it reads the schema."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, int) and (abs(value) > sys.float_info.max or int(float(value)) != value):
            reason = f"the integer {value} is no float, and {why}"
            raise unusable("json", schema, reason)
        left += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []


def check_size(kind: str, schema: object) -> None:
    """Refuse what nests too deeply, itself included, or has too many values, shared ones counted each time."""
    left: list[tuple[object, int]] = [(schema, 1)]
    count = 0
    while left:
        value, depth = left.pop()
        if not isinstance(value, (dict, list, tuple)):
            continue
        if depth > _DEEPEST:
            raise _too_deep(kind)
        inner = value.values() if isinstance(value, dict) else value
        count += len(inner)
        if count > _MOST_VALUES:
            raise unusable(kind, "...", f"it has more than {_MOST_VALUES} values")
        left += [(item, depth + 1) for item in inner]


def _too_deep(kind: str) -> ValidationError:
    return unusable(kind, "...", f"it is nested too deeply: more than {_DEEPEST} lists and objects inside each other")


def _rewritten(schema: object, closed: bool) -> object:
    """`\\d`, `\\w`, `\\s` of patterns as ASCII classes; with `closed`, objects allow no additional properties."""
    if isinstance(schema, list):
        return [_rewritten(item, closed) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _rewritten_value(key, value, closed) for key, value in schema.items()}
    if isinstance(schema.get("pattern"), str) and schema.get("type") == "string":
        result["pattern"] = ascii_classes(schema["pattern"])
    if closed and schema.get("type") == "object":
        result.setdefault("additionalProperties", False)
    for keyword in ("minProperties", "maxProperties", "multipleOf"):
        if keyword in result and _says_nothing(keyword, result):
            del result[keyword]
    return result


def _rewritten_value(key: str, value: object, closed: bool) -> object:
    if key in _OF_DATA:
        return value
    if key in _OF_NAMES and isinstance(value, dict):
        return {name: _rewritten(item, closed) for name, item in value.items()}
    return _rewritten(value, closed)


def _says_nothing(keyword: str, schema: Mapping[str, object]) -> bool:
    """True if whatever the other keywords admit meets this one."""
    bound = schema[keyword]
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
        return False
    if keyword == "multipleOf":
        types = schema.get("type")
        kinds = types if isinstance(types, list) else [types]
        # Every integer is a multiple of 1, and of 1 divided by an integer.
        return "integer" in kinds and "number" not in kinds and bound > 0 and Fraction(str(bound)).numerator == 1
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    if keyword == "minProperties":
        return bound <= len({name for name in required if isinstance(name, str)})
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return is_closed and bound >= len(properties)
