"""Reads the JSON schema of a request into plain data that llguidance and `json_schema.py` take alike.

Owns the limits of its size, and its rewriting: patterns in ASCII classes, closed objects, keywords that say nothing,
and numbers of properties as alternatives of objects.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import combinations

from llm.errors import ValidationError
from llm.sampling.structured.messages import first_line, unusable
from llm.sampling.structured.regex import ascii_classes

_DEEPEST = 127  # nested lists and dicts; llguidance reads no more
_MOST_VALUES = 500_000
_LARGEST_WHOLE = 10**40  # written with all its digits though it was given with a point or an exponent
_OF_DATA = frozenset({"const", "enum", "default", "examples", "example"})  # their values are no schemas
# Properties of all alternatives together that stand for a number of properties.
_MOST_ALTERNATIVES = 4096
# What an object with a number of properties may say besides, to be written as alternatives; the first stay outside.
_BESIDE = frozenset({"$schema", "$id", "$defs", "definitions", "title", "description", "default", "examples"})
_COUNTED = frozenset({"type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"})
_COUNTS = frozenset({"minProperties", "maxProperties"})
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
    rewritten = _rewritten(schema, closed)
    if _refers_inside(schema):
        return rewritten
    counted = _counted(rewritten)
    try:
        check_size("json", counted)
    except ValidationError:  # alternatives inside of alternatives
        return rewritten
    return counted


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


def _refers_inside(schema: object) -> bool:
    """Does a reference name a place that `_counted` may move?"""
    if isinstance(schema, list):
        return any(map(_refers_inside, schema))
    if not isinstance(schema, dict):
        return False
    target = schema.get("$ref")
    is_inside = isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/"))
    return is_inside or any(map(_refers_inside, schema.values()))


def _counted(schema: object) -> object:
    """A number of optional properties of a closed object as alternatives, which have each number of them: a grammar
    does not count."""
    if isinstance(schema, list):
        return [_counted(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _counted_value(key, value) for key, value in schema.items()}
    if result.get("type") != "object" or result.keys() - _BESIDE - _COUNTED or not result.keys() & _COUNTS:
        return result
    alternatives = _alternatives(result)
    if not alternatives:
        return result
    return {**{key: value for key, value in result.items() if key in _BESIDE}, "anyOf": alternatives}


def _counted_value(key: str, value: object) -> object:
    if key in _OF_DATA:
        return value
    if key in _OF_NAMES and isinstance(value, dict):
        return {name: _counted(item) for name, item in value.items()}
    return _counted(value)


def _alternatives(schema: Mapping[str, object]) -> list[object]:
    """Objects of which one fits exactly where `schema` does; none where it is not closed or they were too many."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return []
    if schema.get("additionalProperties") is not False:
        return []
    always = [name for name in properties if name in required]
    optional = [name for name in properties if name not in required]
    least, most = (
        schema.get(keyword, default) for keyword, default in (("minProperties", 0), ("maxProperties", 2**31))
    )
    if type(least) is not int or type(most) is not int or not set(map(str, required)) <= properties.keys():
        return []
    low, high = max(0, least - len(always)), min(len(optional), most - len(always))
    count = sum(math.comb(len(optional), size) for size in _sizes(low, high, len(optional)))
    if not 0 < count * (len(properties) + 1) <= _MOST_ALTERNATIVES:
        return []
    found: list[object] = []
    for needed, allowed in _choices(optional, low, high):
        kept = {name: value for name, value in properties.items() if name in allowed or name in always}
        names = [name for name in properties if name in needed or name in always]
        found.append({"type": "object", "properties": kept, "required": names, "additionalProperties": False})
    return found


def _sizes(low: int, high: int, count: int) -> list[int]:
    """Of the choices that tell `low` to `high` of `count` apart: one size is enough where a bound says nothing."""
    if low > high:
        return []
    return [low] if high == count else [high] if low == 0 else list(range(low, high + 1))


def _choices(names: Sequence[str], low: int, high: int) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """(names that must be there, names that may be there) of each alternative."""
    for size in _sizes(low, high, len(names)):
        for chosen in combinations(names, size):
            yield chosen if low else (), names if high == len(names) else chosen


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
