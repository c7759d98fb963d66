"""JSON schemas as data: reading a request's, and bringing it into alternatives of one type each.

A schema is read into plain data that llguidance and `json_schema.py` take alike, within limits of its size: patterns in
ASCII classes, closed objects, without keywords that say nothing. `Algebra` is what `allOf`, `anyOf`, `oneOf`, `not`,
`if` and references come to: alternatives.

An alternative is a dict of `type` and of that type's keywords, with the schemas of items and properties as they were
given, or joined by `allOf`. Beside JSON Schema's keywords it has `excluded` (values), `fraction` (numbers that are not
whole), `nomultiples` (divisors), `patterns`, `nopatterns`, `formats` (lists), `contained` (list of [schema, least,
most, the first item that counts]), `names` (the schemas of property names), `rules` (list of [names, the schema of each
property with such a name]) and `some` (list of [names, the schema of a property that must be there]), where names are
alternatives of strings; for `unevaluated*`, `evaluated` (what was looked at) and `closed` (all was).
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import product

from llm.base.types import JsonObject
from llm.errors import ValidationError
from llm.sampling.structured import first_line, unusable
from llm.sampling.structured.regex import FORMATS, UnknownLength, ascii_classes

_MOST_NESTED = 127  # nested lists and dicts; llguidance reads no more
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
        schema = json.loads(given if isinstance(given, str) else json.dumps(given), parse_float=_parsed_number)
    except (TypeError, ValueError) as error:
        raise unusable("json", given, f"it is not JSON ({first_line(error)})") from error
    except RecursionError:
        raise _too_deep("json") from None
    check_size("json", schema)
    if not isinstance(schema, dict | bool):
        raise unusable("json", given, "a schema is a JSON object")
    return _rewritten(schema, closed)


def _parsed_number(text: str) -> int | float:
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
        if depth > _MOST_NESTED:
            raise _too_deep(kind)
        inner = value.values() if isinstance(value, dict) else value
        count += len(inner)
        if count > _MOST_VALUES:
            raise unusable(kind, "...", f"it has more than {_MOST_VALUES} values")
        left += [(item, depth + 1) for item in inner]


def _too_deep(kind: str) -> ValidationError:
    return unusable(
        kind, "...", f"it is nested too deeply: more than {_MOST_NESTED} lists and objects inside each other"
    )


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


# --- Alternatives. ---

Alternative = JsonObject
TYPES = ("null", "boolean", "number", "string", "array", "object")
_MOST = 400  # alternatives of one schema
_MOST_PAIRS = 10_000  # of alternatives that are joined
_DEEPEST = 60  # schemas inside each other without a value between them


class Algebra:
    """Args:
    resolve: the schema that a reference names.
    """

    def __init__(self, resolve: Callable[[object], object]) -> None:
        self._resolve = resolve
        self._depth = 0
        self._is_watched = False  # is what was looked at asked for, by `unevaluated*`?

    def alternatives(self, schema: object) -> list[Alternative]:
        """What the schema admits is what one of these admits; none: nothing.

        Raises:
            UnknownLength: a keyword that has no such form, or too many alternatives.
        """
        self._depth += 1
        try:
            if self._depth > _DEEPEST:
                raise UnknownLength("a schema that refers to itself without a value between")
            return _distinct(self._alternatives(schema))
        finally:
            self._depth -= 1

    def _alternatives(self, schema: object) -> list[Alternative]:
        if schema is True or schema == {}:
            return [{"type": kind} for kind in TYPES]
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise UnknownLength(f"the schema {schema!r}")
        was_watched = self._is_watched
        self._is_watched = was_watched or "unevaluatedProperties" in schema or "unevaluatedItems" in schema
        try:
            found = self._own(schema)
            for part in self._applied(schema):
                found = self.both(found, part)
        finally:
            self._is_watched = was_watched
        for kind, keyword in (("object", "unevaluatedProperties"), ("array", "unevaluatedItems")):
            if keyword in schema:
                found = self.both(found, [self._rest(item, kind, schema[keyword]) for item in found], in_pairs=True)
        return found

    def _applied(self, schema: JsonObject) -> Iterator[list[Alternative]]:
        """The alternatives of each keyword that applies schemas to the same value."""
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in schema:
                raise UnknownLength(f"the keyword {keyword!r}")
        if "$ref" in schema:
            yield self.alternatives(self._resolve(schema["$ref"]))
        for inner in schema.get("allOf", ()):
            yield self.alternatives(inner)
        if "anyOf" in schema:
            yield self._any_of(list(schema["anyOf"]))
        if "oneOf" in schema:
            yield self._one_of(list(schema["oneOf"]))
        if "not" in schema:
            yield self.complement(schema["not"])
        if "if" in schema and ("then" in schema or "else" in schema or self._is_watched):
            condition = schema["if"]
            then = self.both(self.alternatives(condition), self.alternatives(schema.get("then", True)))
            yield then + self.both(self.complement(condition), self.alternatives(schema.get("else", True)))
        needed = {**schema.get("dependentRequired", {}), **schema.get("dependentSchemas", {})}
        for name, inner in {**schema.get("dependencies", {}), **needed}.items():
            there = {"allOf": [{"required": [name]}, {"required": inner} if isinstance(inner, list) else inner]}
            absent = {"type": "object", "properties": {name: False}}
            others = [{"type": kind} for kind in TYPES if kind != "object"]
            yield [*others, *self.alternatives(absent), *self.both([{"type": "object"}], self.alternatives(there))]

    def _any_of(self, schemas: list[object]) -> list[Alternative]:
        parts = [self.alternatives(inner) for inner in schemas]
        found = [item for part in parts for item in part]
        if self._is_watched:  # what each of those that fit has looked at counts
            together: list[list[Alternative]] = []
            for part in parts:
                together += [self.both(other, part) for other in together] + [part]
                if sum(map(len, together)) > _MOST:
                    raise UnknownLength("too many alternatives")
            found = [item for part in together for item in part]
        return found

    def _one_of(self, schemas: list[object]) -> list[Alternative]:
        parts = [self.alternatives(inner) for inner in schemas]
        found = []
        for index, part in enumerate(parts):
            for other, inner in enumerate(schemas):
                if other != index and self.both(part, parts[other]):
                    part = self.both(part, self.complement(inner))
            found += part
        return found

    def complement(self, schema: object) -> list[Alternative]:
        """The alternatives of all other values."""
        was_watched, self._is_watched = self._is_watched, False  # what does not fit has looked at nothing
        try:
            found = self.alternatives(True)
            for item in self.alternatives(schema):
                found = self.both(found, self._negated(item))
            return found
        finally:
            self._is_watched = was_watched

    def both(self, first: list[Alternative], second: list[Alternative], in_pairs: bool = False) -> list[Alternative]:
        """What an alternative of each admits; `in_pairs`: the first of each, the second of each, ..."""
        if len(first) * len(second) > _MOST_PAIRS:
            raise UnknownLength("too many alternatives")
        pairs = zip(first, second, strict=True) if in_pairs else product(first, second)
        joined = [self._join(a, b) for a, b in pairs]
        return _distinct([item for item in joined if item is not None])

    # --- One schema's own keywords ----------------------------------------------------------------------------------

    def _own(self, schema: JsonObject) -> list[Alternative]:
        given = schema.get("type", list(TYPES))
        types = given if isinstance(given, list) else [given]
        if not set(types) <= {*TYPES, "integer"} or not types:
            raise UnknownLength(f"the type {given!r}")
        found = []
        for kind in dict.fromkeys(types):
            if kind == "integer" and "number" in types:
                continue
            name = "number" if kind == "integer" else kind
            found.append({"type": kind, **getattr(self, f"_{name}")(schema)})
        if "enum" in schema:
            found = self.both(found, _of_values(schema["enum"]))
        if "const" in schema:
            found = self.both(found, [_of_value(schema["const"])])
        return [item for item in found if _can_be(item)]

    def _null(self, schema: JsonObject) -> Alternative:
        return {}

    def _boolean(self, schema: JsonObject) -> Alternative:
        return {}

    def _number(self, schema: JsonObject) -> Alternative:
        found: Alternative = {}
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            value = schema.get(keyword)
            if isinstance(value, bool) and keyword.startswith("exclusive"):  # of draft 4
                bound = keyword.removeprefix("exclusive").lower()
                if value and bound in schema:
                    found[keyword] = schema[bound]
                    found.pop(bound, None)
            elif value is not None:
                found[keyword] = _number(value)
        return found

    def _string(self, schema: JsonObject) -> Alternative:
        found: Alternative = {name: _count(schema[name]) for name in ("minLength", "maxLength") if name in schema}
        lists = {"patterns": [schema["pattern"]] if "pattern" in schema else []}
        lists["formats"] = [schema["format"]] if isinstance(schema.get("format"), str) else []
        return {**found, **{name: values for name, values in lists.items() if values}}

    def _array(self, schema: JsonObject) -> Alternative:
        found: Alternative = {
            keyword: _count(schema[keyword]) for keyword in ("minItems", "maxItems") if keyword in schema
        }
        items, prefix = schema.get("items"), schema.get("prefixItems", [])
        if isinstance(items, list):  # before draft 2020-12
            items, prefix = schema.get("additionalItems"), items
        if prefix:
            found["prefixItems"] = list(prefix)
            found["evaluated"] = [["prefix", len(prefix)]]
        if items is not None:
            found |= {"items": items, "closed": True}
        if schema.get("uniqueItems"):
            found["uniqueItems"] = True
        if "contains" in schema:
            least, most = schema.get("minContains", 1), schema.get("maxContains")
            found["contained"] = [[schema["contains"], _count(least), None if most is None else _count(most), 0]]
            found["evaluated"] = [*found.get("evaluated", []), ["contains", schema["contains"]]]
        return found

    def _object(self, schema: JsonObject) -> Alternative:
        found: Alternative = {
            keyword: _count(schema[keyword]) for keyword in ("minProperties", "maxProperties") if keyword in schema
        }
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        if properties:
            found["properties"] = dict(properties)
        rules = [[[{"type": "string", "patterns": [pattern]}], inner] for pattern, inner in patterns.items()]
        required = schema.get("required", [])
        if isinstance(required, list) and required:  # a bool in draft 3
            found["required"] = [str(name) for name in dict.fromkeys(required)]
        if "additionalProperties" in schema:
            rules.append([_other_names(properties, patterns), schema["additionalProperties"]])
            found["closed"] = True
        rules = [rule for rule in rules if not _is_true(rule[1])]
        if rules:
            found["rules"] = rules
        if properties or patterns:
            found["evaluated"] = [*(["name", name] for name in properties), *(["pattern", each] for each in patterns)]
        if "propertyNames" in schema:
            found["names"] = [schema["propertyNames"]]
        return found

    def _rest(self, item: Alternative, kind: str, schema: object) -> Alternative:
        """What `unevaluatedProperties` or `unevaluatedItems` says of what this one has not looked at."""
        if item["type"] != kind or item.get("closed"):
            return {"type": item["type"]}
        seen = item.get("evaluated", [])
        names, patterns, counts, contained = (
            [value for what, value in seen if what == wanted] for wanted in ("name", "pattern", "prefix", "contains")
        )
        if kind == "object":
            return {"type": kind, "rules": [[_other_names(names, patterns), schema]], "closed": True}
        count = max(counts, default=0)
        rest = {"anyOf": [*contained, schema]} if contained else schema
        first: Alternative = {"prefixItems": [True] * count} if count else {}
        return {"type": kind, **first, "items": rest, "closed": True}

    # --- Joining two alternatives -----------------------------------------------------------------------------------

    def _join(self, a: Alternative, b: Alternative) -> Alternative | None:
        """What both admit."""
        types = {a["type"], b["type"]}
        if len(types) > 1 and types != {"integer", "number"}:
            return None
        kind = "integer" if "integer" in types else a["type"]
        found: Alternative = {**a, **b, "type": kind}
        for keyword, choose in _BOUNDS.items():
            if keyword in a and keyword in b:
                found[keyword] = choose(a[keyword], b[keyword])
        for keyword in _LISTS:
            if keyword in a and keyword in b:
                found[keyword] = [*a[keyword], *(value for value in b[keyword] if value not in a[keyword])]
        if "enum" in a and "enum" in b:
            found["enum"] = [value for value in a["enum"] if any(_equal(value, other) for other in b["enum"])]
        if "multipleOf" in a and "multipleOf" in b:
            found["multipleOf"] = _common_multiple(a["multipleOf"], b["multipleOf"])
        if kind == "array":
            _join_items(a, b, found)
        if "properties" in a and "properties" in b:
            first, second = a["properties"], b["properties"]
            names = dict.fromkeys([*first, *second])
            found["properties"] = {name: all_of(first.get(name, True), second.get(name, True)) for name in names}
        return found if _can_be(found) else None

    # --- Complements ------------------------------------------------------------------------------------------------

    def _negated(self, item: Alternative) -> list[Alternative]:
        """The alternatives of all values that this one does not admit."""
        kind = item["type"]
        others: list[Alternative] = [{"type": other} for other in TYPES if other != kind and (kind != "integer")]
        if kind == "integer":
            others = [{"type": other} for other in TYPES if other != "number"]
            others.append({"type": "number", "fraction": True})
        given = set(item) - {"type", "closed", "evaluated", "names"}
        known = _NEGATED.get("number" if kind == "integer" else kind, {})
        if not given <= set(known):
            raise UnknownLength(f"'not' of {min(given - set(known))!r}")
        found = [{"type": kind, **other} for keyword in sorted(given) for other in known[keyword](item)]
        for schema in item.get("names", ()):
            names = [each for each in self.complement(schema) if each["type"] == "string"]
            found += [{"type": kind, "some": [[names, True]]}] if names else []
        return [*others, *(other for other in found if _can_be(other))]


def _inverse(values: object) -> list[Alternative]:
    return [{"excluded": values}]


def _not_prefix(item: Alternative) -> list[Alternative]:
    return [
        {"minItems": index + 1, "prefixItems": [*[True] * index, negation(schema)]}
        for index, schema in enumerate(item["prefixItems"])
        if not _is_true(schema)
    ]


def _not_items(item: Alternative) -> list[Alternative]:
    count = len(item.get("prefixItems", ()))
    if _is_true(item["items"]):
        return []
    if item["items"] is False:
        return [{"minItems": count + 1}]
    return [{"contained": [[negation(item["items"]), 1, None, count]]}]


def _not_contained(item: Alternative) -> list[Alternative]:
    found: list[Alternative] = []
    for schema, least, most, start in item["contained"]:
        if least == 1:
            first: Alternative = {"prefixItems": [True] * start} if start else {}
            found.append({**first, "items": negation(schema)})
        elif least > 1:
            found.append({"contained": [[schema, 0, least - 1, start]]})
        if most is not None:
            found.append({"contained": [[schema, most + 1, None, start]]})
    return found


def _not_properties(item: Alternative) -> list[Alternative]:
    return [
        {"required": [name], "properties": {name: negation(schema)}}
        for name, schema in item["properties"].items()
        if not _is_true(schema)
    ]


# --- Joining and negating. ---

# Type -> keyword -> the alternatives that violate it.
_NEGATED: Mapping[str, Mapping[str, Callable[[Alternative], list[Alternative]]]] = {
    "null": {},
    "boolean": {"enum": lambda item: [{"enum": [value for value in (True, False) if value not in item["enum"]]}]},
    "number": {
        "minimum": lambda item: [{"exclusiveMaximum": item["minimum"]}],
        "maximum": lambda item: [{"exclusiveMinimum": item["maximum"]}],
        "exclusiveMinimum": lambda item: [{"maximum": item["exclusiveMinimum"]}],
        "exclusiveMaximum": lambda item: [{"minimum": item["exclusiveMaximum"]}],
        "enum": lambda item: _inverse(item["enum"]),
        "excluded": lambda item: [{"enum": item["excluded"]}],
        "multipleOf": lambda item: [{"nomultiples": [item["multipleOf"]]}],
        "nomultiples": lambda item: [{"multipleOf": divisor} for divisor in item["nomultiples"]],
        "fraction": lambda item: [{"multipleOf": 1}],
    },
    "string": {
        "minLength": lambda item: [{"maxLength": item["minLength"] - 1}] if item["minLength"] else [],
        "maxLength": lambda item: [{"minLength": item["maxLength"] + 1}],
        "patterns": lambda item: [{"nopatterns": [pattern]} for pattern in item["patterns"]],
        "nopatterns": lambda item: [{"patterns": [pattern]} for pattern in item["nopatterns"]],
        "enum": lambda item: _inverse(item["enum"]),
        "excluded": lambda item: [{"enum": item["excluded"]}],
    },
    "array": {
        "minItems": lambda item: [{"maxItems": item["minItems"] - 1}] if item["minItems"] else [],
        "maxItems": lambda item: [{"minItems": item["maxItems"] + 1}],
        "prefixItems": _not_prefix,
        "items": _not_items,
        "contained": _not_contained,
    },
    "object": {
        "minProperties": lambda item: [{"maxProperties": item["minProperties"] - 1}] if item["minProperties"] else [],
        "maxProperties": lambda item: [{"minProperties": item["maxProperties"] + 1}],
        "required": lambda item: [{"properties": {name: False}} for name in item["required"]],
        "properties": _not_properties,
        "rules": lambda item: [{"some": [[names, negation(schema)]]} for names, schema in item["rules"]],
        "some": lambda item: [{"rules": [[names, negation(schema)]]} for names, schema in item["some"]],
    },
}
_BOUNDS: Mapping[str, Callable[..., object]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
# Keywords of which all that both say is said.
_LISTS = (
    *("patterns", "nopatterns", "formats", "contained", "names", "rules", "some", "required", "excluded"),
    *("nomultiples", "evaluated"),
)


def all_of(*schemas: object) -> object:
    """The schema of what all of these admit."""
    kept: list[object] = []
    for given in schemas:
        for schema in given["allOf"] if isinstance(given, dict) and set(given) == {"allOf"} else [given]:
            if schema is False:
                return False
            if not _is_true(schema) and not any(_is_same(schema, other) for other in kept):
                kept.append(schema)
    return {"allOf": kept} if len(kept) > 1 else kept[0] if kept else True


def negation(schema: object) -> object:
    if _is_true(schema) or schema is False:
        return schema is False
    return schema["not"] if isinstance(schema, dict) and set(schema) == {"not"} else {"not": schema}


def _is_same(schema: object, other: object) -> bool:
    """To Python, true and 1 are equal."""
    return schema == other and json.dumps(schema, sort_keys=True) == json.dumps(other, sort_keys=True)


def _is_true(schema: object) -> bool:
    return schema is True or schema == {}


def _other_names(names: Iterable[str], patterns: Iterable[str]) -> list[Alternative]:
    """The names of properties that are none of these and match none of the patterns."""
    lists = {"excluded": list(names), "nopatterns": list(patterns)}
    return [{"type": "string", **{keyword: values for keyword, values in lists.items() if values}}]


def is_named(name: str, names: Sequence[Alternative]) -> bool:
    """Is it one of these strings?"""
    return any(
        name in each["enum"]
        if "enum" in each
        else _fits(name, each)
        and all(re.fullmatch(FORMATS[known], name) for known in each.get("formats", ()) if known in FORMATS)
        for each in names
    )


def _join_items(a: Alternative, b: Alternative, found: Alternative) -> None:
    first, second = a.get("prefixItems", []), b.get("prefixItems", [])
    rest = all_of(a.get("items", True), b.get("items", True))
    if first or second:
        longest = max(len(first), len(second))
        padded = [
            [*prefix, *[item.get("items", True)] * (longest - len(prefix))]
            for prefix, item in ((first, a), (second, b))
        ]
        found["prefixItems"] = [all_of(x, y) for x, y in zip(*padded, strict=True)]
    if "items" in a or "items" in b:
        found["items"] = rest


def of_property(item: Alternative, name: str) -> object:
    """The schema of the property of this name."""
    said = [schema for names, schema in item.get("rules", ()) if is_named(name, names)]
    return all_of(item.get("properties", {}).get(name, True), *said)


def _finds(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text, re.ASCII) is not None
    except re.error as error:
        raise UnknownLength(f"the pattern {pattern!r}") from error


def _of_values(values: Sequence[object]) -> list[Alternative]:
    """The alternatives of exactly these values; strings are one, and so are numbers."""
    found = [_of_value(value) for value in values]
    for kind in ("string", "number", "boolean"):
        listed = [value for item in found if item["type"] == kind for value in item["enum"]]
        joined: list[Alternative] = [{"type": kind, "enum": listed}] if listed else []
        found = [*(item for item in found if item["type"] != kind), *joined]
    return found


def _of_value(value: object) -> Alternative:
    """The alternative of exactly this value."""
    if value is None:
        return {"type": "null"}
    if isinstance(value, bool):
        return {"type": "boolean", "enum": [value]}
    if isinstance(value, str):
        return {"type": "string", "enum": [value]}
    if isinstance(value, int | float):
        return {"type": "number", "enum": [value]}
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        found: Alternative = {"type": "array", "minItems": len(value), "maxItems": len(value)}
        return {**found, "prefixItems": items} if items else found
    if not isinstance(value, dict):
        raise UnknownLength(f"the value {value!r}")
    inner = {name: {"const": item} for name, item in value.items()}
    said: Alternative = {"properties": inner, "required": list(inner)} if inner else {}
    return {"type": "object", **said, "rules": [[_other_names(inner, []), False]]}


def _can_be(item: Alternative) -> bool:
    """False if it is plain that nothing is admitted; values of `enum` that are not admitted are taken out."""
    if "enum" in item:
        item["enum"] = [value for value in item["enum"] if _fits(value, item)]
        if not item["enum"]:
            return False
        # Whatever else is said of them has been looked at.
        for keyword in [keyword for keyword in item if keyword not in ("type", "enum", "formats")]:
            del item[keyword]
    pairs = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
    if any(low in item and high in item and item[low] > item[high] for low, high in pairs):
        return False
    if item["type"] in ("integer", "number"):
        return _has_numbers(item)
    if item["type"] == "object":
        required = item.get("required", ())
        if "maxProperties" in item and len(required) > item["maxProperties"]:
            return False
        return not any(_is_never(of_property(item, name)) for name in required)
    if item["type"] == "array":
        return not any(_is_never(schema) for schema in item.get("prefixItems", [])[: item.get("minItems", 0)])
    return True


def _is_never(schema: object) -> bool:
    """True if it is plain that no value fits, such as two different constants: the usual way to tell schemas apart."""
    parts = schema["allOf"] if isinstance(schema, dict) and set(schema) == {"allOf"} else [schema]
    values: list[object] | None = None
    types: set[str] | None = None
    for part in parts:
        if not isinstance(part, dict):
            if part is False:
                return True
            continue
        own = _values_of(part)
        if own is not None:
            values = own if values is None else [v for v in values if any(_equal(v, other) for other in own)]
        kinds = part.get("type")
        if isinstance(kinds, str):
            wide = {"number", "integer"} if kinds == "number" else {kinds}
            types = wide if types is None else types & wide
    for part in parts:
        if values and isinstance(part, dict) and set(part) == {"not"} and isinstance(part["not"], dict):
            gone = _values_of(part["not"]) if set(part["not"]) in ({"const"}, {"enum"}) else None
            values = [v for v in values if not any(_equal(v, other) for other in gone or ())]
    return values == [] or types == set()


def _values_of(schema: JsonObject) -> list[object] | None:
    """The values of `enum` or `const`."""
    own = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    return own if isinstance(own, list) else None


def _has_numbers(item: Alternative) -> bool:
    low = max((item[name] for name in ("minimum", "exclusiveMinimum") if name in item), default=-math.inf)
    high = min((item[name] for name in ("maximum", "exclusiveMaximum") if name in item), default=math.inf)
    if low > high or (item["type"] == "integer" and item.get("fraction")):
        return False
    return low < high or (item.get("exclusiveMinimum") != low and item.get("exclusiveMaximum") != high)


def _fits(value: object, item: Alternative) -> bool:
    """True if a string, number or bool is one of the alternative's."""
    if isinstance(value, bool):
        return True
    if isinstance(value, str):
        if not item.get("minLength", 0) <= len(value) <= item.get("maxLength", math.inf):
            return False
        if any(_finds(pattern, value) for pattern in item.get("nopatterns", ())):
            return False
        excluded = any(value == other for other in item.get("excluded", ()))
        return all(_finds(pattern, value) for pattern in item.get("patterns", ())) and not excluded
    if not isinstance(value, int | float):
        return False
    is_whole = value == int(value)
    if (item["type"] == "integer" and not is_whole) or (item.get("fraction") and is_whole):
        return False
    low, high = item.get("minimum", -math.inf), item.get("maximum", math.inf)
    above, below = item.get("exclusiveMinimum", -math.inf), item.get("exclusiveMaximum", math.inf)
    if not (low <= value <= high and above < value < below):
        return False
    if "multipleOf" in item and not _divides(item["multipleOf"], value):
        return False
    if any(_divides(divisor, value) for divisor in item.get("nomultiples", ())):
        return False
    return not any(_equal(value, other) for other in item.get("excluded", ()))


def _divides(divisor: float, value: float) -> bool:
    return (Fraction(str(value)) / Fraction(str(divisor))).denominator == 1


def _equal(a: object, b: object) -> bool:
    """Equal in JSON: true is not 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnknownLength(f"the bound {value!r}")
    return value


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UnknownLength(f"the count {value!r}")
    return value


def _common_multiple(a: float, b: float) -> float:
    first, second = Fraction(str(a)), Fraction(str(b))
    found = Fraction(math.lcm(first.numerator, second.numerator), math.gcd(first.denominator, second.denominator))
    return int(found) if found.denominator == 1 else float(found)


def _distinct(items: Sequence[Alternative]) -> list[Alternative]:
    found = {json.dumps(item, sort_keys=True): item for item in items}
    if len(found) > _MOST:
        raise UnknownLength("too many alternatives")
    return list(found.values())
